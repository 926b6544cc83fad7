"""Sums of rows from the last row to the first, with which gradients of decays end."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32

BLOCK = 8
"""Rows of a block."""


def sums(
    terms: Float32[Array, "batch parts rows columns"],
    passes: Bool[Array, "batch parts rows columns"],
    behind: Float32[Array, "batch parts columns"],
) -> Float32[Array, "batch parts rows columns"]:
    """Returns each row's term plus, if the row passes it, the result of the row behind it.

    ``behind`` is the result behind the last row. XLA goes over all rows twice. It first sums blocks
    of rows; the results at their first rows follow from each other as those of rows do. A barrier
    keeps it from computing these sums again for each block that reads them.
    """
    count = terms.shape[2]
    block = min(count, BLOCK)
    padding = [(0, 0), (0, 0), (0, -count % block), (0, 0)]
    shape = (*terms.shape[:2], -1, block, terms.shape[3])
    terms = jnp.pad(terms, padding).reshape(shape)
    passes = jnp.pad(passes, padding, constant_values=True).reshape(shape)

    def of_block(found: jax.Array) -> list[jax.Array]:
        results = []
        for row in reversed(range(block)):
            found = terms[:, :, :, row] + jnp.where(passes[:, :, :, row], found, 0)
            results.append(found)
        return results[::-1]

    ends = behind[:, :, None]
    if block < count:
        first, passed = of_block(jnp.zeros_like(ends))[0], passes.all(axis=3)
        first, passed = lax.optimization_barrier((first, passed))
        firsts = sums(first, passed, behind)
        ends = jnp.concatenate([firsts[:, :, 1:], ends], axis=2)
    results = jnp.stack(of_block(ends), axis=3)
    return results.reshape(*shape[:2], -1, shape[4])[:, :, :count]
