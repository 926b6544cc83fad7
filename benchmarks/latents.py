"""Attention over latents that travel, and over keys that are expanded first, on the same numbers.

Keys and values of ``head_dim`` columns, and a part of keys that all heads share, as in DeepSeek-V2.
"""

from typing import Any

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
from cases import Case
from contenders import Contender, compiled
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

NAMES = ("latents", "expanded")
COLUMNS, ROPE = 512, 64
ROWS = P(None, "context")


def contenders(case: Case) -> list[Contender]:
    """Returns `latent_attention`, and its expansion before `attention`."""
    size, heads, dim = case.mesh[1], case.heads, case.head_dim
    mesh = jax.make_mesh((size,), ("context",), devices=jax.devices()[:size])
    random = np.random.default_rng(0)

    def put(*shape: int, scale: float = 1.0, spec: P = ROWS) -> jax.Array:
        x = scale * random.standard_normal(shape, np.float32)
        return jax.device_put(x.astype(jnp.dtype(case.dtype)), NamedSharding(mesh, spec))

    rows = (case.batch, case.seq)
    query, latent = put(*rows, heads, dim + ROPE), put(*rows, COLUMNS + ROPE)
    params = [put(COLUMNS, heads, dim, scale=COLUMNS**-0.5, spec=P()) for _ in range(2)]
    dout, options = put(*rows, heads, dim), {"axis_name": "context", **case.options()}
    del options["schedule"]

    def travelling(query: jax.Array, latent: jax.Array, params: Any) -> Any:
        return ba.latent_attention(query, latent, expand, params, **options)

    def before(query: jax.Array, latent: jax.Array, params: Any) -> Any:
        return ba.attention(query, *expand(params, latent), **options)

    def one(name: str, local: Any) -> Contender:
        attend = jax.shard_map(local, mesh=mesh, in_specs=(ROWS, ROWS, P()), out_specs=ROWS)
        return compiled(name, attend, query, latent, params, dout)

    return [one(*pair) for pair in zip(NAMES, (travelling, before), strict=True)]


def expand(params: Any, latent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns key and value of latents."""
    columns, rope = latent[..., :COLUMNS], latent[..., None, COLUMNS:]
    key, value = (jnp.einsum("bsc,chd->bshd", columns, x) for x in params)
    rope = jnp.broadcast_to(rope, (*key.shape[:3], ROPE))
    return jnp.concatenate([key, rope], -1), value
