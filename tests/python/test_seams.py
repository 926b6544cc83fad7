"""Arguments as models and other packages have them: padding masks, lengths, types, head dimensions.

Results are compared with ``jax.nn`` in float32, called with the same arguments, and with the
reference in float64 where ``jax.nn`` has no such argument.
"""

import itertools
from dataclasses import replace
from functools import partial

import bounds
import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from features import Problem
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_order import LAYOUTS, LIMIT, LONG, ODD, agree, attend, auto, found

pytestmark = pytest.mark.needs("float32")


@pytest.mark.parametrize(
    ("head_dim", "value_dim"),
    [(20, 12), *(pytest.param(*dims, marks=LONG) for dims in ((1, 1), (33, 64), (64, 255)))],
)
def test_head_dims(head_dim, value_dim):
    """In both functions, with the scale of the head_dim that was given."""
    one = Problem(head_dim=head_dim, value_dim=value_dim, causal=True, layout="zigzag")
    arrays = one.arrays()
    bounds.check(one.found(arrays), one.expected(arrays), arrays["dout"])
    agree(replace(one, q_len=45, kv_len=45, backward="queries"))


def test_schedules_of_any_head_dim():
    shard = jax.ShapeDtypeStruct((1, 4096, 8, 100), jnp.bfloat16)
    wide = jax.ShapeDtypeStruct((1, 4096, 8, 104), jnp.bfloat16)
    choose = partial(ba.choose_schedule, axis_sizes=8, is_causal=True)
    assert choose(shard, shard, shard) == choose(wide, wide, wide)


BATCH, T, S = 2, 24, 40
LENGTHS = np.array([17, 24], np.int32), np.array([40, 29], np.int32)


def beginning(length, lengths):
    return np.arange(length) < lengths[:, None]


CALLS = {
    "keys": {"mask": beginning(S, LENGTHS[1])[:, None, None]},
    "keys of all entries": {"mask": beginning(S, LENGTHS[1][1:])[:, None, None]},
    "queries": {"mask": beginning(T, LENGTHS[0])[:, None, :, None]},
    "lengths": {"query_seq_lengths": LENGTHS[0], "key_value_seq_lengths": LENGTHS[1]},
    "lengths of keys": {"key_value_seq_lengths": LENGTHS[1], "is_causal": True},
    "window": {"local_window_size": 5},
    "both": {
        "mask": beginning(S, LENGTHS[1])[:, None, None],
        "query_seq_lengths": LENGTHS[0],
        "is_causal": True,
    },
}


def compared(function, call, dim=20):
    """Checks a function of q, k, v and ``jax.nn`` with the same arguments.

    Rows that see no key differ: here they are 0. Their cotangents are 0.
    """
    shapes = [(BATCH, T, 4, dim), (BATCH, S, 2, dim), (BATCH, S, 2, dim), (BATCH, T, 4, dim)]
    *qkv, dout = ring.normal(1, *shapes)
    hidden = np.zeros((BATCH, T), bool)
    if "query_seq_lengths" in call or call.get("mask", np.ones(0)).shape[2:] == (T, 1):
        hidden = ~beginning(T, LENGTHS[0])
    dout[hidden] = 0
    out, grads = ring.gradients(function)(qkv, dout)
    named = {name: jnp.asarray(x) if name != "local_window_size" else x for name, x in call.items()}
    expected, expected_grads = ring.gradients(partial(jax.nn.dot_product_attention, **named))(
        qkv, dout
    )
    assert not np.asarray(out)[hidden].any()
    expected = np.where(hidden[..., None, None], 0, expected)
    bounds.close((out, grads), (expected, expected_grads), LIMIT)


@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_jax_nn_on_global_arrays(name):
    """Arrays of numpy and of JAX, in the layout and in the order of the sequence, are the same."""
    kind, order = (
        (np.asarray, "sequence") if name in ("keys", "lengths") else (jnp.asarray, "layout")
    )
    call = {key: kind(x) if isinstance(x, np.ndarray) else x for key, x in CALLS[name].items()}
    where = {"mesh": ring.mesh(2, 4, 1), "spec": ring.SPEC}
    compared(partial(ba.dot_product_attention, order=order, **where, **call), CALLS[name])


