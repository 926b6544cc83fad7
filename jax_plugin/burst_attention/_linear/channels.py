"""Decays of channels on GPUs: what XLA computes before the kernels of linear attention.

With b_i, a vector over channels, the sum of a tile's log decays up to and including token i, in
base 2, pairs of tokens j ≤ i want 2^(b_i − b_j). Neither 2^(b_i) nor 2^(−b_j) alone is safe, since
one may vanish where the other is infinite. So tokens meet in levels of blocks of m = 1, 2, 4 … 32
tokens: each odd block meets the even block before it, and both take their decays from the token r
between them, the last of the even block. No factor exceeds 1, if no decay does::

    2^(b_i − b_j) = 2^(b_i − r) · 2^(r − b_j)

Every pair of different tokens meets in one level. `met` has the odd blocks' rows of one array and
the even blocks' rows of another, with these decays. A kernel adds up the products of all levels.
"""

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32

Rows: TypeAlias = Float[Array, "batch seq heads k_dim"]
Decays: TypeAlias = Float32[Array, "batch seq heads k_dim"]
LevelDecays: TypeAlias = Float32[Array, "batch seq levels heads k_dim"]

LEVELS = (1, 2, 4, 8, 16, 32)
"""Tokens of a block in each level."""
TILE = 64


class Channels(NamedTuple):
    """The decays of a rank's tokens within their tiles."""

    from_start: Decays
    """From a tile's first token to each token."""
    to_end: Decays
    """From behind each token to its tile's last token."""
    to_middle: LevelDecays
    """Between each token and the last token of its pair's even block."""
    stops: Bool[Array, "batch seq heads k_dim"]
    """Whether a log decay is −∞."""


def of_sums(
    sums: Float32[Array, "batch padded_seq heads k_dim"],
    stops: Bool[Array, "batch seq heads k_dim"],
) -> Channels:
    """Returns the decays of tokens from sums of log decays in base 2 since each tile began."""
    tokens = stops.shape[1]

    def of_tokens(x: jax.Array) -> jax.Array:
        return jnp.exp2(x.reshape(sums.shape))[:, :tokens]

    tiles = sums.reshape(sums.shape[0], -1, TILE, *sums.shape[2:])
    levels = []
    for m in LEVELS:
        pairs = tiles.reshape(*tiles.shape[:2], -1, 2, m, *tiles.shape[3:])
        behind = pairs - pairs[:, :, :, :1, -1:]
        is_later = np.arange(2).reshape(2, 1, 1, 1) == 1
        levels.append(of_tokens(jnp.where(is_later, behind, -behind)))
    end = of_tokens(tiles[:, :, -1:] - tiles)
    return Channels(of_tokens(tiles), end, jnp.stack(levels, axis=2), stops)


def faded(x: Float[Array, "*shape"], decays: Float32[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns ``x`` with decays, rounded; 0 where a decay is 0, whatever ``x`` is."""
    return jnp.where(decays == 0, 0, decays * x.astype(decays.dtype)).astype(x.dtype)


def met(
    channels: Channels, later: Rows, earlier: Rows
) -> Float[Array, "batch seq levels heads k_dim"]:
    """Returns rows of ``later`` in odd blocks and of ``earlier`` in even blocks, with decays."""
    token, block = np.arange(later.shape[1])[:, None], np.array(LEVELS)
    is_later = ((token & block) != 0)[..., None, None]
    return faded(jnp.where(is_later, later[:, :, None], earlier[:, :, None]), channels.to_middle)


def turned(pairs: Float32[Array, "batch padded_seq heads tile"]) -> jax.Array:
    """Returns the pairs of each tile with rows and columns exchanged."""
    tiles = pairs.reshape(pairs.shape[0], -1, TILE, *pairs.shape[2:])
    return tiles.swapaxes(2, 4).reshape(pairs.shape)
