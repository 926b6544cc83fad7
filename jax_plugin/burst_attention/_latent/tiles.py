"""A tile of latent attention: this device's queries and one chunk of latents, on one device.

The user's function expands the chunk to keys and values, which live as long as the tile.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, Shaped

from burst_attention._attention import calls, shards, vjp
from burst_attention._attention.features import Features
from burst_attention._attention.options import NO_LIMIT, Options
from burst_attention._attention.ring import Ring
from burst_attention._checks import HEAD_DIM_MULTIPLE, MAX_INT32
from burst_attention._decode.merge import Pair
from burst_attention._latent.expansion import Captured, Expansion, KeyValue, Leaves, floats
from burst_attention._layouts import positions_of
from burst_attention._mesh import platform as platform_of
from burst_attention._mesh import vary_like
from burst_attention._padding import padded_to
from burst_attention._types import Axes

Rows: TypeAlias = tuple[int, int] | None
"""The first of some rows of a shard and the row after the last; None for all rows."""
Gradients: TypeAlias = tuple[jax.Array, list[jax.Array], list[jax.Array]]
"""The gradients of query, of the parameters and of the latents that are floats."""


class Chunk(NamedTuple):
    """What travels of a shard."""

    latent: Leaves
    ids: Int32[Array, "batch seq"] | None
    """The segments of the keys."""


class Inputs(NamedTuple):
    """The arrays of a call, checked."""

    query: Float[Array, "batch seq heads head_dim"]
    chunk: Chunk
    params: Leaves
    ids: Int32[Array, "batch seq"] | None
    """The segments of the queries."""
    captured: Captured | None = None
    """What ``expand`` found elsewhere, once it is traced. It has no gradient."""


@dataclass(frozen=True)
class Call:
    """What is static about a call."""

    expand: Expansion
    options: Options
    axes: Axes
    world_size: int
    with_lse: bool
    """Whether lse may have a gradient."""

    def kept_dtype(self, query: jax.Array) -> jnp.dtype:
        """Returns the type in which the backward pass gets o."""
        keys = self.world_size * query.shape[1]
        is_asked = self.options.residual_dtype is not None
        return calls.kept_dtype(query.dtype, keys, self.options.window(keys), is_asked)

    def hops(self, rows: int) -> tuple[int, int]:
        """Returns how many hops up and down the ring bring all keys that a query sees.

        A window ends both ways, unless they are as long as the whole ring. In the layout striped
        neighbours of a token are at all ranks.
        """
        left, right = self.options.sides
        whole, layout = self.world_size - 1, self.options.layout
        if NO_LIMIT in (left, right) or layout == "striped":
            return whole, 0
        if layout == "zigzag":
            # From half to half of the sequence, the rank changes by one at most.
            up = down = max(_runs(left, rows // 2), _runs(right, rows // 2))
        else:
            up, down = _runs(left, rows), _runs(right, rows)
        return (up, down) if up + down < whole else (whole, 0)

    def positions(self, rank: Int32[Array, ""], rows: int) -> Int32[Array, " rows"]:
        """Returns the positions of a rank's rows."""
        local = jnp.arange(rows, dtype=jnp.int32)
        return positions_of(local, rank, self.world_size, rows, self.options.layout)


