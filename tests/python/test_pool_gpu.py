"""The model on GPUs and its caches on the host's CPU devices, both in one process."""

import burst_attention as ba
import jax
import numpy as np
import pytest
import ring
from jax.sharding import PartitionSpec as P
from test_pool import equal, model, put, reference

pytestmark = [pytest.mark.needs("gpu"), pytest.mark.standin]


@pytest.mark.parametrize("count", [1, 2])
def test_the_host_attends_for_gpus(count):
    there = ba.CachePool(jax.devices("cpu"))
    tokens, lengths = (
        ring.normal(0, *[(2, 2, n, 16) for n in (4, 2, 2)]),
        np.array([5, 2], np.int32),
    )
    init = {"batch": 2, "positions": 8, "kv_heads": 2, "head_dim": 16}
    expected = reference(there)(there.init(**init), tokens, lengths, {}, ())
    for spec in (P(), P(None, None, "tensor")):
        sharded = put(model(count), spec, *tokens)
        out, caches = there.attend(there.init(**init), *sharded, lengths)
        assert out.sharding == sharded[0].sharding
        equal((out, caches), expected)


@pytest.mark.parametrize("dim", [16, 264])
def test_a_prompt_enters_the_hosts_memory(dim):
    """The chunk's last token has the result of attending it by itself."""
    there = ba.CachePool(jax.devices("cpu"))
    tokens = put(model(2), P(None, "tensor"), *ring.normal(0, *[(1, 6, n, dim) for n in (4, 2, 2)]))
    init = {"batch": 1, "positions": 8, "kv_heads": 2, "head_dim": dim}
    out, _ = there.prefill(there.init(**init), *tokens, np.array([6]))
    _, caches = there.prefill(there.init(**init), *(x[:, :5] for x in tokens), np.array([5]))
    last, _ = there.attend(caches, *(x[:, 5:] for x in tokens), np.array([6]))
    assert out.sharding == tokens[0].sharding
    assert np.allclose(np.asarray(last, np.float32), np.asarray(out, np.float32)[:, 5:], atol=0.02)


def test_two_batches_in_turn():
    there, mesh = ba.CachePool(jax.devices("cpu")), model(2)
    init = {"batch": 1, "positions": 8, "kv_heads": 2, "head_dim": 16}
    first = [put(mesh, P(), *ring.normal(i, *[(1, 1, n, 16) for n in (4, 2, 2)])) for i in range(2)]
    double = jax.jit(lambda x: 2 * x)

    def step(tokens):
        (query, *new), caches = tokens, there.init(**init)
        for length in range(1, 4):
            pending, caches = there.send(caches, query, *new, np.array([length]))
            yield
            query = double(pending.receive())
        return query

    equal(ba.alternate(step, first), [ba.alternate(step, [each])[0] for each in first])
