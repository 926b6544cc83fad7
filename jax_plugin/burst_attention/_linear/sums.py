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
    terms: Float32[Array, "*leading rows"],
    passes: Bool[Array, "*leading rows"],
    behind: Float32[Array, "*leading"],
) -> Float32[Array, "*leading rows"]:
    """Returns each row's term plus, if the row passes it, the result of the row behind it.

    ``behind`` is the result behind the last row. The results at the first rows of blocks follow
    from each other as those of rows do. A barrier keeps XLA from computing the sums of blocks again
    for each block that reads them.
    """
    count = terms.shape[-1]
    block = count if count <= 2 * BLOCK else BLOCK
    shape = (*terms.shape[:-1], -1, block)

    def padded(x: jax.Array, rows: int, fill: float) -> jax.Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, rows)], constant_values=fill)

    # Rows of 0 that pass everything change nothing.
    missing = -count % block
    terms, passes = padded(terms, missing, 0), padded(passes, missing, True)
    terms, passes = terms.reshape(shape), passes.reshape(shape)

    def of_blocks(found: jax.Array) -> jax.Array:
        for row in reversed(range(block)):
            passed = jnp.where(padded(passes[..., row:], row, True), found, 0)
            found = padded(terms[..., row:], row, 0) + passed
        return found

    ends = behind[..., None]
    if block < count:
        firsts = of_blocks(jnp.zeros_like(terms[..., :1]))[..., 0]
        firsts, passed = lax.optimization_barrier((firsts, passes.all(axis=-1)))
        ends = jnp.concatenate([from_behind(firsts, passed, behind)[..., 1:], ends], axis=-1)
    return of_blocks(ends[..., None]).reshape(*shape[:-2], -1)[..., :count]
