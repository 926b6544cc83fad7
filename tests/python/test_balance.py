"""balance_documents gives equal tokens and nearly equal work to ranks."""

import re
from functools import cache
from pathlib import Path

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

PAGE = Path(__file__).parents[2] / "docs" / "masks.md"
RANKS, TOKENS, SEEDS, TILE = 8, 131072, 20, 128


def packed(seed):
    """Returns log-normal lengths, median 2,048 and σ 1.2, that fill a row; the last one is cut."""
    generator = np.random.default_rng(seed)
    lengths = np.maximum(1, generator.lognormal(np.log(2048), 1.2, TOKENS // 64).astype(int))
    ends = np.minimum(np.cumsum(lengths), TOKENS)
    return np.diff(ends, prepend=0)[: np.searchsorted(ends, TOKENS) + 1]


def tiles_seen(lengths, order, tile=TILE):
    """Returns whether any pair is seen, for tiles of queries and of keys in an order of tokens.

    A pair of tiles is seen iff in a document the last query of the one is at or behind the first
    key of the other.
    """
    document = np.repeat(np.arange(len(lengths)), lengths)
    position = order.reshape(-1, tile)
    seen = np.zeros((len(position),) * 2, bool)
    of_tokens = document[position]
    for number in range(len(lengths)):
        mine = of_tokens == number
        touched = np.flatnonzero(mine.any(1))
        last = np.where(mine, position, -1).max(1)[touched]
        first = np.where(mine, position, TOKENS).min(1)[touched]
        seen[np.ix_(touched, touched)] |= last[:, None] >= first
    return seen


def measures(lengths, order):
    """Returns three ratios of an order of tokens.

    They are the tiles of the busiest rank over the mean of all ranks, the same with a barrier after
    each step of a ring, and the pairs in tiles over the visible pairs.
    """
    seen = tiles_seen(lengths, order)
    pairs = seen.reshape(RANKS, len(seen) // RANKS, RANKS, -1).sum((1, 3))
    steps = [[pairs[rank, (rank - step) % RANKS] for rank in range(RANKS)] for step in range(RANKS)]
    mean = pairs.sum() / RANKS
    visible = sum(n * (n + 1) // 2 for n in lengths.tolist())
    by_step = sum(map(max, steps)) / mean
    return pairs.sum(1).max() / mean, by_step, seen.sum() * TILE**2 / visible


@cache
def table():
    """Returns for each way to give tokens to ranks the measures of every seed."""
    found = {"balance_documents": [], "zigzag": [], "striped": []}
    for seed in range(SEEDS):
        lengths = packed(seed)
        balance = ba.balance_documents(lengths, RANKS)
        result = measures(lengths, balance.permutation[0])
        given = balance.max_over_mean, balance.max_over_mean_by_step, balance.computed_over_visible
        assert result == pytest.approx(given)
        found["balance_documents"].append(result)
        for layout in ("zigzag", "striped"):
            order = ba.layout_positions(TOKENS, RANKS, layout)
            found[layout].append(measures(lengths, order))
    return {name: np.array(rows) for name, rows in found.items()}


def test_documents_of_training_are_balanced():
    busiest, by_step, computed = table()["balance_documents"].max(0)
    assert busiest <= 1.005
    assert by_step <= 1.08
    assert computed <= 1.08
    assert table()["zigzag"][:, 0].max() > 2
    assert table()["striped"][:, 2].max() > 1.4


def test_the_page_shows_the_measures():
    text = PAGE.read_text()
    for name, rows in table().items():
        shown = re.search(rf"^\| `{name}` \|(.+)\|$", text, re.MULTILINE)[1]
        expected = [x for pair in zip(rows.mean(0), rows.max(0), strict=True) for x in pair]
        assert re.findall(r"\d+\.\d+", shown) == [f"{x:.2f}" for x in expected]


def test_pairs_of_ranks_have_even_work():
    pairs = ba.balance_documents(TOKENS, RANKS).tile_pairs[0]
    assert pairs.max() / pairs.mean() < 1.02


@pytest.mark.parametrize(("size", "block"), [(2, 4), (3, 2), (4, 1), (1, 8), (8, 2)])
def test_small_rows_against_the_dense_mask(size, block):
    generator = np.random.default_rng(size)
    rows = [generator.integers(0, 15, generator.integers(1, 6)).tolist() for _ in range(2)]
    balance = ba.balance_documents(rows, size, block)
    n = balance.permutation.shape[1]
    longest = max(map(sum, rows))
    assert n % (size * block) == 0
    assert longest <= n < longest + size * block
    assert (np.sort(balance.permutation) == np.arange(n)).all()
    assert (np.take_along_axis(balance.permutation, balance.inverse, 1) == np.arange(n)).all()
    matrix = ba.masks.dense(**balance.mask.arguments)
    for b, lengths in enumerate(rows):
        document = [*np.repeat(np.arange(len(lengths)), lengths), *[-1] * (n - sum(lengths))]
        begin = [document.index(d) if d >= 0 else p for p, d in enumerate(document)]
        order = balance.permutation[b]
        for i, j in np.ndindex(n, n):
            p, k = order[i], order[j]
            assert matrix[b, i, j] == (document[p] == document[k] >= 0 and k <= p)
        assert balance.segment_ids[b].tolist() == [document[p] for p in order]
        assert balance.mask.rope_positions[b].tolist() == [p - begin[p] for p in order]
        tiles = matrix[b].reshape(n // block, block, n // block, block).any((1, 3))
        pairs = tiles.reshape(size, n // size // block, size, -1).sum((1, 3))
        assert np.array_equal(balance.tile_pairs[b], pairs)
        starts = order.reshape(size, -1, block)[:, :, 0]
        assert (starts % block == 0).all()
        assert (np.diff(starts, axis=1) > 0).all()
    assert balance.visible_pairs == matrix.sum()
    arrays = jax.tree.leaves(balance.mask)
    for x in (balance.segment_ids, balance.permutation, balance.inverse, *arrays):
        assert x.dtype == np.int32


def test_padding_is_given_to_ranks_like_tokens():
    balance = ba.balance_documents([10, 20], 4, 8, seq_len=64)
    assert balance.segment_ids.shape == (1, 64)
    assert (balance.segment_ids < 0).sum() == 34
    seen = ba.masks.dense(**balance.mask.arguments)[0]
    padding = balance.segment_ids[0] < 0
    assert not seen[padding].any()
    assert not seen[:, padding].any()
    nothing = ba.balance_documents([], 4, 8, seq_len=64)
    assert nothing.max_over_mean == nothing.max_over_mean_by_step == 1
    assert nothing.computed_over_visible == 1
    assert ba.balance_documents([0], 4, 8).permutation.shape == (1, 0)


@pytest.mark.parametrize("module", [np, jnp])
def test_arrays_go_to_ranks_and_back(module):
    one, two = ba.balance_documents([5, 9], 2, 4), ba.balance_documents([[5, 9], [16]], 2, 4)
    for balance, shape, axis in (
        (one, (16,), 0),
        (one, (3, 16, 2), 1),
        (two, (2, 16), 1),
        (two, (3, 2, 16, 4), 2),
        (two, (2, 16, 3), -2),
    ):
        x = np.arange(np.prod(shape)).reshape(shape)
        there = balance.to_ranks(module.asarray(x), axis)
        assert isinstance(there, np.ndarray) == (module is np)
        assert np.array_equal(balance.from_ranks(there, axis), x)
        rows, moved = (np.moveaxis(y, axis, -1).reshape(-1, 16) for y in (x, np.asarray(there)))
        if balance is one:
            assert np.array_equal(moved, rows[:, one.permutation[0]])
    tokens = module.arange(32).reshape(2, 16)
    expected = two.permutation + np.array([[0], [16]])
    assert np.array_equal(two.to_ranks(tokens), expected)


def test_a_sharding_is_kept():
    """On Explicit mesh axes also inside a program."""
    mesh = ring.mesh(2, 4, 1, axis_type=AxisType.Explicit)
    balance = ba.balance_documents([[5, 9], [16]], 4, 2)
    (x,) = ring.put(mesh, *ring.normal(0, (2, 16, 3)), spec=P("data", "context"))
    for run in (balance.to_ranks, jax.jit(balance.to_ranks)):
        found = run(x)
        assert found.sharding.is_equivalent_to(x.sharding, x.ndim)
        assert np.array_equal(balance.from_ranks(np.asarray(found)), x)


ONE, TWO = ba.balance_documents([4], 2, 4), ba.balance_documents([[4], [5]], 2, 4)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: ba.balance_documents([4], 0), ValueError, "axis_size must be at least 1, got 0"),
        (lambda: ba.balance_documents([4], 2.0), TypeError, "axis_size must be an int, got 2.0"),
        (lambda: ba.balance_documents([4], 2, 0), ValueError, "block must be at least 1, got 0"),
        (lambda: ba.balance_documents([-4], 2), ValueError, "lengths must not be negative"),
        (lambda: ba.balance_documents([4.5], 2), TypeError, "an item of lengths must be an int"),
        (lambda: ba.balance_documents([4], 2, 4, seq_len=12), ValueError, "axis_size · block, 2 ·"),
        (lambda: ba.balance_documents([9], 2, 4, seq_len=8), ValueError, "seq_len must be from 9"),
        (lambda: ba.balance_documents([2**31 - 2], 2, 4), ValueError, "7, got 2147483648"),
        (lambda: ONE.to_ranks(np.zeros((1, 7))), ValueError, "8 tokens along axis 1, got shape"),
        (lambda: TWO.to_ranks(np.zeros((3, 8))), ValueError, "axis 1 and a batch of 2 before it"),
        (lambda: ONE.from_ranks([1]), TypeError, "x must be a numpy or jax array, got list"),
    ],
)
def test_wrong_arguments(call, error, words):
    with pytest.raises(error, match=words):
        call()
