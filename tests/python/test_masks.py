"""Builders of masks, against the definition of each mask pair by pair."""

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from burst_attention import masks
from jax.sharding import PartitionSpec as P

pytestmark = pytest.mark.oldest_jax


def documents_of(lengths, seq_len):
    """Returns for each position its document and its place there; None and 0 for padding."""
    found = [(number, place) for number, n in enumerate(lengths) for place in range(n)]
    return found + [(None, 0)] * (seq_len - len(found))


def matrix(seq_len, sees):
    """Returns the matrix of a definition of pairs (query position, key position)."""
    return np.array([[bool(sees(q, k)) for k in range(seq_len)] for q in range(seq_len)])


def in_documents(lengths, seq_len, sees):
    """Returns the matrix of documents that do not see each other, of a definition within one."""
    tokens = documents_of(lengths, seq_len)

    def seen(q, k):
        (document, place), (of_key, place_of_key) = tokens[q], tokens[k]
        return document is not None and document == of_key and sees(document, place, place_of_key)

    return matrix(seq_len, seen)


def check(mask, *expected):
    """Checks the matrices of all rows, types, and that no query sees a key in two intervals."""
    assert np.array_equal(masks.dense(**mask.arguments), np.array(expected))
    arrays = [mask.start, mask.stop, mask.rope_positions]
    assert all(x.dtype == np.int32 and x.shape[:2] == arrays[0].shape[:2] for x in arrays)
    if mask.start.ndim == 3:
        one, other = (
            masks.dense((mask.start[..., i], mask.stop[..., i])) for i in range(mask.start.shape[2])
        )
        assert not (one & other).any()


