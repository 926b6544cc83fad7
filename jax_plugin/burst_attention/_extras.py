# ruff: noqa: F722  (shapes in annotations are not Python)
"""What a ring gets beside query, key and value: segments, slopes, and where dropout is."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
    from jaxtyping import Array, Float32, Int32, UInt32


class Extras(NamedTuple):
    """Operands of the custom calls after q, k, v, in their order; None is left out."""

    q_segments: Int32[Array, "batch q_len"] | None = None
    kv_segments: Int32[Array, "batch kv_len"] | None = None
    slopes: Float32[Array, "batch heads"] | None = None
    """Each batch entry's own, so that the sum of their gradients is the transpose's business."""
    dropout: UInt32[Array, "batch 4"] | None = None
    """Of each batch entry, see `dropout_place`."""

    def present(self) -> tuple[jax.Array, ...]:
        """Those that there are."""
        return tuple(x for x in self if x is not None)


def dropout_place(
    words: UInt32[Array, " 2"],
    batch: int,
    heads: int,
    batch_axes: tuple[str, ...],
    head_axes: tuple[str, ...],
) -> UInt32[Array, "batch 4"]:
    """For each batch entry: the key's two words, its index and its first query head's.

    Both indices are those of the whole array, whose batch and heads the axes shard. A weight is
    dropped by the number that Philox4x32-10 gives for it under this key::

        r = philox((key position // 4, query position, query head, batch entry))[key position % 4]
        kept where r ≥ round(rate · 2³²), and divided by 1 − rate

    So whether it is dropped depends on nothing else: not on the mesh, the layout or the schedule.
    """
    entry, head = _first(batch_axes, batch), _first(head_axes, heads)
    entries = entry + jnp.arange(batch, dtype=jnp.uint32)
    columns = (words[0], words[1], entries, head)
    return jnp.stack([jnp.broadcast_to(column, (batch,)) for column in columns], axis=1)


def _first(axes: tuple[str, ...], count: int) -> jax.Array:
    index = lax.axis_index(axes) if axes else jnp.zeros((), jnp.int32)
    return index.astype(jnp.uint32) * jnp.uint32(count)
