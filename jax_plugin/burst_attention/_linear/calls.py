"""Linear attention of one device's tokens: custom calls on CPU devices, kernels on GPUs, plain JAX.

On GPUs `left` returns intermediate states that `forward` and `backward` use again. Where only
lowering will tell the platform, there are none, and the later call computes them again.
"""

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_attention import _confirmed, _ffi
from burst_attention._linear import gpu, plain
from burst_attention._linear.states import Call, Logs, State
from burst_attention._mesh import vary_like
from burst_attention._types import Arrays

Result = TypeVar("Result", jax.Array, Arrays)
Again: TypeAlias = jax.Array | None
"""Intermediate states of `left` for a later call."""


def left(
    call: Call, k: jax.Array, v: jax.Array, logs: Logs, *, back: bool = False
) -> tuple[State, Again]:
    """Returns the state that tokens leave, from a state of zeros::

        Σ_t k_t v_tᵀ e^(Σ_(s>t) log λ_s);   back: Σ_t k_t v_tᵀ e^(Σ_(s≤t) log λ_s)

    and the intermediate states that `forward` and `backward` can use again. With ``back`` k stands
    for the queries, which the scale multiplies.
    """
    scale = call.scale if back else 1.0

    def cpu(k: jax.Array, v: jax.Array, logs: Logs) -> jax.Array:
        result = _state_like(k, v, logs)
        label = "backward" if back else "forward"
        return _call("state", (k, v, logs), [result], scale, label, backward=np.bool_(back))[0]

    def cuda(k: jax.Array, v: jax.Array, logs: Logs) -> tuple[State, jax.Array]:
        return gpu.left(call.has_documents, gpu.scaled(k, scale), v, logs, back=back)

    if call.platform == "cuda":
        return cuda(k, v, logs)

    def xla(k: jax.Array, v: jax.Array, logs: Logs) -> State:
        return plain.left(gpu.scaled(k, scale), v, logs, back=back)

    return _on_platform(call, (k, v, logs), cpu, lambda *x: cuda(*x)[0], xla), None


def forward(call: Call, operands: Arrays, again: Again) -> tuple[jax.Array, State, jax.Array]:
    """Returns outputs in q's dtype, the state after the last token, and states for `backward`.

    ``operands`` are q, k, v, log decays and the state before the first token.
    """

    def cpu(*operands: jax.Array) -> Arrays:
        q, _, v, logs, _ = operands
        out = jax.ShapeDtypeStruct((*logs.shape, v.shape[3]), q.dtype)
        return _call("forward", operands, [out, _state_like(q, v, logs)], call.scale)

    def cuda(q: jax.Array, *others: jax.Array) -> tuple[jax.Array, State, jax.Array]:
        return gpu.forward(call.has_documents, (gpu.scaled(q, call.scale), *others), again)

    if call.platform == "cuda":
        return cuda(*operands)

    def xla(*operands: jax.Array) -> Arrays:
        return plain.forward(call.scale, operands)

    out, after = _on_platform(call, operands, cpu, lambda *x: cuda(*x)[:2], xla)
    return out, after, operands[4]


def backward(call: Call, operands: Arrays, again: Again) -> Arrays:
    """Returns the gradients of q, k, v, log decays and of the state before the first token.

    ``operands`` are q, k, v, log decays, states, dout and the gradient of the state after the last
    token.
    """

    def cpu(*operands: jax.Array) -> Arrays:
        results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[:5]]
        return _call("backward", operands, results, call.scale)

    def cuda(q: jax.Array, *others: jax.Array) -> Arrays:
        scaled = (gpu.scaled(q, call.scale), *others)
        dq, *gradients = gpu.backward(call.has_documents, scaled, again)
        return gpu.scaled(dq, call.scale), *gradients

    def xla(*operands: jax.Array) -> Arrays:
        return plain.backward(call.scale, operands)

    return _on_platform(call, operands, cpu, cuda, xla)


def _on_platform(
    call: Call,
    operands: Arrays,
    cpu: Callable[..., Result],
    cuda: Callable[..., Result],
    xla: Callable[..., Result],
) -> Result:
    """Returns the results of the call for a platform, or for the platform that lowering finds."""
    if call.platform is not None:
        return {"cpu": cpu, "cuda": cuda, "xla": xla}[call.platform](*operands)
    of_gpus = xla if _confirmed.refuted("linear_attention", None) else cuda
    # Without a default, lowering for any other platform is an error.
    found: Result = lax.platform_dependent(*operands, cpu=cpu, cuda=of_gpus)
    return found


def _state_like(k: jax.Array, v: jax.Array, logs: Logs) -> jax.ShapeDtypeStruct:
    shape = (k.shape[0], logs.shape[2], k.shape[3], v.shape[3])
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _call(
    name: str,
    operands: Arrays,
    results: list[jax.ShapeDtypeStruct],
    scale: float,
    label: str = "",
    **attributes: np.bool_,
) -> Arrays:
    given = {"scale": np.float32(scale), **attributes}
    outputs = _ffi.call(_ffi.LINEAR[name], results, operands, given, label=label)
    return vary_like(operands[0], outputs)
