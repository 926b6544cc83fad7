"""Writes new tokens into a sharded cache."""

from functools import partial
from typing import TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from burst_attention._attention.options import AnyArray
from burst_attention._batching import mapped_on_devices
from burst_attention._decode import arguments
from burst_attention._decode.geometry import Geometry
from burst_attention._decode.options import CacheLayout, Integers
from burst_attention._mesh import explicit_axes, vary_like
from burst_attention._types import Axes, X


class _Options(TypedDict, total=False):
    query_lengths: Integers | None
    axis_name: str | Axes | None
    layout: CacheLayout
    interleave: int | None
    page_table: Int[AnyArray, "batch pages_per_sequence"] | None


@overload
def append_to_cache(
    key_cache: X, value_cache: X, key: X, value: X, lengths: Integers, **options: Unpack[_Options]
) -> tuple[X, X]: ...
@overload
def append_to_cache(
    key_cache: X,
    value_cache: None,
    key: X,
    value: None,
    lengths: Integers,
    **options: Unpack[_Options],
) -> tuple[X, None]: ...


def append_to_cache(
    key_cache: Float[Array, "batch capacity kv_heads head_dim"],
    value_cache: Float[Array, "batch capacity kv_heads value_dim"] | None,
    key: Float[Array, "batch T kv_heads head_dim"],
    value: Float[Array, "batch T kv_heads value_dim"] | None,
    lengths: Integers,
    *,
    query_lengths: Integers | None = None,
    axis_name: str | Axes | None = None,
    layout: CacheLayout = "striped",
    interleave: int | None = None,
    page_table: Int[AnyArray, "batch pages_per_sequence"] | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Writes the keys and values of new tokens into a cache that is sharded across devices.

    Token t of entry b goes to position lengths[b] − query_lengths[b] + t, at which
    `decode_attention` with the same ``lengths`` has query t. So lengths count the new tokens::

        lengths += 1
        key_cache, value_cache = ba.append_to_cache(key_cache, value_cache, key, value, lengths)
        out = ba.decode_attention(query, key_cache, value_cache, lengths)

    Each device writes the tokens whose positions it holds. In a loop, or where the caches are
    donated to the program, XLA writes in place. Tokens beyond ``query_lengths``, before position 0,
    beyond the capacity, or on a page that does not exist are not written. Two sequences that share
    a page must not write to it in one call.

    Args:
      key_cache: ``[batch, capacity, kv_heads, head_dim]``, this device's rows, or with
        ``page_table`` ``[pages, page, kv_heads, head_dim]``.
      value_cache: as key_cache, with a value_dim of its own; None where the values are columns of
        the keys, as those of latents are.
      key: ``[batch, T, kv_heads, head_dim]``, new tokens, of the cache's dtype and the same on all
        devices along ``axis_name``. T is any number.
      value: ``[batch, T, kv_heads, value_dim]``; None with value_cache None.
      lengths, query_lengths, axis_name, layout, interleave, page_table: as in `decode_attention`.

    Returns:
      ``(key_cache, value_cache)``, varying over ``axis_name`` as caches do; value_cache None
      stays None.

    Raises:
      ValueError, TypeError: while tracing, with the way out.
    """
    place = arguments.ranks("append_to_cache", axis_name)
    if (value_cache is None) != (value is None):
        missing = "value_cache" if value_cache is None else "value"
        raise ValueError(
            "value_cache and value must both be arrays or both be None, got None for "
            f"{missing} alone; where the values are columns of the keys, both are None"
        )
    new = {"key": arguments.new_tokens("key", key)}
    if value is not None:
        new["value"] = arguments.new_tokens("value", value)
    named = {"key_cache": key_cache, "value_cache": value_cache}
    cache = arguments.caches(new["key"], named, page_table, place, layout, interleave)
    batch, tokens = new["key"].shape[:2]
    values = new.get("value")
    for name, x, held in (("key", new["key"], cache.key), ("value", values, cache.value)):
        if x is not None and held is not None:
            arguments.check_new(name, x, (batch, tokens), f"{name}_cache", held)
    found = arguments.sequences(lengths, query_lengths, batch, tokens)
    place.check_same(**new, lengths=found.lengths, query_lengths=found.counts)
    write = partial(_written, place, cache.interleave)
    arrays = (
        cache.key,
        cache.value,
        cache.page_table,
        new["key"],
        values,
        found.starts,
        found.counts,
    )
    # JAX's own vmap over Explicit axes does not index arrays that it leaves whole.
    return mapped_on_devices(write, *arrays) if explicit_axes(*new.values()) else write(*arrays)


def _written(
    place: arguments.Ranks,
    interleave: int,
    keys: Float[Array, "pages page kv_heads head_dim"],
    values: Float[Array, "pages page kv_heads value_dim"] | None,
    page_table: Int32[Array, "sources columns"],
    key: Float[Array, "batch T kv_heads head_dim"],
    value: Float[Array, "batch T kv_heads value_dim"] | None,
    starts: Int32[Array, " batch"],
    counts: Int32[Array, " batch"],
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the caches with the new tokens of which this rank holds the positions."""
    pages, page = keys.shape[:2]
    index = jnp.arange(key.shape[1], dtype=jnp.int32)[None]
    positions = starts[:, None] + index
    in_use = (index < counts[:, None]) & (positions >= 0)
    geometry = Geometry(interleave, place.world_size, page_table.shape[1] * page)
    owner, row = geometry.place(positions)
    ids = jnp.take_along_axis(page_table, row // max(page, 1), axis=1, mode="clip")
    written = in_use & (owner == place.rank()) & (row < geometry.capacity) & (ids >= 0)
    # A token without a place goes beyond the last page, where nothing is written.
    target = (jnp.where(written, ids, pages), row % max(page, 1))
    arrays = (keys, values, key, value, target)
    keys, values, key, value, target = vary_like((place.rank(), arrays), arrays)
    keys = keys.at[target].set(key, mode="drop")
    return keys, None if values is None else values.at[target].set(value, mode="drop")
