"""Padding for sequences of a length that a layout can't cut."""

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from burst_attention import _checks
from burst_attention._layouts import AnyArray, parts
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
    length, multiple = x.shape[axis], parts(axis_size, layout)
    missing = -length % multiple
    module = np if isinstance(x, np.ndarray) else jnp
    widths = [(0, missing if dimension == axis else 0) for dimension in range(x.ndim)]
    padded = module.pad(x, widths, constant_values=value) if missing else x
    ids = np.where(np.arange(length + missing) < length, 0, PADDING).astype(np.int32)
    return padded, module.array(np.broadcast_to(ids, (*x.shape[:axis], length + missing)))
