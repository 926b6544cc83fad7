"""Packed causal documents over ranks: equal tokens and nearly equal work for each rank."""

from dataclasses import dataclass, replace
from typing import TypeAlias

import jax
import numpy as np
from jaxtyping import Int32, Int64

from burst_attention import _checks
from burst_attention._layouts import AnyArray, take
from burst_attention._mask import (
    MAX_POSITION,
    Documents,
    Integers,
    Mask,
    Positions,
    Tokens,
    check_documents,
    mask_of,
    padded,
)
from burst_attention._padding import PADDING

Rows: TypeAlias = Int32[np.ndarray, "batch seq"]


@dataclass(frozen=True)
class BalancedDocuments:
    """Packed causal documents whose blocks are given to ranks, as `balance_documents` returns them.

    All arrays are in numpy and, except ``inverse``, in the order in which the ranks hold the
    tokens: rank r holds entries r · n up to (r + 1) · n of the n · axis_size entries of a row.

    Args:
      mask: the intervals, and the positions of queries and keys, which are those of the packed row.
      segment_ids: int32 ``[batch, seq]``, the index of each token's document, −1 for padding. The
        mask already separates the documents.
      permutation: int32 ``[batch, seq]``, the position of each entry.
      inverse: int32 ``[batch, seq]``, the entry of each position.
      block: tokens of a block.
      tile_pairs: int64 ``[batch, axis_size, axis_size]``, for the queries of each rank and the keys
        of each rank the number of tiles, block × block pairs, with a visible pair.
      visible_pairs: the number of visible pairs of all rows.
    """

    mask: Mask
    segment_ids: Rows
    permutation: Rows
    inverse: Rows
    block: int
    tile_pairs: Int64[np.ndarray, "batch ranks ranks"]
    visible_pairs: int

    @property
    def max_over_mean(self) -> float:
        """The tiles of the busiest rank over the mean of all ranks; 1 where nothing is visible."""
        work = self.tile_pairs.sum((0, 2))
        return float(work.max() / work.mean()) if work.any() else 1.0

    @property
    def max_over_mean_by_step(self) -> float:
        """The time of a ring whose ranks wait for the busiest one at each step, over the mean work.

        Time counts in tiles; 1 where nothing is visible. At step i rank r computes with the keys of
        rank (r − i) mod axis_size.
        """
        pairs = self.tile_pairs.sum(0)
        rank = np.arange(len(pairs))
        steps = pairs[rank[:, None], rank[:, None] - rank]
        return float(steps.max(0).sum() / pairs.sum() * len(pairs)) if pairs.any() else 1.0

    @property
    def computed_over_visible(self) -> float:
        """The pairs in tiles with a visible pair over the visible pairs; 1 where none is."""
        computed = int(self.tile_pairs.sum()) * self.block**2
        return computed / self.visible_pairs if self.visible_pairs else 1.0

    def to_ranks(self, x: AnyArray, axis: int = 1) -> AnyArray:
        """Returns an array of packed rows in the order of the ranks.

        Args:
          x: global array of numpy or JAX in the order of the sequence. Its dimension before
            ``axis`` is the batch; with one row of documents all of x is reordered alike.
          axis: dimension of the sequence, which has the length of a row.

        Returns:
          An array as `burst_attention.to_layout` returns it: a JAX array keeps its sharding.

        Raises:
          ValueError: for another length or batch.
        """
        return _reordered(x, self.permutation, _checks.sequence_axis(x, axis))

    def from_ranks(self, x: AnyArray, axis: int = 1) -> AnyArray:
        """Returns an array in the order of the sequence: the exact inverse of `to_ranks`."""
        return _reordered(x, self.inverse, _checks.sequence_axis(x, axis))


