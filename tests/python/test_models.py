"""Blocks of real models, and training on packed documents, work with the ring as attention."""

from functools import partial

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from jax.sharding import PartitionSpec as P

pytestmark = pytest.mark.needs("products")

SIZE, LAYOUT = 4, "zigzag"
LIMIT = 2e-5
"""Largest relative difference of two programs that compute in float32."""


def close(found, expected):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(x - y) <= LIMIT * np.linalg.norm(y)


def ring_attention(**options):
    """Returns attention over four devices, of global arrays in the order of the sequence."""
    options = {"mesh": ring.line(SIZE), "spec": P(None, "context"), "layout": LAYOUT} | options

    def attend(*qkv):
        qkv = (ba.to_layout(x, SIZE, LAYOUT) for x in qkv)
        return ba.from_layout(ba.dot_product_attention(*qkv, **options), SIZE, LAYOUT)

    return attend


def rotated(x, positions):
    """Applies rotary embeddings; positions are ``[seq]`` or ``[batch, seq]``."""
    frequencies = 100.0 ** -(jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
    angles = positions[..., None, None] * frequencies
    even, odd = x[..., ::2], x[..., 1::2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)


DOCUMENTS = (18, 18, 18)
"""Tokens of each document. One length for all keeps a single program for one document."""
VOCABULARY, WIDTH = 11, 32


def losses(parameters, tokens, labels, positions, attend):
    """Returns each token's loss, by a one-layer transformer."""
    x = parameters["embed"][tokens]
    q, k, v = (
        jnp.einsum("bsd,dhe->bshe", x, parameters[name]) for name in ("query", "key", "value")
    )
    q, k = (rotated(y, positions) for y in (q, k))
    x = x + jnp.einsum("bshe,hed->bsd", attend(q, k, v), parameters["out"])
    logits = jnp.einsum("bsd,vd->bsv", x, parameters["embed"])
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)[..., 0]


def parameters():
    shapes = {"embed": (VOCABULARY, WIDTH), "query": (WIDTH, 4, 16), "key": (WIDTH, 2, 16)}
    shapes |= {"value": (WIDTH, 2, 16), "out": (4, 16, WIDTH)}
    arrays = ring.normal(1, *shapes.values())
    return {name: 0.2 * x for name, x in zip(shapes, arrays, strict=True)}


def packed(documents):
    """Returns documents as a data loader packs them: one padded sequence in the layout's order."""
    columns = {
        "tokens": ([x[:-1] for x in documents], 0),
        "labels": ([x[1:] for x in documents], 0),
        "positions": ([np.arange(len(x) - 1) for x in documents], 0),
        "ids": ([np.full(len(x) - 1, i, np.int32) for i, x in enumerate(documents)], -1),
    }
    padded = {
        name: ba.pad_sequence(np.concatenate(parts)[None], SIZE, LAYOUT, value=value)[0]
        for name, (parts, value) in columns.items()
    }
    return {name: ba.to_layout(x, SIZE, LAYOUT) for name, x in padded.items()}


def test_packed_documents_train_like_each_alone():
    """In one step, a packed sequence has the summed loss and gradients of its documents."""
    generator = np.random.default_rng(0)
    documents = [generator.integers(0, VOCABULARY, length) for length in DOCUMENTS]

    def local(parameters, batch):
        ids = batch.pop("ids")
        attend = partial(
            ba.attention, axis_name="context", is_causal=True, layout=LAYOUT, segment_ids=ids
        )
        found = losses(parameters, **batch, attend=attend)
        return jax.lax.psum(jnp.sum(jnp.where(ids >= 0, found, 0)), "context")

    step = jax.shard_map(
        local, mesh=ring.line(SIZE), in_specs=(P(), P(None, "context")), out_specs=P()
    )
    alone = partial(jax.nn.dot_product_attention, is_causal=True)

    @jax.jit
    @jax.value_and_grad
    def single(parameters, tokens, labels):
        positions = np.arange(tokens.shape[1])
        return jnp.sum(losses(parameters, tokens, labels, positions, alone))

    each = [single(parameters(), x[None, :-1], x[None, 1:]) for x in documents]
    found = jax.jit(jax.value_and_grad(step))(parameters(), packed(documents))
    close(found, jax.tree.map(lambda *x: np.sum(x, axis=0), *each))


