"""Attention and its gradients in float64, the cost of rounding to 16 bits, and the bounds.

The cost of rounding is the error of the same computation, dense and in float64, that rounds what
every attention in 16 bits rounds: the inputs of each matrix product and the results. Since it needs
every intermediate result, the exact ones are computed along with it, on the device; a test compares
them with the reference of the tests, tests/python/reference.py.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import philox  # type: ignore[import-not-found]
from jax import lax

from .plain import by_head, exponentials, scores
from .problem import PER_HEAD, Problem

BAR = 1.5
"""The largest ratio of our error to the cost of rounding."""
UNITS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
ROUNDING = 0.42
"""The error of rounding to nearest, in the norm, in units of the type."""
MANTISSAS = {"bfloat16": 7, "float16": 10}
PRODUCTS = 4e-6
"""The error of a long sum of float32 products, relative to the sum of absolute values."""
LSE = 1e-5
"""The largest error of lse, which is float32."""
GROWTH = 1.2
"""The largest ratio of a ring's error to that of one rank."""


@dataclass(frozen=True)
class Exact:
    """Results by name, and the cost of rounding in the norm of each."""

    results: dict[str, Any]
    cost: dict[str, float]


def exact(problem: Problem) -> Exact:
    """Returns the exact results of the problem's inputs, which do not depend on the ring."""
    alone = problem.on_one_rank()
    return _exact(replace(alone, name="", layout="contiguous", backward="auto"))


@functools.lru_cache(maxsize=128)
def _exact(problem: Problem) -> Exact:
    """Computes on JAX's device, from scores s of `plain.scores`:

    lse = ln (Σ eˢ + e^sink);  p = e^(s − lse);  w = p ∘ kept / (1 − rate);  o = w v
    delta = rowsum(dout ∘ o) − dlse;  ds = w ∘ dout vᵀ − p ∘ delta
    dslope = Σ ds · (key position − query position);  dsink = −Σ e^(sink − lse) delta
    with a cap: ds ∘= 1 − tanh²
    dv = wᵀ dout;  dq = softmax_scale · ds k;  dk = softmax_scale · dsᵀ q
    """
    arrays = problem.inputs()
    words = arrays.pop("dropout_key", None)
    if problem.dropout:
        arrays["kept"] = _kept(problem, words)
    wide = {
        n: x if x.dtype in (np.int32, bool) else x.astype(np.float64) for n, x in arrays.items()
    }
    with jax.enable_x64(True):
        results, rounded, spread = _jitted(problem, {n: jnp.asarray(x) for n, x in wide.items()})
        results, rounded = jax.tree.map(np.asarray, (results, rounded))
    unit = ROUNDING * UNITS[problem.dtype]
    # With few numbers, the cost of one run's rounding is chance. The second term is the expected
    # norm if every term of a product is rounded independently.
    cost = {
        name: float(np.hypot(np.linalg.norm(_off(x, results[name])), unit * float(spread[name])))
        for name, x in rounded.items()
    }
    for name in PER_HEAD.values():
        if name in cost:  # float32, where the cost of rounding o may almost vanish
            cost[name] += PRODUCTS * float(spread["terms of " + name])
    return Exact(results, cost)


def _kept(problem: Problem, words: Any) -> Any:
    """Returns whether dropout keeps each weight, [batch, queries, heads, keys], as in the tests."""

    places = np.arange(problem.seq), np.arange(problem.kv_shape[1])
    kept = [
        [philox.kept(problem.dropout, words, b, h, *places) for h in range(problem.heads)]
        for b in range(problem.batch)
    ]
    return np.array(kept).swapaxes(1, 2)


def _off(found: Any, true: Any) -> Any:
    """Returns differences, 0 where both are −inf, as is lse of a row that sees no key."""
    nothing = np.isneginf(true) & np.isneginf(found)
    return np.where(nothing, 0, found) - np.where(nothing, 0, true)


def judge(problem: Problem, found: dict[str, Any]) -> dict[str, Any]:
    """Returns the errors, in units of the cost of rounding (absolute for lse), and all faults."""
    wanted, errors, wrong = exact(problem), {}, []
    for name, got in found.items():
        true = wanted.results[name]
        narrow = name != "lse" and name not in PER_HEAD.values()
        dtype = jnp.dtype(problem.dtype if narrow else np.float32)
        if got.shape != true.shape or got.dtype != dtype:
            wrong.append(f"{name}: {got.dtype} {got.shape}, expected {dtype} {true.shape}")
            continue
        off = _off(np.asarray(got, np.float64), true)
        if name == "lse":
            error, limit = float(np.abs(off).max()), LSE
        else:
            error, limit = float(np.linalg.norm(off)) / wanted.cost[name], BAR
        errors[name] = error
        if not error <= limit:
            unit = "" if name == "lse" else " × the cost of rounding"
            wrong.append(f"{name}: error {error:.2g}{unit}, expected at most {limit:g}")
    return {"errors": errors, "bar": BAR, "wrong": wrong}


