"""The options of decoding: names, types, documentation and defaults."""

from typing import Literal, TypeAlias, TypedDict, get_args

from jaxtyping import Float, Int

from burst_attention._attention.options import AnyArray, Implementation
from burst_attention._decode.work import Split
from burst_attention._signatures import shows
from burst_attention._types import Axes

Integers: TypeAlias = Int[AnyArray, " batch"]
"""An integer of each batch entry."""
CacheLayout: TypeAlias = Literal["striped", "contiguous"]
"""Which positions of a sequence a rank's rows hold."""
CACHE_LAYOUTS: tuple[CacheLayout, ...] = get_args(CacheLayout)


class DecodeOptions(TypedDict, total=False):
    """Keyword arguments that `decode_attention` and `shared_prefix_attention` share.

    Args:
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
      value_dim: with value_cache None, how many first columns of the keys are the values; a
        multiple of 8.
      scale: factor on q·k, a Python number; default head_dim ** -0.5.
      local_window_size: left, or (left, right): a query sees ``left`` positions before its own.
        None or −1 in a pair leaves the side open. As with ``is_causal`` in `attention`, ``right``
        may be any number and counts as 0: no query sees keys after its own position.
      logits_soft_cap: bounds scores smoothly, a Python number. None or 0 is no cap.
      sinks: floats ``[heads]``: a logit of each query head that joins the softmax and has no value.
      alibi_slopes: floats ``[heads]``.
      split: how a device cuts its work. ``balanced``: in equal runs over all sequences and heads.
        ``fixed``: by each sequence alone, so no bit of its results depends on the other sequences,
        the size of the batch, its slot or its page ids. On CPU devices both are the same. Plain
        JAX promises no bits, and the merge of ranks, prefixes and sinks on GPUs is plain JAX.
      implementation: ``"xla"`` computes in plain JAX, on any platform.
    """

    axis_name: str | Axes | None
    layout: CacheLayout
    interleave: int | None
    page_table: Int[AnyArray, "batch pages_per_sequence"] | None
    query_lengths: Integers | None
    value_dim: int | None
    scale: float | None
    local_window_size: int | tuple[int | None, int | None] | None
    logits_soft_cap: float | None
    sinks: Float[AnyArray, " heads"] | None
    alibi_slopes: Float[AnyArray, " heads"] | None
    split: Split
    implementation: Implementation | None


DEFAULTS = {"layout": "striped", "split": "balanced"}
"""The defaults of options. All other options are None by default."""
shows_options = shows(DecodeOptions, DEFAULTS)
"""Puts every option into the signature and the documentation of a function of ``**options``."""
