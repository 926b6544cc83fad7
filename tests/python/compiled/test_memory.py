"""XLA plans the memory that the package declares, and it grows with a device's shard alone."""

from dataclasses import replace

import burst_attention as ba
import jax
import jax.numpy as jnp
import programs
import pytest
import topology
from burst_attention import _ffi
from jax.sharding import PartitionSpec as P
from programs import CAUSAL, HEAD_DIM, HEADS, LAYERS, TOKENS, WIDTH

SMALL = 8192
"""Bytes that XLA adds for its own constants and for alignment."""
RANKS, HEAD_LARGE = 8, 128


@pytest.mark.parametrize(
    ("heads", "kv_heads", "figure"), [(64, 8, 8.8), (32, 8, 11.6), (32, 32, 23.1)]
)
def test_a_call_takes_what_the_package_declares(monkeypatch, heads, kv_heads, figure):
    """Both passes take inputs, results, one workspace at a time, lse and its gradient.

    `docs/gpus.md` has the figures, as multiples of a tensor like q.
    """
    declared, ask = {}, _ffi.workspace_bytes

    def recorded(**problem):
        return declared.setdefault(problem["pass"], ask(**problem))

    monkeypatch.setattr(_ffi, "workspace_bytes", recorded)
    mesh, spec = topology.mesh("H200", (("context", RANKS),)), P(None, "context")

    def local(q, k, v):
        return ba.attention(q, k, v, axis_name="context", **CAUSAL)

    attend = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)

    def run(q, k, v, dout):
        out, pullback = jax.vjp(attend, q, k, v)
        return out, pullback(dout)

    rows = 8192
    shapes = [(1, RANKS * rows, count, HEAD_LARGE) for count in (heads, kv_heads, kv_heads, heads)]
    inputs = [programs.placed(mesh, shape, jnp.bfloat16, spec) for shape in shapes]
    memory = jax.jit(run).lower(*inputs).compile().memory_analysis()
    q, kv, lse = (rows * 2 * HEAD_LARGE * heads, rows * 2 * HEAD_LARGE * kv_heads, rows * 4 * heads)
    assert memory.argument_size_in_bytes == 2 * q + 2 * kv
    assert 0 <= memory.output_size_in_bytes - (2 * q + 2 * kv) <= SMALL
    workspace = max(declared.values())
    assert 0 <= memory.temp_size_in_bytes - (workspace + 2 * lse) <= SMALL
    assert (4 * q + 4 * kv + workspace + 2 * lse) / q == pytest.approx(figure, abs=0.05)


@pytest.mark.parametrize("name", ["ring", "linear"])
def test_memory_of_a_step_grows_with_the_shard(name):
    """Twice as many tokens take twice the memory, for the same weights."""
    once = programs.compiled(name).memory_analysis()
    step = programs.STEPS[name]
    twice = replace(step, tokens=2 * TOKENS).compiled().memory_analysis()
    # Linear attention cuts tokens into parts, whose number is rounded.
    assert twice.temp_size_in_bytes <= 2.02 * once.temp_size_in_bytes
    rows = twice.argument_size_in_bytes - once.argument_size_in_bytes
    assert rows == TOKENS * WIDTH * 2


def test_memory_does_not_grow_with_the_ring():
    few, many = (programs.compiled(name).memory_analysis() for name in ("ring", "64 H200"))
    assert many.temp_size_in_bytes <= few.temp_size_in_bytes + SMALL


def test_a_step_keeps_one_out_and_one_lse_of_each_layer():
    """Of a layer, `save_attention` keeps out and lse besides its rows."""
    saved, recomputed = (
        programs.compiled(name).memory_analysis() for name in ("saved", "recomputed")
    )
    kept = LAYERS * TOKENS * HEADS * (HEAD_DIM * 2 + 4)
    more = saved.temp_size_in_bytes - recomputed.temp_size_in_bytes
    assert abs(more - kept) <= SMALL
