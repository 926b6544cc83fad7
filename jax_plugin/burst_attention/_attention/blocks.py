"""Blocks of the ring in plain JAX: one rank's rows in blocks, and the scores of a pair of blocks.

Arrays in blocks have these shapes, with heads = kv_heads · group::

    queries       [blocks, batch, rows, kv_heads, group, head_dim]
    keys          [blocks, batch, rows, kv_heads, head_dim]
    scores        [batch, kv_heads, group, query rows, key rows]
    per row       [blocks, batch, kv_heads, group, rows]
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, Num

from burst_attention._attention import philox
from burst_attention._attention.features import Features
from burst_attention._attention.options import NO_LIMIT
from burst_attention._attention.ring import Ring
from burst_attention._layouts import positions_of
from burst_attention._mesh import send_on, vary_like
from burst_attention._types import Arrays

Tree = TypeVar("Tree")
"""Arrays in any tree."""
Rank: TypeAlias = Int32[Array, ""]
PerPair: TypeAlias = Int32[Array, "#batch 1 1 query_rows key_rows"]

BLOCK = 512
"""The most rows of a block."""


@dataclass(frozen=True)
class Rows:
    """How a shard's rows are cut into equal blocks. Padding fills the last block."""

    length: int

    @property
    def count(self) -> int:
        """The number of blocks."""
        return -(-self.length // BLOCK)

    @property
    def size(self) -> int:
        """The number of rows of a block."""
        return -(-self.length // self.count)

    def indices(self) -> Int32[Array, "blocks rows"]:
        """Returns the rows' indices in the shard; padding follows the shard."""
        return jnp.arange(self.count * self.size, dtype=jnp.int32).reshape(self.count, self.size)

    def cut(
        self, x: Num[Array, "batch seq *rest"], fill: int = 0
    ) -> Num[Array, "blocks batch rows *rest"]:
        """Returns rows in blocks."""
        padding = [(0, 0)] * x.ndim
        padding[1] = (0, self.count * self.size - self.length)
        x = jnp.pad(x, padding, constant_values=fill)
        return jnp.moveaxis(x.reshape(x.shape[0], self.count, self.size, *x.shape[2:]), 1, 0)

    def merge(self, x: Num[Array, "blocks batch rows *rest"]) -> Num[Array, "batch seq *rest"]:
        """Inverts `cut`."""
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, : self.length]


class Statistics(NamedTuple):
    """What the backward pass knows of blocks of queries."""

    dout: Float32[Array, "*blocks batch rows kv_heads group value_dim"]
    lse: Float32[Array, "*blocks batch kv_heads group rows"]
    """+∞ for rows that see no key."""
    delta: Float32[Array, "*blocks batch kv_heads group rows"]


class Queries(NamedTuple):
    """Blocks of queries, or one block."""

    q: Float32[Array, "*blocks batch rows kv_heads group head_dim"]
    segments: Int32[Array, "*blocks batch rows"] | None
    layout_positions: Int32[Array, "*blocks rows"]
    """Positions by the layout, which the window counts."""
    positions: Int32[Array, "*blocks batch rows"] | None
    """Positions by the call; None where the layout's are the positions."""
    statistics: Statistics | None
    """Present in the backward pass."""


class Chunk(NamedTuple):
    """What travels of a shard's keys, in blocks."""

    k: Float[Array, "blocks batch rows kv_heads head_dim"]
    v: Float[Array, "blocks batch rows kv_heads value_dim"]
    segments: Int32[Array, "blocks batch rows"] | None
    intervals: list[Int32[Array, "blocks batch rows 2"]]
    """(start, stop): a query whose position is in an interval sees the key. Empty where keys have
    no intervals."""
    positions: Int32[Array, "blocks batch rows"] | None


class Keys(NamedTuple):
    """Blocks of keys and values, or one block."""

    k: Float[Array, "*blocks batch rows kv_heads head_dim"]
    v: Float[Array, "*blocks batch rows kv_heads value_dim"]
    segments: Int32[Array, "*blocks batch rows"] | None
    intervals: list[Int32[Array, "*blocks batch rows 2"]]
    positions: Int32[Array, "*blocks batch rows"] | None
    layout_positions: Int32[Array, "*blocks rows"]
    exist: Bool[Array, "*blocks rows"]
    """Whether a row is a key. All other rows pad the last block."""

    def widened(self) -> "Keys":
        """Returns the keys and values in float32."""
        return self._replace(k=self.k.astype(jnp.float32), v=self.v.astype(jnp.float32))


class Work:
    """One rank's part of a pass."""

    def __init__(self, ring: Ring, qkv: Arrays, features: Features):
        q, k, v = qkv
        self.ring = ring
        # A loop over layers computes what depends on no layer before it begins. Positions depend on
        # the rank alone, so without the barrier it would keep the masks of all pairs of blocks.
        self.rank, q = lax.optimization_barrier((lax.axis_index(ring.axes), q))
        # The products that accelerators make by default are exact for 16-bit inputs.
        self.precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
        self.kv_heads, self.group = k.shape[2], q.shape[2] // k.shape[2]
        self.q_rows, self.kv_rows = Rows(q.shape[1]), Rows(k.shape[1])
        heads = (q.shape[0], self.kv_heads, self.group)
        self.per_row_shape = (self.q_rows.count, *heads, self.q_rows.size)
        self.layout_positions = self._layout_positions(self.q_rows, self.rank)
        positions = features.query_positions
        self.positions = None if positions is None else self.q_rows.cut(positions)
        self.dropout, self.slopes = features.dropout, features.alibi_slopes
        if self.slopes is not None:
            self.slopes = self.slopes.reshape(*heads, 1, 1)
        self.q_segments, of_keys = features.query_segment_ids, features.key_segment_ids
        self.q = self._group(_without_padding(q, self.q_segments))
        intervals = [x for x in (features.visible, features.also_visible) if x is not None]
        positions = features.key_positions
        self.chunk = Chunk(
            self.kv_rows.cut(_without_hidden(_without_padding(k, of_keys), intervals)),
            self.kv_rows.cut(_without_hidden(_without_padding(v, of_keys), intervals)),
            None if of_keys is None else self.kv_rows.cut(of_keys, -1),
            [self.kv_rows.cut(x) for x in intervals],
            None if positions is None else self.kv_rows.cut(positions),
        )

    def queries(self, statistics: Statistics | None) -> Queries:
        """Returns this rank's queries in blocks."""
        segments = None if self.q_segments is None else self.q_rows.cut(self.q_segments, -1)
        return Queries(self.q, segments, self.layout_positions, self.positions, statistics)

    def statistics(
        self,
        o: Float[Array, "batch q_len heads value_dim"],
        lse: Float32[Array, "batch q_len heads"],
        dout: Float[Array, "batch q_len heads value_dim"],
        dlse: Float32[Array, "batch q_len heads"],
    ) -> Statistics:
        """Returns what the backward pass knows of this rank's queries, in blocks."""
        # Rows that see no key may come with any gradient, NaN too. It counts as 0.
        blind = jnp.isneginf(lse) | self._outside_of_keys()[None, :, None]
        if self.q_segments is not None:
            blind |= self.q_segments[..., None] < 0
        dout = jnp.where(blind[..., None], 0, dout.astype(jnp.float32))
        delta = (dout * o.astype(jnp.float32)).sum(-1) - dlse
        rows = (self._group(x) for x in (jnp.where(blind, jnp.inf, lse), delta))
        return Statistics(self._group(dout), *(jnp.moveaxis(x, 2, 4) for x in rows))

    def _outside_of_keys(self) -> Bool[Array, " q_len"]:
        """Returns which queries have a window that ends before the keys or begins after them."""
        (left, right), keys = self.ring.window, self.ring.world_size * self.kv_rows.length
        layout_positions = self.layout_positions.reshape(-1)[: self.q_rows.length]
        outside = jnp.zeros(layout_positions.shape, bool)
        if left != NO_LIMIT:
            outside |= layout_positions - left >= keys
        if right != NO_LIMIT:
            outside |= layout_positions + right < 0
        return outside

    def keys(self, chunk: Chunk, hop: Rank) -> Keys:
        """Returns the keys of the chunk that has arrived after some hops."""
        owner = (self.rank - hop) % self.ring.world_size
        exist = self.kv_rows.indices() < self.kv_rows.length
        return Keys(*chunk, self._layout_positions(self.kv_rows, owner), exist)

    def zeros(self, *shapes: tuple[int, ...]) -> Arrays:
        """Returns arrays of zeros in float32."""
        return vary_like(self.q, tuple(jnp.zeros(shape, jnp.float32) for shape in shapes))

    def around(self, step: Callable[[Rank, Chunk, Tree], Tree], state: Tree) -> Tree:
        """Calls ``step(hop, chunk, state)`` for every chunk of the ring, this rank's own first."""

        def body(carry: tuple[Chunk, Tree], hop: Rank) -> tuple[tuple[Chunk, Tree], None]:
            chunk, state = carry
            # Before the step: the exchange of the next chunk runs during the step's products.
            following = self.send_on(chunk)
            return (following, step(hop, chunk, state)), None

        hops = jnp.arange(self.ring.world_size, dtype=jnp.int32)
        return lax.scan(body, vary_like(self.q, (self.chunk, state)), hops)[0][1]

    def send_on(self, arrays: Tree) -> Tree:
        """Sends arrays to the next rank and returns the arrays of the rank before."""
        return send_on(arrays, self.ring.axes, self.ring.world_size)

    def merge_rows(
        self, x: Float32[Array, "blocks batch rows kv_heads group *rest"]
    ) -> Float32[Array, "batch q_len heads *rest"]:
        """Returns rows of queries, in blocks, as rows of a shard."""
        x = self.q_rows.merge(x)
        return x.reshape(*x.shape[:2], -1, *x.shape[4:])

    def _group(
        self, x: Float[Array, "batch q_len heads *rest"]
    ) -> Float32[Array, "blocks batch rows kv_heads group *rest"]:
        """Inverts `merge_rows`, in float32."""
        x = x.reshape(*x.shape[:2], self.kv_heads, self.group, *x.shape[3:])
        return self.q_rows.cut(x.astype(jnp.float32))

    def _layout_positions(self, rows: Rows, rank: Rank) -> Int32[Array, "blocks rows"]:
        ring = self.ring
        return positions_of(rows.indices(), rank, ring.world_size, rows.length, ring.layout)


def _without_padding(
    x: Float[Array, "batch seq heads dim"], segments: Int32[Array, "batch seq"] | None
) -> Float[Array, "batch seq heads dim"]:
    """Returns x with 0 in padding: its weights are 0, and 0 · NaN is NaN."""
    if segments is None:
        return x
    return jnp.where(lax.expand_dims(segments < 0, (2, 3)), 0, x)


def _without_hidden(
    x: Float[Array, "batch seq heads dim"], intervals: list[Int32[Array, "batch seq 2"]]
) -> Float[Array, "batch seq heads dim"]:
    """Returns x with 0 where no query sees the key: its weights are 0, and 0 · NaN is NaN."""
    if not intervals:
        return x
    is_seen = jnp.stack([each[..., 0] < each[..., 1] for each in intervals]).any(0)
    return jnp.where(is_seen[..., None, None], x, 0)


@dataclass(frozen=True)
class Pair:
    """A block of queries and a block of keys."""

    work: Work
    queries: Queries
    keys: Keys

    def product(self, which: str, a: jax.Array, b: jax.Array) -> jax.Array:
        """Returns an einsum in float32."""
        return jnp.einsum(which, a, b, precision=self.work.precision)

    def scores(self) -> tuple[jax.Array, jax.Array | None]:
        """Returns s, −∞ where masked, and with a soft cap the tanh in it."""
        ring, tanh = self.work.ring, None
        s = self.product("bqhgd,bkhd->bhgqk", self.queries.q, self.keys.k)
        s *= np.float32(ring.softmax_scale)
        if ring.options.logits_soft_cap:
            cap = np.float32(ring.options.logits_soft_cap)
            tanh = jnp.tanh(s / cap)
            s = cap * tanh
        if self.work.slopes is not None:
            s += self.work.slopes * self.distances()
        return jnp.where(self._visible(), s, -jnp.inf), tanh

    def distances(self) -> Float32[Array, "#batch 1 1 query_rows key_rows"]:
        """Returns key position − query position."""
        of_queries, of_keys = self._positions()
        return (of_keys - of_queries).astype(jnp.float32)

    def _positions(
        self,
    ) -> tuple[Int32[Array, "#batch 1 1 query_rows 1"], Int32[Array, "#batch 1 1 1 key_rows"]]:
        """Returns the positions of queries and of keys, in shapes that broadcast to the scores'."""
        queries, keys = (
            x.layout_positions[None] if x.positions is None else x.positions
            for x in (self.queries, self.keys)
        )
        return queries[:, None, None, :, None], keys[:, None, None, None, :]

    def _visible(self) -> Bool[Array, "#batch 1 1 query_rows key_rows"]:
        """Returns which keys each query sees, in a shape that broadcasts to the scores' shape."""
        left, right = self.work.ring.window
        of_queries = self.queries.layout_positions[None, None, None, :, None]
        steps = self.keys.layout_positions[None, None, None, None] - of_queries
        visible = self.keys.exist[None, None, None, None] & jnp.ones_like(steps, bool)
        if left != NO_LIMIT:
            visible &= steps >= -left
        if right != NO_LIMIT:
            visible &= steps <= right
        if self.keys.intervals:
            positions, _ = self._positions()
            bounds = [x[:, None, None, None] for x in self.keys.intervals]
            inside = [(x[..., 0] <= positions) & (positions < x[..., 1]) for x in bounds]
            visible = visible & jnp.stack(inside).any(0)
        if self.queries.segments is None:
            return visible
        assert self.keys.segments is not None
        of_queries = self.queries.segments[:, None, None, :, None]
        of_keys = self.keys.segments[:, None, None, None, :]
        return visible & (of_queries == of_keys) & (of_queries >= 0)

    def may_see(self) -> Bool[Array, ""]:
        """Returns False only if window or intervals hide every key of the block from all queries.

        Rows that pad the blocks count too, so the result may be True without need.
        """
        left, right = self.work.ring.window
        first, last = self.queries.layout_positions.min(), self.queries.layout_positions.max()
        sees = jnp.ones((), bool)
        if left != NO_LIMIT:
            sees &= self.keys.layout_positions.max() - first >= -left
        if right != NO_LIMIT:
            sees &= self.keys.layout_positions.min() - last <= right
        if self.keys.intervals:
            positions = self._positions()[0][:, 0, 0]
            first, last = positions.min(1), positions.max(1)
            inside = [(x[..., 0] <= last) & (first < x[..., 1]) for x in self.keys.intervals]
            sees &= jnp.stack(inside).any()
        return sees

    def dropout(self) -> Callable[[jax.Array], jax.Array]:
        """Returns a function of arrays shaped like the scores.

        The function sets the elements of dropped weights to 0 and divides the rest by 1 − rate.
        """
        work = self.work
        if work.dropout is None:
            return lambda x: x
        k0, k1, entry, first = (work.dropout[:, i, None, None, None, None] for i in range(4))
        heads = jnp.arange(work.kv_heads * work.group, dtype=jnp.uint32)
        head = first + heads.reshape(1, work.kv_heads, work.group, 1, 1)
        queries, keys = (x.astype(jnp.uint32) for x in self._positions())
        number = philox.word((keys // 4, queries, head, entry), (k0, k1), keys % 4)
        rate = work.ring.options.dropout_rate
        stays = number >= philox.threshold(rate)
        share = np.float32(1 - np.float32(rate))
        return lambda x: jnp.where(stays, x / share, 0)
