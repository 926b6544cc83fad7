"""Recurrences of one device's tokens: custom calls on CPU devices, kernels on GPUs, plain JAX.

On GPUs `left` and `grad_left` return intermediate states that `forward` and `backward` use again.
Where only lowering will tell the platform, there are none, and the later call computes them again.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burst_attention import _confirmed, _ffi
from burst_attention._linear import gpu, gpu_delta, plain
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
Again: TypeAlias = jax.Array | gpu_delta.Again | None
"""What `left` and `grad_left` leave for a later call."""


def left(
    call: Call, k: jax.Array, v: jax.Array, logs: Logs, beta: Betas | None
) -> tuple[Transfer, State, Again]:
    """Returns what tokens do to a state, and the state that they leave of a state of zeros."""
    if beta is None:
        return total(logs), *_sum(call, k, v, logs, back=False)
    k_dim = k.shape[3]

    def cpu(*operands: jax.Array) -> tuple[jax.Array, Again]:
        result = _state_like(k_dim, k_dim + v.shape[3], logs)
        return _call(_ffi.DELTA["state"], operands, [result])[0], None

    def xla(*operands: jax.Array) -> tuple[jax.Array, Again]:
        return plain.delta_left(*operands), None

    cuda = partial(gpu_delta.left, call.has_documents)
    columns, again = _kept(call, (k, v, logs, beta), cpu, cuda, xla)
    return ended(Matrix(columns[..., :k_dim]), logs), columns[..., k_dim:], again


def grad_left(call: Call, operands: Operands, dout: jax.Array) -> tuple[State, Again]:
    """Returns the gradient of the state before tokens, from that of their outputs alone."""
    q, k, _, logs, _, beta = operands
    if beta is None:
        return _sum(call, q, dout, logs, back=True)

    def cpu(*operands: jax.Array) -> tuple[State, Again]:
        result = _state_like(k.shape[3], dout.shape[3], logs)
        return _call(_ffi.DELTA["grad_state"], operands, [result], call.scale)[0], None

    def cuda(q: jax.Array, *others: jax.Array) -> tuple[State, Again]:
        return gpu_delta.grad_left(call.has_documents, gpu.scaled(q, call.scale), *others)

    def xla(q: jax.Array, *others: jax.Array) -> tuple[State, Again]:
        return plain.delta_grad_left(gpu.scaled(q, call.scale), *others), None

    return _kept(call, (q, k, dout, logs, beta), cpu, cuda, xla)


def _sum(call: Call, k: jax.Array, v: jax.Array, logs: Logs, *, back: bool) -> tuple[State, Again]:
    """Returns the sum over tokens that linear attention leaves::

        Σ_t k_t v_tᵀ e^(Σ_(s>t) log λ_s);   back: Σ_t k_t v_tᵀ e^(Σ_(s≤t) log λ_s)

    With ``back`` k stands for the queries, which the scale multiplies.
    """
    scale = call.scale if back else 1.0

    def cpu(*operands: jax.Array) -> tuple[State, Again]:
        result = _state_like(k.shape[3], v.shape[3], logs)
        label = "backward" if back else "forward"
        target, given = _ffi.LINEAR["state"], {"backward": np.bool_(back)}
        return _call(target, operands, [result], scale, label, **given)[0], None

    def cuda(k: jax.Array, v: jax.Array, logs: Logs) -> tuple[State, Again]:
        return gpu.left(call.has_documents, gpu.scaled(k, scale), v, logs, back=back)

    def xla(k: jax.Array, v: jax.Array, logs: Logs) -> tuple[State, Again]:
        return plain.left(gpu.scaled(k, scale), v, logs, back=back), None

    return _kept(call, (k, v, logs), cpu, cuda, xla)


def forward(call: Call, operands: Operands, again: Again) -> tuple[jax.Array, State, jax.Array]:
    """Returns outputs in q's dtype, the state after the last token, and states for `backward`."""
    q, k, v, logs, first, beta = operands
    has_beta = beta is not None

    def cpu(*given: jax.Array) -> Arrays:
        target = (_ffi.DELTA if has_beta else _ffi.LINEAR)["forward"]
        out = jax.ShapeDtypeStruct((*logs.shape[:3], v.shape[3]), q.dtype)
        state = _state_like(k.shape[3], v.shape[3], logs)
        return (*_call(target, given, [out, state], call.scale), given[-1])

    def cuda(q: jax.Array, *others: jax.Array) -> Arrays:
        kernels = gpu_delta if has_beta else gpu
        return kernels.forward(call.has_documents, (gpu.scaled(q, call.scale), *others), again)

    def xla(*given: jax.Array) -> Arrays:
        return (*plain.forward(call.scale, _operands(given)), given[-1])

    out, after, states = _kept(call, _given(operands), cpu, cuda, xla)
    # Where only lowering tells the platform, every platform keeps the state before the first token.
    return out, after, first if states is None else states


def backward(
    call: Call, operands: Operands, dout: jax.Array, dafter: State, again: Again
) -> Operands:
    """Returns the gradients of the operands, whose ``first`` are the states of `forward`.

    ``dafter`` is the gradient of the state after the last token.
    """
    has_beta = operands.beta is not None

    def cpu(*given: jax.Array) -> Arrays:
        target = (_ffi.DELTA if has_beta else _ffi.LINEAR)["backward"]
        results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given[:-2]]
        return _call(target, given, results, call.scale)

    def cuda(q: jax.Array, *others: jax.Array) -> Arrays:
        kernels, scaled = gpu_delta if has_beta else gpu, gpu.scaled(q, call.scale)
        dq, *gradients = kernels.backward(call.has_documents, (scaled, *others), again)
        return gpu.scaled(dq, call.scale), *gradients

    def xla(*given: jax.Array) -> Arrays:
        return _given(plain.backward(call.scale, _operands(given[:-2]), *given[-2:]))

    given = (*_given(operands), dout, dafter)
    return _operands(_on_platform(call, given, cpu, cuda, xla))


def _given(operands: Operands) -> Arrays:
    """Returns operands in the order of the custom calls."""
    q, k, v, logs, first, beta = operands
    return (q, k, v, logs, *(() if beta is None else (beta,)), first)


def _operands(given: Arrays) -> Operands:
    """Returns the operands of `_given`."""
    q, k, v, logs, *beta, first = given
    return Operands(q, k, v, logs, first, *(beta or (None,)))


def _kept(
    call: Call,
    operands: Arrays,
    cpu: Callable[..., Result],
    cuda: Callable[..., Result],
    xla: Callable[..., Result],
) -> Result:
    """Returns the results of `_on_platform`, the last of which serves a later call.

    Platforms differ in it, so it is None where only lowering will tell the platform.
    """

    def without(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: (*function(*given)[:-1], None)

    if call.platform is None:
        cpu, cuda, xla = map(without, (cpu, cuda, xla))
    return _on_platform(call, operands, cpu, cuda, xla)


def _on_platform(
    call: Call,
    operands: Arrays,
    cpu: Callable[..., Result],
    cuda: Callable[..., Result],
    xla: Callable[..., Result],
) -> Result:
    """Returns the results of the call for a platform, or for the platform that lowering finds."""
    of_gpus = cuda if call.has_kernels else xla
    if call.platform is not None:
        return {"cpu": cpu, "cuda": of_gpus, "xla": xla}[call.platform](*operands)
    if _confirmed.refuted(call.family, None):
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
