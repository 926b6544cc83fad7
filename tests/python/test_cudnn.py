"""cuDNN computes tiles of rings on the stand-in, whose cuDNN carries the graphs out on the host."""

import math
import re
from dataclasses import replace
from functools import partial

import burst_attention as ba
import failures
import jax
import numpy as np
import pytest
import ring
from burst_attention import _confirmed
from burst_attention._attention import ring as rings
from burst_attention._attention.options import Options
from features import Problem
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

KEEPING = partial(jax.checkpoint, policy=ba.save_attention)
MOST = 1.3
"""The error of a result, as a multiple of that of this library's own kernels: a tile's results and
gradients have 16 bits."""
PLAIN = Problem(
    mesh=(1, 4, 1),
    schedule="ring",
    backward="keys",
    batch=1,
    heads=2,
    kv_heads=2,
    q_len=256,
    kv_len=256,
    head_dim=64,
    value_dim=64,
    kernels="cudnn",
)
PROBLEMS = {
    "one rank": replace(PLAIN, mesh=(1, 1, 1), q_len=96, kv_len=96),
    "one rank, causal": replace(PLAIN, mesh=(1, 1, 1), q_len=96, kv_len=96, causal=True),
    "full": PLAIN,
    "causal": replace(PLAIN, causal=True),
    "zigzag": replace(PLAIN, causal=True, layout="zigzag"),
    "striped": replace(PLAIN, causal=True, layout="striped"),
    "grouped": replace(PLAIN, heads=4, batch=2, layout="zigzag", causal=True),
    "float16": replace(PLAIN, dtype="float16", causal=True, layout="zigzag"),
    "wide": replace(PLAIN, mesh=(1, 2, 1), head_dim=128, value_dim=128, q_len=64, kv_len=64),
    "cross": replace(PLAIN, kv_len=160),
    "eight ranks": replace(PLAIN, mesh=(1, 8, 1), causal=True, layout="zigzag"),
    "double ring": replace(PLAIN, inner=2, schedule="auto"),
    "all_gather": replace(PLAIN, schedule="all_gather", causal=True, layout="zigzag"),
    "ulysses": replace(PLAIN, schedule="ulysses", heads=4, kv_heads=4, causal=True),
    "window": replace(PLAIN, causal=True, window=(40, 0)),
    "window, one rank": replace(
        PLAIN, mesh=(1, 1, 1), q_len=96, kv_len=96, causal=True, window=(40, 0)
    ),
    "unequal widths": replace(
        PLAIN, mesh=(1, 2, 1), head_dim=192, value_dim=128, q_len=64, kv_len=64
    ),
    "256 columns": replace(PLAIN, mesh=(1, 2, 1), head_dim=256, value_dim=256, q_len=64, kv_len=64),
    "queries travel": replace(PLAIN, backward="queries", causal=True, layout="zigzag"),
    "auto": replace(PLAIN, backward="auto", causal=True, layout="zigzag"),
}


def results(one, arrays, order="any"):
    """Returns o, dq, dk and dv on the host, in the order of the sequence, with no use of lse."""
    options = one.options({}) | {"return_residual": False, "backward_order": order}
    names = ("context",) if not one.inner else ("node", "context")

    def local(q, k, v):
        return ba.attention(q, k, v, axis_name=names, **options)

    specs = tuple(one.spec(name) for name in "qkv")
    mesh = one.device_mesh()
    attend = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=one.spec("dout"))

    @jax.jit
    def both(qkv, dout):
        o, pullback = jax.vjp(attend, *qkv)
        return o, *pullback(dout)

    placed = {name: one.placed(mesh, name, arrays[name]) for name in ("q", "k", "v", "dout")}
    found = both(tuple(placed[name] for name in "qkv"), placed["dout"])
    restored = ring.restored(one.layout, one.mesh[1], *found)
    return dict(zip(("o", "dq", "dk", "dv"), restored, strict=True))


