"""Chunks of new tokens enter a sharded contiguous cache through attention with masks as data."""

from functools import partial

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from decode_cases import SHARDED, WHOLE, Sharding, check, problem
from decode_reference import dense
from jax.sharding import PartitionSpec as P
from reference import dense as attention

pytestmark = [pytest.mark.needs("products"), pytest.mark.oldest_jax]

RANKS, CHUNK = 4, 16
OPTIONS = {"axis_name": "context", "layout": "contiguous"}


def prefill(q, k, v, keys, values, lengths, *ids):
    """Returns out and lse of a chunk's tokens, and the caches with the chunk."""
    gather = partial(jax.lax.all_gather, axis_name="context", axis=1, tiled=True, to="invarying")
    keys, values = ba.append_to_cache(keys, values, gather(k), gather(v), lengths, **OPTIONS)
    at, positions = (ba.local_positions(x.shape[1], axis_name="context") for x in (keys, q))
    at = jnp.broadcast_to(at, keys.shape[:2])
    out, lse = ba.attention(
        *(q, keys, values),
        axis_name="context",
        query_positions=lengths[:, None] - CHUNK + positions,
        visible=(at, jnp.where(at < lengths[:, None], 2**31 - 1, at)),
        segment_ids=ids or None,
        return_residual=True,
    )
    return out, lse, (keys, values)


def compiled(ids=0):
    """Returns `prefill` over ranks, with a number of arrays of ids."""
    cut = P(None, "context")
    specs = {
        "in_specs": (SHARDED,) * 5 + (WHOLE,) + (cut,) * ids,
        "out_specs": (SHARDED, cut, SHARDED),
    }
    return jax.jit(jax.shard_map(prefill, mesh=ring.line(RANKS), **specs))


@pytest.mark.long
@pytest.mark.parametrize("begin", [CHUNK, CHUNK - 5])
def test_documents_may_begin_anywhere(begin):
    """At the border of two chunks, or within one."""
    tokens = 2 * CHUNK
    qkv = ring.normal(0, *[(2, tokens, heads, 16) for heads in (4, 2, 2)])
    ids = np.broadcast_to((np.arange(tokens) >= begin).astype(np.int32), (2, tokens))
    dout, dlse = np.zeros_like(qkv[0]), np.zeros(qkv[0].shape[:3])
    expected = attention(*qkv, dout, dlse, causal=True, segments=(ids, ids))
    run, caches = compiled(ids=2), [np.full_like(x, np.nan) for x in qkv[1:]]
    found = []
    for end in (CHUNK, tokens):
        chunk, own = (x[:, end - CHUNK : end] for x in qkv), ids[:, end - CHUNK : end]
        lengths = np.full(2, end, np.int32)
        out, _, caches = run(*chunk, *caches, lengths, own, ids)
        found.append(np.asarray(out))
    assert np.abs(np.concatenate(found, 1) - expected.o).max() < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_and_steps_are_attention_over_all_tokens(dtype):
    """Two sequences of other lengths get two chunks, of which each rank has a part, and a step."""
    sharding = Sharding(RANKS, "contiguous", capacity=20)
    tokens = 2 * CHUNK + 1
    case = problem(sharding, [tokens, 40 + tokens], tokens, dtype=dtype)
    first = case.lengths - tokens
    new = [np.stack([x[b, n : n + tokens] for b, n in enumerate(first)]) for x in (case.k, case.v)]
    caches = [x.copy() for x in (case.k, case.v)]
    for x in caches:
        for b, n in enumerate(first):
            x[b, n:] = np.nan

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=ring.line(RANKS),
        in_specs=(WHOLE, WHOLE, WHOLE, SHARDED, SHARDED, WHOLE),
        out_specs=WHOLE,
    )
    def step(q, k, v, keys, values, lengths):
        caches = ba.append_to_cache(keys, values, k, v, lengths, **OPTIONS)
        return ba.decode_attention(q, *caches, lengths, return_residual=True, **OPTIONS)

    found, run = [], compiled()
    for end in (CHUNK, 2 * CHUNK):
        chunk = (x[:, end - CHUNK : end] for x in (case.q, *new))
        *results, caches = run(*chunk, *caches, first + end)
        found.append(results)
    found.append(step(*(x[:, -1:] for x in (case.q, *new)), *caches, case.lengths))
    outs, logs = (
        np.concatenate([np.asarray(x) for x in each], 1) for each in zip(*found, strict=True)
    )
    check((outs, logs), dense(case.q, case.k, case.v, case.lengths))
