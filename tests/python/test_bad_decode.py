"""Wrong arguments of decoding are errors while tracing that say what to do."""

import re

import burst_attention as ba
import jax
import numpy as np
import pytest
import ring
from jax.sharding import PartitionSpec as P

pytestmark = pytest.mark.needs("products")

Q, NEW = np.ones((2, 1, 4, 8), np.float32), np.ones((2, 1, 2, 8), np.float32)
CACHE, PAGES = np.ones((2, 16, 2, 8), np.float32), np.ones((5, 4, 2, 8), np.float32)
PREFIX = np.ones((3, 16, 2, 8), np.float32)
N, SIZES = np.array([3, 4], np.int32), np.ones(3, np.int32)
TABLE = np.zeros((2, 2), np.int32)


def decode(q=Q, k=CACHE, v=None, n=N, **options):
    return ba.decode_attention(q, k, k if v is None else v, n, **options)


def append(k=CACHE, v=None, key=NEW, value=NEW, n=N, **options):
    return ba.append_to_cache(k, k if v is None else v, key, value, n, **options)


def shared(prefix=PREFIX, of=N, sizes=SIZES, **options):
    return ba.shared_prefix_attention(
        *(Q, prefix, prefix, CACHE, CACHE, N), prefix_of=of, prefix_lengths=sizes, **options
    )


def explicit(x):
    """Puts an array on two devices, on a mesh whose types say so."""
    mesh = ring.mesh(2, 1, 1, axis_type=jax.sharding.AxisType.Explicit)
    return jax.device_put(x, jax.NamedSharding(mesh, P("data")))


def on_mesh(call):
    """Calls inside `shard_map` over two devices, with all arguments sharded along the axis."""
    mesh = ring.line(2)
    specs = (P(None, None, "context"), P(None, "context"), P())
    run = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=True)
    return jax.eval_shape(run, Q, CACHE, N)


