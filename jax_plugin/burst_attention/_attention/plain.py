"""The ring in plain JAX: the definition of every implementation, and the fallback on any platform.

Keys, values and their segments go round the ring. Each rank folds every chunk that arrives into the
running softmax of its own queries. In the backward pass the gradients of a chunk follow the chunk.
A shard is cut into blocks of rows, and scores exist for one pair of blocks at a time, so memory
grows with the shard, not with its square::

    forward   s = scale · q kᵀ;  capped: cap · tanh(s / cap);  + slope · (key position − query
              position);  −∞ where masked
              lse = ln Σ e^s;  p = e^(s − lse);  o = dropped(p) v
    backward  delta = rowsum(dout ∘ o) − dlse;  ds = p ∘ (dropped(dout vᵀ) − delta)
              dslope = Σ ds · (key position − query position);  capped: ds ∘= 1 − tanh²
              dv = dropped(p)ᵀ dout;  dk = scale · dsᵀ q;  dq = scale · ds k

All products and sums are in float32. Every schedule is this ring here, and keys travel in both
passes. `blocks` has the shapes of arrays in blocks.
"""

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_attention import _ffi
from burst_attention._attention.blocks import Chunk, Keys, Pair, Queries, Work
from burst_attention._attention.features import Features
from burst_attention._attention.ring import Ring
from burst_attention._types import Arrays

State = TypeVar("State")
"""What a loop over blocks of keys carries: arrays in any tree."""
Sums = TypeVar("Sums")
"""What a loop over blocks of keys adds to: an entry for each block, or None."""
OfQueries: TypeAlias = tuple[jax.Array, jax.Array]
"""dq, and the gradient of the slopes."""


@jax.named_scope(f"{_ffi.FORWARD}_plain")
def forward(ring: Ring, qkv: Arrays, features: Features) -> Arrays:
    """Returns o, float32 ``[batch, q_len, heads, value_dim]``, and lse of one rank."""
    work = Work(ring, qkv, features)
    queries = work.queries(None)
    rows = work.per_row_shape
    zeros = work.zeros(rows, (*rows, qkv[2].shape[3]))
    state = (jnp.full(rows, -jnp.inf, jnp.float32), *zeros)

    def step(hop: jax.Array, chunk: Chunk, state: Arrays) -> Arrays:
        def of_queries(_: None, block: tuple[Queries, Arrays]) -> tuple[None, Arrays]:
            queries, state = block
            return None, _over_keys(_fold, work, queries, work.keys(chunk, hop), state, None)[0]

        return lax.scan(of_queries, None, (queries, state))[1]

    highest, weight, total = work.around(step, state)
    sees = weight != 0
    weight = jnp.where(sees, weight, 1)
    o = jnp.where(sees[..., None], total / weight[..., None], 0)
    lse = jnp.where(sees, highest + jnp.log(weight), -jnp.inf)
    return work.merge_rows(jnp.moveaxis(o, 4, 2)), work.merge_rows(jnp.moveaxis(lse, 4, 2))


