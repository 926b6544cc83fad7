"""Sums of log decays and of their gradients over tokens, of which XLA's kernels read few bytes.

A sum of many rows for each row is taken in blocks: first over blocks, then over a block's rows.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32

from burst_attention._linear.channels import TILE

BLOCK = 8
"""Rows of a block."""


def of_tiles(x: Float32[Array, "batch seq ..."]) -> Float32[Array, "batch seq ..."]:
    """Returns sums of rows since each tile began."""
    blocks = x.reshape(x.shape[0], -1, TILE // BLOCK, BLOCK, *x.shape[2:])
    of_blocks = jnp.cumsum(blocks, axis=3)
    before = jnp.cumsum(of_blocks[:, :, :-1, -1:], axis=2)
    padding = [(0, 0), (0, 0), (1, 0)] + [(0, 0)] * (x.ndim - 1)
    return (of_blocks + jnp.pad(before, padding)).reshape(x.shape)


def from_behind(
    terms: Float32[Array, "batch parts rows columns"],
    passes: Bool[Array, "batch parts rows columns"],
    behind: Float32[Array, "batch parts columns"],
) -> Float32[Array, "batch parts rows columns"]:
    """Returns each row's term plus, if the row passes it, the result of the row behind it.

    ``behind`` is the result behind the last row. The results at the first rows of blocks follow
    from each other as those of rows do. A barrier keeps XLA from computing the sums of blocks again
    for each block that reads them.
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
        firsts = from_behind(first, passed, behind)
        ends = jnp.concatenate([firsts[:, :, 1:], ends], axis=2)
    results = jnp.stack(of_block(ends), axis=3)
    return results.reshape(*shape[:2], -1, shape[4])[:, :, :count]
