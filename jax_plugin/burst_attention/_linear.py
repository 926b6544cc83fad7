# ruff: noqa: F722  (shapes in annotations are not Python)
"""Linear attention over a sequence that is sharded across devices."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from burst_attention import _checks, _derivatives, _linear_calls, _linear_checks, _states
from burst_attention._checkpoint import OUT_NAME, STATE_NAME
from burst_attention._ring import vary, vary_together
from burst_attention._types import Layout, Method

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int32


class Place(NamedTuple):
    """What is static about a call."""

    exchange: _states.Exchange
    device: _linear_calls.Device


def linear_attention(
    query: Float[Array, "batch seq heads k_dim"],
    key: Float[Array, "batch seq kv_heads k_dim"],
    value: Float[Array, "batch seq kv_heads v_dim"],
    *,
    axis_name: str | tuple[str, ...],
    decay: Float32[Array, " heads"] | None = None,
    log_decay: Float32[Array, "batch seq heads"] | None = None,
    is_causal: bool = True,
    segment_ids: Int32[Array, "batch seq"] | None = None,
    initial_state: Float32[Array, "batch heads k_dim v_dim"] | None = None,
    return_state: bool = False,
    method: Method = "auto",
    layout: Layout = "contiguous",
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Linear attention of this device's tokens in a whole, sharded sequence.

    With S_0 = ``initial_state`` and λ the decay of a head, or of each of its tokens::

        S_t = λ_t S_(t−1) + k_t v_tᵀ;   out_t = q_tᵀ S_t

    There is neither a scale nor a normaliser. All sums are float32. What ranks exchange is one
    state each, ``batch · heads · k_dim · v_dim`` floats, whatever the length (LASP: Sun et al.,
    Linear Attention Sequence Parallelism). Reverse-mode derivatives with respect to all arrays;
    forward mode and second derivatives are errors. On NVIDIA GPUs weights and states enter their
    products in the inputs' 16-bit type, as in softmax attention. Kernels there compute with tiles
    of 64 tokens. Without ``segment_ids`` an input that is not finite spoils its whole tile there,
    whatever the decays are, and what the tile leaves in the state.

    Args:
      query: ``[batch, seq, heads, k_dim]``, this device's part of the sequence: bfloat16, float16
        or, on CPU devices, float32; k_dim a multiple of 8 up to 256.
      key: ``[batch, seq, kv_heads, k_dim]``, same dtype; kv_heads divides heads, and query head h
        uses head h // (heads / kv_heads).
      value: ``[batch, seq, kv_heads, v_dim]``; v_dim like k_dim, but may be another.
      axis_name: mesh axis along which the sequence is sharded, or a pair (outer, inner): rank =
        outer · inner size + inner.
      decay: λ, float32 ``[heads]``; default 1. Values that are known while tracing must be in
        [0, 1]. Traced values are not checked: above 1 the state grows, below 0 and for NaN the
        head's results are NaN.
      log_decay: ln λ of each token and head, float32 ``[batch, seq, heads]``. −∞ is for a token
        that shall see none before itself: nothing passes it, forward or backward, not even
        infinities and NaN. Values are not checked: above 0 the state grows with each such token,
        until float32 overflows; NaN makes the outputs of its token and of later ones NaN. Either
        this or ``decay``.
      is_causal: False: every token sees the sum over all tokens, out_t = q_tᵀ (S_0 + Σ k vᵀ);
        then decays and segment_ids are refused.
      segment_ids: int32 ``[batch, seq]``; where they change, the state begins at zero again, and
        what is not finite or overflows in one document changes no result of another. Tokens with a
        negative id are padding: they leave nothing in the state, and their out is 0.
      initial_state: float32 ``[batch, heads, k_dim, v_dim]``, the same on every rank; default 0.
        With segment_ids it is what the first token's segment begins with.
      return_state: also return the state after the last token of the whole sequence, on every rank,
        from which the sequence can be continued. With segment_ids it is that of the last token's
        segment: zero if that is padding.
      method: how states travel. ``ring``: from rank to rank, ranks are serial in one small update.
        ``all_gather``: all in one exchange. ``auto``: ``all_gather`` where all ranks' states take
        up no more than 256 MiB, else ``ring``.
      layout: must be ``contiguous``: a state is passed on in the order of the sequence, and every
        rank has equal work.

    Returns:
      ``out``, ``[batch, seq, heads, v_dim]`` in query's dtype; with ``return_state=True``
      ``(out, state)``, the state float32.

    Raises:
      ValueError, TypeError, NotImplementedError: while tracing, with the way out.
    """
    arguments = dict(locals())
    q, k, v = _linear_checks.arrays(query, key, value)
    _linear_checks.options(arguments)
    axes = _checks.ring_axes(axis_name)
    mesh = _checks.ring_mesh(axes, "linear_attention", _linear_checks.GLOBALLY)
    _checks.all_axes_manual(mesh, "")
    platform = _checks.devices(mesh, q.dtype)
    logs = _linear_checks.log_decays(decay, log_decay, q.shape[:3], "[batch, seq, heads]")
    ids = _linear_checks.segments(segment_ids, q)
    first = _linear_checks.state(initial_state, q, v)
    varying, inputs = vary_together(axes, (q, k, v, logs, ids, first))
    q, k, v, logs, ids, first = inputs
    size = math.prod(mesh.shape[name] for name in axes)
    shape = jax.ShapeDtypeStruct(first.shape, first.dtype)
    exchange = _states.Exchange(axes, size, _states.chosen(method, size, shape))
    place = Place(exchange, _linear_calls.Device(platform, varying, ids is not None))
    if q.size == 0:
        # No token: nothing to compute, so no device needs another.
        out, last = jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype), first
        out = vary(out, varying)
    elif not is_causal:
        out, last = _of_all(axes, q, k, v, first)
    elif ids is None:
        out, last = _attend(place, q, k, v, logs, first)
    else:
        # Whatever is in padding, and in its gradients, stays there, be it NaN.
        padding = (ids < 0)[:, :, None, None]
        logs = _separate(axes, size, jnp.where(padding[..., 0], 0, logs), ids)
        q, k, v = (jnp.where(padding, 0, x) for x in (q, k, v))
        out, last = _attend(place, q, k, v, logs, first)
        out = jnp.where(padding, 0, out)
    return (out, last) if return_state else out


