"""The random numbers of dropout, in JAX: Philox4x32-10 (Salmon et al., SC 2011)."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


def threshold(rate: float) -> np.uint32:
    """Returns the smallest random number whose weight is kept, for a rate in float32."""
    return np.uint32(min(round(float(np.float32(rate)) * 2**32), 2**32 - 1))


def word(
    counter: tuple[UInt32[Array, "..."], ...],
    key: tuple[UInt32[Array, "..."], ...],
    lane: UInt32[Array, "..."],
) -> UInt32[Array, "..."]:
    """Returns word ``lane`` of the four words that Philox makes of a counter.

    All arrays broadcast: four arrays of the counter and two of the key.
    """
    for index in range(ROUNDS):
        # The key grows by the Weyl constants between rounds; uint32 wraps.
        k0, k1 = (k + np.uint32(index * w & 0xFFFFFFFF) for k, w in zip(key, WEYL, strict=True))
        c0, c1, c2, c3 = counter
        high0, low0 = _product(c0, MULTIPLIERS[0])
        high1, low1 = _product(c2, MULTIPLIERS[1])
        counter = (high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0)
    c0, c1, c2, c3 = counter
    return jnp.where(lane < 2, jnp.where(lane == 0, c0, c1), jnp.where(lane == 2, c2, c3))


def _product(x: jax.Array, factor: int) -> tuple[jax.Array, jax.Array]:
    """Returns the upper and the lower half of a 64-bit product, computed from halves of 16 bits."""
    mask, half = np.uint32(0xFFFF), np.uint32(16)
    low, high = np.uint32(factor & 0xFFFF), np.uint32(factor >> 16)
    x_low, x_high = x & mask, x >> half
    middle = x_high * low + (x_low * low >> half)
    other = x_low * high + (middle & mask)
    return x_high * high + (middle >> half) + (other >> half), x * np.uint32(factor)
