"""Arguments as models and other packages have them: any length, padding masks, lengths, types.

Results are compared with ``jax.nn`` in float32, called with the same arguments, and with the
reference in float64 where ``jax.nn`` has no such argument.
"""

import itertools
from dataclasses import replace
from functools import partial

import bounds
import burst_attention as ba
import features
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from burst_attention._attention.reorder import Reorder
from features import Problem
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

pytestmark = pytest.mark.needs("float32")

LIMIT = 5e-6
"""The relative difference, in the norm, of two computations in float32."""
ODD = Problem(q_len=45, kv_len=45)
EVERYTHING = replace(
    ODD, sinks=True, slopes=True, dropout=0.2, soft_cap=3.0, segments="padded", value_dim=20
)
LONG = pytest.mark.long
LAYOUTS = ("contiguous", "zigzag", "striped")


def attend(one, **also):
    """Returns `dot_product_attention`, by default of arrays in the order of the sequence."""

    def function(arrays):
        qkv = (arrays[name] for name in "qkv")
        return ba.dot_product_attention(
            *qkv, **{"order": "sequence", **one.options(arrays), **also}
        )

    return function


def auto(one):
    """Returns where a problem computes on Auto axes."""
    return {"mesh": ring.mesh(*one.mesh), "spec": ring.SPEC}


def found(function, arrays):
    """Returns results and gradients by name."""
    arrays = dict(arrays)
    cotangents = arrays.pop("dout"), arrays.pop("dlse")
    inputs = {name: arrays.pop(name) for name in features.GRADIENTS if name in arrays}
    (o, lse), grads = features._gradients(function, inputs, arrays, cotangents)
    return {"o": o, "lse": lse} | {features.GRADIENTS[name]: x for name, x in grads.items()}


def agree(one, **also):
    arrays = one.arrays()
    results = found(attend(one, **auto(one) | also), arrays)
    bounds.check(results, one.expected(arrays), arrays["dout"])


def operands(function, *arrays):
    """Returns the names of the feature operands of the calls in a program."""
    _, _, rest = jax.jit(function).lower(*arrays).as_text().partition("feature_operands = ")
    return rest.split('"')[1]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_length_in_every_layout(layout, causal):
    agree(replace(ODD, layout=layout, causal=causal))


@pytest.mark.parametrize(
    ("layout", "causal"), [("contiguous", True), ("zigzag", False), ("striped", True)]
)
def test_any_length_with_every_feature(layout, causal):
    agree(replace(EVERYTHING, layout=layout, causal=causal, mesh=(2, 2, 2)))


@pytest.mark.parametrize(
    ("changes", "needs_ids"),
    [
        ({"causal": True}, False),
        ({"window": (9, 0)}, False),
        ({"window": (9, 2)}, True),
        ({}, True),
        ({"causal": True, "q_len": 21}, False),
        ({"window": (50, 20), "q_len": 21}, False),
        ({"window": (50, 25), "q_len": 21}, True),
        ({"q_len": 21}, True),
        ({"causal": True, "q_len": 46}, True),
        ({"q_len": 21, "kv_len": 48}, False),
    ],
)
def test_padding_gets_ids_only_where_a_query_could_see_it(changes, needs_ids):
    one = replace(ODD, layout="zigzag", **changes)
    agree(one)
    arrays = one.arrays()
    names = operands(attend(one, **auto(one)), {name: arrays[name] for name in "qkv"})
    assert names == ("query_segment_ids,key_segment_ids" if needs_ids else "")


def test_nothing_is_copied_where_nothing_needs_padding():
    one = replace(ODD, q_len=48, kv_len=48, head_dim=32, causal=True, sinks=True)
    arrays, texts = one.arrays(), []
    for order in ("layout", "sequence"):
        texts.append(jax.jit(attend(one, **auto(one), order=order)).lower(arrays).as_text())
    assert texts[0] == texts[1]
    for word in ("pad", "gather", "slice"):
        assert f"stablehlo.{word}" not in texts[0]


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_no_device_gathers_a_sequence(axis_type, layout):
    one = replace(ODD, q_len=40, kv_len=40, layout=layout, segments="documents")
    mesh = ring.line(4, axis_type)
    where = {"mesh": mesh, "spec": ring.SPEC} if axis_type == AxisType.Auto else {}
    arrays = {name: one.placed(mesh, name, x) for name, x in one.arrays().items()}
    text = jax.jit(attend(one, **where)).lower(arrays).compile().as_text()
    assert "custom-call" in text
    assert "all-gather" not in text
    assert "all-reduce" not in text


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_change_places_as_the_layout_says(layout, size):
    """Any number of tokens on a device, also one that the number of devices does not divide."""
    way, spec = Reorder(("context",), size, layout), P(None, "context")

    def local(x):
        return way.into_layout(x), way.out_of_layout(way.into_layout(x))

    both = jax.jit(jax.shard_map(local, mesh=ring.line(size), in_specs=spec, out_specs=spec))
    for shard in (0, 2, 6, 16):
        x = np.arange(2 * size * shard).reshape(2, size * shard)
        stored, restored = both(x)
        assert np.array_equal(stored, ba.to_layout(x, size, layout))
        assert np.array_equal(restored, x)
        assert np.array_equal(both(x % 3 == 0)[0], stored % 3 == 0)


