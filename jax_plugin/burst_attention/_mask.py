"""Masks as data: intervals of query positions for each key, and the documents of a row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
import numpy as np
from jaxtyping import Bool, Int, Int32

from burst_attention import _checks
from burst_attention._attention.options import NO_LIMIT, check_options
from burst_attention._layouts import to_layout
from burst_attention._types import ArrayType, Layout

Integers: TypeAlias = int | Sequence[int] | Sequence[Sequence[int]]
"""An integer for one document, for each document of a row, or for each document of each row."""
# Rows differ in their tokens, so the checks of annotations must not compare them.
Positions: TypeAlias = Int[np.ndarray, " _tokens"]
OfTokens: TypeAlias = Int[np.ndarray, "_tokens ..."]
Intervals: TypeAlias = Int[np.ndarray, "batch kv_len intervals"]
Row: TypeAlias = tuple[OfTokens, OfTokens]
"""The starts and the stops of one row's keys."""

SEQUENCES = (list, tuple, np.ndarray)
MAX_POSITION = 2**31 - 1
MAX_DENSE = 2**28
"""The elements of the largest boolean matrix that `dense` makes: 256 MiB."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mask:
    """A mask as `attention` takes it: the interval of query positions that sees each key.

    A query at position p sees key j iff ``start[j] <= p < stop[j]``, for one of the key's
    intervals. Positions count in the row. A key whose intervals are empty is hidden.

    A mask is a tree of arrays for JAX, so it goes through ``jit`` and ``shard_map`` as an array
    does, with one ``PartitionSpec("data", "context")`` for all of its arrays::

        mask = ba.masks.prefix_lm([64, 128], [512, 512]).to_layout(8, "zigzag")
        out = ba.attention(q, k, v, axis_name="context", layout="zigzag", **mask.arguments)

    Args:
      start: int32 ``[batch, kv_len]``, or ``[batch, kv_len, 2]`` for two intervals.
      stop: int32, of the shape of start.
      rope_positions: int32 ``[batch, seq]``, the positions for rotary embeddings. They count in the
        document, and in a tree along the path from the root. Padding has 0.
      query_positions: int32 ``[batch, q_len]``, or None where the layout tells the positions.
      key_positions: int32 ``[batch, kv_len]``, or None where the layout tells the positions.
    """

    start: np.ndarray | jax.Array
    stop: np.ndarray | jax.Array
    rope_positions: np.ndarray | jax.Array
    query_positions: np.ndarray | jax.Array | None = None
    key_positions: np.ndarray | jax.Array | None = None

    @property
    def arguments(self) -> dict[str, object]:
        """The keyword arguments of `attention`, `dot_product_attention` and `masks.dense`."""
        positions = {"query_positions": self.query_positions, "key_positions": self.key_positions}
        given = {name: x for name, x in positions.items() if x is not None}
        return {"visible": (self.start, self.stop), **given}

    def to_layout(self, axis_size: int, layout: Layout) -> "Mask":
        """Returns the mask with the entries of all arrays reordered for a layout.

        The values stay, since they are positions in the row. See `burst_attention.to_layout` for
        the arguments and errors.
        """
        return jax.tree.map(lambda x: to_layout(x, axis_size, layout), self)


@dataclass(frozen=True)
class Documents:
    """The lengths of the documents of each row, checked."""

    rows: tuple[Positions, ...]
    depth: int
    """How deep the user's lengths were nested: 0 one document, 1 one row, 2 rows."""
    seq_len: int
    """The length of every row, with its padding."""

    def items(self, name: str, values: object) -> list[list[object]]:
        """Returns the items of an argument that has one item for each document, row by row."""
        rows = [[values]] if self.depth == 0 else [values] if self.depth == 1 else values
        rows = [items(name, row) for row in items(name, rows)]
        found, counts = [len(row) for row in rows], [len(row) for row in self.rows]
        if found != counts:
            raise ValueError(
                f"{name} must have an item for each of lengths, {_checks.shown(counts)} in each "
                f"row, got {_checks.shown(found)}"
            )
        return rows

    def integers(self, name: str, values: object) -> list[Positions]:
        """Returns the integers of an argument that has one for each document, row by row."""
        return [integers(name, row) for row in self.items(name, values)]


