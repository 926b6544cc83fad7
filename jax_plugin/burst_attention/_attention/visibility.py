"""Masks as data: positions of rows, and the intervals of query positions that see each key.

A query at position p sees a key with the interval (start, stop) if start ≤ p < stop. Where
positions are data, the layout says nothing about the mask, so the ring is that of a full mask.
``is_causal`` and the window then narrow the intervals: a query at p sees the key at k if
p − left ≤ k ≤ p + right, so if k − right ≤ p < k + left + 1.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from burst_attention._attention.features import Features
from burst_attention._attention.options import NO_LIMIT, Options
from burst_attention._attention.ring import Ring

FIRST, LAST = (int(x) for x in (np.iinfo(np.int32).min, np.iinfo(np.int32).max))


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
    batch = query.shape[0]
    queries, keys = features.query_positions, features.key_positions
    if queries is None:
        offset = options.query_offset if features.query_offset is None else features.query_offset
        offsets = jnp.broadcast_to(jnp.asarray(offset, jnp.int32), (batch,))
        queries = ring.positions(query.shape[1]) + offsets[:, None]
    if keys is None:
        keys = jnp.broadcast_to(ring.positions(key.shape[1]), (batch, key.shape[1]))
    intervals = [x for x in (features.visible, features.also_visible) if x is not None]
    if features.has_positions:
        intervals = _narrowed(options, keys, intervals)
    counts = features.alibi_slopes is not None or features.dropout is not None
    by_data = counts and (features.has_positions or options.query_offset != 0)
    return features._replace(
        visible=intervals[0] if intervals else None,
        also_visible=intervals[1] if len(intervals) > 1 else None,
        query_positions=queries if intervals or by_data else None,
        key_positions=keys if by_data else None,
        query_offset=None,
    )


def _narrowed(
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
        return [jnp.stack([start, stop], -1)]
    return [
        jnp.stack([jnp.maximum(x[..., 0], start), jnp.minimum(x[..., 1], stop)], -1)
        for x in intervals
    ]
