"""Sequences of any length: padded to one that a layout can cut."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from burst_attention import _checks
from burst_attention._layouts import AnyArray, parts
from burst_attention._types import Layout

PADDING = -1
"""A segment id that matches nothing."""


def pad_sequence(
    x: AnyArray, axis_size: int, layout: Layout, axis: int = 1, value: Any = 0
) -> tuple[AnyArray, AnyArray]:
    """Pads a global array at the end of its sequence to a length that ``layout`` can cut.

    The segment ids make the padding inert: it is seen by no real token, sees nothing, gets out 0
    and gives no gradient::

        tokens, segment_ids = ba.pad_sequence(tokens, 8, "zigzag")
        tokens, segment_ids = (ba.to_layout(x, 8, "zigzag") for x in (tokens, segment_ids))
        ...  # attention(..., layout="zigzag", segment_ids=segment_ids)
        out = ba.from_layout(out, 8, "zigzag")[:, :length]

    Segment ids of packed documents are padded by ``pad_sequence(ids, 8, "zigzag", value=-1)[0]``.

    Args:
      x: global array in the order of the sequence, numpy or jax.
      axis_size: devices along the sequence.
      layout: ``contiguous``, ``zigzag`` or ``striped``.
      axis: the sequence in x.
      value: what to pad with.

    Returns:
      ``(padded, segment_ids)``, numpy for numpy, jax for jax. segment_ids is int32 and has the
      dimensions of padded up to the sequence, so ``[batch, padded length]`` for axis 1: 0 for what
      was there, −1 for padding.

    Raises:
      ValueError: for an unknown layout, or an axis that x has not.
    """
    if not isinstance(x, np.ndarray | jax.Array):
        raise TypeError(f"x must be a numpy or jax array, got {type(x).__name__}")
    axis = _checks.dimension(axis, x.ndim)
    length, multiple = x.shape[axis], parts(axis_size, layout)
    missing = -length % multiple
    module: Any = np if isinstance(x, np.ndarray) else jnp
    widths = [(0, missing if dimension == axis else 0) for dimension in range(x.ndim)]
    padded = module.pad(x, widths, constant_values=value) if missing else x
    ids = np.where(np.arange(length + missing) < length, 0, PADDING).astype(np.int32)
    return padded, module.array(np.broadcast_to(ids, (*x.shape[:axis], length + missing)))
