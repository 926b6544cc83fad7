"""Sinks: one logit per query head that joins the softmax of every row, without a value.

A row that the ring left with o and lse becomes, with the sink logit z of its head::

    lse' = ln(e^lse + e^z);   o' = o · e^(lse − lse') = o · sigmoid(lse − z)

A row that sees no key has lse' = z and o' = 0. With z = +∞, which takes all weight, every row has
o' = 0. The formulas of the backward ring hold with o' and lse' in place of o and lse, since
e^(s − lse') is the weight of a key. The gradient of z remains, over all rows of the head::

    delta' = rowsum(dout ∘ o');   dz = Σ e^(z − lse') (dlse − delta')
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def join(
    o: Float[Array, "batch seq heads value_dim"],
    lse: Float32[Array, "batch seq heads"],
    sinks: Float32[Array, "*batch heads"],
) -> tuple[Float32[Array, "batch seq heads value_dim"], Float32[Array, "batch seq heads"]]:
    """Returns o' and lse' of rows that ``sinks`` join: of all heads, or of those of each entry."""
    sinks = sinks.reshape(-1, 1, sinks.shape[-1])
    # Where both are −inf, their difference would be NaN.
    is_blind = jnp.isneginf(lse)
    share = jnp.where(is_blind, 0.0, jax.nn.sigmoid(jnp.where(is_blind, 0.0, lse) - sinks))
    return o.astype(jnp.float32) * share[..., None], jnp.logaddexp(lse, sinks)


def gradient(
    sinks: Float32[Array, "batch heads"],
    o: Float[Array, "batch seq heads value_dim"],
    lse: Float32[Array, "batch seq heads"],
    dout: Float[Array, "batch seq heads value_dim"],
    dlse: Float32[Array, "batch seq heads"],
) -> Float32[Array, "batch heads"]:
    """Returns dz of this device's rows, from o' and lse'."""
    sinks = sinks[:, None]
    delta = jnp.sum(dout.astype(jnp.float32) * o.astype(jnp.float32), axis=-1)
    # The dout of rows that see no key, such as padding, may be anything, and 0 · NaN is NaN.
    delta = jnp.where(jnp.any(o != 0, axis=-1), delta, 0.0)
    # An infinite sink takes all weight or none; e^(z − lse) would be e^(∞ − ∞).
    is_infinite = jnp.isinf(sinks)
    share = jnp.exp(jnp.where(is_infinite, 0.0, sinks) - lse)
    share = jnp.where(is_infinite, jnp.where(sinks > 0, 1.0, 0.0), share)
    return jnp.sum(share * (dlse - delta), axis=1)
