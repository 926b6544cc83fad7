"""The derivative of a ring: one custom call forward, one backward."""

from __future__ import annotations

from functools import partial
from typing import TypeAlias

import jax
from jax.ad_checkpoint import checkpoint_name

from burst_attention import _calls, _derivatives, _sinks
from burst_attention._checkpoint import LSE_NAME, OUT_NAME
from burst_attention._extras import Extras
from burst_attention._ring import Ring

Results: TypeAlias = tuple[jax.Array, jax.Array]
Sinks: TypeAlias = jax.Array | None
Qkv: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]
Residuals: TypeAlias = tuple[Qkv, Sinks, Extras, jax.Array, jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring_attention(ring: Ring, qkv: Qkv, sinks: Sinks, extras: Extras) -> Results:
    """Output and lse of one rank. All inputs vary over ``ring.varying``."""
    o, lse = _joined(ring, qkv, sinks, extras)
    return o.astype(qkv[0].dtype), lse


def _forward_rule(ring: Ring, qkv: Qkv, sinks: Sinks, extras: Extras) -> tuple[Results, Residuals]:
    o, lse = _joined(ring, qkv, sinks, extras)
    # Named here, not by the caller: a policy can only keep what the residuals are made of.
    o, lse = checkpoint_name(o, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    return (o.astype(qkv[0].dtype), lse), (qkv, sinks, extras, o, lse)


def _backward_rule(
    ring: Ring, residuals: Residuals, cotangents: Results
) -> tuple[Qkv, Sinks, Extras]:
    qkv, sinks, extras, o, lse = residuals
    # Final results on both sides: differentiating the sinks' factor instead would round dout times
    # it to 16 bits once more, and make the errors of dq, dk and dv 1.4 times those of rounding.
    dq, dk, dv, *dslopes = _gradients(ring, qkv, extras, (o, lse, *cotangents))
    dz = None if sinks is None else _sinks.gradient(sinks, o, lse, *cotangents)
    # Nothing else of the extras is differentiable.
    return (dq, dk, dv), dz, Extras(slopes=dslopes[0] if dslopes else None)


def _joined(ring: Ring, qkv: Qkv, sinks: Sinks, extras: Extras) -> Results:
    """o, in the dtype that is kept, and lse, with the sinks among what a row sees."""
    o, lse = _results(ring, qkv, extras)
    if sinks is not None:
        o, lse = _sinks.join(o, lse, sinks)
    return o.astype(_calls.kept_dtype(ring, *qkv[:2])), lse


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _results(ring: Ring, qkv: Qkv, extras: Extras) -> Results:
    """o and lse of one rank over the keys of all ranks::

    s = softmax_scale · q kᵀ;  capped: soft_cap · tanh(s / soft_cap)
    s += slope · (key position − query position);  −inf where masked
    lse = ln Σ e^s;  p = e^(s − lse);  o = dropped(p) v
    """
    o, lse = _calls.forward(ring, qkv, extras)
    return o, lse


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gradients(
    ring: Ring, qkv: Qkv, extras: Extras, results: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """dq, dk, dv and, with slopes, theirs, of one rank from o, lse, dout, dlse::

    delta = rowsum(dout ∘ o) − dlse;  ds = p ∘ (dropped(dout vᵀ) − delta)
    dslope = Σ ds · (key position − query position);  capped: ds ∘= 1 − tanh²
    dv = dropped(p)ᵀ dout;  dk = softmax_scale · dsᵀ q;  dq = softmax_scale · ds k
    """
    return _calls.backward(ring, qkv, extras, results)


ring_attention.defvjp(_forward_rule, _backward_rule)
# Who differentiates the rules themselves wants a second derivative.
_results.defjvp(_derivatives.second)
_gradients.defjvp(_derivatives.second)
