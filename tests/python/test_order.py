"""``order="sequence"`` takes arrays of any length, in the order of the sequence."""

from dataclasses import replace

import bounds
import burst_attention as ba
import features
import jax
import numpy as np
import pytest
import ring
from burst_attention._attention.reorder import Reorder
from features import Problem
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from long import some

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


@pytest.mark.parametrize("causal", some([True, False]))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_length_in_every_layout(layout, causal):
    agree(replace(ODD, layout=layout, causal=causal))


@pytest.mark.parametrize(
    ("layout", "causal"), [("contiguous", True), ("zigzag", False), ("striped", True)]
)
def test_any_length_with_every_feature(layout, causal):
    agree(replace(EVERYTHING, layout=layout, causal=causal, mesh=(2, 2, 2)))


DATA = [
    {"visible": "random"},
    {"visible": "twice", "causal": True, "segments": "documents"},
    {"positions": True, "causal": True, "slopes": True},
    {"offset": 9, "q_len": 21, "causal": True},
]


@pytest.mark.parametrize("options", DATA, ids=lambda options: "-".join(options))
def test_any_length_with_masks_as_data(options):
    agree(replace(ODD, layout="zigzag", **options))


def test_lengths_count_positions():
    one = replace(ODD, positions=True)
    arrays = one.arrays()
    lengths = {"query_seq_lengths": np.array([40, 45]), "key_value_seq_lengths": np.array([30, 7])}
    results = found(attend(one, **auto(one), **lengths), arrays)
    ids = {
        name: np.where(arrays[of] < ends[:, None], 0, -1)
        for name, of, ends in (
            ("q_segments", "q_positions", lengths["query_seq_lengths"]),
            ("kv_segments", "kv_positions", lengths["key_value_seq_lengths"]),
        )
    }
    expected = replace(one, segments="padded").expected(arrays | ids)
    bounds.check(results, expected, arrays["dout"])


def test_a_key_at_the_greatest_position_is_no_padding():
    one = replace(ODD, positions=True)
    arrays = one.arrays()
    high = {name: arrays[name] + np.int32(2**31 - 45) for name in ("q_positions", "kv_positions")}
    results = found(attend(one, **auto(one)), arrays | high)
    bounds.check(results, one.expected(arrays | high), arrays["dout"])


@pytest.mark.parametrize(
    ("offset", "implementation"),
    [
        (9, None),
        (np.array([9, -4], np.int32), None),
        pytest.param(np.array([9, -4], np.int32), "xla", marks=LONG),
    ],
)
def test_lengths_count_the_offset_of_queries(offset, implementation):
    """A query's position is its index plus the offset, whether a number or an array brings it."""
    one = replace(ODD, q_len=21, layout="zigzag", implementation=implementation)
    arrays, end = one.arrays(), np.array([25, 12])
    options = {"query_offset": offset, "query_seq_lengths": end, "is_causal": True}
    results = found(attend(one, **auto(one), **options), arrays)
    queries = np.broadcast_to(np.reshape(offset, (-1, 1)) + np.arange(21), (2, 21))
    keys = np.broadcast_to(np.arange(45), (2, 45))
    positions = {"q_positions": queries, "kv_positions": keys}
    ids = {"q_segments": np.where(queries < end[:, None], 0, -1), "kv_segments": 0 * keys}
    known = replace(one, segments="padded", positions=True, causal=True)
    bounds.check(results, known.expected(arrays | positions | ids), arrays["dout"])


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_a_sequence_over_two_axes(layout):
    one = replace(ODD, layout=layout, inner=2)
    agree(one, mesh=one.device_mesh(), spec=one.spec("q"))


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


@pytest.mark.parametrize("size", some([3, 8, 1, 2]))
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