def check_documents(lengths: object, seq_len: object = None) -> Documents:
    """Returns the lengths of documents in rows of one length."""
    if _checks.index(lengths) is not None:
        depth, rows = 0, [[lengths]]
    else:
        found = items("lengths", lengths)
        has_rows = bool(found) and all(isinstance(item, SEQUENCES) for item in found)
        depth = 2 if has_rows else 1
        rows = [items("lengths", row) for row in found] if has_rows else [found]
    checked = tuple(integers("lengths", row) for row in rows)
    least = min((int(row.min(initial=0)) for row in checked), default=0)
    if least < 0:
        raise ValueError(f"lengths must not be negative, got {least}")
    longest = max(int(row.sum()) for row in checked)
    size = longest if seq_len is None else _checks.integer("seq_len", seq_len)
    if not longest <= size <= MAX_POSITION:
        raise ValueError(
            f"seq_len must be from {longest}, the tokens of the longest row, to {MAX_POSITION}, "
            f"got {size}"
        )
    return Documents(checked, depth, size)


def items(name: str, values: object) -> list[object]:
    """Returns the items of a sequence or of a numpy array."""
    if isinstance(values, jax.core.Tracer) or not isinstance(values, SEQUENCES):
        raise TypeError(
            f"{name} must be a list, a tuple or a numpy array, since masks are built on the host, "
            f"got {_checks.describe(values)}"
        )
    return list(values)


def integers(name: str, values: list[object]) -> Positions:
    """Returns integers as an array."""
    found = [_checks.integer(f"an item of {name}", value) for value in values]
    try:
        return np.array(found, np.int64)
    except OverflowError:
        raise _checks.beyond_int32(f"an item of {name}", max(found, key=abs)) from None


@dataclass(frozen=True)
class Tokens:
    """The tokens of packed documents, the documents one behind the other from position 0 on."""

    position: Positions
    begin: Positions
    """The first position of each token's document."""
    end: Positions
    """The position after the last token of each token's document."""

    @classmethod
    def of(cls, lengths: Positions) -> "Tokens":
        """Returns the tokens of documents of some lengths."""
        ends = np.cumsum(lengths)
        begin, end = (np.repeat(x, lengths) for x in (ends - lengths, ends))
        return cls(np.arange(len(end), dtype=np.int64), begin, end)

    def blocks(self, size: int) -> "Tokens":
        """Returns the same tokens with blocks of up to ``size`` tokens in the place of documents.

        Blocks count from the begin of each document.
        """
        begin = self.position - (self.position - self.begin) % size
        return Tokens(self.position, begin, np.minimum(begin + size, self.end))


def padded(rows: list[np.ndarray], seq_len: int) -> Int32[np.ndarray, "batch seq *intervals"]:
    """Returns arrays of tokens as rows of one length, with zeros for padding."""
    whole = np.zeros((len(rows), seq_len, *rows[0].shape[1:]), np.int32)
    for target, row in zip(whole, rows, strict=True):
        target[: len(row)] = row
    return whole


def mask_of(rows: list[Row], rope_positions: list[Positions], seq_len: int) -> Mask:
    """Returns the mask of rows, whose padding is hidden and sees nothing."""
    start, stop = (padded(list(x), seq_len) for x in zip(*rows, strict=True))
    return Mask(start, stop, padded(rope_positions, seq_len))