@pytest.mark.parametrize(
    ("name", "layout", "schedule"),
    [
        ("keys", "zigzag", "ring"),
        ("keys of all entries", "striped", "ulysses"),
        ("queries", "striped", "ring"),
        ("lengths", "zigzag", "ulysses"),
        ("lengths of keys", "striped", "ring"),
        ("both", "zigzag", "ring"),
    ],
)
def test_arguments_of_jax_nn_inside_shard_map(name, layout, schedule):
    """Masks are shards in the layout; lengths are those of the whole sequence."""
    arrays = {key: x for key, x in CALLS[name].items() if isinstance(x, np.ndarray)}
    options = {key: x for key, x in CALLS[name].items() if key not in arrays}
    rows = {key: P("data") for key in arrays}
    if "mask" in arrays:
        axis = int(np.argmax(arrays["mask"].shape[2:])) + 2
        arrays["mask"] = ba.to_layout(arrays["mask"], 4, layout, axis)
        batch = "data" if len(arrays["mask"]) > 1 else None
        rows["mask"] = P(batch, *["context" if i == axis else None for i in range(1, 4)])

    def local(q, k, v, arrays):
        return ba.attention(
            q, k, v, axis_name="context", layout=layout, schedule=schedule, **options, **arrays
        )

    mapped = jax.shard_map(
        local, mesh=ring.mesh(2, 4, 1), in_specs=(*[ring.SPEC] * 3, rows), out_specs=ring.SPEC
    )

    def function(*qkv):
        out = mapped(*(ba.to_layout(x, 4, layout) for x in qkv), arrays)
        return ba.from_layout(out, 4, layout)

    compared(function, CALLS[name])


def test_masks_and_lengths_join_segment_ids():
    """A query sees a key that all arguments allow, in a layout and in the order of the sequence."""
    one = Problem(
        mesh=(2, 2, 2), q_len=24, kv_len=40, segments="documents", layout="zigzag", sinks=True
    )
    arrays = one.arrays()
    generator = np.random.default_rng(0)
    mask = generator.random((2, 1, 1, 40)) > 0.2
    also = {"query_seq_lengths": np.array([20, 24]), "key_value_seq_lengths": np.array([40, 9])}
    hidden = dict(arrays)
    hidden["q_segments"] = np.where(
        beginning(24, also["query_seq_lengths"]), arrays["q_segments"], -1
    )
    seen = mask[:, 0, 0] & beginning(40, also["key_value_seq_lengths"])
    hidden["kv_segments"] = np.where(seen, arrays["kv_segments"], -1)
    expected = one.expected(hidden)
    results = found(attend(one, **auto(one), mask=mask, **also), arrays)
    bounds.check(results, expected, arrays["dout"])

    def local(arrays):
        given = {**also, "mask": arrays["mask"]}
        return ba.dot_product_attention(
            *(arrays[name] for name in "qkv"), **auto(one), **one.options(arrays), **given
        )

    stored = ba.to_layout(mask, 2, "zigzag", 3)
    results = one.run(lambda x: local({**x, "mask": stored}), one.device_mesh(), arrays)
    bounds.check(results, expected, arrays["dout"])


def test_a_mask_of_one_element_belongs_to_the_side_of_one_token():
    for q_len, kv_len in ((1, 8), (8, 1)):
        one = replace(ODD, q_len=q_len, kv_len=kv_len)
        mask = np.array([True, False])[:, None, None, None]
        o, lse = jax.jit(attend(one, **auto(one), mask=mask))(one.arrays())
        expected = one.expected(one.arrays())
        bounds.close((o[0], lse[0]), (expected.o[0].astype("float32"), expected.lse[0]), LIMIT)
        assert not np.asarray(o)[1].any()
        assert np.isneginf(lse[1]).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sequences_without_tokens(layout):
    for q_len, kv_len in ((0, 5), (5, 0), (0, 0)):
        one = replace(ODD, q_len=q_len, kv_len=kv_len, layout=layout)
        mask = np.ones((2, 1, 1, kv_len), bool)
        o, lse = jax.jit(attend(one, **auto(one), mask=mask))(one.arrays())
        assert o.shape == (2, q_len, 4, 32)
        assert not np.asarray(o).any()
        assert np.isneginf(lse).all()