def _separate(axes: tuple[str, ...], size: int, logs: jax.Array, ids: jax.Array) -> jax.Array:
    """The log decays with a reset where a segment begins."""
    last = lax.ppermute(ids[:, -1:], axes, [(rank, rank + 1) for rank in range(size - 1)])
    # Rank 0 begins with what it has: the initial state belongs to its first segment.
    came = jnp.where(lax.axis_index(axes) == 0, ids[:, :1], last)
    begins = ids != jnp.concatenate([came, ids[:, :-1]], axis=1)
    return jnp.where(begins[:, :, None], -jnp.inf, logs)


def _of_all(
    axes: tuple[str, ...], q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Without order: the sum over all tokens, then a product with each query."""
    heads, kv_heads = q.shape[2], k.shape[2]
    own = jnp.einsum(
        "bshk,bshv->bhkv", k, v, preferred_element_type=jnp.float32, precision="highest"
    )
    total = lax.psum(jnp.repeat(own, heads // kv_heads, axis=1), axes) + first
    out = jnp.einsum("bshk,bhkv->bshv", q.astype(jnp.float32), total, precision="highest")
    return out.astype(q.dtype), total


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    place: Place, q: jax.Array, k: jax.Array, v: jax.Array, logs: jax.Array, first: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Outputs of this rank's tokens, and the state after those of all ranks."""
    return _forward_rule(place, q, k, v, logs, first)[0]


def _forward_rule(
    place: Place, q: jax.Array, k: jax.Array, v: jax.Array, logs: jax.Array, first: jax.Array
) -> Any:
    out, last, states = _results(place, q, k, v, logs, first)
    # A rematerialised layer that keeps these needs nothing of the forward pass again.
    out = checkpoint_name(out, OUT_NAME)
    last, states = (checkpoint_name(x, STATE_NAME) for x in (last, states))
    return (out, last), (q, k, v, logs, states)


def _backward_rule(place: Place, residuals: Any, cotangents: Any) -> Any:
    return _gradients(place, *residuals, *cotangents)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _results(
    place: Place, q: jax.Array, k: jax.Array, v: jax.Array, logs: jax.Array, first: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Outputs, the state after all ranks' tokens, and what the backward pass takes for states."""
    exchange, device = place
    if exchange.world_size == 1:
        return _linear_calls.forward(device, (q, k, v, logs, first), None)
    left, kept = _linear_calls.left(device, k, v, logs)
    start, last = _states.before(exchange, first, _states.total(logs), left)
    operands = (q, k, v, logs, vary(start, device.varying))
    out, _, states = _linear_calls.forward(device, operands, kept)
    return out, vary(last, device.varying), states


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gradients(
    place: Place,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    logs: jax.Array,
    states: jax.Array,
    dout: jax.Array,
    dlast: jax.Array,
) -> tuple[jax.Array, ...]:
    """Those of q, k, v, logs and first: ranks follow each other from the last to the first."""
    exchange, device = place
    if exchange.world_size == 1:
        operands = (q, k, v, logs, states, dout, dlast)
        return _linear_calls.backward(device, operands, None)
    # Every rank returned the last state: its gradient is the sum of theirs.
    dlast = vary(lax.psum(dlast, exchange.axes), device.varying)
    left, kept = _linear_calls.left(device, q, dout, logs, back=True)
    dafter, dfirst = _states.before(exchange, dlast, _states.total(logs), left, back=True)
    operands = (q, k, v, logs, states, dout, vary(dafter, device.varying))
    dq, dk, dv, dlogs, _ = _linear_calls.backward(device, operands, kept)
    # Every rank got the first state, but it is used once.
    is_first = lax.axis_index(exchange.axes) == 0
    return dq, dk, dv, dlogs, jnp.where(is_first, vary(dfirst, device.varying), 0)


_attend.defvjp(_forward_rule, _backward_rule)
_results.defjvp(_derivatives.second)
_gradients.defjvp(_derivatives.second)


def linear_attention_step(
    query: Float[Array, "batch heads k_dim"],
    key: Float[Array, "batch kv_heads k_dim"],
    value: Float[Array, "batch kv_heads v_dim"],
    state: Float32[Array, "batch heads k_dim v_dim"],
    *,
    decay: Float32[Array, " heads"] | None = None,
    log_decay: Float32[Array, "batch heads"] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One more token: ``(out, state)``::

        S = λ S + k vᵀ;   out = qᵀ S

    Plain JAX, on any device, differentiable in every way. The state is that of `linear_attention`
    with ``return_state=True``, or zeros.

    Args:
      query: ``[batch, heads, k_dim]``.
      key: ``[batch, kv_heads, k_dim]``.
      value: ``[batch, kv_heads, v_dim]``.
      state: float32 ``[batch, heads, k_dim, v_dim]``.
      decay: λ, float32 ``[heads]``; default 1, checked as in `linear_attention`.
      log_decay: ln λ of this token, float32 ``[batch, heads]``; −∞ leaves nothing of ``state``, not
        even NaN. Either this or ``decay``.

    Returns:
      ``out``, ``[batch, heads, v_dim]`` in query's dtype, and the new state.

    Raises:
      ValueError, TypeError: while tracing, with the way out.
    """
    token = [x[:, None] if hasattr(x, "ndim") else x for x in (query, key, value)]
    q, k, v = _linear_checks.arrays(*token)
    shape = (q.shape[0], q.shape[2])
    logs = _linear_checks.log_decays(decay, log_decay, shape, "[batch, heads]")
    state = _linear_checks.state(state, q, v)
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x[:, 0].astype(jnp.float32), group, axis=1) for x in (k, v))
    # A reset lets nothing pass, in its derivatives neither, be it NaN.
    passes = ~jnp.isneginf(logs)
    decays, states = jnp.where(passes, logs, 0), jnp.where(passes[..., None, None], state, 0)
    kept = jnp.where(passes[..., None, None], jnp.exp(decays)[..., None, None] * states, 0)
    state = kept + k[..., :, None] * v[..., None, :]
    out = jnp.einsum("bhk,bhkv->bhv", q[:, 0].astype(jnp.float32), state, precision="highest")
    return out.astype(q.dtype), state
