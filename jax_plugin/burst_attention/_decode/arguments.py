"""Checks of the arguments of decoding."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from burst_attention import _checks, _mesh
from burst_attention._attention.arguments import cast
from burst_attention._attention.features import check_features
from burst_attention._attention.implementation import check_soft_cap, warn_of_plain
from burst_attention._attention.options import NO_LIMIT, check_options
from burst_attention._checks import MAX_INT32
from burst_attention._decode import gpu
from burst_attention._decode.options import CACHE_LAYOUTS, DEFAULTS, CacheLayout, DecodeOptions
from burst_attention._decode.work import SPLITS, Work
from burst_attention._signatures import check_names
from burst_attention._types import ArrayType, Axes

MOST_QUERIES = 16
"""The most new tokens of a sequence in a call."""
MOST_COLUMNS = 576
"""The most columns of keys and values: those of a latent with its rotary part."""
CACHE, PAGES = "[batch, capacity, kv_heads, head_dim]", "[pages, page, kv_heads, head_dim]"
CACHE_NAMES = ("key_cache", "value_cache")
PREFIXES = "[prefixes, capacity, kv_heads, head_dim]"


class Ranks(NamedTuple):
    """The devices that share the caches."""

    axes: Axes
    """Mesh axes of the sequence; empty for a whole cache on one device."""
    world_size: int

    def check_same(self, **arrays: jax.Array | None) -> None:
        """Raises for arrays that are typed as different on the ranks."""
        for name, x in arrays.items():
            if x is not None and _mesh.varying_axes(x).intersection(self.axes):
                raise ValueError(
                    f"{name} must be the same on all devices along axis_name="
                    f"{_mesh.axis_name_of(self.axes)!r}, but varies over it; leave the axis out of "
                    "its in_specs, or gather it with jax.lax.all_gather(..., to='invarying')"
                )

    def rank(self) -> Int32[Array, ""]:
        """Returns this device's rank."""
        return jax.lax.axis_index(self.axes) if self.axes else jnp.zeros((), jnp.int32)


class Caches(NamedTuple):
    """Keys and values of several sequences on one rank, and the pages that hold each of them."""

    key: Float[Array, "pages page kv_heads head_dim"]
    value: Float[Array, "pages page kv_heads value_dim"] | None
    """None where the values are the first columns of the keys."""
    page_table: Int32[Array, "sources columns"]
    interleave: int

    @property
    def capacity(self) -> int:
        """The number of rows that the rank has for a sequence."""
        return self.page_table.shape[1] * self.key.shape[1]


def ranks(caller: str, axis_name: object) -> Ranks:
    """Returns the devices along ``axis_name``."""
    if axis_name is None:
        return Ranks((), 1)
    axes = _mesh.ring_axes(axis_name)
    whole = "leave axis_name out where each device holds whole caches"
    mesh = _mesh.ring_mesh(axes, caller, whole)
    _mesh.all_axes_manual(mesh, globally=f"; {whole}")
    return Ranks(axes, _mesh.axes_size(mesh, axes))


def new_tokens(name: str, value: object, dims: str = "heads, head_dim") -> jax.Array:
    """Returns an array of new tokens."""
    return _checks.as_array(_checks.activation(name, value, f"[batch, T, {dims}]"))


def caches(
    like: jax.Array,
    named: Mapping[str, object],
    page_table: object,
    place: Ranks,
    layout: object,
    interleave: object,
    words: str = CACHE,
) -> Caches:
    """Returns the caches of keys and of values, given by their names, of ``like``'s dtype.

    ``like`` has the batch. ``words`` say what dimensions unpaged caches have. Without a cache of
    values the values are the first columns of the keys.
    """
    words = words if page_table is None else PAGES
    first, second = named

    def checked(name: str) -> jax.Array:
        return _checks.as_array(_checks.activation(name, named[name], words))

    k, v = checked(first), None if named[second] is None else checked(second)
    given = {"query or new tokens": like, first: k} | ({} if v is None else {second: v})
    check_local(**given)
    if len({x.dtype for x in given.values()}) > 1:
        raise TypeError(
            f"{_listed(list(given))} must have one dtype, got "
            f"{_listed([str(x.dtype) for x in given.values()])}; cast the new tokens to the "
            "caches' dtype"
        )
    if v is not None and k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"{first} and {second} must have one shape but for their last dimension, got "
            f"{k.shape} and {v.shape}"
        )
    table = _page_table(page_table, k, like.shape[0], words)
    kind = _checks.choice("layout", layout, CACHE_LAYOUTS)
    pages = None if page_table is None else k.shape[1]
    capacity = table.shape[1] * k.shape[1]
    if place.world_size * capacity > MAX_INT32:
        raise ValueError(
            f"a sequence must have at most {MAX_INT32} positions on all ranks, got capacity "
            f"{capacity} on each of {place.world_size}"
        )
    return Caches(k, v, table, _interleave(kind, interleave, capacity, pages, first))