@dataclass(frozen=True)
class Tile:
    """This rank's queries and the chunk that has arrived after some hops, or rows of both."""

    call: Call
    inputs: Inputs
    chunk: Chunk
    hop: int | Int32[Array, ""]
    """The hops that the chunk has come up the ring; negative where it came down."""
    way: int
    """1 where the chunk comes up the ring, -1 where it comes down, 0 for this rank's own chunk."""
    queries: Rows = None
    keys: Rows = None

    def parts(self) -> tuple["Tile", ...]:
        """Returns the tiles of which `which` names the one to compute.

        In a causal mask of the layout zigzag, all queries see only the first half of the chunk of
        a lower rank. Of the chunk of a higher rank only the second half of the queries sees keys.
        """
        rows = self.inputs.query.shape[1]
        if self.way == 0 or not has_halves(self.call.options):
            return (self,)
        first, second = (0, rows // 2), (rows // 2, rows)
        return replace(self, keys=first), replace(self, queries=second)

    def which(self) -> Int32[Array, ""]:
        """Returns the number of the part to compute, from 1, or 0 where no query sees a key."""
        parts = self.parts()
        found = [part.may_see().astype(jnp.int32) * (i + 1) for i, part in enumerate(parts)]
        if len(parts) == 1:
            return found[0]
        (lower, higher), (rank, owner) = found, self._ranks()
        return jnp.where(owner < rank, lower, higher)

    def may_see(self) -> Bool[Array, ""]:
        """Returns False only if positions or segments hide all keys from all queries."""
        left, right = self.call.options.sides
        # In the zigzag layout, each half of a shard is a run of positions.
        queries, keys = (self._halves(x) for x in self._positions())
        sees = jnp.ones((2, 2), bool)
        if left != NO_LIMIT:
            sees &= keys[None, :, 1] - queries[:, None, 0] >= -left
        if right != NO_LIMIT:
            sees &= keys[None, :, 0] - queries[:, None, 1] <= right
        queries_ids, keys_ids = self._ids()
        if queries_ids is None or keys_ids is None:
            return sees.any()
        (first, last), (first_key, last_key) = map(_bounds, (queries_ids, keys_ids))
        return sees.any() & ((first <= last_key) & (first_key <= last)).any()

    def forward(self) -> Pair:
        """Returns o and lse of the tile's queries over its keys."""
        key, value = self._expanded(self.inputs.params, self._latent())
        ring, qkv, features = self._prepared(key, value)
        if ring.implementation in ("cpu", "xla"):
            # Kernels of GPUs round o to query's type. Elsewhere the merge gets it in float32.
            ring = replace(ring, options=replace(ring.options, residual_dtype="float32"))
        o, lse = vjp.results(ring, qkv, features)
        return o[..., : value.shape[3]].astype(jnp.float32), lse

    def backward(self, o: jax.Array, lse: jax.Array, dout: jax.Array, dlse: jax.Array) -> Gradients:
        """Returns the tile's part of gradients, float32, from the results over all keys.

        The results are those of all queries, and the gradients those of the tile's rows.
        """
        params, with_params = floats(self.inputs.params)
        latents, with_latents = floats(self._latent())
        o, lse, dout, dlse = (taken(x, self.queries) for x in (o, lse, dout, dlse))

        def expanded(
            params: list[jax.Array], latents: list[jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            return self._expanded(with_params(params), with_latents(latents))

        (key, value), pullback = jax.vjp(expanded, params, latents)
        ring, qkv, features = self._prepared(key, value, widened=self._has_float32_kernels())
        o, dout = (padded_to(x, HEAD_DIM_MULTIPLE, 3) for x in (o, dout))
        # o may be wider than the tile's type, but not narrower.
        o = o.astype(max(o.dtype, qkv[0].dtype, key=lambda dtype: dtype.itemsize))
        given = vary_like(qkv[0], (o, lse, dout.astype(qkv[0].dtype), dlse))
        found = vjp.gradients(ring, qkv, features, given)[:3]
        dq, dk, dv = (
            x[..., : of.shape[3]] for x, of in zip(found, (self._query(), key, value), strict=True)
        )
        gradients: Gradients = (dq, *pullback((dk.astype(key.dtype), dv.astype(value.dtype))))
        return jax.tree.map(lambda x: x.astype(sum_dtype(x)), gradients)

    def _expanded(self, params: Leaves, latent: Leaves) -> KeyValue:
        """Returns key and value of the chunk."""
        captured = self.inputs.captured
        assert captured is not None
        pair: KeyValue = vary_like(self.inputs.query, self.call.expand(captured, params, latent))
        return pair

    def _prepared(
        self, key: jax.Array, value: jax.Array, widened: bool = False
    ) -> tuple[Ring, vjp.Qkv, Features]:
        """Returns the tile as a ring of one device, with arrays as kernels take them."""
        call, query = self.call, self._query()
        if widened:
            query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
        options, features = self._mask()
        queries_ids, keys_ids = self._ids()
        features = features._replace(query_segment_ids=queries_ids, key_segment_ids=keys_ids)
        features = vary_like(query, features)
        return shards.prepared((), options, (query, key, value), features, call.with_lse)

    def _has_float32_kernels(self) -> bool:
        """Whether tiles may compute in float32, so that no tile's gradients are rounded.

        In 16 bits dq, a sum over tiles, has 1.2 times the error of rounding on two ranks.
        """
        platform = platform_of(jax.sharding.get_abstract_mesh())
        return platform == "cpu" or self.call.options.implementation == "xla"

    def _mask(self) -> tuple[Options, Features]:
        """Returns the tile's options, and the positions of its rows if they are data."""
        whole = self.call.options
        options = replace(whole, layout="contiguous")
        is_windowed = whole.local_window_size is not None
        is_contiguous = whole.layout == "contiguous"
        # Rows of one shard are in the order of their positions.
        if whole.sides == (NO_LIMIT, NO_LIMIT) or (
            self.way == 0 and (is_contiguous or not is_windowed)
        ):
            return options, Features()
        if whole.layout != "striped" and not is_windowed:
            # Of another rank's tokens, the queries of a part see all, or none and it is left out.
            return replace(options, is_causal=False), Features()
        batch = self.inputs.query.shape[0]
        queries, keys = (jnp.broadcast_to(x, (batch, x.shape[0])) for x in self._positions())
        return options, Features(query_positions=queries, key_positions=keys)

    def _query(self) -> Float[Array, "batch seq heads head_dim"]:
        return taken(self.inputs.query, self.queries)

    def _latent(self) -> Leaves:
        return [taken(x, self.keys) for x in self.chunk.latent]

    def _ids(self) -> tuple[Int32[Array, "batch seq"] | None, Int32[Array, "batch keys"] | None]:
        """Returns the segments of the queries and of the keys."""
        queries, keys = self.inputs.ids, self.chunk.ids
        return (
            None if queries is None else taken(queries, self.queries),
            None if keys is None else taken(keys, self.keys),
        )

    def _ranks(self) -> tuple[Int32[Array, ""], Int32[Array, ""]]:
        """Returns this rank and the rank that owns the chunk."""
        rank = lax.axis_index(self.call.axes)
        return rank, (rank - self.hop) % self.call.world_size

    def _positions(self) -> tuple[Int32[Array, " seq"], Int32[Array, " keys"]]:
        """Returns the positions of the queries and of the keys."""
        rows = self.inputs.query.shape[1]
        queries, keys = (self.call.positions(x, rows) for x in self._ranks())
        return taken(queries, self.queries, 0), taken(keys, self.keys, 0)

    def _halves(self, positions: Int32[Array, " seq"]) -> Int32[Array, "halves ends"]:
        """Returns the first and the last position of each half."""
        rows = positions.shape[0]
        middle = rows // 2
        return positions[jnp.array([[0, max(middle - 1, 0)], [middle, rows - 1]])]


def has_halves(options: Options) -> bool:
    """Whether tiles of other ranks' chunks are halves: of the chunk, or of the queries."""
    return options.layout == "zigzag" and options.sides[1] == 0


def taken(x: Shaped[Array, "..."], rows: Rows, axis: int = 1) -> Shaped[Array, "..."]:
    """Returns some rows of an array."""
    return x if rows is None else lax.slice_in_dim(x, *rows, axis=axis)


def _runs(side: int, rows: int) -> int:
    """Returns over how many runs of rows, beyond its own, a side of a window reaches.

    Between the row next to a run and the h-th run there are (h - 1) · rows rows.
    """
    return (side - 1) // rows + 1


def gradients_of(arrays: Leaves, gradients: Leaves) -> list[Any]:
    """Returns the gradients of arrays in their types, None for arrays without one."""
    rest = iter(gradients)

    def one(x: jax.Array) -> jax.Array | None:
        return next(rest).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else None

    return [one(x) for x in arrays]


def sum_dtype(x: jax.Array) -> jnp.dtype:
    """Returns the type in which gradients of an array are summed."""
    return x.dtype if x.dtype.itemsize > 4 else jnp.dtype(jnp.float32)


def _bounds(
    ids: Int32[Array, "batch seq"],
) -> tuple[Int32[Array, " batch"], Int32[Array, " batch"]]:
    """Returns the least and the greatest id of each batch entry, without padding."""
    return jnp.where(ids < 0, MAX_INT32, ids).min(1), ids.max(1)
