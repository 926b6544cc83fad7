"""Wrong arguments of pools are errors before the devices compute, and say what to do."""

import re

import burst_attention as ba
import jax
import numpy as np
import pytest
import ring
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from test_pool import model, pool, put

pytestmark = pytest.mark.needs("products")

SIZES = {"kv_heads": 2, "head_dim": 8, "dtype": "float32"}
ROWS = {"batch": 2, "positions": 16}
N, TABLE = np.array([3, 4], np.int32), np.zeros((2, 2), np.int32)


def init(**options):
    return pool(2).init(**(SIZES | ROWS | options))


def tokens(count=1, heads=(4, 2, 2), dtype="float32", devices=1, dim=8):
    shapes = [(2, count, n, dim) for n in heads]
    return put(model(devices), P(), *(np.ones(shape, dtype) for shape in shapes))


def attend(*given, cache=None, lengths=N, method="attend", there=None, **options):
    there = pool(2) if there is None else there
    cache = there.init(**SIZES, **ROWS) if cache is None else cache
    return getattr(there, method)(cache, *(given or tokens()), lengths, **options)


def again():
    there = pool(2)
    cache = there.init(**SIZES, **ROWS)
    there.attend(cache, *tokens(), N)
    there.attend(cache, *tokens(), N)


def traced(change, *args):
    """Traces a call of `attend` with arguments of which ``change`` makes the others."""
    cache = init()
    options = {"cache": cache, "lengths": N}

    def call(*args):
        given, others = change(*args)
        attend(*given, **(options | others))

    jax.jit(call)(*args)