@jax.named_scope(f"{_ffi.BACKWARD}_plain")
def backward(ring: Ring, qkv: Arrays, features: Features, results: Arrays) -> Arrays:
    """Returns dq, dk, dv and the gradients of features of one rank from its o, lse, dout, dlse."""
    work = Work(ring, qkv, features)
    queries = work.queries(work.statistics(*results))
    shapes = (work.chunk.k.shape, work.chunk.v.shape)

    def step(
        hop: jax.Array, chunk: Chunk, state: tuple[Arrays, jax.Array, jax.Array]
    ) -> tuple[Arrays, jax.Array, jax.Array]:
        sums, dq, dslopes = state
        # The sums of the ranks before arrive during this rank's products.
        sums = work.send_on(sums)

        def of_queries(
            carry: tuple[Arrays, jax.Array], block: tuple[Queries, jax.Array]
        ) -> tuple[tuple[Arrays, jax.Array], jax.Array]:
            (own, dslopes), (queries, dq) = carry, block
            keys, state = work.keys(chunk, hop), (dq, dslopes)
            (dq, dslopes), own = _over_keys(_gradients, work, queries, keys, state, own)
            return (own, dslopes), dq

        (own, dslopes), dq = lax.scan(of_queries, (work.zeros(*shapes), dslopes), (queries, dq))
        return jax.tree.map(jnp.add, sums, own), dq, dslopes

    dq, dslopes = work.zeros(queries.q.shape, work.per_row_shape[1:4])
    sums, dq, dslopes = work.around(step, (work.zeros(*shapes), dq, dslopes))
    dk, dv = (work.kv_rows.merge(x) for x in work.send_on(sums))
    wide, slopes = (work.merge_rows(dq), dk, dv), features.alibi_slopes
    found = tuple(x.astype(of.dtype) for x, of in zip(wide, qkv, strict=True))
    return found if slopes is None else (*found, dslopes.reshape(slopes.shape))


def _over_keys(
    fold: Callable[[Pair, State, Sums], tuple[State, Sums]],
    work: Work,
    queries: Queries,
    keys: Keys,
    state: State,
    sums: Sums,
) -> tuple[State, Sums]:
    """Folds every block of keys that a block of queries may see into a state and into sums."""

    def body(state: State, block: tuple[Keys, Sums]) -> tuple[State, Sums]:
        keys, sums = block
        pair = Pair(work, queries, keys.widened())
        return lax.cond(
            pair.may_see(),
            lambda state, sums: fold(pair, state, sums),
            lambda state, sums: (state, sums),
            state,
            sums,
        )

    return lax.scan(body, state, (keys, sums))


def _fold(pair: Pair, state: Arrays, _: None) -> tuple[Arrays, None]:
    """Adds a block of keys to the running softmax of a block of queries."""
    highest, weight, total = state
    s, _tanh = pair.scores()
    raised = jnp.maximum(highest, s.max(-1))
    # For a query that has seen no key yet, −∞ − −∞ would be NaN.
    base = jnp.where(jnp.isneginf(raised), 0, raised)
    p, decay = jnp.exp(s - base[..., None]), jnp.exp(highest - base)
    added = pair.product("bhgqk,bkhd->bhgqd", pair.dropout()(p), pair.keys.v)
    return (raised, weight * decay + p.sum(-1), total * decay[..., None] + added), None


def _gradients(pair: Pair, state: OfQueries, sums: Arrays) -> tuple[OfQueries, Arrays]:
    """Adds a pair of blocks to dq and to the slopes' gradient, and to dk and dv."""
    assert pair.queries.statistics is not None
    (dq, dslopes), (dk, dv) = state, sums
    q, (dout, lse, delta) = pair.queries.q, pair.queries.statistics
    (s, tanh), dropped = pair.scores(), pair.dropout()
    # Rounding may leave a score above lse, but no weight exceeds 1.
    p = jnp.exp(jnp.minimum(s - lse[..., None], 0))
    dp = dropped(pair.product("bqhgd,bkhd->bhgqk", dout, pair.keys.v))
    # A hidden pair may hold anything, and 0 · NaN is NaN.
    ds = jnp.where(p == 0, 0, p * (dp - delta[..., None]))
    if pair.work.slopes is not None:
        dslopes += (ds * pair.distances()).sum((-1, -2))
    if tanh is not None:
        ds *= 1 - tanh**2
    ds *= np.float32(pair.work.ring.softmax_scale)
    dq += pair.product("bhgqk,bkhd->bqhgd", ds, pair.keys.k)
    dk += pair.product("bhgqk,bqhgd->bkhd", ds, q)
    dv += pair.product("bhgqk,bqhgd->bkhd", dropped(p), dout)
    return (dq, dslopes), (dk, dv)
