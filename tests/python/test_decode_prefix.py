"""Requests that share a prefix get the results of whole sequences of their own."""

from dataclasses import replace

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from decode_cases import (
    CALL_FIRST,
    SHARDED,
    WHOLE,
    Sharding,
    check,
    decode,
    problem,
    shardings,
)
from decode_reference import dense
from jax.sharding import PartitionSpec as P
from long import some, with_plain

pytestmark = [pytest.mark.needs("products"), pytest.mark.oldest_jax]

PREFIXES, OF = np.array([24, 0, 57], np.int32), np.array([0, 2, -1, 0, 1, 2, 9], np.int32)
OWN = np.array([5, 16, 3, 1, 9, 0, 12], np.int32)
SINKS, SLOPES = np.array([0.5, 1, -1, 0], np.float32), np.array([0.5, 0.25, 0, 0.1], np.float32)
SHARDINGS = shardings("prefix_shardings")


def both(prefixes, own):
    """Returns whole sequences: the prefix of each request, then its own tokens."""
    lengths = np.array([PREFIXES[g] if 0 <= g < 3 else 0 for g in OF]) + own.lengths
    found = []
    for shared, x in ((prefixes.k, own.k), (prefixes.v, own.v)):
        whole = np.full((len(OF), 96, *x.shape[2:]), np.nan, x.dtype)
        for b, g in enumerate(OF):
            n = lengths[b] - own.lengths[b]
            whole[b, :n], whole[b, n : lengths[b]] = shared[g, :n] if n else 0, x[b, : OWN[b]]
        found.append(whole)
    return *found, np.where(own.lengths > 0, lengths, 0)


def shared(prefixes, own, **options):
    """Returns o and lse of `shared_prefix_attention` on a mesh."""
    sharding, table, cache = own.sharding, None, SHARDED
    caches = own.caches
    if sharding.page:
        *caches, table = sharding.paged(own.lengths, *caches)
        cache = P("context")
    k, v, *arrays = (x for held in (caches, prefixes.caches) for x in (*held, None)[:2])

    def local(q, prefix_key, prefix_value, k, v, table, lengths, of, sizes):
        return ba.shared_prefix_attention(
            *(q, prefix_key, prefix_value, k, v, lengths),
            prefix_of=of,
            prefix_lengths=sizes,
            page_table=table,
            return_residual=True,
            **own.options,
            **sharding.options,
            **options,
        )

    specs = (WHOLE, SHARDED, SHARDED, cache, cache, P("context"), WHOLE, WHOLE, WHOLE)
    mesh = ring.line(sharding.world)
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=WHOLE))
    return run(own.q, *arrays, k, v, table, own.lengths, OF, PREFIXES)


@pytest.mark.parametrize(("name", "implementation"), with_plain(SHARDINGS, "pages"))
@pytest.mark.parametrize("features", some([{"window": 30, "sinks": SINKS, "slopes": SLOPES}, {}]))
def test_it_is_attention_over_prefix_and_own_tokens(name, features, implementation):
    sharding = SHARDINGS[name]
    own = problem(sharding, OWN, 2, **features)
    prefixes = problem(replace(sharding, capacity=64 // sharding.world), PREFIXES, 2)
    k, v, lengths = both(prefixes, own)
    expected = dense(own.q, k, v, lengths, **features)
    check(shared(prefixes, own, implementation=implementation), expected)


@pytest.mark.parametrize("dtype", some(["float32", "bfloat16"]))
def test_the_bits_of_a_request_are_its_own(dtype):
    """Requests that share a prefix of several chunks get the bits that each gets by itself."""
    q, *caches = ring.normal(
        0, (5, 2, 16, 64), (1, 2048, 2, 64), (1, 2048, 2, 64), *[(5, 640, 2, 64)] * 2, dtype=dtype
    )
    lengths = np.array([640, 3, 0, 1, 300], np.int32)

    @jax.jit
    def run(q, prefix_key, prefix_value, k, v, lengths):
        return ba.shared_prefix_attention(
            *(q, prefix_key, prefix_value, k, v, lengths),
            prefix_of=jnp.zeros(len(q), jnp.int32),
            prefix_lengths=jnp.array([2001], jnp.int32),
            split="fixed",
        )

    whole = np.asarray(run(q, *caches, lengths))
    for entries in ([0], [4, 3], [3, 4, 3, 0, 2, 1, 4]):
        own = (x[entries] for x in caches[2:])
        found = run(q[entries], *caches[:2], *own, lengths[entries])
        assert np.array_equal(found, whole[entries])


def test_positions_behind_a_prefix_end_where_int32_does():
    q, prefix, cache = ring.normal(0, (2, 1, 4, 16), (1, 8, 2, 16), (2, 16, 2, 16))
    data = {"prefix_of": np.array([0, 0]), "prefix_lengths": np.array([7])}

    @jax.jit
    def run(lengths):
        caches = prefix, prefix, cache, cache
        return ba.shared_prefix_attention(q, *caches, lengths, return_residual=True, **data)

    found, want = run(np.array([2**31 - 1, 9])), run(np.array([16, 9]))
    for x, y in zip(found, want, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("implementation", CALL_FIRST)
@pytest.mark.parametrize("sharding", [Sharding(1, capacity=16), Sharding(2, page=4, capacity=8)])
def test_without_prefixes_it_is_attention_over_own_tokens(sharding, implementation):
    """No prefixes at all, prefixes without rows, and own caches without rows."""
    own = problem(sharding, [5, 16, 0], 2)
    none = {"k": own.k[:, :0], "v": own.v[:, :0]}
    bits = decode(own, implementation=implementation)
    for shapes in ({"prefixes": 0, "rows": 8}, {"prefixes": 2, "rows": 0}):
        found = of_no_prefix(own, **shapes, implementation=implementation)
        for x, expected in zip(found, bits, strict=True):
            np.testing.assert_array_equal(x, expected)
    if not sharding.page:
        out, lse = of_no_prefix(replace(own, **none), 0, 0, implementation=implementation)
        assert not np.asarray(out).any()
        assert np.isneginf(lse).all()


def of_no_prefix(own, prefixes, rows, **options):
    """Returns o and lse of `shared_prefix_attention` where no request has tokens of a prefix."""
    sharding, specs, table = own.sharding, SHARDED, None
    caches = own.k, own.v
    if sharding.page:
        *caches, table = sharding.paged(own.lengths, *(sharding.dealt(x) for x in caches))
        specs = P("context")
    prefix = np.zeros((prefixes, rows, 2, 16), own.k.dtype)

    def local(q, prefix, k, v, table, lengths):
        return ba.shared_prefix_attention(
            *(q, prefix, prefix, k, v, lengths),
            prefix_of=jnp.arange(len(q), dtype=jnp.int32) - 1,
            prefix_lengths=jnp.zeros(prefixes, jnp.int32),
            page_table=table,
            return_residual=True,
            **sharding.options,
            **options,
        )

    run = jax.shard_map(
        local,
        mesh=ring.line(sharding.world),
        in_specs=(WHOLE, SHARDED, specs, specs, P("context"), WHOLE),
        out_specs=WHOLE,
    )
    return jax.jit(run)(own.q, prefix, *caches, table, own.lengths)


@pytest.mark.parametrize("world", [1, 2])
def test_a_batch_may_be_empty(world):
    case = problem(Sharding(world, capacity=8), [], 2)
    assert [x.shape for x in decode(case)] == [(0, 2, 4, 16), (0, 2, 4)]
    assert [x.shape for x in of_no_prefix(case, 0, 8)] == [(0, 2, 4, 16), (0, 2, 4)]
