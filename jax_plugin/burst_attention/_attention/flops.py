"""The floating-point operations of attention, which XLA does not see in a custom call."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, Int64

from burst_attention import _checks
from burst_attention._attention import visibility
from burst_attention._attention.features import batch_of_one, check_features
from burst_attention._attention.options import AnyArray, AttentionOptions, Options, check_options
from burst_attention._attention.padding import padding_as_ids
from burst_attention._attention.visibility import FIRST, LAST
from burst_attention._padding import PADDING
from burst_attention._types import ArrayType

# Lengths differ from side to side, so the checks of annotations must not compare them.
Integers: TypeAlias = Int64[np.ndarray, " _rows"]

OF_ROWS = ("segment_ids", "visible", "mask")
"""The arguments that belong to rows, which have positions."""
DATA = (
    *OF_ROWS,
    "query_positions",
    "key_positions",
    "query_offset",
    "query_seq_lengths",
    "key_value_seq_lengths",
)
"""The arguments of the mask that may be arrays."""
BITS = 33
"""Bits of a position that begins at 0, and of the position after the last one."""


@dataclass(frozen=True)
class AttentionFlops:
    """The floating-point operations of one call of attention over all of its devices.

    A product and its sum count as two, as peaks of devices do. Only matrix products count, of the
    visible pairs. With D the head dimension of queries and keys, and Dv that of values::

        forward    = 2 · pairs · heads · (D + Dv)             q kᵀ and p v
        backward   = 4 · pairs · heads · (D + Dv)             dout vᵀ and pᵀ dout, ds k and dsᵀ q
        recomputed = 2 · pairs · heads · D                    q kᵀ once more

    ``model`` counts what the model needs: the MFU of PaLM (Chowdhery et al., arXiv:2204.02311,
    appendix B). ``hardware`` also counts the scores that the backward pass computes again, as in
    the benchmarks of FlashAttention-2 (Dao, arXiv:2307.08691), whose backward pass has 2.5 times
    the operations of the forward pass where D = Dv. A layer that is rematerialised without
    `save_attention` has ``forward`` once more.

    Args:
      pairs: pairs of a query and a key that it sees, in all batch entries, for one head.
      forward: operations of the forward pass.
      backward: operations of the backward pass without the recomputed scores.
      recomputed: operations of the scores in the backward pass.
    """

    pairs: int
    forward: int
    backward: int
    recomputed: int

    @property
    def model(self) -> int:
        """The operations of forward and backward pass without the recomputed scores."""
        return self.forward + self.backward

    @property
    def hardware(self) -> int:
        """The operations of forward and backward pass with the recomputed scores."""
        return self.model + self.recomputed


def attention_flops(
    query: Float[AnyArray, "batch q_len heads head_dim"] | jax.ShapeDtypeStruct,
    key: Float[AnyArray, "batch kv_len kv_heads head_dim"] | jax.ShapeDtypeStruct,
    value: Float[AnyArray, "batch kv_len kv_heads value_dim"] | jax.ShapeDtypeStruct,
    bias: None = None,
    mask: Bool[AnyArray, "..."] | None = None,
    **options: Unpack[AttentionOptions],
) -> AttentionFlops:
    """Returns the floating-point operations of one call of attention, by the pairs of its mask.

    XLA's ``cost_analysis`` sees a custom call and knows no operations. The count is exact, and no
    array has the size sequence × sequence: n rows take O(n log n) time. It runs on the host, also
    while a program is traced::

        x = jax.ShapeDtypeStruct((1, 131072, 32, 128), "bfloat16")
        flops = ba.attention_flops(x, x, x, is_causal=True)
        mfu = layers * flops.model / (seconds * devices * peak)       # the share of attention

    The kernels compute whole tiles, so devices also compute pairs that the mask hides.

    Args:
      query: ``[batch, q_len, heads, head_dim]``, the whole array or its type, or without the batch.
      key: ``[batch, kv_len, kv_heads, head_dim]``.
      value: ``[batch, kv_len, kv_heads, value_dim]``.
      bias: must be None, as in `attention`.
      mask: padding of keys or queries, see `attention`.
      **options: the options of `attention`. Those of the mask decide: is_causal, local_window_size,
        segment_ids, visible, query_positions, key_positions, query_offset, query_seq_lengths and
        key_value_seq_lengths. Their values must be known. The rows of their arrays are in the order
        of the sequence; in any other order, such as that of a layout, they need the positions of
        queries and keys. All other options change no count.

    Returns:
      An `AttentionFlops`.

    Raises:
      ValueError: also for arrays of rows in the order of a layout without positions.
      TypeError: also for arrays of the mask that are traced.
    """
    _checks.no_bias(bias)
    given: dict[str, object] = {**options, "mask": mask}
    qkv: tuple[object, object, object] = (query, key, value)
    if len(_checks.array_type("query", query).shape) == 3:
        qkv, given = batch_of_one(qkv, given)
    arrays = {name: _known(name, given.get(name)) for name in DATA}
    del given["mask"]
    checked = check_options("attention_flops", given)
    q, k, v = _checks.array_types(*qkv, any_head_dim=True)
    _check_order(checked, arrays)
    # In a thread of its own the count is no part of a program that this thread traces.
    with ThreadPoolExecutor(max_workers=1) as threads:
        pairs = threads.submit(_visible_pairs, checked, arrays, (q, k, v)).result()
    product = 2 * pairs * q.shape[2]
    forward = product * (q.shape[3] + v.shape[3])
    return AttentionFlops(pairs, forward, 2 * forward, product * q.shape[3])


def _known(name: str, value: object) -> object:
    """Returns an argument of the mask with its arrays in numpy."""
    if isinstance(value, tuple | list):
        return type(value)(_known(name, x) for x in value)
    if isinstance(value, jax.core.Tracer | jax.ShapeDtypeStruct):
        raise TypeError(
            f"{name} must have known values, since they decide how many pairs are visible, got "
            f"{_checks.describe(value)}; call attention_flops outside of jit, with the arrays"
        )
    return np.asarray(value) if isinstance(value, jax.Array) else value


def _check_order(options: Options, arrays: Mapping[str, object]) -> None:
    """Raises for arrays whose rows have the order of a layout over an unknown number of devices."""
    found = [name for name in OF_ROWS if arrays.get(name) is not None]
    has_positions = all(arrays.get(f"{side}_positions") is not None for side in ("query", "key"))
    if found and options.layout != "contiguous" and not has_positions:
        raise ValueError(
            f"{found[0]} must be in the order of the sequence, but layout is {options.layout!r}: "
            "leave layout out, since it changes no count, or give query_positions and "
            "key_positions of the rows, as burst_attention.layout_positions has them"
        )


def _visible_pairs(
    options: Options,
    arrays: Mapping[str, object],
    qkv: tuple[ArrayType, ArrayType, ArrayType],
) -> int:
    """Returns the number of pairs of a query and a key that it sees, in all batch entries."""
    batch, *lengths = qkv[0].shape[0], *(x.shape[1] for x in qkv[:2])
    features = check_features(arrays, *qkv[:2], dropout_rate=0.0)
    features = padding_as_ids(features, qkv, options, _in_sequence)
    # Without arrays all batch entries are alike.
    entries = batch if features.present() else 1
    of_rows = visibility.positions(options, features, *map(_in_sequence, lengths))
    queries, keys = (jnp.broadcast_to(x, (entries, x.shape[1])) for x in of_rows)
    given = [x for x in (features.visible, features.also_visible) if x is not None]
    queries, keys, given = visibility.lowered(queries, keys, given, 1)
    intervals = [np.asarray(x) for x in visibility.narrowed(options, keys, given)]
    if not intervals:
        intervals = [np.broadcast_to(np.array([FIRST, LAST + 1]), (*keys.shape, 2))]
    ids = [
        np.zeros((entries, length), np.int32) if x is None else np.asarray(x)
        for x, length in zip(
            (features.query_segment_ids, features.key_segment_ids), lengths, strict=True
        )
    ]
    rows = zip(np.asarray(queries), *ids, np.stack(intervals, axis=1), strict=True)
    found = sum(_pairs_of_entry(*(x.astype(np.int64) for x in row)) for row in rows)
    return found if entries == batch else found * batch


def _in_sequence(length: int) -> Int32[Array, " rows"]:
    """Returns the positions of rows in the order of the sequence."""
    return jnp.arange(length, dtype=jnp.int32)


def _pairs_of_entry(
    queries: Integers,
    query_ids: Integers,
    key_ids: Integers,
    intervals: Int64[np.ndarray, "intervals _keys 2"],
) -> int:
    """Returns the visible pairs of one batch entry, whose keys have one interval or two.

    Where queries are sorted by segment and position, those that see a key by an interval are
    neighbours. For the intervals a and b of a key, |a ∪ b| = |a| + |b| − |a ∩ b|.
    """
    queries, query_ids = (x[query_ids > PADDING] for x in (queries, query_ids))
    segments, of_queries = np.unique(query_ids, return_inverse=True)
    has_queries = np.isin(key_ids, segments)
    of_keys = np.searchsorted(segments, key_ids[has_queries])
    ordered = np.sort((of_queries << BITS) + queries - FIRST)

    def seen(start: Integers, stop: Integers) -> int:
        first, after = (
            np.searchsorted(ordered, (of_keys << BITS) + x - FIRST) for x in (start, stop)
        )
        return int(np.maximum(after - first, 0).sum())

    each = np.moveaxis(intervals[:, has_queries], 2, 1)
    found = sum(seen(*ends) for ends in each)
    if len(each) == 2:
        found -= seen(each[:, 0].max(0), each[:, 1].min(0))
    return found
