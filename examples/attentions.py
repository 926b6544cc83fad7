"""The kinds of attention to train with, over sharded sequences and in plain JAX on one device."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import burst_attention as ba
import jax
import jax.numpy as jnp
from transformer import Attend, rotate

AXIS = "context"
SEGMENT = 1024
"""Tokens of a segment of Infini-attention."""
Layout = Literal["contiguous", "zigzag", "striped"]


@dataclass(frozen=True)
class Attention:
    """One kind of attention, with the defaults of the command line."""

    sharded: Callable[[Layout], Attend]
    """Returns the attention of a device's shard, inside `jax.shard_map`."""
    plain: Attend
    """The attention of the whole sequence in its natural order."""
    gates: tuple[str, ...]
    """What the attention takes besides query, key and value: names of the model's gates."""
    layout: Layout
    length: int
    steps: int
    learning_rate: float
    prefix: str
    """Prefix of the names of files that a run writes."""
    title: str
    """Suffix of the title of the curve."""
    rotary: bool = True
    """Whether the model rotates queries and keys before the attention."""


def sharded_softmax(layout: Layout) -> Attend:
    """Returns an attention in which every token attends to all earlier tokens of all devices."""
    return partial(ba.attention, axis_name=AXIS, is_causal=True, layout=layout)


