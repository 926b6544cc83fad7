"""Builders of masks as data, in numpy: for data loaders.

A key is visible to an interval of query positions (FlashMask: Wang et al., arXiv:2410.01359). Each
builder returns a `Mask`, which holds the intervals and the positions for rotary embeddings.

Every builder takes ``lengths``: an int for one document, a list for one row of packed documents, or
a list of lists for several rows. Another argument that has an item for each document is nested as
``lengths`` is. ``seq_len`` is the length of all rows, by default the length of the longest. The
tokens behind a row's documents are padding: it is hidden and sees nothing.

The pictures have a row for each query and a column for each key.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from burst_attention import _checks
from burst_attention._mask import (
    MAX_POSITION,
    Integers,
    Mask,
    Positions,
    Tokens,
    check_documents,
    dense,
    integers,
    items,
    mask_of,
    padded,
)

__all__ = [
    "Mask",
    "block_causal",
    "block_diffusion",
    "chunked",
    "dense",
    "prefix_lm",
    "prefix_tree",
    "spans",
]

Span: TypeAlias = tuple[int, int]


def prefix_lm(prefix_lengths: Integers, lengths: Integers, *, seq_len: int | None = None) -> Mask:
    """Returns the mask of documents whose prefix is seen by the whole document.

    ::

        prefix_lm(2, 4)    x x . .        prefix_lm([0, 2], [2, 3])    x . . . .
                           x x . .                                     x x . . .
                           x x x .                                     . . x x .
                           x x x x                                     . . x x .
                                                                       . . x x x

    Key k of a document from b to e is visible to the positions [b, e) if it is in the prefix, and
    to [k, e) otherwise. With prefixes of length 0 the documents are causal.

    Args:
      prefix_lengths: tokens of each prefix, from 0 to the length of its document.
      lengths: tokens of each document, with its prefix.
      seq_len: length of all rows; default that of the longest.

    Returns:
      A `Mask` of arrays ``[batch, seq_len]``.

    Raises:
      ValueError, TypeError: for lengths that do not go together, with what came.
    """
    documents = check_documents(lengths, seq_len)
    rows, positions = [], []
    prefixes = documents.integers("prefix_lengths", prefix_lengths)
    for row, prefix in zip(documents.rows, prefixes, strict=True):
        wrong = (prefix < 0) | (prefix > row)
        if wrong.any():
            raise ValueError(
                "prefix_lengths must be from 0 to the length of the document, got "
                f"{prefix[wrong][0]} of {row[wrong][0]} tokens"
            )
        tokens = Tokens.of(row)
        in_prefix = tokens.position < tokens.begin + np.repeat(prefix, row)
        rows.append((np.where(in_prefix, tokens.begin, tokens.position), tokens.end))
        positions.append(tokens.position - tokens.begin)
    return mask_of(rows, positions, documents.seq_len)


def prefix_tree(parents: Integers, lengths: Integers, *, seq_len: int | None = None) -> Mask:
    """Returns the mask of texts that share prefixes, each prefix stored once: a tree of nodes.

    ::

        prefix_tree([-1, 0, 0], [2, 1, 2])    x . . . .        0 ─┬─ 1
                                              x x . . .           └─ 2
                                              x x x . .
                                              x x . x .        node 1 and node 2 are continuations
                                              x x . x x        of node 0

    A token sees the tokens of its node's ancestors and the earlier tokens of its own node. Key k is
    visible to the positions [k, e), where e is the end of its node's subtree. Positions for rotary
    embeddings count along the path from the root, so siblings begin at the same position.

    Args:
      parents: the parent of each node, −1 for a root. Nodes are in preorder: a node follows its
        parent or the subtree of a sibling. Several roots are packed trees. Nodes count in their
        row.
      lengths: tokens of each node.
      seq_len: length of all rows; default that of the longest.

    Returns:
      A `Mask` of arrays ``[batch, seq_len]``.

    Raises:
      ValueError, TypeError: for nodes out of order or lengths that do not go together, with what
        came.
    """
    nodes = check_documents(lengths, seq_len)
    rows, positions = [], []
    for row, parent in zip(nodes.rows, nodes.integers("parents", parents), strict=True):
        last, depth = _subtrees(parent, row)
        tokens = Tokens.of(row)
        ends = np.cumsum(row)
        rows.append((tokens.position, np.repeat(ends[last], row)))
        positions.append(tokens.position - tokens.begin + np.repeat(depth, row))
    return mask_of(rows, positions, nodes.seq_len)


def _subtrees(parents: Positions, lengths: Positions) -> tuple[Positions, Positions]:
    """Returns the last node of each node's subtree, and the tokens above each node."""
    last, depth = np.arange(len(parents)), np.zeros(len(parents), np.int64)
    path: list[int] = []
    for node, parent in enumerate(parents):
        while path and path[-1] != parent:
            path.pop()
        if parent != -1:
            if not path:
                raise ValueError(
                    "nodes must be in preorder, so the parent of a node is the node before it, an "
                    f"ancestor of that node, or −1; got {parent} as the parent of node {node}"
                )
            depth[node] = depth[parent] + lengths[parent]
        path.append(node)
    for node in range(len(parents) - 1, 0, -1):
        if parents[node] != -1:
            last[parents[node]] = max(last[parents[node]], last[node])
    return last, depth


