"""Infini-attention of one device's tokens in a whole, sharded sequence.

Segments do not cross ranks, so the softmax attention needs no exchange. Ranks exchange what their
tokens do to the memory, forward, and what they do to its gradient, backward.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32

from burst_attention import _mesh
from burst_attention._batching import over_batch, spread
from burst_attention._checkpoint import OUT_NAME, STATE_NAME
from burst_attention._derivatives import refuse_second, without_transpose
from burst_attention._infini.segments import Gates, Memory, Rows, Segments, Settings
from burst_attention._infini.sweeps import Plan, Starts, plan_of
from burst_attention._linear import states
from burst_attention._linear.meeting import meet
from burst_attention._linear.shards import of_last_rank
from burst_attention._linear.states import Call, Matrix, State
from burst_attention._mesh import vary_like, vary_together
from burst_attention._types import Axes


class Inputs(NamedTuple):
    """The arrays of a call, checked: of one device, or global ones."""

    query: Float[Array, "batch seq heads head_dim"]
    key: Float[Array, "batch seq kv_heads head_dim"]
    value: Float[Array, "batch seq kv_heads value_dim"]
    gate: Float32[Array, " heads"]
    m: Float32[Array, "batch kv_heads head_dim value_dim"]
    z: Float32[Array, "batch kv_heads head_dim"]
    local_query: Float[Array, "batch seq heads head_dim"] | None
    local_key: Float[Array, "batch seq kv_heads head_dim"] | None


class Operands(NamedTuple):
    """The arrays of a recurrence, or their gradients."""

    rows: Rows
    gate: Gates
    memory: Memory
    """The memory before the first token of all ranks."""


class Ranks(NamedTuple):
    """What is static about a recurrence."""

    call: Call
    plan: Plan


Results: TypeAlias = tuple[Float[Array, "batch seq heads value_dim"], Memory]
Kept: TypeAlias = tuple[Starts, Matrix | None]
"""The memories before this rank's windows, and what its tokens do to the M before them."""


