"""Linear attention of one device's tokens in a whole, sharded sequence."""

from functools import partial
from math import gcd
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int32

from burst_attention import _mesh
from burst_attention._batching import over_batch, spread
from burst_attention._checkpoint import OUT_NAME, STATE_NAME
from burst_attention._derivatives import refuse_second
from burst_attention._linear import calls, checks, states
from burst_attention._linear.checks import Inputs, Settings
from burst_attention._linear.states import Call, Logs, State
from burst_attention._mesh import vary_like, vary_together
from burst_attention._types import Arrays, Axes

Results: TypeAlias = tuple[Float[Array, "batch seq heads v_dim"], State | None]
Pair: TypeAlias = tuple[Float[Array, "batch seq heads v_dim"], State]


def attend(axes: Axes, settings: Settings, inputs: Inputs) -> Results:
    """Returns the outputs of this device's tokens, and the state after all tokens if asked for.

    All arguments are checked. A ``replicated`` state is typed as the same on all ranks.
    """
    mesh = _mesh.ring_mesh(axes, "linear_attention")
    globally = ", or call linear_attention outside of it, on global arrays"
    _mesh.all_axes_manual(mesh, *inputs[:3], globally=globally)
    q, _, v, decay, log_decay, _, first = inputs
    logs = checks.logs_of(decay, log_decay, (*q.shape[:2], checks.heads_of(q, v)))
    first = checks.state("initial_state", first, q, v)
    arrays = (*inputs[:3], logs, inputs.segment_ids, first)
    q, k, v, logs, ids, first = spread(vary_together(axes, arrays))
    size, platform = _mesh.axes_size(mesh, axes), checks.platform(mesh, q.dtype)
    method = states.chosen(settings.method, size, first)
    call = Call(axes, size, method, platform, ids is not None, settings.scale)
    if q.size == 0:
        # Without a token there is nothing to compute, so no device needs another one.
        out, last = vary_like(q, jnp.zeros((*logs.shape, v.shape[3]), q.dtype)), first
    elif not settings.is_causal:
        out, last = _without_order(call, q, k, v, first)
    elif ids is None:
        out, last = _attend(call, (q, k, v, logs, first))
    else:
        # Values in padding, and in its gradients, stay there, even NaN.
        padding = (ids < 0)[:, :, None, None]
        logs = _with_resets(call, jnp.where(padding[..., 0], 0, logs), ids)
        q, k, v = (jnp.where(padding, 0, x) for x in (q, k, v))
        out, last = _attend(call, (q, k, v, logs, first))
        out = jnp.where(padding, 0, out)
    if settings.return_state == "replicated":
        return out, _of_last_rank(call, last)
    if settings.return_state and method == "ring":
        last = vary_like(q, _of_last_rank(call, last))
    return out, last if settings.return_state else None


def _of_last_rank(call: Call, state: State) -> State:
    """Returns the last rank's state on all ranks; JAX types a sum over ranks as the same on all."""
    is_last = lax.axis_index(call.axes) == call.world_size - 1
    return lax.psum(jnp.where(is_last, state, 0), call.axes)


def _with_resets(call: Call, logs: Logs, ids: Int32[Array, "batch seq"]) -> Logs:
    """Returns the log decays with a reset where a segment begins."""
    pairs = [(rank, rank + 1) for rank in range(call.world_size - 1)]
    last = lax.ppermute(ids[:, -1:], call.axes, pairs)
    # Rank 0 begins without a reset: the initial state belongs to its first segment.
    came = jnp.where(lax.axis_index(call.axes) == 0, ids[:, :1], last)
    begins = ids != jnp.concatenate([came, ids[:, :-1]], axis=1)
    return jnp.where(begins[:, :, None], -jnp.inf, logs)


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
def _attend(call: Call, operands: Arrays) -> Pair:
    """Returns the outputs of this rank's tokens, and the state after the tokens of all ranks.

    ``operands`` are q, k, v, log decays and the state before all ranks' tokens. With the method
    ``ring`` only the last rank has the state after all tokens.
    """
    return _forward_rule(call, operands)[0]


def _forward_rule(call: Call, operands: Arrays) -> tuple[Pair, Arrays]:
    out, last, kept = _results(call, operands)
    # A rematerialised layer that keeps these results repeats nothing of the forward pass.
    out = checkpoint_name(out, OUT_NAME)
    last, kept = (checkpoint_name(x, STATE_NAME) for x in (last, kept))
    return (out, last), (*operands[:4], kept)


def _backward_rule(call: Call, residuals: Arrays, cotangents: Pair) -> tuple[Arrays]:
    return (_gradients(call, residuals, cotangents),)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _results(call: Call, operands: Arrays) -> tuple[jax.Array, State, jax.Array]:
    """Returns outputs, the state after all ranks' tokens, and the states for the backward pass."""
    return over_batch(partial(_forward, call), *operands)


def _forward(call: Call, *operands: jax.Array) -> tuple[jax.Array, State, jax.Array]:
    """Computes `_results`."""
    if call.world_size == 1:
        return calls.forward(call, operands, None)
    q, k, v, logs, first = operands
    left, again = calls.left(call, k, v, logs)
    start, last = vary_like(q, states.before(call, first, states.total(logs), left))
    out, _, kept = calls.forward(call, (q, k, v, logs, start), again)
    return out, last, kept


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gradients(call: Call, residuals: Arrays, cotangents: Pair) -> Arrays:
    """Returns the gradients of the operands. Ranks follow each other from the last to the first."""
    return over_batch(partial(_backward, call), residuals, cotangents)


def _backward(call: Call, residuals: Arrays, cotangents: Pair) -> Arrays:
    """Computes `_gradients`."""
    if call.world_size == 1:
        return calls.backward(call, (*residuals, *cotangents), None)
    (q, _, _, logs, _), (dout, dlast) = residuals, cotangents
    if call.method == "all_gather":
        # Every rank returned the last state, so its gradient is the sum of all ranks' gradients.
        dlast = vary_like(q, lax.psum(dlast, call.axes))
    left, again = calls.left(call, q, dout, logs, back=True)
    dafter, dfirst = vary_like(q, states.before(call, dlast, states.total(logs), left, back=True))
    *gradients, _ = calls.backward(call, (*residuals, dout, dafter), again)
    # Every rank got the first state, but only rank 0 uses it.
    is_first = lax.axis_index(call.axes) == 0
    return *gradients, jnp.where(is_first, dfirst, 0)


_attend.defvjp(_forward_rule, _backward_rule)
_results.defjvp(refuse_second)
_gradients.defjvp(refuse_second)
