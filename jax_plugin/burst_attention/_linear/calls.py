"""Linear attention of one device's tokens: custom calls on CPU devices, kernels on GPUs.

On GPUs `left` returns intermediate states that `forward` and `backward` use again. Where only
lowering will tell the platform, there are none, and the later call computes them again.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_attention import _ffi
from burst_attention._linear import gpu
from burst_attention._linear.states import Logs, Place, State
from burst_attention._mesh import vary_like
from burst_attention._types import Arrays

Result = TypeVar("Result", jax.Array, Arrays)
Again: TypeAlias = jax.Array | None
"""Intermediate states of `left` for a later call."""


def left(
    place: Place, k: jax.Array, v: jax.Array, logs: Logs, *, back: bool = False
) -> tuple[State, Again]:
    """Returns the state that tokens leave, from a state of zeros::

        Σ_t k_t v_tᵀ e^(Σ_(s>t) log λ_s);   back: Σ_t k_t v_tᵀ e^(Σ_(s≤t) log λ_s)

    and the intermediate states that `forward` and `backward` can use again.
    """
    call = partial(gpu.left, place.has_documents, back=back)
    if place.platform == "cuda":
        return call(k, v, logs)

    def cpu(k: jax.Array, v: jax.Array, logs: Logs) -> jax.Array:
        return _call("state", (k, v, logs), [_state_like(k, v, logs)], backward=np.bool_(back))[0]

    def cuda(*operands: jax.Array) -> jax.Array:
        return call(*operands)[0]

    return _on_platform(place, (k, v, logs), cpu, cuda), None


def forward(place: Place, operands: Arrays, again: Again) -> tuple[jax.Array, State, jax.Array]:
    """Returns outputs in q's dtype, the state after the last token, and states for `backward`.

    ``operands`` are q, k, v, log decays and the state before the first token.
    """
    if place.platform == "cuda":
        return gpu.forward(place.has_documents, operands, again)

    def cpu(*operands: jax.Array) -> Arrays:
        q, _, v, logs, _ = operands
        out = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype)
        return _call("forward", operands, [out, _state_like(q, v, logs)])

    def cuda(*operands: jax.Array) -> Arrays:
        return gpu.forward(place.has_documents, operands, None)[:2]

    out, after = _on_platform(place, operands, cpu, cuda)
    return out, after, operands[4]


def backward(place: Place, operands: Arrays, again: Again) -> Arrays:
    """Returns the gradients of q, k, v, log decays and of the state before the first token.

    ``operands`` are q, k, v, log decays, states, dout and the gradient of the state after the last
    token.
    """

    def cpu(*operands: jax.Array) -> Arrays:
        results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[:5]]
        return _call("backward", operands, results)

    def cuda(*operands: jax.Array) -> Arrays:
        return gpu.backward(place.has_documents, operands, again)

    return _on_platform(place, operands, cpu, cuda)


def _on_platform(
    place: Place, operands: Arrays, cpu: Callable[..., Result], cuda: Callable[..., Result]
) -> Result:
    """Returns the results of the call for a platform, or for the platform that lowering finds."""
    if place.platform is not None:
        return {"cpu": cpu, "cuda": cuda}[place.platform](*operands)
    # Without a default, lowering for any other platform is an error.
    found: Result = lax.platform_dependent(*operands, cpu=cpu, cuda=cuda)
    return found


def _state_like(k: jax.Array, v: jax.Array, logs: Logs) -> jax.ShapeDtypeStruct:
    shape = (k.shape[0], logs.shape[2], k.shape[3], v.shape[3])
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _call(
    name: str, operands: Arrays, results: list[jax.ShapeDtypeStruct], **attributes: np.bool_
) -> Arrays:
    target = _ffi.LINEAR[name]
    call = jax.ffi.ffi_call(target, results, vmap_method="broadcast_all", has_side_effect=False)
    with jax.named_scope(target):
        outputs = call(*operands, **attributes)
    return vary_like(operands[0], tuple(outputs))
