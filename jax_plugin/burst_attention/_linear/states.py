"""How states travel between ranks, so that each rank has the state of all tokens before its own.

A rank's tokens turn the state S before them into ``apply(transfer, S) + M``: the transfer says what
they leave of S, and M is the state that they leave themselves. `apply` and `compose` alone know
what a transfer is. So only M and a transfer travel, however long the sequence is.

=========================  ============================  ============================
transfer                   of                            floats
=========================  ============================  ============================
none                       sums                          0
`Decay` of heads           linear attention              ``batch · heads``
`Decay` of channels        … with decays of channels     ``batch · heads · k_dim``
`Matrix`                   the delta rule                ``batch · heads · k_dim²``
=========================  ============================  ============================
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from burst_attention._confirmed import Family
from burst_attention._linear.checks import Method
from burst_attention._linear.meeting import meet
from burst_attention._mesh import permute, vary_like
from burst_attention._types import Axes

Logs: TypeAlias = Float32[Array, "batch seq heads"] | Float32[Array, "batch seq heads k_dim"]
"""Log decays of tokens and heads, or of their channels too."""
Betas: TypeAlias = Float32[Array, "batch seq heads"]
State: TypeAlias = Float32[Array, "batch heads k_dim v_dim"]

GATHERED_BYTES = 256 * 2**20
"""The most bytes on a device of all ranks' states and transfers that ``auto`` gathers."""


class Decay(NamedTuple):
    """The transfer e^logs ∘ S. Where a log is −∞, nothing of S is left, even if S holds NaN."""

    logs: Float32[Array, "*leading"]
    """``[…, heads]``, or ``[…, heads, k_dim]`` for a decay of each row of S."""


class Matrix(NamedTuple):
    """The transfer A S. A row of S that A does not read passes nothing, not even NaN."""

    matrix: Float32[Array, "*leading k_dim k_dim"]


Transfer: TypeAlias = Decay | Matrix | None
"""What tokens leave of the state before them: of None they leave all."""


def apply(
    transfer: Transfer,
    state: Float32[Array, "*#leading k_dim v_dim"],
    exp: Callable[[jax.Array], jax.Array] = jnp.exp,
) -> Float32[Array, "*#leading k_dim v_dim"]:
    """Returns what a transfer leaves of a state. ``exp`` undoes the logarithm of decays."""
    if transfer is None:
        return state
    if isinstance(transfer, Matrix):
        is_read = (transfer.matrix != 0).any(axis=-2)[..., None]
        read = jnp.where(is_read, state, 0)
        return product(transfer.matrix, read)
    missing = state.ndim - transfer.logs.ndim
    logs = jnp.expand_dims(transfer.logs, range(-missing, 0))
    return jnp.where(jnp.isneginf(logs), 0, exp(logs) * state)


def product(
    a: Float32[Array, "*#leading rows k_dim"], b: Float32[Array, "*#leading k_dim columns"]
) -> Float32[Array, "*#leading rows columns"]:
    """Returns products of small matrices."""
    return jnp.matmul(a, b, precision="highest")


def compose(first: Transfer, then: Transfer) -> Transfer:
    """Returns the transfer of tokens that follow others: ``apply(then, apply(first, S))``."""
    if first is None or then is None:
        return first or then
    if isinstance(first, Matrix):
        return Matrix(apply(then, first.matrix))
    assert isinstance(then, Decay)
    return Decay(first.logs + then.logs)


def identity(
    like: Float32[Array, "*leading k_dim columns"],
) -> Float32[Array, "*leading k_dim columns"]:
    """Returns columns that begin with the identity, then 0, on the devices of an array."""
    rows, columns = like.shape[-2:]
    one = jnp.eye(rows, columns, dtype=jnp.float32)
    return vary_like(like, jnp.broadcast_to(one, like.shape))


def turned(transfer: Transfer) -> Transfer:
    """Returns what tokens do to the gradient of the state after them."""
    if isinstance(transfer, Matrix):
        return Matrix(transfer.matrix.swapaxes(-1, -2))
    return transfer


