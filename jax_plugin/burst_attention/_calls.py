"""The custom calls on each platform, and the choice between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_attention import _ffi
from burst_attention._ring import Ring, place, vary

Arrays: TypeAlias = tuple[jax.Array, ...]
Shapes: TypeAlias = tuple[jax.ShapeDtypeStruct, ...]

SHORT_SEQUENCE = 256
"""Up to this many tokens in all, the backward pass gets o before it is rounded to 16 bits. There
gradients are small differences (a query that sees one key has none at all), and a rounded o in
delta = rowsum(dout ∘ o) made errors of dq and dk up to 1.6 times those of rounding alone; from 130
tokens on it was 1.11 at most. For long sequences it would cost two bytes more per element."""

COMMUNICATION_ID = int.from_bytes(b"BURS")
"""Tells the rings' NCCL communicators from XLA's own (0 and 1) and from those of other libraries
over the same devices. Forward and backward share theirs."""


def forward(ring: Ring, *operands: jax.Array) -> Arrays:
    """o and lse, float32 ``[batch, seq, heads]``, of one rank from its q, k, v.

    o has the dtype of `kept_dtype`, but is float32 where sinks are to scale it: rounding it before
    and after would make its error 1.4 times that of rounding. Kernels of GPUs do round it before.
    """
    return _on_platform(ring, operands, cpu=_cpu_forward, cuda=_cuda_forward)


def backward(ring: Ring, *operands: jax.Array) -> Arrays:
    """dq, dk and dv of one rank from its q, k, v, o, lse, dout and dlse."""
    return _on_platform(ring, operands, cpu=_cpu_backward, cuda=_cuda_backward)


def _on_platform(ring: Ring, operands: Arrays, **calls: Callable[..., Arrays]) -> Arrays:
    """Results of the call of the ring's platform, or of the one it will be lowered for."""
    if ring.platform is not None:
        return calls[ring.platform](ring, *operands)
    # Without a default, lowering for any other platform is an error.
    branches = {name: partial(call, ring) for name, call in calls.items()}
    results: Arrays = lax.platform_dependent(*operands, **branches)
    return results


def _cpu_forward(ring: Ring, *operands: jax.Array) -> Arrays:
    q = operands[0]
    return _cpu_call(_ffi.FORWARD, ring, _forward_results(q, _o_dtype(ring, q)), operands)


def _cpu_backward(ring: Ring, *operands: jax.Array) -> Arrays:
    results = _backward_results(*operands[:3])
    return _cpu_call(_ffi.BACKWARD, ring, results, operands, backward=ring.backward)


def _cuda_forward(ring: Ring, q: jax.Array, k: jax.Array, v: jax.Array) -> Arrays:
    results = _forward_results(q, q.dtype)
    o, lse = _cuda_call(_ffi.FORWARD, ring, results, (_signed(ring, q), k, v))
    # Kernels write o in q's dtype; what comes out has one dtype on all platforms.
    return o.astype(_o_dtype(ring, q)), lse


def _cuda_backward(
    ring: Ring, q: jax.Array, k: jax.Array, v: jax.Array, o: jax.Array, *rest: jax.Array
) -> Arrays:
    operands = (_signed(ring, q), k, v, o.astype(q.dtype), *rest)
    results = _backward_results(q, k, v)
    dq, dk, dv = _cuda_call(_ffi.BACKWARD, ring, results, operands, backward=ring.backward)
    return _signed(ring, dq), dk, dv


def kept_dtype(ring: Ring, q: jax.Array) -> Any:
    """dtype of the o that the backward pass gets: that of q, or float32 for short sequences."""
    return jnp.float32 if ring.world_size * q.shape[1] <= SHORT_SEQUENCE else q.dtype


def _o_dtype(ring: Ring, q: jax.Array) -> Any:
    return jnp.float32 if ring.has_sinks else kept_dtype(ring, q)


def _forward_results(q: jax.Array, o_dtype: Any) -> Shapes:
    return (
        jax.ShapeDtypeStruct(q.shape, o_dtype),
        jax.ShapeDtypeStruct(q.shape[:3], jnp.float32),
    )


def _backward_results(*inputs: jax.Array) -> Shapes:
    return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs)


def _cpu_call(
    target: str, ring: Ring, results: Shapes, operands: Arrays, **attributes: Any
) -> Arrays:
    attributes |= {"softmax_scale": np.float32(ring.softmax_scale)}
    return _call(target, ring, results, (*operands, place(ring.axis_name)), attributes)


def _cuda_call(
    target: str, ring: Ring, results: Shapes, operands: Arrays, **attributes: Any
) -> Arrays:
    attributes |= {
        "softmax_scale": _positive_scale(ring),
        "groups": np.array(ring.groups, np.int64),
        "communication_id": np.int64(COMMUNICATION_ID),
    }
    # A result, so that XLA plans it and counts it: kernels allocate nothing.
    workspace = jax.ShapeDtypeStruct((_workspace(target, ring, *operands[:2]),), jnp.uint8)
    *outputs, _ = _call(target, ring, (*results, workspace), operands, attributes)
    return tuple(outputs)


def _call(
    target: str, ring: Ring, results: Shapes, operands: Arrays, attributes: dict[str, Any]
) -> Arrays:
    # A ring inside one call is pure, so equal calls may be merged and unused ones dropped: all
    # ranks run one program, and what is dropped on one is dropped on all.
    call = jax.ffi.ffi_call(target, results, vmap_method="broadcast_all", has_side_effect=False)
    with jax.named_scope(target):
        outputs = call(
            *operands,
            world_size=np.int64(ring.world_size),
            layout=ring.layout,
            is_causal=ring.is_causal,
            axis_name=ring.axis_name,
            **attributes,
        )
    # A custom call's results are typed as equal on all devices, unless told.
    return tuple(vary(output, ring.varying) for output in outputs)


def _workspace(target: str, ring: Ring, q: jax.Array, k: jax.Array) -> int:
    if q.dtype == jnp.float32:
        # Traced without knowing the platform. There is no kernel, so on a GPU the library refuses
        # the call when it runs.
        return 0
    return _ffi.workspace_bytes(
        **{"pass": "forward" if target == _ffi.FORWARD else "backward"},
        batch=q.shape[0],
        q_len=q.shape[1],
        kv_len=k.shape[1],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        dtype=str(q.dtype),
        is_causal=ring.is_causal,
        softmax_scale=float(_positive_scale(ring)),
        layout=ring.layout,
        world_size=ring.world_size,
        backward=ring.backward,
    )


def _positive_scale(ring: Ring) -> np.float32:
    """The scale that kernels get: they take only positive ones, see `_signed`."""
    return np.abs(np.float32(ring.softmax_scale)) or np.float32(1)


def _signed(ring: Ring, x: jax.Array) -> jax.Array:
    """q or dq times the sign of the scale, which `_positive_scale` leaves out::

    scale · q kᵀ = |scale| · (sign · q) kᵀ;   dq = sign · (|scale| · ds k)
    """
    sign = np.sign(np.float32(ring.softmax_scale))
    return x if sign > 0 else x * sign.astype(x.dtype)