def test_padding_changes_no_dropped_weight():
    one = replace(ODD, dropout=0.5, causal=True)
    arrays = one.arrays()
    alone = replace(one, mesh=(1, 1, 1))
    expected = found(attend(alone, **auto(alone), order="layout"), arrays)
    bounds.close(found(attend(replace(one, layout="zigzag"), **auto(one)), arrays), expected, LIMIT)


@pytest.mark.parametrize("length", [45, 40])
def test_explicit_axes(length):
    """No type says that 4 devices cut 45 tokens, so axis_name does; 40 tokens are cut."""
    mesh = ring.mesh(2, 4, 1, axis_type=AxisType.Explicit)
    one = replace(ODD, q_len=length, kv_len=length, layout="zigzag", segments="documents")
    rows, where = P("data", "context"), {}
    if length == 45:
        rows, where = P("data"), {"axis_name": "context"}
    arrays = {
        name: jax.device_put(x, NamedSharding(mesh, rows)) for name, x in one.arrays().items()
    }
    function = attend(one, **where)
    results = found(function, arrays)
    bounds.check(results, one.expected(one.arrays()), arrays["dout"])
    eager = function(arrays)
    for name, x in {**results, "eager": eager[0], "eager lse": eager[1]}.items():
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, rows), x.ndim), name


def test_explicit_axes_without_a_name_are_refused():
    mesh = ring.mesh(1, 4, 1, axis_type=AxisType.Explicit)
    arrays = ODD.arrays()
    qkv = [jax.device_put(arrays[name], NamedSharding(mesh, P())) for name in "qkv"]
    with pytest.raises(ValueError, match='axis_name or spec is needed .* pass axis_name="context"'):
        ba.dot_product_attention(*qkv, order="sequence")
    with pytest.raises(ValueError, match="axis_name must be an axis of the mesh .* got 'ring'"):
        ba.dot_product_attention(*qkv, order="sequence", axis_name="ring")


@pytest.mark.parametrize(
    "layout", ["zigzag", *(pytest.param(x, marks=LONG) for x in ("contiguous", "striped"))]
)
def test_outside_jit(layout):
    """Results are where query is, also where 4 devices can't cut it."""
    one = replace(ODD, layout=layout, causal=True)
    for q_len, rows in ((45, P("data")), (40, P("data", "context"))):
        each = replace(one, q_len=q_len, kv_len=q_len)
        arrays, where = each.arrays(), auto(each)
        sharding = NamedSharding(where["mesh"], rows)
        placed = {name: jax.device_put(arrays[name], sharding) for name in "qkv"}
        o, lse = attend(each, **where)(placed)
        bounds.check({"o": o, "lse": lse}, each.expected(arrays), arrays["dout"])
        assert o.sharding.is_equivalent_to(sharding, 4)
        assert lse.sharding.is_equivalent_to(sharding, 3)


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


# Arguments of the field, as `jax.nn` takes them.

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


# Bad input.


def refused(kind, words, *changed, **options):
    arrays = ODD.arrays()
    qkv = [arrays[name] for name in "qkv"]
    qkv[: len(changed)] = changed
    options = {"order": "sequence", **auto(ODD), **options}
    with pytest.raises(kind, match=words):
        ba.dot_product_attention(*qkv, **options)


