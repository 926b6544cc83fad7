"""Attention without a ring, in plain JAX: stand-in of a rehearsal, and scores of the reference."""

from typing import Any

import burst_attention as ba
import jax
import jax.numpy as jnp
from jax import lax

from .problem import Problem

BATCHED = ("q", "k", "v", "q_segments", "kv_segments")
GROUPED = ("k", "v")


def scores(
    problem: Problem, of: dict[str, jax.Array], q_positions: jax.Array, kv_positions: jax.Array
) -> tuple[jax.Array, Any, jax.Array]:
    """Returns the scores of a head's queries and keys at these positions, −inf where masked::

        s = softmax_scale · q kᵀ;  capped: soft_cap · tanh(s / soft_cap)
        s += slope · (key position − query position)

    Also returns the cap's derivative, and the distances, key position − query position.
    """
    s = problem.softmax_scale * (of["q"] @ of["k"].T)
    cap_slope: Any = 1.0
    if problem.soft_cap:
        bent = jnp.tanh(s / problem.soft_cap)
        s, cap_slope = problem.soft_cap * bent, 1 - bent**2
    distance = kv_positions[None, :] - q_positions[:, None]
    left, right = problem.reach
    seen = (distance >= -left) & (distance <= right)
    if problem.slopes:
        s += of["alibi_slopes"] * distance
    if problem.segments:
        ids = of["q_segments"][:, None]
        seen &= (ids == of["kv_segments"][None, :]) & (ids >= 0)
    return jnp.where(seen, s, -jnp.inf), cap_slope, distance


def exponentials(
    problem: Problem, s: jax.Array, of: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns e^(s − top), their sums with the sink's, and top, 0 for rows that see no key."""
    top = s.max(-1, keepdims=True)
    if problem.sinks:
        top = jnp.maximum(top, of["sinks"])
    top = lax.stop_gradient(jnp.where(jnp.isneginf(top), 0, top))
    weights = jnp.exp(s - top)
    total = weights.sum(-1, keepdims=True)
    if problem.sinks:
        total += jnp.exp(of["sinks"] - top)
    return weights, total, top


def dense(
    problem: Problem, given: dict[str, jax.Array], q_positions: jax.Array, kv_positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns o in the type of q, and lse, without dropout, for rows at these positions."""

    def head(of: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        s, _, _ = scores(problem, of, q_positions, kv_positions)
        weights, total, top = exponentials(problem, s, of)
        some = jnp.where(total > 0, total, 1)
        lse = jnp.where(total > 0, top + jnp.log(some), -jnp.inf)
        return weights @ of["v"] / some, lse[:, 0]

    group = given["q"].shape[2] // given["k"].shape[2]
    wide = {name: by_head(name, x, group) for name, x in given.items()}
    rows = {name: 0 if name in BATCHED else None for name in wide}
    heads = {name: None if name.endswith("segments") else 0 for name in wide}
    o, lse = jax.vmap(jax.vmap(head, (heads,)), (rows,))(wide)
    return o.swapaxes(1, 2).astype(given["q"].dtype), lse.swapaxes(1, 2)


def by_head(name: str, x: jax.Array, group: int) -> jax.Array:
    """Returns [batch, heads, seq, …] in float32 or wider, with keys and values per query head."""
    if x.ndim < 3:
        return x
    x = x.swapaxes(1, 2).astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.repeat(x, group, axis=1) if name in GROUPED else x


def gathered(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis_name: str | tuple[str, ...],
    is_causal: bool = False,
    local_window_size: tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    segment_ids: tuple[jax.Array, jax.Array] | None = None,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    layout: Any = "contiguous",
    schedule: str = "auto",
    backward: str = "auto",
    backward_order: str = "fixed",
    return_residual: bool = False,
) -> Any:
    """Stands for `burst_attention.attention`: gathers keys and values of the whole sequence."""
    del schedule, backward, backward_order  # no chunk travels here
    size = lax.axis_size(axis_name)
    given = {"q": q, "k": k, "v": v}
    extras = {"sinks": sinks, "alibi_slopes": alibi_slopes}
    extras |= dict(zip(("q_segments", "kv_segments"), segment_ids or (None, None), strict=True))
    given |= {name: x for name, x in extras.items() if x is not None}
    of_keys = [name for name in ("k", "v", "kv_segments") if name in given]
    given |= {n: lax.all_gather(given[n], axis_name, axis=1, tiled=True) for n in of_keys}
    problem = Problem(
        "",
        *(q.shape[0], size * q.shape[1], q.shape[2], k.shape[2], q.shape[3]),
        is_causal=is_causal,
        kv_seq=size * k.shape[1],
        window=local_window_size,
        soft_cap=logits_soft_cap,
        segments="given" if segment_ids else None,
        slopes=alibi_slopes is not None,
        sinks=sinks is not None,
    )
    places = [ba.local_positions(x.shape[1], axis_name=axis_name, layout=layout) for x in (q, k)]
    places[1] = lax.all_gather(places[1], axis_name, tiled=True)
    o, lse = dense(problem, given, *places)
    return (o, lse) if return_residual else o
