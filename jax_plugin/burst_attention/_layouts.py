# ruff: noqa: F722  (shapes in annotations are not Python)
"""Which global position lies where, and reordering arrays accordingly.

For ``axis_size`` devices and ``seq_len`` tokens in all:

- ``contiguous``: device r holds the r-th of axis_size equal parts.
- ``zigzag``: the sequence is cut into 2 · axis_size chunks; device r holds chunks r and
  2 · axis_size − 1 − r, so causal work is equal on all devices.
- ``striped``: device r holds positions r, r + axis_size, r + 2 · axis_size, …
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_attention import _checks
from burst_attention._types import Layout

if TYPE_CHECKING:
    from jaxtyping import Array, Int, Int32

AnyArray = TypeVar("AnyArray", np.ndarray, jax.Array)


def layout_positions(
    seq_len: int, axis_size: int, layout: Layout, rank: int | None = None
) -> Int[np.ndarray, " tokens"]:
    """Global position of every token in storage order, on the host: for data loaders.

    ``tokens[layout_positions(...)]`` is what `to_layout` makes of ``tokens``.

    Args:
      seq_len: tokens in all; a multiple of axis_size, for ``zigzag`` of twice that.
      axis_size: devices along the sequence.
      layout: ``contiguous``, ``zigzag`` or ``striped``.
      rank: only this device's positions, ``[seq_len / axis_size]``.

    Returns:
      int64 ``[seq_len]``, or of one device.

    Raises:
      ValueError: for a length that doesn't divide, a wrong rank or layout.
    """
    seq_len, axis_size = _cut(seq_len, axis_size, layout)
    positions = np.arange(seq_len, dtype=np.int64)
    if layout == "zigzag":
        chunks = positions.reshape(2, axis_size, -1)
        shards = np.concatenate([chunks[0], chunks[1, ::-1]], axis=1)
    elif layout == "striped":
        shards = positions.reshape(-1, axis_size).T
    else:
        shards = positions.reshape(axis_size, -1)
    if rank is None:
        return shards.reshape(-1)
    rank = _checks.integer("rank", rank)
    if not 0 <= rank < axis_size:
        raise ValueError(f"rank must be from 0 to {axis_size - 1}, got {rank}")
    return shards[rank].copy()


def local_positions(
    seq_len_local: int, *, axis_name: str | tuple[str, ...], layout: Layout = "contiguous"
) -> Int32[Array, " seq"]:
    """Global positions of this device's tokens, inside ``jax.shard_map``: for rotary embeddings.

    Args:
      seq_len_local: tokens of this device.
      axis_name: mesh axis along which the sequence is sharded, or (outer, inner).
      layout: ``contiguous``, ``zigzag`` or ``striped``.

    Returns:
      int32 ``[seq_len_local]``, varying over ``axis_name``.

    Raises:
      ValueError: outside ``shard_map``, or for a negative length, or an odd one with ``zigzag``.
    """
    axes = _checks.ring_axes(axis_name)
    mesh = _checks.ring_mesh(axes, "local_positions")
    _checks.choice("layout", layout, _checks.LAYOUTS)
    seq_len_local = _checks.integer("seq_len_local", seq_len_local)
    if seq_len_local < 0:
        raise ValueError(f"seq_len_local must not be negative, got {seq_len_local}")
    _checks.shard_length("the sequence", seq_len_local, layout)
    axis_size, rank = math.prod(mesh.shape[name] for name in axes), lax.axis_index(axes)
    local = jnp.arange(seq_len_local, dtype=jnp.int32)
    return positions_of(local, rank, axis_size, seq_len_local, layout)


def positions_of(
    local: Int32[Array, "*rows"],
    rank: Int32[Array, ""],
    axis_size: int,
    seq_len_local: int,
    layout: str,
) -> Int32[Array, "*rows"]:
    """Returns the global positions of tokens, given by their indices in the shard of a rank."""
    if layout == "striped":
        return rank + axis_size * local
    if layout == "zigzag":
        half = seq_len_local // 2
        late = 2 * axis_size - 1 - rank
        return jnp.where(local < half, rank * half + local, late * half + local - half)
    return rank * seq_len_local + local


def to_layout(x: AnyArray, axis_size: int, layout: Layout, axis: int = 1) -> AnyArray:
    """Reorders a global array so that equal shards of ``axis`` hold what ``layout`` says.

    Args:
      x: global array in the order of the sequence, numpy or jax.
      axis_size: devices along the sequence.
      layout: ``contiguous`` (no change), ``zigzag`` or ``striped``.
      axis: the sequence in x.

    Returns:
      numpy for numpy, jax for jax. A jax array keeps its sharding; under ``jit`` that holds on
      Explicit mesh axes, while on Auto ones the compiler decides
      (``jax.lax.with_sharding_constraint`` tells it).

    Raises:
      ValueError: for a length that doesn't divide, or an unknown layout.
    """
    return _reorder(x, axis_size, layout, axis, inverse=False)


def from_layout(x: AnyArray, axis_size: int, layout: Layout, axis: int = 1) -> AnyArray:
    """Back to the order of the sequence: the exact inverse of `to_layout`, same arguments."""
    return _reorder(x, axis_size, layout, axis, inverse=True)


def _reorder(x: Any, axis_size: int, layout: Layout, axis: int, *, inverse: bool) -> Any:
    if not isinstance(x, np.ndarray | jax.Array):
        raise TypeError(f"x must be a numpy or jax array, got {type(x).__name__}")
    axis = _checks.dimension(axis, x.ndim)
    positions = layout_positions(x.shape[axis], axis_size, layout)
    if layout == "contiguous":
        return x
    order = np.argsort(positions) if inverse else positions
    if isinstance(x, np.ndarray):
        return np.take(x, order, axis)
    index = (slice(None),) * axis + (order,)
    # Each token is taken once: the transpose is a scatter without collisions.
    taken = x.at[index].get(
        mode="promise_in_bounds", unique_indices=True, out_sharding=_explicit_sharding(x)
    )
    if isinstance(taken, jax.core.Tracer) or not x.committed:
        # Only an array that was put on devices must stay there. In a program, or uncommitted, the
        # result goes where its uses are.
        return taken
    return jax.device_put(taken, x.sharding)


def _explicit_sharding(x: jax.Array) -> jax.sharding.NamedSharding | None:
    sharding = jax.typeof(x).sharding
    return None if sharding.mesh.empty or not sharding.mesh.explicit_axes else sharding


def parts(axis_size: int, layout: str) -> int:
    """Into how many equal parts a layout cuts a sequence for ``axis_size`` devices."""
    _checks.choice("layout", layout, _checks.LAYOUTS)
    axis_size = _checks.integer("axis_size", axis_size)
    if axis_size < 1:
        raise ValueError(f"axis_size must be at least 1, got {axis_size}")
    return 2 * axis_size if layout == "zigzag" else axis_size


def _cut(seq_len: int, axis_size: int, layout: str) -> tuple[int, int]:
    """Both numbers as ints of Python, of a sequence that the layout can cut."""
    multiple = parts(axis_size, layout)
    seq_len = _checks.integer("seq_len", seq_len)
    if seq_len < 0 or seq_len % multiple:
        raise ValueError(
            f"the sequence must be a multiple of {multiple} tokens for layout {layout!r} on "
            f"{axis_size} devices, got {seq_len}; {_checks.PAD}"
        )
    return seq_len, operator.index(axis_size)
