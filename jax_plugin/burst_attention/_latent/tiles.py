"""A tile of latent attention: this device's queries and one chunk of latents, on one device.

The user's function expands the chunk to keys and values, which live as long as the tile.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from burst_attention import _checks
from burst_attention._attention import calls, shards, vjp
from burst_attention._attention.arguments import MAX_INT32
from burst_attention._attention.features import Features
from burst_attention._attention.options import NO_LIMIT, Options
from burst_attention._attention.ring import Ring
from burst_attention._checks import HEAD_DIM_MULTIPLE, describe
from burst_attention._decode.merge import Pair
from burst_attention._layouts import positions_of
from burst_attention._mesh import platform as platform_of
from burst_attention._mesh import vary_like
from burst_attention._padding import padded_to
from burst_attention._types import Axes

Tree: TypeAlias = Any
"""Arrays in any tree, as the user has them."""
Expand: TypeAlias = Callable[[Tree, Tree], tuple[jax.Array, jax.Array]]
"""Returns key and value of latents, from parameters and latents."""
Gradients: TypeAlias = tuple[jax.Array, list[jax.Array], list[jax.Array]]
"""The gradients of query, of the parameters and of the latents that are floats."""


class Chunk(NamedTuple):
    """What travels of a shard."""

    latent: Tree
    ids: Int32[Array, "batch seq"] | None
    """The segments of the keys."""


class Inputs(NamedTuple):
    """The arrays of a call, checked."""

    query: Float[Array, "batch seq heads head_dim"]
    chunk: Chunk
    params: Tree
    ids: Int32[Array, "batch seq"] | None
    """The segments of the queries."""


@dataclass(frozen=True)
class Call:
    """What is static about a call."""

    expand: Expand
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

    def last_hop(self, rows: int) -> int:
        """Returns the number of hops that bring chunks of which a query of some rank sees a key.

        Chunks go up from rank to rank, so only a window to the left alone, of shards that are
        consecutive parts, lets the last hops out.
        """
        left, right = self.options.sides
        whole = self.world_size - 1
        if left == NO_LIMIT or right != 0 or self.options.layout != "contiguous":
            return whole
        # After h hops the last key is (h - 1) · rows + 1 positions before the first query.
        return min(whole, (left - 1) // rows + 1)

    def positions(self, rank: Int32[Array, ""], rows: int) -> Int32[Array, " rows"]:
        """Returns the positions of a rank's rows."""
        local = jnp.arange(rows, dtype=jnp.int32)
        return positions_of(local, rank, self.world_size, rows, self.options.layout)


