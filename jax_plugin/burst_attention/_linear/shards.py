"""Recurrences of one device's tokens in a whole, sharded sequence."""

from functools import partial
from math import gcd
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped

from burst_attention import _mesh
from burst_attention._batching import over_batch, spread
from burst_attention._checkpoint import OUT_NAME, STATE_NAME
from burst_attention._confirmed import Family
from burst_attention._derivatives import refuse_second, without_transpose
from burst_attention._linear import calls, checks, states, turns
from burst_attention._linear.checks import Inputs, Settings
from burst_attention._linear.meeting import meet
from burst_attention._linear.states import Call, Logs, Matrix, Operands, State, Transfer
from burst_attention._mesh import vary_like, vary_together
from burst_attention._types import Axes

Results: TypeAlias = tuple[Float[Array, "batch seq heads v_dim"], State | None]
Pair: TypeAlias = tuple[Float[Array, "batch seq heads v_dim"], State]
Again: TypeAlias = tuple[jax.Array, Transfer | None]
"""States of the forward pass, and what this rank's tokens do to a state, for the backward pass."""
Kept: TypeAlias = tuple[Operands, Transfer | None]
"""The operands, with the states of `Again` in place of the first state, and its transfer."""


WIDEST = 128
"""The most columns of keys and values for which GPUs have kernels with decays of channels."""


def attend(axes: Axes, settings: Settings, inputs: Inputs) -> Results:
    """Returns the outputs of this device's tokens, and the state after all tokens if asked for.

    All arguments are checked. A ``replicated`` state is typed as the same on all ranks.
    """
    mesh = _mesh.ring_mesh(axes, settings.caller)
    globally = f", or call {settings.caller} outside of it, on global arrays"
    _mesh.all_axes_manual(mesh, *inputs[:3], globally=globally)
    call, given, ids = _prepared(axes, mesh, settings, inputs)
    q, k, v, logs, first, beta = given
    if q.size == 0:
        # Without a token there is nothing to compute, so no device needs another one.
        shape = (*logs.shape[:3], v.shape[3])
        out, last = vary_like(q, jnp.zeros(shape, q.dtype)), first
    elif not settings.is_causal:
        out, last = _without_order(call, q, k, v, first)
    elif ids is None:
        out, last = without_transpose(_attend(call, given))
    else:
        # Values in padding, and in its gradients, stay there, even NaN.
        padding = (ids < 0)[:, :, None]
        logs = _with_resets(call, _without(padding, logs), ids)
        q, k, v = (_without(padding, x) for x in (q, k, v))
        beta = None if beta is None else _without(padding, beta)
        operands = Operands(q, k, v, logs, first, beta)
        out, last = without_transpose(_attend(call, operands))
        out = _without(padding, out)
    if settings.return_state == "replicated":
        return out, of_last_rank(call, last)
    if settings.return_state and call.method != "all_gather":
        last = vary_like(q, of_last_rank(call, last))
    return out, last if settings.return_state else None


def _prepared(
    axes: Axes, mesh: jax.sharding.AbstractMesh, settings: Settings, inputs: Inputs
) -> tuple[Call, Operands, Int32[Array, "batch seq"] | None]:
    """Returns what is static about a call, its operands and its segment ids."""
    q, _, v, decay, log_decay, beta, ids, first = inputs
    logs = checks.logs_of(decay, log_decay, (*q.shape[:2], checks.heads_of(q, v)))
    first = checks.state("initial_state", first, q, v)
    operands = Operands(*inputs[:3], logs, first, beta)
    operands, ids = spread(vary_together(axes, (operands, ids)))
    family: Family = "linear_attention" if beta is None else "delta_rule"
    size, platform = _mesh.axes_size(mesh, axes), checks.platform(mesh, q.dtype, family)
    travelling = first.size * (1 if beta is None else 1 + q.shape[3] / v.shape[3])
    method = settings.method
    if method == "auto" and turns.share_cores(platform, logs.shape[0] * logs.shape[2]):
        method = "in_turn"
    method = states.chosen(method, size, round(travelling))
    has_kernels = logs.ndim == 3 or max(*q.shape[3:], *v.shape[3:]) <= WIDEST
    has_documents, scale = ids is not None, settings.scale
    call = Call(axes, size, method, platform, has_kernels, has_documents, scale, family)
    return call, operands, ids


def _without(
    padding: Bool[Array, "batch seq 1"], x: Shaped[Array, "batch seq ..."]
) -> Shaped[Array, "batch seq ..."]:
    """Returns ``x`` with 0 in padding."""
    return jnp.where(jnp.expand_dims(padding, range(3, x.ndim)), 0, x)


def of_last_rank(call: Call, state: Float32[Array, "*state"]) -> Float32[Array, "*state"]:
    """Returns the last rank's state on all ranks; JAX types a sum over ranks as the same on all."""
    is_last = lax.axis_index(call.axes) == lax.axis_size(call.axes) - 1
    return lax.psum(jnp.where(is_last, state, 0), call.axes)


def _with_resets(call: Call, logs: Logs, ids: Int32[Array, "batch seq"]) -> Logs:
    """Returns the log decays with a reset where a segment begins."""
    pairs = [(rank, rank + 1) for rank in range(call.world_size - 1)]
    last = _mesh.permute(ids[:, -1:], call.axes, pairs)
    # Rank 0 begins without a reset: the initial state belongs to its first segment.
    came = jnp.where(lax.axis_index(call.axes) == 0, ids[:, :1], last)
    begins = ids != jnp.concatenate([came, ids[:, :-1]], axis=1)
    return jnp.where(jnp.expand_dims(begins, range(2, logs.ndim)), -jnp.inf, logs)


