# ruff: noqa: F722  (shapes in annotations are not Python)
"""Sinks: one logit per query head that joins the softmax of every row, without a value.

With sink logit z, a row that the ring left with o and lse becomes::

    lse' = ln(e^lse + e^z);   o' = o · e^(lse − lse') = o · sigmoid(lse − z)

so a row that sees no key has lse' = z and o' = 0; so has every row with z = +∞, which takes all
weight. With o' and lse' in place of o and lse, the
formulas of the backward ring stand as they are: e^(s − lse') is the weight of a key. What is left
is the gradient of z, over all rows of the head::

    delta' = rowsum(dout ∘ o');   dz = Σ e^(z − lse') (dlse − delta')
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32


def join(
    o: Float[Array, "batch seq heads value_dim"],
    lse: Float32[Array, "batch seq heads"],
    sinks: Float32[Array, " heads"],
) -> tuple[jax.Array, jax.Array]:
    """o', float32, and lse' of rows that ``sinks`` join."""
    # Where both are −inf, their difference is none.
    kept = jnp.where(jnp.isneginf(lse), 0.0, jax.nn.sigmoid(lse - sinks))
    return o.astype(jnp.float32) * kept[..., None], jnp.logaddexp(lse, sinks)


def gradient(
    sinks: Float32[Array, " heads"],
    o: Float[Array, "batch seq heads value_dim"],
    lse: Float32[Array, "batch seq heads"],
    dout: Float[Array, "batch seq heads value_dim"],
    dlse: Float32[Array, "batch seq heads"],
) -> jax.Array:
    """dz ``[heads]`` of this device's rows, from the joined o and lse."""
    delta = jnp.sum(dout.astype(jnp.float32) * o.astype(jnp.float32), axis=-1)
    # Rows that see nothing, such as padding: their dout may be anything, and 0 · NaN is NaN.
    delta = jnp.where(jnp.any(o != 0, axis=-1), delta, 0.0)
    # Infinite ones take all or nothing; e^(z − lse) would be that of ∞ − ∞.
    share = jnp.where(jnp.isinf(sinks), jnp.where(sinks > 0, 1.0, 0.0), jnp.exp(sinks - lse))
    return jnp.sum(share * (dlse - delta), axis=(0, 1))
