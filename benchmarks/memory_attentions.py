"""The attentions whose memory `memory.py` compares."""

from functools import partial
from typing import Any

import burst_attention as ba
import jax
import jax.numpy as jnp
from jax import lax
from memory_step import SHARDS, Attention

Array = jax.Array


def ours(axis_name: str = "context", **options: Any) -> Any:
    """Returns `burst_attention.attention` with options."""
    return partial(ba.attention, axis_name=axis_name, is_causal=True, **options)


def ring_self_attention(q: Array, k: Array, v: Array) -> Array:
    """Computes attention as Ring Self-Attention does (arXiv:2105.13120), from contiguous shards.

    Keys go round a ring until a device has the scores of its queries for all keys. After the
    softmax of whole rows, values go round. Scores are kept in query's dtype for the backward pass::

        p = softmax(scale · q kᵀ)        out = Σ over shards of p v
    """
    count, me = lax.axis_size("context"), lax.axis_index("context")
    batch, rows, _, head_dim = q.shape
    grouped = q.reshape(batch, rows, k.shape[2], -1, head_dim)
    following = [(i, (i + 1) % count) for i in range(count)]
    local = jnp.arange(rows)

    def send_on(x: Array) -> Array:
        return lax.ppermute(x, "context", following)

    def score(k: Array, hop: Array) -> tuple[Array, Array]:
        first = (me - hop) % count * rows
        is_seen = first + local <= me * rows + local[:, None]
        s = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, k) * head_dim**-0.5
        return send_on(k), jnp.where(is_seen, s, -jnp.inf)

    def weigh(state: tuple[Array, Array], p: Array) -> tuple[tuple[Array, Array], None]:
        v, out = state
        added = jnp.einsum("bhgqk,bkhd->bqhgd", p, v, preferred_element_type=jnp.float32)
        return (send_on(v), out + added), None

    _, scores = lax.scan(score, k, jnp.arange(count))
    # Scores have a first axis for shards, in the order in which they came.
    p = jax.nn.softmax(scores.astype(jnp.float32), axis=(0, -1)).astype(q.dtype)
    zeros = lax.pcast(jnp.zeros(grouped.shape, jnp.float32), *SHARDS[1:], to="varying")
    (_, out), _ = lax.scan(weigh, (v, zeros), p)
    return out.reshape(q.shape).astype(q.dtype)


RING = ours(schedule="ring", layout="zigzag")
PLAIN = ours(implementation="xla", layout="zigzag")
GATHERED = ours(schedule="all_gather", layout="zigzag")
JAX_NN = partial(jax.nn.dot_product_attention, is_causal=True)
CUDNN = "jax.nn, cuDNN"
ATTENTIONS = {
    "ring": Attention(RING, "zigzag"),
    "ring, save_attention": Attention(RING, "zigzag", ba.save_attention),
    "ring, offload_attention": Attention(RING, "zigzag", ba.offload_attention),
    "plain-JAX ring": Attention(PLAIN, "zigzag"),
    "all_gather": Attention(GATHERED, "zigzag"),
    "ulysses": Attention(ours(schedule="ulysses")),
    "Megatron-style heads": Attention(ours("alone"), has_sharded_heads=True),
    "Megatron-style heads, whole rows": Attention(
        ours("alone"), has_sharded_heads=True, has_whole_rows=True
    ),
    "jax.nn, XLA": Attention(JAX_NN, is_global=True),
    CUDNN: Attention(partial(JAX_NN, implementation="cudnn"), is_global=True),
    "Ring Self-Attention": Attention(ring_self_attention),
}
"""By name. Layers whose policy is not in the name keep nothing but their rows."""
