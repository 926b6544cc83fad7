"""What computes a call: the library's custom calls on each platform, and plain JAX."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_attention import _ffi, _implementation, _plain
from burst_attention._check_masks import NO_LIMIT
from burst_attention._extras import Extras
from burst_attention._ring import Ring, place, vary

Arrays: TypeAlias = tuple[jax.Array, ...]
Shapes: TypeAlias = tuple[jax.ShapeDtypeStruct, ...]

SHORT_SEQUENCE = 256
"""With up to this many keys in all, the backward pass gets o before it is rounded to 16 bits. There
gradients are small differences (a query that sees one key has none at all), and a rounded o in
delta = rowsum(dout ∘ o) made errors of dq and dk up to 1.6 times those of rounding alone; from 130
tokens on it was 1.11 at most. For long sequences it would cost two bytes more per element."""

SHORT_WINDOW = 64
"""The same for windows of up to so many keys: a query sees no more, as on average in a causal
sequence of twice as many. How long segments are is not known here: for documents of fewer tokens
in a long sequence, errors are the figures above."""

COMMUNICATION_ID = int.from_bytes(b"BURS")
"""Tells the rings' NCCL communicators from XLA's own (0 and 1) and from those of other libraries
over the same devices. Forward and backward share theirs. The slow links of a double ring have the
number after it."""


def forward(ring: Ring, qkv: Arrays, extras: Extras) -> Arrays:
    """o and lse, float32 ``[batch, seq, heads]``, of one rank.

    o has the dtype of `kept_dtype`, but is float32 where sinks are to scale it: rounding it before
    and after would make its error 1.4 times that of rounding. Kernels of GPUs do round it before.
    """
    calls = {"cpu": _cpu_forward, "cuda": _cuda_forward, "xla": _plain_forward}
    return _implemented(ring, calls, qkv, extras)


def backward(ring: Ring, qkv: Arrays, extras: Extras, results: Arrays) -> Arrays:
    """dq, dk, dv and, with slopes, theirs, of one rank from its o, lse, dout and dlse."""
    calls = {"cpu": _cpu_backward, "cuda": _cuda_backward, "xla": _plain.backward}
    return _implemented(ring, calls, qkv, extras, results)


def _implemented(ring: Ring, calls: dict[str, Callable[..., Arrays]], *operands: Any) -> Arrays:
    """Results of the ring's implementation, or of the one that serves where it is lowered for."""
    if ring.implementation is not None:
        return calls[ring.implementation](ring, *operands)
    q, *_ = operands[0]
    branches = {
        name: partial(calls[name], ring)
        for name in ("cpu", "cuda")
        if _implementation.serves(
            name,
            q.dtype,
            ring.world_size,
            keeps_float32=ring.keeps_float32,
            soft_cap=ring.soft_cap,
        )
    }
    results: Arrays = lax.platform_dependent(
        *operands, default=partial(calls["xla"], ring), **branches
    )
    return results


def _plain_forward(ring: Ring, qkv: Arrays, extras: Extras) -> Arrays:
    o, lse = _plain.forward(ring, qkv, extras)
    return o.astype(_o_dtype(ring, *qkv[:2])), lse


def _cpu_forward(ring: Ring, qkv: Arrays, extras: Extras) -> Arrays:
    results = _forward_results(qkv, _o_dtype(ring, *qkv[:2]))
    return _cpu_call(_ffi.FORWARD, ring, results, qkv, extras)


def _cpu_backward(ring: Ring, qkv: Arrays, extras: Extras, given: Arrays) -> Arrays:
    slopes = () if extras.slopes is None else (extras.slopes,)
    results = _like(*qkv, *slopes)
    return _cpu_call(_ffi.BACKWARD, ring, results, (*qkv, *given), extras, backward=ring.backward)


def _cuda_forward(ring: Ring, qkv: Arrays, extras: Extras) -> Arrays:
    q, k, v = qkv
    results = _forward_results(qkv, q.dtype)
    o, lse = _cuda_call(_ffi.FORWARD, ring, results, (_signed(ring, q), k, v), extras)
    # Kernels write o in q's dtype; what comes out has one dtype on all platforms.
    return o.astype(_o_dtype(ring, q, k)), lse


def _cuda_backward(ring: Ring, qkv: Arrays, extras: Extras, given: Arrays) -> Arrays:
    (q, k, v), (o, lse, dout, dlse) = qkv, given
    dout, dlse = _of_tokens(extras, dout), _of_tokens(extras, dlse)
    operands = (_signed(ring, q), k, v, o.astype(q.dtype), lse, dout, dlse)
    results = _like(*qkv)
    # What each query adds to the gradient of its head's slope: kernels add to it in place.
    zeros = () if extras.slopes is None else (vary(jnp.zeros_like(lse), ring.varying),)
    dq, dk, dv, *dslopes = _cuda_call(
        _ffi.BACKWARD,
        ring,
        results + _like(*zeros),
        operands,
        extras,
        in_place=zeros,
        backward=ring.backward,
        backward_order=ring.backward_order,
    )
    return _signed(ring, dq), dk, dv, *(x.sum(axis=1) for x in dslopes)


def _of_tokens(extras: Extras, cotangent: jax.Array) -> jax.Array:
    """0 for padding: kernels multiply what they mask by a weight of 0, and 0 · NaN is NaN."""
    if extras.q_segments is None:
        return cotangent
    padding = lax.expand_dims(extras.q_segments < 0, range(2, cotangent.ndim))
    return jnp.where(padding, jnp.zeros_like(cotangent), cotangent)


