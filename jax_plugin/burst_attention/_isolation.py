"""Keeps what is not finite inside its document, where kernels take tiles of several documents.

In a product of tiles a weight of 0 does not stop infinities and NaN. So kernels get 0 in the place
of an operand's values that are not finite, and the results that such a value reaches become NaN.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def finite(x: jax.Array) -> jax.Array:
    """``x`` with 0 in the place of infinities and NaN."""
    return jnp.where(jnp.isfinite(x), x, 0)


def spoilt(logs: jax.Array, *rows: jax.Array) -> jax.Array:
    """Whether a token has a NaN or infinity in its rows, or a log decay that is NaN or ∞.

    ``[batch, seq, heads]``, as the log decays; ``rows`` are ``[batch, seq, some heads, dim]``, some
    heads a divisor of heads.
    """
    heads, found = logs.shape[2], ~(logs < jnp.inf)
    for x in rows:
        found |= jnp.repeat(~jnp.isfinite(x).all(axis=3), heads // x.shape[2], axis=2)
    return found


def reached(spoilt: jax.Array, resets: jax.Array, *, back: bool) -> jax.Array:
    """Whether a spoilt token lies at or before a token, in its document.

    Both are ``[batch, seq, heads]``; a document begins with each reset. ``back``: at or after it.
    """
    tokens = spoilt.shape[1]
    place = lax.broadcasted_iota(jnp.int32, spoilt.shape, 1)
    if not back:
        last = lax.cummax(jnp.where(spoilt, place, -1), axis=1)
        return last >= lax.cummax(jnp.where(resets, place, 0), axis=1)
    following = lax.cummin(jnp.where(spoilt, place, tokens), axis=1, reverse=True)
    begins = lax.cummin(jnp.where(resets, place, tokens), axis=1, reverse=True)
    # Of the next document: that of a reset at the token itself has begun.
    begins = jnp.concatenate([begins, jnp.full_like(begins[:, :1], tokens)], axis=1)[:, 1:]
    return following < begins


def poisoned(x: jax.Array, where: jax.Array) -> jax.Array:
    """``x`` ``[batch, seq, heads, dim]`` with NaN in the rows of these tokens."""
    return jnp.where(where[..., None], jnp.nan, x).astype(x.dtype)
