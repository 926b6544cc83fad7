"""Attention of new tokens over a sharded cache."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from burst_attention._attention.options import AnyArray, Implementation
from burst_attention._decode import arguments, results
from burst_attention._decode.arguments import CacheLayout
from burst_attention._decode.results import Part
from burst_attention._decode.work import Split
from burst_attention._types import Axes


def decode_attention(
    query: Float[Array, "batch T heads head_dim"],
    key_cache: Float[Array, "batch capacity kv_heads head_dim"],
    value_cache: Float[Array, "batch capacity kv_heads value_dim"],
    lengths: Int[AnyArray, " batch"],
    *,
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
    """Attention of a few new tokens over a key/value cache that is sharded across devices.

    Query t of entry b stands at position p = lengths[b] − query_lengths[b] + t and sees the keys of
    its sequence up to its own position::

        s = scale · q kᵀ          with logits_soft_cap: cap · tanh(s / cap)
                                  with alibi_slopes: + slope · (key position − p)
                                  −inf where the window hides the key
        lse = ln Σ e^s;   out = e^(s − lse) v          with a sink z, e^z is part of that sum

    The cache holds the keys of the new tokens already: `append_to_cache` writes them. Each device
    computes with its own rows alone. Then one all-to-all and one all-gather of (out, lse) merge the
    ranks, so the call's messages do not grow with the sequence. Lengths, pages and all other arrays
    are data: another value needs no compilation. The idea of equal runs of keys over all sequences
    and heads, whose results are merged, is LeanAttention's (arXiv:2405.10480).

    Forward only: a gradient is an error. Queries beyond ``query_lengths``, before position 0 and of
    empty sequences have out 0 and lse −inf, with a sink its logit. What lies in a cache beyond
    ``lengths`` may be anything, even NaN.

    Args:
      query: ``[batch, T, heads, head_dim]``, T from 1 to 16 new tokens of each sequence, the same
        on all devices along ``axis_name``. bfloat16, float16 or float32; head_dim a multiple of 8
        up to 256.
      key_cache: ``[batch, capacity, kv_heads, head_dim]``, this device's rows, of query's dtype;
        kv_heads divides heads. With ``page_table``: ``[pages, page, kv_heads, head_dim]``.
      value_cache: as key_cache, with a value_dim of its own, a multiple of 8 up to 256.
      lengths: integers ``[batch]``, the tokens of each whole sequence, new ones included. 0 or less
        is an empty slot. A length beyond the capacity of all ranks is no error: the query stands at
        the position that its length says, and sees the keys that the caches have room for.
      axis_name: mesh axis along which the caches are sharded, or a pair (outer, inner), inside
        ``jax.shard_map``. Without it a device holds whole sequences.
      layout: where position p is. ``striped``: on rank (p // interleave) mod ranks.
        ``contiguous``: on rank p // capacity, so rank 0 fills first.
      interleave: consecutive positions on a rank in the striped layout, a divisor of the capacity;
        default 1. With ``page_table`` it is the rows of a page.
      page_table: integers ``[batch, pages_per_sequence]``, this device's own pages of each
        sequence, in the order of positions. The capacity is then pages_per_sequence · page. Entries
        beyond a sequence's pages are never used; −1 is usual. Keys of a page id that does not exist
        count as hidden.
      query_lengths: integers ``[batch]``, the new tokens in use; default: all T. Less than 0 counts
        as 0, more than T as T.
      scale: factor on q·k, a Python number; default head_dim ** -0.5.
      local_window_size: left, or (left, right): a query sees ``left`` positions before its own.
        None or −1 in a pair leaves the side open. No query sees keys after its own position.
      logits_soft_cap: bounds scores smoothly, a Python number. None or 0 is no cap.
      sinks: floats ``[heads]``: a logit of each query head that joins the softmax and has no value.
      alibi_slopes: floats ``[heads]``.
      split: how a device cuts its work. ``balanced``: in equal runs over all sequences and heads.
        ``fixed``: by each sequence alone, so no bit of its results depends on the other sequences,
        the size of the batch, its slot or its page ids. On CPU devices both are the same.
      implementation: ``"xla"`` computes in plain JAX, on any platform.
      return_residual: whether to also return lse.

    Returns:
      ``out``, ``[batch, T, heads, value_dim]`` in query's dtype; with ``return_residual=True``
      ``(out, lse)``, lse float32 ``[batch, T, heads]``, a natural logarithm. Both are the same on
      all devices along ``axis_name``, and typed so: ``out_specs=P()`` takes them.

    Raises:
      ValueError, TypeError, NotImplementedError: while tracing, with the way out.
    """
    given, name = locals(), "decode_attention"
    place, q = arguments.ranks(name, axis_name), arguments.query_of(query)
    named = {"key_cache": key_cache, "value_cache": value_cache}
    cache = arguments.caches(q, named, page_table, place, layout, interleave)
    arguments.check_heads(q, cache, ("key_cache", "value_cache"))
    chosen = arguments.settings(name, q, cache, place, given)
    tokens = arguments.sequences(lengths, query_lengths, *q.shape[:2])
    place.check_same(
        query=q,
        lengths=tokens.lengths,
        query_lengths=tokens.counts,
        sinks=chosen.sinks,
        alibi_slopes=chosen.slopes,
    )
    source = jnp.arange(q.shape[0], dtype=jnp.int32)
    own = Part(chosen.work, cache, source, tokens)
    return results.attend(name, place, chosen, q, (own,))
