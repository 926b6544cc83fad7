"""Scattered heads: every rank computes some heads over the part of the sequence of many ranks.

``ulysses`` scatters the heads over all ranks. A rank then holds the whole sequence of its own heads
and needs no ring. ``hybrid`` scatters the heads over the inner of two axes. The ranks of an inner
group then hold a longer shard, and rings along the outer axis exchange it::

    shard [batch, n, heads, dim]  ── all-to-all ──▶  [batch, U·n, heads / U, dim]  ── ring ──▶  out
                                  ◀── all-to-all ──

XLA does the exchanges, and JAX transposes them for the backward pass. In each direction a rank
sends (U − 1)/U of its query, key, value and out. A layer that is rematerialised repeats the
exchanges, like its projections; `save_attention` spares only the calls between them.

The shards of a group, the ranks (o, 0) … (o, U − 1), form in another order the shard of rank o of a
ring over the outer axis, in the same layout:

- contiguous: the parts o·U … o·U + U − 1, one behind the other, are part o of the groups' parts.
- zigzag: the first chunks of the ranks rise and the second ones fall, so they merge to the chunks o
  and 2·groups − 1 − o of the groups.
- striped: this does not hold unless there is one group. So rank (o, i) first gets the shard of rank
  o + groups · i, and out goes back. The slow links of the outer axis then carry each shard once, as
  any exchange that merges these stripes must.
"""

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Shaped

from burst_attention import _mesh
from burst_attention._attention.features import Features
from burst_attention._attention.ring import Ring
from burst_attention._attention.vjp import Qkv, ring_attention
from burst_attention._batching import all_gather, all_to_all
from burst_attention._types import Axes, Layout

SCHEDULES = ("ulysses", "hybrid")


def scattered(
    ring: Ring, qkv: Qkv, features: Features
) -> tuple[Float[Array, "batch n heads dim"], Float32[Array, "batch n heads"]]:
    """Returns out and lse of this rank's shard, computed with scattered heads."""
    exchange, ring = _exchange(ring, qkv[0].shape[2])
    out, lse = ring_attention(ring, exchange.scatter(qkv), exchange.scatter_features(features))
    return exchange.gather_heads(out), exchange.gather_heads(lse)


