"""Array arguments take what jnp.asarray takes: wrapped arrays, and lists of numbers."""

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from jax.sharding import PartitionSpec as P

pytestmark = [pytest.mark.needs("float32", "products"), pytest.mark.oldest_jax]


def options():
    return {"mesh": ring.line(2), "spec": P(None, "context")}


class Parameter:
    """An array in the wrapper of a library, such as nnx.Param."""

    def __init__(self, value):
        self.value = jnp.asarray(value)

    def __jax_array__(self):
        return self.value


def attention(wrap):
    q, k, v = (wrap(x) for x in ring.normal(0, *[(2, 16, 2, 8)] * 3))
    arrays = {
        "sinks": np.ones(2, np.float32),
        "alibi_slopes": np.full(2, 0.1, np.float32),
        "query_positions": np.arange(16)[None].repeat(2, 0),
        "key_positions": np.arange(16)[None].repeat(2, 0),
        "key_value_seq_lengths": np.array([15, 14]),
    }
    arrays = {name: wrap(x) for name, x in arrays.items()}
    return ba.dot_product_attention(q, k, v, **arrays, **options(), is_causal=True)


def one_batch_entry(wrap):
    q, k, v = (wrap(x) for x in ring.normal(0, *[(16, 2, 8)] * 3))
    ids = np.repeat([0, 1], 8)  # a list of ids would be a pair
    return ba.dot_product_attention(q, k, v, segment_ids=ids, **options())


def decode(wrap):
    query, key, value = ring.normal(0, (2, 1, 2, 8), *[(2, 16, 2, 8)] * 2)
    arrays = (query, key, value, np.array([9, 16]))
    sinks = wrap(np.ones(2, np.float32))
    return ba.decode_attention(*map(wrap, arrays), sinks=sinks)


def linear(wrap):
    q, k, v, logs = ring.normal(0, *[(2, 16, 2, 8)] * 3, (2, 16, 2))
    qkv = (wrap(x) for x in (q, k, v))
    return ba.linear_attention(*qkv, log_decay=wrap(-np.abs(logs)), **options())


def shift(wrap):
    def local():
        return ba.shift(wrap(np.arange(8)[None]), axis_name="context")

    return jax.shard_map(local, mesh=ring.line(2), in_specs=(), out_specs=P(None, "context"))()


@pytest.mark.parametrize("call", [attention, one_batch_entry, decode, linear, shift])
@pytest.mark.parametrize("wrap", [Parameter, np.ndarray.tolist])
def test_wrapped_arrays_and_lists(call, wrap):
    assert np.array_equal(call(wrap), call(np.asarray))
