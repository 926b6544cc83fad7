"""Checks linear attention on one GPU against float64, and times it against plain JAX."""

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
from gpu.speed import wall_milliseconds
from jax.sharding import PartitionSpec as P
from linear_programs import CHUNKS, chunked
from linear_reference import recurrence  # type: ignore[import-not-found]

from . import ours

BARS = {"bfloat16": 2.0**-7, "float16": 2.0**-10}
"""The largest error of a result in its norm; weights, states and results are each rounded once."""
SECONDS = 4.0
"""Seconds for the rounds of a comparison, about."""
SHAPES = {
    # batch, tokens, heads, kv_heads, k_dim, v_dim, log decays in base e
    "decays of 0.99": (1, 1500, 4, 2, 64, 64, 0.01),
    "no decay, wide": (1, 700, 2, 1, 128, 256, 0.0),
    "narrow and strong": (2, 900, 4, 4, 8, 24, 2.0),
}
LONG = "32K tokens, 16 heads of 128"
RESULTS = ("o", "state", "dq", "dk", "dv", "dlog_decay")
Arrays = list[np.ndarray]


class Linear:
    """Items for the errors, and one item for the time."""

    def names(self, rehearse: bool) -> list[str]:
        """Returns the names of the items."""
        types = list(BARS)[:1] if rehearse else list(BARS)
        return [*(f"{shape}, {dtype}" for shape in SHAPES for dtype in types), LONG]

    def measure(self, name: str, rehearse: bool) -> dict[str, Any]:
        """Returns the errors, or the times, of one item."""
        if name == LONG:
            return _times(512 if rehearse else 32768, 2 if rehearse else 16)
        shape, dtype = name.rsplit(", ", 1)
        batch, tokens, *sizes = SHAPES[shape]
        return _errors(name, dtype, (batch, tokens // (10 if rehearse else 1), *sizes))


def _inputs(dtype: Any, shape: tuple[Any, ...]) -> Arrays:
    """Returns rounded q, k, v and dout, and random log decays of each token up to a given size."""
    batch, tokens, heads, kv_heads, k_dim, v_dim, decay = shape
    random = np.random.default_rng(0)
    sizes = [(heads, k_dim), (kv_heads, k_dim), (kv_heads, v_dim), (heads, v_dim)]
    q, k, v, dout = (
        np.asarray(jnp.asarray(random.standard_normal((batch, tokens, *of)), dtype)) for of in sizes
    )
    logs = -decay * random.random((batch, tokens, heads)).astype(np.float32)
    return [q, k, v, logs, dout]


def _attend(q: Any, k: Any, v: Any, logs: Any) -> Any:
    return ba.linear_attention(q, k, v, axis_name="context", log_decay=logs, return_state=True)


def _passes() -> Callable[..., Any]:
    """Returns a function that computes o, the last state and all gradients."""
    function = jax.shard_map(
        _attend,
        mesh=ours.line(1),
        in_specs=(P(None, "context"),) * 4,
        out_specs=(P(None, "context"), P("context")),
    )

    def both(*arrays: jax.Array) -> Any:
        *inputs, dout = arrays
        (out, state), pullback = jax.vjp(function, *inputs)
        return (out, state, *pullback((dout, jnp.zeros_like(state))))

    return jax.jit(both)


def _errors(name: str, dtype: str, shape: tuple[Any, ...]) -> dict[str, Any]:
    arrays = _inputs(dtype, shape)
    run = _passes()
    first, again = (jax.tree.map(np.asarray, run(*arrays)) for _ in range(2))
    *inputs, dout = arrays
    zero = np.zeros(first[1].shape)
    exact = recurrence(*inputs, zero, dout, zero)
    errors, wrong = {}, []
    for result, x, y in zip(RESULTS, first, again, strict=True):
        want = exact[result]
        errors[result] = float(np.linalg.norm(x.astype(np.float64) - want) / np.linalg.norm(want))
        if not errors[result] <= BARS[dtype]:
            wrong.append(f"{result}: error {errors[result]:.1e}, expected {BARS[dtype]:.1e}")
        if x.tobytes() != y.tobytes():
            wrong.append(f"{result}: differs between two runs")
    shown = "  ".join(f"{result} {error:.1e}" for result, error in errors.items())
    return {"name": name, "shown": shown, "errors": errors, "wrong": wrong}


def _times(tokens: int, heads: int) -> dict[str, Any]:
    """Times forward and backward against plain JAX at its best chunk, in bfloat16."""
    arrays = [
        jax.device_put(x) for x in _inputs("bfloat16", (1, tokens, heads, heads, 128, 128, 0.01))
    ]

    def plain(chunk: int, *arrays: jax.Array) -> Any:
        *inputs, dout = arrays
        out, pullback = jax.vjp(partial(chunked, chunk, again=True), *inputs)
        return out, pullback(dout.astype(out.dtype))

    programs: dict[str, Callable[..., Any]] = {
        f"plain JAX, chunks of {c}": jax.jit(partial(plain, c)) for c in CHUNKS
    }
    programs["ours"] = _passes()

    def runs(program: Callable[..., Any]) -> Callable[[], None]:
        def run() -> None:
            jax.block_until_ready(program(*arrays))

        return run

    taken = wall_milliseconds({name: runs(each) for name, each in programs.items()}, SECONDS)
    times = {name: median(each) for name, each in taken.items()}
    best = min(ms for name, ms in times.items() if name != "ours")
    shown = f"{times['ours']:.2f} ms, {best / times['ours']:.2f} × as fast as plain JAX's best"
    return {"name": LONG, "shown": shown, "ms": times, "wrong": []}
