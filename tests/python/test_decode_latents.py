"""Decoding whose values are the first columns of the keys, as latents of MLA have them."""

from dataclasses import replace

import burst_attention as ba
import jax
import numpy as np
import pytest
import ring
from decode_cases import (
    CALL_FIRST,
    FEATURES,
    IMPLEMENTATIONS,
    SHARDED,
    WHOLE,
    Sharding,
    check,
    decode,
    latents,
)
from decode_reference import dense
from jax.sharding import PartitionSpec as P
from long import some, with_plain
from test_decode_append import COUNTS, LENGTHS
from test_decode_prefix import OWN, PREFIXES, both, shared

pytestmark = [pytest.mark.needs("products"), pytest.mark.oldest_jax]

RAGGED = [37, 0, 1, 64, 9]
SHARDINGS = {
    "one": Sharding(1),
    "two, contiguous": Sharding(2, "contiguous", capacity=32),
    "four, interleaved": Sharding(4, interleave=2, capacity=16),
    "four, pages": Sharding(4, page=4, capacity=16),
}
SHAPES = [((128, 1), (576, 512)), ((16, 1), (96, 64)), ((6, 2), (40, 24)), ((4, 4), (64, 64))]
"""Heads of queries and keys, dimensions of keys and values."""


def expected(case):
    return dense(case.q, case.k, case.v, case.lengths, **case.features)


@pytest.mark.parametrize(("name", "implementation"), with_plain(SHARDINGS, "four, pages"))
def test_every_sharding_is_dense_attention(name, implementation):
    case = latents(SHARDINGS[name], RAGGED, 3, dims=(40, 24), **FEATURES["all"])
    check(decode(case, implementation=implementation), expected(case))


@pytest.mark.parametrize(("shape", "implementation"), with_plain(SHAPES, SHAPES[0]), ids=str)
@pytest.mark.parametrize("dtype", some(["bfloat16", "float32", "float16"]))
def test_heads_and_types(shape, dtype, implementation):
    case = latents(Sharding(2, capacity=32), RAGGED, 2, *shape, dtype)
    check(decode(case, implementation=implementation), expected(case))


@pytest.mark.needs("host")
@pytest.mark.parametrize("dtype", some(["bfloat16", "float32"]))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bits_are_those_of_a_copy_of_the_values(shape, dtype):
    """A cache of values that holds the columns gives the same bits."""
    case = latents(Sharding(2, page=8, capacity=32), RAGGED, 2, *shape, dtype)
    for x, y in zip(decode(case), decode(replace(case, values_in_keys=False)), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.needs("host")
def test_the_bits_of_a_sequence_are_its_own():
    case = latents(Sharding(1), RAGGED, 2, *SHAPES[1])
    out, _ = decode(case)
    for b in range(len(RAGGED)):
        q, k, v, lengths = (x[b : b + 1] for x in (case.q, case.k, case.v, case.lengths))
        alone, _ = decode(replace(case, q=q, k=k, v=v, lengths=lengths))
        np.testing.assert_array_equal(alone[0], out[b])


@pytest.mark.needs("host")
def test_a_key_that_is_not_finite_reaches_only_the_queries_that_see_it():
    entry, (first, last), window = 3, (0, 63), 62
    case = latents(Sharding(1), RAGGED, 2, *SHAPES[1], "bfloat16", window=window)
    assert case.lengths[entry] == last + 1
    clean, _ = decode(case)
    for key, blind in ((first, 1), (last, 0)):
        k = case.k.copy()
        k[entry, key] = np.nan
        found, _ = decode(replace(case, k=k))
        np.testing.assert_array_equal(found[entry, blind], clean[entry, blind])
        assert np.isnan(np.asarray(found[entry, 1 - blind], np.float32)).all()


@pytest.mark.parametrize("implementation", CALL_FIRST)
@pytest.mark.parametrize(
    "sharding", some([Sharding(2, page=4, capacity=8), Sharding(1, capacity=16)]), ids=str
)
def test_prefixes(sharding, implementation):
    sizes = ((4, 2), (24, 16))
    own = latents(sharding, OWN, 2, *sizes)
    prefixes = latents(
        replace(sharding, page=None, interleave=sharding.page or 1, capacity=64 // sharding.world),
        PREFIXES,
        2,
        *sizes,
    )
    k, v, lengths = both(prefixes, own)
    check(shared(prefixes, own, implementation=implementation), dense(own.q, k, v, lengths))


@pytest.mark.parametrize(
    "sharding", [Sharding(4, interleave=2, capacity=8), Sharding(2, page=4, capacity=16)], ids=str
)
def test_append_writes_one_cache(sharding):
    """A call without values writes the keys that a call with values writes."""
    key, held = ring.normal(0, (5, 3, 1, 24), (5, 32, 1, 24), dtype="bfloat16")
    cache, table, spec = sharding.dealt(held), None, SHARDED
    if sharding.page:
        cache, table = sharding.paged(LENGTHS, cache)
        spec = P("context")

    def local(cache, key, table):
        options = {"query_lengths": COUNTS, "page_table": table, **sharding.options}
        latent, none = ba.append_to_cache(cache, None, key, None, LENGTHS, **options)
        assert none is None
        return latent, ba.append_to_cache(cache, cache, key, key, LENGTHS, **options)[0]

    specs = (spec, WHOLE, P("context"))
    run = jax.shard_map(local, mesh=ring.line(sharding.world), in_specs=specs, out_specs=spec)
    found, keys = (np.asarray(x).view(np.uint8) for x in jax.jit(run)(cache, key, table))
    assert np.array_equal(found, keys)
    assert not np.array_equal(found, cache.view(np.uint8))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_step_appends_and_attends_in_place(implementation):
    """Without a copy of the cache, be it of its first columns."""
    rows, (q, new, cache) = 8192, ring.normal(0, (1, 1, 16, 72), (1, 1, 1, 72), (1, 8192, 1, 72))

    def step(cache, q, new, lengths):
        cache, _ = ba.append_to_cache(cache, None, new, None, lengths)
        options = {"value_dim": 64, "implementation": implementation}
        return cache, ba.decode_attention(q, cache, None, lengths, **options)

    lengths, program = np.array([5000], np.int32), jax.jit(step, donate_argnums=0)
    run, half = (program.lower(cache[:, :n], q, new, lengths).compile() for n in (rows, rows // 2))
    # Pieces of sequences take room too, whatever the cache holds.
    grows = run.memory_analysis().temp_size_in_bytes - half.memory_analysis().temp_size_in_bytes
    assert grows < cache.nbytes / 4
    held, out = run(jax.numpy.array(cache), q, new, lengths)
    assert held.shape == (1, rows, 1, 72)
    cache[:, 4999] = new[:, 0]
    check(
        (out, dense(q, cache, cache[..., :64], lengths)[1].astype(np.float32)),
        dense(q, cache, cache[..., :64], lengths),
    )


def test_it_may_be_mapped_and_has_no_gradient():
    case = latents(Sharding(1), RAGGED, 2, dims=(24, 16))

    def run(q, k, n):
        return ba.decode_attention(q[None], k[None], None, n[None], value_dim=16)[0]

    out = jax.jit(jax.vmap(run))(case.q, case.k, case.lengths)
    exact, lse = expected(case)
    check((out, lse.astype(np.float32)), (exact, lse))
    with pytest.raises(NotImplementedError, match="decode_attention has no gradient"):
        jax.grad(lambda q: run(q, case.k[0], case.lengths[0]).sum())(case.q[0])