def attend(
    axes: Axes,
    settings: Settings,
    inputs: Inputs,
    whole: Axes = (),
    own_heads: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> tuple[jax.Array, Memory]:
    """Returns the results for this device's tokens.

    Along the axes ``whole`` devices have different heads of queries, and all heads of keys.
    ``own_heads`` takes the heads of keys that this device's queries use, dimension 2.
    """
    inputs = spread(vary_together(axes, inputs))
    q, k, v, gate, m, z, local_q, local_k = inputs
    call = _call(axes, m)
    segments = Segments(settings, _segment(settings, q.shape[1], call.world_size), own_heads)
    if q.size == 0:
        out, after = vary_like(q, jnp.zeros((*q.shape[:3], v.shape[3]), v.dtype)), (m, z)
    else:
        gates = jnp.broadcast_to(gate, (q.shape[0], *gate.shape))
        rows = Rows(q, k, v, local_q, local_k)
        plan = plan_of(segments, rows, _mesh.platform(jax.sharding.get_abstract_mesh()))
        operands = Operands(rows, gates, (m, z))
        out, after = without_transpose(_attend(Ranks(call, plan), operands))
    one_of_all = partial(of_last_rank, call._replace(axes=axes + whole))
    return out, (one_of_all(after[0]), one_of_all(after[1]))


def _call(axes: Axes, m: State) -> Call:
    mesh = _mesh.ring_mesh(axes, "infini_attention")
    size = _mesh.axes_size(mesh, axes)
    travelling = m.size * (1 + m.shape[2] / m.shape[3])
    method = states.chosen("auto", size, round(travelling))
    return Call(axes, size, method, None, has_kernels=False, has_documents=False, scale=1.0)


def _segment(settings: Settings, tokens: int, world_size: int) -> int:
    """Returns the tokens of this call's segments."""
    size = settings.segment_size
    if tokens % size == 0:
        return size
    if world_size == 1 and tokens < size:
        return tokens
    raise ValueError(
        f"segment_size must divide the tokens of each rank, {tokens}, got {size}; take a divisor, "
        "or give the last piece of a text, of less than a segment, to one rank (spec=P())"
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ranks: Ranks, operands: Operands) -> Results:
    """Returns the outputs of this rank's tokens, and the memory after the tokens of all ranks.

    Only with the method ``all_gather`` every rank has that memory, and else the last one.
    """
    return _forward_rule(ranks, operands)[0]


def _forward_rule(ranks: Ranks, operands: Operands) -> tuple[Results, tuple[Operands, Kept]]:
    out, last, kept = _results(ranks, operands)
    # A rematerialised layer that keeps these results repeats nothing of the forward pass.
    out = checkpoint_name(out, OUT_NAME)
    last, kept = jax.tree.map(lambda x: checkpoint_name(x, STATE_NAME), (last, kept))
    return (out, last), (operands, kept)


def _backward_rule(
    ranks: Ranks, residuals: tuple[Operands, Kept], cotangents: Results
) -> tuple[Operands]:
    return (_gradients(ranks, residuals, cotangents),)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _results(ranks: Ranks, operands: Operands) -> tuple[jax.Array, Memory, Kept]:
    """Returns outputs, the memory after all ranks' tokens, and what the backward pass needs."""
    return over_batch(partial(_forward, ranks), operands)


def _forward(ranks: Ranks, operands: Operands) -> tuple[jax.Array, Memory, Kept]:
    """Computes `_results`."""
    (call, plan), (rows, gate, memory) = ranks, operands
    if call.world_size == 1:
        out, last, starts = plan.forward(memory, rows, gate)
        return out, last, (starts, None)
    exchanged = _linear_before if plan.segments.settings.update == "linear" else _delta_before
    first, last, transfer = exchanged(ranks, rows, memory)
    out, _, starts = plan.forward(first, rows, gate)
    out, last = meet(call.axes, call.platform, (out, vary_like(rows, last)))
    return out, last, (starts, transfer)


def _linear_before(ranks: Ranks, rows: Rows, memory: Memory) -> tuple[Memory, Memory, None]:
    """Returns the memory before this rank's tokens, after all ranks' tokens, and no transfer."""
    left = ranks.plan.after(jax.tree.map(jnp.zeros_like, memory), rows)
    found = states.before(ranks.call, *vary_like(rows, (_joined(memory), None, _joined(left))))
    first, last = map(_parted, found)
    return first, last, None


def _delta_before(ranks: Ranks, rows: Rows, memory: Memory) -> tuple[Memory, Memory, Matrix]:
    """Returns the memory before this rank's tokens, after all ranks' tokens, and its transfer."""
    (call, plan), (m, z) = ranks, vary_like(rows, memory)
    sums = plan.sums(rows.key)[..., None]
    first_z, last_z = (x[..., 0] for x in states.before(call, z[..., None], None, sums))
    # What all segments do to a state: the state of columns that begin with the identity.
    k_dim = m.shape[2]
    columns = jnp.pad(jnp.zeros_like(m), [(0, 0)] * 3 + [(k_dim, 0)])
    left, _ = plan.after((states.identity(columns), first_z), rows)
    transfer = Matrix(left[..., :k_dim])
    first_m, last_m = states.before(call, m, transfer, left[..., k_dim:])
    return (first_m, first_z), (last_m, last_z), transfer


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gradients(ranks: Ranks, residuals: tuple[Operands, Kept], cotangents: Results) -> Operands:
    """Returns the gradients of the operands. Ranks follow each other from the last to the first."""
    return over_batch(partial(_backward, ranks), residuals, cotangents)


def _backward(ranks: Ranks, residuals: tuple[Operands, Kept], cotangents: Results) -> Operands:
    """Computes `_gradients`."""
    (call, plan), (operands, (starts, transfer)), (dout, dlast) = ranks, residuals, cotangents
    rows, gate, _ = operands
    dlast = vary_like((rows, dout), dlast)
    if call.world_size == 1:
        dfirst, dgate, drows = plan.backward(starts, rows, gate, dout, dlast)
        return Operands(drows, dgate, dfirst)
    if call.method == "all_gather":
        # Every rank returned the last memory, so its gradient is the sum of all ranks' gradients.
        dlast = vary_like(rows, lax.psum(dlast, call.axes))

    def left(dafter: Memory) -> Memory:
        return plan.memory_back(starts, rows, gate, dout, dafter)

    dafter, dfirst = _after_ranks(call, transfer, left, dlast)
    _, dgate, drows = plan.backward(starts, rows, gate, dout, dafter)
    # Every rank got the first memory, but only rank 0 uses it.
    is_first = lax.axis_index(call.axes) == 0
    dfirst = jax.tree.map(lambda x: jnp.where(is_first, x, 0), vary_like(rows, dfirst))
    return meet(call.axes, call.platform, Operands(drows, dgate, dfirst))


def _after_ranks(
    call: Call, transfer: Matrix | None, left: Callable[[Memory], Memory], dlast: Memory
) -> tuple[Memory, Memory]:
    """Returns the gradients of the memory after this rank's tokens, and of the first memory.

    ``left`` returns the gradient of the memory before this rank's tokens.
    """
    none = jax.tree.map(jnp.zeros_like, dlast)
    before = partial(states.before, call, back=True)
    if transfer is None:
        after, first = map(_parted, before(_joined(dlast), None, _joined(left(none))))
        return after, first
    # The gradient of z depends on that of M, as what a segment takes from M depends on z.
    after_m, first_m = before(dlast[0], states.turned(transfer), left(none)[0])
    after_z, first_z = (
        x[..., 0] for x in before(dlast[1][..., None], None, left((after_m, none[1]))[1][..., None])
    )
    return (after_m, after_z), (first_m, first_z)


def _joined(memory: Memory) -> State:
    """Returns M with z as one more column: the sum of values of 1."""
    m, z = memory
    return jnp.concatenate([m, z[..., None]], axis=3)


def _parted(state: State) -> Memory:
    return state[..., :-1], state[..., -1]


_attend.defvjp(_forward_rule, _backward_rule)
_results.defjvp(refuse_second)
_gradients.defjvp(refuse_second)
