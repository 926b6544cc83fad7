"""Attention and its gradients in float64, what rounding to 16 bits costs, and the bounds.

The cost of rounding is the error of the same computation, dense and in float64, that rounds what
every attention in 16 bits rounds: the inputs of each matrix product and the results.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .problem import Problem

BAR = 1.5
"""Our error may be so many times what rounding costs."""
UNITS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
ROUNDING = 0.42
"""Error of rounding to nearest, in the norm, in units of the type."""
MANTISSAS = {"bfloat16": 7, "float16": 10}
LSE = 1e-5
"""Largest error of lse, which is computed and kept in float32."""
GROWTH = 1.2
"""A ring's error may be so many times that of one rank."""


@dataclass(frozen=True)
class Exact:
    """Results by name, and what rounding costs in the norm of each."""

    results: dict[str, Any]
    cost: dict[str, float]


def exact(problem: Problem) -> Exact:
    """Of the problem's inputs; the ring does not matter."""
    return _exact(replace(problem, name="", layout="contiguous", world_size=1, backward="auto"))


@functools.lru_cache(maxsize=128)
def _exact(problem: Problem) -> Exact:
    """Computed where JAX computes.

    s = softmax_scale · q kᵀ;  lse = ln Σ eˢ;  p = e^(s − lse);  o = p v
    delta = rowsum(dout ∘ o) − dlse;  ds = p ∘ (dout vᵀ − delta)
    dv = pᵀ dout;  dq = softmax_scale · ds k;  dk = softmax_scale · dsᵀ q
    """
    arrays = problem.inputs()
    statics = (problem.is_causal, problem.softmax_scale, MANTISSAS[problem.dtype])
    with jax.enable_x64(True):
        given = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays.values()]
        results, rounded, spread = _jitted(statics, *given)
        results, rounded = jax.tree.map(np.asarray, (results, rounded))
    unit = ROUNDING * UNITS[problem.dtype]
    # What one run's rounding costs is chance where there are few numbers: hence the second term,
    # which is the expected norm if every product's terms are rounded independently.
    cost = {
        name: float(np.hypot(np.linalg.norm(x - results[name]), unit * float(spread[name])))
        for name, x in rounded.items()
    }
    return Exact(results, cost)


def judge(problem: Problem, found: dict[str, Any]) -> dict[str, Any]:
    """Errors, as multiples of what rounding costs (of lse as they are), and what is wrong."""
    wanted, errors, wrong = exact(problem), {}, []
    for name, got in found.items():
        true = wanted.results[name]
        dtype = np.dtype(np.float32) if name == "lse" else jnp.dtype(problem.dtype)
        if got.shape != true.shape or got.dtype != dtype:
            wrong.append(f"{name}: {got.dtype} {got.shape}, expected {dtype} {true.shape}")
            continue
        off = np.asarray(got, np.float64) - true
        if name == "lse":
            error, limit = float(np.abs(off).max()), LSE
        else:
            error, limit = float(np.linalg.norm(off)) / wanted.cost[name], BAR
        errors[name] = error
        if not error <= limit:
            unit = "" if name == "lse" else " × what rounding costs"
            wrong.append(f"{name}: error {error:.2g}{unit}, expected at most {limit:g}")
    return {"errors": errors, "bar": BAR, "wrong": wrong}


def shown(errors: dict[str, float]) -> str:
    """For people."""
    return "  ".join(f"{n} {e:.0e}" if n == "lse" else f"{n} {e:.2f}" for n, e in errors.items())


@functools.partial(jax.jit, static_argnums=0)
def _jitted(statics: tuple[bool, float, int], *arrays: jax.Array) -> Any:
    """Results, the same with roundings, and the norms of their terms."""
    q, k, v, dout, dlse = (x.swapaxes(1, 2) for x in arrays)
    batch, heads = q.shape[:2]
    group = heads // k.shape[1]
    keys, values = (jnp.repeat(x, group, axis=1) for x in (k, v))
    flat = [x.reshape(batch * heads, *x.shape[2:]) for x in (q, keys, values, dout, dlse)]
    found = lax.map(lambda row: _head(statics, *row), tuple(flat))

    def whole(name: str, x: jax.Array) -> jax.Array:
        x = x.reshape(batch, heads, *x.shape[1:])
        if name in ("dk", "dv"):
            x = x.reshape(batch, heads // group, group, *x.shape[2:]).sum(2)
        return x.swapaxes(1, 2)

    results, rounded, spread = ({n: whole(n, x) for n, x in part.items()} for part in found)
    rounded = {name: _round(statics[2], x) for name, x in rounded.items()}
    return results, rounded, {name: jnp.sqrt(x.sum()) for name, x in spread.items()}


def _head(
    statics: tuple[bool, float, int],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dout: jax.Array,
    dlse: jax.Array,
) -> tuple[dict[str, jax.Array], ...]:
    """One head: exact; with its products' inputs rounded; sums of the terms' squares."""
    is_causal, scale, mantissa = statics
    s = scale * (q @ k.T)
    if is_causal:
        s = jnp.where(jnp.tri(s.shape[0], s.shape[1], dtype=bool), s, -jnp.inf)
    top = s.max(-1, keepdims=True)
    weights = jnp.exp(s - top)
    total = weights.sum(-1, keepdims=True)
    p = weights / total
    o, dp = p @ v, dout @ v.T

    def gradients(o: jax.Array, round_to: Any) -> dict[str, jax.Array]:
        delta = (dout * o).sum(-1) - dlse
        ds = round_to(p * (dp - delta[:, None]))
        return {"dq": scale * (ds @ k), "dk": scale * (ds.T @ q), "dv": round_to(p).T @ dout}

    def round_to(x: jax.Array) -> jax.Array:
        return _round(mantissa, x)

    results = {"o": o, "lse": (top + jnp.log(total))[:, 0], **gradients(o, lambda x: x)}
    rounded = {"o": round_to(weights) @ v / total, **gradients(round_to(o), round_to)}
    delta = (dout * o).sum(-1) - dlse
    ds = scale * p * (jnp.abs(dp) + jnp.abs(delta)[:, None])
    spread = {"o": p**2 @ v**2, "dv": (p**2).T @ dout**2}
    spread |= {"dq": ds**2 @ k**2, "dk": (ds**2).T @ q**2}
    return results, rounded, spread


def _round(mantissa: int, x: jax.Array) -> jax.Array:
    # A cast to and fro may be optimised away.
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=mantissa)
