"""Values of neighbouring tokens, for a sequence that is sharded across devices."""

from dataclasses import dataclass
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, Int32, Shaped

from burst_attention import _checks, _mesh
from burst_attention._attention.arguments import cast
from burst_attention._attention.options import AnyArray
from burst_attention._batching import spread
from burst_attention._padding import PADDING
from burst_attention._types import LAYOUTS, Axes, Layout

Tokens: TypeAlias = Shaped[Array, "..."]
Fill: TypeAlias = np.ndarray
"""The value where there is no neighbour, in the dtype of the tokens."""
GLOBALLY = "on global arrays in the order of the sequence slice and pad with jax.numpy"


def shift(
    x: Shaped[Array, "..."],
    offset: int = 1,
    *,
    axis_name: str | Axes,
    layout: Layout = "contiguous",
    axis: int = 1,
    fill: float = 0,
    segment_ids: Int[AnyArray, "*batch seq"] | None = None,
    positions: Int[AnyArray, "*batch seq"] | None = None,
    block: int = 128,
) -> Shaped[Array, "..."]:
    """Returns each token's neighbour's value, inside ``jax.shard_map``.

    With x[p] the value of the token at position p of the whole sequence::

        out[p] = x[p + offset]        fill beyond the sequence or the token's segment

    So offset 1 gives the next token, as labels need it, offset k the target of the k-th head of
    multi-token prediction, and −1 the previous token, as a short convolution needs it::

        labels = ba.shift(tokens, axis_name="context", layout="zigzag", fill=-100)

    Linear in x and differentiable in every way. Ranks exchange, for a batch entry:

    - contiguous: one message of abs(offset) tokens, zigzag: two of them, as long as a chunk has so
      many tokens. Longer offsets take their tokens from chunks further away.
    - striped: the shard of one rank, nothing for multiples of the ring's size.
    - blocks in any order (``positions``): abs(offset) tokens of each block, by all-gather. The
      order is data, so it may change from call to call.

    Args:
      x: ``[*batch, seq, ...]`` of any dtype, this device's part of the sequence.
      offset: distance of the neighbour, a Python int of any sign.
      axis_name: mesh axis along which the sequence is sharded, or a pair (outer, inner).
      layout: ``contiguous``, ``zigzag`` or ``striped``.
      axis: dimension of the sequence in x.
      fill: a Python number, the value where there is no neighbour.
      segment_ids: integers, of the shape of x up to the sequence, cast as in `attention`. A token
        whose neighbour has another id gets the fill. So does padding, which has negative ids.
      positions: integers, of the shape of x up to the sequence, cast as in `attention`: the
        positions of tokens that the ranks hold as blocks in any order, such as
        ``mask.query_positions`` of `balance_documents`. The tokens of a block follow each other,
        and its first position is a multiple of ``block``.
      block: tokens of a block; only ``positions`` need it. The offset is then at most a block.

    Returns:
      An array of the shape and dtype of x, varying over ``axis_name``.

    Raises:
      ValueError, TypeError: while tracing, with the way out.
    """
    x = _checks.as_array(_checks.array_type("x", x))
    axis = _checks.sequence_axis(x, axis)
    axes = _mesh.ring_axes(axis_name)
    mesh = _mesh.ring_mesh(axes, "shift", GLOBALLY)
    layout = _checks.choice("layout", layout, LAYOUTS)
    _checks.shard_length("x", x.shape[axis], layout)
    offset, value = _checks.integer("offset", offset), _fill(fill, x.dtype)
    block = _checks.at_least_1("block", block)
    shape = x.shape[: axis + 1]

    def of_tokens(name: str, each: str, values: object) -> Int32[Array, "..."] | None:
        if values is None:
            return None
        found = cast(name, each, values, "int32")
        return _checks.shaped(name, found, "int32", shape, "that of x up to the sequence")

    ids = of_tokens("segment_ids", "id", segment_ids)
    order = of_tokens("positions", "position", positions)
    x, ids, order = _mesh.vary_together(axes, (x, ids, order))
    if order is not None:
        _check_blocks(layout, shape[axis], offset, block)
    ring = _Ring(axes, _mesh.axes_size(mesh, axes), layout, axis, offset)
    if x.size == 0:
        return x

    def moved(values: Tokens, fill: Fill) -> Tokens:
        if order is not None:
            return _between_blocks(ring, values, fill, order[..., ::block] // block)
        move = _between_stripes if layout == "striped" else _between_chunks
        return move(ring, values, fill)

    out = moved(x, value)
    if ids is None:
        return out
    same = (moved(ids, np.array(PADDING, np.int32)) == ids) & (ids >= 0)
    return jnp.where(same.reshape(shape + (1,) * (x.ndim - axis - 1)), out, _full(x, value))


@dataclass(frozen=True)
class _Ring:
    """The ring of a call, and the neighbour that it asks for."""

    axes: Axes
    size: int
    layout: Layout
    axis: int
    """The dimension of the sequence."""
    offset: int

    def of_this_rank(self, by_rank: list[bool]) -> Bool[Array, ""]:
        """Returns the value of this rank among those of all ranks."""
        return jnp.array(by_rank)[lax.axis_index(self.axes)]

    def cut(self, x: Tokens, start: int, stop: int) -> Tokens:
        """Returns a range of tokens."""
        return lax.slice_in_dim(x, start, stop, axis=self.axis)


def _between_chunks(ring: _Ring, x: Tokens, fill: Fill) -> Tokens:
    """Returns the neighbours' values in the contiguous and the zigzag layout.

    With chunks of n tokens and offset = a · n + b, chunk c of the result is the tail of chunk c + a
    from token b on, and then the first b tokens of chunk c + a + 1.
    """
    chunks = jnp.split(x, 2 if ring.layout == "zigzag" else 1, ring.axis)
    tokens = chunks[0].shape[ring.axis]
    distance, rest = divmod(ring.offset, tokens)
    tails = [ring.cut(chunk, rest, tokens) for chunk in chunks]
    parts = [_from_chunks(ring, tails, distance, fill)]
    if rest:
        heads = [ring.cut(chunk, 0, rest) for chunk in chunks]
        parts.append(_from_chunks(ring, heads, distance + 1, fill))
    in_order = [part for of_chunk in zip(*parts, strict=True) for part in of_chunk]
    return jnp.concatenate(in_order, ring.axis)


def _from_chunks(ring: _Ring, own: list[Tokens], distance: int, fill: Fill) -> list[Tokens]:
    """Returns, for each chunk of this rank, what the rank of the chunk at a distance gives.

    Args:
      own: what this rank gives, for each of its chunks.
      distance: from the chunk that gets to the chunk that gives.
      fill: what a chunk without such a chunk gets.
    """
    # Chunk c belongs to rank c, in the zigzag layout also to rank 2P − 1 − c as its second chunk.
    holders = [(rank, 0) for rank in range(ring.size)]
    if len(own) == 2:
        holders += [(rank, 1) for rank in reversed(range(ring.size))]
    results = [_full(x, fill) for x in own]
    for to in range(len(own)):
        for source, given in enumerate(own):
            pairs = [
                (giver[0], holders[chunk - distance][0])
                for chunk, giver in enumerate(holders)
                if giver[1] == source
                and 0 <= chunk - distance < len(holders)
                and holders[chunk - distance][1] == to
            ]
            if all(giver == getter for giver, getter in pairs):
                came = given
            else:
                came = _mesh.permute(given, ring.axes, pairs)
            getters = {getter for _, getter in pairs}
            if len(getters) == ring.size:
                results[to] = came
            elif getters:
                gets = ring.of_this_rank([rank in getters for rank in range(ring.size)])
                results[to] = jnp.where(gets, came, results[to])
    return results


def _between_stripes(ring: _Ring, x: Tokens, fill: Fill) -> Tokens:
    """Returns the neighbours' values in the striped layout.

    With P ranks and offset = a · P + b, rank r finds its neighbours at rank r + b, a tokens
    further; beyond the last rank at rank r + b − P, a + 1 tokens further.
    """
    distance, step = divmod(ring.offset, ring.size)
    if step == 0:
        return _along(ring, x, distance, fill)
    pairs = [((rank + step) % ring.size, rank) for rank in range(ring.size)]
    came = _mesh.permute(x, ring.axes, pairs)
    wraps = ring.of_this_rank([rank + step >= ring.size for rank in range(ring.size)])
    near, far = (_along(ring, came, each, fill) for each in (distance, distance + 1))
    return jnp.where(wraps, far, near)


def _along(ring: _Ring, x: Tokens, distance: int, fill: Fill) -> Tokens:
    """Returns the values of the tokens at a distance within an array."""
    length = x.shape[ring.axis]
    start, stop = (min(max(end + distance, 0), length) for end in (0, length))
    missing = ring.cut(_full(x, fill), 0, length - (stop - start))
    kept = ring.cut(x, start, stop)
    parts = [kept, missing] if distance > 0 else [missing, kept]
    return jnp.concatenate(parts, ring.axis)


def _between_blocks(
    ring: _Ring, x: Tokens, fill: Fill, own: Int32[Array, "*batch blocks"]
) -> Tokens:
    """Returns the neighbours' values of blocks in any order.

    ``own`` holds the index of each of this rank's blocks in the sequence.
    """
    axis, count = ring.axis, abs(ring.offset)
    size = x.shape[axis] // own.shape[axis]
    blocks = x.reshape(*own.shape, size, *x.shape[axis + 1 :])
    edge = (0, count) if ring.offset > 0 else (size - count, size)
    edges = lax.slice_in_dim(blocks, *edge, axis=axis + 1)
    edges, indices = (lax.all_gather(y, ring.axes, axis=axis, tiled=True) for y in (edges, own))
    wanted = own + int(np.sign(ring.offset))
    exists = (wanted >= 0) & (wanted < indices.shape[axis])
    order = jnp.argsort(indices, axis=axis).astype(jnp.int32)
    at = jnp.take_along_axis(order, jnp.where(exists, wanted, 0), axis)
    at, exists = (y.reshape(*own.shape, *(1,) * (x.ndim - axis)) for y in (at, exists))
    came = jnp.take_along_axis(edges, at, axis)
    came = jnp.where(exists, came, _full(came, fill))
    kept = (count, size) if ring.offset > 0 else (0, size - count)
    parts = [lax.slice_in_dim(blocks, *kept, axis=axis + 1), came]
    return jnp.concatenate(parts if ring.offset > 0 else parts[::-1], axis + 1).reshape(x.shape)


def _full(x: Tokens, fill: Fill) -> Tokens:
    """Returns an array of the fill, typed as ``x`` is."""
    return spread((x, _mesh.vary_like(x, jnp.full(x.shape, fill, x.dtype))))[1]


def _fill(value: object, dtype: np.dtype) -> Fill:
    """Returns the fill in a dtype that holds it."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.asarray(_checks.static_number("fill", value)).astype(dtype)
    least, most = 0, 1
    if dtype.kind != "b":
        limits = np.iinfo(dtype)
        least, most = int(limits.min), int(limits.max)
    is_bool = isinstance(value, bool | np.bool_)
    number = int(bool(value)) if is_bool else _checks.integer("fill, with integer x,", value)
    if not least <= number <= most:
        raise ValueError(f"fill must be from {least} to {most}, since x is {dtype}, got {number}")
    return np.asarray(number, dtype)


def _check_blocks(layout: Layout, length: int, offset: int, block: int) -> None:
    """Raises where blocks in any order do not fit the other arguments."""
    if layout != "contiguous":
        raise ValueError(
            f"positions replace the layout, so it must be 'contiguous', got {layout!r}"
        )
    if length % block:
        raise ValueError(f"tokens per device must be a multiple of block, {block}, got {length}")
    if abs(offset) > block:
        raise ValueError(
            f"offset must be at most block, {block}, with positions, got {offset}; shift twice, or "
            "give the tokens to ranks in longer blocks"
        )
