"""Schedules that exchange heads for sequence, ulysses and hybrid, give right results."""

from dataclasses import replace

import burst_attention as ba
import case_list
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from bounds import check, narrow_limit
from features import PAIR, Problem
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from long import some, spread
from reference import error
from test_cuda_lowering import KNOWN, abstract_mesh, calls, lowered, shapes, with_gradient
from test_families import MASKS, agree

pytestmark = [pytest.mark.cudnn, pytest.mark.oldest_jax]

VALUES = {
    "over": [
        *(("ulysses", world, 0) for world in (1, 2, 3, 4, 6, 8)),
        ("ulysses", 8, 4),
        *(("hybrid", *sizes) for sizes in ((8, 4), (8, 2), (6, 3), (4, 1), (4, 4))),
    ],
    "layout": ["contiguous", "zigzag", "striped"],
    "mask": list(MASKS),
    "backward": ["keys", "queries"],
    "dtype": ["float32", "bfloat16"],
    "kv_heads": [1, 2],
}
"""Values of each property. ``over`` are (schedule, ranks, ranks of the inner axis or 0);
``kv_heads`` counts key/value heads for each rank that gets heads."""
CHOICES = list(case_list.pairwise(VALUES, lambda *_: 0))
CHOICES += [
    dict(CHOICES[0], over=("hybrid", *sizes), layout=layout, mask=mask)
    for sizes in ((8, 4), (8, 2), (6, 3))
    for layout in VALUES["layout"]
    for mask in ("causal", "window")
]
ONE = {"ulysses": {"mesh": (2, 4, 1)}, "hybrid": {"mesh": (2, 4, 1), "inner": 2}}
"""The mesh of each schedule on eight devices."""
EACH = pytest.mark.parametrize("schedule", ONE)
FEATURES = {
    "causal": True,
    "window": (20, 0),
    "segments": "documents",
    "slopes": True,
    "sinks": True,
    "soft_cap": 3.0,
    "dropout": 0.2,
    "value_dim": 16,
    "layout": "zigzag",
}


def name(choice):
    return "-".join("-".join(map(str, x)) if isinstance(x, tuple) else str(x) for x in choice)


@pytest.mark.parametrize("choice", some(CHOICES, 8), ids=lambda choice: name(choice.values()))
def test_heads_and_sequence_change_places(choice):
    schedule, world, inner = choice["over"]
    groups = inner if schedule == "hybrid" else world
    sizes = {"q_len": 12 * world, "kv_len": 12 * world, "heads": 2 * groups, "batch": 1}
    sizes |= {"kv_heads": choice["kv_heads"] * groups, "inner": inner, "mesh": (1, world, 1)}
    rest = {name: choice[name] for name in ("layout", "backward", "dtype")}
    agree(Problem(schedule=schedule, **sizes, **rest, **MASKS[choice["mask"]]))


@EACH
@pytest.mark.parametrize(
    "options", spread(case_list.features_together(), 2), ids=case_list.feature_name
)
def test_sequences_of_several_tiles(schedule, options):
    where = {"mesh": (1, 2, 1)} if schedule == "ulysses" else {"mesh": (1, 8, 1), "inner": 2}
    agree(Problem(**options | where | {"kv_heads": 2}, schedule=schedule))


@EACH
@pytest.mark.parametrize("lengths", [(16, 64), (96, 32)], ids=str)
@pytest.mark.parametrize("layout", some(["zigzag", "contiguous", "striped"]))
def test_cross_attention(schedule, lengths, layout):
    q_len, kv_len = lengths
    rest = {"segments": "documents", "causal": True, "layout": layout, "schedule": schedule}
    agree(Problem(**ONE[schedule], q_len=q_len, kv_len=kv_len, **rest))


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(4, 1), (8, 2), (12, 6), (24, 3), (16, 8)], ids=str
)
@pytest.mark.parametrize("dtype", some(["bfloat16", "float32"]))
def test_key_value_heads_that_ranks_share(heads, kv_heads, dtype):
    """In 16 bits, each of four ranks rounds its part of a shared gradient before the sum."""
    one = Problem(schedule="ulysses", heads=heads, kv_heads=kv_heads, dtype=dtype, causal=True)
    arrays = one.arrays()
    found, expected = one.found(arrays), one.expected(arrays)
    if dtype == "bfloat16" and kv_heads % 4:
        for name in ("dk", "dv"):
            wrong, _ = error(name, found.pop(name), expected)
            assert wrong <= 2**0.5 * narrow_limit(name, expected, jnp.bfloat16), name
    check(found, expected, arrays["dout"], dtype)


