"""The operations of attention: the pairs are those of a dense mask, and those that calls see."""

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring

pytestmark = pytest.mark.needs("text")

BATCH, HEADS, DIM, VALUE_DIM = 2, 4, 24, 40


def shapes(batch, q_len, kv_len):
    """Returns the types of query, key and value."""
    return [
        jax.ShapeDtypeStruct((batch, *shape), jnp.bfloat16)
        for shape in ((q_len, HEADS, DIM), (kv_len, 2, DIM), (kv_len, 2, VALUE_DIM))
    ]


def dense(batch, q_len, kv_len, options):
    """Returns the mask of a call as a matrix, ``[batch, q_len, kv_len]``."""

    def given(name, default):
        found = options.get(name)
        return default if found is None else np.asarray(found)

    rows, keys = np.arange(q_len), np.arange(kv_len)
    offset = np.broadcast_to(given("query_offset", 0), (batch,))
    p = given("query_positions", rows + offset[:, None])[:, :, None]
    r = given("key_positions", np.broadcast_to(keys, (batch, kv_len)))[:, None]
    seen = np.ones((batch, q_len, kv_len), bool)
    left, right = options.get("local_window_size") or (None, None)
    right = 0 if options.get("is_causal") else right
    seen &= True if left in (None, -1) else r >= p - left
    seen &= True if right in (None, -1) else r <= p + right
    if options.get("visible"):
        start, stop = (np.atleast_3d(x)[:, None] for x in options["visible"])
        seen &= ((start <= p[..., None]) & (p[..., None] < stop)).any(-1)
    if options.get("segment_ids") is not None:
        pair = options["segment_ids"]
        of_queries, of_keys = pair if isinstance(pair, tuple) else (pair, pair)
        seen &= (of_queries[:, :, None] == of_keys[:, None]) & (of_queries[:, :, None] >= 0)
    ends = given("query_seq_lengths", np.full(batch, q_len + 1000))[:, None]
    seen &= p < ends[:, :, None]
    ends = given("key_value_seq_lengths", np.full(batch, kv_len + 1000))[:, None]
    seen &= (given("key_positions", keys[None]) < ends)[:, None]
    mask = given("mask", True)
    return seen & (mask[:, 0] if np.ndim(mask) else True)


def drawn(seed):
    """Returns lengths and options of a random problem; each option is there or not."""
    random = np.random.default_rng(seed)
    # Of one shape, since JAX compiles a few operations for each.
    batch, q_len, kv_len = 2, 14, 19
    there = iter(random.random(10) < 0.5)

    def ints(low, high, *shape):
        return random.integers(low, high, (batch, *shape))

    two = () if random.random() < 0.5 else (2,)
    side = (1, kv_len) if random.random() < 0.5 else (q_len, 1)
    options = {
        "is_causal": next(there),
        "local_window_size": (int(random.integers(0, 8)), [None, -1, 3][seed % 3]),
        "segment_ids": (ints(-1, 3, q_len), ints(-1, 3, kv_len)),
        "visible": (ints(-3, 20, kv_len, *two), ints(-3, 20, kv_len, *two)),
        "query_positions": ints(0, 25, q_len),
        "key_positions": ints(0, 25, kv_len),
        "query_offset": [-3, 5, ints(-4, 9)][seed % 3],
        "query_seq_lengths": ints(0, 25),
        "key_value_seq_lengths": ints(0, 25),
        "mask": random.random((batch, 1, *side)) < 0.7,
    }
    kept = {"is_causal": options.pop("is_causal")}
    kept |= {name: x for name, x in options.items() if next(there)}
    if "query_positions" in kept:
        kept.pop("query_offset", None)
    return batch, q_len, kv_len, kept


def test_random_masks():
    for seed in range(60):
        *sizes, options = drawn(seed)
        found = ba.attention_flops(*shapes(*sizes), **options)
        assert found.pairs == dense(*sizes, options).sum(), (seed, options)


def test_formulas():
    found = ba.attention_flops(*shapes(3, 10, 10), is_causal=True)
    assert found.pairs == 3 * 55
    assert found.forward == 2 * found.pairs * HEADS * (DIM + VALUE_DIM)
    assert found.backward == 2 * found.forward
    assert found.recomputed == 2 * found.pairs * HEADS * DIM
    assert found.model == found.forward + found.backward
    assert found.hardware == found.model + found.recomputed