def chunked(lengths: Integers, chunk: int, *, seq_len: int | None = None) -> Mask:
    """Returns the causal mask within chunks of each document, as in Llama 4.

    ::

        chunked(5, 2)    x . . . .
                         x x . . .
                         . . x . .
                         . . x x .
                         . . . . x

    Key k is visible to the positions [k, e), where e is the end of its chunk. Chunks count from the
    begin of each document; the last one may be shorter.

    Args:
      lengths: tokens of each document.
      chunk: tokens of a chunk, at least 1.
      seq_len: length of all rows; default that of the longest.

    Returns:
      A `Mask` of arrays ``[batch, seq_len]``.

    Raises:
      ValueError, TypeError: for a wrong length, with what came.
    """
    documents, chunk = check_documents(lengths, seq_len), _checks.at_least_1("chunk", chunk)
    tokens = [Tokens.of(row) for row in documents.rows]
    rows = [(row.position, row.blocks(chunk).end) for row in tokens]
    return mask_of(rows, [row.position - row.begin for row in tokens], documents.seq_len)


def spans(
    lengths: Integers,
    spans: Sequence[Span] | Sequence[Sequence[Span]] | Sequence[Sequence[Sequence[Span]]],
    *,
    seq_len: int | None = None,
) -> Mask:
    """Returns the mask of causal text with bidirectional spans, such as images.

    ::

        spans(5, [(1, 3)])    x . . . .
                              x x x . .
                              x x x . .
                              x x x x .
                              x x x x x

    Key k of a document that ends at e is visible to the positions [s, e) if it is in a span that
    begins at s, and to [k, e) otherwise.

    Args:
      lengths: tokens of each document.
      spans: the spans (begin, end) of each document, in order and without overlap. They count from
        the begin of the document. An end is the position after the last token.
      seq_len: length of all rows; default that of the longest.

    Returns:
      A `Mask` of arrays ``[batch, seq_len]``.

    Raises:
      ValueError, TypeError: for spans that overlap or leave their document, with what came.
    """
    documents = check_documents(lengths, seq_len)
    rows, positions = [], []
    for row, of_row in zip(documents.rows, documents.items("spans", spans), strict=True):
        tokens = Tokens.of(row)
        start = tokens.position.copy()
        for length, end, of_document in zip(row, np.cumsum(row), of_row, strict=True):
            for first, after in _spans(of_document, int(length)) + int(end - length):
                start[first:after] = first
        rows.append((start, tokens.end))
        positions.append(tokens.position - tokens.begin)
    return mask_of(rows, positions, documents.seq_len)