@pytest.mark.parametrize(
    ("kind", "words", "shape"),
    [
        (
            NotImplementedError,
            r"\[batch, 1, 1, kv_len\], or .* got .*\(2, 1, 45, 45\)",
            (2, 1, 45, 45),
        ),
        (NotImplementedError, r"is_causal, local_window_size and segment_ids cover", (2, 4, 1, 45)),
        (NotImplementedError, r"got shape \(1, 1, 45, 45\)", (45, 45)),
        (ValueError, r"shape \(2, 1, 1, 45\), padding of keys, or \(2, 1, 45, 1\)", (2, 1, 1, 44)),
        (ValueError, r"padding of queries, got shape \(3, 1, 45, 1\)", (3, 1, 45, 1)),
        (ValueError, r"at most 4 dimensions, got shape \(1, 2, 1, 1, 45\)", (1, 2, 1, 1, 45)),
    ],
)
def test_masks_of_other_shapes(kind, words, shape):
    refused(kind, f"^mask .*{words}", mask=np.ones(shape, bool))


def test_masks_of_other_types():
    words = "^mask must be bool, .* got float32; a mask that is added to scores is a bias"
    refused(TypeError, words, mask=np.ones((2, 1, 1, 45), np.float32))
    refused(TypeError, "^mask must be an array, got list", mask=[True])


@pytest.mark.parametrize("name", ["query_seq_lengths", "key_value_seq_lengths"])
def test_bad_lengths(name):
    refused(
        ValueError,
        rf"{name} must have shape \(2,\), one length for each batch entry, got "
        r"shape \(3,\)",
        **{name: np.ones(3, int)},
    )
    words = f"{name} must have an integer type, which is cast to int32, got "
    refused(TypeError, f"{words}float32", **{name: np.ones(2, np.float32)})
    refused(TypeError, f"{words}bool", **{name: np.ones(2, bool)})
    refused(TypeError, f"{name} must be an array, got int", **{name: 3})

    def local(q, k, v):
        lengths = jnp.full(2, 45 + lax.axis_index("context"))
        return ba.attention(q, k, v, axis_name="context", **{name: lengths})

    function = jax.shard_map(
        local, mesh=ring.line(2), in_specs=P(None, "context"), out_specs=P(None, "context")
    )
    arrays = Problem().arrays()
    words = f"{name} must be the same on all devices .* give the lengths in the whole sequence"
    with pytest.raises(ValueError, match=words):
        jax.jit(function)(*(arrays[name] for name in "qkv"))


def test_bad_orders():
    refused(
        ValueError, "order must be one of 'layout' or 'sequence', got 'natural'", order="natural"
    )
    refused(ValueError, "seq of query must be a multiple of 4, .* got 45", order="layout")
    refused(ValueError, "sequence', which is|must be sharded over a mesh axis", spec=P("data"))
    words = "spec is needed, since mesh axes 'data', 'context', 'tensor' are Auto"
    refused(ValueError, words, spec=None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'order'"):
        ba.attention(*(np.zeros((1, 8, 1, 8)),) * 3, axis_name="context", order="sequence")


def test_bad_three_dimensions():
    q, k, v = (ODD.arrays()[name] for name in "qkv")
    refused(ValueError, r"key must have 4 dimensions .*x\[None\]", q, k[0], v[0])
    refused(ValueError, "one batch size, got 1 and 2", q[0], k, v)
    words = "at most 4 entries"
    refused(ValueError, words, q[0], k[0], v[0], spec=P("data", "context", "tensor", None))


@pytest.mark.parametrize(
    ("kind", "words", "bad", "total"),
    [
        (TypeError, "numpy or jax array of integers, got list", [0, 3], 4),
        (TypeError, "numpy or jax array of integers, got float32", np.zeros(2, np.float32), 4),
        (TypeError, "numpy or jax array of integers, got bool", np.zeros(2, bool), 4),
        (TypeError, "total_length must be an int, got 4.5", np.zeros(2, int), 4.5),
        (ValueError, "total_length must not be negative, got -1", np.zeros(2, int), -1),
        (
            ValueError,
            r"have shape \[documents \+ 1\], .* got shape \(1, 2\)",
            np.zeros((1, 2), int),
            4,
        ),
        (ValueError, r"got shape \(0,\)", np.zeros(0, int), 4),
        (ValueError, "must begin with 0, never fall .* got", np.array([1, 3]), 4),
        (ValueError, "must begin with 0, never fall .* got", np.array([0, 3, 2], np.uint8), 4),
        (ValueError, "end at most at total_length=4, got", np.array([0, 5]), 4),
    ],
)
def test_bad_cumulative_lengths(kind, words, bad, total):
    with pytest.raises(kind, match=words):
        ba.segment_ids_from_cu_seqlens(bad, total)
