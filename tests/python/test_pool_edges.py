"""Numbers beyond int32, zeros, and errors that must leave a pool's caches as they are."""

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from jax.sharding import PartitionSpec as P
from test_pool import equal, model, pool, put

pytestmark = pytest.mark.needs("products")

SIZES = {"kv_heads": 2, "head_dim": 8, "dtype": "float32"}
WIDE = (2**31, 2**32, 2**32 + 1, -(2**32), -(2**31) - 1, 2**63 - 1)
METHODS = ("attend", "prefill")
COLUMNS = P(None, None, None, "tensor")


def tokens(count=2, batch=1, dims=(8, 8, 8)):
    shapes = [(batch, count, 2, dim) for dim in dims]
    return put(model(1), P(), *ring.normal(0, *shapes, dtype=np.float32))


def call(method, cache, *given, there=None, lengths=(2,), **options):
    there = there or pool(1)
    return getattr(there, method)(cache, *given, np.array(lengths), **options)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("is_put", [False, True])
def test_page_ids_beyond_int32_are_hidden(method, is_put):
    """Nothing is written to a page that they would wrap round to, and no query sees it."""
    there, given = pool(1), tokens()
    for page in WIDE:
        cache = there.init(pages=2, page=4, **SIZES)
        table = np.array([[page]])
        table = there.put(table) if is_put else table
        out, cache = call(method, cache, *given, there=there, page_table=table)
        assert not any(np.asarray(x).any() for x in (out, *cache)), page


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["lengths", "query_lengths", "prefix_of", "prefix_lengths"])
def test_numbers_beyond_int32_end_where_it_does(method, name):
    """They count as the nearest number of int32, for unsigned integers too."""
    there, given = pool(1), tokens()
    prefix = [jnp.ones_like(x) for x in there.init(batch=1, positions=8, **SIZES)]
    arrays = {"lengths": 2, "query_lengths": 2, "prefix_of": 0, "prefix_lengths": 3}

    def results(number):
        data = {each: np.array([x]) for each, x in (arrays | {name: number}).items()}
        cache = there.init(batch=1, positions=8, **SIZES)
        return getattr(there, method)(cache, *given, prefix=prefix, **data)

    most, least = results(2**31 - 1), results(-(2**31))
    for number in (*WIDE, np.uint64(2**63 + 2), np.uint32(2**31 + 2)):
        equal(results(number), most if number > 0 else least)


def test_lists_beyond_int32_are_errors():
    there, given = pool(1), tokens()
    cache = there.init(batch=1, positions=8, **SIZES)
    for lengths in ([2**32], [2**31], [-(2**32)]):
        for method in METHODS:
            with pytest.raises(ValueError, match="must be within int32, got"):
                getattr(there, method)(cache, *given, lengths)
        with pytest.raises(ValueError, match="lengths must be within int32, got"):
            ba.decode_attention(given[0], *map(jnp.asarray, cache), lengths)
    with pytest.raises(TypeError, match="arrays for a CachePool must hold numbers"):
        there.put([2**70])


@pytest.mark.parametrize("name", ["batch", "positions", "kv_heads", "pages", "page", "interleave"])
@pytest.mark.parametrize("number", [2**31, 2**32 + 8, 2**63, 2**70])
def test_sizes_beyond_int32_are_errors(name, number):
    with pytest.raises(ValueError, match=f"{name} must be .* got {number}"):
        if name == "interleave":
            pool(2, interleave=number)
        else:
            rows = {"pages": 2, "page": 4} if name in ("pages", "page") else {}
            rows = rows or {"batch": 2, "positions": 4}
            pool(2).init(**(SIZES | rows | {name: number}))


@pytest.mark.parametrize("method", METHODS)
def test_a_window_of_0_is_a_window(method):
    """A query sees its own position alone; False is no number, also after a call with 0."""
    given = tokens(batch=2)
    for window in (0, np.int64(0), (0, 0), (0, None), [0, 5]):
        cache = pool(1).init(batch=2, positions=8, **SIZES)
        out, _ = call(method, cache, *given, lengths=(2, 7), local_window_size=window)
        np.testing.assert_allclose(out, given[2], rtol=1e-6)
    cache = pool(1).init(batch=2, positions=8, **SIZES)
    for option, wrong in (("local_window_size", False), ("scale", False), ("value_dim", 8)):
        with pytest.raises((TypeError, ValueError), match=option):
            call(method, cache, *given, lengths=(2, 7), **{option: wrong})
    assert not any(x.is_deleted() for x in cache)


def late(name):
    """Returns a pool, a cache and the arguments of a call whose error once came after donation."""
    there, given, options = pool(2), tokens(1), {}
    cache = there.init(batch=1, positions=8, **SIZES)
    if name == "columns of query":
        cache = there.init(batch=1, positions=8, **SIZES | {"head_dim": 24, "value_dim": 8})
        query, *others = tokens(1, dims=(24, 24, 8))
        given = [*put(model(3), COLUMNS, query), *put(model(3), P(), *others)]
    elif name == "columns of latents":
        cache = there.init(batch=1, positions=8, **SIZES | {"head_dim": 24}, latents=True)
        query, key, _ = tokens(1, dims=(24, 24, 8))
        given = *put(model(3), COLUMNS, query, key), None
        options = {"value_dim": 16}
    elif name == "prefix":
        options = {
            "prefix": cache,
            "prefix_of": np.zeros(1, int),
            "prefix_lengths": np.ones(1, int),
        }
    elif name == "one array":
        cache = (cache[0], cache[0])
    return there, cache, given, options


@pytest.mark.parametrize("method", [*METHODS, "send"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "columns of query",
            r"out is sharded as query is, but .* can't cut its shape \[1, 1, 2, 8",
        ),
        ("columns of latents", r"can't cut its shape \[1, 1, 2, 16\]; cut the heads or the batch"),
        ("prefix", "prefix must not be the cache that the call writes"),
        ("one array", "cache must have arrays of its own for keys and for values"),
    ],
)
def test_what_can_be_refused_is_refused_before_caches_are_donated(method, name, message):
    there, cache, given, options = late(name)
    with pytest.raises(ValueError, match=message):
        getattr(there, method)(cache, *given, np.array([1]), **options)
    assert not any(x.is_deleted() for x in cache if x is not None)


def test_alternate_stops_at_the_first_batch_of_a_step_that_does_not_yield():
    calls = []
    with pytest.raises(TypeError, match="step must be a generator function"):
        ba.alternate(calls.append, [1, 2])
    assert calls == [1]


def test_a_deleted_array_costs_no_cache():
    there, given = pool(2), tokens(1)
    cache, lengths = there.init(batch=1, positions=8, **SIZES), there.put(np.array([1]))
    lengths.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        there.attend(cache, *given, lengths)
    assert not any(x.is_deleted() for x in cache)
    there.attend(cache, *given, np.array([1]))
    assert all(x.is_deleted() for x in jax.tree.leaves(cache))