@EACH
@pytest.mark.parametrize("check_vma", some([True, False]))
def test_heads_and_batch_on_other_axes(schedule, check_vma):
    """All features work together, with the sinks, slopes and dropout of a device's own heads."""
    where = {"ulysses": {"mesh": (2, 2, 2)}, "hybrid": {"mesh": (1, 4, 2), "inner": 2}}[schedule]
    one = Problem(**where, **FEATURES, schedule=schedule, heads=8, kv_heads=2)
    arrays = one.arrays()
    check(one.found(arrays, check_vma), one.expected(arrays), arrays["dout"])


@EACH
@pytest.mark.parametrize("axis_type", some([AxisType.Explicit, AxisType.Auto]))
def test_global_arrays(schedule, axis_type):
    one = Problem(**ONE[schedule], **FEATURES, schedule=schedule, heads=8)
    devices = one.device_mesh()
    mesh = Mesh(
        devices.devices, devices.axis_names, axis_types=(axis_type,) * len(devices.axis_names)
    )
    where = {"mesh": mesh, "spec": one.spec("q")} if axis_type == AxisType.Auto else {}

    def function(arrays):
        qkv = (arrays[name] for name in "qkv")
        return one.pair(ba.dot_product_attention(*qkv, **where, **one.options(arrays)))

    arrays = one.arrays()
    check(one.run(function, mesh, arrays), one.expected(arrays), arrays["dout"])


@EACH
def test_gradients_inside_of_shard_map(schedule):
    """Gradients of shared arrays are sums over devices, with x64 too."""
    one = Problem(**ONE[schedule], schedule=schedule, slopes=True, sinks=True, dropout=0.3)
    arrays = one.arrays()
    specs = {name: one.spec(name) for name in arrays}
    wrt = [name for name in specs if name not in ("dout", "dlse", "dropout_key")]

    def local(arrays):
        def loss(inputs):
            o, lse = one.local({**arrays, **inputs})
            return jnp.sum(o * arrays["dout"]) + jnp.sum(lse * arrays["dlse"])

        return jax.grad(loss)({name: arrays[name] for name in wrt})

    out_specs = {name: specs[name] for name in wrt}
    inside = jax.shard_map(local, mesh=one.device_mesh(), in_specs=(specs,), out_specs=out_specs)
    with jax.enable_x64(True):
        grads = jax.jit(inside)(arrays)
    names = {"sinks": "dz", "alibi_slopes": "dslopes"}
    found = {names.get(name, f"d{name}"): np.asarray(x) for name, x in grads.items()}
    check(found, one.expected(arrays), arrays["dout"])


