"""Programs for GPUs have the right calls for XLA; their lowering shows it without a GPU."""

import json
import re
from dataclasses import dataclass

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from burst_attention import _ffi, _mesh
from burst_attention._attention import calls as attention_calls
from burst_attention._attention.options import NO_LIMIT
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import dense

pytestmark = [pytest.mark.needs("text"), pytest.mark.oldest_jax]

GPU = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
BATCH, SEQ, HEADS, KV_HEADS, DIM = 4, 1024, 4, 2, 64
OPTIONS = {
    "window_left": NO_LIMIT,
    "window_right": NO_LIMIT,
    "logits_soft_cap": 0.0,
    "dropout_rate": 0.0,
    "feature_operands": "",
    "schedule": "ring",
    "inner_size": 0,
}
"""The attributes of full attention without features."""
KNOWN = pytest.mark.parametrize("device", [GPU, None], ids=["gpu", "unknown"])
CALL = re.compile(
    r"custom_call @(burst_\w+)\(.*?mhlo.backend_config = \{(.*?)\}.*? : \((.*)\) -> (.*)"
)
ATTRIBUTE = re.compile(r'(\w+) = ("[^"]*"|dense<[^>]*> : tensor<\w+>|[^,]+)')


@dataclass
class Call:
    """A custom call as it stands in StableHLO text."""

    target: str
    operands: list[str]
    results: list[str]
    attributes: dict[str, str]

    def groups(self):
        return numbers(self.attributes["groups"].split(":")[0])


def calls(text):
    return [
        Call(
            target,
            re.findall(r"tensor<(.*?)>", operands),
            re.findall(r"tensor<(.*?)>", results),
            dict(ATTRIBUTE.findall(attributes)),
        )
        for target, attributes, operands, results in CALL.findall(text)
    ]


def numbers(text):
    return [int(n) for n in re.findall(r"-?\d+", text)]


def abstract_mesh(device, sizes=(2, 4, 2), names=ring.AXES, axis_type=AxisType.Auto):
    return AbstractMesh(sizes, names, axis_types=(axis_type,) * len(sizes), abstract_device=device)


