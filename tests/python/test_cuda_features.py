"""Programs for GPUs carry masks and features; their lowering shows it without a GPU."""

import re

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from burst_attention import _ffi
from burst_attention._attention import calls as attention_calls
from jax.sharding import PartitionSpec as P
from test_cuda_lowering import (
    DIM,
    GPU,
    HEADS,
    KNOWN,
    OPTIONS,
    SEQ,
    abstract_mesh,
    calls,
    lowered,
    problem,
    shapes,
)

pytestmark = pytest.mark.needs("text")

Q, KV, LSE = "2x256x2x64xbf16", "2x256x1x64xbf16", "2x256x2xf32"
IDS, SLOPES = "2x256xi32", "2x2xf32"


@pytest.fixture
def asked(monkeypatch):
    """Returns the requests about workspaces that reach the library, by pass."""
    found = {}
    monkeypatch.setattr(_ffi, "workspace_bytes", lambda **x: found.setdefault(x["pass"], x) and 7)
    return found


def sharded(device, extras=(), **options):
    """Returns a function of q, k, v and a dict of the arrays ``extras``."""
    specs = {"segment_ids": P("data", "context"), "alibi_slopes": P("tensor")}

    def local(q, k, v, given):
        return ba.attention(q, k, v, axis_name="context", **options, **given)

    in_specs = (*(ring.SPEC,) * 3, {name: specs[name] for name in extras})
    return jax.shard_map(local, mesh=abstract_mesh(device), in_specs=in_specs, out_specs=ring.SPEC)


def both(function, wrt=(0, 1, 2)):
    """Returns a function of the operands that runs both passes."""

    def run(*operands):
        return jax.grad(lambda *x: jnp.sum(function(*x).astype(jnp.float32)), wrt)(*operands)

    return run


def given(*names):
    found = {
        "segment_ids": jax.ShapeDtypeStruct((4, SEQ), jnp.int32),
        "alibi_slopes": jax.ShapeDtypeStruct((HEADS,), jnp.float32),
    }
    return {name: found[name] for name in names}


def attributes(call):
    """Returns the call's attributes that are options, as Python values."""
    found = {name: call.attributes[name].split(" : ")[0].strip('"') for name in OPTIONS}
    types = {name: type(value) for name, value in OPTIONS.items()}
    return {
        name: x == "true" if types[name] is bool else types[name](x) for name, x in found.items()
    }


@KNOWN
@pytest.mark.parametrize(
    ("options", "extras", "expected", "operands"),
    [
        ({"local_window_size": (9, 3)}, (), {"window_left": 9, "window_right": 3}, []),
        (
            {"local_window_size": 9, "is_causal": True},
            (),
            {"window_left": 9, "window_right": 0},
            [],
        ),
        ({"local_window_size": (SEQ, SEQ - 1)}, (), {"window_right": SEQ - 1}, []),
        (
            {"logits_soft_cap": 4.0},
            (),
            {"logits_soft_cap": 4.0},
            [],
        ),
        (
            {},
            ("segment_ids",),
            {"feature_operands": "query_segment_ids,key_segment_ids"},
            [IDS] * 2,
        ),
        (
            {"is_causal": True},
            ("alibi_slopes",),
            {"feature_operands": "alibi_slopes", "window_right": 0},
            [SLOPES],
        ),
        (
            {"dropout_rate": 0.25, "dropout_key": np.zeros(2, np.uint32)},
            (),
            {"dropout_rate": 0.25, "feature_operands": "dropout"},
            ["2x4xui32"],
        ),
    ],
    ids=["window", "causal window", "wide window", "soft cap", "segments", "slopes", "dropout"],
)
def test_attributes_and_operands(asked, device, options, extras, expected, operands):
    """A call has the operands and attributes that its features need."""
    function = sharded(device, extras, schedule="ring", **options)
    text = lowered(both(function), [*shapes(), given(*extras)])
    forward, backward = calls(text)
    assert forward.operands == [Q, KV, KV, *operands]
    assert forward.results == [Q, LSE, "7xui8"]
    of_slopes = [LSE] if extras == ("alibi_slopes",) else []
    assert backward.operands == [Q, KV, KV, Q, LSE, Q, LSE, *operands, *of_slopes]
    assert backward.results == [Q, KV, KV, *of_slopes, "7xui8"]
    for call in (forward, backward):
        assert attributes(call) == OPTIONS | expected
    assert asked == {kind: problem(kind, **expected) for kind in ("forward", "backward")}


