"""Types that several modules share."""

from typing import Literal, Protocol, TypeAlias, get_args, runtime_checkable

import jax
import numpy as np

Arrays: TypeAlias = tuple[jax.Array, ...]
X: TypeAlias = jax.Array
"""An array, in overloads."""
Three: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]
"""Query, key and value, where their shapes change."""
Axes: TypeAlias = tuple[str, ...]
"""Names of mesh axes, the major one first."""
AnyMesh: TypeAlias = jax.sharding.Mesh | jax.sharding.AbstractMesh

Layout: TypeAlias = Literal["contiguous", "zigzag", "striped"]
"""Which global positions a rank holds."""
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


@runtime_checkable
class ArrayType(Protocol):
    """An array of JAX or numpy, or a ``jax.ShapeDtypeStruct``."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the dimensions."""

    @property
    def dtype(self) -> np.dtype:
        """Type of the elements."""