@pytest.mark.needs("float32")
@EACH
def test_vmap(schedule):
    """vmap maps the query and the slopes, and all instances share key and value."""
    one = Problem(**ONE[schedule], schedule=schedule, slopes=True, layout="striped", dropout=0.2)
    arrays = one.arrays()
    order = ba.layout_positions(48, 4, "striped")
    stored = {name: x if x.ndim == 1 else x[:, order] for name, x in arrays.items()}
    dout, dlse = stored.pop("dout"), stored.pop("dlse")
    k = stored.pop("k")
    function = jax.shard_map(
        one.local,
        mesh=one.device_mesh(),
        in_specs=({name: one.spec(name) for name in (*stored, "k")},),
        out_specs=(one.spec("dout"), one.spec("dlse")),
    )

    def loss(inputs, k):
        o, lse = function(stored | inputs | {"k": k})
        return jnp.sum(o * dout) + jnp.sum(lse * dlse), (o, lse)

    signs = np.array([1, -1], np.float32)
    inputs = {name: np.multiply.outer(signs, stored[name]) for name in ("q", "alibi_slopes")}
    grad = jax.vmap(jax.grad(loss, (0, 1), has_aux=True), in_axes=(0, None))
    (grads, dk), (o, lse) = jax.jit(grad)(inputs, k)
    for i, sign in enumerate(signs):
        found = {"o": o[i], "lse": lse[i], "dq": grads["q"][i], "dk": dk[i]}
        found = {name: ring.restored("striped", 4, x)[0] for name, x in found.items()}
        found["dslopes"] = np.asarray(grads["alibi_slopes"][i])
        own = arrays | {name: sign * arrays[name] for name in inputs}
        check(found, one.expected(own), own["dout"])


def test_two_axes_that_scatter_heads_together_equal_one_axis_bit_for_bit():
    one = Problem(mesh=(1, 8, 1), heads=8, schedule="ulysses", layout="zigzag", causal=True)
    arrays = one.arrays()
    expected = one.found(arrays)
    found = replace(one, inner=4).found(arrays)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_results_vary_over_the_inputs_axes_and_the_ring_only():
    def local(q, k, v):
        out, lse = ba.attention(
            q, k, v, axis_name="context", schedule="ulysses", return_residual=True
        )
        for x in (out, lse):
            assert jax.typeof(x).manual_axis_type.varying == {"data", "context"}
        return out

    spec, shared = P("data", "context"), P(None, "context")
    q, k, v = ring.normal(0, (2, 16, 2, 32), *[(1, 16, 2, 32)] * 2)
    function = jax.shard_map(
        local, mesh=ring.mesh(2, 2, 2), in_specs=(spec, shared, shared), out_specs=spec
    )
    jax.jit(function)(q, k, v)


def lowered_for_gpus(device, sizes, names, spec, **options):
    def local(q, k, v):
        return ba.attention(q, k, v, **options)

    mesh = abstract_mesh(device, sizes, names)
    function = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
    return lowered(with_gradient(function), shapes())


@KNOWN
def test_ulysses_on_gpus_is_a_ring_of_each_device(device):
    """A call has one device and no communicator; only XLA's collectives move data."""
    options = {"axis_name": "context", "schedule": "ulysses", "layout": "zigzag"}
    sizes = (2, 2, 2)
    text = lowered_for_gpus(device, sizes, ring.AXES, ring.SPEC, **options, is_causal=True)
    forward, backward = calls(text)
    assert forward.operands == ["2x1024x1x64xbf16"] * 3
    for call in (forward, backward):
        assert call.groups() == list(range(8))
        assert call.attributes["world_size"] == "1 : i64"
        assert call.attributes["schedule"] == '"ring"'
        assert call.attributes["layout"] == '"contiguous"'
    # The collectives move q, k, v, out and their gradients.
    assert text.count('"stablehlo.all_to_all"') == 8
    assert "collective_permute" not in text


@KNOWN
@pytest.mark.parametrize("layout", VALUES["layout"])
def test_hybrid_on_gpus_rings_along_the_outer_axis(device, layout):
    names, spec = ("data", *PAIR), P("data", PAIR)
    options = {"axis_name": PAIR, "schedule": "hybrid", "layout": layout}
    text = lowered_for_gpus(device, (2, 4, 2), names, spec, **options)
    for call in calls(text):
        assert call.groups() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]
        assert call.attributes["world_size"] == "4 : i64"
        assert call.attributes["layout"] == f'"{layout}"'
        assert call.attributes["inner_size"] == "0 : i64"
    assert calls(text)[0].operands == ["2x256x2x64xbf16", *["2x256x1x64xbf16"] * 2]
    assert text.count('"stablehlo.all_to_all"') == 8
    assert text.count('"stablehlo.collective_permute"') == (8 if layout == "striped" else 0)