def plain_softmax(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Computes `jax.nn.dot_product_attention` for 1,024 queries at a time, to save memory."""
    attend = jax.checkpoint(jax.nn.dot_product_attention)
    chunks = []
    for start in range(0, query.shape[1], 1024):
        rows = query[:, start : start + 1024]
        end = start + rows.shape[1]
        mask = jnp.arange(start, end)[:, None] >= jnp.arange(end)
        chunks.append(attend(rows, key[:, :end], value[:, :end], mask=mask[None, None]))
    return jnp.concatenate(chunks, axis=1)


def normalised(out: jax.Array) -> jax.Array:
    """Returns out / sqrt(1 + mean square of the head's out), since no softmax limits its size.

    The 1 protects the few tokens whose terms nearly cancel. Without it, the small divisor would
    make their rounding errors and gradients larger than those of all other tokens.
    """
    x = out.astype(jnp.float32)
    return (x * jax.lax.rsqrt(1 + jnp.mean(x * x, axis=-1, keepdims=True))).astype(out.dtype)


def sharded_linear(layout: Layout) -> Attend:
    """Returns an attention whose decaying state travels through the tokens of all devices."""

    def attend(
        query: jax.Array, key: jax.Array, value: jax.Array, log_decay: jax.Array
    ) -> jax.Array:
        attend = partial(ba.linear_attention, axis_name=AXIS, layout=layout)
        out: Any = attend(query, key, value, log_decay=log_decay)
        return normalised(out)

    return attend


def plain_linear(
    query: jax.Array, key: jax.Array, value: jax.Array, log_decay: jax.Array
) -> jax.Array:
    """Computes token by token on one device, as a decoder does; keeps a state of each token."""

    @jax.checkpoint
    def step(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, logs = token
        out, state = ba.linear_attention_step(q, k, v, state, log_decay=logs)
        return state, out

    tokens = tuple(x.swapaxes(0, 1) for x in (query, key, value, log_decay))
    batch, _, heads, k_dim = query.shape
    _, out = jax.lax.scan(step, jnp.zeros((batch, heads, k_dim, value.shape[3])), tokens)
    return normalised(out.swapaxes(0, 1))


def convolved(
    x: jax.Array, taps: jax.Array, shift: Callable[[jax.Array, int], jax.Array]
) -> jax.Array:
    """Returns a short convolution of each channel, silu(Σ_i taps_i ∘ x[t − i])."""
    past = [shift(x, -distance) for distance in range(taps.shape[0])]
    return jax.nn.silu(sum(tap * token for tap, token in zip(taps, past, strict=True)))


def unit(x: jax.Array) -> jax.Array:
    """Returns rows of unit norm."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def sharded_delta(layout: Layout) -> Attend:
    """Returns a gated delta rule: tokens write into the state what their keys do not find there."""

    def attend(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        log_decay: jax.Array,
        beta: jax.Array,
        taps: list[jax.Array],
    ) -> jax.Array:
        shift = partial(ba.shift, axis_name=AXIS)
        query, key, value = map(partial(convolved, shift=shift), (query, key, value), taps)
        rule = partial(ba.delta_attention, axis_name=AXIS, layout=layout)
        out: Any = rule(unit(query), unit(key), value, beta, log_decay)
        return normalised(out)

    return attend


def plain_delta(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    taps: list[jax.Array],
) -> jax.Array:
    """Computes token by token on one device, as a decoder does; keeps a state of each token."""

    def shift(x: jax.Array, offset: int) -> jax.Array:
        return jnp.pad(x, [(0, 0), (-offset, 0), (0, 0), (0, 0)])[:, : x.shape[1]]

    @jax.checkpoint
    def step(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, logs, written = token
        out, state = ba.delta_attention_step(q, k, v, state, written, logs)
        return state, out

    query, key, value = map(partial(convolved, shift=shift), (query, key, value), taps)
    rows = (unit(query), unit(key), value, log_decay, beta)
    batch, _, heads, k_dim = query.shape
    state = jnp.zeros((batch, heads, k_dim, value.shape[3]))
    _, out = jax.lax.scan(step, state, tuple(x.swapaxes(0, 1) for x in rows))
    return normalised(out.swapaxes(0, 1))


def sharded_infini(layout: Layout) -> Attend:
    """Returns Infini-attention: softmax within segments, and a memory of all segments before."""

    def attend(
        query: jax.Array, key: jax.Array, value: jax.Array, positions: jax.Array, mix: jax.Array
    ) -> jax.Array:
        out: jax.Array
        # The memory takes queries and keys that are not rotated.
        out, _ = ba.infini_attention(
            *(query, key, value, mix),
            axis_name=AXIS,
            segment_size=SEGMENT,
            local_query=rotate(query, positions),
            local_key=rotate(key, positions),
        )
        return out

    return attend


def plain_infini(
    query: jax.Array, key: jax.Array, value: jax.Array, positions: jax.Array, mix: jax.Array
) -> jax.Array:
    """Computes segment after segment on one device."""
    (batch, _, heads, dim), kv_heads = query.shape, key.shape[2]
    memory = jnp.zeros((batch, kv_heads, dim, dim)), jnp.zeros((batch, kv_heads, dim))
    rows = (query, key, value, rotate(query, positions), rotate(key, positions))
    by_segment = [x.reshape(batch, -1, SEGMENT, *x.shape[2:]).swapaxes(0, 1) for x in rows]
    weight = jax.nn.sigmoid(mix)[:, None]

    @jax.checkpoint
    def step(
        memory: tuple[jax.Array, jax.Array], segment: list[jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        q, k, v, local_q, local_k = segment
        local = jax.nn.dot_product_attention(local_q, local_k, v, is_causal=True)
        m, z = (jnp.repeat(x, heads // kv_heads, axis=1) for x in memory)
        features, keys = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
        found = jnp.einsum("bshk,bhkv->bshv", features, m)
        known = jnp.einsum("bshk,bhk->bsh", features, z)[..., None]
        # The first segment has no memory.
        found /= jnp.where(known == 0, 1, known)
        added = jnp.einsum("bshk,bshv->bhkv", keys, v), keys.sum(1)
        memory = memory[0] + added[0], memory[1] + added[1]
        return memory, weight * found + (1 - weight) * local

    _, out = jax.lax.scan(step, memory, by_segment)
    return out.swapaxes(0, 1).reshape(query.shape)


ATTENTIONS = {
    "softmax": Attention(
        sharded=sharded_softmax,
        plain=plain_softmax,
        gates=(),
        layout="zigzag",
        length=8_192,
        steps=60,
        learning_rate=4e-3,
        prefix="",
        title="",
    ),
    "linear": Attention(
        sharded=sharded_linear,
        plain=plain_linear,
        gates=("decay",),
        layout="contiguous",
        length=131_072,
        steps=30,
        learning_rate=1e-2,
        prefix="linear-",
        title=", linear attention",
    ),
    "delta": Attention(
        sharded=sharded_delta,
        plain=plain_delta,
        gates=("decay", "beta", "taps"),
        layout="contiguous",
        length=65_536,
        steps=30,
        learning_rate=1e-2,
        prefix="delta-",
        title=", gated delta rule",
        rotary=False,
    ),
    "infini": Attention(
        sharded=sharded_infini,
        plain=plain_infini,
        gates=("positions", "mix"),
        layout="contiguous",
        length=65_536,
        steps=30,
        learning_rate=1e-2,
        prefix="infini-",
        title=", Infini-attention",
        rotary=False,
    ),
}