def _without_order(
    call: Call,
    q: Float[Array, "batch seq q_heads k_dim"],
    k: Float[Array, "batch seq k_heads k_dim"],
    v: Float[Array, "batch seq v_heads v_dim"],
    first: State,
) -> Pair:
    """Returns the product of each query with the sum over all tokens, and this sum."""
    (batch, seq, q_heads, _), heads = q.shape, first.shape[1]
    # Groups of heads share no head of k or v. No head is repeated.
    groups = gcd(k.shape[2], v.shape[2])
    grouped_k, grouped_v = (x.reshape(batch, seq, groups, -1, x.shape[3]) for x in (k, v))
    own = jnp.einsum(
        "bsgik,bsgjv->bgijkv",
        grouped_k,
        grouped_v,
        preferred_element_type=jnp.float32,
        precision="highest",
    )
    head = np.arange(heads // groups)
    of_k, of_v = (head * own.shape[axis] * groups // heads for axis in (2, 3))
    total = lax.psum(own, call.axes)[:, :, of_k, of_v].reshape(first.shape) + first
    queries = q.astype(jnp.float32) * call.scale
    by_query = total.reshape(batch, q_heads, -1, *first.shape[2:])
    out = jnp.einsum("bshk,bhgkv->bshgv", queries, by_query, precision="highest")
    return out.reshape(batch, seq, heads, -1).astype(q.dtype), total


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: Call, operands: Operands) -> Pair:
    """Returns the outputs of this rank's tokens, and the state after the tokens of all ranks.

    Only with the method ``all_gather`` every rank has the state after all tokens, and else the last
    one.
    """
    return _forward_rule(call, operands)[0]


def _forward_rule(call: Call, operands: Operands) -> tuple[Pair, Kept]:
    out, last, kept = _results(call, operands)
    # A rematerialised layer that keeps these results repeats nothing of the forward pass.
    out = checkpoint_name(out, OUT_NAME)
    last, (states, transfer) = jax.tree.map(lambda x: checkpoint_name(x, STATE_NAME), (last, kept))
    return (out, last), (operands._replace(first=states), transfer)


def _backward_rule(call: Call, residuals: Kept, cotangents: Pair) -> tuple[Operands]:
    return (_gradients(call, residuals, cotangents),)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _results(call: Call, operands: Operands) -> tuple[jax.Array, State, Again]:
    """Returns outputs, the state after all ranks' tokens, and what the backward pass needs."""
    return over_batch(partial(_forward, call), operands)


def _forward(call: Call, operands: Operands) -> tuple[jax.Array, State, Again]:
    """Computes `_results`."""
    if call.world_size == 1:
        out, last, kept = calls.forward(call, operands, None)
        return out, last, (kept, None)
    q, k, v, logs, first, beta = operands
    if call.method == "in_turn":

        def results(first: State) -> tuple[jax.Array, State, jax.Array]:
            return calls.forward(call, operands._replace(first=first), None)

        first = _with_workers(call, operands, first)
        out, last, kept = turns.in_turn(call, first, results, lambda results: results[1])
        out, last = meet(call.axes, call.platform, (out, last))
        return out, last, (kept, None)
    transfer, left, again = calls.left(call, k, v, logs, beta)
    start, last = vary_like(q, states.before(call, first, transfer, left))
    out, _, kept = calls.forward(call, operands._replace(first=start), again)
    out, last = meet(call.axes, call.platform, (out, last))
    # The transfer of decays is a sum, so it is not kept.
    return out, last, (kept, transfer if isinstance(transfer, Matrix) else None)


def _with_workers(call: Call, operands: Operands, state: State) -> State:
    """Returns ``state``, once this rank has the library's compute workers.

    The library starts them in the first call of a process. If it can't, a rank that fails in its
    turn would leave the others waiting. So each rank asks for what no tokens leave, which is 0.
    """
    if call.platform != "cpu":
        return state
    _, k, v, logs, _, beta = operands
    nothing = calls.left(
        call, k[:, :0], v[:, :0], logs[:, :0], None if beta is None else beta[:, :0]
    )
    return state + nothing[1]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gradients(call: Call, residuals: Kept, cotangents: Pair) -> Operands:
    """Returns the gradients of the operands. Ranks follow each other from the last to the first."""
    return over_batch(partial(_backward, call), residuals, cotangents)


def _backward(call: Call, residuals: Kept, cotangents: Pair) -> Operands:
    """Computes `_gradients`."""
    (operands, transfer), (dout, dlast) = residuals, cotangents
    if call.world_size == 1:
        return calls.backward(call, operands, dout, dlast, None)
    if call.method == "all_gather":
        # Every rank returned the last state, so its gradient is the sum of all ranks' gradients.
        dlast = vary_like(operands.q, lax.psum(dlast, call.axes))
    if call.method == "in_turn":

        def results(dafter: State) -> Operands:
            return calls.backward(call, operands, dout, dafter, None)

        dlast = _with_workers(call, operands, dlast)
        gradients = turns.in_turn(call, dlast, results, lambda own: own.first, back=True)
        dfirst = gradients.first
    else:
        left, again = calls.grad_left(call, operands, dout)
        back = states.turned(states.total(operands.logs) if transfer is None else transfer)
        dafter, dfirst = vary_like(operands.q, states.before(call, dlast, back, left, back=True))
        gradients = calls.backward(call, operands, dout, dafter, again)
    gradients = meet(call.axes, call.platform, gradients._replace(first=dfirst))
    # Every rank got the first state, but only rank 0 uses it.
    is_first = lax.axis_index(call.axes) == 0
    return gradients._replace(first=jnp.where(is_first, gradients.first, 0))


_attend.defvjp(_forward_rule, _backward_rule)
_results.defjvp(refuse_second)
_gradients.defjvp(refuse_second)
