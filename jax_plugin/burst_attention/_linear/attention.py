"""Linear attention over a sequence that is sharded across devices."""

from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32, Int32

from burst_attention import _checks, _mesh
from burst_attention._checkpoint import OUT_NAME, STATE_NAME
from burst_attention._derivatives import refuse_second
from burst_attention._linear import calls, checks, states
from burst_attention._linear.checks import Method
from burst_attention._linear.states import Logs, Place, State
from burst_attention._mesh import vary_like, vary_together
from burst_attention._types import Arrays, Axes, Layout

Results: TypeAlias = tuple[Float[Array, "batch seq heads v_dim"], State]


def linear_attention(
    query: Float[Array, "batch seq heads k_dim"],
    key: Float[Array, "batch seq kv_heads k_dim"],
    value: Float[Array, "batch seq kv_heads v_dim"],
    *,
    axis_name: str | Axes,
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

    There is neither a scale nor a normaliser. All sums are float32. Each rank sends one state,
    ``batch · heads · k_dim · v_dim`` floats, whatever the length (LASP: Sun et al., Linear
    Attention Sequence Parallelism). Reverse-mode derivatives with respect to all arrays; forward
    mode and second derivatives are errors.

    On NVIDIA GPUs weights and states enter their products in the inputs' 16-bit type, as in softmax
    attention. Kernels there compute with tiles of 64 tokens. Without ``segment_ids`` an input that
    is not finite spoils its whole tile there, whatever the decays are, and the state that the tile
    leaves.

    Args:
      query: ``[batch, seq, heads, k_dim]``, this device's part of the sequence: bfloat16, float16
        or, on CPU devices, float32; k_dim a multiple of 8 up to 256.
      key: ``[batch, seq, kv_heads, k_dim]``, of query's dtype; kv_heads divides heads, and query
        head h uses head h // (heads / kv_heads).
      value: ``[batch, seq, kv_heads, v_dim]``; v_dim a multiple of 8 up to 256, which may differ
        from k_dim.
      axis_name: mesh axis along which the sequence is sharded, or a pair (outer, inner): rank =
        outer · inner size + inner.
      decay: λ, float32 ``[heads]``; default 1. Values that are known while tracing must be in
        [0, 1]. Traced values are not checked: above 1 the state grows, below 0 and for NaN the
        head's results are NaN.
      log_decay: ln λ of each token and head, float32 ``[batch, seq, heads]``. A token with −∞ sees
        no token before itself: nothing passes it, forward or backward, not even infinities and NaN.
        Values are not checked. With a value above 0 the state grows at each such token, until
        float32 overflows. NaN makes the outputs of its token and of later tokens NaN. Excludes
        ``decay``.
      is_causal: whether tokens see only earlier tokens. With False every token sees the sum over
        all tokens, out_t = q_tᵀ (S_0 + Σ k vᵀ); decays and segment_ids are then refused.
      segment_ids: int32 ``[batch, seq]``. Where they change, the state begins at zero again, and a
        value of one document that is not finite or overflows changes no result of another document.
        Tokens with a negative id are padding: they leave nothing in the state, and their out is 0.
      initial_state: float32 ``[batch, heads, k_dim, v_dim]``, the same on every rank; default 0.
        With segment_ids it is the state that the first token's segment begins with.
      return_state: whether to also return the state after the last token of the whole sequence, on
        every rank. The sequence can be continued from it. With segment_ids it is the state of the
        last token's segment: zero if that is padding.
      method: how states travel. ``ring``: from rank to rank; ranks are serial in one small update.
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
    q, k, v = checks.arrays(query, key, value)
    method = _checks.choice("method", method, checks.METHODS)
    checks.layout(layout)
    with_state = _checks.flag("return_state", return_state)
    in_order = _checks.flag("is_causal", is_causal)
    if not in_order:
        checks.without_order(decay=decay, log_decay=log_decay, segment_ids=segment_ids)
    axes = _mesh.ring_axes(axis_name)
    mesh = _mesh.ring_mesh(axes, "linear_attention", checks.GLOBALLY)
    _mesh.all_axes_manual(mesh, "")
    platform = checks.platform(mesh, q.dtype)
    logs = checks.log_decays(decay, log_decay, q.shape[:3], "[batch, seq, heads]")
    ids = checks.segments(segment_ids, q.shape[:2])
    first = checks.state(initial_state, q, v)
    q, k, v, logs, ids, first = vary_together(axes, (q, k, v, logs, ids, first))
    size = _mesh.axes_size(mesh, axes)
    method = states.chosen(method, size, first)
    place = Place(axes, size, method, platform, has_documents=ids is not None)
    if q.size == 0:
        # Without a token there is nothing to compute, so no device needs another one.
        out, last = vary_like(q, jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype)), first
    elif not in_order:
        out, last = _without_order(axes, q, k, v, first)
    elif ids is None:
        out, last = _attend(place, (q, k, v, logs, first))
    else:
        # Values in padding, and in its gradients, stay there, even NaN.
        padding = (ids < 0)[:, :, None, None]
        logs = _with_resets(place, jnp.where(padding[..., 0], 0, logs), ids)
        q, k, v = (jnp.where(padding, 0, x) for x in (q, k, v))
        out, last = _attend(place, (q, k, v, logs, first))
        out = jnp.where(padding, 0, out)
    return (out, last) if with_state else out


def _with_resets(place: Place, logs: Logs, ids: Int32[Array, "batch seq"]) -> Logs:
    """Returns the log decays with a reset where a segment begins."""
    pairs = [(rank, rank + 1) for rank in range(place.world_size - 1)]
    last = lax.ppermute(ids[:, -1:], place.axes, pairs)
    # Rank 0 begins without a reset: the initial state belongs to its first segment.
    came = jnp.where(lax.axis_index(place.axes) == 0, ids[:, :1], last)
    begins = ids != jnp.concatenate([came, ids[:, :-1]], axis=1)
    return jnp.where(begins[:, :, None], -jnp.inf, logs)