def dense(q, k, v, mask, soft_cap=None, sinks=None, scale=None):
    """Computes attention in plain JAX, which can differentiate the whole block around it.

    Arrays are in the order of the sequence, ``mask`` is ``[q_len, kv_len]``.
    """
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (scale or q.shape[3] ** -0.5)
    s = soft_cap * jnp.tanh(s / soft_cap) if soft_cap else s
    s = jnp.where(mask, s, -jnp.inf)
    if sinks is not None:
        s = jnp.concatenate([s, jnp.broadcast_to(sinks[:, None, None], (*s.shape[:3], 1))], axis=3)
    p = jax.nn.softmax(s, axis=-1)[..., : k.shape[1]]
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


def band(length, left):
    """Returns a causal mask that reaches ``left`` positions back."""
    distance = np.arange(length)[:, None] - np.arange(length)
    return (distance >= 0) & (distance <= left)


def compare(block, reference, *inputs):
    """Checks that two functions have the same values and gradients of all inputs."""

    def run(function):
        (dout,) = ring.normal(9, jax.eval_shape(function, *inputs).shape)
        loss = jax.value_and_grad(lambda *x: jnp.sum(function(*x) * dout), range(len(inputs)))
        return jax.jit(loss)(*inputs)

    close(run(block), run(reference))


def test_gpt_oss_block():
    """The block has a window of 128 tokens, sinks, eight query heads on one key head, and RoPE."""
    length = 64 * SIZE
    q, k, v, sinks = ring.normal(0, (1, length, 8, 64), *[(1, length, 1, 64)] * 2, (8,))
    spec = P(None, "context")

    def local(q, k, v, sinks):
        positions = ba.local_positions(q.shape[1], axis_name="context", layout=LAYOUT)
        q, k = (rotated(x, positions) for x in (q, k))
        return ba.attention(
            q, k, v, axis_name="context", is_causal=True, local_window_size=127, sinks=sinks,
            layout=LAYOUT,
        )  # fmt: skip

    sharded = jax.shard_map(
        local, mesh=ring.line(SIZE), in_specs=(spec, spec, spec, P()), out_specs=spec
    )

    def block(q, k, v, sinks):
        q, k, v = (ba.to_layout(x, SIZE, LAYOUT) for x in (q, k, v))
        return ba.from_layout(sharded(q, k, v, sinks), SIZE, LAYOUT)

    def reference(q, k, v, sinks):
        q, k = (rotated(x, jnp.arange(length)) for x in (q, k))
        return dense(q, k, v, band(length, 127), sinks=sinks)

    compare(block, reference, q, k, v, sinks)


def test_gemma_blocks():
    """The block has soft-capped scores, its own scale, and layers with and without a window."""
    length, scale, cap = 96, 24**-0.5, 10.0
    x, *weights = ring.normal(0, (1, length, 4, 32), *[(2, 32, 32)] * 3)
    weights = [0.5 * w for w in weights]

    def layers(attend):
        def run(x, *weights):
            for layer, left in enumerate((31, length)):
                q, k, v = (x @ w[layer] for w in weights)
                x = x + attend(q, k[:, :, :2], v[:, :, :2], left)
            return x

        return run

    def windowed(q, k, v, left):
        window = None if left == length else left
        return ring_attention(
            is_causal=True, local_window_size=window, logits_soft_cap=cap, scale=scale
        )(q, k, v)

    def reference(q, k, v, left):
        return dense(q, k, v, band(length, left), cap, scale=scale)

    compare(layers(windowed), layers(reference), x, *weights)


@pytest.mark.parametrize("dims", [(192, 128)])
def test_mla_block(dims):
    """Queries and keys have a latent part and a shared rotary part; values are narrower."""
    length, heads, rotary = 48, 2, 64
    wide, narrow = dims
    q, latent, rope, up_k, up_v = ring.normal(
        0, (1, length, heads, wide), (1, length, 32), (1, length, 1, rotary),
        (32, heads, wide - rotary), (32, heads, narrow),
    )  # fmt: skip

    def layer(attend):
        def run(q, latent, rope, up_k, up_v):
            k, v = (jnp.einsum("bsr,rhd->bshd", 0.2 * latent, w) for w in (up_k, up_v))
            rope = rotated(rope, jnp.arange(length))
            k = jnp.concatenate([k, jnp.broadcast_to(rope, (*k.shape[:3], rotary))], axis=3)
            return attend(q, k, v)

        return run

    reference = partial(dense, mask=band(length, length))
    block = ring_attention(is_causal=True)
    compare(layer(block), layer(reference), q, latent, rope, up_k, up_v)
