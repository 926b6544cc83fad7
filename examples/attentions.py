"""The kinds of attention to train with, over sharded sequences and in plain JAX on one device."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import burst_attention as ba
import jax
import jax.numpy as jnp
from transformer import Attend

AXIS = "context"
Layout = Literal["contiguous", "zigzag", "striped"]


@dataclass(frozen=True)
class Attention:
    """One kind of attention, with the defaults of the command line."""

    sharded: Callable[[Layout], Attend]
    """Returns the attention of a device's shard, inside `jax.shard_map`."""
    plain: Attend
    """The attention of the whole sequence in its natural order."""
    gated: bool
    """Whether the attention takes log decays."""
    layout: Layout
    length: int
    steps: int
    learning_rate: float
    prefix: str
    """Prefix of the names of files that a run writes."""
    title: str
    """Suffix of the title of the curve."""


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


ATTENTIONS = {
    "softmax": Attention(
        sharded=sharded_softmax,
        plain=plain_softmax,
        gated=False,
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
        gated=True,
        layout="contiguous",
        length=131_072,
        steps=30,
        learning_rate=1e-2,
        prefix="linear-",
        title=", linear attention",
    ),
}
