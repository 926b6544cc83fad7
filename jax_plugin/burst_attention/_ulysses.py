# ruff: noqa: F722  (shapes in annotations are not Python)
"""Heads against sequence: every rank computes some heads over the sequence of many ranks.

``ulysses`` deals the heads to all ranks, which then hold the whole sequence of theirs and need no
ring. ``hybrid`` deals them along the inner of two axes, and what an inner group then holds goes
round rings along the outer axis::

    shard [batch, n, heads, dim]  ── all-to-all ──▶  [batch, U·n, heads / U, dim]  ── ring ──▶  out
                                  ◀── all-to-all ──

The exchanges are XLA's own, and JAX transposes them for the backward pass. Each way a rank sends
(U − 1)/U of its query, key, value and out. A layer that is rematerialised repeats them, like its
projections; only the calls between them are spared by `save_attention`.

What the ranks (o, 0) … (o, U − 1) of a group hold together is, reordered, what rank o of a ring
over the outer axis holds in the same layout:

- contiguous: parts o·U … o·U + U − 1, one behind the other, are part o of those of the groups.
- zigzag: their first chunks rise and their second ones fall, so they join to chunks o and
  2·groups − 1 − o of those of the groups.
- striped: not so, unless there is one group. First, rank (o, i) gets the shard of rank
  o + groups · i, and out goes back. The slow links of the outer axis then carry each shard once, as
  they would in any exchange that brings these stripes together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from burst_attention import _checks
from burst_attention._extras import Extras
from burst_attention._ring import Ring, ring_groups

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Shaped

    from burst_attention._vjp import Qkv

SCHEDULES = ("ulysses", "hybrid")


@dataclass(frozen=True)
class Exchange:
    """How heads and sequence change places."""

    axes: tuple[str, ...]
    """Mesh axes to whose ranks heads are dealt."""
    ranks: int
    """How many these are: U."""
    groups: int
    """How many groups of them there are: the ranks of the ring that follows."""
    all_axes: tuple[str, ...]
    """Mesh axes of the sequence."""
    layout: str

    def qkv(self, qkv: Qkv) -> Qkv:
        """This rank's query heads, and the key/value heads they use, of the group's sequence."""
        query, *key_and_value = qkv
        times = self.ranks // math.gcd(self.ranks, qkv[1].shape[2])
        key, value = (_repeated(x, times) for x in key_and_value)
        return self._heads_in(query), self._heads_in(key), self._heads_in(value)

    def extras(self, extras: Extras, heads: int) -> Extras:
        """Ids of the group's sequence, the slopes of this rank's heads, and where its dropout is.

        Args:
          extras: slopes ``[heads]``, dropout as `dropout_place` made it.
          heads: query heads before the exchange.
        """
        q_ids, kv_ids = (x if x is None else self._ids_in(x) for x in extras[:2])
        slopes = None if extras.slopes is None else self.own(extras.slopes)
        dropout = extras.dropout
        if dropout is not None:
            first = lax.axis_index(self.axes).astype(jnp.uint32) * jnp.uint32(heads // self.ranks)
            dropout = dropout.at[:, 3].add(first)
        return Extras(q_ids, kv_ids, slopes, dropout)

    def own(self, per_head: Shaped[Array, " heads"]) -> jax.Array:
        """What belongs to this rank's heads."""
        count = per_head.shape[0] // self.ranks
        return lax.dynamic_slice_in_dim(per_head, lax.axis_index(self.axes) * count, count)

    def results(self, x: Shaped[Array, "batch group_n own_heads *dim"]) -> jax.Array:
        """Those of all heads for this rank's shard, ``[batch, n, heads, *dim]``."""
        x = lax.all_to_all(self._parted(x), self.axes, split_axis=1, concat_axis=2, tiled=True)
        return self._moved(x, [(rank, owner) for rank, owner in enumerate(self._owners())])

    def _heads_in(self, x: Float[Array, "batch n heads dim"]) -> jax.Array:
        x = lax.all_to_all(self._of_stripes(x), self.axes, split_axis=2, concat_axis=1, tiled=True)
        return self._joined(x)

    def _ids_in(self, ids: Shaped[Array, "batch n"]) -> jax.Array:
        ids = lax.all_gather(self._of_stripes(ids), self.axes, axis=1, tiled=True)
        return self._joined(ids)

    def _joined(self, x: jax.Array) -> jax.Array:
        """Shards one behind the other, put into the order of the layout over the groups."""
        batch, length, *rest = x.shape
        n = length // self.ranks
        if self.layout == "zigzag":
            x = x.reshape(batch, self.ranks, 2, n // 2, *rest)
            x = jnp.stack([x[:, :, 0], x[:, ::-1, 1]], axis=1)
        elif self.layout == "striped":
            x = x.reshape(batch, self.ranks, n, *rest).swapaxes(1, 2)
        return x.reshape(batch, length, *rest)

    def _parted(self, x: jax.Array) -> jax.Array:
        """Back from `_joined`."""
        batch, length, *rest = x.shape
        n = length // self.ranks
        if self.layout == "zigzag":
            x = x.reshape(batch, 2, self.ranks, n // 2, *rest)
            x = jnp.stack([x[:, 0], x[:, 1, ::-1]], axis=2)
        elif self.layout == "striped":
            x = x.reshape(batch, n, self.ranks, *rest).swapaxes(1, 2)
        return x.reshape(batch, length, *rest)

    def _of_stripes(self, x: jax.Array) -> jax.Array:
        """The shard that this rank brings into the exchange."""
        return self._moved(x, [(owner, rank) for rank, owner in enumerate(self._owners())])

    def _owners(self) -> list[int]:
        """Whose shard each rank brings into the exchange in the striped layout."""
        return [o + self.groups * i for o in range(self.groups) for i in range(self.ranks)]

    def _moved(self, x: jax.Array, pairs: list[tuple[int, int]]) -> jax.Array:
        if self.layout != "striped" or self.groups == 1:
            return x
        return lax.ppermute(x, self.all_axes, pairs)


def exchange(ring: Ring, heads: int) -> tuple[Exchange, Ring]:
    """How query heads are dealt, and the ring that follows: for ``ulysses`` of one rank."""
    mesh = _checks.ring_mesh(ring.axes)
    outer, inner = ((), ring.axes) if ring.schedule == "ulysses" else (ring.axes[:1], ring.axes[1:])
    ranks = math.prod(mesh.shape[name] for name in inner)
    _checks.dealt_heads(ring.schedule, heads, ranks)
    groups = ring.world_size // ranks
    follows = replace(
        ring,
        axes=outer,
        world_size=groups,
        schedule="ring",
        groups=ring_groups(mesh, outer),
        # On one rank all layouts are one, and this one is not cut into halves.
        layout=ring.layout if groups > 1 else "contiguous",
    )
    return Exchange(inner, ranks, groups, ring.axes, ring.layout), follows


def _repeated(x: Float[Array, "batch n kv_heads dim"], times: int) -> jax.Array:
    """Each head so many times; its gradient is added up in float32."""
    if times == 1:
        return x
    return jnp.repeat(x.astype(jnp.float32), times, axis=2).astype(x.dtype)