BAD = {
    "no devices": (lambda: ba.CachePool([]), TypeError, "list of at least one device, got []"),
    "numbers": (lambda: ba.CachePool([4, 5]), TypeError, "devices must be a mesh or a list of"),
    "a device twice": (
        lambda: ba.CachePool(list(ring.devices(1)) * 2),
        ValueError,
        "each device of a pool must be named once",
    ),
    "two axes of a list": (
        lambda: pool(2, axis_name=("node", "gpu")),
        ValueError,
        "a list of devices has one axis, got axis_name=('node', 'gpu'); give a mesh with both",
    ),
    "an axis of heads": (
        lambda: ba.CachePool(Mesh(ring.devices(2, 2), ("x", "heads")), axis_name="x"),
        ValueError,
        "must have the axes of the sequence alone, 'x', got 'x' or 'heads': each cache is sharded",
    ),
    "layout": (
        lambda: pool(2, layout="zigzag"),
        ValueError,
        "layout must be one of 'striped' or 'contiguous', got 'zigzag'",
    ),
    "interleave": (lambda: pool(2, interleave=0), ValueError, "interleave must be at least 1"),
    "rows and pages": (
        lambda: init(page=4),
        TypeError,
        "either batch and positions or pages and page, got batch and positions and page",
    ),
    "neither": (
        lambda: pool(2).init(**SIZES),
        TypeError,
        "either batch and positions or pages and page, got none of them",
    ),
    "no positions": (lambda: init(positions=0), ValueError, "positions must be at least 1, got 0"),
    "pages and interleave": (
        lambda: pool(2, interleave=2).init(**SIZES, pages=4, page=8),
        ValueError,
        "page must be the pool's interleave, 2, since whole pages go round the devices, got 8",
    ),
    "dtype": (lambda: init(dtype="int8"), TypeError, "dtype must be float32, bfloat16 or float16"),
    "head_dim": (lambda: init(head_dim=12), ValueError, "head_dim must be a multiple of 8"),
    "value_dim": (lambda: init(value_dim=7), ValueError, "value_dim must be a multiple of 8"),
    "a trace": (
        lambda: traced(lambda q: ((q, *tokens()[1:]), {}), tokens()[0]),
        TypeError,
        "query must be an array outside of any trace, got a traced array float32[2,1,4,8]: a "
        "pool's programs run on other devices, so call it between the compiled programs",
    ),
    "an array of numpy": (
        lambda: attend(*map(np.asarray, tokens())),
        TypeError,
        "query must be an array of JAX on the model's devices, got",
    ),
    "no value": (
        lambda: attend(*tokens()[:2], None, method="prefill"),
        ValueError,
        "value_cache and value must both be arrays or both be None, got None for value alone",
    ),
    "latents with a width of values": (
        lambda: init(latents=True, value_dim=8),
        TypeError,
        "caches of latents have no array of values, so init takes no value_dim, got 8; give",
    ),
    "no tokens": (
        lambda: attend(*(x[:, :0] for x in tokens()), method="prefill"),
        ValueError,
        "query must have at least one sequence, token, head and column, [batch, T,",
    ),
    "three dimensions": (
        lambda: attend(*(x[0] for x in tokens())),
        ValueError,
        "must have shape [batch, T, heads, head_dim] and one batch, T and dtype, got query [1, 4,",
    ),
    "another T": (
        lambda: attend(tokens()[0], *tokens(2)[1:]),
        ValueError,
        "got query [2, 1, 4, 8] float32 and key [2, 2, 2, 8] float32",
    ),
    "another dtype": (
        lambda: attend(*tokens()[:2], tokens(dtype="float16")[2]),
        ValueError,
        "got query [2, 1, 4, 8] float32 and value [2, 1, 2, 8] float16",
    ),
    "other devices": (
        lambda: attend(tokens()[0], *tokens(devices=2)[1:]),
        ValueError,
        "query and key must be on the same devices, got",
    ),
    "caches of another dtype": (
        lambda: attend(*tokens(dtype="float16")),
        TypeError,
        "must have one dtype, got float16, float32 and float32; cast the new tokens to the caches'",
    ),
    "heads": (
        lambda: attend(*tokens(heads=(4, 4, 4))),
        ValueError,
        "key must have shape (2, 1, 2, 8) and dtype float32, as key_cache has, got (2, 1, 4, 8)",
    ),
    "17 tokens": (
        lambda: attend(*tokens(17)),
        ValueError,
        "query must have from 1 to 16 new tokens T",
    ),
    "one cache": (
        lambda: attend(cache=init()[0]),
        TypeError,
        "cache must be a pair (key_cache, value_cache), as CachePool.init returns it",
    ),
    "caches of numpy": (
        lambda: attend(cache=tuple(map(np.asarray, init()))),
        TypeError,
        "cache must have arrays on the pool's devices, as CachePool.init returns them, got",
    ),
    "caches of another pool": (
        lambda: attend(cache=pool(3).init(**SIZES, batch=2, positions=18)),
        ValueError,
        "cache must have arrays on the pool's devices, as CachePool.init returns them, got an",
    ),
    "a cache again": (
        again,
        ValueError,
        "cache was donated to an earlier call, which wrote new tokens in place; use the cache that",
    ),
    "pages without a table": (
        lambda: attend(cache=pool(2).init(**SIZES, pages=5, page=4)),
        ValueError,
        "pages need page_table",
    ),
    "an option of the pool": (
        lambda: attend(layout="striped"),
        TypeError,
        "layout is the pool's: give it to CachePool, and leave it out here",
    ),
    "an unknown option": (
        lambda: attend(is_causal=True),
        TypeError,
        "decode_attention() got an unexpected keyword argument 'is_causal'",
    ),
    "an option of decoding": (
        lambda: attend(method="prefill", split="fixed"),
        TypeError,
        "CachePool.prefill() got an unexpected keyword argument 'split'; it takes page_table, q",
    ),
    "an array as scale": (
        lambda: attend(scale=np.ones(1)),
        TypeError,
        "scale must be a Python value, since it is compiled into the program, got",
    ),
    "a prefix alone": (
        lambda: attend(prefix=init()),
        TypeError,
        "shared prefixes need prefix, prefix_of, prefix_lengths together, got prefix",
    ),
    "a prefix beside pages": (
        lambda: attend(
            cache=pool(2).init(**SIZES, pages=2, page=4),
            page_table=TABLE,
            prefix=init(),
            prefix_of=N,
            prefix_lengths=N,
        ),
        ValueError,
        "make the pool with interleave=page",
    ),
    "a prefix elsewhere": (
        lambda: attend(prefix=pool(1).init(**SIZES, **ROWS), prefix_of=N, prefix_lengths=N),
        ValueError,
        "prefix must have arrays on the pool's devices",
    ),
    "lengths": (
        lambda: attend(lengths=N[:1]),
        ValueError,
        "lengths must have shape (2,), [batch], got shape (1,)",
    ),
    "a table of another batch": (
        lambda: attend(cache=pool(2).init(**SIZES, pages=5, page=4), page_table=TABLE[:1]),
        ValueError,
        "page_table must have shape [batch, pages_per_sequence] with batch 2",
    ),
    "a window": (
        lambda: attend(method="prefill", local_window_size=-4),
        ValueError,
        "local_window_size must not be negative, got -4",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), BAD.values(), ids=BAD)
def test_it_is_an_error(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_a_failed_call_donates_nothing():
    there = pool(2)
    cache = there.init(**SIZES, **ROWS)
    with pytest.raises(ValueError, match="lengths must have shape"):
        there.attend(cache, *tokens(), N[:1])
    assert not any(x.is_deleted() for x in cache)
