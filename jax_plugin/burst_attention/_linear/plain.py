"""Recurrences of one device's tokens in plain JAX, token after token, for any platform::

    S_t = α_t ∘ S_(t−1) + k_t u_tᵀ        out_t = scale · q_tᵀ S_t

α is the decay of a head, or of each row of S. u_t is v_t in linear attention. In the delta rule it
is β_t (v_t − (α_t ∘ S_(t−1))ᵀ k_t): the part of v_t that k_t does not find in the state.

It is slow. GPUs take it where they have no kernels, and where their kernels were found wrong.
Backward, it keeps one state for every `CHUNK` tokens and computes all other states again.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from burst_attention._linear.states import Betas, Logs, Operands, State, identity
from burst_attention._mesh import vary_like
from burst_attention._types import Arrays

Carry = TypeVar("Carry")

CHUNK = 64
"""Tokens whose states the backward pass computes again from the state before them."""
EXACT = lax.Precision.HIGHEST


def advance(
    state: State,
    key: Float32[Array, "batch heads k_dim"],
    value: Float32[Array, "batch heads v_dim"],
    log: Float32[Array, "batch heads"] | Float32[Array, "batch heads k_dim"],
    beta: Float32[Array, "batch heads"] | None = None,
) -> State:
    """Returns the state after a token: of the delta rule if there is a ``beta``."""
    state = _faded(state, log)
    if beta is not None:
        known = jnp.einsum("bhk,bhkv->bhv", key, state, precision=EXACT)
        value = beta[..., None] * (value - known)
    return state + _outer(key, value)


def left(k: jax.Array, v: jax.Array, logs: Logs, *, back: bool = False) -> State:
    """Returns the state that tokens leave, from zeros; see `calls.left`."""

    def before(state: State, token: Arrays) -> tuple[State, None]:
        return advance(state, *token), None

    def after(state: State, token: Arrays) -> tuple[State, None]:
        k, v, log = token
        return _faded(state + _outer(k, v), log), None

    tokens = _by_heads(logs, None, k, v)
    return _over_tokens(after if back else before, _zeros(k, v, logs), tokens, reverse=back)[0]


def delta_left(k: jax.Array, v: jax.Array, logs: Logs, beta: Betas) -> State:
    """Returns [A | M] of the tokens of the delta rule, which turn a state S into A S + M."""

    def step(columns: State, token: Arrays) -> tuple[State, None]:
        return advance(columns, *token), None

    # The columns of A begin with those of the identity and meet values of 0.
    k_dim = k.shape[3]
    values = jnp.pad(v, [(0, 0), (0, 0), (0, 0), (k_dim, 0)])
    first = identity(_zeros(k, values, logs))
    return _over_tokens(step, first, _by_heads(logs, beta, k, values))[0]


def delta_grad_left(q: jax.Array, k: jax.Array, dout: jax.Array, logs: Logs, beta: Betas) -> State:
    """Returns the gradient of the state before tokens of the delta rule, from that of out alone."""

    def step(d: State, token: Arrays) -> tuple[State, None]:
        q, k, dout, log, beta = token
        d = d + _outer(q, dout)
        read = jnp.einsum("bhk,bhkv->bhv", k, d, precision=EXACT)
        return _faded(d - _outer(beta[..., None] * k, read), log), None

    tokens = _by_heads(logs, beta, q, k, dout)
    return _over_tokens(step, _zeros(q, dout, logs), tokens, reverse=True)[0]


def forward(scale: float, operands: Operands) -> tuple[jax.Array, State]:
    """Returns outputs in q's dtype and the state after the last token; see `calls.forward`."""
    q, k, v, logs, first, beta = operands

    def step(state: State, token: Arrays) -> tuple[State, jax.Array]:
        query, *others = token
        state = advance(state, *others)
        return state, scale * jnp.einsum("bhk,bhkv->bhv", query, state, precision=EXACT)

    last, out = _over_tokens(step, first, _by_heads(logs, beta, q, k, v))
    assert out is not None
    return jnp.moveaxis(out, 0, 1).astype(q.dtype), last


def backward(scale: float, operands: Operands, dout: jax.Array, dlast: State) -> Operands:
    """Returns the gradients of the operands."""
    gradients: Operands = jax.vjp(partial(forward, scale), operands)[1]((dout, dlast))[0]
    return gradients


def _zeros(k: jax.Array, v: jax.Array, logs: Logs) -> State:
    zeros = jnp.zeros((k.shape[0], logs.shape[2], k.shape[3], v.shape[3]), jnp.float32)
    return vary_like(k, zeros)


def _by_heads(logs: Logs, beta: Betas | None, *rows: jax.Array) -> Arrays:
    """Returns rows, log decays and beta: float32, tokens first, and each with all heads."""
    per_head = (logs,) if beta is None else (logs, beta)
    exact = (x.astype(jnp.float32) for x in (*rows, *per_head))
    # The gradients of heads that share a head are summed before they are rounded.
    wide = (jnp.repeat(x, logs.shape[2] // x.shape[2], axis=2) for x in exact)
    return tuple(jnp.moveaxis(x, 1, 0) for x in wide)


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
    decay = jnp.exp(log).reshape(*log.shape, *(1,) * (state.ndim - log.ndim))
    return jnp.where(decay == 0, 0, decay * jnp.where(decay == 0, 0, state))


def _outer(k: jax.Array, v: jax.Array) -> State:
    return k[..., :, None] * v[..., None, :]