def drawn(seed):
    """Returns the lengths of a row of documents, and the length of a row that holds them."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(0, 9, generator.integers(1, 6)).tolist()
    return generator, lengths, sum(lengths) + int(generator.integers(0, 4))


@pytest.mark.parametrize("seed", range(6))
def test_builders_of_documents(seed):
    generator, lengths, n = drawn(seed)
    positions = [position for _, position in documents_of(lengths, n)]

    prefixes = [int(generator.integers(0, length + 1)) for length in lengths]
    mask = masks.prefix_lm(prefixes, lengths, seq_len=n)
    check(mask, in_documents(lengths, n, lambda d, q, k: k <= q or k < prefixes[d]))
    assert mask.rope_positions.tolist() == [positions]

    size = int(generator.integers(1, 5))
    mask = masks.chunked(lengths, size, seq_len=n)
    check(mask, in_documents(lengths, n, lambda d, q, k: k <= q and k // size == q // size))
    assert mask.rope_positions.tolist() == [positions]

    mask = masks.block_causal(np.array(lengths), size, seq_len=n)
    check(mask, in_documents(lengths, n, lambda d, q, k: k // size <= q // size))
    assert mask.rope_positions.tolist() == [positions]

    borders = [sorted(generator.integers(0, length + 1, 4).tolist()) for length in lengths]
    pairs = [[(x[0], x[1]), (x[2], x[3])] for x in borders]
    mask = masks.spans(lengths, pairs, seq_len=n)

    def sees(document, q, k):
        return k <= q or any(a <= q < b and a <= k < b for a, b in pairs[document])

    check(mask, in_documents(lengths, n, sees))
    assert mask.rope_positions.tolist() == [positions]


@pytest.mark.parametrize("seed", range(4))
def test_block_diffusion(seed):
    generator, lengths, n = drawn(seed)
    size = int(generator.integers(1, 5))
    tokens = documents_of(lengths, n)

    def sees(q, k):
        (document, place), (of_key, place_of_key) = tokens[q % n], tokens[k % n]
        if document is None or document != of_key:
            return False
        block, of_key = place // size, place_of_key // size
        if q < n:
            return block == of_key if k < n else of_key < block
        return k >= n and of_key <= block

    mask = masks.block_diffusion(lengths, size, seq_len=n)
    check(mask, matrix(2 * n, sees))
    assert mask.rope_positions.tolist() == [[position for _, position in tokens] * 2]


@pytest.mark.parametrize("seed", range(6))
def test_prefix_tree(seed):
    """A token sees its path from the root, up to itself."""
    generator = np.random.default_rng(seed)
    parents, path = [], []
    for node in range(8):
        path = path[: int(generator.integers(0, len(path) + 1))]
        parents.append(path[-1] if path else -1)
        path = [*path, node]
    lengths = generator.integers(0, 5, 8).tolist()
    n = sum(lengths) + 3
    tokens = documents_of(lengths, n)

    def path_to(position):
        """Returns the positions from the root to a token, by walking up the parents."""
        node, place = tokens[position]
        seen = [position - i for i in range(place + 1)] if node is not None else []
        while node is not None and parents[node] != -1:
            node = parents[node]
            seen += [p for p in range(n) if tokens[p][0] == node]
        return seen

    mask = masks.prefix_tree(parents, lengths, seq_len=n)
    check(mask, matrix(n, lambda q, k: k in path_to(q)))
    assert mask.rope_positions.tolist() == [[max(len(path_to(p)) - 1, 0) for p in range(n)]]


def test_lengths_are_of_a_document_a_row_or_rows():
    one = masks.prefix_lm(2, 4)
    assert jax.tree.all(jax.tree.map(np.array_equal, one, masks.prefix_lm([2], [4])))
    both = masks.prefix_lm([[2], [0, 1]], [[4], [3, 2]])
    assert both.start.shape == (2, 5)
    assert both.start.tolist() == [[0, 0, 2, 3, 0], [0, 1, 2, 3, 4]]
    assert both.stop.tolist() == [[4, 4, 4, 4, 0], [3, 3, 3, 5, 5]]
    assert masks.spans(5, [(1, 3)]).start.tolist() == [[0, 1, 1, 3, 4]]
    assert masks.spans([[5], [2]], [[[(1, 3)]], [[]]]).start.tolist()[1] == [0, 1, 0, 0, 0]
    assert masks.chunked([], 2, seq_len=3).stop.tolist() == [[0, 0, 0]]


def test_a_tree_of_leaves_that_share_three_quarters_of_their_tokens():
    """Its visible pairs are 1.97 times fewer than those of eight separate rows."""
    shared, own = 96, 32
    tree = masks.prefix_tree([-1] + [0] * 8, [shared] + [own] * 8)
    separate = 8 * (shared + own) * (shared + own + 1) / 2
    assert separate / masks.dense(**tree.arguments).sum() == pytest.approx(1.97, abs=0.02)


@pytest.mark.parametrize("layout", ba._layouts.LAYOUTS)
@pytest.mark.parametrize(
    "mask", [masks.block_diffusion([7, 3], 2, seq_len=12), masks.chunked(24, 5)]
)
def test_a_layout_reorders_keys_and_not_values(mask, layout):
    order = ba.layout_positions(24, 4, layout)
    stored = mask.to_layout(4, layout)
    positions = order[None]
    found = masks.dense((stored.start, stored.stop), positions, positions)
    assert np.array_equal(found, masks.dense(**mask.arguments)[:, order][:, :, order])
    assert np.array_equal(stored.rope_positions, mask.rope_positions[:, order])


def test_dense_combines_masks():
    generator = np.random.default_rng(0)
    start, stop = (generator.integers(0, 12, (2, 9, 2)) for _ in range(2))
    queries, keys = (generator.permuted(np.tile(np.arange(12), (2, 1)), axis=1) for _ in range(2))
    queries, keys = queries[:, :7], keys[:, :9]
    ids, ids_of_keys = generator.integers(-1, 2, (2, 7)), generator.integers(-1, 2, (2, 9))
    found = masks.dense(
        (start, stop), queries, keys, local_window_size=(5, 4), segment_ids=(ids, ids_of_keys)
    )
    causal = masks.dense((start, stop), queries, keys, is_causal=True)
    for b, i, j in np.ndindex(found.shape):
        p, r = queries[b, i], keys[b, j]
        visible = any(start[b, j, e] <= p < stop[b, j, e] for e in range(2))
        same = ids[b, i] == ids_of_keys[b, j] and ids[b, i] >= 0
        assert found[b, i, j] == (visible and same and p - 5 <= r <= p + 4)
        assert causal[b, i, j] == (visible and r <= p)


def test_a_mask_is_a_tree_of_arrays():
    """One trace serves all masks of a shape, and one spec all arrays of a mask."""
    traces = []

    @jax.jit
    @jax.shard_map(mesh=ring.line(4), in_specs=P(None, "context"), out_specs=P(None, "context"))
    def seen(mask):
        traces.append(mask)
        assert set(mask.arguments) == {"visible"}
        start, stop = mask.arguments["visible"]
        return stop - start

    for prefix in range(3):
        mask = masks.prefix_lm(prefix, 8)
        assert np.array_equal(seen(mask), mask.stop - mask.start)
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: masks.prefix_lm(5, 4),
            ValueError,
            "from 0 to the length of the document, got 5 of",
        ),
        (
            lambda: masks.prefix_lm([1], [4, 4]),
            ValueError,
            r"lengths, \[2\] in each row, got \[1\]",
        ),
        (lambda: masks.prefix_lm(1, -4), ValueError, "lengths must not be negative, got -4"),
        (
            lambda: masks.prefix_lm([[0] * 2] * 2, [[4, -1], [1] * 2]),
            ValueError,
            "lengths must not be negative, got -1$",
        ),
        (
            lambda: masks.spans(500, [(i, i + 2) for i in range(99)]),
            ValueError,
            r"got \[\(0, 2\), \(1, 3\), .*\(5, 7\), \.\.\.\]$",
        ),
        (lambda: masks.prefix_lm(1, 4.0), TypeError, "lengths must be a list, a tuple or a numpy"),
        (
            lambda: masks.prefix_lm(1.5, 4),
            TypeError,
            "item of prefix_lengths must be an int, got 1.5",
        ),
        (
            lambda: masks.chunked([4, [4]], 2),
            TypeError,
            r"item of lengths must be an int, got \[4\]",
        ),
        (
            lambda: masks.chunked(jnp.ones(3, int), 2),
            TypeError,
            "since masks are built on the host",
        ),
        (lambda: masks.chunked(4, 0), ValueError, "chunk must be at least 1, got 0"),
        (lambda: masks.chunked(4, 2.0), TypeError, "chunk must be an int, got 2.0"),
        (
            lambda: masks.chunked([4, 4], 2, seq_len=7),
            ValueError,
            "seq_len must be from 8, the tok",
        ),
        (lambda: masks.chunked(4, 2, seq_len=2**31), ValueError, "to 2147483647, got 2147483648"),
        (lambda: masks.block_causal(4, -1), ValueError, "block must be at least 1, got -1"),
        (lambda: masks.block_diffusion(4, 0), ValueError, "block must be at least 1, got 0"),
        (lambda: masks.block_diffusion(4, 2, seq_len=2**30), ValueError, "got 2 × 1073741824"),
        (lambda: masks.prefix_tree([-1, 1], [2, 2]), ValueError, "got 1 as the parent of node 1"),
        (lambda: masks.prefix_tree([-1, 0, 0, 1], [1] * 4), ValueError, "must be in preorder, so"),
        (lambda: masks.prefix_tree([-2], [1]), ValueError, "got -2 as the parent of node 0"),
        (
            lambda: masks.spans(5, [(3, 1)]),
            ValueError,
            r"within the 5 tokens of .* got \[\(3, 1\)\]",
        ),
        (lambda: masks.spans(5, [(0, 3), (2, 4)]), ValueError, "in order, without overlap"),
        (lambda: masks.spans(5, [(1, 6)]), ValueError, "without overlap and within the 5 tokens"),
        (lambda: masks.spans(5, [(1, 2, 3)]), ValueError, r"a span must be a pair \(begin, end\)"),
        (lambda: masks.spans(5, (1, 3)), TypeError, "a span must be a list, a tuple or a numpy"),
        (lambda: masks.chunked(6, 2).to_layout(4, "zigzag"), ValueError, "a multiple of 8 tokens"),
    ],
)
def test_wrong_arguments_of_builders(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_the_greatest_stop_of_dense_is_no_limit():
    last = 2**31 - 1
    start, stop = np.array([[0, 0, 5, last]]), np.array([[last - 1, last, last + 9, last]])
    found = masks.dense((start, stop), np.array([[last - 1, last]]))
    assert found[0].tolist() == [[False, True, True, False]] * 2


ZEROS = np.zeros((1, 3), np.int32)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: masks.dense(ZEROS), TypeError, r"visible must be a pair \(start, stop\)"),
        (lambda: masks.dense((ZEROS, ZEROS[0])), ValueError, r"one shape, .* \(1, 3\) and \(3,\)"),
        (lambda: masks.dense((ZEROS[None],) * 2), ValueError, r"got \(1, 1, 3\) and \(1, 1, 3\)"),
        (lambda: masks.dense((ZEROS, ZEROS * 0.5)), TypeError, "stop must be .* got float64"),
        (lambda: masks.dense((ZEROS, 3)), TypeError, "stop must be an array of integers, got 3"),
        (lambda: masks.dense((ZEROS, ZEROS), ZEROS[0]), ValueError, r"\(1, 3\), .* got \(3,\)"),
        (
            lambda: masks.dense((ZEROS,) * 2, segment_ids=(ZEROS, None)),
            TypeError,
            "ids of keys must",
        ),
        (
            lambda: masks.dense((ZEROS,) * 2, segment_ids=(ZEROS,)),
            ValueError,
            "a pair, got 1 arrays",
        ),
        (lambda: masks.dense((ZEROS,) * 2, local_window_size=1.5), TypeError, "must be an int or"),
        (
            lambda: jax.jit(masks.dense)((ZEROS, ZEROS)),
            TypeError,
            "start must be known on the host",
        ),
        (lambda: masks.dense((np.zeros((1, 2**15), int),) * 2), ValueError, "up to 268435456 elem"),
    ],
)
def test_wrong_arguments_of_dense(call, error, words):
    with pytest.raises(error, match=words):
        call()
