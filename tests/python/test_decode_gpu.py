"""The units of queries that decoding on GPUs makes of batch entries.

On CPU devices plain JAX stands for the kernels, by the definition in
`kernels/src/launch/decode.rs`.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from burst_attention._decode import calls, gpu
from burst_attention._decode.work import Operands, Work
from decode_cases import FEATURES, SHARDINGS, Sharding, check, decode, latents, problem
from decode_reference import dense
from jax.scipy.special import logsumexp
from long import some, spread
from test_decode import RAGGED
from test_decode_prefix import OWN, PREFIXES, both, shared

pytestmark = pytest.mark.needs("host")

ONE_BY_ONE = [name for name in FEATURES if name not in ("all", "ragged queries")]


def kernels(work, cut, operands):
    """Returns o and lse of units, each row over the keys of its interval in the unit's tiles."""
    if work.values_in_keys:
        operands = (*operands[:2], operands[1][..., : work.values_in_keys], *operands[2:])
    q, keys, values, table, units, rows, rank, *slopes = operands
    count, heads, _, dim = q.shape
    pages, page = keys.shape[:2]
    assert table.shape[1] == 1 or page & (page - 1) == 0
    own = jnp.arange(table.shape[1] * page)
    ids = table[units[:, 3]][:, own // page]
    tile = own // page * -(-page // cut.keys) + own % page // cut.keys
    ends, first, end = (units[:, n, None] for n in range(3))
    before = jnp.pad(ends, ((1, 0), (0, 0)))[:-1]
    if cut.most_slices:
        ends = jnp.minimum(ends, before + cut.most_slices)
    slices = tile // cut.slice - first // cut.slice
    there = (tile >= first) & (tile < end) & (slices >= 0) & (slices < ends - before)
    there &= (ids >= 0) & (ids < pages)
    sees = (own >= rows[:, 0, :, None]) & (own < rows[:, 1, :, None]) & there[:, None]
    place = jnp.where(sees.any(1), ids, 0)
    k, v = (jnp.where(sees.any(1)[..., None, None], x[place, own % page], 0) for x in operands[1:3])
    s = jnp.einsum("uhrd,ukhd->uhrk", *(x.astype(jnp.float32) for x in (q, k))) * work.scale
    if work.soft_cap:
        s = work.soft_cap * jnp.tanh(s / work.soft_cap)
    if slopes:
        positions = work.geometry(len(own)).positions(own, rank)
        away = positions - slopes[0][..., None]
        s += slopes[1][..., None] * away[:, None]
    s = jnp.where(sees[:, None], s, -jnp.inf)
    lse = logsumexp(s, axis=3)
    p = jnp.where(sees[:, None], jnp.exp(s - jnp.where(jnp.isneginf(lse), 0, lse)[..., None]), 0)
    return jnp.einsum("uhrk,ukhd->uhrd", p, v.astype(jnp.float32)), lse


@pytest.fixture(autouse=True)
def on_gpus(monkeypatch):
    """Computes on CPU devices as on GPUs."""
    monkeypatch.setattr(calls, "_cpu", gpu.partial)
    monkeypatch.setattr(gpu, "_call", kernels)


def assert_right(case, **options):
    expected = dense(case.q, case.k, case.v, case.lengths, **case.features)
    check(decode(case, **options), expected)


@pytest.mark.parametrize("name", spread(SHARDINGS, 4))
def test_every_sharding(name):
    assert_right(problem(SHARDINGS[name], RAGGED, 3, dtype="bfloat16", window=20))


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("all", "balanced"),
        ("all", "fixed"),
        ("ragged queries", "balanced"),
        *(pytest.param(x, "balanced", marks=pytest.mark.long) for x in ONE_BY_ONE),
    ],
)
def test_features(name, split):
    case = problem(Sharding(2, page=4, capacity=32), RAGGED, 4, dtype="float16", **FEATURES[name])
    assert_right(case, split=split)


