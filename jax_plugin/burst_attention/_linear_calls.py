"""The custom calls of linear attention: one device's tokens, no other device's."""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from burst_attention import _ffi
from burst_attention._ring import vary

Arrays: TypeAlias = tuple[jax.Array, ...]


def state(
    left: jax.Array, right: jax.Array, log_decay: jax.Array, varying: tuple[str, ...], back: bool
) -> jax.Array:
    """The state ``[batch, heads, k_dim, v_dim]`` that tokens leave without those before them::

    Σ_t left_t right_tᵀ e^(Σ_(s>t) log λ_s);   back: … e^(Σ_(s≤t) log λ_s)
    """
    (out,) = _call(
        "state",
        (left, right, log_decay),
        (_state_shape(left, right, log_decay),),
        varying,
        backward=np.bool_(back),
    )
    return out


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    before: jax.Array,
    varying: tuple[str, ...],
) -> tuple[jax.Array, jax.Array]:
    """Outputs, in q's dtype, and the state after the last token."""
    shapes = (
        jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype),
        _state_shape(q, v, log_decay),
    )
    out, after = _call("forward", (q, k, v, log_decay, before), shapes, varying)
    return out, after


def backward(operands: Arrays, varying: tuple[str, ...]) -> Arrays:
    """Gradients of q, k, v, log_decay and the state before; operands are those, dout, dafter."""
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[:5])
    return _call("backward", operands, shapes, varying)


def _state_shape(left: jax.Array, right: jax.Array, log_decay: jax.Array) -> jax.ShapeDtypeStruct:
    shape = (left.shape[0], log_decay.shape[2], left.shape[3], right.shape[3])
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _call(
    name: str,
    operands: Arrays,
    results: tuple[jax.ShapeDtypeStruct, ...],
    varying: tuple[str, ...],
    **attributes: Any,
) -> Arrays:
    target = _ffi.LINEAR[name]
    call = jax.ffi.ffi_call(target, results, vmap_method="broadcast_all", has_side_effect=False)
    with jax.named_scope(target):
        outputs = call(*operands, **attributes)
    return tuple(vary(output, varying) for output in outputs)
