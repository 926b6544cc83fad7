"""Forward + backward programs of linear attention to compare: ours and plain JAX's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import burst_attention as ba
import cases
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

CHUNKS = (64, 128, 256)
SHARDS = P(None, "context")
SIZES = cases.sizes("linear")
DEVICES, HEAD_DIM = SIZES["devices"], SIZES["head_dim"]


def chunked(chunk: int, *arrays: jax.Array, again: bool = False) -> jax.Array:
    """Computes in plain JAX: a scan over chunks, with products of matrices inside a chunk.

    With ``again`` the backward pass keeps only the states and computes each chunk once more.
    """
    q, _, v, _ = arrays
    batch, length, heads, _ = q.shape
    parts = [x.reshape(batch, length // chunk, chunk, heads, -1) for x in arrays]
    parts = [x.transpose(1, 0, 3, 2, 4) for x in parts]
    see = jnp.tril(jnp.ones((chunk, chunk), bool))

    def step(state: jax.Array, part: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        q, k, v, logs = part
        sums = jnp.cumsum(logs[..., 0], axis=-1)
        between = jnp.where(see, sums[..., :, None] - sums[..., None, :], -jnp.inf)
        weights = jnp.einsum("bhik,bhjk->bhij", q, k) * jnp.exp(between)
        out = jnp.einsum("bhij,bhjv->bhiv", weights, v)
        out += jnp.exp(sums)[..., None] * jnp.einsum("bhik,bhkv->bhiv", q, state)
        left = k * jnp.exp(sums[..., -1:] - sums)[..., None]
        state = jnp.exp(sums[..., -1])[..., None, None] * state
        return state + jnp.einsum("bhjk,bhjv->bhkv", left, v), out

    state = jnp.zeros((batch, heads, q.shape[3], v.shape[3]))
    _, out = lax.scan(jax.checkpoint(step) if again else step, state, parts)
    return out.transpose(1, 0, 3, 2, 4).reshape(v.shape)


def recurrent(q: jax.Array, k: jax.Array, v: jax.Array, logs: jax.Array) -> jax.Array:
    """Computes the definition in plain JAX, token by token."""

    def step(state: jax.Array, token: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        q, k, v, logs = token
        state = jnp.exp(logs)[..., None, None] * state + k[..., :, None] * v[..., None, :]
        return state, jnp.einsum("bhk,bhkv->bhv", q, state)

    batch, _, heads, k_dim = q.shape
    state = jnp.zeros((batch, heads, k_dim, v.shape[3]))
    _, out = lax.scan(step, state, [x.swapaxes(0, 1) for x in (q, k, v, logs)])
    return out.swapaxes(0, 1)


def ours(devices: int, *arrays: jax.Array) -> jax.Array:
    """Computes `linear_attention` over a number of devices."""
    q, k, v, logs = arrays
    attend: Any = jax.shard_map(
        lambda q, k, v, logs: ba.linear_attention(q, k, v, axis_name="context", log_decay=logs),
        mesh=mesh_of(devices),
        in_specs=(SHARDS,) * 4,
        out_specs=SHARDS,
    )
    out: jax.Array = attend(q, k, v, logs)
    return out


OURS = {f"ours, {n} devices": (partial(ours, n), n) for n in (1, 2, 4, DEVICES)}
CHUNKED = {f"plain JAX, chunks of {c}": (partial(chunked, c), 1) for c in CHUNKS}
AGAIN = {
    f"{name}, remat": (partial(function, again=True), 1) for name, (function, _) in CHUNKED.items()
}
TOKENS = {"plain JAX, lax.scan": (recurrent, 1)}
CONTENDERS: dict[str, tuple[Callable[..., jax.Array], int]] = OURS | CHUNKED | AGAIN | TOKENS
"""By name: a function of q, k, v and log decays, and the number of its devices."""


def mesh_of(devices: int) -> Mesh:
    """Returns a mesh of the first devices, with one axis."""
    return Mesh(np.array(jax.devices()[:devices]), ("context",))


@dataclass(frozen=True)
class Recurrence:
    """Programs of one recurrence, and what they take besides q, k and v."""

    contenders: Mapping[str, tuple[Callable[..., jax.Array], int]]
    """By name: a function of the arrays, and the number of its devices."""
    channels: bool = False
    """Whether log decays are of channels."""
    delta: bool = False
    """Whether keys have unit norm, and there is a β."""


LINEAR = Recurrence(CONTENDERS)


class Program:
    """Forward and backward pass of a contender at a length, compiled before the inputs exist."""

    def __init__(self, name: str, length: int, heads: int, recurrence: Recurrence = LINEAR):
        function, self.devices = recurrence.contenders[name]
        self.recurrence = recurrence
        self.sharding = NamedSharding(mesh_of(self.devices), SHARDS)
        per_head = (1, length, heads)
        rows = (*per_head, HEAD_DIM)
        self.shapes = [rows, rows, rows, rows if recurrence.channels else per_head]
        self.shapes += [per_head] if recurrence.delta else []
        self.shapes += [rows]

        def both(*arrays: jax.Array) -> Any:
            *inputs, dout = arrays
            out, pullback = jax.vjp(function, *inputs)
            return out, pullback(dout)

        types = [
            jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self.sharding)
            for shape in self.shapes
        ]
        self.compiled = jax.jit(both).lower(*types).compile()

    def inputs(self) -> list[jax.Array]:
        """Returns q, k, v, log decays of 0.99, β and the cotangent, on their devices."""
        random = np.random.default_rng(0)
        arrays = [random.standard_normal(shape, np.float32) for shape in self.shapes]
        arrays[3] = np.full(self.shapes[3], np.log(0.99), np.float32)
        if self.recurrence.delta:
            arrays[1] /= np.linalg.norm(arrays[1], axis=3, keepdims=True)
            arrays[4] = (1 / (1 + np.exp(-arrays[4]))).astype(np.float32)
        return [jax.device_put(x, self.sharding) for x in arrays]

    def run(self, inputs: list[jax.Array]) -> Any:
        """Returns output and gradients when they are ready."""
        return jax.block_until_ready(self.compiled(*inputs))

    def planned_bytes(self, *parts: str) -> int:
        """Returns the bytes that XLA plans for some parts, on all devices together."""
        plan = self.compiled.memory_analysis()
        return self.devices * sum(int(getattr(plan, f"{part}_size_in_bytes")) for part in parts)

    @property
    def all_bytes(self) -> int:
        """Returns the bytes that XLA plans for temporaries, arguments and outputs."""
        return self.planned_bytes("temp", "argument", "output")
