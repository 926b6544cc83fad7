"""Implementations of a ring: the library's custom calls on each platform, and plain JAX."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from burst_attention import _confirmed, _ffi
from burst_attention._attention import choice, implementation, plain
from burst_attention._attention.features import Feature, Features, lengths
from burst_attention._attention.options import NO_LIMIT, Window
from burst_attention._attention.ring import Ring
from burst_attention._ffi import Attributes
from burst_attention._mesh import rank_and_ring, vary_like
from burst_attention._types import Arrays

Shapes: TypeAlias = tuple[jax.ShapeDtypeStruct, ...]

SHORT_SEQUENCE = 256
"""Up to how many keys of the whole sequence the backward pass gets o in float32. There gradients
are small differences; a query that sees one key has none at all. An o in 16 bits in
delta = rowsum(dout ∘ o) made the errors of dq and dk up to 1.6 times the errors of rounding alone;
from 130 tokens on the factor was 1.11 at most. For long sequences float32 would take two bytes more
for each element."""

SHORT_WINDOW = 64
"""Up to how many positions of a window the backward pass gets o in float32. A query sees no more
keys, as on average in a causal sequence of twice as many. The lengths of segments are not known
here: for documents of fewer tokens in a long sequence, errors are the figures above."""

COMMUNICATION_ID = int.from_bytes(b"BURS")
"""Tells the NCCL communicators of rings from XLA's own (0 and 1) and from communicators of other
libraries over the same devices. Forward and backward pass share one communicator. The slow links of
a double ring have the number after it."""


def forward(ring: Ring, qkv: Arrays, features: Features) -> Arrays:
    """Returns o and lse, float32 ``[batch, seq, heads]``, of one rank, without sinks.

    o has the dtype of `residual_dtype`, but is float32 where sinks scale it afterwards: rounding
    before and after the sinks would make its error 1.4 times that of rounding. Kernels of GPUs do
    round it before.
    """
    calls = {"cpu": _cpu_forward, "cuda": _cuda_forward, "xla": _plain_forward}
    return _implemented(ring, calls, qkv, features)


def backward(ring: Ring, qkv: Arrays, features: Features, results: Arrays) -> Arrays:
    """Returns dq, dk, dv and the gradients of features of one rank from its o, lse, dout, dlse."""
    calls = {"cpu": _cpu_backward, "cuda": _cuda_backward, "xla": plain.backward}
    return _implemented(ring, calls, qkv, features, results)


def _implemented(
    ring: Ring,
    calls: dict[str, Callable[..., Arrays]],
    qkv: Arrays,
    *others: Features | Arrays,
) -> Arrays:
    """Returns the results of the ring's implementation.

    Without one, lowering takes the implementation that serves the platform it lowers for.
    """
    if ring.implementation is not None:
        return calls[ring.implementation](ring, qkv, *others)
    branches = {
        name: partial(calls[name], ring)
        for name in ("cpu", "cuda")
        if implementation.serves(
            name,
            qkv[0].dtype,
            ring.world_size,
            keeps_float32=ring.keeps_float32,
            soft_cap=ring.options.logits_soft_cap,
        )
        and not (name == "cuda" and _confirmed.refuted("attention", None))
    }
    results: Arrays = lax.platform_dependent(
        qkv, *others, default=partial(calls["xla"], ring), **branches
    )
    return results


def _plain_forward(ring: Ring, qkv: Arrays, features: Features) -> Arrays:
    o, lse = plain.forward(ring, qkv, features)
    return o.astype(_o_dtype(ring, qkv, features)), lse


def _cpu_forward(ring: Ring, qkv: Arrays, features: Features) -> Arrays:
    results = _forward_results(qkv, _o_dtype(ring, qkv, features))
    return _cpu_call(_ffi.FORWARD, ring, results, qkv, features, {})


def _cpu_backward(ring: Ring, qkv: Arrays, features: Features, given: Arrays) -> Arrays:
    results = (*_like(*qkv), *_partial_sums("cpu", qkv, features))
    attributes: Attributes = {"backward": ring.options.backward}
    found = _cpu_call(_ffi.BACKWARD, ring, results, (*qkv, *given), features, attributes)
    return *found[:3], *_summed("cpu", found[3:], features)


def _cuda_forward(ring: Ring, qkv: Arrays, features: Features) -> Arrays:
    q, k, v = qkv
    results = _forward_results(qkv, q.dtype)
    o, lse = _cuda_call(_ffi.FORWARD, ring, results, (_signed(ring, q), k, v), features, {})
    # Kernels write o in q's dtype. On all platforms this function returns it in one dtype.
    return o.astype(_o_dtype(ring, qkv, features)), lse


def _cuda_backward(ring: Ring, qkv: Arrays, features: Features, given: Arrays) -> Arrays:
    ring = _with_side(ring, qkv, features)
    (q, k, v), (o, lse, dout, dlse) = qkv, given
    dout, dlse = _without_padding(features, dout), _without_padding(features, dlse)
    operands = (_signed(ring, q), k, v, o.astype(q.dtype), lse, dout, dlse)
    # Kernels add up the gradients of features in place, and leave some dimensions to be summed.
    zeros = tuple(jnp.zeros(x.shape, x.dtype) for x in _partial_sums("cuda", qkv, features))
    zeros = vary_like(q, zeros)
    attributes: Attributes = {
        "backward": ring.options.backward,
        "backward_order": ring.backward_order,
        "lse_gradient": ring.lse_gradient,
    }
    dq, dk, dv, *partial_sums = _cuda_call(
        _ffi.BACKWARD, ring, _like(*qkv, *zeros), operands, features, attributes, in_place=zeros
    )
    return _signed(ring, dq), dk, dv, *_summed("cuda", partial_sums, features)


def _with_side(ring: Ring, qkv: Arrays, features: Features) -> Ring:
    """Returns a ring with the side that travels backward where cuDNN may compute gradients.

    Elsewhere ``auto`` stays: the library lets the side travel that costs fewer bytes.
    """
    options, may_serve = ring.options, ring.kernels != "tile" and not ring.lse_gradient
    if options.backward != "auto" or not may_serve or ring.world_size == 1:
        return ring
    problem = _problem(ring, qkv, _options(ring, features))
    problem |= {"kernels": ring.kernels, "backward_order": ring.backward_order}
    backward = choice.travelling(problem, options.links, ring.node)
    return replace(ring, options=replace(options, backward=backward))


def _partial(platform: str, features: Features) -> Iterator[tuple[Feature, list[str]]]:
    """Returns the operands that have a gradient, each with the shape that calls return."""
    for row, _ in features.differentiable():
        assert row.partial is not None
        yield row, row.partial[platform].split()


def _partial_sums(platform: str, qkv: Arrays, features: Features) -> Shapes:
    """Returns the gradients of features as calls return them."""
    sizes = lengths(*qkv[:2])
    shapes = ([sizes[name] for name in names] for _, names in _partial(platform, features))
    return tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)


def _summed(platform: str, found: Sequence[jax.Array], features: Features) -> Iterator[jax.Array]:
    """Returns the gradients of operands from the sums that calls return."""
    for x, (row, names) in zip(found, _partial(platform, features), strict=True):
        kept = row.operand.split()
        yield x.sum(axis=tuple(axis for axis, name in enumerate(names) if name not in kept))


def _without_padding(features: Features, cotangent: jax.Array) -> jax.Array:
    """Returns a cotangent with 0 in padding: kernels give it weight 0, and 0 · NaN is NaN."""
    if features.query_segment_ids is None:
        return cotangent
    padding = lax.expand_dims(features.query_segment_ids < 0, range(2, cotangent.ndim))
    return jnp.where(padding, jnp.zeros_like(cotangent), cotangent)


def residual_dtype(ring: Ring, q: jax.Array, k: jax.Array) -> jnp.dtype:
    """Returns the dtype of the o that the backward pass gets.

    It is q's dtype, or float32 where the caller asks for it and for short sequences.
    """
    return kept_dtype(q.dtype, ring.world_size * k.shape[1], ring.window, ring.keeps_float32)


def kept_dtype(dtype: jnp.dtype, keys: int, window: Window, keeps_float32: bool) -> jnp.dtype:
    """Returns the dtype of the o that the backward pass gets, for ``keys`` of a whole sequence."""
    short_window = NO_LIMIT not in window and sum(window) < SHORT_WINDOW
    is_short = keys <= SHORT_SEQUENCE or short_window
    return jnp.dtype(jnp.float32) if is_short or keeps_float32 else dtype


def _o_dtype(ring: Ring, qkv: Arrays, features: Features) -> jnp.dtype:
    """Returns the dtype of the o that sinks get, or else the backward pass."""
    return jnp.dtype(jnp.float32) if features.sinks is not None else residual_dtype(ring, *qkv[:2])


def _forward_results(qkv: Arrays, o_dtype: jnp.dtype) -> Shapes:
    rows = qkv[0].shape[:3]
    return (
        jax.ShapeDtypeStruct((*rows, qkv[2].shape[3]), o_dtype),
        jax.ShapeDtypeStruct(rows, jnp.float32),
    )


def _like(*inputs: jax.Array) -> Shapes:
    return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs)


def _cpu_call(
    target: str, ring: Ring, results: Shapes, operands: Arrays, features: Features, also: Attributes
) -> Arrays:
    attributes = _options(ring, features) | {"softmax_scale": np.float32(ring.softmax_scale)}
    given = (*operands, *(x for _, x in features.operands()), rank_and_ring(ring.axes))
    return _call(target, ring, results, given, attributes | also)


def _cuda_call(
    target: str,
    ring: Ring,
    results: Shapes,
    operands: Arrays,
    features: Features,
    also: Attributes,
    in_place: Arrays = (),
) -> Arrays:
    """Calls kernels of GPUs. The last results start from the values of ``in_place``."""
    options = _options(ring, features)
    attributes: Attributes = {
        "softmax_scale": _positive_scale(ring),
        "groups": np.array(ring.groups, np.int64),
        "communication_id": np.int64(COMMUNICATION_ID),
        "kernels": ring.kernels,
    }
    # The workspace is a result, so XLA plans and counts it: kernels allocate nothing.
    needed = _ffi.workspace_bytes(**_request(target, ring, operands, options))
    workspace = jax.ShapeDtypeStruct((needed,), jnp.uint8)
    operands = (*operands, *(x for _, x in features.operands()), *in_place)
    first, last = len(operands) - len(in_place), len(results) - len(in_place)
    aliases = {first + i: last + i for i in range(len(in_place))}
    *outputs, _ = _call(
        target, ring, (*results, workspace), operands, attributes | options | also, aliases
    )
    return tuple(outputs)


def _options(ring: Ring, features: Features) -> Attributes:
    """Returns mask and features as attributes."""
    return {
        "window_left": np.int64(ring.window[0]),
        "window_right": np.int64(ring.window[1]),
        "logits_soft_cap": np.float32(ring.options.logits_soft_cap or 0),
        "dropout_rate": np.float32(ring.options.dropout_rate),
        "feature_operands": ",".join(row.name for row, _ in features.operands()),
        "schedule": ring.schedule,
        "inner_size": np.int64(ring.inner_size),
    }


def _call(
    target: str,
    ring: Ring,
    results: Shapes,
    operands: Arrays,
    attributes: Attributes,
    aliases: dict[int, int] | None = None,
) -> Arrays:
    of_ring: Attributes = {
        "world_size": np.int64(ring.world_size),
        "layout": ring.layout,
        "axis_name": ", ".join(ring.axes) or "none",
    }
    outputs = _ffi.call(
        target, results, operands, attributes | of_ring, label=ring.schedule_name, aliases=aliases
    )
    return vary_like(operands[0], outputs)


def _request(target: str, ring: Ring, operands: Arrays, options: Attributes) -> dict[str, object]:
    """Returns a call as the library reads it; ``ffi/src/workspace.rs`` has the fields."""
    return _problem(ring, operands, options) | {
        "pass": "forward" if target == _ffi.FORWARD else "backward",
        "backward": ring.options.backward,
        "backward_order": ring.backward_order,
        "kernels": ring.kernels,
    }


def _problem(ring: Ring, operands: Arrays, options: Attributes) -> dict[str, object]:
    """Returns what a call computes as the library reads it."""
    q, k, v, *_ = operands
    return _ffi.shapes(q, k, v) | {
        "softmax_scale": float(_positive_scale(ring)),
        "options": {name: np.asarray(value).item() for name, value in options.items()},
        "layout": ring.layout,
        "world_size": ring.world_size,
    }


def _positive_scale(ring: Ring) -> np.float32:
    """Returns the scale that kernels get: they take only positive ones, see `_signed`."""
    return np.abs(np.float32(ring.softmax_scale)) or np.float32(1)


def _signed(
    ring: Ring, x: Float[Array, "batch q_len heads head_dim"]
) -> Float[Array, "batch q_len heads head_dim"]:
    """Returns q or dq times the sign of the scale, which `_positive_scale` leaves out::

    scale · q kᵀ = |scale| · (sign · q) kᵀ;   dq = sign · (|scale| · ds k)
    """
    sign = np.sign(np.float32(ring.softmax_scale))
    return x if sign > 0 else x * sign.astype(x.dtype)