def errors(one, arrays, order="any"):
    """Returns the relative error of each result, in the norm."""
    exact = one.expected(arrays | {"dlse": np.zeros_like(arrays["dlse"])})
    found = results(one, arrays, order)

    def off(name):
        right = getattr(exact, name)
        return np.linalg.norm(np.asarray(found[name], np.float64) - right) / np.linalg.norm(right)

    return {name: off(name) for name in found}


@pytest.mark.needs("standin")
@pytest.mark.parametrize("one", PROBLEMS.values(), ids=PROBLEMS)
def test_errors_are_near_those_of_the_own_kernels(one):
    arrays = one.arrays()
    found, own = errors(one, arrays), errors(replace(one, kernels="tile"), arrays)
    # One tile may round to the same bits.
    assert found != own or one.mesh[1] == 1, "cuDNN computed nothing"
    for name, error in found.items():
        assert error <= MOST * own[name], f"{name}: {error:.2e}, own kernels {own[name]:.2e}"
        assert error <= 6e-3, f"{name}: {error:.2e}"


def fixed_ratios(*names):
    """Returns the errors with a fixed order of sums, as multiples of those of the own kernels, for
    each problem and result."""
    ratios = {}
    for name in names:
        one = replace(PROBLEMS[name], heads=4, causal=True)
        arrays = one.arrays()
        found = errors(one, arrays, "fixed")
        own = errors(replace(one, kernels="tile"), arrays, "fixed")
        assert found["dq"] != own["dq"], "cuDNN computed nothing"
        ratios[name] = {result: error / own[result] for result, error in found.items()}
    return ratios


def assert_near(ratios):
    for name, of_results in ratios.items():
        for result, ratio in of_results.items():
            assert ratio <= MOST, f"{name}, {result}: {ratio:.2f}"


@pytest.mark.needs("standin")
@pytest.mark.parametrize("name", ["wide", "unequal widths"])
def test_errors_in_a_fixed_order_are_near_those_of_the_own_kernels(name):
    assert_near(fixed_ratios(name))


@pytest.mark.needs("standin")
def test_what_cudnn_refuses_has_the_bits_of_the_own_kernels():
    one = replace(PLAIN, causal=True, soft_cap=5.0)
    arrays = one.arrays()
    found, own = results(one, arrays), results(replace(one, kernels="tile"), arrays)
    for name, x in found.items():
        np.testing.assert_array_equal(x, own[name])


@pytest.mark.needs("standin")
def test_the_default_order_lets_cudnn_compute():
    one = PROBLEMS["zigzag"]
    arrays = one.arrays()
    found, expected = results(one, arrays, "auto"), results(one, arrays, "any")
    for name, x in found.items():
        np.testing.assert_array_equal(x, expected[name])


