"""The kernels of decoding on GPUs, called by XLA."""

from functools import partial

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from burst_attention._decode import gpu
from burst_attention._decode.work import Operands, Work
from decode_cases import SLOPES, Sharding, check, decode, latents, problem
from decode_reference import dense
from ring import devices
from test_decode_prefix import OWN, PREFIXES, both, shared

pytestmark = [pytest.mark.needs("gpu"), pytest.mark.standin]

FEATURES = {"window": 40, "soft_cap": 3.0, "slopes": SLOPES}


def call(case, **options):
    """Returns o and lse of one device that has whole sequences."""
    k, v, table = case.k, case.v, None
    if case.sharding.page:
        k, v, table = case.sharding.paged(case.lengths, k, v)
    return run(case.q, k, v, table, case.lengths, **options, **case.options)


def run(q, k, v, table, lengths, **options):
    step = partial(ba.decode_attention, return_residual=True, **options)
    return jax.jit(lambda *x: step(*x[:4], page_table=x[4]))(q, k, v, lengths, table)


@pytest.mark.parametrize(
    ("page", "split"), [(None, "balanced"), (16, "fixed"), (16, "balanced"), (64, "fixed")]
)
@pytest.mark.parametrize("features", [{}, FEATURES], ids=["none", "all"])
def test_results_are_those_of_dense_attention(page, split, features):
    sharding = Sharding(1, page=page, capacity=192)
    case = problem(sharding, [190, 0, 1, 65], 2, dtype="bfloat16", **features)
    expected = dense(case.q, case.k, case.v, case.lengths, **features)
    check(call(case, split=split), expected)


@pytest.mark.parametrize(("page", "split"), [(None, "balanced"), (64, "fixed")])
@pytest.mark.parametrize("features", [{}, FEATURES], ids=["none", "all"])
def test_latents_are_read_for_values_too(page, split, features):
    sharding = Sharding(2, page=page, capacity=96 if page is None else 128)
    case = latents(sharding, [90, 0, 65], 1, (4, 1), (576, 512), "bfloat16", **features)
    check(decode(case, split=split), dense(case.q, case.k, case.v, case.lengths, **features))


def test_a_prompt_of_latents_enters_a_pool():
    """A piece of 16 tokens, and one of 4."""
    case = latents(Sharding(2, capacity=16), [20], 20, (4, 1), (576, 512), "bfloat16")
    pool = ba.CachePool(list(devices(2)))
    cache = pool.init(batch=1, positions=32, kv_heads=1, head_dim=576, latents=True)
    tokens = [jax.device_put(x) for x in (case.q, case.k[:, :20])]
    options = {"value_dim": 512, "return_residual": True}
    found, _ = pool.prefill(cache, *tokens, None, case.lengths, **options)
    check(found, dense(case.q, case.k, case.v, case.lengths))


@pytest.mark.parametrize("split", ["balanced", "fixed"])
@pytest.mark.parametrize("heads", [4, 80], ids=["weights in memory", "more heads than columns"])
def test_narrow_latents_in_short_pages(split, heads):
    sharding = Sharding(2, page=16, capacity=48)
    case = latents(sharding, [90, 0, 33], 1, (heads, 1), (72, 64), "bfloat16")
    check(decode(case, split=split), dense(case.q, case.k, case.v, case.lengths))


@pytest.mark.parametrize("page", [None, 16])
def test_ranks_merge_their_partials(page):
    case = problem(
        Sharding(2, page=page, capacity=96), [190, 0, 33], 1, dtype="float16", **FEATURES
    )
    check(decode(case), dense(case.q, case.k, case.v, case.lengths, **FEATURES))


@pytest.mark.parametrize("split", ["balanced", "fixed"])
def test_prefixes_of_ranks(split):
    sharding = Sharding(2, page=16, capacity=16)
    own = problem(sharding, OWN, 2, dtype="bfloat16", window=30)
    prefixes = problem(Sharding(2, interleave=16, capacity=32), PREFIXES, 2, dtype="bfloat16")
    k, v, lengths = both(prefixes, own)
    check(shared(prefixes, own, split=split), dense(own.q, k, v, lengths, window=30))


@pytest.mark.parametrize("page", [16, 64])
def test_with_fixed_slices_the_bits_of_a_sequence_are_its_own(page):
    case = problem(Sharding(1, page=page, capacity=192), [190, 17, 0, 64], 2, dtype="bfloat16")
    k, v, table = case.sharding.paged(case.lengths, case.k, case.v)
    found = run(case.q, k, v, table, case.lengths, split="fixed")
    # Pages in reverse order, so ids are others.
    reverse, some = np.where(table < 0, -1, len(k) - 1 - table), [3, 0, 1]
    arrays = (case.q[some], k[::-1], v[::-1], reverse[some], case.lengths[some])
    for one, other in zip(found, run(*arrays, split="fixed"), strict=True):
        assert np.array_equal(np.asarray(one)[some], other)


def test_lengths_are_data_of_a_recorded_call():
    """Steps in a loop, which XLA may record and replay, each with lengths of its own."""
    case = problem(Sharding(1, capacity=64), [64, 64], 1, dtype="bfloat16")
    lengths = np.array([[3, 64], [64, 1], [0, 40]], np.int32)

    @jax.jit
    def steps(q, k, v, lengths):
        return jax.lax.map(lambda n: ba.decode_attention(q, k, v, n, return_residual=True), lengths)

    found = steps(case.q, case.k, case.v, lengths)
    for step, now in enumerate(lengths):
        expected = dense(case.q, case.k, case.v, now)
        check([x[step] for x in found], expected)


def test_requests_of_one_source_share_its_keys():
    case = problem(Sharding(1, capacity=96), [90, 90], 1, dtype="bfloat16")
    source, lengths = np.array([1, 0, 1, -1, 1, 1], np.int32), np.array([90, 80, 70, 9, 1, 0])
    q = jnp.tile(jnp.asarray(case.q[:1]), (6, 1, 1, 1))
    work = Work(0.25, 0.0, -1, 96, 1, "balanced", None).on_prefixes(96)
    ones, table = jnp.ones(6, jnp.int32), jnp.arange(2, dtype=jnp.int32)[:, None]
    sizes = jnp.asarray(lengths, jnp.int32)
    arrays = (table, source, sizes, sizes - 1, ones, jnp.int32(0), None)
    found = jax.jit(lambda *x: gpu.partial(work, Operands(*x)))(q, case.k, case.v, *arrays)
    seen = np.where(source < 0, 0, lengths)
    expected = dense(q, case.k[source], case.v[source], seen, counts=np.ones(6, int))
    check([found[0].astype(jnp.bfloat16), found[1]], expected)
