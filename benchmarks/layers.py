"""A model of several layers in a scan, differentiated, with or without `jax.checkpoint`."""

from collections.abc import Callable
from typing import Any

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
from cases import Case
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS = 4
KINDS: dict[str, Callable[[Any], Any]] = {
    "kept": lambda step: jax.checkpoint(step, policy=ba.save_attention),
    "recomputed": jax.checkpoint,
    "plain": lambda step: step,
}
"""The wrappers of a layer: they keep attention only, nothing, or everything."""


def programs(case: Case) -> dict[str, Callable[[], Any]]:
    """Returns for each kind a program of loss and gradients; a call returns when it is done."""
    size, width = case.mesh[1], case.heads * case.head_dim
    mesh = jax.make_mesh((size,), ("context",), devices=jax.devices()[:size])
    random = np.random.default_rng(0)

    def put(shape: tuple[int, ...], scale: float, spec: P) -> jax.Array:
        x = scale * random.standard_normal(shape, np.float32)
        return jax.device_put(x.astype(jnp.dtype(case.dtype)), NamedSharding(mesh, spec))

    shapes = {"qkv": (width, 3 * width), "out": (width, width)}
    shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}
    weights = {name: put((LAYERS, *shape), shape[0] ** -0.5, P()) for name, shape in shapes.items()}
    x = put((case.batch, case.seq, width), 1.0, P(None, "context"))
    return {name: _program(case, mesh, wrap, weights, x) for name, wrap in KINDS.items()}


def _program(
    case: Case, mesh: Any, wrap: Callable[[Any], Any], weights: dict[str, jax.Array], x: jax.Array
) -> Callable[[], Any]:
    def step(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        return _layer(case, x, weights), None

    def local(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(wrap(step), x, weights)
        return jax.lax.psum(jnp.sum(x.astype(jnp.float32) ** 2), "context")

    loss = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(None, "context")), out_specs=P())
    run = jax.jit(jax.value_and_grad(loss)).lower(weights, x).compile()
    return lambda: jax.block_until_ready(run(weights, x))


def _layer(case: Case, x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    """Computes attention, then a network of four times the width, each after a norm."""
    projected = jnp.split(_normed(x) @ weights["qkv"], 3, axis=-1)
    q, k, v = (y.reshape(*y.shape[:2], case.heads, case.head_dim) for y in projected)
    out = ba.attention(q, k, v, axis_name="context", **case.options())
    x = x + out.reshape(x.shape) @ weights["out"]
    return x + jax.nn.gelu(_normed(x) @ weights["up"]) @ weights["down"]


def _normed(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
