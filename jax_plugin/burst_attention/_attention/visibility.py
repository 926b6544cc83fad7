"""Masks as data: positions of rows, and the intervals of query positions that see each key.

A query at position p sees a key with the interval (start, stop) if start ≤ p < stop. Where
positions are data, the layout says nothing about the mask, so the ring is that of a full mask.
``is_causal`` and the window then narrow the intervals: a query at p sees the key at k if
p − left ≤ k ≤ p + right, so if k − right ≤ p < k + left + 1.

The stop of an interval that holds `LAST`, the greatest int32, is no int32. So where positions are
data, calls get all positions and intervals less 1. The least int32 then counts as the next one.
Slopes count differences of positions, which stay. Dropout draws by the positions themselves, so
beside dropout positions stay, and `LAST` counts as the position before it.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from burst_attention._attention.features import Features
from burst_attention._attention.options import NO_LIMIT, Options
from burst_attention._attention.ring import Ring
from burst_attention._batching import spread

FIRST, LAST = (int(x) for x in (np.iinfo(np.int32).min, np.iinfo(np.int32).max))


def positions(
    options: Options,
    features: Features,
    queries_of_layout: Int32[Array, " q_len"],
    keys_of_layout: Int32[Array, " kv_len"],
) -> tuple[Int32[Array, "#batch q_len"], Int32[Array, "#batch kv_len"]]:
    """Returns the positions of queries and keys, by arguments or by the layout."""
    queries, keys = features.query_positions, features.key_positions
    if queries is None:
        offset = options.query_offset
        offsets = jnp.int32(offset) if features.query_offset is None else features.query_offset
        queries = queries_of_layout[None] + jnp.reshape(offsets, (-1, 1))
        # Positions are not negative, so a negative sum with a positive offset is beyond int32.
        queries = jnp.where((offsets.reshape(-1, 1) > 0) & (queries < 0), LAST, queries)
    if keys is None:
        keys = keys_of_layout[None]
    return queries, keys


def completed(
    ring: Ring, qkv: tuple[jax.Array, jax.Array, jax.Array], features: Features
) -> Features:
    """Returns features with all positions and intervals that the ring's calls need.

    Calls get positions of queries where keys have intervals, and positions of both sides where
    slopes or dropout count by them. All calls of a mask without data stay as they are.
    """
    options, (query, key, _) = ring.options, qkv
    if not features.takes_data(options.query_offset):
        return features
    of_layout = (ring.positions(x.shape[1]) for x in (query, key))
    queries, keys = (
        jnp.broadcast_to(found, x.shape[:2])
        for found, x in zip(positions(options, features, *of_layout), (query, key), strict=True)
    )
    intervals = [x for x in (features.visible, features.also_visible) if x is not None]
    counts = features.alibi_slopes is not None or features.dropout is not None
    are_data = features.has_positions or options.query_offset != 0
    if are_data:
        less = 0 if features.dropout is not None else 1
        queries, keys, intervals = lowered(queries, keys, intervals, less)
    if features.has_positions:
        intervals = narrowed(options, keys, intervals)
    by_data = counts and are_data
    return features._replace(
        visible=intervals[0] if intervals else None,
        also_visible=intervals[1] if len(intervals) > 1 else None,
        query_positions=queries if intervals or by_data else None,
        key_positions=keys if by_data else None,
        query_offset=None,
    )


def lowered(
    queries: Int32[Array, "batch q_len"],
    keys: Int32[Array, "batch kv_len"],
    intervals: list[Int32[Array, "batch kv_len 2"]],
    less: int,
) -> tuple[
    Int32[Array, "batch q_len"], Int32[Array, "batch kv_len"], list[Int32[Array, "batch kv_len 2"]]
]:
    """Returns positions and intervals minus ``less``."""
    return (
        _below_last(queries, less),
        _below_last(keys, less),
        [_lowered(x, less) for x in intervals],
    )


def _below_last(x: Int32[Array, "batch seq"], less: int) -> Int32[Array, "batch seq"]:
    """Returns positions minus ``less``, clipped to those before `LAST`."""
    return jnp.clip(x, FIRST + less, LAST - 1 + less) - less


def _lowered(x: Int32[Array, "batch kv_len 2"], less: int) -> Int32[Array, "batch kv_len 2"]:
    """Returns intervals minus ``less``; those up to `LAST` have no end and keep it."""
    start, stop = x[..., :1], x[..., 1:]
    is_open = (stop == LAST) & (start < stop)
    lowered = jnp.maximum(x, FIRST + less) - less
    return jnp.concatenate([lowered[..., :1], jnp.where(is_open, LAST, lowered[..., 1:])], -1)


def narrowed(
    options: Options,
    keys: Int32[Array, "batch kv_len"],
    intervals: list[Int32[Array, "batch kv_len 2"]],
) -> list[Int32[Array, "batch kv_len 2"]]:
    """Returns intervals narrowed by the window around each key's position."""
    left, right = options.sides
    if left == right == NO_LIMIT:
        return intervals
    start, stop = jnp.full_like(keys, FIRST), jnp.full_like(keys, LAST)
    if NO_LIMIT < right <= LAST:
        start = jnp.where(keys < FIRST + right, FIRST, keys - right)
    if NO_LIMIT < left < LAST:
        stop = jnp.where(keys > LAST - 1 - left, LAST, keys + (left + 1))
    if not intervals:
        return [jnp.stack(spread([start, stop]), -1)]
    return [
        jnp.stack([jnp.maximum(x[..., 0], start), jnp.minimum(x[..., 1], stop)], -1)
        for x in intervals
    ]