def _spans(values: object, length: int) -> np.ndarray:
    """Returns the spans of one document, ``[spans, 2]``."""
    pairs = [integers("a span", items("a span", pair)) for pair in items("spans", values)]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"a span must be a pair (begin, end), got {_checks.shown(values)}")
    found = np.array(pairs, np.int64).reshape(-1, 2)
    # Two numbers that follow each other in a list of spans: begin, end, begin, end, …
    borders = np.concatenate([[0], found.reshape(-1), [length]])
    if (np.diff(borders) < 0).any():
        raise ValueError(
            f"spans must be in order, without overlap and within the {length} tokens of their "
            f"document, got {_checks.shown(values)}"
        )
    return found


def block_causal(lengths: Integers, block: int, *, seq_len: int | None = None) -> Mask:
    """Returns the mask under which a token sees its own block and earlier blocks of its document.

    ::

        block_causal(5, 2)    x x . . .
                              x x . . .
                              x x x x .
                              x x x x .
                              x x x x x

    Key k of a document that ends at e is visible to the positions [s, e), where s is the begin of
    its block. Blocks count from the begin of each document; the last one may be shorter.

    Args:
      lengths: tokens of each document.
      block: tokens of a block, at least 1.
      seq_len: length of all rows; default that of the longest.

    Returns:
      A `Mask` of arrays ``[batch, seq_len]``.

    Raises:
      ValueError, TypeError: for a wrong length, with what came.
    """
    documents, block = check_documents(lengths, seq_len), _checks.at_least_1("block", block)
    tokens = [Tokens.of(row) for row in documents.rows]
    rows = [(row.blocks(block).begin, row.end) for row in tokens]
    return mask_of(rows, [row.position - row.begin for row in tokens], documents.seq_len)


def block_diffusion(lengths: Integers, block: int, *, seq_len: int | None = None) -> Mask:
    """Returns the mask of the training of block diffusion language models.

    A row holds its documents twice: with noise in [0, n) and clean in [n, 2n), n = seq_len::

        block_diffusion(4, 2)    x x . . . . . .        noisy block 0 sees itself
                                 x x . . . . . .
                                 . . x x x x . .        noisy block 1 sees itself and
                                 . . x x x x . .        clean block 0
                                 . . . . x x . .        clean block 0 sees itself
                                 . . . . x x . .
                                 . . . . x x x x        clean block 1 sees clean blocks 0 and 1
                                 . . . . x x x x

    For a block [s, t) of a document that ends at e, a noisy key is visible to the positions [s, t).
    A clean key is visible to the noisy positions [t, e) and to the clean positions
    [n + s, n + e) (Arriola et al., Block Diffusion, arXiv:2503.09573).

    Args:
      lengths: tokens of each document, counted once.
      block: tokens of a block, at least 1. Blocks count from the begin of each document; the last
        one may be shorter.
      seq_len: n, the length of one copy of all rows; default that of the longest.

    Returns:
      A `Mask` of arrays ``[batch, 2 · seq_len]``, with start and stop ``[batch, 2 · seq_len, 2]``.
      Both copies of a token have the same position for rotary embeddings.

    Raises:
      ValueError, TypeError: for a wrong length, with what came.
    """
    documents, block = check_documents(lengths, seq_len), _checks.at_least_1("block", block)
    copy = documents.seq_len
    if 2 * copy > MAX_POSITION:
        raise ValueError(f"two copies must have up to {MAX_POSITION} tokens, got 2 × {copy}")
    rows, positions = [], []
    for row in documents.rows:
        tokens = Tokens.of(row)
        blocks, none = tokens.blocks(block), np.zeros(len(tokens.position), np.int64)
        noisy = np.stack([blocks.begin, none], 1), np.stack([blocks.end, none], 1)
        clean = (
            np.stack([blocks.end, copy + blocks.begin], 1),
            np.stack([tokens.end, copy + tokens.end], 1),
        )
        start, stop = (_twice(*parts, copy) for parts in zip(noisy, clean, strict=True))
        rows.append((start, stop))
        rope = tokens.position - tokens.begin
        positions.append(_twice(rope, rope, copy))
    return mask_of(rows, positions, 2 * copy)


def _twice(noisy: np.ndarray, clean: np.ndarray, copy: int) -> np.ndarray:
    """Returns the arrays of both copies of a row one behind the other, each of ``copy`` tokens."""
    return padded([noisy, clean], copy).reshape(2 * copy, *noisy.shape[1:])
