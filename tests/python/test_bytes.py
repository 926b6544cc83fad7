"""The bytes that rings send equal a formula, which this file derives from positions."""

import burst_attention as ba
import jax
import numpy as np
import pytest
import ring
from burst_attention import _ffi
from long import some

pytestmark = pytest.mark.needs("host")

LAYOUTS = ("contiguous", "zigzag", "striped")
TOKENS, DIM, VALUE_DIM = 6, 32, 16


def pieces(layout, size):
    """Returns each owner's pieces and all shards, as positions.

    A piece travels as a whole; it is a shard, or half of a zigzag shard.
    """
    shards = ba.layout_positions(TOKENS * size, size, layout).reshape(size, -1)
    return [np.split(shard, 2 if layout == "zigzag" else 1) for shard in shards], shards


def hops(layout, size, causal, travels):
    """Returns tokens × hops of pieces and of their accumulators, in the cheaper direction.

    A piece goes from its owner to the last rank that needs it. Its accumulator makes one hop for
    each rank that needs the piece, except the owner; the last hop leads home.
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
    """Returns the bytes of one pass. An input element has ``b`` bytes, and a segment id ``ids``."""
    batch, heads, kv_heads, b, ids = case
    chunk, accumulator = hops(layout, size, causal, travels)
    dims = DIM + VALUE_DIM
    if travels == "keys":
        per_chunk, per_accumulator = kv_heads * dims * b + ids, kv_heads * dims * 4
    else:
        per_chunk, per_accumulator = heads * (dims * b + 8) + ids, heads * DIM * 4
    return batch * (chunk * per_chunk + backward * accumulator * per_accumulator)


def inputs(size, heads, kv_heads, dtype="float32"):
    """Returns q, k, v and dout."""
    q, k = (2, TOKENS * size, heads, DIM), (2, TOKENS * size, kv_heads, DIM)
    return ring.normal(0, q, k, (*k[:3], VALUE_DIM), (*q[:3], VALUE_DIM), dtype=dtype)


def sent(function, *arguments):
    """Returns the bytes that one run of a function sends."""
    before = _ffi.bytes_sent()
    jax.block_until_ready(function(*arguments))
    return _ffi.bytes_sent() - before


def run(size, layout, heads, kv_heads, dtype, **options):
    """Returns the bytes of the forward pass and of both passes."""
    *qkv, dout = inputs(size, heads, kv_heads, dtype)
    function = ring.sharded(ring.line(size), layout=layout, **options)
    return sent(jax.jit(function), *qkv), sent(ring.gradients(function), qkv, dout)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", some([8, 1, 2, 5]))
def test_bytes_equal_the_formula(size, layout, causal):
    dtype, b = ("bfloat16", 2) if size == 5 else ("float32", 4)
    segments = {"segment_ids": np.zeros((2, TOKENS), np.int32)} if size == 2 else {}
    case = (2, 4, 2, b, 4 if segments else 0)
    expected = {
        travels: formula(case, size, layout, causal, travels, True)
        for travels in ("keys", "queries")
    }
    expected["auto"] = min(expected.values())
    forward = formula(case, size, layout, causal, "keys", False)
    for backward, total in expected.items():
        options = {"is_causal": causal, "backward": backward, **segments}
        found = run(size, layout, 4, 2, dtype, **options)
        assert found == (forward, forward + total), backward
    assert forward == 0 if size == 1 else forward > 0


@pytest.mark.parametrize(("heads", "kv_heads", "travels"), [(8, 1, "keys"), (4, 4, "queries")])
def test_auto_takes_the_smaller(heads, kv_heads, travels):
    size, layout = 4, "striped"
    sent = {
        backward: run(size, layout, heads, kv_heads, "float32", backward=backward)[1]
        for backward in ("keys", "queries", "auto")
    }
    assert sent["auto"] == sent[travels] == min(sent.values())
    assert sent["keys"] != sent["queries"]


@pytest.mark.parametrize(
    ("window", "causal", "reached"),
    [
        ((0, 0), False, (0, 0)),
        ((6, 6), False, (1, 1)),
        ((7, 1), False, (2, 1)),
        ((13, 13), True, (3, 0)),
        ((0, 30), False, (0, 5)),
        ((99, 99), False, (7, 7)),
    ],
)
def test_windows_exchange_with_the_neighbours_that_they_reach(window, causal, reached):
    """A shard has TOKENS positions, and no window reaches around the ends of the sequence."""
    size, options = 8, {"is_causal": causal, "local_window_size": window}
    *qkv, _ = inputs(size, 2, 1)
    found = sent(jax.jit(ring.sharded(ring.line(size), **options)), *qkv)
    chunks = sum(size - distance for n in reached for distance in range(1, n + 1))
    assert found <= min(chunks, size * (size - 1)) * 2 * TOKENS * (DIM + VALUE_DIM) * 4
    assert found > 0 or chunks == 0