def kept_dtype(ring: Ring, q: jax.Array, k: jax.Array) -> Any:
    """dtype of the o that the backward pass gets.

    That of q, or float32 where the caller asks for it and for short sequences.
    """
    keys, (left, right) = ring.world_size * k.shape[1], ring.window
    short_window = NO_LIMIT not in (left, right) and left + right < SHORT_WINDOW
    is_short = keys <= SHORT_SEQUENCE or short_window
    return jnp.float32 if is_short or ring.keeps_float32 else q.dtype


def _o_dtype(ring: Ring, q: jax.Array, k: jax.Array) -> Any:
    return jnp.float32 if ring.has_sinks else kept_dtype(ring, q, k)


def _forward_results(qkv: Arrays, o_dtype: Any) -> Shapes:
    rows = qkv[0].shape[:3]
    return (
        jax.ShapeDtypeStruct((*rows, qkv[2].shape[3]), o_dtype),
        jax.ShapeDtypeStruct(rows, jnp.float32),
    )


def _like(*inputs: jax.Array) -> Shapes:
    return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs)


def _cpu_call(
    target: str, ring: Ring, results: Shapes, operands: Arrays, extras: Extras, **attributes: Any
) -> Arrays:
    options = _options(ring, extras)
    attributes |= {"softmax_scale": np.float32(ring.softmax_scale)} | options
    given = (*operands, *extras.present(), place(ring.axes))
    return _call(target, ring, results, given, attributes)


def _cuda_call(
    target: str,
    ring: Ring,
    results: Shapes,
    operands: Arrays,
    extras: Extras,
    in_place: Arrays = (),
    **attributes: Any,
) -> Arrays:
    """`in_place`: what the last results start from."""
    options = _options(ring, extras)
    attributes |= {
        "softmax_scale": _positive_scale(ring),
        "groups": np.array(ring.groups, np.int64),
        "communication_id": np.int64(COMMUNICATION_ID),
    }
    # A result, so that XLA plans it and counts it: kernels allocate nothing.
    needed = _workspace(target, ring, operands, options)
    workspace = jax.ShapeDtypeStruct((needed,), jnp.uint8)
    operands = (*operands, *extras.present(), *in_place)
    pairs = zip(_last(operands, in_place), _last(results, in_place), strict=True)
    *outputs, _ = _call(
        target, ring, (*results, workspace), operands, attributes | options, dict(pairs)
    )
    return tuple(outputs)


def _last(all_of_them: tuple[Any, ...], some: tuple[Any, ...]) -> range:
    """Indices of the last so many."""
    return range(len(all_of_them) - len(some), len(all_of_them))


def _options(ring: Ring, extras: Extras) -> dict[str, Any]:
    """Mask and features, as attributes."""
    return {
        "window_left": np.int64(ring.window[0]),
        "window_right": np.int64(ring.window[1]),
        "logits_soft_cap": np.float32(ring.soft_cap),
        "has_segments": extras.q_segments is not None,
        "has_slopes": extras.slopes is not None,
        "dropout_rate": np.float32(ring.dropout_rate),
        "schedule": ring.schedule,
        "inner_size": np.int64(ring.inner_size),
    }


def _call(
    target: str,
    ring: Ring,
    results: Shapes,
    operands: Arrays,
    attributes: dict[str, Any],
    aliases: dict[int, int] | None = None,
) -> Arrays:
    # A ring inside one call is pure, so equal calls may be merged and unused ones dropped: all
    # ranks run one program, and what is dropped on one is dropped on all.
    call = jax.ffi.ffi_call(
        target,
        results,
        vmap_method="broadcast_all",
        has_side_effect=False,
        input_output_aliases=aliases,
    )
    with jax.named_scope(target):
        outputs = call(
            *operands,
            world_size=np.int64(ring.world_size),
            layout=ring.layout,
            axis_name=", ".join(ring.axes) or "none",
            **attributes,
        )
    # A custom call's results are typed as equal on all devices, unless told.
    return tuple(vary(output, ring.varying) for output in outputs)


def _workspace(target: str, ring: Ring, operands: Arrays, options: dict[str, Any]) -> int:
    scale = float(_positive_scale(ring))
    return _ffi.workspace_bytes(**_described(target, ring, operands, scale, options))


def _described(
    target: str, ring: Ring, operands: Arrays, scale: float, options: dict[str, Any]
) -> dict[str, Any]:
    """A call, for the library's functions that plan one; ``ffi/src/request.rs`` reads it."""
    q, k, v, *_ = operands
    return {
        "pass": "forward" if target == _ffi.FORWARD else "backward",
        "batch": q.shape[0],
        "q_len": q.shape[1],
        "kv_len": k.shape[1],
        "heads": q.shape[2],
        "kv_heads": k.shape[2],
        "head_dim": q.shape[3],
        "value_dim": v.shape[3],
        "dtype": str(q.dtype),
        "softmax_scale": scale,
        "options": {name: np.asarray(value).item() for name, value in options.items()},
        "layout": ring.layout,
        "world_size": ring.world_size,
        "backward": ring.backward,
        "backward_order": ring.backward_order,
    }


def _positive_scale(ring: Ring) -> np.float32:
    """The scale that kernels get: they take only positive ones, see `_signed`."""
    return np.abs(np.float32(ring.softmax_scale)) or np.float32(1)


def _signed(ring: Ring, x: jax.Array) -> jax.Array:
    """q or dq times the sign of the scale, which `_positive_scale` leaves out::

    scale · q kᵀ = |scale| · (sign · q) kᵀ;   dq = sign · (|scale| · ds k)
    """
    sign = np.sign(np.float32(ring.softmax_scale))
    return x if sign > 0 else x * sign.astype(x.dtype)
