"""Linear attention over a mesh: inputs, results by name, and how far they may be off."""

import burst_attention as ba
import jax
import numpy as np
import ring
from jax.sharding import PartitionSpec as P
from linear_reference import recurrence

X = P(None, "context")
BOUNDS = {"o": 2e-6, "state": 2e-6}
"""Relative errors in float32; 1e-5 for gradients."""
ROUNDED = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
CASES = [
    # world, tokens per rank, heads, kv_heads, k_dim, v_dim, λ
    (1, 1, 2, 2, 8, 8, 1.0),
    (1, 4096, 2, 1, 16, 8, 0.5),
    (1, 200, 4, 4, 64, 64, 0.9),
    (2, 65, 4, 2, 32, 24, 0.99),
    (2, 1000, 2, 1, 16, 16, 0.6),
    (4, 100, 6, 2, 40, 16, 0.999),
    (8, 1, 2, 2, 8, 8, 0.7),
    (8, 130, 2, 1, 64, 128, 1.0),
    (8, 64, 4, 1, 256, 8, None),
]


def inputs(world, tokens, heads, kv_heads, k_dim, v_dim, decay, dtype="float32"):
    """q, k, v, log_decay, first and the cotangents dout, dlast; decays of None differ by token."""
    rows, state = (2, world * tokens), (2, heads, k_dim, v_dim)
    shapes = [(*rows, heads, k_dim), (*rows, kv_heads, k_dim), (*rows, kv_heads, v_dim)]
    q, k, v, dout = ring.normal(world, *shapes, (*rows, heads, v_dim), dtype=dtype)
    noise, first, dlast = ring.normal(tokens, (*rows, heads), state, state)
    # From decays that leave nothing after a few tokens to some that hardly decay.
    logs = -np.exp(3 * noise - 2) if decay is None else np.full_like(noise, np.log(decay))
    return q, k, v, logs, first, dout, dlast


def found(mesh, arrays, axes="context", **options):
    """What `recurrence` names."""
    *primals, dout, dlast = arrays
    shards = P(None, axes)

    def local(q, k, v, logs, first):
        out, state = ba.linear_attention(
            *(q, k, v),
            axis_name=axes,
            log_decay=logs,
            initial_state=first,
            return_state=True,
            **options,
        )
        return out, jax.lax.pmean(state, axes)

    function = jax.shard_map(
        local, mesh=mesh, in_specs=(shards,) * 4 + (P(),), out_specs=(shards, P())
    )

    @jax.jit
    def run(primals, cotangents):
        results, pullback = jax.vjp(function, *primals)
        return results, pullback(cotangents)

    results, gradients = run(tuple(primals), (dout, dlast))
    names = ("o", "state", "dq", "dk", "dv", "dlog_decay", "dfirst")
    return dict(zip(names, map(ring.on_host, results + gradients), strict=True))


def assert_right(got, arrays, dtype="float32", slack=1):
    for name, want in recurrence(*arrays).items():
        size = np.linalg.norm(want)
        error = np.linalg.norm(got[name].astype(np.float64) - want)
        bound = slack * BOUNDS.get(name, 1e-5)
        if dtype != "float32" and name in ("o", "dq", "dk", "dv"):
            bound = ROUNDED[dtype]
        assert error <= bound * size or size == error == 0, (name, error / size)