@pytest.mark.needs("standin")
@pytest.mark.parametrize("wrap", [jax.checkpoint, KEEPING], ids=["recomputed", "kept"])
def test_layers_of_a_scan_that_are_rematerialised_have_the_same_bits(wrap):
    """cuDNN computes the forward pass of each layer again, or the layers keep its results."""
    mesh, spec, scales = ring.line(2), P(None, "context"), np.float32([0.5, 1.0, 1.5])
    x, dout = ring.put(mesh, *ring.normal(0, *[(1, 128, 2, 64)] * 2), spec=spec)

    def layer(x, scale):
        options = {"is_causal": True, "layout": "zigzag", "backward_order": "any"}
        q = x * scale.astype(x.dtype)
        return x + ba.attention(q, x, x, axis_name="context", kernels="cudnn", **options), None

    def found(layer):
        def local(x, scales):
            return jax.lax.scan(layer, x, scales)[0]

        model = jax.shard_map(local, mesh=mesh, in_specs=(spec, P()), out_specs=spec)
        out, (dx,) = ring.gradients(lambda x: model(x, scales))((x,), dout)
        return np.asarray(out), np.asarray(dx)

    plain, wrapped = found(layer), found(wrap(layer))
    assert np.any(plain[1])
    for one, other in zip(plain, wrapped, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.needs("standin")
@pytest.mark.parametrize(
    ("stage", "which", "call"),
    [
        ("initialize", "forward", "cudnnCreate"),
        ("initialize", "forward", "cudnnBackendFinalize"),
        ("initialize", "backward", "cudnnBackendFinalize"),
        ("execute", "forward", "cudnnSetStream"),
        ("execute", "forward", "cudnnBackendExecute"),
    ],
)
def test_a_failing_call_is_told_and_no_run_hangs(stage, which, call):
    row = failures.report("cudnn", 2, stage, which, f"call={call} code=3000 nth=1")
    assert not row["hung"], row
    assert call in row["told"][0], row
    assert "raises" in row["run"][1], row
    assert row["next"][1] == "ends", row


@pytest.mark.needs("standin")
def test_no_plan_is_made_twice(monkeypatch, tmp_path):
    """Two devices run a program twice, and share plans."""
    log = tmp_path / "log"
    monkeypatch.setenv("STANDIN_LOG", str(log))
    row = failures.report("cudnn", 2, "execute", "backward", "call=cudnnBackendExecute nth=1000")
    assert (row["run"][1], row["next"][1]) == ("ends", "ends"), row
    plans = [line for line in log.read_text().splitlines() if " plan Graph(" in line]
    graphs = [line.split(" plan ")[1] for line in plans]
    assert len(graphs) >= 4
    assert len(set(graphs)) == len(graphs)


@pytest.mark.needs("standin")
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_a_plan_that_one_rank_alone_is_refused_is_told_on_all(which):
    """With a causal mask, the last of two ranks has plans that the first one has not."""
    fault = "call=cudnnBackendFinalize about=plan code=3000 nth=1"
    row = failures.report("cudnn", 2, "initialize", which, fault)
    assert not row["hung"], row
    assert "cudnnBackendFinalize" in row["told"][0], row
    assert "raises" in row["run"][1], row
    assert row["next"][1] == "ends", row


@pytest.mark.needs("host")
@pytest.mark.parametrize("kernels", ["flash", None, 3])
def test_unknown_kernels_are_refused_while_tracing(kernels):
    call = partial(ring.sharded(ring.line(1), kernels=kernels))
    words = "kernels must be one of 'auto', 'tile' or 'cudnn'"
    with pytest.raises((ValueError, TypeError), match=words):
        jax.eval_shape(call, *ring.normal(0, *[(1, 8, 1, 16)] * 3))


@pytest.mark.needs("text")
def test_the_choice_where_the_call_leaves_it(monkeypatch):
    def kernels(**options):
        return rings._kernels(Options(**options), "cuda")

    found = {"cudnn": False}
    monkeypatch.setattr(_confirmed, "confirmed", lambda family, _: found[family])
    assert kernels() == "tile"
    found["cudnn"] = True
    assert kernels() == "auto"
    assert kernels(kernels="tile") == "tile"
    monkeypatch.setenv("BURST_ATTENTION_KERNELS", "tile")
    assert kernels() == "tile"
    assert kernels(kernels="cudnn") == "cudnn"
    monkeypatch.setenv("BURST_ATTENTION_KERNELS", "flash")
    words = (
        "BURST_ATTENTION_KERNELS must be 'tile' or 'cudnn', or unset for the default, got 'flash'"
    )
    with pytest.raises(ValueError, match=words):
        kernels()


def backward_side(axes=8, kv_heads=32, rows=8192, dim=128, return_residual=False, **options):
    """Returns which arrays travel in the backward pass of a call, as its attribute says.

    ``axes``: how many devices one axis has, or two.
    """
    sizes = (axes,) if isinstance(axes, int) else axes
    names = ("node", "gpu")[-len(sizes) :]
    gpu = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    types = (AxisType.Auto,) * len(sizes)
    mesh = AbstractMesh(sizes, names, axis_types=types, abstract_device=gpu)
    options = {"kernels": "cudnn", "backward_order": "any", "schedule": "ring"} | options
    options = {"is_causal": True, "layout": "zigzag"} | options
    options["return_residual"] = return_residual

    def attend(*qkv):
        found = ba.attention(*qkv, axis_name=names if len(sizes) == 2 else "gpu", **options)
        return found[0] if return_residual else found

    spec = P(None, names)
    function = jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec)
    shape = (1, rows * math.prod(sizes), 32, dim)
    shapes = [shape, *[(*shape[:2], kv_heads, dim)] * 2, shape]
    arrays = [jax.ShapeDtypeStruct(x, "bfloat16") for x in shapes]
    traced = jax.jit(lambda q, k, v, dout: jax.vjp(function, q, k, v)[1](dout)).trace(*arrays)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (side,) = set(re.findall(r'backward = "(\w+)"', text))
    return side