def _without_order(
    axes: Axes,
    q: Float[Array, "batch seq heads k_dim"],
    k: Float[Array, "batch seq kv_heads k_dim"],
    v: Float[Array, "batch seq kv_heads v_dim"],
    first: State,
) -> Results:
    """Returns the product of each query with the sum over all tokens, and this sum."""
    heads, kv_heads = q.shape[2], k.shape[2]
    own = jnp.einsum(
        "bshk,bshv->bhkv", k, v, preferred_element_type=jnp.float32, precision="highest"
    )
    total = lax.psum(jnp.repeat(own, heads // kv_heads, axis=1), axes) + first
    out = jnp.einsum("bshk,bhkv->bshv", q.astype(jnp.float32), total, precision="highest")
    return out.astype(q.dtype), total


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(place: Place, operands: Arrays) -> Results:
    """Returns the outputs of this rank's tokens, and the state after the tokens of all ranks.

    ``operands`` are q, k, v, log decays and the state before all ranks' tokens.
    """
    return _forward_rule(place, operands)[0]


def _forward_rule(place: Place, operands: Arrays) -> tuple[Results, Arrays]:
    out, last, kept = _results(place, operands)
    # A rematerialised layer that keeps these results repeats nothing of the forward pass.
    out = checkpoint_name(out, OUT_NAME)
    last, kept = (checkpoint_name(x, STATE_NAME) for x in (last, kept))
    return (out, last), (*operands[:4], kept)


def _backward_rule(place: Place, residuals: Arrays, cotangents: Results) -> tuple[Arrays]:
    return (_gradients(place, residuals, cotangents),)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _results(place: Place, operands: Arrays) -> tuple[jax.Array, State, jax.Array]:
    """Returns outputs, the state after all ranks' tokens, and the states for the backward pass."""
    if place.world_size == 1:
        return calls.forward(place, operands, None)
    q, k, v, logs, first = operands
    left, again = calls.left(place, k, v, logs)
    start, last = vary_like(q, states.before(place, first, states.total(logs), left))
    out, _, kept = calls.forward(place, (q, k, v, logs, start), again)
    return out, last, kept


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gradients(place: Place, residuals: Arrays, cotangents: Results) -> Arrays:
    """Returns the gradients of the operands. Ranks follow each other from the last to the first."""
    if place.world_size == 1:
        return calls.backward(place, (*residuals, *cotangents), None)
    (q, _, _, logs, _), (dout, dlast) = residuals, cotangents
    # Every rank returned the last state, so its gradient is the sum of all ranks' gradients.
    dlast = vary_like(q, lax.psum(dlast, place.axes))
    left, again = calls.left(place, q, dout, logs, back=True)
    dafter, dfirst = vary_like(q, states.before(place, dlast, states.total(logs), left, back=True))
    *gradients, _ = calls.backward(place, (*residuals, dout, dafter), again)
    # Every rank got the first state, but only rank 0 uses it.
    is_first = lax.axis_index(place.axes) == 0
    return *gradients, jnp.where(is_first, dfirst, 0)


_attend.defvjp(_forward_rule, _backward_rule)
_results.defjvp(refuse_second)
_gradients.defjvp(refuse_second)


def linear_attention_step(
    query: Float[Array, "batch heads k_dim"],
    key: Float[Array, "batch kv_heads k_dim"],
    value: Float[Array, "batch kv_heads v_dim"],
    state: Float32[Array, "batch heads k_dim v_dim"],
    *,
    decay: Float32[Array, " heads"] | None = None,
    log_decay: Float32[Array, "batch heads"] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Linear attention of one more token: ``(out, state)``::

        S = λ S + k vᵀ;   out = qᵀ S

    Plain JAX, on any device, differentiable in every way. The first state comes from
    `linear_attention` with ``return_state=True``, or is zeros.

    Args:
      query: ``[batch, heads, k_dim]``.
      key: ``[batch, kv_heads, k_dim]``.
      value: ``[batch, kv_heads, v_dim]``.
      state: float32 ``[batch, heads, k_dim, v_dim]``.
      decay: λ, float32 ``[heads]``; default 1, checked as in `linear_attention`.
      log_decay: ln λ of this token, float32 ``[batch, heads]``; −∞ leaves nothing of ``state``, not
        even NaN. Excludes ``decay``.

    Returns:
      ``out``, ``[batch, heads, v_dim]`` in query's dtype, and the new state.

    Raises:
      ValueError, TypeError: while tracing, with the way out.
    """
    token = [x[:, None] if hasattr(x, "ndim") else x for x in (query, key, value)]
    q, k, v = checks.arrays(*token)
    shape = (q.shape[0], q.shape[2])
    logs = checks.log_decays(decay, log_decay, shape, "[batch, heads]")
    state = checks.state(state, q, v)
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x[:, 0].astype(jnp.float32), group, axis=1) for x in (k, v))
    # A reset lets nothing pass, also in derivatives, not even NaN.
    passes = ~jnp.isneginf(logs)
    decays, before = jnp.where(passes, logs, 0), jnp.where(passes[..., None, None], state, 0)
    faded = jnp.where(passes[..., None, None], jnp.exp(decays)[..., None, None] * before, 0)
    state = faded + k[..., :, None] * v[..., None, :]
    out = jnp.einsum("bhk,bhkv->bhv", q[:, 0].astype(jnp.float32), state, precision="highest")
    return out.astype(q.dtype), state
