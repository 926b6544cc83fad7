"""Bytes that the rings count while sending, against the formula worked out here from positions."""

import burst_attention as ba
import jax
import numpy as np
import pytest
import ring
from burst_attention import _ffi

LAYOUTS = ("contiguous", "zigzag", "striped")
TOKENS, DIM = 6, 32


def pieces(layout, size):
    """Positions of what travels as one piece, for each owner: a shard, with zigzag its halves."""
    shards = ba.layout_positions(TOKENS * size, size, layout).reshape(size, -1)
    return [np.split(shard, 2 if layout == "zigzag" else 1) for shard in shards], shards


def hops(layout, size, causal, travels):
    """(tokens × hops of what travels, tokens × hops of its accumulators), in the cheaper direction.

    A piece goes from its owner to the last rank that needs it. Its accumulator makes one hop for
    each of these ranks but the owner, the last one home.
    """
    parts, shards = pieces(layout, size)
    totals = []
    for direction in (1, -1):
        chunk = accumulator = 0
        for owner in range(size):
            for piece in parts[owner]:
                needing = [
                    (rank - owner) * direction % size
                    for rank in range(size)
                    if rank != owner and needs(piece, shards[rank], causal, travels)
                ]
                chunk += len(piece) * max(needing, default=0)
                accumulator += len(piece) * len(needing)
        totals.append((chunk, accumulator))
    return min(totals)


def needs(piece, shard, causal, travels):
    if not causal:
        return True
    return shard.max() >= piece.min() if travels == "keys" else piece.max() >= shard.min()


def formula(case, size, layout, causal, travels, backward):
    """Bytes of one pass; b is the size of the input type."""
    batch, heads, kv_heads, b = case
    chunk, accumulator = hops(layout, size, causal, travels)
    if travels == "keys":
        per_chunk, per_accumulator = kv_heads * 2 * DIM * b, kv_heads * 2 * DIM * 4
    else:
        per_chunk, per_accumulator = heads * (2 * DIM * b + 8), heads * DIM * 4
    return batch * (chunk * per_chunk + backward * accumulator * per_accumulator)


def run(size, layout, causal, backward, heads, kv_heads, dtype):
    """(bytes forward, bytes forward and backward)."""
    seq = TOKENS * size
    shapes = [(2, seq, heads, DIM)] + [(2, seq, kv_heads, DIM)] * 2 + [(2, seq, heads, DIM)]
    *qkv, dout = ring.normal(0, *shapes, dtype=dtype)
    function = ring.sharded(ring.line(size), is_causal=causal, layout=layout, backward=backward)
    before = _ffi.bytes_sent()
    jax.block_until_ready(jax.jit(function)(*qkv))
    forward = _ffi.bytes_sent()
    jax.block_until_ready(ring.gradients(function)(qkv, dout))
    return forward - before, _ffi.bytes_sent() - forward


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_bytes_equal_the_formula(size, layout, causal):
    dtype, b = ("bfloat16", 2) if size == 5 else ("float32", 4)
    case = (2, 4, 2, b)
    expected = {
        travels: formula(case, size, layout, causal, travels, True)
        for travels in ("keys", "queries")
    }
    expected["auto"] = min(expected.values())
    forward = formula(case, size, layout, causal, "keys", False)
    for backward, total in expected.items():
        found = run(size, layout, causal, backward, 4, 2, dtype)
        assert found == (forward, forward + total), backward
    assert forward == 0 if size == 1 else forward > 0


@pytest.mark.parametrize(("heads", "kv_heads", "travels"), [(8, 1, "keys"), (4, 4, "queries")])
def test_auto_takes_the_smaller(heads, kv_heads, travels):
    size, layout = 4, "striped"
    sent = {
        backward: run(size, layout, False, backward, heads, kv_heads, "float32")[1]
        for backward in ("keys", "queries", "auto")
    }
    assert sent["auto"] == sent[travels] == min(sent.values())
    assert sent["keys"] != sent["queries"]
