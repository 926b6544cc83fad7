"""Padding for sequences of a length that a layout can't cut."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from burst_attention import _checks
from burst_attention._layouts import AnyArray, beside, parts
from burst_attention._types import Layout

PADDING = -1
"""A segment id that matches nothing."""


def pad_sequence(
    x: AnyArray, axis_size: int, layout: Layout, axis: int = 1, value: ArrayLike = 0
) -> tuple[AnyArray, AnyArray]:
    """Pads a global array at the end of its sequence to a length that ``layout`` can cut.

    The segment ids make the padding inert: no token sees it, it sees no token, its out is 0, and it
    gives no gradient::

        tokens, segment_ids = ba.pad_sequence(tokens, 8, "zigzag")
        tokens, segment_ids = (ba.to_layout(x, 8, "zigzag") for x in (tokens, segment_ids))
        ...  # attention(..., layout="zigzag", segment_ids=segment_ids)
        out = ba.from_layout(out, 8, "zigzag")[:, :length]

    ``pad_sequence(ids, 8, "zigzag", value=-1)[0]`` pads the segment ids of packed documents.

    Args:
      x: global array in the order of the sequence, of numpy or JAX.
      axis_size: number of devices along the sequence.
      layout: ``contiguous``, ``zigzag`` or ``striped``.
      axis: dimension of the sequence in x.
      value: value of the padding.

    Returns:
      ``(padded, segment_ids)``, numpy arrays for a numpy array, JAX arrays for a JAX array.
      segment_ids is int32 and has the dimensions of padded up to the sequence, so
      ``[batch, padded length]`` for axis 1. Ids are 0 for the tokens of x and −1 for padding.

    Raises:
      ValueError: for an unknown layout, or an axis that x does not have.
    """
    axis = _checks.sequence_axis(x, axis)
    padded = padded_to(x, parts(axis_size, layout), axis, value)
    length, whole = x.shape[axis], padded.shape[axis]
    ids = np.where(np.arange(whole) < length, 0, PADDING).astype(np.int32)
    ids = np.broadcast_to(ids, (*x.shape[:axis], whole))
    return padded, ids.copy() if isinstance(x, np.ndarray) else jax.device_put(ids)


def padded_to(x: AnyArray, multiple: int, axis: int, value: ArrayLike = 0) -> AnyArray:
    """Returns an array padded at the end of ``axis`` to a multiple; x itself where it is one."""
    missing = -x.shape[axis] % multiple
    if not missing:
        return x
    widths = [(0, missing if dimension == axis % x.ndim else 0) for dimension in range(x.ndim)]
    if isinstance(x, np.ndarray):
        return np.pad(x, widths, constant_values=value)
    number = value if isinstance(value, jax.Array) else beside(x, np.asarray(value).astype(x.dtype))
    return lax.pad(x, jnp.asarray(number, x.dtype), [(low, high, 0) for low, high in widths])


def segment_ids_from_cu_seqlens(cu_seqlens: AnyArray, total_length: int) -> AnyArray:
    """Returns the segment ids of packed sequences from their cumulative lengths.

    Document d holds the tokens cu_seqlens[d] … cu_seqlens[d + 1] − 1, as in the functions of
    flash-attention for sequences of variable lengths::

        lengths 3, 2 and padding:  cu_seqlens [0, 3, 5]  →  ids [0, 0, 0, 1, 1, −1, −1]

    Where queries and keys differ, a pair of calls gives the pair ``segment_ids``. The ids are in
    the order of the sequence: `to_layout` or ``order="sequence"`` brings them into a layout.

    Args:
      cu_seqlens: integers ``[documents + 1]``, of numpy or JAX: 0, then the end of each document.
        Repeating the last entry keeps one shape for any number of documents.
      total_length: number of tokens, with the padding after the last document.

    Returns:
      int32 ``[total_length]``, a numpy array for a numpy array, a JAX array for a JAX array or
      inside ``jit``. Tokens beyond the last entry are padding and have the id −1.

    Raises:
      TypeError: for lengths that are no array of integers, and a total that is no int.
      ValueError: for another number of dimensions or a negative total; for a numpy array also where
        it does not begin with 0, falls, or ends beyond total_length.
    """
    total = _checks.integer("total_length", total_length)
    if total < 0:
        raise ValueError(f"total_length must not be negative, got {total}")
    if total > _checks.MAX_INT32:
        raise _checks.beyond_int32("total_length", total)
    if not isinstance(cu_seqlens, np.ndarray | jax.Array) or not jnp.issubdtype(
        cu_seqlens.dtype, jnp.integer
    ):
        kind = getattr(cu_seqlens, "dtype", type(cu_seqlens).__name__)
        raise TypeError(f"cu_seqlens must be a numpy or jax array of integers, got {kind}")
    if cu_seqlens.ndim != 1 or not cu_seqlens.size:
        raise ValueError(
            "cu_seqlens must have shape [documents + 1], 0 and the end of each document, got shape "
            f"{cu_seqlens.shape}"
        )
    if isinstance(cu_seqlens, np.ndarray):
        ends = cu_seqlens.astype(np.int64)
        if ends[0] or (np.diff(ends) < 0).any() or ends[-1] > total:
            raise ValueError(
                f"cu_seqlens must begin with 0, never fall and end at most at total_length={total},"
                f" got {cu_seqlens}"
            )
        return _segment_ids(cu_seqlens, total)
    return _segment_ids_on_devices(cu_seqlens, total)


def _segment_ids(cu_seqlens: AnyArray, total: int) -> AnyArray:
    """Returns the segment ids of checked cumulative lengths."""
    module = np if isinstance(cu_seqlens, np.ndarray) else jnp
    tokens = module.arange(total, dtype=np.int32)
    # Wide integers beyond the total become the total, so that all of them fit int32.
    is_wide = cu_seqlens.dtype.itemsize >= 4
    ends = (module.clip(cu_seqlens, 0, total) if is_wide else cu_seqlens).astype(np.int32)
    documents = module.searchsorted(ends, tokens, side="right") - 1
    return module.where(tokens < ends[-1], documents, PADDING).astype(np.int32)


# Outside jit, one program instead of one for each operation.
_segment_ids_on_devices = jax.jit(_segment_ids, static_argnums=1)
