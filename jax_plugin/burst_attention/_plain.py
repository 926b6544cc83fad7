"""The ring in plain JAX: what every implementation must compute, and the fallback for any platform.

Keys, values and their segments go round the ring. Each rank folds every chunk that arrives into the
running softmax of its own queries. In the backward pass the gradients of a chunk follow it. A shard
is cut into blocks of rows, and scores exist for one pair of blocks at a time, so memory grows with
the shard, not with its square::

    forward   s = scale · q kᵀ;  capped: cap · tanh(s / cap);  + slope · (key position − query
              position);  −∞ where masked
              lse = ln Σ e^s;  p = e^(s − lse);  o = dropped(p) v
    backward  delta = rowsum(dout ∘ o) − dlse;  ds = p ∘ (dropped(dout vᵀ) − delta)
              dslope = Σ ds · (key position − query position);  capped: ds ∘= 1 − tanh²
              dv = dropped(p)ᵀ dout;  dk = scale · dsᵀ q;  dq = scale · ds k

All products and sums are in float32. Every schedule is this ring here, and keys travel in both
passes. Arrays in blocks have these shapes, with heads = kv_heads · group::

    queries       [blocks, batch, rows, kv_heads, group, head_dim]
    keys          [blocks, batch, rows, kv_heads, head_dim]
    scores        [batch, kv_heads, group, query rows, key rows]
    per row       [blocks, batch, kv_heads, group, rows]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_attention import _philox
from burst_attention._check_masks import NO_LIMIT
from burst_attention._extras import Extras
from burst_attention._layouts import positions_of
from burst_attention._ring import Ring, vary

Arrays: TypeAlias = tuple[jax.Array, ...]

BLOCK = 512
"""The most rows of a block."""


def forward(ring: Ring, qkv: Arrays, extras: Extras) -> Arrays:
    """Returns o, float32 ``[batch, q_len, heads, value_dim]``, and lse of one rank."""
    work = _Work(ring, qkv, extras)
    queries = work.queries()
    rows = work.per_row_shape
    state = (
        jnp.full(rows, -jnp.inf, jnp.float32),
        *work.zeros(rows, (*rows, qkv[2].shape[3])),
    )

    def step(hop: jax.Array, chunk: _Keys, state: Arrays) -> Arrays:
        def of_queries(_: None, block: tuple[_Queries, Arrays]) -> tuple[None, Arrays]:
            queries, state = block
            return None, work.over_keys(_fold, hop, queries, chunk, state, None)[0]

        return lax.scan(of_queries, None, (queries, state))[1]

    highest, weight, total = work.around(step, state)
    sees = weight != 0
    weight = jnp.where(sees, weight, 1)
    o = jnp.where(sees[..., None], total / weight[..., None], 0)
    lse = jnp.where(sees, highest + jnp.log(weight), -jnp.inf)
    return work.of_rows(jnp.moveaxis(o, 4, 2)), work.of_rows(jnp.moveaxis(lse, 4, 2))


def backward(ring: Ring, qkv: Arrays, extras: Extras, results: Arrays) -> Arrays:
    """Returns dq, dk, dv and, with slopes, theirs, of one rank from its o, lse, dout and dlse."""
    work = _Work(ring, qkv, extras)
    queries = work.queries(work.statistics(*results))
    shapes = (work.chunk.k.shape, work.chunk.v.shape)
    (dslopes,) = work.zeros(work.per_row_shape[1:4])

    def step(hop: jax.Array, chunk: _Keys, state: Any) -> Any:
        sums, dq, dslopes = state
        # What the ranks before added to the chunk's gradients arrives during this rank's products.
        sums = work.passed_on(sums)

        def of_queries(carry: Any, block: tuple[_Queries, jax.Array]) -> tuple[Any, jax.Array]:
            (own, dslopes), (queries, dq) = carry, block
            (dq, dslopes), own = work.over_keys(_gradients, hop, queries, chunk, (dq, dslopes), own)
            return (own, dslopes), dq

        own = work.zeros(*shapes)
        (own, dslopes), dq = lax.scan(of_queries, (own, dslopes), (queries, dq))
        return jax.tree.map(jnp.add, sums, own), dq, dslopes

    state = (work.zeros(*shapes), *work.zeros(queries.q.shape), dslopes)
    sums, dq, dslopes = work.around(step, state)
    dk, dv = (work.kv_rows.joined(x) for x in work.passed_on(sums))
    found = tuple(x.astype(of.dtype) for x, of in zip((work.of_rows(dq), dk, dv), qkv, strict=True))
    return found if extras.slopes is None else (*found, dslopes.reshape(extras.slopes.shape))


class _Queries(NamedTuple):
    """Blocks of queries, or one block."""

    q: jax.Array
    positions: jax.Array
    segments: jax.Array | None
    statistics: Any = None
    """In the backward pass dout, lse and delta. lse is +∞ for rows that see no key."""


class _Keys(NamedTuple):
    """Blocks of keys and values, or one block."""

    k: jax.Array
    v: jax.Array
    segments: jax.Array | None


def _fold(pair: _Pair, state: Arrays, _: None) -> tuple[Arrays, None]:
    """Adds a block of keys to the running softmax of a block of queries."""
    highest, weight, total = state
    s, _tanh = pair.scores()
    raised = jnp.maximum(highest, s.max(-1))
    # For a query that has seen nothing yet, −∞ − −∞ would be no number.
    base = jnp.where(jnp.isneginf(raised), 0, raised)
    p, decay = jnp.exp(s - base[..., None]), jnp.exp(highest - base)
    added = pair.product("bhgqk,bkhd->bhgqd", pair.dropout()(p), pair.keys.v)
    return (raised, weight * decay + p.sum(-1), total * decay[..., None] + added), None


def _gradients(pair: _Pair, state: Arrays, sums: Arrays) -> tuple[Arrays, Arrays]:
    """Adds a pair of blocks to dq and to the slopes' gradient, and to dk and dv."""
    (dq, dslopes), (dk, dv) = state, sums
    q, (dout, lse, delta) = pair.queries.q, pair.queries.statistics
    (s, tanh), dropped = pair.scores(), pair.dropout()
    # Rounding may leave a score above lse, but no weight exceeds 1.
    p = jnp.exp(jnp.minimum(s - lse[..., None], 0))
    dp = dropped(pair.product("bqhgd,bkhd->bhgqk", dout, pair.keys.v))
    # A hidden pair may hold anything, and 0 · NaN is NaN.
    ds = jnp.where(p == 0, 0, p * (dp - delta[..., None]))
    if pair.work.slopes is not None:
        dslopes += (ds * pair.distances).sum((-1, -2))
    if tanh is not None:
        ds *= 1 - tanh**2
    ds *= np.float32(pair.work.ring.softmax_scale)
    dq += pair.product("bhgqk,bkhd->bqhgd", ds, pair.keys.k)
    dk += pair.product("bhgqk,bqhgd->bkhd", ds, q)
    dv += pair.product("bhgqk,bqhgd->bkhd", dropped(p), dout)
    return (dq, dslopes), (dk, dv)


