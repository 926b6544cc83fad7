"""The programs of a pool's devices: new tokens enter the caches, and attend over them."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int32

from burst_attention._attention.options import NO_LIMIT, check_options
from burst_attention._attention.shards import attention
from burst_attention._checks import MAX_INT32
from burst_attention._decode import arguments, results
from burst_attention._decode.append import append_to_cache
from burst_attention._decode.attention import decode_attention
from burst_attention._decode.geometry import Geometry
from burst_attention._decode.merge import merge_attention
from burst_attention._decode.options import CacheLayout
from burst_attention._decode.prefix import (
    caches_of_prefixes,
    shared_part,
    shared_prefix_attention,
    sources,
)
from burst_attention._mesh import axis_name_of
from burst_attention._pool import ways
from burst_attention._types import Arrays, Axes

Cache: TypeAlias = tuple[jax.Array, Any]
"""Keys and values of a layer; None in place of values where keys hold them."""
Prefix: TypeAlias = Cache | tuple[()]
"""The caches of shared prefixes, if there are some."""
Method: TypeAlias = Literal["step", "ring", "pieces"]
"""How new tokens attend: few at once; or a chunk of a prompt, in a ring over the caches' rows or in
pieces that are as few."""
Data: TypeAlias = dict[str, Any]
"""Arrays of a call besides tokens and caches, by the names of their options."""
PREFILL = "CachePool.prefill"
"""The caller of programs of prompts, in errors."""


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
        return (
            self.whole if count % self.mesh.size else NamedSharding(self.mesh, P(None, self.axes))
        )


class Call(NamedTuple):
    """Everything static about a call."""

    place: Place
    method: Method
    is_paged: bool
    with_lse: bool
    options: tuple[tuple[str, Any], ...]
    """Options that are no arrays."""
    packed: tuple[tuple[int, int], ...]
    """Heads and dim of query, key and value where they come as one array, which `ways.packed`
    makes; empty where each comes by itself."""
    results: tuple[Sharding, ...]
    """Shardings of out and, if asked for, lse, as they leave the pool."""


@lru_cache(ways.MOST_KEPT)
def empty(shape: tuple[int, ...], dtype: str, sharding: Sharding) -> Callable[[], jax.Array]:
    """Returns the program that makes an array of zeros, without a transfer from the host."""
    return jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=sharding)


@lru_cache(ways.MOST_KEPT)
def program(call: Call) -> Callable[..., tuple[Arrays, Cache]]:
    """Returns the program of a call.

    It maps caches, tokens, lengths, data and the caches of prefixes to out and, if asked for, lse,
    and to the caches, in place of those that it got.
    """
    place = call.place
    caches, cut = place.spec(call.is_paged), P(None, place.axes)
    out = cut if call.method == "ring" else P()
    local = jax.shard_map(
        partial({"step": _step, "ring": _in_ring, "pieces": _in_pieces}[call.method], call),
        mesh=place.mesh,
        in_specs=(caches, out, P(), P(), cut),
        out_specs=(out, caches),
    )

    def run(
        cache: Cache, tokens: Arrays, lengths: jax.Array, data: Data, prefix: Prefix
    ) -> tuple[Arrays, Cache]:
        if call.method == "step":
            return local(cache, tokens, lengths, data, prefix)
        # Tokens beyond those in use see nothing, and nothing is written for them.
        batch, count = tokens[0].shape[:2]
        found = arguments.sequences(lengths, data.get("query_lengths"), batch, count)
        data = data | {"query_lengths": found.counts}
        unit = place.mesh.size if call.method == "ring" else arguments.MOST_QUERIES
        whole, cache = local(cache, _padded(tokens, unit), lengths, data, prefix)
        return tuple(x[:, :count] for x in whole), cache

    shardings = (call.results, place.cache(call.is_paged))
    return jax.jit(run, donate_argnums=0, out_shardings=shardings)


def _padded(tokens: Arrays, unit: int) -> Arrays:
    """Returns arrays of tokens with zeros at the end, so that their number is a multiple."""
    return tuple(
        jnp.pad(x, [(0, 0), (0, -x.shape[1] % unit), *[(0, 0)] * (x.ndim - 2)]) for x in tokens
    )


def _step(
    call: Call, cache: Cache, tokens: Arrays, lengths: jax.Array, data: Data, prefix: Prefix
) -> tuple[Arrays, Cache]:
    """Appends new tokens on one device, and attends over its rows and those of all others."""
    query, key, value = _each(call, tokens)
    cache = _appended(call, cache, (key, value), lengths, data)
    options: dict[str, Any] = dict(call.options) | data | call.place.options
    options["return_residual"] = call.with_lse
    attend: Callable[..., Any] = shared_prefix_attention if prefix else decode_attention
    return _as_tuple(attend(query, *prefix, *cache, lengths, **options)), cache


def _as_tuple(found: jax.Array | Arrays) -> Arrays:
    """Returns out and, if asked for, lse."""
    return found if isinstance(found, tuple) else (found,)


def _in_pieces(
    call: Call, cache: Cache, tokens: Arrays, lengths: jax.Array, data: Data, prefix: Prefix
) -> tuple[Arrays, Cache]:
    """Appends a chunk of a prompt on one device, and attends over all rows, a few tokens at a time.

    Decoding takes wider rows than a ring. It reads the caches once for each piece.
    """
    query, key, value = _each(call, tokens)
    cache = _appended(call, cache, (key, value), lengths, data)
    most = arguments.MOST_QUERIES
    found = arguments.sequences(lengths, data["query_lengths"], *query.shape[:2])
    options: dict[str, Any] = dict(call.options) | data | call.place.options
    of_own = {x: options[x] for x in options if x not in ("prefix_of", "prefix_lengths")}
    cut = query.reshape(query.shape[0], -1, most, *query.shape[2:]).swapaxes(0, 1)

    def attend(piece: tuple[jax.Array, jax.Array]) -> Arrays:
        query, begin = piece
        counts = jnp.clip(found.counts - begin, 0, most)
        # The rows that queries see end with the piece. A sequence with tokens has one at least.
        ends = jnp.clip(found.starts + begin + counts, 1, found.lengths)
        given = of_own | {"query_lengths": counts}
        checked = arguments.check_call(PREFILL, (query, *cache, ends), given, call.with_lse)
        # Of a piece that begins before position 0, lengths do not tell where it begins.
        tokens = checked.tokens._replace(starts=found.starts + begin)
        checked = checked._replace(tokens=tokens)
        own = results.own_part(checked)
        if not prefix:
            return _as_tuple(results.attend(checked, (own,)))
        shared = shared_part(checked, prefix, data["prefix_of"], data["prefix_lengths"], options)
        return _as_tuple(results.attend(checked, (shared, own)))

    found = jax.lax.map(attend, (cut, most * jnp.arange(len(cut), dtype=jnp.int32)))
    joined = [x.swapaxes(0, 1).reshape(*query.shape[:2], *x.shape[3:]) for x in found]
    return tuple(joined), cache


def _each(call: Call, tokens: Arrays) -> tuple[jax.Array, jax.Array, Any]:
    """Returns query, key and value, None where there is no value."""
    found = ways.unpacked(tokens[0], call.packed) if call.packed else tokens
    query, key, value = (*found, None)[:3]
    assert query is not None
    assert key is not None
    return query, key, value


def _appended(
    call: Call, cache: Cache, new: tuple[jax.Array, Any], lengths: jax.Array, data: Data
) -> Cache:
    """Returns caches with new tokens, which are the same on all devices."""
    (key_cache, value_cache), (key, value) = cache, new
    where: dict[str, Any] = {x: data[x] for x in ("query_lengths", "page_table") if x in data}
    where |= call.place.options
    return append_to_cache(key_cache, value_cache, key, value, lengths, **where)


def _in_ring(
    call: Call, cache: Cache, tokens: Arrays, lengths: jax.Array, data: Data, prefix: Prefix
) -> tuple[Arrays, Cache]:
    """Appends a chunk of a prompt on one device, whose part of the queries attends to all rows."""
    query, key, value = _each(call, tokens)
    axis_name = axis_name_of(call.place.axes)
    ranks, count = arguments.ranks(PREFILL, axis_name), query.shape[1]
    gather = partial(jax.lax.all_gather, axis_name=ranks.axes, axis=1, tiled=True, to="invarying")
    key, value = gather(key), None if value is None else gather(value)
    cache = _appended(call, cache, (key, value), lengths, data)
    held = _held(call, query, cache, data, ranks)
    found = arguments.sequences(lengths, data["query_lengths"], *key.shape[:2])
    index = ranks.rank() * count + jnp.arange(count, dtype=jnp.int32)[None]
    in_use = index < found.counts[:, None]
    positions = jnp.where(in_use, found.starts[:, None] + index, -1)
    own = _Rows(held, call.is_paged, found.lengths)
    sinks = {"sinks": data["sinks"]} if "sinks" in data else {}
    if not prefix:
        pair = _attended(call, query, own, positions, data, ranks, **sinks)
        return pair if call.with_lse else pair[:1], cache
    shared = _shared(call, query, prefix, held, data, ranks)
    # Positions end where int32 does.
    before = shared.lengths[:, None]
    behind = before + jnp.minimum(positions, MAX_INT32 - 1 - before)
    behind = jnp.where(in_use & (found.lengths > 0)[:, None], behind, -1)
    out, lse = merge_attention(
        _attended(call, query, own, positions, data, ranks, **sinks),
        _attended(call, query, shared, behind, data, ranks),
    )
    return (out.astype(query.dtype), lse) if call.with_lse else (out.astype(query.dtype),), cache


class _Rows(NamedTuple):
    """The rows of each sequence on one device."""

    held: arguments.Caches
    is_paged: bool
    """Whether the page table says where a sequence's rows are."""
    lengths: Int32[Array, " batch"]


