"""New tokens go to their places in a sharded cache, and XLA writes them in place."""

import re
from functools import partial

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from decode_cases import IMPLEMENTATIONS, SHARDED, WHOLE, Sharding, check, problem
from decode_reference import dense
from jax.sharding import PartitionSpec as P

pytestmark = [pytest.mark.needs("products"), pytest.mark.oldest_jax]

LENGTHS, COUNTS = np.array([7, 32, 0, 2, 40], np.int32), np.array([3, 3, 3, 3, 1], np.int32)
"""One sequence before position 0, and one beyond the capacity."""

ROWS = 8192
"""Rows of a rank in the loop, more than a program may read at once."""


def appended(sharding, key, value, caches, lengths, counts, table=None):
    """Returns the caches of all ranks with new tokens."""
    cache = P("context") if sharding.page else SHARDED
    run = jax.shard_map(
        lambda *x: ba.append_to_cache(
            *x[:5], query_lengths=x[5], page_table=x[6], **sharding.options
        ),
        mesh=ring.line(sharding.world),
        in_specs=(cache, cache, WHOLE, WHOLE, WHOLE, WHOLE, P("context")),
        out_specs=cache,
    )
    return jax.jit(run)(*caches, key, value, lengths, counts, table)


@pytest.mark.parametrize(
    "sharding",
    [
        Sharding(1, capacity=32),
        Sharding(4, interleave=2, capacity=8),
        Sharding(2, "contiguous", capacity=16),
        Sharding(4, page=4, capacity=8),
    ],
    ids=["one", "striped", "contiguous", "pages"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_go_to_their_positions(sharding, dtype):
    key, value, *held = ring.normal(
        0, (5, 3, 2, 8), (5, 3, 2, 16), (5, 32, 2, 8), (5, 32, 2, 16), dtype=dtype
    )
    expected = [x.copy() for x in held]
    for b, t in np.ndindex(5, 3):
        place = LENGTHS[b] - COUNTS[b] + t
        if t < COUNTS[b] and 0 <= place < 32:
            expected[0][b, place], expected[1][b, place] = key[b, t], value[b, t]
    caches, table = [sharding.dealt(x) for x in held], None
    expected = [sharding.dealt(x) for x in expected]
    if sharding.page:
        *caches, table = sharding.paged(LENGTHS, *caches)
        *expected, _ = sharding.paged(LENGTHS, *expected)
    found = appended(sharding, key, value, caches, LENGTHS, COUNTS, table)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype
        assert np.array_equal(np.asarray(x).view(np.uint8), y.view(np.uint8))


def steps(first, count, sharding, implementation, q, key, value, k_cache, v_cache):
    """Writes and reads tokens one by one; returns the outs, and the caches."""

    def step(carry, t):
        caches, lengths = carry
        take = partial(jax.lax.dynamic_slice_in_dim, start_index=t, slice_size=1, axis=1)
        caches = ba.append_to_cache(*caches, take(key), take(value), lengths, **sharding.options)
        options = {**sharding.options, "implementation": implementation}
        out = ba.decode_attention(take(q), *caches, lengths, **options)
        return (caches, lengths + 1), out[:, 0]

    state = ((k_cache, v_cache), first + 1)
    (caches, _), outs = jax.lax.scan(step, state, jnp.arange(count))
    return outs.swapaxes(0, 1), caches


@pytest.fixture(scope="module", params=IMPLEMENTATIONS)
def loop(request):
    """A compiled loop of steps on four ranks, to which its caches are donated, and its arrays."""
    sharding, count = Sharding(4, capacity=ROWS), 6
    case = problem(sharding, [count, 40 + count], count, dtype="bfloat16")
    first = case.lengths - count
    empty = [x.copy() for x in (case.k, case.v)]
    new = [np.stack([x[b, n : n + count] for b, n in enumerate(first)]) for x in empty]
    for x in empty:
        for b, n in enumerate(first):
            x[b, n:] = np.nan
    run = jax.shard_map(
        partial(steps, first, count, sharding, request.param),
        mesh=ring.line(4),
        in_specs=(WHOLE, WHOLE, WHOLE, SHARDED, SHARDED),
        out_specs=(WHOLE, SHARDED),
    )
    caches = ring.put(ring.line(4), *map(sharding.dealt, empty), spec=P(None, "context"))
    compiled = jax.jit(run, donate_argnums=(3, 4)).lower(case.q, *new, *caches).compile()
    return case, compiled, (case.q, *new, *caches)


def test_a_loop_of_steps_is_attention_over_all_tokens(loop):
    case, compiled, arrays = loop
    outs, caches = compiled(*arrays)
    exact, lse = dense(case.q, case.k, case.v, case.lengths)
    check((outs, lse.astype(np.float32)), (exact, lse))
    for found, x in zip(caches, (case.k, case.v), strict=True):
        assert np.array_equal(case.sharding.gathered(np.asarray(found)), x, equal_nan=True)


def test_no_program_copies_the_cache(loop):
    """Temporary arrays together are smaller than half of a rank's keys."""
    _, compiled, arrays = loop
    made = re.findall(rf"= \w+\[2,{ROWS},2,16\]\S* (copy|convert|select)\(", compiled.as_text())
    assert not made
    assert compiled.memory_analysis().temp_size_in_bytes < arrays[3].nbytes / 4 / 2


@pytest.mark.parametrize("page", [None, 8])
def test_changes_of_data_need_no_compilation(page):
    """A thousand steps with other lengths, pages, queries in use and prefixes trace once."""
    traced, random = [], np.random.default_rng(0)
    q, new, prefix, pages = ring.normal(0, (2, 1, 2, 8), (2, 1, 1, 8), (2, 8, 1, 8), (2, 8, 1, 8))

    @partial(jax.jit, donate_argnums=0)
    def step(cache, lengths, counts, of, sizes, table):
        traced.append(1)
        data = {"query_lengths": counts, "page_table": table}
        key, value = ba.append_to_cache(cache, cache, new, new, lengths, **data)
        out = ba.decode_attention(q, key, value, lengths, **data)
        with_prefix = ba.shared_prefix_attention(
            *(q, prefix, prefix, key, value, lengths), prefix_of=of, prefix_lengths=sizes, **data
        )
        return key, out + with_prefix

    cache = jnp.asarray(pages)
    for _ in range(1000):
        lengths, sizes = random.integers(0, 9, (2, 2), np.int32)
        counts, of = random.integers(0, 2, (2, 2), np.int32)
        table = random.permutation(2).astype(np.int32)[:, None] if page else None
        cache, out = step(cache, lengths, counts, of - 1, sizes, table)
    assert np.isfinite(out).all()
    assert len(traced) == 1
