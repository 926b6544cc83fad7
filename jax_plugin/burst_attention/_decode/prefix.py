"""Attention of new tokens over a prefix that several requests share and over their own caches."""

from collections.abc import Mapping
from typing import Unpack, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from burst_attention._attention.options import AnyArray
from burst_attention._checks import MAX_INT32
from burst_attention._decode import arguments, results
from burst_attention._decode.arguments import PREFIXES, Caches, Checked, Ranks, Sequences
from burst_attention._decode.options import DEFAULTS, DecodeOptions, Integers, shows_options
from burst_attention._decode.results import Part
from burst_attention._signatures import Alone, Either, WithLse
from burst_attention._types import X


class _Options(DecodeOptions):
    prefix_of: Integers
    prefix_lengths: Int[AnyArray, " prefixes"]


class _Alone(_Options, Alone): ...


class _WithLse(_Options, WithLse): ...


class _Either(_Options, Either): ...


@overload
def shared_prefix_attention(
    query: X,
    prefix_key: X,
    prefix_value: X | None,
    key_cache: X,
    value_cache: X | None,
    lengths: Integers,
    **options: Unpack[_Alone],
) -> X: ...
@overload
def shared_prefix_attention(
    query: X,
    prefix_key: X,
    prefix_value: X | None,
    key_cache: X,
    value_cache: X | None,
    lengths: Integers,
    **options: Unpack[_WithLse],
) -> tuple[X, X]: ...
@overload
def shared_prefix_attention(
    query: X,
    prefix_key: X,
    prefix_value: X | None,
    key_cache: X,
    value_cache: X | None,
    lengths: Integers,
    **options: Unpack[_Either],
) -> X | tuple[X, X]: ...


@shows_options
def shared_prefix_attention(
    query: Float[Array, "batch T heads head_dim"],
    prefix_key: Float[Array, "prefixes prefix_capacity kv_heads head_dim"],
    prefix_value: Float[Array, "prefixes prefix_capacity kv_heads value_dim"] | None,
    key_cache: Float[Array, "batch capacity kv_heads head_dim"],
    value_cache: Float[Array, "batch capacity kv_heads value_dim"] | None,
    lengths: Integers,
    *,
    prefix_of: Integers,
    prefix_lengths: Int[AnyArray, " prefixes"],
    return_residual: bool = False,
    **options: Unpack[DecodeOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of new tokens whose sequences begin with prefixes that several requests share.

    The sequence of a request b is the prefix g = prefix_of[b], then the request's own tokens. With
    L = prefix_lengths[g], row p of the request's own cache has position L + p, and query t stands
    at L + lengths[b] − query_lengths[b] + t. The result is that of `decode_attention` over caches
    that hold both::

        out, lse = merge_attention((out, lse) over the prefix, (out, lse) over the own cache)

    A prefix lies in memory once. Its keys meet the queries of all requests that share it in one
    matrix product (RelayAttention, arXiv:2402.14808). Forward only, as `decode_attention`.

    Args:
      query: ``[batch, T, heads, head_dim]``, as in `decode_attention`.
      prefix_key: ``[prefixes, prefix_capacity, kv_heads, head_dim]``, this device's rows of each
        prefix, sharded as the caches are: in the same layout with the same interleave.
      prefix_value: ``[prefixes, prefix_capacity, kv_heads, value_dim]``; None with value_cache
        None.
      key_cache: each request's own keys, as in `decode_attention`.
      value_cache: each request's own values; None with ``value_dim``, as in `decode_attention`.
      lengths: integers ``[batch]``, the tokens of each request after its prefix, new ones included.
        0 or less is an empty slot.
      prefix_of: integers ``[batch]``, the prefix of each request. −1, or an index that no prefix
        has, is none.
      prefix_lengths: integers ``[prefixes]``, the tokens of each prefix. Negative ones count as 0.
      return_residual: whether to also return lse.
      **options: see `DecodeOptions`.

    Returns:
      ``out`` or ``(out, lse)``, as `decode_attention`.

    Raises:
      ValueError, TypeError, NotImplementedError: while tracing, with the way out.
    """
    arrays = (query, key_cache, value_cache, lengths)
    checked = arguments.check_call("shared_prefix_attention", arrays, options, return_residual)
    given = {**DEFAULTS, **options}
    shared = shared_part(checked, (prefix_key, prefix_value), prefix_of, prefix_lengths, given)
    return results.attend(checked, (shared, results.own_part(checked)))


def shared_part(
    checked: Checked,
    prefix: tuple[object, object],
    prefix_of: object,
    prefix_lengths: object,
    given: Mapping[str, object],
) -> Part:
    """Returns the prefixes, and what each request sees of them."""
    named = dict(zip(("prefix_key", "prefix_value"), prefix, strict=True))
    layout, run = given["layout"], given.get("interleave")
    prefixes = caches_of_prefixes(checked.query, named, checked.caches, checked.ranks, layout, run)
    batch, queries = checked.query.shape[:2]
    source, before = sources(prefixes, checked.ranks, batch, prefix_of, prefix_lengths)
    tokens = checked.tokens
    # Positions end where int32 does.
    starts = before + jnp.minimum(tokens.starts, MAX_INT32 - queries - before)
    counts = jnp.where(tokens.lengths > 0, tokens.counts, 0)
    work = checked.work.on_prefixes(prefixes.interleave)
    return Part(work, prefixes, source, Sequences(before, starts, counts))


def caches_of_prefixes(
    query: jax.Array,
    named: Mapping[str, object],
    own: Caches,
    place: Ranks,
    layout: object,
    interleave: object,
) -> Caches:
    """Returns the caches of prefixes, checked, that lie beside the requests' own caches."""
    # Whole pages go round the ranks, so prefixes are cut in the same runs of positions.
    run = own.interleave if layout == "striped" else interleave
    prefixes = arguments.caches(query, named, None, place, layout, run, PREFIXES)
    arguments.check_prefixes(prefixes, own)
    return prefixes


def sources(
    prefixes: Caches, place: Ranks, batch: int, prefix_of: object, prefix_lengths: object
) -> tuple[Int32[Array, " batch"], Int32[Array, " batch"]]:
    """Returns the prefix of each request, and how many tokens it has; 0 without a prefix."""
    count = prefixes.key.shape[0]
    sizes = jnp.maximum(arguments.per_entry("prefix_lengths", prefix_lengths, count, "prefixes"), 0)
    source = arguments.per_entry("prefix_of", prefix_of, batch)
    place.check_same(prefix_of=source, prefix_lengths=sizes)
    # JAX's vmap over Explicit axes does not index arrays that it leaves whole.
    is_own = source[:, None] == jnp.arange(count, dtype=jnp.int32)[None]
    return source, jnp.where(is_own, sizes[None], 0).sum(1, dtype=jnp.int32)
