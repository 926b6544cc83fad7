"""The derivative of a ring: one custom call forward, one backward."""

from __future__ import annotations

from functools import partial
from typing import NoReturn, TypeAlias

import jax
from jax.ad_checkpoint import checkpoint_name

from burst_attention import _calls, _sinks
from burst_attention._checkpoint import LSE_NAME, OUT_NAME
from burst_attention._ring import Ring

Gradients: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]
Sinks: TypeAlias = jax.Array | None
Residuals: TypeAlias = tuple[jax.Array, jax.Array, jax.Array, Sinks, jax.Array, jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring_attention(
    ring: Ring, q: jax.Array, k: jax.Array, v: jax.Array, sinks: Sinks = None
) -> tuple[jax.Array, jax.Array]:
    """Output and lse of one rank. All inputs vary over ``ring.varying``."""
    o, lse = _joined(ring, q, k, v, sinks)
    return o.astype(q.dtype), lse


def _forward_rule(
    ring: Ring, q: jax.Array, k: jax.Array, v: jax.Array, sinks: Sinks
) -> tuple[tuple[jax.Array, jax.Array], Residuals]:
    o, lse = _joined(ring, q, k, v, sinks)
    # Named here, not by the caller: a policy can only keep what the residuals are made of.
    o, lse = checkpoint_name(o, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    return (o.astype(q.dtype), lse), (q, k, v, sinks, o, lse)


def _backward_rule(
    ring: Ring, residuals: Residuals, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array, Sinks]:
    q, k, v, sinks, o, lse = residuals
    # Final results on both sides: differentiating the sinks' factor instead would round dout times
    # it to 16 bits once more, and make the errors of dq, dk and dv 1.4 times those of rounding.
    dq, dk, dv = _gradients(ring, q, k, v, o, lse, *cotangents)
    return dq, dk, dv, None if sinks is None else _sinks.gradient(sinks, o, lse, *cotangents)


def _joined(
    ring: Ring, q: jax.Array, k: jax.Array, v: jax.Array, sinks: Sinks
) -> tuple[jax.Array, jax.Array]:
    """o, in the dtype that is kept, and lse, with the sinks among what a row sees."""
    o, lse = _results(ring, q, k, v)
    if sinks is not None:
        o, lse = _sinks.join(o, lse, sinks)
    return o.astype(_calls.kept_dtype(ring, q)), lse


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _results(ring: Ring, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    """o and lse of one rank from q, k, v, over the keys of all ranks, −inf where masked::

    s = softmax_scale · q kᵀ;   lse = ln Σ e^s;   o = e^(s − lse) v
    """
    o, lse = _calls.forward(ring, *operands)
    return o, lse


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gradients(ring: Ring, *operands: jax.Array) -> Gradients:
    """dq, dk, dv of one rank from q, k, v, o, lse, dout, dlse::

    delta = rowsum(dout ∘ o) − dlse;   p = e^(s − lse);   ds = p ∘ (dout vᵀ − delta)
    dv = pᵀ dout;   dk = softmax_scale · dsᵀ q;   dq = softmax_scale · ds k
    """
    dq, dk, dv = _calls.backward(ring, *operands)
    return dq, dk, dv


def _second_derivative(ring: Ring, primals: object, tangents: object) -> NoReturn:
    raise NotImplementedError(
        "second derivatives of burst_attention are not implemented: its gradient is a custom call. "
        "For Hessian-vector products use a dense attention such as jax.nn.dot_product_attention"
    )


ring_attention.defvjp(_forward_rule, _backward_rule)
# Who differentiates the rules themselves wants a second derivative.
_results.defjvp(_second_derivative)
_gradients.defjvp(_second_derivative)
