"""The programs of a pool's devices: new tokens enter the caches, and attend over them."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from burst_attention._attention.arguments import MAX_INT32
from burst_attention._attention.options import NO_LIMIT, check_options
from burst_attention._attention.shards import attention
from burst_attention._decode import arguments
from burst_attention._decode.append import append_to_cache
from burst_attention._decode.attention import decode_attention
from burst_attention._decode.geometry import Geometry
from burst_attention._decode.options import CacheLayout
from burst_attention._decode.prefix import shared_prefix_attention
from burst_attention._mesh import axis_name_of
from burst_attention._types import Axes

Cache: TypeAlias = tuple[jax.Array, jax.Array | None]
"""Keys and values of a layer; of latents, keys alone."""
Data: TypeAlias = dict[str, jax.Array]
"""Arrays of a call besides tokens and caches, by the names of their options."""


class Place(NamedTuple):
    """The devices of a pool, and how sequences lie on them."""

    mesh: Mesh
    axes: Axes
    layout: CacheLayout
    interleave: int | None

    @property
    def options(self) -> dict[str, Any]:
        """Returns the arguments of calls on one device that say it."""
        named = {"axis_name": axis_name_of(self.axes), "layout": self.layout}
        return named | {"interleave": self.interleave}

    def spec(self, is_paged: bool) -> P:
        """Returns how caches of rows or of pages are cut."""
        return P(self.axes) if is_paged else P(None, self.axes)

    def cache(self, is_paged: bool) -> NamedSharding:
        """Returns the sharding of caches."""
        return NamedSharding(self.mesh, self.spec(is_paged))

    @property
    def whole(self) -> NamedSharding:
        """Returns the sharding of arrays that every device has."""
        return NamedSharding(self.mesh, P())

    def tokens(self, count: int) -> NamedSharding:
        """Returns the sharding in which a chunk of a prompt lands."""
        return self.whole if count % self.mesh.size else NamedSharding(self.mesh, P(None, self.axes))


class Call(NamedTuple):
    """Everything static about a call."""

    place: Place
    is_prefill: bool
    is_paged: bool
    with_lse: bool
    options: tuple[tuple[str, Any], ...]
    """Options that are no arrays."""
    results: tuple[Sharding, ...]
    """Shardings of out and, if asked for, lse, as they leave the pool."""


@cache
def program(call: Call) -> Callable[..., tuple[tuple[jax.Array, ...], Cache]]:
    """Returns the program of a call.

    It maps caches, tokens, lengths, data and the caches of prefixes to out and, if asked for, lse,
    and to the caches, in place of those that it got.
    """
    place = call.place
    caches, tokens = place.spec(call.is_paged), P(None, place.axes) if call.is_prefill else P()
    local = jax.shard_map(
        partial(_prefill if call.is_prefill else _step, call),
        mesh=place.mesh,
        in_specs=(caches, tokens, P(), P(), place.spec(False)),
        out_specs=(tokens, caches),
    )

    def run(
        cache: Cache,
        tokens: tuple[jax.Array, ...],
        lengths: jax.Array,
        data: Data,
        prefix: tuple[jax.Array, ...],
    ) -> tuple[tuple[jax.Array, ...], Cache]:
        if not call.is_prefill:
            return local(cache, tokens, lengths, data, prefix)
        count = tokens[0].shape[1]
        # Tokens beyond those in use see nothing, and nothing is written for them.
        data = {"query_lengths": jnp.full(lengths.shape, count, jnp.int32)} | data
        results, cache = local(cache, _padded(tokens, place.mesh.size), lengths, data, prefix)
        return tuple(x[:, :count] for x in results), cache

    shardings = (call.results, place.cache(call.is_paged))
    return jax.jit(run, donate_argnums=0, out_shardings=shardings)


def _padded(tokens: tuple[jax.Array, ...], ranks: int) -> tuple[jax.Array, ...]:
    """Returns arrays of tokens with zeros at the end, so that ranks have equally many."""

    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0), (0, -x.shape[1] % ranks), *[(0, 0)] * (x.ndim - 2)])

    return jax.tree.map(padded, tokens)


def _step(
    call: Call,
    cache: Cache,
    tokens: tuple[jax.Array, ...],
    lengths: jax.Array,
    data: Data,
    prefix: tuple[jax.Array, ...],
) -> tuple[tuple[jax.Array, ...], Cache]:
    """Appends new tokens on one device, and attends over its rows and those of all others."""
    query, *new = tokens
    place = call.place.options
    cache = append_to_cache(*cache, *new, lengths, **place, **_of_tokens(data))
    attend = partial(shared_prefix_attention, query, *prefix) if prefix else partial(
        decode_attention, query
    )
    options = dict(call.options) | data | place
    results = attend(*cache, lengths, return_residual=call.with_lse, **options)
    return results if call.with_lse else (results,), cache


def _of_tokens(data: Mapping[str, jax.Array]) -> Data:
    """Returns the arrays that say where new tokens go."""
    return {name: x for name, x in data.items() if name in ("query_lengths", "page_table")}


def _prefill(
    call: Call,
    cache: Cache,
    tokens: tuple[jax.Array, ...],
    lengths: jax.Array,
    data: Data,
    prefix: tuple[()],
) -> tuple[tuple[jax.Array, ...], Cache]:
    """Appends a chunk of a prompt on one device, whose part of the queries attends to all rows.

    A row of the cache is visible from its own position on, up to the end of a window, if its
    sequence reaches it.
    """
    query, *new = tokens
    place = arguments.ranks("CachePool.prefill", axis_name_of(call.place.axes))
    gather = partial(jax.lax.all_gather, axis_name=place.axes, axis=1, tiled=True, to="invarying")
    placed = call.place.options
    cache = append_to_cache(*cache, *map(gather, new), lengths, **placed, **_of_tokens(data))
    named = dict(zip(arguments.CACHE_NAMES, cache, strict=True))
    layout = (call.place.layout, call.place.interleave)
    held = arguments.caches(query, named, data.get("page_table"), place, *layout)
    keys, values = (_rows(x, held, call.is_paged) for x in held[:2])
    options = dict(call.options)
    left, _ = check_options("CachePool.prefill", options).local_window_size or (NO_LIMIT, NO_LIMIT)
    options.pop("local_window_size", None)
    geometry = Geometry(held.interleave, place.world_size, held.capacity)
    at = geometry.positions(jnp.arange(held.capacity, dtype=jnp.int32), place.rank())[None]
    count = query.shape[1]
    found = arguments.sequences(
        lengths, data["query_lengths"], query.shape[0], count * place.world_size
    )
    pages = held.key.shape[0]
    exists = jnp.repeat((held.page_table >= 0) & (held.page_table < pages), held.key.shape[1], 1)
    end = MAX_INT32 if left == NO_LIMIT else jnp.minimum(at, MAX_INT32 - left - 1) + left + 1
    stop = jnp.where(exists & (at < found.lengths[:, None]), end, at)
    index = place.rank() * count + jnp.arange(count, dtype=jnp.int32)[None]
    positions = found.starts[:, None] + index
    results = attention(
        *(query, keys, values),
        axis_name=placed["axis_name"],
        query_positions=jnp.where(index < found.counts[:, None], positions, -1),
        key_positions=jnp.broadcast_to(at, stop.shape),
        visible=(jnp.broadcast_to(at, stop.shape), stop),
        return_residual=call.with_lse,
        **options,
        **{name: data[name] for name in ("sinks", "alibi_slopes") if name in data},
    )
    return results if call.with_lse else (results,), cache


def _rows(x: jax.Array, held: arguments.Caches, is_paged: bool) -> jax.Array:
    """Returns the rows of each sequence, copied out of pages."""
    if not is_paged:
        return x
    pages = jnp.take(x, held.page_table, axis=0, mode="clip")
    return pages.reshape(pages.shape[0], held.capacity, *x.shape[2:])
