"""Attention without a ring, in plain JAX: a stand-in where the ring can't run, and a peer."""

from typing import Any

import burst_attention as ba
import jax
import jax.numpy as jnp
from jax import lax


def dense(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_positions: jax.Array,
    kv_positions: jax.Array,
    is_causal: bool,
) -> tuple[jax.Array, jax.Array]:
    """o in the type of q, and lse, of queries and keys at these positions."""
    group = q.shape[2] // k.shape[2]
    wide_q, keys, values = (x.astype(jnp.float32) for x in (q, k, v))
    keys, values = (jnp.repeat(x, group, axis=2) for x in (keys, values))
    s = jnp.einsum("bqhd,bkhd->bhqk", wide_q, keys) * q.shape[3] ** -0.5
    if is_causal:
        s = jnp.where(kv_positions[None, :] <= q_positions[:, None], s, -jnp.inf)
    lse = jax.nn.logsumexp(s, axis=-1)
    o = jnp.einsum("bhqk,bkhd->bqhd", jnp.exp(s - lse[..., None]), values)
    return o.astype(q.dtype), lse.swapaxes(1, 2)


def gathered(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis_name: str,
    is_causal: bool = False,
    layout: Any = "contiguous",
    backward: str = "auto",
    return_residual: bool = False,
) -> Any:
    """Stands for `burst_attention.attention`: gathers keys and values of the whole sequence."""
    del backward  # nothing travels
    positions = ba.local_positions(q.shape[1], axis_name=axis_name, layout=layout)
    keys, values = (lax.all_gather(x, axis_name, axis=1, tiled=True) for x in (k, v))
    everywhere = lax.all_gather(positions, axis_name, tiled=True)
    o, lse = dense(q, keys, values, positions, everywhere, is_causal)
    return (o, lse) if return_residual else o