NODES_OF_ONE = ba.Links(devices_per_node=1)


@pytest.mark.needs("text")
@pytest.mark.parametrize(
    ("side", "options"),
    [
        ("keys", {}),
        ("keys", {"axes": (2, 4)}),
        ("keys", {"dim": 64}),
        ("keys", {"is_causal": False}),
        # Messages over slow links take longer than computing, unless shards are long.
        ("queries", {"links": NODES_OF_ONE}),
        ("queries", {"links": ba.Links(inner_gbps=100)}),
        ("queries", {"axes": (8, 4), "schedule": "hybrid", "rows": 1024}),
        ("keys", {"links": NODES_OF_ONE, "rows": 65536}),
        ("keys", {"links": NODES_OF_ONE, "kv_heads": 8}),
        # Bytes decide where cuDNN serves no gradient.
        ("queries", {"logits_soft_cap": 5.0}),
        ("queries", {"dim": 96}),
        ("keys", {"backward_order": "auto"}),
        ("keys", {"backward_order": "fixed"}),
        # The library compares bytes where cuDNN is out of the question.
        ("auto", {"kernels": "tile"}),
        ("auto", {"return_residual": True}),
        ("auto", {"axes": 1}),
        ("queries", {"backward": "queries"}),
        ("keys", {"backward": "keys", "kernels": "tile"}),
    ],
    ids=str,
)
def test_what_travels_backward_where_the_call_leaves_it(side, options):
    assert backward_side(**options) == side


def rounded(x):
    return np.asarray(x, jax.numpy.bfloat16).astype(np.float64)


def modelled_errors(ranks, length=2048, dim=128):
    """Returns relative errors of o and dk of a ring: of float32 parts, and of parts in 16 bits.

    Products have inputs in bfloat16, as in kernels, and sums are exact here.
    """
    generator = np.random.default_rng(0)
    q, k, v, dout = (rounded(generator.standard_normal((length, dim))) for _ in range(4))
    scores = q @ k.T / np.sqrt(dim)
    most = scores.max(axis=1, keepdims=True)
    p = np.exp(scores - most)
    exact = p / p.sum(axis=1, keepdims=True)
    o = exact @ v
    ds = exact * (dout @ v.T - (dout * o).sum(axis=1, keepdims=True)) / np.sqrt(dim)
    parts = np.split(np.arange(length), ranks)

    def off(found, right):
        return np.linalg.norm(rounded(found) - right) / np.linalg.norm(right)

    found = {}
    for name, part in (("own", lambda x: x), ("cudnn", rounded)):
        sums = [p[:, keys].sum(axis=1, keepdims=True) for keys in parts]
        each = [
            part(rounded(p[:, keys]) @ v[keys] / total)
            for keys, total in zip(parts, sums, strict=True)
        ]
        folded = sum(total * x for total, x in zip(sums, each, strict=True)) / sum(sums)
        dk = sum(part(rounded(ds[rows].T) @ q[rows]) for rows in parts)
        found[name] = off(folded, o), off(dk, ds.T @ q)
    return found


@pytest.mark.needs("host")
def test_errors_by_a_model_do_not_grow_with_the_ring():
    found = {ranks: modelled_errors(ranks) for ranks in (1, 8, 32)}
    for ranks, errors_of in found.items():
        for cudnn, own in zip(errors_of["cudnn"], errors_of["own"], strict=True):
            assert cudnn <= 1.3 * own, f"{ranks} ranks: {cudnn:.2e}, own kernels {own:.2e}"
    for few, many in zip(found[8]["cudnn"], found[32]["cudnn"], strict=True):
        assert many <= 1.05 * few
