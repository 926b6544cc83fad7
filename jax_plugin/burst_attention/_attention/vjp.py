"""The derivative of a ring: one custom call forward, one backward."""

from functools import partial
from typing import TypeAlias

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32

from burst_attention._attention import calls, sinks
from burst_attention._attention.features import Features
from burst_attention._attention.ring import Ring
from burst_attention._batching import over_batch
from burst_attention._checkpoint import LSE_NAME, OUT_NAME
from burst_attention._derivatives import refuse_second
from burst_attention._types import Arrays

Results: TypeAlias = tuple[
    Float[Array, "batch q_len heads value_dim"], Float32[Array, "batch q_len heads"]
]
Qkv: TypeAlias = tuple[
    Float[Array, "batch q_len heads head_dim"],
    Float[Array, "batch kv_len kv_heads head_dim"],
    Float[Array, "batch kv_len kv_heads value_dim"],
]
Residuals: TypeAlias = tuple[Qkv, Features, jax.Array, jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring_attention(ring: Ring, qkv: Qkv, features: Features) -> Results:
    """Returns out and lse of one rank. All inputs vary over the same mesh axes."""
    o, lse = results(ring, qkv, features)
    return o.astype(qkv[0].dtype), lse


def _forward_rule(ring: Ring, qkv: Qkv, features: Features) -> tuple[Results, Residuals]:
    o, lse = results(ring, qkv, features)
    # The names stand here, not at the caller: a policy can only keep what residuals consist of.
    o, lse = checkpoint_name(o, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    return (o.astype(qkv[0].dtype), lse), (qkv, features, o, lse)


def _backward_rule(ring: Ring, residuals: Residuals, cotangents: Results) -> tuple[Qkv, Features]:
    qkv, features, o, lse = residuals
    dq, dk, dv, *others = gradients(ring, qkv, features, (o, lse, *cotangents))
    names = [row.name for row, _ in features.differentiable()]
    return (dq, dk, dv), Features(**dict(zip(names, others, strict=True)))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def results(ring: Ring, qkv: Qkv, features: Features) -> Results:
    """Returns o in the dtype that the backward pass gets, and lse, of one rank over all keys::

    s = softmax_scale · q kᵀ;  capped: soft_cap · tanh(s / soft_cap)
    s += slope · (key position − query position);  −inf where masked
    lse = ln Σ e^s;  p = e^(s − lse);  o = dropped(p) v;  then sinks join o and lse
    """
    return over_batch(partial(_forward, ring), qkv, features)


def _forward(ring: Ring, qkv: Qkv, features: Features) -> Results:
    """Computes `results`."""
    o, lse = calls.forward(ring, qkv, features)
    if features.sinks is not None:
        o, lse = sinks.join(o, lse, features.sinks)
    return o.astype(calls.residual_dtype(ring, *qkv[:2])), lse


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def gradients(ring: Ring, qkv: Qkv, features: Features, found: Arrays) -> Arrays:
    """Returns dq, dk, dv and the gradients of features of one rank from o, lse, dout, dlse::

    delta = rowsum(dout ∘ o) − dlse;  ds = p ∘ (dropped(dout vᵀ) − delta)
    dslope = Σ ds · (key position − query position);  capped: ds ∘= 1 − tanh²
    dv = dropped(p)ᵀ dout;  dk = softmax_scale · dsᵀ q;  dq = softmax_scale · ds k
    """
    return over_batch(partial(_backward, ring), qkv, features, found)


def _backward(ring: Ring, qkv: Qkv, features: Features, results: Arrays) -> Arrays:
    """Computes `gradients`."""
    # The ring gets results that sinks have joined. Differentiating the factor of the sinks instead
    # would round its product with dout to 16 bits once more: the errors of dq, dk and dv would be
    # 1.4 times the errors of rounding.
    found = calls.backward(ring, qkv, features._replace(sinks=None), results)
    if features.sinks is None:
        return found
    return *found, sinks.gradient(features.sinks, *results)


ring_attention.defvjp(_forward_rule, _backward_rule)
# Deriving a rule itself is a second derivative.
results.defjvp(refuse_second)
gradients.defjvp(refuse_second)