def shapes(dtype="bfloat16", batch=BATCH, seq=SEQ, leading=(), sharding=None):
    """Returns the shapes of q, k and v."""
    return [
        jax.ShapeDtypeStruct((*leading, batch, seq, heads, DIM), dtype, sharding=sharding)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def with_gradient(function):
    """Returns a function that runs both passes; the output is its own cotangent."""

    def run(*qkv):
        out, pullback = jax.vjp(function, *qkv)
        return out, pullback(out)

    return run


def lowered(function, arguments, platform="cuda"):
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


def problem(kind, **changes):
    """Returns the request to the library about one rank of `shapes` on `abstract_mesh`."""
    options = {name: changes.pop(name) for name in OPTIONS if name in changes}
    return {
        "pass": kind,
        "batch": BATCH // 2,
        "q_len": SEQ // 4,
        "kv_len": SEQ // 4,
        "heads": HEADS // 2,
        "kv_heads": KV_HEADS // 2,
        "head_dim": DIM,
        "value_dim": DIM,
        "dtype": "bfloat16",
        "softmax_scale": DIM**-0.5,
        "layout": "contiguous",
        "world_size": 4,
        "backward": "auto",
        "backward_order": "auto",
        "kernels": "tile",
        "options": OPTIONS | options,
    } | changes


def workspace(kind):
    """The library's own answer."""
    return _ffi.ask(json.dumps({"ask": "workspace", **problem(kind)}))["bytes"]


@pytest.mark.parametrize("check_vma", [True, False])
@KNOWN
def test_operands_and_results(device, check_vma):
    """The rank is no operand, and the workspace has the size that the library asks for."""
    function = ring.sharded(abstract_mesh(device), check_vma=check_vma)
    forward, backward = calls(lowered(with_gradient(function), shapes()))
    q, kv, lse = "2x256x2x64xbf16", "2x256x1x64xbf16", "2x256x2xf32"
    assert forward.target == "burst_attention_forward"
    assert forward.operands == [q, kv, kv]
    assert forward.results == [q, lse, f"{workspace('forward')}xui8"]
    assert backward.target == "burst_attention_backward"
    assert backward.operands == [q, kv, kv, q, lse, q, lse]
    assert backward.results == [q, kv, kv, f"{workspace('backward')}xui8"]


@KNOWN
def test_attributes(monkeypatch, device):
    asked = {}
    monkeypatch.setattr(_ffi, "workspace_bytes", lambda **x: asked.setdefault(x["pass"], x) and 7)
    options = {"layout": "zigzag", "backward": "queries", "backward_order": "any"}
    function = ring.sharded(abstract_mesh(device), **options, is_causal=True, scale=-0.5)
    forward, backward = calls(lowered(with_gradient(function), shapes()))
    groups = forward.attributes.pop("groups")
    assert groups.endswith(": tensor<16xi64>")
    assert forward.attributes == {
        "axis_name": '"context"',
        "communication_id": f"{attention_calls.COMMUNICATION_ID} : i64",
        "dropout_rate": "0.000000e+00 : f32",
        "feature_operands": '""',
        "inner_size": "0 : i64",
        "kernels": '"tile"',
        "layout": '"zigzag"',
        "logits_soft_cap": "0.000000e+00 : f32",
        "schedule": '"ring"',
        "softmax_scale": "5.000000e-01 : f32",
        "window_left": f"{NO_LIMIT} : i64",
        "window_right": "0 : i64",
        "world_size": "4 : i64",
    }
    also = {"groups": groups, "backward": '"queries"', "backward_order": '"any"'}
    also["lse_gradient"] = "false"
    assert backward.attributes == forward.attributes | also
    assert 1 < attention_calls.COMMUNICATION_ID < 2**31
    options |= {"softmax_scale": 0.5, "window_right": 0}
    assert asked == {kind: problem(kind, **options) for kind in ("forward", "backward")}
    assert forward.results[-1] == backward.results[-1] == "7xui8"


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        ((8,), ("context",)),
        ((2, 2, 2), ("data", "context", "tensor")),
        ((4, 2), ("context", "data")),
        ((2, 4), ("data", "context")),
        ((1, 4, 2), ("data", "context", "tensor")),
        ((2, 1, 1), ("data", "context", "tensor")),
    ],
)
@KNOWN
def test_groups_are_those_of_collectives_along_the_axis(device, sizes, names):
    mesh = abstract_mesh(device, sizes, names)
    axes = {name: name if name in names else None for name in ring.AXES}
    function = ring.sharded(mesh, spec=P(*axes.values()), schedule="ring")
    groups = [call.groups() for call in calls(lowered(with_gradient(function), shapes()))]
    assert groups == [ring_order(mesh)] * 2
    size = mesh.shape["context"]
    found = {tuple(sorted(x)) for x in np.reshape(groups[0], (-1, size))}
    assert found == psum_groups(Mesh(np.array(jax.devices()[: mesh.size]).reshape(sizes), names))


def ring_order(mesh):
    """Returns logical ids, ring after ring, from the lowering of a ppermute to the next rank."""
    size = mesh.shape["context"]

    def local(x):
        return lax.ppermute(x, "context", [(i, (i + 1) % size) for i in range(size)])

    specs = P(mesh.axis_names)
    function = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs)
    text = lowered(function, [jax.ShapeDtypeStruct((mesh.size,), jnp.float32)])
    pairs = re.search(r"source_target_pairs = dense<(.*?)>", text)[1]
    return numbers(pairs)[::2]