BAD = {
    "a number": (lambda: decode(q=1), TypeError, "query must be an array, got int"),
    "float64": (lambda: decode(q=Q.astype(np.float64)), TypeError, "query must be float32, bf"),
    "three dimensions": (
        lambda: decode(q=Q[0]),
        ValueError,
        "4 dimensions [batch, T, heads, head_",
    ),
    "no token": (lambda: decode(q=Q[:, :0]), ValueError, "query must have from 1 to 16 new tokens"),
    "17 tokens": (
        lambda: decode(q=np.ones((2, 17, 4, 8), np.float32)),
        ValueError,
        "got T = 17; prefill more tokens with burst_attention.attention",
    ),
    "another dtype": (
        lambda: decode(q=Q.astype(np.float16)),
        TypeError,
        "must have one dtype, got float16, float32 and float32; cast the new tokens",
    ),
    "another length of values": (
        lambda: decode(v=CACHE[:, :8]),
        ValueError,
        "key_cache and value_cache must have one shape but for their last dimension",
    ),
    "another batch": (
        lambda: decode(k=CACHE[:1]),
        ValueError,
        "caches without page_table must have one entry for each of 2 batch entries, got shape (1,",
    ),
    "pages without a table": (lambda: decode(k=PAGES), ValueError, "pages need page_table"),
    "head_dim 12": (
        lambda: decode(q=np.ones((2, 1, 4, 12), np.float32), k=np.ones((2, 4, 2, 12), np.float32)),
        ValueError,
        "head_dim must be a multiple of 8 from 8 to 576, got 12; pad it with zeros",
    ),
    "head_dim 584": (
        lambda: decode(
            q=np.ones((2, 1, 4, 584), np.float32), k=np.ones((2, 4, 2, 584), np.float32)
        ),
        ValueError,
        "head_dim must be a multiple of 8 from 8 to 576, got 584",
    ),
    "no values": (
        lambda: ba.decode_attention(Q, CACHE, None, N),
        ValueError,
        "value_cache None needs value_dim, the number of first columns of key_cache that are the",
    ),
    "value_dim and values": (
        lambda: decode(value_dim=8),
        ValueError,
        "needs value_cache None, got an array of shape (2, 16, 2, 8); leave value_dim out",
    ),
    "more values than keys": (
        lambda: ba.decode_attention(Q, CACHE, None, N, value_dim=16),
        ValueError,
        "value_dim must be a multiple of 8 from 8 to 8, that of head_dim, got 16",
    ),
    "value_dim 4": (
        lambda: ba.decode_attention(Q, CACHE, None, N, value_dim=4),
        ValueError,
        "value_dim must be a multiple of 8 from 8 to 8, that of head_dim, got 4",
    ),
    "value_dim 8.0": (
        lambda: ba.decode_attention(Q, CACHE, None, N, value_dim=8.0),
        TypeError,
        "value_dim must be an int, got 8.0",
    ),
    "another dtype of latents": (
        lambda: ba.decode_attention(Q.astype(np.float16), CACHE, None, N, value_dim=8),
        TypeError,
        "query or new tokens and key_cache must have one dtype, got float16 and float32; cast",
    ),
    "head_dims": (
        lambda: decode(k=np.ones((2, 16, 2, 16), np.float32)),
        ValueError,
        "query and key_cache must have one head_dim, got 8 and 16",
    ),
    "heads": (
        lambda: decode(k=np.ones((2, 16, 3, 8), np.float32)),
        ValueError,
        "query heads must be a multiple of key/value heads",
    ),
    "lengths of another batch": (
        lambda: decode(n=N[:1]),
        ValueError,
        "lengths must have shape (2,), [batch], got shape (1,)",
    ),
    "lengths of floats": (
        lambda: decode(n=N.astype(np.float32)),
        TypeError,
        "lengths must have an integer type, which is cast to int32, got float32",
    ),
    "a table of floats": (
        lambda: decode(k=PAGES, page_table=TABLE * 1.0),
        TypeError,
        "page_table must have an integer type",
    ),
    "a table of one dimension": (
        lambda: decode(k=PAGES, page_table=TABLE[0]),
        ValueError,
        "page_table must have shape [batch, pages_per_sequence] with batch 2 and at least one page",
    ),
    "zigzag": (
        lambda: decode(layout="zigzag"),
        ValueError,
        "layout must be one of 'striped' or 'contiguous', got 'zigzag'",
    ),
    "interleave 3": (
        lambda: decode(interleave=3),
        ValueError,
        "interleave must divide the capacity of key_cache, 16 rows, got 3",
    ),
    "interleave 0": (lambda: decode(interleave=0), ValueError, "interleave must be at least 1"),
    "contiguous and interleave": (
        lambda: decode(layout="contiguous", interleave=2),
        ValueError,
        "interleave must be 1 in layout 'contiguous', where rank 0 fills first, got 2",
    ),
    "pages and interleave": (
        lambda: decode(k=PAGES, page_table=TABLE, interleave=2),
        ValueError,
        "interleave must be the rows of a page, 4, since whole pages go round the ranks, got 2",
    ),
    "too many positions": (
        lambda: jax.eval_shape(
            decode,
            jax.ShapeDtypeStruct((1, 1, 1, 8), "float16"),
            jax.ShapeDtypeStruct((1, 2**31, 1, 8), "float16"),
            n=jax.ShapeDtypeStruct((1,), "int32"),
        ),
        ValueError,
        "a sequence must have at most 2147483647 positions on all ranks, got capacity 2147483648",
    ),
    "an unknown option": (
        lambda: shared(is_causal=True),
        TypeError,
        "shared_prefix_attention() got an unexpected keyword argument 'is_causal'; it takes axis_",
    ),
    "split": (
        lambda: decode(split="even"),
        ValueError,
        "split must be one of 'balanced' or 'fixed', got 'even'",
    ),
    "implementation": (lambda: decode(implementation="jax"), ValueError, "must be None or 'xla'"),
    "sinks": (
        lambda: decode(sinks=np.ones(2)),
        ValueError,
        "sinks must have shape (4,), one logit",
    ),
    "cap": (lambda: decode(logits_soft_cap=1e31), ValueError, "logits_soft_cap must be from 1e-30"),
    "window": (
        lambda: decode(local_window_size=-4),
        ValueError,
        "local_window_size must not be negative, got -4",
    ),
    "residual": (lambda: decode(return_residual=1), TypeError, "return_residual must be True or"),
    "no mesh": (
        lambda: decode(axis_name="context"),
        ValueError,
        "decode_attention must be called inside jax.shard_map, which gives axis_name='context' its",
    ),
    "an array of several devices": (
        lambda: decode(k=explicit(CACHE)),
        ValueError,
        "key_cache must be the array of one device, but is sharded over 'data'; call inside",
    ),
    "queries that differ": (
        lambda: on_mesh(lambda q, k, n: decode(q, k, n=n, axis_name="context")),
        ValueError,
        "query must be the same on all devices along axis_name='context', but varies over it",
    ),
    "lengths that differ": (
        lambda: on_mesh(
            lambda q, k, n: decode(k=k, n=n + jax.lax.axis_index("context"), axis_name="context")
        ),
        ValueError,
        "lengths must be the same on all devices along axis_name='context'",
    ),
    "new tokens of another shape": (
        lambda: append(key=NEW[:, :, :1]),
        ValueError,
        "key must have shape (2, 1, 2, 8) and dtype float32, as key_cache has, got (2, 1, 1, 8)",
    ),
    "new values of another type": (
        lambda: append(value=NEW.astype(np.float16)),
        ValueError,
        "value must have shape (2, 1, 2, 8) and dtype float32, as value_cache has, got",
    ),
    "new values without a cache": (
        lambda: ba.append_to_cache(CACHE, None, NEW, NEW, N),
        ValueError,
        "value_cache and value must both be arrays or both be None, got None for value_cache alone",
    ),
    "a cache without new values": (
        lambda: append(value=None),
        ValueError,
        "must both be arrays or both be None, got None for value alone",
    ),
    "values of prefixes alone": (
        lambda: ba.shared_prefix_attention(
            *(Q, PREFIX, PREFIX, CACHE, None, N), prefix_of=N, prefix_lengths=SIZES, value_dim=8
        ),
        ValueError,
        "got None for value_cache alone; give an array, or None for prefix_value too",
    ),
    "own values alone": (
        lambda: ba.shared_prefix_attention(
            *(Q, PREFIX, None, CACHE, CACHE, N), prefix_of=N, prefix_lengths=SIZES
        ),
        ValueError,
        "got None for prefix_value alone; give an array, or None for value_cache too",
    ),
    "append outside of a mesh": (
        lambda: append(axis_name="context"),
        ValueError,
        "append_to_cache must be called inside jax.shard_map",
    ),
    "heads of prefixes": (
        lambda: shared(prefix=PREFIX[:, :, :1]),
        ValueError,
        "prefix_key must have the heads and the head_dim of key_cache, (2, 8), got (1, 8)",
    ),
    "lengths of prefixes": (
        lambda: shared(sizes=N),
        ValueError,
        "prefix_lengths must have shape (3,), [prefixes], got shape (2,)",
    ),
    "prefixes of a batch": (
        lambda: shared(of=N[:1]),
        ValueError,
        "prefix_of must have shape (2,), [batch], got shape (1,)",
    ),
    "interleave of prefixes": (
        lambda: shared(prefix=PREFIX[:, :10], interleave=4),
        ValueError,
        "interleave must divide the capacity of prefix_key, 10 rows, got 4",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), BAD.values(), ids=BAD)
def test_it_is_an_error(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()