def test_schedules(asked):
    """A pair of axes is a double ring, and its inner axis is the minor one in its ranks' order."""
    mesh = abstract_mesh(GPU, names=("node", "tensor", "context"), sizes=(2, 2, 4))
    spec = P(None, ("node", "context"), "tensor")

    def calls_of(**options):
        def local(q, k, v):
            return ba.attention(q, k, v, **options)

        function = jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
        return calls(lowered(function, shapes()))

    (double,) = calls_of(axis_name=("node", "context"))
    assert double.attributes["schedule"] == '"double_ring"'
    assert double.attributes["inner_size"].startswith("4 ")
    assert double.groups() == [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15]
    options = asked["forward"]["options"]
    assert (options["schedule"], options["inner_size"]) == ("double_ring", 4)
    (gathered,) = calls_of(axis_name=("node", "context"), schedule="all_gather")
    assert gathered.attributes["schedule"] == '"all_gather"'
    assert gathered.attributes["inner_size"].startswith("0 ")
    asked.clear()
    (balanced,) = calls_of(axis_name="context", schedule="balanced", is_causal=True)
    assert balanced.attributes["schedule"] == '"balanced"'
    assert asked["forward"]["options"]["schedule"] == "balanced"


def test_values_of_another_width(asked):
    q, k, v = shapes()
    v = jax.ShapeDtypeStruct((*v.shape[:3], 2 * DIM), v.dtype)
    forward, backward = calls(lowered(both(sharded(GPU)), [q, k, v, {}]))
    out, values = "2x256x2x128xbf16", "2x256x1x128xbf16"
    assert forward.operands == [Q, KV, values]
    assert forward.results == [out, LSE, "7xui8"]
    assert backward.operands == [Q, KV, values, out, LSE, out, LSE]
    assert backward.results == [Q, KV, values, "7xui8"]
    expected = problem("forward", value_dim=2 * DIM)
    assert asked["forward"] == expected


def test_cross_attention(asked):
    q, k, v = shapes()
    k, v = (jax.ShapeDtypeStruct((4, 2 * SEQ, *x.shape[2:]), x.dtype) for x in (k, v))
    forward, backward = calls(lowered(both(sharded(GPU)), [q, k, v, {}]))
    assert forward.operands == [Q, *["2x512x1x64xbf16"] * 2]
    assert backward.results[:3] == [Q, *["2x512x1x64xbf16"] * 2]
    assert asked["backward"] == problem("backward", kv_len=2 * asked["backward"]["q_len"])


@KNOWN
def test_gradient_of_slopes(asked, device):
    """Kernels add each query's part to zeros, and XLA sums the parts over queries and entries."""
    function = both(sharded(device, ["alibi_slopes"]), (0, 3))
    arguments = [*shapes(), given("alibi_slopes")]
    text = lowered(function, arguments)
    _, backward = calls(text)
    assert backward.operands[-2:] == [SLOPES, LSE]
    assert backward.results == [Q, KV, KV, LSE, "7xui8"]
    last = len(backward.operands) - 1
    aliases = re.findall(
        r"output_operand_alias<output_tuple_indices = \[(\d)\],\s+operand_index = (\d+)", text
    )
    assert aliases == [("3", f"{last}")]
    assert re.search(r"reduce.* across dimensions = \[1\] : \(tensor<2x256x2xf32>", text)
    if device is None:
        text = lowered(function, arguments, "cpu")
        assert calls(text)[1].results == [Q, KV, KV, SLOPES]


def test_operands_of_cpu_devices():
    """Calls take exactly the arrays that the problem has, and the place as the last one."""
    extras = ("alibi_slopes", "segment_ids")
    options = {"dropout_rate": 0.25, "dropout_key": np.zeros(2, np.uint32), "is_causal": True}

    def local(q, k, v, given):
        return ba.attention(
            q, k, v, axis_name="context", batch_axis="data", head_axis="tensor", **options, **given
        )

    specs = {"segment_ids": P("data", "context"), "alibi_slopes": P("tensor")}
    function = jax.shard_map(
        local,
        mesh=ring.mesh(2, 2, 2),
        in_specs=(*(ring.SPEC,) * 3, specs),
        out_specs=ring.SPEC,
    )
    text = lowered(both(function), [*shapes(), given(*extras)], "cpu")
    forward, backward = calls(text)
    ids, q = "2x512xi32", "2x512x2x64xbf16"
    assert forward.operands[3:] == [ids, ids, SLOPES, "2x4xui32", "2xi32"]
    assert backward.operands[7:] == forward.operands[3:]
    assert backward.results == [q, *["2x512x1x64xbf16"] * 2, SLOPES]
    assert attributes(backward) == OPTIONS | {
        "window_right": 0,
        "feature_operands": "query_segment_ids,key_segment_ids,alibi_slopes,dropout",
        "dropout_rate": 0.25,
    }


@pytest.mark.parametrize(
    ("options", "seq", "kept"),
    [
        ({}, 256, "f32"),
        ({}, 512, "bf16"),
        ({"local_window_size": (63, 0)}, 512, "f32"),
        ({"local_window_size": (64, 0)}, 512, "bf16"),
        ({"local_window_size": (SEQ, 0)}, 512, "bf16"),
    ],
)
def test_output_is_kept_in_float32_where_rows_see_few_keys(options, seq, kept):
    function = ring.sharded(ring.mesh(1, 4, 2), **options)
    text = lowered(both(function), shapes(seq=seq), "cpu")
    forward, _ = calls(text)
    assert forward.results[0].endswith(kept)
    assert attention_calls.SHORT_SEQUENCE == 256
