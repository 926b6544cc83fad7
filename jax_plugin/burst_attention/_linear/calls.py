"""Recurrences of one device's tokens: custom calls on CPU devices, kernels on GPUs, plain JAX.

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
from burst_attention._linear.states import (
    Betas,
    Call,
    Logs,
    Matrix,
    Operands,
    State,
    Transfer,
    ended,
    total,
)
from burst_attention._mesh import vary_like
from burst_attention._types import Arrays

Result = TypeVar("Result")
Again: TypeAlias = jax.Array | None
"""Intermediate states of `left` for a later call."""


def left(
    call: Call, k: jax.Array, v: jax.Array, logs: Logs, beta: Betas | None
) -> tuple[Transfer, State, Again]:
    """Returns what tokens do to a state, and the state that they leave of a state of zeros."""
    if beta is not None:
        k_dim = k.shape[3]

        def cpu(*operands: jax.Array) -> jax.Array:
            result = _state_like(k_dim, k_dim + v.shape[3], logs)
            return _call(_ffi.DELTA["state"], operands, [result])[0]

        columns = _on_platform(call, (k, v, logs, beta), cpu, None, plain.delta_left)
        return ended(Matrix(columns[..., :k_dim]), logs), columns[..., k_dim:], None
    return total(logs), *_sum(call, k, v, logs, back=False)


def grad_left(call: Call, operands: Operands, dout: jax.Array) -> tuple[State, Again]:
    """Returns the gradient of the state before tokens, from that of their outputs alone."""
    q, k, _, logs, _, beta = operands
    if beta is None:
        return _sum(call, q, dout, logs, back=True)

    def cpu(*operands: jax.Array) -> jax.Array:
        result = _state_like(k.shape[3], dout.shape[3], logs)
        return _call(_ffi.DELTA["grad_state"], operands, [result], call.scale)[0]

    def xla(q: jax.Array, *others: jax.Array) -> State:
        return plain.delta_grad_left(gpu.scaled(q, call.scale), *others)

    return _on_platform(call, (q, k, dout, logs, beta), cpu, None, xla), None


def _sum(call: Call, k: jax.Array, v: jax.Array, logs: Logs, *, back: bool) -> tuple[State, Again]:
    """Returns the sum over tokens that linear attention leaves::

        Σ_t k_t v_tᵀ e^(Σ_(s>t) log λ_s);   back: Σ_t k_t v_tᵀ e^(Σ_(s≤t) log λ_s)

    With ``back`` k stands for the queries, which the scale multiplies.
    """
    scale = call.scale if back else 1.0

    def cpu(*operands: jax.Array) -> jax.Array:
        result = _state_like(k.shape[3], v.shape[3], logs)
        label = "backward" if back else "forward"
        target, given = _ffi.LINEAR["state"], {"backward": np.bool_(back)}
        return _call(target, operands, [result], scale, label, **given)[0]

    def cuda(k: jax.Array, v: jax.Array, logs: Logs) -> tuple[State, jax.Array]:
        return gpu.left(call.has_documents, gpu.scaled(k, scale), v, logs, back=back)

    if call.platform == "cuda" and has_kernels(logs, None):
        return cuda(k, v, logs)

    def xla(k: jax.Array, v: jax.Array, logs: Logs) -> State:
        return plain.left(gpu.scaled(k, scale), v, logs, back=back)

    of_gpus = (lambda *x: cuda(*x)[0]) if has_kernels(logs, None) else None
    return _on_platform(call, (k, v, logs), cpu, of_gpus, xla), None


def forward(call: Call, operands: Operands, again: Again) -> tuple[jax.Array, State, jax.Array]:
    """Returns outputs in q's dtype, the state after the last token, and states for `backward`."""
    q, k, v, logs, first, beta = operands
    has_beta = beta is not None

    def cpu(*given: jax.Array) -> Arrays:
        target = (_ffi.DELTA if has_beta else _ffi.LINEAR)["forward"]
        out = jax.ShapeDtypeStruct((*logs.shape[:3], v.shape[3]), q.dtype)
        state = _state_like(k.shape[3], v.shape[3], logs)
        return _call(target, given, [out, state], call.scale)

    def cuda(q: jax.Array, *others: jax.Array) -> tuple[jax.Array, State, jax.Array]:
        return gpu.forward(call.has_documents, (gpu.scaled(q, call.scale), *others), again)

    def xla(*given: jax.Array) -> Arrays:
        return plain.forward(call.scale, _operands(given))

    if call.platform == "cuda" and has_kernels(logs, beta):
        return cuda(q, k, v, logs, first)
    of_gpus = (lambda *x: cuda(*x)[:2]) if has_kernels(logs, beta) else None
    out, after = _on_platform(call, _given(operands), cpu, of_gpus, xla)
    return out, after, first