def shown(errors: dict[str, float]) -> str:
    """Returns the errors in words, for tables."""
    return "  ".join(f"{n} {e:.0e}" if n == "lse" else f"{n} {e:.2f}" for n, e in errors.items())


Named = dict[str, jax.Array]


@functools.partial(jax.jit, static_argnums=0)
def _jitted(problem: Problem, arrays: Named) -> tuple[Named, Named, Named]:
    """Returns results, results with rounding, and the norms of their terms."""
    batch, heads = problem.batch, problem.heads
    group = heads // problem.kv_heads
    flat = {
        name: _of_each_head(problem, name, by_head(name, x, group)) for name, x in arrays.items()
    }
    found = lax.map(functools.partial(_head, problem), flat)

    def whole(name: str, x: jax.Array) -> jax.Array:
        x = x.reshape(batch, heads, *x.shape[1:])
        if name in PER_HEAD.values():
            return x.sum(0)
        if name in ("dk", "dv"):
            x = x.reshape(batch, heads // group, group, *x.shape[2:]).sum(2)
        return x.swapaxes(1, 2)

    results, rounded = ({n: whole(n, x) for n, x in part.items()} for part in found[:2])
    narrow = {"o", "dq", "dk", "dv"}
    rounded = {n: _round(problem, x) if n in narrow else x for n, x in rounded.items()}
    spread = {
        n: jnp.linalg.norm(x.reshape(batch, heads).sum(0))
        if n.startswith("terms")
        else jnp.sqrt(x.sum())
        for n, x in found[2].items()
    }
    return results, rounded, spread


def _of_each_head(problem: Problem, name: str, x: jax.Array) -> jax.Array:
    """Returns an array [batch · heads, …]."""
    batch, heads = problem.batch, problem.heads
    if name in PER_HEAD:
        return jnp.tile(x, batch)
    if x.ndim == 2:  # ids
        return jnp.repeat(x, heads, axis=0)
    return x.reshape(batch * heads, *x.shape[2:])


def _head(problem: Problem, of: Named) -> tuple[Named, Named, Named]:
    """Computes one head: exact, with rounded inputs of products, and sums of squared terms."""
    q, k, v, dout, dlse = (of[name] for name in ("q", "k", "v", "dout", "dlse"))
    scale = problem.softmax_scale
    places = jnp.arange(problem.seq), jnp.arange(problem.kv_shape[1])
    s, cap_slope, distance = scores(problem, of, *places)
    weights, total, top = exponentials(problem, s, of)
    some = jnp.where(total > 0, total, 1)
    p, lse = weights / some, (top + jnp.log(total))[:, 0]
    kept: Any = 1.0
    if problem.dropout:
        kept = of["kept"] / (1 - np.float64(np.float32(problem.dropout)))
    o, dp = (p * kept) @ v, kept * (dout @ v.T)
    share = jnp.exp(of["sinks"] - lse) if problem.sinks else None

    def gradients(o: jax.Array, round_to: Any) -> Named:
        delta = (dout * o).sum(-1) - dlse
        ds = p * (dp - delta[:, None])
        found = {}
        if share is not None:
            found["dz"] = -(share * delta).sum()
        if problem.slopes:
            found["dslopes"] = (ds * distance).sum()
        ds = round_to(ds * cap_slope)
        found |= {"dq": scale * (ds @ k), "dk": scale * (ds.T @ q)}
        return found | {"dv": round_to(p * kept).T @ dout}

    def round_to(x: jax.Array) -> jax.Array:
        return _round(problem, x)

    results = {"o": o, "lse": lse, **gradients(o, lambda x: x)}
    near = round_to(weights * kept) @ v / some
    if share is not None:  # the sink joins rows that are rounded
        left = 1 - share[:, None]
        near = round_to(near / jnp.where(left > 0, left, 1)) * left
    rounded = {"o": near, **gradients(round_to(o), round_to)}
    delta = (dout * o).sum(-1) - dlse
    absolute = p * (jnp.abs(dp) + jnp.abs(delta)[:, None])
    ds, w = scale * cap_slope * absolute, p * kept
    spread = {"o": w**2 @ v**2, "dv": (w**2).T @ dout**2}
    spread |= {"dq": ds**2 @ k**2, "dk": (ds**2).T @ q**2}
    of_delta = ((dout * o) ** 2).sum(-1)
    if share is not None:
        spread |= {"dz": (share**2 * of_delta).sum(), "terms of dz": (share * jnp.abs(delta)).sum()}
    if problem.slopes:
        far = jnp.abs(distance)
        spread["dslopes"] = ((p * distance).sum(-1) ** 2 * of_delta).sum()
        spread["terms of dslopes"] = (absolute * far).sum()
    return results, rounded, spread


def _round(problem: Problem, x: jax.Array) -> jax.Array:
    # The compiler may remove a cast to and fro.
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=MANTISSAS[problem.dtype])
