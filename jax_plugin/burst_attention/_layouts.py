"""Layouts: which device holds which global position, and the order of arrays in memory.

A sequence is cut for ``axis_size`` devices:

- ``contiguous``: device r holds the r-th of axis_size equal parts.
- ``zigzag``: the sequence is cut into 2 · axis_size chunks; device r holds chunks r and
  2 · axis_size − 1 − r, so causal work is equal on all devices.
- ``striped``: device r holds positions r, r + axis_size, r + 2 · axis_size, …
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Int32

from burst_attention import _checks, _mesh
from burst_attention._types import LAYOUTS, Layout

AnyArray = TypeVar("AnyArray", np.ndarray, jax.Array)


def layout_positions(
    seq_len: int, axis_size: int, layout: Layout, rank: int | None = None
) -> Int[np.ndarray, " tokens"]:
    """Returns the global position of every token in storage order, on the host: for data loaders.

    ``tokens[layout_positions(...)]`` equals ``to_layout(tokens, ..., axis=0)``.

    Args:
      seq_len: length of the whole sequence, a multiple of axis_size; for ``zigzag`` a multiple of
        2 · axis_size.
      axis_size: number of devices along the sequence.
      layout: ``contiguous``, ``zigzag`` or ``striped``.
      rank: a device, if only its positions are wanted.

    Returns:
      int64 ``[seq_len]``; with ``rank`` ``[seq_len / axis_size]``.

    Raises:
      ValueError: for a length that the layout can't cut, a wrong rank or an unknown layout.
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
    """Returns the global positions of this device's tokens: for rotary embeddings.

    Works inside ``jax.shard_map``.

    Args:
      seq_len_local: number of tokens of this device.
      axis_name: mesh axis along which the sequence is sharded, or a pair (outer, inner).
      layout: ``contiguous``, ``zigzag`` or ``striped``.

    Returns:
      int32 ``[seq_len_local]``, varying over ``axis_name``.

    Raises:
      ValueError: outside ``shard_map``, or for a negative length, or an odd one with ``zigzag``.
    """
    axes = _mesh.ring_axes(axis_name)
    mesh = _mesh.ring_mesh(axes, "local_positions")
    layout = _checks.choice("layout", layout, LAYOUTS)
    seq_len_local = _checks.integer("seq_len_local", seq_len_local)
    if seq_len_local < 0:
        raise ValueError(f"seq_len_local must not be negative, got {seq_len_local}")
    _checks.shard_length("the sequence", seq_len_local, layout)
    local = jnp.arange(seq_len_local, dtype=jnp.int32)
    axis_size = _mesh.axes_size(mesh, axes)
    return positions_of(local, lax.axis_index(axes), axis_size, seq_len_local, layout)


def positions_of(
    local: Int32[Array, "*rows"],
    rank: Int32[Array, ""],
    axis_size: int,
    seq_len_local: int,
    layout: Layout,
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
    """Returns a global array reordered so that equal shards of ``axis`` have a layout.

    Args:
      x: global array in the order of the sequence, of numpy or JAX.
      axis_size: number of devices along the sequence.
      layout: ``contiguous`` (no change), ``zigzag`` or ``striped``.
      axis: dimension of the sequence in x.

    Returns:
      A numpy array for a numpy array, a JAX array for a JAX array. A JAX array keeps its sharding.
      Under ``jit`` it does so on Explicit mesh axes; on Auto axes the compiler decides, unless
      ``jax.lax.with_sharding_constraint`` tells it the sharding.

    Raises:
      ValueError: for a length that the layout can't cut, or an unknown layout.
    """
    axis = _checks.sequence_axis(x, axis)
    order = layout_positions(x.shape[axis], axis_size, layout)
    return x if layout == "contiguous" else take(x, order, axis)


def from_layout(x: AnyArray, axis_size: int, layout: Layout, axis: int = 1) -> AnyArray:
    """Returns a global array in the order of the sequence: the exact inverse of `to_layout`."""
    axis = _checks.sequence_axis(x, axis)
    order = np.argsort(layout_positions(x.shape[axis], axis_size, layout))
    return x if layout == "contiguous" else take(x, order, axis)


def take(x: AnyArray, order: Int[np.ndarray, "*rows tokens"], axis: int) -> AnyArray:
    """Returns an array with the tokens along ``axis`` in another order.

    An order of two dimensions holds one for each entry of the dimension before ``axis``.
    """
    index: tuple[Any, ...] = (slice(None),) * axis + (order,)
    if order.ndim == 2:
        index = (slice(None),) * (axis - 1) + (np.arange(len(order))[:, None], order)
    return x[index] if isinstance(x, np.ndarray) else _taken(x, index)


def _taken(x: jax.Array, index: tuple[Any, ...]) -> jax.Array:
    """Returns the tokens of an array at an index, which arrays of the host are part of."""
    index = tuple(beside(x, part) if isinstance(part, np.ndarray) else part for part in index)
    # Each token is taken once, so the transpose is a scatter without collisions.
    taken = x.at[index].get(
        mode="promise_in_bounds",
        unique_indices=True,
        wrap_negative_indices=False,
        out_sharding=_explicit_sharding(x),
    )
    if isinstance(taken, jax.core.Tracer) or not x.committed:
        # In a program, or uncommitted, the result goes where its uses are. An array that was put on
        # devices stays there.
        return taken
    return jax.device_put(taken, x.sharding)


def beside(x: jax.Array, value: np.ndarray) -> np.ndarray | jax.Array:
    """Returns a copy of an array of the host for an operation on ``x``, whole on its devices.

    Outside of programs the transfer is explicit: ``jax.transfer_guard("disallow")`` takes implicit
    ones for mistakes. JAX may read the memory that it gets after the call.
    """
    value = value.copy()
    # For devices of several processes, device_put would first compare the value between them.
    if isinstance(x, jax.core.Tracer) or not x.is_fully_addressable:
        return value
    if not x.committed:
        return jax.device_put(value)
    place = x.sharding
    if isinstance(place, NamedSharding):
        place = NamedSharding(place.mesh, PartitionSpec())
    return jax.device_put(value, place)


def _explicit_sharding(x: jax.Array) -> NamedSharding | None:
    sharding = jax.typeof(x).sharding
    return None if sharding.mesh.empty or not sharding.mesh.explicit_axes else sharding


def parts(axis_size: object, layout: object) -> int:
    """Returns into how many equal parts a layout cuts a sequence for ``axis_size`` devices."""
    layout = _checks.choice("layout", layout, LAYOUTS)
    size = _checks.size("axis_size", axis_size)
    return 2 * size if layout == "zigzag" else size


def _cut(seq_len: object, axis_size: object, layout: object) -> tuple[int, int]:
    """Returns both numbers as ints of Python, of a sequence that the layout can cut."""
    multiple = parts(axis_size, layout)
    length, size = _checks.integer("seq_len", seq_len), _checks.integer("axis_size", axis_size)
    if length < 0 or length % multiple:
        raise ValueError(
            f"the sequence must be a multiple of {multiple} tokens for layout {layout!r} on "
            f"{size} devices, got {length}; {_checks.PAD}"
        )
    return length, size