def test_explicit_masks_and_lengths():
    """Arrays of Explicit axes are sharded like query or whole."""
    mesh = ring.mesh(2, 2, 2, axis_type=AxisType.Explicit)
    arrays = Problem(q_len=T, kv_len=S).arrays()
    qkv = ring.put(mesh, *(arrays[name] for name in "qkv"))
    mask, lengths = CALLS["keys"]["mask"], LENGTHS[1]
    expected = jax.nn.dot_product_attention(*(arrays[name] for name in "qkv"), mask=mask)
    for of_mask, of_lengths in ((P("data", None, None, "context"), P("data")), (P(), P())):
        given = jax.device_put(mask, NamedSharding(mesh, of_mask))
        masked = jax.jit(partial(ba.dot_product_attention, mask=given))
        bounds.close(masked(*qkv), expected, LIMIT)
        given = jax.device_put(lengths, NamedSharding(mesh, of_lengths))
        cut = jax.jit(partial(ba.dot_product_attention, key_value_seq_lengths=given))
        bounds.close(cut(*qkv), expected, LIMIT)
    given = jax.device_put(lengths, NamedSharding(mesh, P("context")))
    words = "key_value_seq_lengths must be sharded like the batch of query, .*'data'.* got .*'con"
    with pytest.raises(ValueError, match=words):
        ba.dot_product_attention(*qkv, key_value_seq_lengths=given)


@pytest.mark.parametrize("window", [(None, 0), (-1, 7), (5, None), (-1, None)])
def test_open_sides_of_a_window(window):
    whole = tuple(50 if side in (None, -1) else side for side in window)
    agree(replace(ODD, window=whole), local_window_size=window)


def test_a_cap_of_0_is_none():
    arrays = ODD.arrays()
    expected = found(attend(ODD, **auto(ODD)), arrays)
    for cap in (0, 0.0, -0.0):
        bounds.close(found(attend(ODD, **auto(ODD), logits_soft_cap=cap), arrays), expected, 0)


@pytest.mark.parametrize("order", ["layout", "sequence"])
def test_three_dimensions(order):
    one = Problem(batch=1, segments="documents", causal=True, value_dim=16)
    arrays = one.arrays()
    single = {name: x[0] if x.ndim > 1 else x for name, x in arrays.items()}
    options = one.options(single) | {"layout": "contiguous"}
    assert options["segment_ids"].shape == (48,)

    def function(arrays):
        qkv = (arrays[name] for name in "qkv")
        where = {"mesh": ring.mesh(1, 4, 2), "spec": P("context", "tensor")}
        return ba.dot_product_attention(*qkv, order=order, **where, **options)

    results = {name: x[None] for name, x in found(function, single).items()}
    bounds.check(results, one.expected(arrays), arrays["dout"])


def test_three_dimensions_of_explicit_axes():
    mesh = ring.mesh(1, 4, 2, axis_type=AxisType.Explicit)
    one = Problem(batch=1, causal=True)
    arrays = {name: x[0] for name, x in one.arrays().items()}
    rows = P("context", "tensor")
    qkv = [jax.device_put(arrays[name], NamedSharding(mesh, rows)) for name in "qkv"]
    out = ba.dot_product_attention(*qkv, is_causal=True)
    assert out.sharding.is_equivalent_to(qkv[0].sharding, 3)
    expected = jax.nn.dot_product_attention(*(arrays[name] for name in "qkv"), is_causal=True)
    bounds.close(out, expected, LIMIT)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=LONG), "float64"])
def test_sinks_and_slopes_of_any_float_type(dtype):
    """Numbers count as float32, and their gradients come back in their own type."""
    one = Problem(sinks=True, slopes=True, causal=True)
    arrays = one.arrays()
    with jax.enable_x64(dtype == "float64"):
        names = ("sinks", "alibi_slopes")
        cast = arrays | {name: jnp.asarray(arrays[name], dtype) for name in names}
        results = found(attend(one, **auto(one)), cast)
        assert results["dz"].dtype == results["dslopes"].dtype == dtype
    exact = arrays | {name: np.asarray(cast[name], np.float32) for name in names}
    expected = found(attend(one, **auto(one)), exact)
    bounds.close(results, expected)
    of_numpy = attend(one, **auto(one))(exact | {"sinks": exact["sinks"].astype(np.float64)})
    bounds.close(of_numpy, (expected["o"], expected["lse"]))