def dense(
    visible: tuple[ArrayType, ArrayType],
    query_positions: ArrayType | None = None,
    key_positions: ArrayType | None = None,
    *,
    is_causal: bool = False,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    segment_ids: ArrayType | tuple[ArrayType, ArrayType] | None = None,
) -> Bool[np.ndarray, "batch q_len kv_len"]:
    """Returns the boolean matrix of a mask, for small sizes and tests.

    With p the position of query i and r the position of key j::

        seen[i, j] = any(start[j] <= p < stop[j])              over the intervals of key j;
                                                               a stop of 2**31 - 1 is no limit
            and p - left <= r <= p + right                     right = 0 with is_causal
            and query id[i] == key id[j] >= 0

    ``dense(**mask.arguments)`` is the matrix of a `Mask`.

    Args:
      visible: (start, stop), integers ``[batch, kv_len]`` or ``[batch, kv_len, 2]``.
      query_positions: integers ``[batch, q_len]``; default 0, 1, … for as many queries as the
        segment ids of queries tell, or else as there are keys.
      key_positions: integers ``[batch, kv_len]``; default 0, 1, …
      is_causal: as in `attention`.
      local_window_size: as in `attention`.
      segment_ids: integers ``[batch, seq]``, or a pair (ids of queries, ids of keys), as in
        `attention`.

    Returns:
      bool ``[batch, q_len, kv_len]``, True where the query sees the key.

    Raises:
      ValueError: for shapes that do not go together, and for more than 2²⁸ elements.
      TypeError: for arrays that are not integers.
    """
    start, stop = _intervals(visible)
    batch, kv_len, intervals = start.shape
    pair = segment_ids if isinstance(segment_ids, tuple | list) else (segment_ids, segment_ids)
    if len(pair) != 2:
        raise ValueError(f"segment_ids must be one array or a pair, got {len(pair)} arrays")
    rows = [x for x in (query_positions, pair[0]) if x is not None]
    q_len = _integer_array("query_positions or segment_ids", rows[0]).shape[-1] if rows else kv_len
    if batch * q_len * kv_len > MAX_DENSE:
        raise ValueError(
            f"the matrix must have up to {MAX_DENSE} elements, got {batch} × {q_len} × {kv_len}; "
            "attention takes the intervals as they are"
        )
    positions = _of_tokens("query_positions", query_positions, (batch, q_len))[:, :, None]
    of_keys = _of_tokens("key_positions", key_positions, (batch, kv_len))[:, None]
    seen = np.zeros((batch, q_len, kv_len), bool)
    for interval in range(intervals):
        first, after = (x[:, None, :, interval] for x in (start, stop))
        seen |= (first <= positions) & (positions < after)
    given = {"is_causal": is_causal, "local_window_size": local_window_size}
    left, right = check_options("dense", given).window(MAX_POSITION)
    if left != NO_LIMIT:
        seen &= of_keys >= positions - left
    if right != NO_LIMIT:
        seen &= of_keys <= positions + right
    if segment_ids is not None:
        names = "segment_ids of queries", "segment_ids of keys"
        ids, ids_of_keys = map(_of_tokens, names, pair, ((batch, q_len), (batch, kv_len)))
        seen &= (ids[:, :, None] == ids_of_keys[:, None]) & (ids[:, :, None] >= 0)
    return seen


def _intervals(visible: object) -> tuple[Intervals, Intervals]:
    """Returns the starts and stops of keys, a stop beyond all positions where there is no limit."""
    if not isinstance(visible, tuple | list) or len(visible) != 2:
        raise TypeError(f"visible must be a pair (start, stop), got {_checks.describe(visible)}")
    start, stop = map(_integer_array, ("start", "stop"), visible)
    if start.shape != stop.shape or start.ndim not in (2, 3) or start.shape[2:] not in ((), (2,)):
        raise ValueError(
            "start and stop must have one shape, [batch, kv_len] or [batch, kv_len, 2], got "
            f"{start.shape} and {stop.shape}"
        )
    start, stop = (
        np.clip(np.atleast_3d(x), -MAX_POSITION - 1, MAX_POSITION) for x in (start, stop)
    )
    return start, np.where((stop == MAX_POSITION) & (start < stop), MAX_POSITION + 1, stop)


def _of_tokens(name: str, values: object, shape: tuple[int, int]) -> Int[np.ndarray, "batch seq"]:
    """Returns integers of tokens in the shape that the mask needs; positions by default."""
    if values is None and name.endswith("positions"):
        return np.broadcast_to(np.arange(shape[1]), shape)
    found = _integer_array(name, values)
    if found.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, as start and stop, got {found.shape}")
    return found


def _integer_array(name: str, values: object) -> Int[np.ndarray, "..."]:
    if isinstance(values, jax.core.Tracer):
        raise TypeError(f"{name} must be known on the host, got {_checks.describe(values)}")
    found = np.asarray(values)
    if found.ndim == 0:
        raise TypeError(f"{name} must be an array of integers, got {_checks.describe(values)}")
    if not np.issubdtype(found.dtype, np.integer):
        raise TypeError(f"{name} must be an array of integers, got {found.dtype}")
    return found.astype(np.int64)
