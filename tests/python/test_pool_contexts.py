"""Pools work whatever the caller has set, can't be traced, and keep nothing on devices."""

import gc
import re
from contextlib import contextmanager

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from burst_attention._pool import plan, programs, ways
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_pool import equal, model, pool, put

pytestmark = pytest.mark.needs("products")

SIZES = {"kv_heads": 4, "head_dim": 8, "dtype": "float32"}
TOKENS = ring.normal(0, *[(4, 1, 4, 8)] * 3, dtype=np.float32)
CACHES = (ways.way, ways.way_back, ways._resharding, plan.plan, programs.empty, programs.program)


@contextmanager
def mesh_and_no_jit():
    with jax.set_mesh(model(4, AxisType.Explicit)), jax.disable_jit():
        yield


CONTEXTS = {
    "a mesh": lambda: jax.set_mesh(model(4)),
    "an explicit mesh": lambda: jax.set_mesh(model(4, AxisType.Explicit)),
    "an abstract mesh": lambda: jax.sharding.use_abstract_mesh(model(4).abstract_mesh),
    "no jit": jax.disable_jit,
    "both": mesh_and_no_jit,
}


def steps(spec, types):
    """Returns what a pool gives for a prompt, a step, and two batches in turn."""
    there, lengths = pool(2), np.array([1, 2, 1, 2])
    tokens = put(model(4, types), spec, *TOKENS)

    def step(cache):
        pending, cache = there.send(cache, *tokens, there.put(lengths))
        yield
        return pending.receive(), cache

    caches = [there.init(batch=4, positions=8, **SIZES) for _ in range(3)]
    prompt, cache = there.prefill(caches[0], *tokens, lengths)
    return prompt, there.attend(cache, *tokens, lengths + 1), ba.alternate(step, caches[1:])


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_a_callers_contexts_do_not_reach_a_pool(context):
    """Tokens that cross whole, and tokens that are gathered first."""
    for spec, types in ((P(), AxisType.Auto), (P("tensor"), AxisType.Explicit)):
        expected = steps(spec, types)
        with context():
            found = steps(spec, types)
        assert jax.tree.map(lambda x: x.sharding, found) == jax.tree.map(
            lambda x: x.sharding, expected
        )
        equal(found, expected)


ARRAYS = {
    "lengths": np.full(4, 2),
    "query_lengths": np.ones(4, np.int32),
    "page_table": np.arange(4)[:, None],
    "sinks": np.ones(4, np.float32),
    "alibi_slopes": np.ones(4, np.float32),
    "prefix_of": np.zeros(4, np.int32),
    "prefix_lengths": np.ones(1, np.int32),
}


@pytest.mark.parametrize("method", ["attend", "prefill", "send"])
@pytest.mark.parametrize("name", ["query", "key", "value", "cache", "prefix", *ARRAYS])
def test_a_traced_array_is_an_error_that_names_it(method, name):
    there = pool(2, interleave=4)
    arrays = dict(zip(("query", "key", "value"), put(model(1), P(), *TOKENS), strict=True))
    arrays |= ARRAYS | {"prefix": there.init(batch=1, positions=8, **SIZES)}
    arrays |= {"cache": there.init(pages=4, page=4, **SIZES)}
    message = f"{name} must be an array outside of any trace, got a traced array"
    with pytest.raises(TypeError, match=re.escape(message)) as raised:
        jax.jit(lambda x: getattr(there, method)(**(arrays | {name: x})))(arrays[name])
    assert "call it between the compiled programs of the model" in str(raised.value)
    assert not any(x.is_deleted() for x in arrays["cache"])


def test_calls_inside_a_trace_are_errors_without_traced_arrays_too():
    there = pool(2)
    caches = [there.init(batch=4, positions=8, **SIZES) for _ in range(2)]
    calls = [lambda: there.init(batch=4, positions=8, **SIZES), lambda: there.put(np.ones(4))]
    for spec, cache in zip((P(), P("tensor")), caches, strict=True):
        tokens = put(model(4), spec, *TOKENS)
        calls.append(lambda cache=cache, tokens=tokens: there.attend(cache, *tokens, np.ones(4)))
    pending, _ = there.send(there.init(batch=4, positions=8, **SIZES), *tokens, np.ones(4, int))
    calls.append(pending.receive)
    for call in calls:
        with pytest.raises(TypeError, match="the methods of a CachePool can't be traced"):
            jax.jit(lambda x, call=call: (call(), x)[1])(1.0)
    with pytest.raises(TypeError, match="x must be an array outside of any trace"):
        jax.jit(there.put)(jnp.ones(4))
    assert not any(x.is_deleted() for cache in caches for x in cache)


def test_what_is_kept_is_bounded_and_holds_no_arrays():
    assert all(each.cache_info().maxsize for each in CACHES)
    modules = [vars(module).values() for module in (plan, programs, ways)]
    kept = {id(x) for module in modules for x in module if hasattr(x, "cache_info")}
    assert kept == set(map(id, CACHES))
    gc.collect()
    before = len(jax.live_arrays())
    steps(P("tensor"), AxisType.Auto)
    gc.collect()
    assert len(jax.live_arrays()) <= before