def test_long_sequences():
    """Lengths whose square no array could have, in the closed forms of their masks."""
    n, block = 1 << 18, 1 << 12
    types = shapes(2, n, n)
    causal = ba.attention_flops(*types, is_causal=True, layout="zigzag", schedule="ring")
    assert causal.pairs == 2 * (n * (n + 1) // 2)
    near = ba.attention_flops(*types, is_causal=True, local_window_size=(99, 0))
    assert near.pairs == 2 * (100 * n - 99 * 100 // 2)
    lengths = [[block] * (n // block)] * 2
    mask = ba.masks.block_causal(lengths, 64)
    pairs = sum(64 * (64 * i) for i in range(1, block // 64 + 1)) * (n // block) * 2
    assert ba.attention_flops(*types, **mask.arguments).pairs == pairs


def test_any_order_of_rows_with_positions():
    balance = ba.balance_documents([150, 40, 600, 200], 4, 16, seq_len=1024)
    types = shapes(1, 1024, 1024)
    arguments = balance.mask.arguments
    assert ba.attention_flops(*types, **arguments).pairs == balance.visible_pairs
    order = ba.layout_positions(1024, 4, "zigzag")[None]
    ids = np.repeat(np.arange(8), 128)[None]
    in_order = ba.attention_flops(*types, is_causal=True, segment_ids=ids)
    positions = {"query_positions": order, "key_positions": order}
    stored = {"segment_ids": ids[:, order[0]], "layout": "zigzag", **positions}
    assert ba.attention_flops(*types, is_causal=True, **stored) == in_order


@pytest.mark.long
def test_the_pairs_are_those_that_a_call_sees():
    """Scores are 0, so e^lse of a query is the number of keys that it sees."""
    mesh, batch, q_len, kv_len = ring.line(2), 2, 12, 16
    random = np.random.default_rng(3)
    options = {
        "is_causal": True,
        "local_window_size": (9, 0),
        "segment_ids": tuple(random.integers(0, 2, (batch, n)) for n in (q_len, kv_len)),
        "visible": tuple(random.integers(0, 16, (batch, kv_len, 2)) for _ in range(2)),
        "query_offset": 3,
        "query_seq_lengths": np.array([12, 9]),
        "key_value_seq_lengths": np.array([13, 16]),
        "mask": random.random((batch, 1, 1, kv_len)) < 0.8,
    }
    qkv = [jnp.zeros((batch, n, 1, 8)) for n in (q_len, kv_len, kv_len)]
    _, lse = ba.dot_product_attention(
        *qkv, mesh=mesh, spec=ring.SPEC, return_residual=True, **options
    )
    found = ba.attention_flops(*qkv, **options)
    assert found.pairs == round(float(jnp.exp(lse).sum())) == dense(2, 12, 16, options).sum() > 0


def test_arrays_without_a_batch_and_empty_ones():
    ids = np.array([0, 0, 1, 1, -1])
    x = np.zeros((5, 2, 8), np.float32)
    assert ba.attention_flops(x, x, x, segment_ids=ids).pairs == 8
    assert ba.attention_flops(*shapes(0, 5, 5), segment_ids=np.zeros((0, 5), int)).pairs == 0
    assert ba.attention_flops(*shapes(2, 0, 5)).pairs == 0


def test_while_tracing():
    ids = np.repeat([0, 1], 8)[None]
    found = []

    def attend(x):
        found.append(ba.attention_flops(x, x, x, segment_ids=ids, is_causal=True).pairs)
        return x

    jax.eval_shape(attend, jax.ShapeDtypeStruct((1, 16, 2, 8), jnp.float32))
    assert found == [2 * 36]


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"bias": np.zeros((1, 1, 4, 4))}, NotImplementedError, "bias"),
        ({"casual": True}, TypeError, "attention_flops.. got an unexpected .* 'casual'"),
        (
            {"segment_ids": np.zeros((1, 4), int), "layout": "zigzag"},
            ValueError,
            "segment_ids must be in the order of the sequence, but layout is 'zigzag': leave",
        ),
        (
            {"segment_ids": jax.ShapeDtypeStruct((1, 4), jnp.int32)},
            TypeError,
            "segment_ids must have known values, .* call attention_flops outside of jit",
        ),
        ({"segment_ids": np.zeros((1, 5), int)}, ValueError, "segment_ids must have shape"),
        ({"mask": np.ones((1, 1, 4, 4), bool)}, NotImplementedError, "sequence × sequence"),
    ],
)
def test_bad_arguments(options, error, match):
    with pytest.raises(error, match=match):
        ba.attention_flops(*shapes(1, 4, 4), **options)


def test_traced_masks_are_errors():
    def count(ids):
        return ba.attention_flops(*shapes(1, 4, 4), segment_ids=ids).pairs

    with pytest.raises(TypeError, match="segment_ids must have known values, .* a traced array"):
        jax.eval_shape(count, jax.ShapeDtypeStruct((1, 4), jnp.int32))