def psum_groups(mesh):
    """Returns the sets of logical ids that a psum adds up, from sums of one bit for each id."""
    specs = P(mesh.axis_names)
    bits = jnp.array([1 << i for i in range(mesh.size)])
    function = jax.shard_map(
        lambda x: lax.pcast(lax.psum(x, "context"), "context", to="varying"),
        mesh=mesh,
        in_specs=specs,
        out_specs=specs,
    )
    sums = [int(x) for x in function(bits)]
    return {tuple(i for i in range(mesh.size) if total >> i & 1) for total in sums}


@KNOWN
def test_vmap(device):
    """The mapped dimension joins the batch of all operands and results."""
    function = jax.vmap(ring.sharded(abstract_mesh(device)), in_axes=(0, None, None))
    q, *_ = shapes(leading=(3,))
    forward, backward = calls(lowered(with_gradient(function), [q, *shapes()[1:]]))
    assert forward.operands == ["6x256x2x64xbf16", *["6x256x1x64xbf16"] * 2]
    assert all(text.startswith("6x256x") for text in (*backward.operands, *backward.results[:3]))


@pytest.mark.parametrize("policy", [ba.save_attention, None], ids=["saved", "recomputed"])
@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scan"])
@KNOWN
def test_checkpoint_runs_the_ring_once_under_the_policy(device, scan, policy):
    function = ring.sharded(abstract_mesh(device, (1, 4, 1)), is_causal=True)

    def layer(x, weight):
        return x + function(*jnp.split(x @ weight, 3, axis=-1)), None

    layer = jax.checkpoint(layer, policy=policy)

    def loss(weights, x):
        if scan:
            return jnp.sum(lax.scan(layer, x, weights)[0] ** 2)
        for weight in weights:
            x, _ = layer(x, weight)
        return jnp.sum(x**2)

    weights = jax.ShapeDtypeStruct((2, DIM, 3 * DIM), jnp.bfloat16)
    found = [call.target for call in calls(lowered(jax.grad(loss), [weights, shapes()[0]]))]
    layers = 1 if scan else 2
    forward = layers if policy else 2 * layers
    assert found.count(_ffi.FORWARD) == forward
    assert found.count(_ffi.BACKWARD) == layers


@KNOWN
def test_explicit_mesh_is_inferred(device):
    mesh = abstract_mesh(device, axis_type=AxisType.Explicit)
    sharded = shapes(sharding=NamedSharding(mesh, ring.SPEC))
    found = calls(lowered(with_gradient(ba.dot_product_attention), sharded))
    assert [len(call.operands) for call in found] == [3, 7]
    assert found[0].groups() == ring_order(abstract_mesh(device))


@pytest.mark.parametrize("seq", [64, SEQ])
@KNOWN
def test_short_sequences_keep_a_float32_output_for_the_backward_pass(device, seq):
    """The output is kept as on CPU devices, although kernels take and return q's dtype."""
    function = ring.sharded(abstract_mesh(device), is_causal=True)
    text = lowered(with_gradient(function), shapes(seq=seq))
    forward, backward = calls(text)
    o = f"2x{seq // 4}x2x64xbf16"
    assert (forward.results[0], backward.operands[3]) == (o, o)
    assert (f"tensor<2x{seq // 4}x2x64xf32>" in text) == (seq == 64)


def test_problem_that_the_library_refuses():
    with pytest.raises(ValueError, match="burst_attention on NVIDIA GPUs: .+"):
        _ffi.workspace_bytes(**{"pass": "sideways"})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cpu_programs_have_one_call_and_no_choice(dtype):
    text = lowered(with_gradient(ring.sharded(ring.mesh(2, 4, 1))), shapes(dtype), "cpu")
    assert [len(call.operands) for call in calls(text)] == [4, 8]
    assert all(call.operands[-1] == "2xi32" for call in calls(text))
    assert "stablehlo.case" not in text
    text = lowered(with_gradient(ring.sharded(abstract_mesh(GPU))), shapes(), "cuda")
    assert "stablehlo.case" not in text