@dataclass(frozen=True)
class Exchange:
    """How heads and sequence change places."""

    axes: Axes
    """Mesh axes over whose ranks heads are scattered."""
    ranks: int
    """How many ranks a group has: U."""
    groups: int
    """How many groups there are. They are the ranks of the ring that follows."""
    heads: int
    """How many query heads a rank computes."""
    all_axes: Axes
    """Mesh axes of the sequence."""
    layout: Layout

    def scatter(self, qkv: Qkv) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns this rank's query heads, and their key/value heads, of the group's sequence."""
        query, *key_and_value = qkv
        times = self.ranks // math.gcd(self.ranks, qkv[1].shape[2])
        key, value = (self._scatter_heads(_repeated(x, times)) for x in key_and_value)
        return self._scatter_heads(query), key, value

    def scatter_features(self, features: Features) -> Features:
        """Returns features of this rank's heads and of the group's sequence."""
        found: dict[str, jax.Array] = {}
        for row, x in features.present():
            for axis, length in enumerate((row.operand or row.shape).split()):
                if length == "heads":
                    x = self._own_heads(x, axis)
                elif length in ("q_len", "kv_len"):
                    x = self._merge(all_gather(self._stripe(x), self.axes))
            found[row.name] = x
        if "dropout" in found:
            first = lax.axis_index(self.axes).astype(jnp.uint32) * jnp.uint32(self.heads)
            found["dropout"] = found["dropout"].at[:, 3].add(first)
        return Features(**found)

    def gather_heads(
        self, x: Shaped[Array, "batch group_n own_heads *dim"]
    ) -> Shaped[Array, "batch n heads *dim"]:
        """Returns the results of all heads for this rank's shard."""
        x = all_to_all(self._split(x), self.axes, 1, 2)
        return self._permute(x, [(rank, owner) for rank, owner in enumerate(self._owners())])

    def _scatter_heads(
        self, x: Float[Array, "batch n heads dim"]
    ) -> Float[Array, "batch group_n own_heads dim"]:
        x = all_to_all(self._stripe(x), self.axes, 2, 1)
        return self._merge(x)

    def _own_heads(self, x: jax.Array, axis: int) -> jax.Array:
        """Returns the part of an array that belongs to this rank's heads."""
        count = x.shape[axis] // self.ranks
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.axes) * count, count, axis)

    def _merge(self, x: jax.Array) -> jax.Array:
        """Returns shards, one behind the other, in the order of the layout over the groups."""
        batch, length, *rest = x.shape
        n = length // self.ranks
        if self.layout == "zigzag":
            x = x.reshape(batch, self.ranks, 2, n // 2, *rest)
            x = jnp.stack([x[:, :, 0], x[:, ::-1, 1]], axis=1)
        elif self.layout == "striped":
            x = x.reshape(batch, self.ranks, n, *rest).swapaxes(1, 2)
        return x.reshape(batch, length, *rest)

    def _split(self, x: jax.Array) -> jax.Array:
        """Inverts `_merge`."""
        batch, length, *rest = x.shape
        n = length // self.ranks
        if self.layout == "zigzag":
            x = x.reshape(batch, 2, self.ranks, n // 2, *rest)
            x = jnp.stack([x[:, 0], x[:, 1, ::-1]], axis=2)
        elif self.layout == "striped":
            x = x.reshape(batch, n, self.ranks, *rest).swapaxes(1, 2)
        return x.reshape(batch, length, *rest)

    def _stripe(self, x: jax.Array) -> jax.Array:
        """Returns the shard that this rank brings into the exchange."""
        return self._permute(x, [(owner, rank) for rank, owner in enumerate(self._owners())])

    def _owners(self) -> list[int]:
        """Returns the owner of the shard that each rank brings into a striped exchange."""
        return [o + self.groups * i for o in range(self.groups) for i in range(self.ranks)]

    def _permute(self, x: jax.Array, pairs: list[tuple[int, int]]) -> jax.Array:
        """Sends shards from rank to rank where the layout needs it."""
        if self.layout != "striped" or self.groups == 1:
            return x
        return _mesh.permute(x, self.all_axes, pairs)


def _exchange(ring: Ring, heads: int) -> tuple[Exchange, Ring]:
    """Returns how query heads are scattered, and the ring that follows, for ulysses of one rank."""
    mesh = _mesh.ring_mesh(ring.axes)
    outer, inner = ((), ring.axes) if ring.schedule == "ulysses" else (ring.axes[:1], ring.axes[1:])
    ranks = _mesh.axes_size(mesh, inner)
    _check_heads(ring.schedule, heads, ranks)
    groups = ring.world_size // ranks
    follows = replace(
        ring,
        axes=outer,
        world_size=groups,
        schedule="ring",
        # Each rank of the ring that follows stands for an inner group, which is a node.
        node=1,
        groups=_mesh.ring_groups(mesh, outer),
        # On one rank all layouts are the same, and contiguous is not cut into halves.
        layout=ring.layout if groups > 1 else "contiguous",
    )
    return Exchange(inner, ranks, groups, heads // ranks, ring.axes, ring.layout), follows


def _check_heads(schedule: str, heads: int, ranks: int) -> None:
    """Raises unless all ranks can get equally many query heads."""
    if heads % ranks:
        where = "the ring" if schedule == "ulysses" else "the inner axis"
        fewer = ", 'hybrid' scatters over the inner of two axes only" if where == "the ring" else ""
        raise ValueError(
            f"schedule={schedule!r} scatters query heads over the {ranks} ranks of {where}, so on "
            f"each device they must be a multiple of {ranks}, got {heads}; schedule='ring' takes "
            f"any number of heads{fewer}"
        )


def _repeated(
    x: Float[Array, "batch n kv_heads dim"], times: int
) -> Float[Array, "batch n repeated_heads dim"]:
    """Returns heads repeated ``times``; their gradients are added up in float32."""
    if times == 1:
        return x
    return jnp.repeat(x.astype(jnp.float32), times, axis=2).astype(x.dtype)
