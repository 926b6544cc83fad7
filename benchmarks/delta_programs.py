"""Forward + backward programs of the delta rule and of Infini-attention: ours and plain JAX's."""

from collections.abc import Callable
from functools import partial
from typing import Any

import burst_attention as ba
import jax
import jax.numpy as jnp
from jax import lax
from linear_programs import DEVICES, SHARDS, mesh_of

CHUNKS = (32, 64, 128)
SEGMENT = 2_048


def chunked(chunk: int, *arrays: jax.Array) -> jax.Array:
    """Computes in plain JAX, in WY form: what chunks can do alone, then a scan over their states.

    Log decays are of heads, or of channels. Products of channels take factors on both sides of a
    chunk's middle, so they are only right where a chunk's decays are weak.
    """
    batch, length, heads, _ = arrays[0].shape
    q, k, v, logs, beta = (
        x.reshape(batch, length // chunk, chunk, heads, -1).transpose(1, 0, 3, 2, 4) for x in arrays
    )
    sums = jnp.cumsum(logs, axis=3)
    middle = sums - sums[..., chunk // 2, None, :]
    rows, columns = jnp.exp(middle), jnp.exp(-middle)
    see = jnp.tril(jnp.ones((chunk, chunk), bool))
    pairs = jnp.einsum("nbhik,nbhjk->nbhij", k * rows, k * columns)
    system = jnp.where(see & ~jnp.eye(chunk, dtype=bool), beta * pairs, 0) + jnp.eye(chunk)
    right = beta * jnp.concatenate([v, jnp.exp(sums) * k], axis=4)
    solved = lax.linalg.triangular_solve(
        system, right, left_side=True, lower=True, unit_diagonal=True
    )
    written, taken = jnp.split(solved, [v.shape[4]], axis=4)
    weights = jnp.where(see, jnp.einsum("nbhik,nbhjk->nbhij", q * rows, k * columns), 0)
    left = k * jnp.exp(sums[..., -1:, :] - sums)

    def step(state: jax.Array, part: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, weights, written, taken, left, total = part
        u = written - taken @ state
        out = q @ state + weights @ u
        return total[..., None] * state + jnp.einsum("bhik,bhiv->bhkv", left, u), out

    state = jnp.zeros((batch, heads, k.shape[4], v.shape[4]))
    total = jnp.broadcast_to(jnp.exp(sums[..., -1, :]), (*sums.shape[:3], k.shape[4]))
    parts = (q * jnp.exp(sums), weights, written, taken, left, total)
    _, out = lax.scan(step, state, parts)
    return out.transpose(1, 0, 3, 2, 4).reshape(batch, length, heads, -1)


def ours(devices: int, *arrays: jax.Array) -> jax.Array:
    """Computes `delta_attention` over a number of devices."""
    q, k, v, logs, beta = arrays
    attend: Any = jax.shard_map(
        partial(ba.delta_attention, axis_name="context"),
        mesh=mesh_of(devices),
        in_specs=(SHARDS,) * 5,
        out_specs=SHARDS,
    )
    out: jax.Array = attend(q, k, v, beta, logs)
    return out


def infini(devices: int, *arrays: jax.Array) -> jax.Array:
    """Computes Infini-attention over a number of devices, with gates of 0."""

    def local(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        gate = jnp.zeros(q.shape[2])
        out: jax.Array
        out, _ = ba.infini_attention(q, k, v, gate, axis_name="context", segment_size=SEGMENT)
        return out

    attend: Any = jax.shard_map(
        local, mesh=mesh_of(devices), in_specs=(SHARDS,) * 3, out_specs=SHARDS
    )
    out: jax.Array = attend(*arrays[:3])
    return out


def local_softmax(*arrays: jax.Array) -> jax.Array:
    """Computes the first part of Infini-attention: softmax attention within segments."""

    def local(*rows: jax.Array) -> jax.Array:
        q, k, v = (x.reshape(-1, SEGMENT, *x.shape[2:]) for x in rows)
        out: jax.Array = ba.attention(q, k, v, axis_name="context", is_causal=True)
        return out.reshape(rows[0].shape)

    attend: Any = jax.shard_map(local, mesh=mesh_of(1), in_specs=(SHARDS,) * 3, out_specs=SHARDS)
    out: jax.Array = attend(*arrays[:3])
    return out


def memory_alone(*arrays: jax.Array) -> jax.Array:
    """Computes the second part of Infini-attention: the memory of segments, and its retrieval."""
    batch, length, heads, dim = arrays[0].shape
    q, k, v = (x.reshape(batch, -1, SEGMENT, heads, dim) for x in arrays[:3])
    features, keys = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    ones = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=4)
    added = jnp.einsum("bnshk,bnshv->bnhkv", keys, ones)
    before = jnp.cumsum(added, axis=1) - added
    found = jnp.einsum("bnshk,bnhkv->bnshv", features, before)
    known = found[..., -1:]
    out = found[..., :-1] / jnp.where(known == 0, 1, known)
    return out.reshape(batch, length, heads, dim)


Contender = tuple[Callable[..., jax.Array], int]
OURS: dict[str, Contender] = {f"ours, {n} devices": (partial(ours, n), n) for n in (1, DEVICES)}
CHUNKED: dict[str, Contender] = {
    f"plain JAX, chunks of {c}": (partial(chunked, c), 1) for c in CHUNKS
}
INFINI: dict[str, Contender] = {
    "infini_attention": (partial(infini, 1), 1),
    "softmax within segments": (local_softmax, 1),
    "memory of segments in plain JAX": (memory_alone, 1),
}
"""By name: a function of q, k, v, log decays and β, and the number of its devices."""
