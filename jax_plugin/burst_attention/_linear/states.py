"""How states travel between ranks, so that each rank has the state of all tokens before its own.

A rank's tokens turn the state before them, S, into e^a S + M: a is the sum of their log decays, M
the state that they leave themselves. So only M and a travel,
``batch · heads · (k_dim · v_dim + 1)`` floats, however long the sequence is. If a reset is among
the tokens, a is −∞ and only M is left, even if S holds NaN.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from burst_attention._linear.checks import Method
from burst_attention._types import Axes

Logs: TypeAlias = Float32[Array, "batch seq heads"]
State: TypeAlias = Float32[Array, "batch heads k_dim v_dim"]
Decays: TypeAlias = Float32[Array, "batch heads"]

GATHERED_BYTES = 256 * 2**20
"""The most bytes on a device of all ranks' states that ``auto`` gathers."""


class Call(NamedTuple):
    """Everything static about a call."""

    axes: Axes
    """Mesh axes of the sequence."""
    world_size: int
    method: Method
    """``ring`` or ``all_gather``."""
    platform: str | None
    """``cpu`` or ``cuda``; None where only lowering will tell."""
    has_documents: bool
    """Whether there are documents, which keep values that are not finite to themselves."""
    scale: float
    """Factor on the queries."""


def chosen(method: Method, world_size: int, state: State) -> Method:
    """Returns the method, ``auto`` resolved: one exchange, unless that takes too much memory."""
    if method != "auto":
        return method
    return "all_gather" if world_size * state.size * 4 <= GATHERED_BYTES else "ring"


def before(
    call: Call, first: State, decays: Decays, left: State, *, back: bool = False
) -> tuple[State, State]:
    """Returns the state before this rank's tokens, and the state after all ranks' tokens.

    ``first`` is the state before rank 0, ``decays`` are this rank's a (see `total`), and ``left``
    is its M. With ``back`` ranks follow each other from the last to the first. With the method
    ``ring`` only the first rank in this order needs ``first``, and only the last rank gets the
    state after all tokens.
    """
    method = _ring if call.method == "ring" else _gathered
    return method(call, first, decays, left, back)


def total(logs: Logs) -> Decays:
    """Returns the sum of all tokens' log decays: −∞ with a reset among them, even if one is NaN."""
    return jnp.where(jnp.isneginf(logs).any(axis=1), -jnp.inf, logs.sum(axis=1))


def faded(
    decays: Float32[Array, "*#leading"],
    state: Float32[Array, "*#leading k_dim v_dim"],
    exp: Callable[[jax.Array], jax.Array] = jnp.exp,
) -> Float32[Array, "*#leading k_dim v_dim"]:
    """Returns e^decays S, and 0 where the decay is −∞, whatever the state is."""
    decays = decays[..., None, None]
    return jnp.where(jnp.isneginf(decays), 0, exp(decays) * state)


def _after(before: State, decays: Decays, left: State) -> State:
    return faded(decays, before) + left


def _gathered(
    call: Call, first: State, decays: Decays, left: State, back: bool
) -> tuple[State, State]:
    """Gathers the a and M of all ranks in one exchange; each rank then folds them itself."""
    rank = lax.axis_index(call.axes)
    all_decays = lax.all_gather(decays, call.axes)
    all_left = lax.all_gather(left, call.axes)

    def step(carry: tuple[State, State], other: jax.Array) -> tuple[tuple[State, State], None]:
        state, own = carry
        own = jnp.where(other == rank, state, own)
        return (_after(state, all_decays[other], all_left[other]), own), None

    ranks = jnp.arange(call.world_size, dtype=jnp.int32)
    (last, own), _ = lax.scan(step, (first, first), ranks[::-1] if back else ranks)
    return own, last


def _ring(call: Call, first: State, decays: Decays, left: State, back: bool) -> tuple[State, State]:
    """Sends states from rank to rank. Each rank has its a and M ready when the state arrives."""
    size, rank = call.world_size, lax.axis_index(call.axes)
    order = list(range(size))[:: -1 if back else 1]
    own = first
    for sender, receiver in pairwise(order):
        sent = _after(own, decays, left)
        came = lax.ppermute(sent, call.axes, [(sender, receiver)])
        own = jnp.where(rank == receiver, came, own)
    return own, _after(own, decays, left)
