"""Keeps NaN and infinities inside their document, where kernels take tiles of several documents.

In a product of tiles a weight of 0 does not stop NaN and infinities. So kernels get operands with 0
in place of values that are not finite, and the results that such a value reaches become NaN.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32


def finite(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns ``x`` with 0 in place of infinities and NaN."""
    return jnp.where(jnp.isfinite(x), x, 0)


def spoilt(
    logs: Float32[Array, "batch seq heads"] | Float32[Array, "batch seq heads k_dim"],
    *rows: Float[Array, "batch seq _ _"],
) -> Bool[Array, "batch seq heads"]:
    """Returns which tokens have NaN or infinities in their rows, or a log decay of NaN or ∞.

    The number of heads of ``rows`` divides heads.
    """
    heads, is_right = logs.shape[2], logs < jnp.inf
    found = ~(is_right if logs.ndim == 3 else is_right.all(axis=3))
    for x in rows:
        found |= jnp.repeat(~jnp.isfinite(x).all(axis=3), heads // x.shape[2], axis=2)
    return found


def reached(
    spoilt: Bool[Array, "batch seq heads"], resets: Bool[Array, "batch seq heads"], *, back: bool
) -> Bool[Array, "batch seq heads"]:
    """Returns which tokens have a spoilt token at or before them, in their document.

    A document begins with each reset. With ``back``: at or after them.
    """
    tokens = spoilt.shape[1]
    token = lax.broadcasted_iota(jnp.int32, spoilt.shape, 1)
    if not back:
        last = lax.cummax(jnp.where(spoilt, token, -1), axis=1)
        return last >= lax.cummax(jnp.where(resets, token, 0), axis=1)
    following = lax.cummin(jnp.where(spoilt, token, tokens), axis=1, reverse=True)
    begins = lax.cummin(jnp.where(resets, token, tokens), axis=1, reverse=True)
    # The beginning of the next document: a reset at the token itself has begun its own.
    begins = jnp.concatenate([begins, jnp.full_like(begins[:, :1], tokens)], axis=1)[:, 1:]
    return following < begins


def poisoned(
    x: Float[Array, "batch seq heads dim"], where: Bool[Array, "batch seq heads"]
) -> Float[Array, "batch seq heads dim"]:
    """Returns ``x`` with NaN in the rows of some tokens."""
    return jnp.where(where[..., None], jnp.nan, x).astype(x.dtype)
