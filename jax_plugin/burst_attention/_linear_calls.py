"""One device's tokens of linear attention: custom calls on CPU devices, kernels on GPUs.

What a call keeps for a later one is an array of the platform's own, or None where the platform is
known only when the program is lowered: then the later call computes it again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_attention import _ffi, _linear_cuda
from burst_attention._ring import vary

Arrays: TypeAlias = tuple[jax.Array, ...]
Kept: TypeAlias = jax.Array | None


class Device(NamedTuple):
    """What is static about a device's calls."""

    platform: str | None
    """``cpu`` or ``cuda``; None where only lowering will tell."""
    varying: tuple[str, ...]
    """Mesh axes over which the results differ."""
    has_documents: bool
    """Whether there are documents, each of which keeps what is not finite to itself."""


def left(
    device: Device, k: jax.Array, v: jax.Array, logs: jax.Array, *, back: bool = False
) -> tuple[jax.Array, Kept]:
    """The state ``[batch, heads, k_dim, v_dim]`` that tokens leave without those before them::

        Σ_t k_t v_tᵀ e^(Σ_(s>t) log λ_s);   back: Σ_t k_t v_tᵀ e^(Σ_(s≤t) log λ_s)

    and what `forward` and `backward` can use again.
    """
    platform, varying, has_documents = device
    call = partial(_linear_cuda.left, varying, has_documents, back=back)
    if platform == "cuda":
        return call(k, v, logs)

    def cuda(*operands: jax.Array) -> jax.Array:
        return call(*operands)[0]

    cpu = partial(_cpu_state, varying, back)
    return _on_platform(platform, (k, v, logs), cpu=cpu, cuda=cuda), None


def forward(device: Device, operands: Arrays, kept: Kept) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Outputs in q's dtype, the state after the last token, and what `backward` takes for states.

    ``operands`` are q, k, v, log decays and the state before the first token.
    """
    platform, varying, has_documents = device
    call = partial(_linear_cuda.forward, varying, has_documents)
    if platform == "cuda":
        return call(operands, kept)

    def cuda(*operands: jax.Array) -> Arrays:
        return call(operands, None)[:2]

    cpu = partial(_cpu_forward, varying)
    out, after = _on_platform(platform, operands, cpu=cpu, cuda=cuda)
    return out, after, operands[4]


def backward(device: Device, operands: Arrays, kept: Kept) -> Arrays:
    """Gradients of q, k, v, log decays and of the state before the first token.

    ``operands`` are q, k, v, log decays, states, dout and the gradient of the state after the last
    token.
    """
    platform, varying, has_documents = device

    def cuda(*operands: jax.Array) -> Arrays:
        return _linear_cuda.backward(varying, has_documents, operands, kept)

    cpu = partial(_cpu_backward, varying)
    results: Arrays = _on_platform(platform, operands, cpu=cpu, cuda=cuda)
    return results


def _on_platform(platform: str | None, operands: Arrays, **calls: Callable[..., Any]) -> Any:
    if platform is not None:
        return calls[platform](*operands)
    # Without a default, lowering for any other platform is an error.
    return lax.platform_dependent(*operands, **calls)


def _cpu_state(
    varying: tuple[str, ...], back: bool, k: jax.Array, v: jax.Array, logs: jax.Array
) -> jax.Array:
    shapes = (_state_shape(k, v, logs),)
    (state,) = _call("state", (k, v, logs), shapes, varying, backward=np.bool_(back))
    return state


def _cpu_forward(varying: tuple[str, ...], *operands: jax.Array) -> Arrays:
    q, _, v, logs, _ = operands
    out = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype)
    return _call("forward", operands, (out, _state_shape(q, v, logs)), varying)


def _cpu_backward(varying: tuple[str, ...], *operands: jax.Array) -> Arrays:
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[:5])
    return _call("backward", operands, shapes, varying)


def _state_shape(k: jax.Array, v: jax.Array, logs: jax.Array) -> jax.ShapeDtypeStruct:
    shape = (k.shape[0], logs.shape[2], k.shape[3], v.shape[3])
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
