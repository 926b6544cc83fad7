"""How states travel between ranks: what of all ranks' tokens is left where each rank begins.

A rank's tokens turn the state before them, S, into e^a S + M: a is the sum of their log decays, M
what they leave themselves. So only M and a travel, ``batch · heads · (k_dim · v_dim + 1)`` floats,
however long the sequence is. Where a reset is among the tokens, a is −∞ and M alone is left, even
if S holds NaN.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

GATHERED_BYTES = 256 * 2**20
"""Most that all ranks' states may take up on each, where ``auto`` chooses to gather them."""


class Exchange(NamedTuple):
    """Static: over which axes, and how."""

    axes: tuple[str, ...]
    world_size: int
    method: str
    """``ring`` or ``all_gather``."""


def chosen(method: str, world_size: int, state: jax.ShapeDtypeStruct) -> str:
    """``auto`` gathers in one round, unless that takes too much memory."""
    if method != "auto":
        return method
    return "all_gather" if world_size * state.size * 4 <= GATHERED_BYTES else "ring"


def before(
    exchange: Exchange, first: jax.Array, decays: jax.Array, left: jax.Array, *, back: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The state where this rank begins, and that behind the last rank, on every rank.

    ``first`` is that before rank 0, ``decays`` ``[batch, heads]`` are this rank's a (of `total`),
    ``left`` its M. With ``back`` ranks follow each other from the last to the first.
    """
    if exchange.method == "ring":
        return _ring(exchange, first, decays, left, back)
    return _gathered(exchange, first, decays, left, back)


def total(logs: jax.Array) -> jax.Array:
    """The sum of the log decays ``[batch, seq, heads]`` of all tokens.

    It is −∞ with a reset among them, even if others are NaN.
    """
    return jnp.where(jnp.isneginf(logs).any(axis=1), -jnp.inf, logs.sum(axis=1))


def faded(decays: jax.Array, state: jax.Array) -> jax.Array:
    """e^decays S, and 0 where the decay is −∞, whatever the state is.

    The state is ``[…, k_dim, v_dim]``, decays are ``[…]``.
    """
    decays = decays[..., None, None]
    return jnp.where(jnp.isneginf(decays), 0, jnp.exp(decays) * state)


def _after(before: jax.Array, decays: jax.Array, left: jax.Array) -> jax.Array:
    return faded(decays, before) + left


def _gathered(
    exchange: Exchange, first: jax.Array, decays: jax.Array, left: jax.Array, back: bool
) -> tuple[jax.Array, jax.Array]:
    """One exchange of all ranks' a and M; each rank puts them together itself."""
    rank = lax.axis_index(exchange.axes)
    all_decays = lax.all_gather(decays, exchange.axes)
    all_left = lax.all_gather(left, exchange.axes)

    def step(
        carry: tuple[jax.Array, jax.Array], other: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        state, own = carry
        own = jnp.where(other == rank, state, own)
        return (_after(state, all_decays[other], all_left[other]), own), None

    ranks = jnp.arange(exchange.world_size)
    (last, own), _ = lax.scan(step, (first, first), ranks[::-1] if back else ranks)
    return own, last


def _ring(
    exchange: Exchange, first: jax.Array, decays: jax.Array, left: jax.Array, back: bool
) -> tuple[jax.Array, jax.Array]:
    """From rank to rank: each has its own a and M ready when the state before them comes."""
    size, rank = exchange.world_size, lax.axis_index(exchange.axes)
    order = list(range(size))[:: -1 if back else 1]
    own = first
    for sender, receiver in pairwise(order):
        sent = _after(own, decays, left)
        came = lax.ppermute(sent, exchange.axes, [(sender, receiver)])
        own = jnp.where(rank == receiver, came, own)
    last = _after(own, decays, left)
    is_last = rank == order[-1]
    return own, lax.psum(jnp.where(is_last, last, 0), exchange.axes)
