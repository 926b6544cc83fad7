"""Attention of new tokens over a prefix that several requests share and over their own caches."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from burst_attention._attention.arguments import MAX_INT32
from burst_attention._attention.options import AnyArray, Implementation
from burst_attention._decode import arguments, results
from burst_attention._decode.arguments import PREFIXES, CacheLayout, Sequences
from burst_attention._decode.results import Part
from burst_attention._decode.work import Split
from burst_attention._types import Axes


def shared_prefix_attention(
    query: Float[Array, "batch T heads head_dim"],
    prefix_key: Float[Array, "prefixes prefix_capacity kv_heads head_dim"],
    prefix_value: Float[Array, "prefixes prefix_capacity kv_heads value_dim"],
    key_cache: Float[Array, "batch capacity kv_heads head_dim"],
    value_cache: Float[Array, "batch capacity kv_heads value_dim"],
    lengths: Int[AnyArray, " batch"],
    *,
    prefix_of: Int[AnyArray, " batch"],
    prefix_lengths: Int[AnyArray, " prefixes"],
    axis_name: str | Axes | None = None,
    layout: CacheLayout = "striped",
    interleave: int | None = None,
    page_table: Int[AnyArray, "batch pages_per_sequence"] | None = None,
    query_lengths: Int[AnyArray, " batch"] | None = None,
    scale: float | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[AnyArray, " heads"] | None = None,
    alibi_slopes: Float[AnyArray, " heads"] | None = None,
    split: Split = "balanced",
    implementation: Implementation | None = None,
    return_residual: bool = False,
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
      prefix_value: ``[prefixes, prefix_capacity, kv_heads, value_dim]``.
      key_cache: each request's own keys, as in `decode_attention`.
      value_cache: each request's own values.
      lengths: integers ``[batch]``, the tokens of each request after its prefix, new ones included.
        0 or less is an empty slot.
      prefix_of: integers ``[batch]``, the prefix of each request. −1, or an index that no prefix
        has, is none.
      prefix_lengths: integers ``[prefixes]``, the tokens of each prefix. Negative ones count as 0.
      axis_name, layout, interleave, page_table, query_lengths: as in `decode_attention`.
      scale, local_window_size, logits_soft_cap, sinks, alibi_slopes: as in `decode_attention`.
      split, implementation, return_residual: as in `decode_attention`.

    Returns:
      ``out`` or ``(out, lse)``, as `decode_attention`.

    Raises:
      ValueError, TypeError, NotImplementedError: while tracing, with the way out.
    """
    given, name = locals(), "shared_prefix_attention"
    place, q = arguments.ranks(name, axis_name), arguments.query_of(query)
    named = {"key_cache": key_cache, "value_cache": value_cache}
    cache = arguments.caches(q, named, page_table, place, layout, interleave)
    arguments.check_heads(q, cache, ("key_cache", "value_cache"))
    # Whole pages go round the ranks, so prefixes are cut in the same runs of positions.
    runs = cache.interleave if layout == "striped" else interleave
    named = {"prefix_key": prefix_key, "prefix_value": prefix_value}
    prefixes = arguments.caches(q, named, None, place, layout, runs, PREFIXES)
    arguments.check_prefixes(prefixes, cache)
    chosen = arguments.settings(name, q, cache, place, given)
    tokens = arguments.sequences(lengths, query_lengths, *q.shape[:2])
    count = prefixes.key.shape[0]
    sizes = jnp.maximum(arguments.per_entry("prefix_lengths", prefix_lengths, count, "prefixes"), 0)
    source = arguments.per_entry("prefix_of", prefix_of, q.shape[0])
    place.check_same(
        query=q,
        lengths=tokens.lengths,
        query_lengths=tokens.counts,
        prefix_of=source,
        prefix_lengths=sizes,
        sinks=chosen.sinks,
        alibi_slopes=chosen.slopes,
    )
    own = Part(chosen.work, cache, jnp.arange(q.shape[0], dtype=jnp.int32), tokens)
    before = sizes.at[source].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    shared = Part(
        chosen.work.on(prefixes.interleave), prefixes, source, _behind(before, tokens, q.shape[1])
    )
    return results.attend(name, place, chosen, q, (shared, own))


def _behind(before: Int[Array, " batch"], tokens: Sequences, queries: int) -> Sequences:
    """Returns the queries of requests at their positions behind their prefixes."""
    # Positions end where int32 does.
    starts = before + jnp.minimum(tokens.starts, MAX_INT32 - queries - before)
    return Sequences(before, starts, jnp.where(tokens.lengths > 0, tokens.counts, 0))