def test_program_exported_for_both_platforms_runs_on_cpu():
    """The program is traced for an abstract mesh and gives the bits of one for CPU devices only."""
    mesh = abstract_mesh(None, (2, 2, 2))
    sharding = NamedSharding(mesh, ring.SPEC)
    checks = [
        jax.export.DisabledSafetyCheck.custom_call(target)
        for target in (_ffi.FORWARD, _ffi.BACKWARD)
    ]
    run = with_gradient(ring.sharded(mesh, is_causal=True))
    exported = jax.export.export(
        jax.jit(run, in_shardings=sharding, out_shardings=sharding),
        platforms=("cpu", "cuda"),
        disabled_checks=checks,
    )(*shapes())
    found = {len(call.operands) for call in calls(exported.mlir_module())}
    assert found == {3, 4, 7, 8}
    here = ring.mesh(2, 2, 2)
    inputs = ring.put(here, *ring.normal(0, *[x.shape for x in shapes()], dtype="bfloat16"))
    expected = jax.jit(with_gradient(ring.sharded(here, is_causal=True)))(*inputs)
    results = jax.jit(exported.call)(*inputs)
    assert jax.tree.all(jax.tree.map(np.array_equal, results, expected))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
def test_values_with_a_stand_in_for_the_kernels(monkeypatch, scale, layout):
    """On one device, plain attention in place of the custom calls gives the right values."""
    seen = []

    def stand_in(target, ring, results, operands, attributes, aliases):
        assert not aliases
        seen.append(target)
        assert attributes["softmax_scale"] > 0
        outputs = STAND_INS[target](attributes["softmax_scale"], *operands)
        outputs = (*outputs, jnp.zeros(results[-1].shape, results[-1].dtype))
        assert [(x.shape, x.dtype) for x in outputs] == [(x.shape, x.dtype) for x in results]
        return outputs

    monkeypatch.setattr(attention_calls, "_call", stand_in)
    monkeypatch.setattr(_mesh, "platform", lambda mesh: "cuda")
    q, k, v, dout = ring.normal(0, *[(2, 48, 2, 32)] * 4, dtype="float16")
    dlse = ring.normal(1, (2, 48, 2))[0]
    function = ring.sharded(
        ring.line(1), check_vma=False, scale=scale, layout=layout, return_residual=True
    )
    (out, lse), grads = ring.gradients(function)((q, k, v), (dout, dlse))
    assert seen == [_ffi.FORWARD, _ffi.BACKWARD]
    expected = dense(q, k, v, dout, dlse, causal=False, scale=scale)
    for name, value in zip(("o", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True):
        assert value.dtype == (jnp.float32 if name == "lse" else jnp.float16)
        assert np.allclose(value, getattr(expected, name), rtol=2e-3, atol=2e-3), name
    if scale == 0:
        assert not np.any(grads[0])


def stand_in_forward(scale, q, k, v):
    out, lse = attention(scale, *(x.astype(jnp.float32) for x in (q, k, v)))
    return out.astype(q.dtype), lse


def stand_in_backward(scale, q, k, v, o, lse, dout, dlse):
    assert o.dtype == q.dtype
    wide = (x.astype(jnp.float32) for x in (q, k, v))
    results, pullback = jax.vjp(lambda *x: attention(scale, *x), *wide)
    assert results[1].shape == lse.shape
    return [x.astype(q.dtype) for x in pullback((dout.astype(jnp.float32), dlse))]


def attention(scale, q, k, v):
    s = scale * jnp.einsum("bqhd,bkhd->bqhk", q, k)
    lse = jax.nn.logsumexp(s, axis=-1)
    return jnp.einsum("bqhk,bkhd->bqhd", jnp.exp(s - lse[..., None]), v), lse


STAND_INS = {_ffi.FORWARD: stand_in_forward, _ffi.BACKWARD: stand_in_backward}