def _listed(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def check_local(**arrays: jax.Array) -> None:
    """Raises for arrays whose types say that several devices hold parts of them."""
    for name, x in arrays.items():
        cuts = [axis for entry in jax.typeof(x).sharding.spec for axis in _mesh.names_of(entry)]
        if axes := set(cuts).intersection(_mesh.explicit_axes(x)):
            raise ValueError(
                f"{name} must be the array of one device, but is sharded over {min(axes)!r}; call "
                "inside jax.shard_map over the mesh, where each device has its part"
            )


def _page_table(
    given: object, cache: jax.Array, batch: int, words: str
) -> Int32[Array, "sources columns"]:
    """Returns the pages of each sequence. A sequence of an unpaged cache is one page."""
    if given is not None:
        title = "page_table"
        table = cast(title, "interval", given, "int32")
        if len(table.shape) != 2 or table.shape[0] != batch or table.shape[1] < 1:
            raise ValueError(
                f"page_table must have shape [batch, pages_per_sequence] with batch {batch} and at "
                f"least one page, got shape {tuple(table.shape)}; fill missing pages with -1"
            )
        return _checks.as_array(table)
    if words == CACHE and cache.shape[0] != batch:
        raise ValueError(
            f"caches without page_table must have one entry for each of {batch} batch entries, got "
            f"shape {cache.shape}; pages need page_table"
        )
    return jnp.arange(cache.shape[0], dtype=jnp.int32)[:, None]


def _interleave(
    layout: CacheLayout, given: object, capacity: int, page: int | None, name: str
) -> int:
    """Returns how many consecutive positions a rank holds before the next rank's turn."""
    found = None if given is None else _checks.at_least_1("interleave", given)
    if layout == "contiguous":
        if found not in (None, 1):
            raise ValueError(
                f"interleave must be 1 in layout 'contiguous', where rank 0 fills first, got "
                f"{found}; layout 'striped' interleaves"
            )
        return max(capacity, 1)
    if page is not None:
        if found not in (None, page):
            raise ValueError(
                f"interleave must be the rows of a page, {page}, since whole pages go round the "
                f"ranks, got {found}; leave it out"
            )
        return max(page, 1)
    if capacity % (found or 1):
        raise ValueError(
            f"interleave must divide the capacity of {name}, {capacity} rows, got {found}"
        )
    return found or 1


def check_heads(query: jax.Array, cache: Caches, names: tuple[str, str]) -> None:
    """Raises for head dimensions and numbers of heads that do not go together."""
    _checks.head_dim("head_dim", query.shape[3], most=MOST_COLUMNS)
    if cache.value is not None:
        _checks.head_dim(f"head_dim of {names[1]}", cache.value.shape[3], most=MOST_COLUMNS)
    if query.shape[3] != cache.key.shape[3]:
        raise ValueError(
            f"query and {names[0]} must have one head_dim, got {query.shape[3]} and "
            f"{cache.key.shape[3]}"
        )
    _checks.grouped_heads(query.shape[2], cache.key.shape[2])


def check_prefixes(prefixes: Caches, cache: Caches) -> None:
    """Raises for prefixes whose heads are not those of the caches."""
    for which, x, own in (
        ("key", prefixes.key, cache.key),
        ("value", prefixes.value, cache.value),
    ):
        if (x is None) != (own is None):
            held, missing = f"prefix_{which}", f"{which}_cache"
            if x is None:
                held, missing = missing, held
            raise ValueError(
                f"prefix_{which} and {which}_cache must both be arrays, or both be None with "
                f"value_dim, got None for {missing} alone; give an array, or None for {held} too"
            )
        if x is None or own is None:
            continue
        expected, found = own.shape[2:], x.shape[2:]
        if expected != found:
            raise ValueError(
                f"prefix_{which} must have the heads and the head_dim of {which}_cache, "
                f"{expected}, got {found}"
            )


def check_new(
    name: str, x: jax.Array, tokens: tuple[int, int], title: str, cache: ArrayType
) -> None:
    """Raises for new keys or values that do not fit the batch or their cache."""
    expected = (*tokens, *cache.shape[2:])
    if x.shape != expected or x.dtype != cache.dtype:
        raise ValueError(
            f"{name} must have shape {expected} and dtype {cache.dtype}, as {title} has, got "
            f"{x.shape} and {x.dtype}"
        )


def per_entry(name: str, value: object, count: int, words: str = "batch") -> Int32[Array, " n"]:
    """Returns integers, one for each batch entry or prefix, as int32."""
    x = cast(name, "interval", value, "int32")
    return _checks.shaped(name, x, "int32", (count,), f"[{words}]")


class Sequences(NamedTuple):
    """How long sequences are, and which of their positions new tokens have."""

    lengths: Int32[Array, " batch"]
    starts: Int32[Array, " batch"]
    """Position of new token 0; negative where a call has more new tokens than the sequence."""
    counts: Int32[Array, " batch"]
    """New tokens in use."""


def sequences(lengths: object, query_lengths: object, batch: int, tokens: int) -> Sequences:
    """Returns the lengths of sequences. Negative ones count as 0."""
    found = jnp.maximum(per_entry("lengths", lengths, batch), 0)
    counts = jnp.full((batch,), tokens, jnp.int32)
    if query_lengths is not None:
        counts = jnp.clip(per_entry("query_lengths", query_lengths, batch), 0, tokens)
    return Sequences(found, found - counts, counts)


def _query(value: object) -> Float[Array, "batch queries heads head_dim"]:
    """Returns the queries of the new tokens."""
    query = new_tokens("query", value)
    if not 1 <= query.shape[1] <= MOST_QUERIES:
        raise ValueError(
            f"query must have from 1 to {MOST_QUERIES} new tokens T, [batch, T, heads, head_dim], "
            f"got T = {query.shape[1]}; prefill more tokens with burst_attention.attention"
        )
    return query


class Checked(NamedTuple):
    """The arguments of a call on the batch's own caches, checked."""

    caller: str
    ranks: Ranks
    query: Float[Array, "batch queries heads head_dim"]
    caches: Caches
    tokens: Sequences
    work: Work
    sinks: Float32[Array, " heads"] | None
    slopes: Float32[Array, " heads"] | None
    return_residual: bool


def check_call(
    caller: str,
    arrays: tuple[object, object, object, object],
    options: Mapping[str, object],
    return_residual: object,
) -> Checked:
    """Returns the arguments of ``caller``: query, key and value cache and lengths, and options."""
    check_names(caller, options, DecodeOptions)
    given = dict.fromkeys(DecodeOptions.__annotations__) | DEFAULTS | dict(options)
    place, q = ranks(caller, given["axis_name"]), _query(arrays[0])
    named = dict(zip(CACHE_NAMES, arrays[1:3], strict=True))
    cache = caches(q, named, given["page_table"], place, given["layout"], given["interleave"])
    check_heads(q, cache, CACHE_NAMES)
    features = check_features(given, q, cache.key, 0.0)
    sinks, slopes = features.sinks, features.alibi_slopes
    tokens = sequences(arrays[3], given["query_lengths"], *q.shape[:2])
    place.check_same(query=q, lengths=tokens.lengths, query_lengths=tokens.counts)
    place.check_same(sinks=sinks, alibi_slopes=slopes)
    with_lse = _checks.flag("return_residual", return_residual)
    work = _work(caller, q, cache, place.world_size, given)
    return Checked(caller, place, q, cache, tokens, work, sinks, slopes, with_lse)


def _work(
    caller: str, query: jax.Array, cache: Caches, world_size: int, given: Mapping[str, object]
) -> Work:
    """Returns what is static about the work of a call."""
    names = ("scale", "local_window_size", "logits_soft_cap", "implementation")
    options = check_options(caller, {name: given[name] for name in names})
    check_soft_cap(options.logits_soft_cap, options.implementation)
    scale = options.softmax_scale(query.shape[3])
    values = values_in_keys(cache, given["value_dim"])
    if options.implementation is None:
        held = values if cache.value is None else cache.value
        _warn_on_gpus(gpu.lacks(query, held, scale, options.logits_soft_cap))
    left, _ = options.local_window_size or (NO_LIMIT, NO_LIMIT)
    return Work(
        scale=scale,
        soft_cap=options.logits_soft_cap or 0.0,
        window=-1 if left == NO_LIMIT else min(left, MAX_INT32),
        interleave=cache.interleave,
        world_size=world_size,
        split=_checks.choice("split", given["split"], SPLITS),
        implementation=options.implementation,
        values_in_keys=values,
    )


def values_in_keys(cache: Caches, value_dim: object) -> int:
    """Returns how many first columns of the keys are the values; 0 with values of their own."""
    if cache.value is not None:
        if value_dim is not None:
            raise ValueError(
                "value_dim says how many columns of the keys are the values, so it needs "
                f"value_cache None, got an array of shape {cache.value.shape}; leave value_dim "
                "out, since value_cache has its own last dimension"
            )
        return 0
    if value_dim is None:
        raise ValueError(
            "value_cache None needs value_dim, the number of first columns of key_cache that are "
            "the values, as in value_dim=512 for latents; or give a value_cache"
        )
    dim, columns = _checks.integer("value_dim", value_dim), cache.key.shape[3]
    if not 8 <= dim <= columns or dim % 8:
        raise ValueError(
            f"value_dim must be a multiple of 8 from 8 to {columns}, that of head_dim, got {dim}; "
            "it counts the first columns of key_cache, which are the values"
        )
    return dim


def _warn_on_gpus(lacking: str | None) -> None:
    """Warns where the mesh has GPUs on which plain JAX decodes, given what the kernels lack."""
    platform = _mesh.platform(jax.sharding.get_abstract_mesh())
    if platform == "rocm":
        warn_of_plain("decoding on GPUs that are not NVIDIA's")
    if platform == "cuda" and lacking:
        warn_of_plain(f"decoding with {lacking} on NVIDIA GPUs")