@pytest.mark.parametrize("dims", some([(200, 256), (128, 64), (8, 8)]))
def test_tiles_of_any_width(dims):
    for page in (None, 16, 128):
        case = problem(Sharding(1, page=page, capacity=256), [250, 31], 1, (6, 2), dims, "bfloat16")
        assert_right(case, split="fixed" if page == 16 else "balanced")


@pytest.mark.parametrize("page", [None, 24, 64])
@pytest.mark.parametrize("split", some(["balanced", "fixed"]))
def test_values_in_the_first_columns_of_keys(page, split):
    sharding = Sharding(2, page=page, capacity=192)
    case = latents(sharding, [190, 31, 0], 2, (4, 1), (72, 64), "bfloat16", **FEATURES["all"])
    assert_right(case, split=split)


@pytest.mark.parametrize("page", some([4, None]))
def test_requests_with_one_prefix_are_one_unit(page):
    sharding = Sharding(2, page=page, capacity=16)
    own = problem(sharding, OWN, 2, dtype="bfloat16", window=30)
    prefixes = problem(replace(sharding, page=None, capacity=32), PREFIXES, 2, dtype="bfloat16")
    prefixes.sharding.interleave = page or 1
    k, v, lengths = both(prefixes, own)
    check(shared(prefixes, own), dense(own.q, k, v, lengths, window=30))


@pytest.mark.parametrize(("split", "reads"), [("balanced", 1), ("fixed", 8)])
def test_a_prefix_is_read_once_for_requests_that_share_it(split, reads, monkeypatch):
    """There are as many prefixes as requests, of which all have the same."""
    case = problem(Sharding(1, capacity=128), [100] * 8, 1, (16, 2), dtype="bfloat16")
    eights = jnp.full(8, 100, jnp.int32)
    arrays = (jnp.arange(8, dtype=jnp.int32)[:, None], eights * 0 + 3, eights, eights, eights // 99)
    work = Work(0.25, 0.0, -1, 128, 1, split, None).on_prefixes(128)
    slices = []

    def call(work, cut, operands):
        slices.append(jnp.diff(operands[4][:, 0], prepend=0))
        return kernels(work, cut, operands)

    monkeypatch.setattr(gpu, "_call", call)
    rest = (*arrays, jnp.int32(0), None)
    run = jax.jit(lambda *x: (gpu.partial(work, Operands(*x)), slices[0]))
    (o, lse), counts = run(case.q, case.k, case.v, *rest)
    expected = dense(case.q, *(np.tile(x[3:4], (8, 1, 1, 1)) for x in (case.k, case.v)), [100] * 8)
    check([o.astype(jnp.bfloat16), lse], expected)
    assert np.count_nonzero(counts) == reads


def test_pages_of_any_length_become_pages_of_a_power_of_two():
    case = problem(Sharding(1, page=24, capacity=96), [90, 24, 0], 2, dtype="bfloat16")
    assert_right(case)


def test_units_hold_entries_of_one_source():
    source = jnp.array([2, 0, 2, -1, 2, 7, 0, 2, 2], jnp.int32)
    zeros = jnp.zeros(9, jnp.int32)
    caches = (jnp.zeros((3, 8, 1, 8), jnp.bfloat16),) * 2
    arrays = (jnp.zeros((3, 1), jnp.int32), source, zeros, zeros, zeros, jnp.int32(0), None)
    operands = Operands(jnp.zeros((9, 1, 2, 8), jnp.bfloat16), *caches, *arrays)
    entries, indices, of_unit = map(np.asarray, gpu.units_of(operands, 4))
    held = [sorted(row[row < 9].tolist()) for row in entries]
    assert sorted(row for row in held if row) == [[0, 2, 4, 7], [1, 6], [3, 5], [8]]
    assert np.array_equal(entries.reshape(-1)[indices], np.arange(9))
    assert {of_unit[held.index(row)] for row in ([0, 2, 4, 7], [8])} == {2}
    assert of_unit[held.index([1, 6])] == 0