NAMES = np.array([[0, 0, 1, 1, 1, 2, -1, -1], [3, 3, 3, 3, 0, 0, 0, -1]])


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("int8", (0, 7, 100, 127, -128)),
        ("uint8", (0, 7, 200, 255, None)),
        ("uint32", (0, 7, 2**31 - 1, 2**31 + 9, None)),
        ("int64", (0, 2**40 + 1, 2**40 + 2, 5, -(2**40))),
    ],
)
@pytest.mark.parametrize("module", [np, jnp])
def test_segment_ids_of_any_integer_type(dtype, values, module):
    """Distinct ids stay distinct, and negative ones mark padding, in 64 bits too."""
    names = NAMES if values[4] is not None else np.where(NAMES < 0, 0, NAMES)
    arrays = replace(ODD, q_len=8, kv_len=8).arrays()
    qkv = [arrays[name] for name in "qkv"]
    attention = partial(ba.dot_product_attention, mesh=ring.line(2), spec=P(None, "context"))
    with jax.enable_x64(module is jnp):
        ids = module.asarray(np.array([x or 0 for x in values], dtype)[names])
        assert ids.dtype == dtype
        whole = jax.jit(lambda: attention(*qkv, segment_ids=ids))()
        pair = (
            whole
            if module is np
            else jax.jit(lambda ids: attention(*qkv, segment_ids=(ids,) * 2))(ids)
        )
    expected = jax.jit(attention)(*qkv, segment_ids=names.astype(np.int32))
    bounds.close((whole, pair), (expected, expected), 0)


@pytest.mark.parametrize("module", [np, jnp])
def test_lengths_of_any_integer_type(module):
    """Lengths beyond the sequence and beyond int32 hide nothing; negative ones hide everything."""
    arrays = replace(ODD, kv_len=44).arrays()
    qkv = [arrays[name] for name in "qkv"]
    attention = jax.jit(partial(ba.dot_product_attention, order="sequence", **auto(ODD)))
    with jax.enable_x64(True):
        results = attention(*qkv, key_value_seq_lengths=module.array([2**40, -5], np.int64))
    expected = np.asarray(attention(*qkv)) * np.array([1, 0], np.float32)[:, None, None, None]
    bounds.close(results, expected, 0)
    short = attention(*qkv, key_value_seq_lengths=module.array([200, 0], np.uint8))
    bounds.close(short, expected, 0)


@pytest.mark.parametrize("module", [np, jnp])
@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_ids_of_cumulative_lengths(module, dtype):
    generator = np.random.default_rng(0)
    for total in (0, 1, 17, 200):
        lengths = generator.integers(0, 9, 20)
        lengths = lengths[np.cumsum(lengths) <= total]
        expected = np.repeat(np.arange(len(lengths)), lengths)
        expected = np.pad(expected, (0, total - len(expected)), constant_values=-1)
        ends = np.concatenate([[0], np.cumsum(lengths), [lengths.sum()] * 3]).astype(dtype)
        given = module.asarray(ends)
        ids = ba.segment_ids_from_cu_seqlens(given, total)
        assert isinstance(ids, np.ndarray) == (module is np)
        assert ids.dtype == np.int32
        assert np.array_equal(ids, expected)
        if module is jnp:
            traced = jax.jit(partial(ba.segment_ids_from_cu_seqlens, total_length=total))
            assert np.array_equal(traced(given), expected)


def test_packed_documents_by_cumulative_lengths():
    ends = np.array([0, 9, 30, 41])
    ids = ba.segment_ids_from_cu_seqlens(ends, 45)[None]
    one = replace(ODD, batch=1, causal=True, layout="zigzag")
    arrays = one.arrays()
    q, k, v = (arrays[name] for name in "qkv")
    out, _ = jax.jit(attend(one, **auto(one), segment_ids=ids))(arrays)
    for start, stop in itertools.pairwise(ends):
        alone = (x[:, start:stop] for x in (q, k, v))
        document = jax.nn.dot_product_attention(*alone, is_causal=True)
        bounds.close(out[:, start:stop], document, LIMIT)
    assert not np.asarray(out)[:, 41:].any()
