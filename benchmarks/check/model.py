"""A small decoder-only transformer over tokens in plain JAX, with sharded or whole parameters."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Parameters = dict[str, Any]
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class Config:
    """Sizes of the model. Parameters are float32, activations bfloat16."""

    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    hidden: int = 512
    vocabulary: int = 256

    @property
    def width(self) -> int:
        """Returns the width of the residual stream."""
        return self.heads * self.head_dim


def create(config: Config) -> Parameters:
    """Returns matrices by name, to shard along their first dimension, and scales, to keep whole."""
    random = np.random.default_rng(0)
    width, kv = config.width, config.kv_heads * config.head_dim

    def matrix(inputs: int, outputs: int) -> Any:
        return random.standard_normal((inputs, outputs), np.float32) * inputs**-0.5

    parameters: Parameters = {"embed": matrix(config.vocabulary, width)}
    for layer in range(config.layers):
        sizes = {"query": (width, width), "key": (width, kv), "value": (width, kv)}
        sizes |= {"out": (width, width), "up": (width, config.hidden)}
        sizes |= {"down": (config.hidden, width)}
        parameters |= {f"{layer}.{name}": matrix(*size) for name, size in sizes.items()}
        for name in ("before attention", "before hidden"):
            parameters[f"{layer}.scale {name}"] = np.ones(width, np.float32)
    return parameters | {"scale": np.ones(width, np.float32), "unembed": matrix(width, 256)}


def is_sharded(name: str) -> bool:
    """Whether the devices of the ring hold shards of this parameter."""
    return "scale" not in name


def tokens(seq: int, batch: int, step: int) -> Any:
    """Returns training data: small tokens are frequent, and the second half repeats the first."""
    random = np.random.default_rng([1, step])
    first = np.minimum(random.geometric(0.03, (batch, seq // 2)) - 1, 255)
    return np.concatenate([first, first], axis=1).astype(np.int32)


def losses(
    config: Config,
    parameters: Parameters,
    fetch: Callable[[Any], jax.Array],
    inputs: jax.Array,
    targets: jax.Array,
    positions: jax.Array,
    attend: Attend,
) -> jax.Array:
    """Returns −log p of each target, [batch, seq]; `fetch` gathers a sharded matrix at its use.

    Every layer computes x + attention(norm(x)), then x + hidden(norm(x)). Positions join the input.
    """

    def matrix(name: str) -> jax.Array:
        return fetch(parameters[name].astype(jnp.bfloat16))

    def normed(x: jax.Array, name: str) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
        return (wide * parameters[name]).astype(jnp.bfloat16)

    def heads(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], -1, config.head_dim)

    x = matrix("embed")[inputs] * 8 + _waves(positions, config.width)
    for layer in range(config.layers):
        y = normed(x, f"{layer}.scale before attention")
        q, k, v = (heads(y @ matrix(f"{layer}.{name}")) for name in ("query", "key", "value"))
        x = x + attend(q, k, v).reshape(x.shape) @ matrix(f"{layer}.out")
        y = normed(x, f"{layer}.scale before hidden")
        x = x + jax.nn.silu(y @ matrix(f"{layer}.up")) @ matrix(f"{layer}.down")
    logits = (normed(x, "scale") @ matrix("unembed")).astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def _waves(positions: jax.Array, width: int) -> jax.Array:
    """Returns sin and cos of position · 10000^(−i / half), [seq, width]."""
    half = width // 2
    angles = positions[:, None] * 1e4 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1).astype(jnp.bfloat16)
