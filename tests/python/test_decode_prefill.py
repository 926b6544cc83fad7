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

pytestmark = pytest.mark.needs("products")

RANKS, CHUNK = 4, 16


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
    options = {"axis_name": "context", "layout": "contiguous"}

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=ring.line(RANKS),
        in_specs=(SHARDED,) * 5 + (WHOLE,),
        out_specs=(SHARDED, P(None, "context"), SHARDED),
    )
    def prefill(q, k, v, keys, values, lengths):
        gather = partial(
            jax.lax.all_gather, axis_name="context", axis=1, tiled=True, to="invarying"
        )
        keys, values = ba.append_to_cache(keys, values, gather(k), gather(v), lengths, **options)
        at = jnp.broadcast_to(
            ba.local_positions(keys.shape[1], axis_name="context"), (2, keys.shape[1])
        )
        out, lse = ba.attention(
            *(q, keys, values),
            axis_name="context",
            query_positions=lengths[:, None]
            - CHUNK
            + ba.local_positions(q.shape[1], axis_name="context"),
            visible=(at, jnp.where(at < lengths[:, None], 2**31 - 1, at)),
            return_residual=True,
        )
        return out, lse, (keys, values)

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=ring.line(RANKS),
        in_specs=(WHOLE, WHOLE, WHOLE, SHARDED, SHARDED, WHOLE),
        out_specs=WHOLE,
    )
    def step(q, k, v, keys, values, lengths):
        caches = ba.append_to_cache(keys, values, k, v, lengths, **options)
        return ba.decode_attention(q, *caches, lengths, return_residual=True, **options)

    found = []
    for end in (CHUNK, 2 * CHUNK):
        chunk = (x[:, end - CHUNK : end] for x in (case.q, *new))
        *results, caches = prefill(*chunk, *caches, first + end)
        found.append(results)
    found.append(step(*(x[:, -1:] for x in (case.q, *new)), *caches, case.lengths))
    outs, logs = (
        np.concatenate([np.asarray(x) for x in each], 1) for each in zip(*found, strict=True)
    )
    check((outs, logs), dense(case.q, case.k, case.v, case.lengths))