def _shared(
    call: Call,
    query: jax.Array,
    prefix: Cache,
    own: arguments.Caches,
    data: Data,
    ranks: arguments.Ranks,
) -> _Rows:
    """Returns the rows of each sequence's prefix, which are one page of the prefixes."""
    named = dict(zip(("prefix_key", "prefix_value"), prefix, strict=True))
    layout, run = call.place.layout, call.place.interleave
    found = caches_of_prefixes(query, named, own, ranks, layout, run)
    given = (data["prefix_of"], data["prefix_lengths"])
    source, lengths = sources(found, ranks, query.shape[0], *given)
    return _Rows(found._replace(page_table=source[:, None]), True, lengths)


def _attended(
    call: Call,
    query: jax.Array,
    rows: _Rows,
    positions: Int32[Array, "batch T"],
    data: Data,
    ranks: arguments.Ranks,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Returns out and lse of this device's queries over the rows of all devices."""
    options |= dict(call.options)
    start, stop = _visible(options.pop("local_window_size", None), rows, ranks)
    columns = arguments.values_in_keys(rows.held, options.pop("value_dim", None))
    if "alibi_slopes" in data:
        options["alibi_slopes"] = data["alibi_slopes"]
    keys = _copied(rows.held.key, rows)
    values = keys[..., :columns] if rows.held.value is None else _copied(rows.held.value, rows)
    return attention(
        query,
        keys,
        values,
        axis_name=axis_name_of(call.place.axes),
        query_positions=positions,
        key_positions=start,
        visible=(start, stop),
        return_residual=True,
        **options,
    )


def _held(
    call: Call, query: jax.Array, cache: Cache, data: Data, ranks: arguments.Ranks
) -> arguments.Caches:
    """Returns this device's caches, and the pages of each sequence."""
    named = dict(zip(arguments.CACHE_NAMES, cache, strict=True))
    place = call.place
    table = data.get("page_table")
    return arguments.caches(query, named, table, ranks, place.layout, place.interleave)


def _visible(
    window: object, rows: _Rows, ranks: arguments.Ranks
) -> tuple[Int32[Array, "batch rows"], Int32[Array, "batch rows"]]:
    """Returns the positions of queries that see each row, from start up to, but without, stop.

    A row is visible from its own position on, up to the end of a window, if its sequence has it.
    """
    options = check_options(PREFILL, {"local_window_size": window})
    left, _ = options.local_window_size or (NO_LIMIT, NO_LIMIT)
    held = rows.held
    geometry = Geometry(held.interleave, ranks.world_size, held.capacity)
    index = jnp.arange(held.capacity, dtype=jnp.int32)
    start = jnp.broadcast_to(
        geometry.positions(index, ranks.rank()), (len(rows.lengths), len(index))
    )
    stop = jnp.int32(MAX_INT32)
    if left != NO_LIMIT:
        reach = min(left, MAX_INT32 - 1) + 1
        stop = jnp.minimum(start, MAX_INT32 - reach) + reach
    table, (pages, page) = held.page_table, held.key.shape[:2]
    exists = jnp.repeat((table >= 0) & (table < pages), page, axis=1)
    return start, jnp.where(exists & (start < rows.lengths[:, None]), stop, start)


def _copied(x: jax.Array, rows: _Rows) -> jax.Array:
    """Returns the rows of each sequence, copied out of pages."""
    if not rows.is_paged:
        return x
    pages = jnp.take(x, rows.held.page_table, axis=0, mode="clip")
    return pages.reshape(pages.shape[0], rows.held.capacity, *x.shape[2:])