@dataclass(frozen=True)
class Tile:
    """This rank's queries and the chunk that has arrived after some hops."""

    call: Call
    inputs: Inputs
    chunk: Chunk
    hop: int | Int32[Array, ""]
    is_own: bool
    """Whether the chunk is this rank's own."""

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
        if self.inputs.ids is None or self.chunk.ids is None:
            return sees.any()
        (first, last), (first_key, last_key) = map(_bounds, (self.inputs.ids, self.chunk.ids))
        return sees.any() & ((first <= last_key) & (first_key <= last)).any()

    def forward(self) -> Pair:
        """Returns o and lse of the queries over the chunk's keys."""
        key, value = self._expanded(self.inputs.params, self.chunk.latent)
        ring, qkv, features = self._prepared(key, value)
        if ring.implementation in ("cpu", "xla"):
            # Kernels of GPUs round o to query's type. Elsewhere the merge gets it in float32.
            ring = replace(ring, options=replace(ring.options, residual_dtype="float32"))
        o, lse = vjp.results(ring, qkv, features)
        return o[..., : value.shape[3]].astype(jnp.float32), lse

    def backward(self, o: jax.Array, lse: jax.Array, dout: jax.Array, dlse: jax.Array) -> Gradients:
        """Returns the chunk's part of gradients, float32, from the results over all keys."""
        params, with_params = floats(self.inputs.params)
        latents, with_latents = floats(self.chunk.latent)

        def expanded(
            params: list[jax.Array], latents: list[jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            return self._expanded(with_params(params), with_latents(latents))

        (key, value), pullback = jax.vjp(expanded, params, latents)
        ring, qkv, features = self._prepared(key, value, widened=self._has_float32_kernels())
        o, dout = (padded_to(x, HEAD_DIM_MULTIPLE, 3) for x in (o, dout))
        given = vary_like(qkv[0], (o, lse, dout.astype(qkv[0].dtype), dlse))
        found = vjp.gradients(ring, qkv, features, given)[:3]
        dq, dk, dv = (
            x[..., : of.shape[3]]
            for x, of in zip(found, (self.inputs.query, key, value), strict=True)
        )
        gradients: Gradients = (dq, *pullback((dk.astype(key.dtype), dv.astype(value.dtype))))
        return jax.tree.map(lambda x: x.astype(sum_dtype(x)), gradients)

    def _expanded(self, params: Tree, latent: Tree) -> tuple[jax.Array, jax.Array]:
        """Returns key and value of the chunk, checked."""
        found, query = self.call.expand(params, latent), self.inputs.query
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise TypeError(
                "expand(params, latent) must return a pair of arrays (key, value), got "
                f"{describe(found)}"
            )
        _, key, value = _checks.arrays(query, *found, any_head_dim=True)
        if key.shape[1] != query.shape[1]:
            raise ValueError(
                f"expand(params, latent) must return a key for each of the {query.shape[1]} "
                f"tokens of latent, got key of shape {key.shape}; it gets one chunk at a time"
            )
        key, value = vary_like(query, (key, value))
        return key, value

    def _prepared(
        self, key: jax.Array, value: jax.Array, widened: bool = False
    ) -> tuple[Ring, vjp.Qkv, Features]:
        """Returns the tile as a ring of one device, with arrays as kernels take them."""
        call, query = self.call, self.inputs.query
        if widened:
            query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
        options, features = self._mask()
        features = features._replace(
            query_segment_ids=self.inputs.ids, key_segment_ids=self.chunk.ids
        )
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
            self.is_own and (is_contiguous or not is_windowed)
        ):
            return options, Features()
        if is_contiguous and not is_windowed:
            # Of another rank's tokens a query sees all, or none and the tile is left out.
            return replace(options, is_causal=False), Features()
        batch = self.inputs.query.shape[0]
        queries, keys = (jnp.broadcast_to(x, (batch, x.shape[0])) for x in self._positions())
        return options, Features(query_positions=queries, key_positions=keys)

    def _positions(self) -> tuple[Int32[Array, " seq"], Int32[Array, " seq"]]:
        """Returns the positions of the queries and of the keys."""
        rank, rows = lax.axis_index(self.call.axes), self.inputs.query.shape[1]
        owner = (rank - self.hop) % self.call.world_size
        return self.call.positions(rank, rows), self.call.positions(owner, rows)

    def _halves(self, positions: Int32[Array, " seq"]) -> Int32[Array, "halves ends"]:
        """Returns the first and the last position of each half."""
        rows = positions.shape[0]
        middle = rows // 2
        return positions[jnp.array([[0, max(middle - 1, 0)], [middle, rows - 1]])]


def floats(tree: Tree) -> tuple[list[jax.Array], Callable[[list[jax.Array]], Tree]]:
    """Returns the arrays of floats in a tree, and a function that puts others in their place."""
    leaves, structure = jax.tree.flatten(tree)
    are_floats = [jnp.issubdtype(x.dtype, jnp.floating) for x in leaves]

    def put(given: list[jax.Array]) -> Tree:
        rest = iter(given)
        mixed = (next(rest) if is_one else x for x, is_one in zip(leaves, are_floats, strict=True))
        return jax.tree.unflatten(structure, list(mixed))

    return [x for x, is_one in zip(leaves, are_floats, strict=True) if is_one], put


def gradients_of(tree: Tree, found: list[jax.Array]) -> Tree:
    """Returns gradients in the form of a tree and in its types, None for arrays without one."""
    rest = iter(found)

    def one(x: jax.Array) -> jax.Array | None:
        return next(rest).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else None

    return jax.tree.map(one, tree)


def sum_dtype(x: jax.Array) -> jnp.dtype:
    """Returns the type in which gradients of an array are summed."""
    return x.dtype if x.dtype.itemsize > 4 else jnp.dtype(jnp.float32)


def _bounds(
    ids: Int32[Array, "batch seq"],
) -> tuple[Int32[Array, " batch"], Int32[Array, " batch"]]:
    """Returns the least and the greatest id of each batch entry, without padding."""
    return jnp.where(ids < 0, MAX_INT32, ids).min(1), ids.max(1)
