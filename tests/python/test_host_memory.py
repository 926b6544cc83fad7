"""Calls keep no memory of the caller's NumPy arrays, which may change right after a call.

CPU devices take aligned memory as it is, and read it when a program runs. So each test gives the
device other work first.
"""

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from test_pool import equal, model, pool, put

pytestmark = pytest.mark.needs("products")

BATCH, TOKENS, HEADS, DIM = 2, 16, 2, 8


def aligned(x):
    """Returns a copy of an array in memory that CPU devices take without a copy."""
    x = np.asarray(x)
    memory = np.zeros(x.nbytes + 64, np.uint8)
    found = memory[-memory.ctypes.data % 64 :][: x.nbytes].view(x.dtype).reshape(x.shape)
    found[...] = x
    return found


@jax.jit
def work(x):
    """Keeps a device busy for some time."""
    return (x @ x @ x).sum()


def changed_after(call, *arrays, devices=1):
    """Returns the results of a call whose arrays change right after it, while devices are busy."""
    given = [aligned(x) for x in arrays]
    jax.block_until_ready(call(*map(np.array, given)))
    busy = [work(jax.device_put(BUSY, device)) for device in ring.devices(8)[:devices]]
    results = call(*given)
    for x in given:
        x[...] = ~x if x.dtype == bool else x + 1
    jax.block_until_ready(busy)
    return results


BUSY = np.ones((1200, 1200), np.float32)
QKV = ring.normal(0, *[(BATCH, TOKENS, HEADS, DIM)] * 3, dtype=np.float32)
IDS = np.arange(TOKENS, dtype=np.int32)[None].repeat(BATCH, 0) // 5
ONES = np.ones(HEADS, np.float32)


def context():
    return {"mesh": Mesh(ring.devices(1), ("context",)), "spec": P(None, "context")}


CALLS = {
    "query": (lambda *qkv: ba.dot_product_attention(*qkv, **context()), QKV),
    "features": (
        lambda ids, sinks, positions: ba.dot_product_attention(
            *QKV, segment_ids=ids, sinks=sinks, query_positions=positions, is_causal=True,
            **context(),
        ),
        (IDS, ONES, IDS),
    ),
    "in sequence": (
        lambda q, ids: ba.dot_product_attention(
            q, *QKV[1:], segment_ids=ids, order="sequence", layout="zigzag", **context()
        ),
        (QKV[0], IDS),
    ),
    "a mask": (
        lambda mask: ba.dot_product_attention(*QKV, mask=mask, **context()),
        (np.arange(TOKENS)[None, None, None] < np.array([9, 5])[:, None, None, None],),
    ),
    "linear": (lambda *qkv: ba.linear_attention(*qkv, **context()), QKV),
    "decoding": (
        lambda q, k, v, lengths, slopes: ba.decode_attention(
            q, k, v, lengths, alibi_slopes=slopes
        ),
        (QKV[0][:, :1], *QKV[1:], np.array([9, 4], np.int32), ONES),
    ),
    "pages": (
        lambda table, counts: ba.decode_attention(
            QKV[0][:, :2], *QKV[1:], np.array([9, 4]), page_table=table, query_lengths=counts
        ),
        (np.array([[1], [0]], np.int32), np.array([1, 0], np.int32)),
    ),
    "appending": (
        lambda k, v, lengths: ba.append_to_cache(*map(jnp.asarray, QKV[1:]), k, v, lengths),
        (*(x[:, :1] for x in QKV[1:]), np.array([3, 4], np.int32)),
    ),
    "merging": (
        lambda out, lse: ba.merge_attention((out, lse), (out, lse)),
        (QKV[0], QKV[0][..., 0]),
    ),
    "a buffer": (
        lambda lengths: ba.decode_attention(QKV[0][:, :1], *QKV[1:], memoryview(lengths)),
        (np.array([9, 4], np.int32),),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "arrays"), CALLS.values(), ids=CALLS)
def test_results_do_not_change_with_the_arrays(call, arrays):
    equal(changed_after(call, *arrays), call(*arrays))


def test_reordering_keeps_its_order():
    balance = ba.balance_documents([7, 5], 2, 2)
    x = jnp.arange(balance.permutation.shape[1])[None]
    expected = np.asarray(balance.to_ranks(x))

    def reorder(order):
        object.__setattr__(balance, "permutation", order)
        return balance.to_ranks(x)

    equal(changed_after(reorder, balance.permutation), expected)


ARRAYS = {
    "lengths": np.array([6, 5], np.int32),
    "query_lengths": np.array([2, 1], np.int32),
    "page_table": np.array([[1, 3], [2, 0]], np.int32),
    "sinks": ONES,
    "alibi_slopes": ONES,
    "prefix_of": np.array([1, 0], np.int32),
    "prefix_lengths": np.array([3, 4], np.int32),
}


@pytest.mark.parametrize("method", ["attend", "prefill"])
def test_a_pool_keeps_no_memory(method):
    there = pool(2, interleave=2)
    tokens = put(model(1), P(), *(x[:, :2] for x in QKV))
    sizes = {"kv_heads": HEADS, "head_dim": DIM, "dtype": "float32"}
    _, prefix = there.prefill(
        there.init(batch=2, positions=4, **sizes), *put(model(1), P(), *(x[:, :4] for x in QKV)),
        np.array([4, 4]),
    )  # fmt: skip

    def call(lengths, *arrays):
        cache = there.init(pages=2, page=2, **sizes)
        data = dict(zip(list(ARRAYS)[1:], arrays, strict=True))
        return getattr(there, method)(cache, *tokens, lengths, prefix=prefix, **data)

    equal(changed_after(call, *ARRAYS.values(), devices=8), call(*ARRAYS.values()))


@pytest.mark.parametrize("name", ARRAYS)
def test_what_is_put_is_a_copy(name):
    x = aligned(ARRAYS[name])
    found = pool(2).put(x).block_until_ready()
    x += 1
    equal(found, ARRAYS[name])