def balance_documents(
    lengths: Integers, axis_size: int, block: int = 128, *, seq_len: int | None = None
) -> BalancedDocuments:
    """Gives the tokens of packed causal documents to ranks, with nearly equal work for each rank.

    A row is cut into blocks. Each rank gets the same number of blocks, in the order of the
    sequence. The work of a block i whose first token is in the document from b on is the number of
    tiles, block × block pairs, in which its queries see a key::

        work(i) = i − b // block + 1

    Of each group of axis_size blocks that follow each other, every rank gets one block: the rank
    with the least work so far gets the block with the most work. Groups whose blocks differ most
    come first, so later groups even out what they leave. Each query sees nearly as many keys of
    each rank, so the work is also nearly even at every step of a ring. The result is data, so a
    program that is compiled once serves every batch of the same shape::

        balance = ba.balance_documents([700, 5000, 1500], 8, seq_len=8192)
        tokens = balance.to_ranks(tokens)                            # numpy, [1, 8192]

        @jax.jit
        @jax.shard_map(mesh=mesh, in_specs=spec, out_specs=spec)     # spec = P(None, "context")
        def attend(q, k, v, mask):
            return ba.attention(q, k, v, axis_name="context", **mask.arguments)

        mask = jax.device_put(balance.mask, jax.NamedSharding(mesh, spec))
        out = balance.from_ranks(attend(q, k, v, mask))

    Args:
      lengths: tokens of each document: a list for a row, a list of lists for several rows.
      axis_size: number of devices along the sequence.
      block: tokens of a block; 128 is the height of the tiles of the kernels.
      seq_len: length of all rows, a multiple of axis_size · block; default the least that holds
        the longest row. Tokens behind the documents are padding, which is hidden and sees nothing.

    Returns:
      A `BalancedDocuments`.

    Raises:
      ValueError, TypeError: for a wrong length or number of devices, with what came.
    """
    size = _checks.at_least_1("axis_size", axis_size)
    block = _checks.at_least_1("block", block)
    multiple = size * block
    documents = check_documents(lengths, seq_len)
    if seq_len is None:
        missing = -documents.seq_len % multiple
        documents = replace(documents, seq_len=documents.seq_len + missing)
    if documents.seq_len % multiple or documents.seq_len > MAX_POSITION:
        raise ValueError(
            f"seq_len must be a multiple of axis_size · block, {size} · {block}, up to "
            f"{MAX_POSITION}, got {documents.seq_len}"
        )
    first_tiles = [_first_tiles(row, documents.seq_len // block, block) for row in documents.rows]
    owners = [_owners(first, size) for first in first_tiles]
    pairs = [_pairs(*each, size) for each in zip(first_tiles, owners, strict=True)]
    order = np.array([np.argsort(owner, kind="stable") for owner in owners])
    within = np.arange(block, dtype=np.int32)
    permutation = _tokens(order, within)
    inverse = _tokens(np.argsort(order, axis=1), within)
    mask, ids = _mask(documents)
    arrays = jax.tree.map(lambda x: np.take_along_axis(x, permutation, 1), mask)
    return BalancedDocuments(
        replace(arrays, query_positions=permutation, key_positions=permutation),
        np.take_along_axis(ids, permutation, 1),
        permutation,
        inverse,
        block,
        np.array(pairs),
        sum(int((row * (row + 1) // 2).sum()) for row in documents.rows),
    )


def _first_tiles(lengths: Positions, blocks: int, block: int) -> Positions:
    """Returns the index of the first tile of keys that each block of queries sees.

    A block sees a key in each tile from the first up to its own. A block i of padding sees none, so
    its first tile is i + 1.
    """
    begins = np.arange(blocks) * block
    ends = np.cumsum(lengths)
    document = np.searchsorted(ends, begins, side="right")
    in_document = document < len(lengths)
    first = np.arange(1, blocks + 1)
    first[in_document] = (ends - lengths)[document[in_document]] // block
    return first


def _owners(first_tiles: Positions, size: int) -> Positions:
    """Returns the rank of each block."""
    work = (np.arange(1, len(first_tiles) + 1) - first_tiles).reshape(-1, size)
    owners, loads = np.empty_like(work), np.zeros(size, np.int64)
    heaviest_first = np.argsort(-work, axis=1, kind="stable")
    for group in np.argsort(-np.ptp(work, axis=1), kind="stable"):
        blocks = heaviest_first[group]
        ranks = np.argsort(loads, kind="stable")
        owners[group, blocks] = ranks
        loads[ranks] += work[group, blocks]
    return owners.reshape(-1)


def _pairs(
    first_tiles: Positions, owners: Positions, size: int
) -> Int64[np.ndarray, "ranks ranks"]:
    """Returns the number of tiles for the rank of the queries and the rank of the keys."""
    owned = owners[:, None] == np.arange(size)
    before = np.concatenate([np.zeros((1, size), np.int64), np.cumsum(owned, axis=0)])
    seen = before[1:] - before[first_tiles]
    return np.array([seen[owned[:, rank]].sum(axis=0) for rank in range(size)])


def _tokens(blocks: Int64[np.ndarray, "batch blocks"], within: Positions) -> Rows:
    """Returns the indices of the tokens of blocks."""
    tokens = blocks.astype(np.int32)[:, :, None] * len(within) + within
    return tokens.reshape(len(blocks), -1)


def _mask(documents: Documents) -> tuple[Mask, Rows]:
    """Returns the causal mask and the segment ids of documents, in the order of the sequence."""
    tokens = [Tokens.of(row) for row in documents.rows]
    rows = [(row.position, row.end) for row in tokens]
    mask = mask_of(rows, [row.position - row.begin for row in tokens], documents.seq_len)
    numbers = [np.repeat(np.arange(len(row)), row) - PADDING for row in documents.rows]
    return mask, padded(numbers, documents.seq_len) + np.int32(PADDING)


def _reordered(x: AnyArray, order: Rows, axis: int) -> AnyArray:
    """Returns an array with the tokens of each row in another order."""
    batch = x.shape[axis - 1] if axis else 1
    if x.shape[axis] != order.shape[1] or len(order) not in (1, batch):
        raise ValueError(
            f"x must have {order.shape[1]} tokens along axis {axis}"
            + (f" and a batch of {len(order)} before it" if len(order) > 1 else "")
            + f", got shape {x.shape}"
        )
    return take(x, order if len(order) > 1 else order[0], axis)