@dataclass(frozen=True)
class _Pair:
    """A block of queries and a block of keys."""

    work: _Work
    queries: _Queries
    keys: _Keys
    key_positions: jax.Array
    key_exists: jax.Array
    """Whether a row of the block is a key; the others fill the last block."""

    def product(self, which: str, a: jax.Array, b: jax.Array) -> jax.Array:
        """An einsum in float32."""
        return jnp.einsum(which, a, b, precision=self.work.precision)

    def scores(self) -> tuple[jax.Array, jax.Array | None]:
        """Returns s, −∞ where masked, and with a soft cap the tanh in it."""
        ring, tanh = self.work.ring, None
        s = self.product("bqhgd,bkhd->bhgqk", self.queries.q, self.keys.k)
        s *= np.float32(ring.softmax_scale)
        if ring.soft_cap:
            tanh = jnp.tanh(s / np.float32(ring.soft_cap))
            s = np.float32(ring.soft_cap) * tanh
        if self.work.slopes is not None:
            s += self.work.slopes * self.distances
        return jnp.where(self._visible(), s, -jnp.inf), tanh

    @property
    def distances(self) -> jax.Array:
        """Key position − query position, float32 ``[query rows, key rows]``."""
        return self._steps().astype(jnp.float32)

    def _steps(self) -> jax.Array:
        return self.key_positions - self.queries.positions[:, None]

    def _visible(self) -> jax.Array:
        left, right = self.work.ring.window
        steps = self._steps()
        visible = self.key_exists & jnp.ones_like(steps, bool)
        if left != NO_LIMIT:
            visible &= steps >= -left
        if right != NO_LIMIT:
            visible &= steps <= right
        if self.queries.segments is None:
            return visible
        assert self.keys.segments is not None
        of_queries = self.queries.segments[:, None, None, :, None]
        of_keys = self.keys.segments[:, None, None, None, :]
        return visible & (of_queries == of_keys) & (of_queries >= 0)

    def sees(self) -> jax.Array:
        """Whether the window lets any query of the block see any key of it, or may."""
        left, right = self.work.ring.window
        first, last = self.queries.positions.min(), self.queries.positions.max()
        sees = jnp.ones((), bool)
        if left != NO_LIMIT:
            sees &= self.key_positions.max() - first >= -left
        if right != NO_LIMIT:
            sees &= self.key_positions.min() - last <= right
        return sees

    def dropout(self) -> Callable[[jax.Array], jax.Array]:
        """Returns a function of arrays shaped like the scores.

        It makes what is dropped 0 and divides the rest by 1 − rate.
        """
        work = self.work
        if work.dropout is None:
            return lambda x: x
        k0, k1, entry, first = (work.dropout[:, i, None, None, None, None] for i in range(4))
        heads = jnp.arange(work.kv_heads * work.group, dtype=jnp.uint32)
        head = first + heads.reshape(work.kv_heads, work.group, 1, 1)
        keys, queries = (
            x.astype(jnp.uint32) for x in (self.key_positions, self.queries.positions[:, None])
        )
        number = _philox.word((keys // 4, queries, head, entry), (k0, k1), keys % 4)
        kept = number >= _philox.threshold(work.ring.dropout_rate)
        share = np.float32(1 - np.float32(work.ring.dropout_rate))
        return lambda x: jnp.where(kept, x / share, 0)


@dataclass(frozen=True)
class _Rows:
    """How a shard's rows are cut into equal blocks. Padding fills the last block."""

    length: int

    @property
    def count(self) -> int:
        """Blocks."""
        return -(-self.length // BLOCK)

    @property
    def size(self) -> int:
        """Rows of a block."""
        return -(-self.length // self.count)

    def indices(self) -> jax.Array:
        """Returns the rows' indices in the shard, ``[blocks, rows]``; padding follows the shard."""
        return jnp.arange(self.count * self.size, dtype=jnp.int32).reshape(self.count, self.size)

    def cut(self, x: jax.Array, fill: float = 0) -> jax.Array:
        """``[batch, seq, …]`` -> ``[blocks, batch, rows, …]``."""
        padding = [(0, 0)] * x.ndim
        padding[1] = (0, self.count * self.size - self.length)
        x = jnp.pad(x, padding, constant_values=fill)
        return jnp.moveaxis(x.reshape(x.shape[0], self.count, self.size, *x.shape[2:]), 1, 0)

    def joined(self, x: jax.Array) -> jax.Array:
        """The inverse of `cut`."""
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, : self.length]


class _Work:
    """One rank's part of a pass."""

    def __init__(self, ring: Ring, qkv: Arrays, extras: Extras):
        q, k, v = qkv
        self.ring = ring
        self.rank = lax.axis_index(ring.axes)
        # What 16 bits hold is exact in the products that accelerators make by default.
        self.precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
        self.kv_heads = k.shape[2]
        self.group = q.shape[2] // self.kv_heads
        self.q_rows, self.kv_rows = _Rows(q.shape[1]), _Rows(k.shape[1])
        self.per_row_shape = (
            self.q_rows.count, q.shape[0], self.kv_heads, self.group, self.q_rows.size
        )  # fmt: skip
        self.dropout = extras.dropout
        self.slopes = extras.slopes
        if self.slopes is not None:
            self.slopes = self.slopes.reshape(q.shape[0], self.kv_heads, self.group, 1, 1)
        self.q_segments = extras.q_segments
        self.q = self._grouped(_without_padding(q, extras.q_segments))
        of_keys = extras.kv_segments
        self.chunk = _Keys(
            self.kv_rows.cut(_without_padding(k, of_keys)),
            self.kv_rows.cut(_without_padding(v, of_keys)),
            None if of_keys is None else self.kv_rows.cut(of_keys, -1),
        )

    def queries(self, statistics: Arrays | None = None) -> _Queries:
        """Returns this rank's queries in blocks."""
        positions = self._positions(self.q_rows, self.rank)
        segments = self.q_segments
        segments = None if segments is None else self.q_rows.cut(segments, -1)
        return _Queries(self.q, positions, segments, statistics)

    def statistics(self, o: jax.Array, lse: jax.Array, dout: jax.Array, dlse: jax.Array) -> Arrays:
        """Returns dout, lse and delta in blocks."""
        # Rows that see no key may come with any gradient, NaN too. It counts as 0.
        blind = jnp.isneginf(lse) | self._outside_of_keys()[:, None]
        if self.q_segments is not None:
            blind |= self.q_segments[..., None] < 0
        dout = jnp.where(blind[..., None], 0, dout.astype(jnp.float32))
        delta = (dout * o.astype(jnp.float32)).sum(-1) - dlse
        rows = (self._grouped(x) for x in (jnp.where(blind, jnp.inf, lse), delta))
        lse, delta = (jnp.moveaxis(x, 2, 4) for x in rows)
        return self._grouped(dout), lse, delta

    def zeros(self, *shapes: tuple[int, ...]) -> Arrays:
        """Returns arrays of zeros in float32."""
        return tuple(vary(jnp.zeros(shape, jnp.float32), self.ring.varying) for shape in shapes)

    def _outside_of_keys(self) -> jax.Array:
        """Whether a query's window ends before the first key or begins after the last one."""
        left, right = self.ring.window
        rows, size = self.q_rows.length, self.ring.world_size
        positions = jnp.arange(rows, dtype=jnp.int32)
        positions = positions_of(positions, self.rank, size, rows, self.ring.layout)
        outside = jnp.zeros(rows, bool)
        if left != NO_LIMIT:
            outside |= positions - left >= size * self.kv_rows.length
        if right != NO_LIMIT:
            outside |= positions + right < 0
        return outside

    def around(self, step: Callable[..., Any], state: Any) -> Any:
        """Calls ``step(hop, chunk, state)`` for every chunk of the ring, this rank's own first."""

        def body(carry: Any, hop: jax.Array) -> tuple[Any, None]:
            chunk, state = carry
            # Before the step: the exchange of the next chunk runs beside its products.
            after = self.passed_on(chunk)
            return (after, step(hop, chunk, state)), None

        carry = jax.tree.map(lambda x: vary(x, self.ring.varying), (self.chunk, state))
        hops = jnp.arange(self.ring.world_size, dtype=jnp.int32)
        return lax.scan(body, carry, hops)[0][1]

    def passed_on(self, arrays: Any) -> Any:
        """Sends arrays to the next rank and returns those of the rank before."""
        size = self.ring.world_size
        if size == 1:
            return arrays
        pairs = [(rank, (rank + 1) % size) for rank in range(size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.ring.axes, pairs), arrays)

    def over_keys(
        self,
        fold: Callable[..., Any],
        hop: jax.Array,
        queries: _Queries,
        chunk: _Keys,
        state: Any,
        sums: Any,
    ) -> tuple[Any, Any]:
        """Folds every block of a chunk that the queries may see.

        ``fold(pair, state, sums)`` returns both anew; ``sums`` has an entry for each block of keys.
        """
        owner = (self.rank - hop) % self.ring.world_size
        positions = self._positions(self.kv_rows, owner)
        exists = self.kv_rows.indices() < self.kv_rows.length

        def body(state: Any, block: Any) -> tuple[Any, Any]:
            keys, sums, *rows = block
            keys = keys._replace(k=keys.k.astype(jnp.float32), v=keys.v.astype(jnp.float32))
            pair = _Pair(self, queries, keys, *rows)
            return lax.cond(
                pair.sees(),
                lambda state, sums: fold(pair, state, sums),
                lambda state, sums: (state, sums),
                state,
                sums,
            )

        return lax.scan(body, state, (chunk, sums, positions, exists))

    def of_rows(self, x: jax.Array) -> jax.Array:
        """Blocks ``[blocks, batch, rows, kv_heads, group, …]`` -> ``[batch, seq, heads, …]``."""
        x = self.q_rows.joined(x)
        return x.reshape(*x.shape[:2], -1, *x.shape[4:])

    def _grouped(self, x: jax.Array) -> jax.Array:
        """The inverse of `of_rows`, in float32."""
        x = x.reshape(*x.shape[:2], self.kv_heads, self.group, *x.shape[3:])
        return self.q_rows.cut(x.astype(jnp.float32))

    def _positions(self, rows: _Rows, rank: jax.Array) -> jax.Array:
        return positions_of(
            rows.indices(), rank, self.ring.world_size, rows.length, self.ring.layout
        )


def _without_padding(x: jax.Array, segments: jax.Array | None) -> jax.Array:
    """Returns x with 0 in padding: its weights are 0, and 0 · NaN is NaN."""
    if segments is None:
        return x
    return jnp.where(lax.expand_dims(segments < 0, (2, 3)), 0, x)
