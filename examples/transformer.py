"""A small decoder-only transformer over bytes. The caller chooses the attention."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import burst_attention as ba
import jax
import jax.numpy as jnp
from flax import nnx
from fsdp import gathered

Attend = Callable[..., jax.Array]
"""Attention of query, key and value, and of the gates that a model has."""
TAPS = 4
"""Tokens of a short convolution."""


@dataclass(frozen=True)
class Config:
    """Sizes of the model. Parameters are float32; activations have type `dtype`."""

    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 512
    vocabulary: int = 256
    gates: tuple[str, ...] = ()
    """What attention takes besides query, key and value: names of `GATES`, or `positions`."""
    rotary: bool = True
    """Whether queries and keys are rotated before attention."""
    dtype: str = "float32"

    @property
    def width(self) -> int:
        """Returns the width of the residual stream."""
        return self.heads * self.head_dim


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns `x [batch, seq, heads, head_dim]` rotated for `positions [seq]` or `[batch, seq]`.

    Pairs (x_i, x_(i + head_dim/2)) turn by position · 10000^(-2i/head_dim).
    """
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


class Forget(nnx.Module):
    """Log decays of each head, log σ(w·x + b), float32.

    At the start of training, b makes head h keep 1 − 2^(−1 − 2h) of its state at each token. Of
    four heads, one sees little more than the last two tokens, and one sees about the last hundred.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs):
        kept = 1 - 0.5 ** (1 + 2 * jnp.arange(config.heads, dtype=jnp.float32))
        self.linear = nnx.Linear(config.width, config.heads, use_bias=False, rngs=rngs)
        self.bias = nnx.Param(jnp.log(kept / (1 - kept)))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `x [batch, seq, width]` to `[batch, seq, heads]`."""
        return jax.nn.log_sigmoid(self.linear(x.astype(jnp.float32)) + self.bias)


class Write(nnx.Module):
    """How strongly each token writes into the state of each head, σ(w·x + b), float32."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.linear = nnx.Linear(config.width, config.heads, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `x [batch, seq, width]` to `[batch, seq, heads]`."""
        return jax.nn.sigmoid(self.linear(x.astype(jnp.float32)))


class Mix(nnx.Module):
    """A number for each head."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.numbers = nnx.Param(jnp.zeros(config.heads))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the numbers, whatever `x` is."""
        return self.numbers[...]


class Taps(nnx.Module):
    """Weights of short convolutions of query, key and value, which begin as the identity."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        counts = (config.heads, config.kv_heads, config.kv_heads)
        shapes = [(TAPS, count, config.head_dim) for count in counts]
        self.weights = nnx.List([nnx.Param(jnp.zeros(shape).at[0].set(1)) for shape in shapes])

    def __call__(self, x: jax.Array) -> list[jax.Array]:
        """Returns the weights `[taps, heads, head_dim]` of each, whatever `x` is."""
        return [weight[...] for weight in self.weights]


GATES = {"decay": Forget, "beta": Write, "mix": Mix, "taps": Taps}
"""What attention may take besides query, key and value. It may also take `positions`."""


class Block(nnx.Module):
    """Computes x + attention(norm(x)), then x + gated feed-forward(norm(x))."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=False, dtype=config.dtype, rngs=rngs)

        width, head_dim = config.width, config.head_dim
        self.head_dim = head_dim
        self.norm_attention = nnx.RMSNorm(width, dtype=config.dtype, rngs=rngs)
        self.query = linear(width, config.heads * head_dim)
        self.key = linear(width, config.kv_heads * head_dim)
        self.value = linear(width, config.kv_heads * head_dim)
        self.out = linear(config.heads * head_dim, width)
        self.norm_hidden = nnx.RMSNorm(width, dtype=config.dtype, rngs=rngs)
        self.gate = linear(width, config.hidden)
        self.up = linear(width, config.hidden)
        self.down = linear(config.hidden, width)
        self.rotary, self.names = config.rotary, config.gates
        made = {name: GATES[name](config, rngs) for name in config.gates if name in GATES}
        self.gates = nnx.Dict(made)

    def __call__(self, x: jax.Array, positions: jax.Array | None, attend: Attend) -> jax.Array:
        """Maps `x [batch, seq, width]` to the same shape; without positions it rotates nothing."""
        return self.after(x, attend(*self.before(x, positions)))

    def before(self, x: jax.Array, positions: jax.Array | None) -> tuple[Any, ...]:
        """Returns what attention takes: query, key, value and gates."""

        def heads(y: jax.Array) -> jax.Array:
            return y.reshape(*y.shape[:2], -1, self.head_dim)

        y = self.norm_attention(x)
        query, key = heads(self.query(y)), heads(self.key(y))
        if self.rotary and positions is not None:
            query, key = rotate(query, positions), rotate(key, positions)
        gates = [self.gates[name](y) if name in GATES else positions for name in self.names]
        return query, key, heads(self.value(y)), *gates

    def after(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """Returns the block's result, given that of attention."""
        x = x + self.out(attended.reshape(*attended.shape[:2], -1))
        y = self.norm_hidden(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


def rematerialised(
    block: Block, x: jax.Array, positions: jax.Array | None, attend: Attend
) -> jax.Array:
    """Computes a block, whose backward pass gathers and recomputes all except its attention."""
    run = nnx.remat(lambda b, y: gathered(b)(y, positions, attend), policy=ba.save_attention)
    return run(block, x)


class Transformer(nnx.Module):
    """Maps bytes `[batch, seq]` to float32 logits `[batch, seq, vocabulary]`."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.dtype = config.dtype
        self.embed = nnx.Embed(config.vocabulary, config.width, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)
        self.unembed = nnx.Linear(
            config.width, config.vocabulary, use_bias=False, dtype=config.dtype, rngs=rngs
        )

    def __call__(self, tokens: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        """Returns the logits. Parameters may be shards: each part gathers its own."""
        x = gathered(self.embed)(tokens).astype(self.dtype)
        for block in self.blocks:
            x = rematerialised(block, x, positions, attend)
        return self.logits(x)

    def with_caches(
        self, tokens: jax.Array, positions: jax.Array, attends: Sequence[Attend]
    ) -> jax.Array:
        """Returns the logits where each block has an attention of its own, over its own cache."""
        x = self.embed(tokens).astype(self.dtype)
        for block, attend in zip(self.blocks, attends, strict=True):
            x = block(x, positions, attend)
        return self.logits(x)

    def logits(self, x: jax.Array) -> jax.Array:
        """Maps the last block's result to logits."""
        return gathered(self.unembed)(gathered(self.norm)(x)).astype(jnp.float32)
