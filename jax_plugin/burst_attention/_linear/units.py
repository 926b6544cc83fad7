"""Powers of two by which arrays are divided so that they stay within a type. They round nothing."""

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

LARGEST = 2.0**10
"""The largest element of a state in its unit. Corrected values are at most 2 √k_dim times as large
where β |k|² ≤ 2, so float16 holds them. Beyond that the delta rule's states grow without end."""

Rows: TypeAlias = Float[Array, "batch seq heads dim"]
States: TypeAlias = Float32[Array, "batch parts heads k_dim v_dim"]


class Units(NamedTuple):
    """The units of one GPU's states and of rows that follow from them, one for each part and head.

    float16 does not hold what a key takes from a state beyond 65,504. So the states and the rows of
    a part are divided by its unit, and results are multiplied with it. In their unit rows keep all
    digits down to 2^-14.
    """

    parts: Float32[Array, "batch parts heads"] | None
    """None where the type of rows holds all states."""
    part_rows: int

    def of_states(self, x: States) -> States:
        """Returns states in their units."""
        return x if self.parts is None else x / self.parts[..., None, None]

    def of_rows(self, x: Rows) -> Rows:
        """Returns rows in their units, in their type."""
        if self.parts is None:
            return x
        return (x.astype(jnp.float32) / self._tokens(x.shape[1])[..., None]).astype(x.dtype)

    def rows(self, x: Rows) -> Rows:
        """Returns rows that were in these units: float32, or in their type where units are 1."""
        if self.parts is None:
            return x
        return x.astype(jnp.float32) * self._tokens(x.shape[1])[..., None]

    def dots(self, x: Float32[Array, "batch heads seq ..."]) -> jax.Array:
        """Returns products of each token that were in these units."""
        return x if self.parts is None else _times(x, self._tokens(x.shape[2]))

    def crossings(self, x: Float32[Array, "batch heads parts ..."]) -> jax.Array:
        """Returns products of each part that were in these units."""
        return x if self.parts is None else _times(x, self.parts)

    def _tokens(self, count: int) -> Float32[Array, "batch seq heads"]:
        assert self.parts is not None
        return jnp.repeat(self.parts, self.part_rows, axis=1)[:, :count]


def units_of(states: States, part_rows: int, dtype: np.dtype) -> Units:
    """Returns the units of the states before, or behind, parts of ``part_rows`` tokens."""
    if dtype != jnp.float16:
        return Units(None, part_rows)
    largest = jnp.abs(states).max(axis=(3, 4))
    # A number is less than twice the power of two within it.
    return Units(power_within(jnp.maximum(1, largest * (2 / LARGEST))), part_rows)


def power_within(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Returns the greatest power of two within ``x``, without derivatives; 1 for 0.

    Its inverse is a normal number, too.
    """
    bits = lax.bitcast_convert_type(lax.stop_gradient(x), jnp.int32)
    power = lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32)
    return jnp.where(x == 0, 1, jnp.clip(power, 2.0**-126, 2.0**126))


def _times(
    x: Float32[Array, "batch heads rows ..."], units: Float32[Array, "batch rows heads"]
) -> jax.Array:
    return x * jnp.expand_dims(units.swapaxes(1, 2), range(3, x.ndim))
