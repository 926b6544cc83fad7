"""Linear attention of one device's tokens in plain JAX, token after token, for any platform::

    S_t = λ_t S_(t−1) + k_t v_tᵀ        out_t = scale · q_tᵀ S_t

It is slow. GPUs take it where their kernels were found wrong. Backward, it keeps a state for every
`CHUNK` tokens and computes the others again.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from burst_attention._linear.states import Logs, State
from burst_attention._mesh import vary_like
from burst_attention._types import Arrays

Carry = TypeVar("Carry")

CHUNK = 64
"""Tokens whose states the backward pass computes again from the state before them."""


def left(k: jax.Array, v: jax.Array, logs: Logs, *, back: bool = False) -> State:
    """Returns the state that tokens leave, from zeros; see `calls.left`."""

    def before(state: State, token: Arrays) -> tuple[State, None]:
        k, v, log = token
        return _faded(state, log) + _outer(k, v), None

    def after(state: State, token: Arrays) -> tuple[State, None]:
        k, v, log = token
        return _faded(state + _outer(k, v), log), None

    zeros = jnp.zeros((k.shape[0], logs.shape[2], k.shape[3], v.shape[3]), jnp.float32)
    tokens = _by_heads(logs, k, v)
    return _over_tokens(after if back else before, vary_like(k, zeros), tokens, reverse=back)[0]


def forward(scale: float, operands: Arrays) -> tuple[jax.Array, State]:
    """Returns outputs in q's dtype and the state after the last token; see `calls.forward`."""
    q, k, v, logs, first = operands

    def step(state: State, token: Arrays) -> tuple[State, jax.Array]:
        q, k, v, log = token
        state = _faded(state, log) + _outer(k, v)
        return state, scale * jnp.einsum("bhd,bhde->bhe", q, state)

    last, out = _over_tokens(step, first, _by_heads(logs, q, k, v))
    assert out is not None
    return jnp.moveaxis(out, 0, 1).astype(q.dtype), last


def backward(scale: float, operands: Arrays) -> Arrays:
    """Returns the gradients of q, k, v, log decays and the state before the first token."""
    *inputs, dout, dlast = operands
    pullback = jax.vjp(lambda *x: forward(scale, x), *inputs)[1]
    gradients: Arrays = pullback((dout, dlast))
    return gradients


def _by_heads(logs: Logs, *arrays: jax.Array) -> Arrays:
    """Returns arrays of tokens and heads, float32, tokens first, and the log decays."""
    wide = (jnp.repeat(x, logs.shape[2] // x.shape[2], axis=2) for x in arrays)
    return tuple(jnp.moveaxis(x.astype(jnp.float32), 1, 0) for x in (*wide, logs))


def _over_tokens(
    step: Callable[[Carry, Arrays], tuple[Carry, jax.Array | None]],
    first: Carry,
    tokens: Arrays,
    *,
    reverse: bool = False,
) -> tuple[Carry, jax.Array | None]:
    """Scans tokens, in chunks so that the backward pass keeps few states."""
    count = tokens[0].shape[0]
    whole = count - count % CHUNK
    scan = partial(lax.scan, step, reverse=reverse)
    chunks = tuple(x[:whole].reshape(-1, CHUNK, *x.shape[1:]) for x in tokens)
    rest = tuple(x[whole:] for x in tokens)

    def of_chunks(state: Carry) -> tuple[Carry, jax.Array | None]:
        return lax.scan(jax.checkpoint(lambda *x: scan(*x)), state, chunks, reverse=reverse)

    if reverse:
        state, late = scan(first, rest)
        state, early = of_chunks(state)
    else:
        state, early = of_chunks(first)
        state, late = scan(state, rest)
    if early is None or late is None:
        return state, None
    return state, jnp.concatenate([early.reshape(whole, *early.shape[2:]), late])


def _faded(state: State, log: jax.Array) -> State:
    """Returns the state times a decay. A decay of 0 passes nothing, infinities neither."""
    decay = jnp.exp(log)[..., None, None]
    return jnp.where(decay == 0, 0, decay * jnp.where(decay == 0, 0, state))


def _outer(k: jax.Array, v: jax.Array) -> State:
    return k[..., :, None] * v[..., None, :]