def ended(transfer: Matrix, logs: Logs) -> Matrix:
    """Returns the transfer of tokens, 0 with a reset among them, even if a token is NaN."""
    resets = jnp.isneginf(logs)
    resets = (resets if logs.ndim == 3 else resets.all(axis=3)).any(axis=1)
    return Matrix(jnp.where(resets[..., None, None], 0, transfer.matrix))


def total(logs: Logs) -> Decay:
    """Returns the sum of all tokens' decays: −∞ with a reset among them, even if one is NaN."""
    return Decay(jnp.where(jnp.isneginf(logs).any(axis=1), -jnp.inf, logs.sum(axis=1)))


class Call(NamedTuple):
    """Everything static about a call."""

    axes: Axes
    """Mesh axes of the sequence."""
    world_size: int
    method: Method
    """``ring``, ``all_gather`` or ``in_turn``."""
    platform: str | None
    """``cpu`` or ``cuda``; None where only lowering will tell."""
    has_kernels: bool
    """Whether GPUs have kernels of the recurrence. Otherwise plain JAX computes there."""
    has_documents: bool
    """Whether there are documents, which keep values that are not finite to themselves."""
    scale: float
    """Factor on the queries."""
    family: Family = "linear_attention"
    """The kernels that compute on GPUs."""


class Operands(NamedTuple):
    """The arrays of a recurrence, or their gradients."""

    q: Float[Array, "batch seq q_heads k_dim"]
    k: Float[Array, "batch seq k_heads k_dim"]
    v: Float[Array, "batch seq v_heads v_dim"]
    logs: Logs
    first: State
    """The state before the first token."""
    beta: Betas | None
    """β of the delta rule; None in linear attention."""


def chosen(method: Method, world_size: int, travelling: int) -> Method:
    """Returns the method, ``auto`` resolved: one exchange, unless that takes too much memory.

    ``travelling`` are the floats of a state and a transfer.
    """
    if method != "auto":
        return method
    return "all_gather" if world_size * travelling * 4 <= GATHERED_BYTES else "ring"


def before(
    call: Call, first: State, transfer: Transfer, left: State, *, back: bool = False
) -> tuple[State, State]:
    """Returns the state before this rank's tokens, and the state after all ranks' tokens.

    ``first`` is the state before rank 0, ``transfer`` is what this rank's tokens do to a state, and
    ``left`` is the state that they leave. With ``back`` ranks follow each other from the last to
    the first. With the method ``ring`` only the first rank in this order needs ``first``, and only
    the last rank gets the state after all tokens.
    """
    transfer, left = meet(call.axes, call.platform, (transfer, left))
    method = _ring if call.method == "ring" else _gathered
    return method(call, first, transfer, left, back)


def _gathered(
    call: Call, first: State, transfer: Transfer, left: State, back: bool
) -> tuple[State, State]:
    """Gathers what all ranks' tokens do in one exchange; each rank then folds it itself."""
    rank = lax.axis_index(call.axes)
    gathered: tuple[Transfer, State] = jax.tree.map(
        lambda x: lax.all_gather(x, call.axes), (transfer, left)
    )

    def step(carry: tuple[State, State], other: jax.Array) -> tuple[tuple[State, State], None]:
        state, own = carry
        own = jnp.where(other == rank, state, own)
        of_other, its_left = jax.tree.map(lambda x: x[other], gathered)
        return (apply(of_other, state) + its_left, own), None

    ranks = jnp.arange(call.world_size, dtype=jnp.int32)
    (last, own), _ = lax.scan(step, (first, first), ranks[::-1] if back else ranks)
    return own, last


def _ring(
    call: Call, first: State, transfer: Transfer, left: State, back: bool
) -> tuple[State, State]:
    """Sends states from rank to rank. Each rank has its transfer ready when the state arrives."""
    size, rank = call.world_size, lax.axis_index(call.axes)
    order = list(range(size))[:: -1 if back else 1]
    own = first
    for sender, receiver in pairwise(order):
        sent = apply(transfer, own) + left
        came = permute(sent, call.axes, [(sender, receiver)])
        own = jnp.where(rank == receiver, came, own)
    return own, apply(transfer, own) + left