def backward(
    call: Call, operands: Operands, dout: jax.Array, dafter: State, again: Again
) -> Operands:
    """Returns the gradients of the operands; those of ``first`` are states of `forward`.

    ``dafter`` is the gradient of the state after the last token.
    """
    has_beta = operands.beta is not None

    def cpu(*given: jax.Array) -> Arrays:
        target = (_ffi.DELTA if has_beta else _ffi.LINEAR)["backward"]
        results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given[:-2]]
        return _call(target, given, results, call.scale)

    def cuda(q: jax.Array, *others: jax.Array) -> Arrays:
        scaled = (gpu.scaled(q, call.scale), *others)
        dq, *gradients = gpu.backward(call.has_documents, scaled, again)
        return gpu.scaled(dq, call.scale), *gradients

    def xla(*given: jax.Array) -> Arrays:
        return _given(plain.backward(call.scale, _operands(given[:-2]), *given[-2:]))

    of_gpus = cuda if has_kernels(operands.logs, operands.beta) else None
    given = (*_given(operands), dout, dafter)
    return _operands(_on_platform(call, given, cpu, of_gpus, xla))


def has_kernels(logs: Logs, beta: Betas | None) -> bool:
    """Whether GPUs have kernels of a recurrence. Plain JAX computes all others there."""
    return beta is None and logs.ndim == 3


def _given(operands: Operands) -> Arrays:
    """Returns operands in the order of the custom calls."""
    q, k, v, logs, first, beta = operands
    return (q, k, v, logs, *(() if beta is None else (beta,)), first)


def _operands(given: Arrays) -> Operands:
    """Returns the operands of `_given`."""
    q, k, v, logs, *beta, first = given
    return Operands(q, k, v, logs, first, *(beta or (None,)))


def _on_platform(
    call: Call,
    operands: Arrays,
    cpu: Callable[..., Result],
    cuda: Callable[..., Result] | None,
    xla: Callable[..., Result],
) -> Result:
    """Returns the results of the call for a platform, or for the platform that lowering finds."""
    of_gpus = cuda or xla
    if call.platform is not None:
        return {"cpu": cpu, "cuda": of_gpus, "xla": xla}[call.platform](*operands)
    if _confirmed.refuted("linear_attention", None):
        of_gpus = xla
    found: Result = lax.platform_dependent(*operands, cpu=cpu, cuda=of_gpus, default=xla)
    return found


def _state_like(k_dim: int, v_dim: int, logs: Logs) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((logs.shape[0], logs.shape[2], k_dim, v_dim), jnp.float32)


def _call(
    target: str,
    operands: Arrays,
    results: list[jax.ShapeDtypeStruct],
    scale: float | None = None,
    label: str = "",
    **attributes: np.bool_,
) -> Arrays:
    given: _ffi.Attributes = {} if scale is None else {"scale": np.float32(scale)}
    outputs = _ffi.call(target, results, operands, given | {**attributes}, label=label)
    return vary_like(operands[0], outputs)
