"""How one GPU's tokens are cut into parts, and the sums of their log decays."""

from math import log2
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Shaped

from burst_attention._linear import channels, sums
from burst_attention._linear.channels import TILE, Channels
from burst_attention._linear.isolation import finite
from burst_attention._linear.states import Logs

Totals: TypeAlias = Float32[Array, "batch heads parts"] | Float32[Array, "batch heads parts k_dim"]

BLOCKS = 256
"""Parts over all heads: about two for each multiprocessor of an H100, H200 or B200, whose numbers
decided this, not a measurement."""

SHORTEST = 256
"""The fewest tokens of a part."""

LOWEST = -160.0
"""2 to this power is 0 in float32, also rounded up: a token with such a decay sees none before."""


class Cut(NamedTuple):
    """How a rank's tokens are cut into parts, and their log decays."""

    rows: int
    """Tokens of a part."""
    sums: Float32[Array, "batch heads padded"] | Float32[Array, "batch padded heads k_dim"]
    """Sums of log decays in base 2 since each tile began."""
    totals: Totals
    """Sums of log decays in base 2 over each part; −∞ with a reset among them."""
    resets: Bool[Array, "batch seq heads"]
    """Whether a log decay is −∞, of all channels."""
    channels: Channels | None
    """What kernels take of decays of channels."""


def part_rows(batch: int, tokens: int, heads: int) -> int:
    """Returns the number of tokens of a part, a multiple of the tile."""
    parts = min(-(-BLOCKS // max(1, batch * heads)), -(-tokens // SHORTEST))
    return -(-tokens // max(1, parts) // TILE) * TILE if tokens else TILE


def cut(logs: Logs, has_documents: bool) -> Cut:
    """Returns how tokens with these log decays are cut."""
    batch, tokens, heads = logs.shape[:3]
    rows = part_rows(batch, tokens, heads)
    stops = jnp.isneginf(logs)
    given = jnp.where(stops, LOWEST, finite(logs) if has_documents else logs)
    padding = [(0, 0), (0, -tokens % TILE), (0, 0), (0, 0)][: logs.ndim]
    in_base_2 = jnp.pad(jnp.maximum(given * log2(jnp.e), LOWEST), padding)
    of_tiles = sums.of_tiles(in_base_2)
    tiles = of_tiles[:, TILE - 1 :: TILE]
    totals = _of_parts(tiles, rows // TILE).sum(axis=2)
    # Without the barrier this goes over log decays, in the fusion that would else write sums.
    ends = _of_parts(lax.optimization_barrier(stops), rows).any(axis=2)
    totals = jnp.where(ends, -jnp.inf, totals).swapaxes(1, 2)
    if logs.ndim == 3:
        return Cut(rows, of_tiles.swapaxes(1, 2), totals, stops, None)
    return Cut(rows, of_tiles, totals, stops.all(axis=3), channels.of_sums(of_tiles, stops))


def _of_parts(
    x: Shaped[Array, "batch seq ..."], rows: int
) -> Shaped[Array, "batch parts rows ..."]:
    """Returns rows of parts; the last part ends with zeros."""
    padding = [(0, 0), (0, -x.shape[1] % rows)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, padding).reshape(x.shape[0], -1, rows, *x.shape[2:])
