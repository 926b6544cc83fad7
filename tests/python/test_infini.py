"""Infini-attention gives the results of its paper's recurrence on any mesh, whole or in pieces."""

import re
from functools import partial

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from burst_attention._infini import shards, sweeps
from burst_attention._infini.segments import Rows, Segments, Settings
from burst_attention._infini.sweeps import plan_of
from infini_cases import SEGMENT, assert_right, inputs, near, reference, sharded
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from long import some

pytestmark = [pytest.mark.needs("products", "float32"), pytest.mark.oldest_jax]

X = P(None, "context")


@pytest.mark.parametrize("update", ["linear", "delta"])
@pytest.mark.parametrize("world", [1, 4])
def test_it_is_the_papers_recurrence(world, update):
    assert_right(inputs(world), update, world)


@pytest.mark.parametrize("update", some(["delta", "linear"]))
def test_groups_and_windows_follow_each_other(monkeypatch, update):
    """Each of two ranks has two windows of three groups, as very long texts have."""
    segment, plans = 8, []
    monkeypatch.setattr(sweeps, "GROUP", segment)
    monkeypatch.setattr(sweeps, "WINDOWS", 2)
    monkeypatch.setattr(shards, "plan_of", lambda *x: plans.append(plan_of(*x)) or plans[-1])
    assert_right(inputs(2), update, 2, segment=segment)
    assert {(plan.group, plan.groups, plan.windows) for plan in plans} == {(segment, 3, 2)}


@pytest.mark.parametrize(
    "one", some([(1e30, "linear"), (1e-30, "delta"), (1e5, "delta")], 2), ids=str
)
def test_a_memory_that_float16_does_not_hold_keeps_its_digits(one):
    (*rows, m, z), (size, update) = inputs(2, dtype="float16"), one
    size = np.float32(size)
    assert_right((*rows, size * m, size * z), update, 2, bounds=(2.0**-11, 2.0**-11))


@pytest.mark.parametrize(
    "one",
    some([("float32", 80, "delta"), ("float16", 20, "linear"), ("float32", 60, "linear")], 2),
    ids=str,
)
def test_keys_and_queries_far_below_0_have_their_shares(one):
    """The first keys leave a tiny z, and queries and keys meet it with a tiny σ."""
    dtype, low, update = one
    q, k, v, gate, m, z = inputs(2, segments=3, dtype=dtype)
    k[:, :SEGMENT] = -low - np.abs(k[:, :SEGMENT])
    q[:, SEGMENT : SEGMENT + 4], k[:, SEGMENT + 4 : 2 * SEGMENT] = -low, -low
    bounds = (2e-6, 1e-5) if dtype == "float32" else (2.0**-11, 2.0**-11)
    assert_right((q, k, v, gate, 0 * m, 0 * z), update, 2, bounds)


@pytest.mark.parametrize("update", ["linear", "delta"])
def test_a_text_goes_through_in_pieces_and_the_last_may_be_short(update):
    q, k, v, gate, m, z = inputs(4, segments=3)
    rows = [x[:, : 8 * SEGMENT + 10] for x in (q, k, v)]
    want = reference(*map(np.float64, (*rows, gate, 0 * m, 0 * z)), SEGMENT, update)
    mesh = Mesh(ring.devices(2, 4), ("data", "context"))
    run = partial(ba.infini_attention, segment_size=SEGMENT, update=update, mesh=mesh)
    outs, memory = [], None
    for start, spec in (
        (0, P("data", "context")),
        (4 * SEGMENT, P("data", "context")),
        (8 * SEGMENT, P("data")),
    ):
        piece = [x[:, start : start + 4 * SEGMENT] for x in rows]
        out, memory = run(*piece, gate, memory=memory, spec=spec)
        outs.append(np.asarray(out))
    near((np.concatenate(outs, 1), *memory), want, 2e-6)


def test_heads_are_sharded_and_few_heads_of_keys_whole():
    q, k, v, gate, m, z = inputs(2, heads=4, kv_heads=1)
    want = reference(*map(np.float64, (q, k, v, gate, m, z)), SEGMENT, "delta")
    mesh = Mesh(ring.devices(2, 2), ("context", "tensor"))
    out, memory = ba.infini_attention(
        q,
        k,
        v,
        gate,
        memory=(m, z),
        segment_size=SEGMENT,
        update="delta",
        mesh=mesh,
        spec=P(None, "context", "tensor"),
    )
    near((out, *memory), want, 2e-6)


def test_the_softmax_may_have_other_queries_and_keys():
    q, k, v, gate, m, z = inputs(2)
    other_q, other_k = (x[:, ::-1] for x in (q, k))

    def local(*x):
        q, k, v, other_q, other_k = x
        return ba.infini_attention(
            q,
            k,
            v,
            gate,
            axis_name="context",
            memory=(m, z),
            segment_size=SEGMENT,
            local_query=other_q,
            local_key=other_k,
        )[0]

    function = jax.shard_map(local, mesh=ring.line(2), in_specs=(X,) * 5, out_specs=X)
    got = function(q, k, v, other_q, other_k)
    exact = [np.float64(x) for x in (gate, m, z)]
    weight = 1 / (1 + np.exp(-exact[0]))[:, None]
    of_memory = reference(*map(np.float64, (q, k, v)), *exact, SEGMENT, "linear")[0]

    def softmax(q, k):
        rows = map(np.float64, (q, k, v))
        return reference(*rows, -50 + 0 * gate, m, z, SEGMENT, "linear")[0]

    want = of_memory + (1 - weight) * (softmax(other_q, other_k) - softmax(q, k))
    near([got], [want], 2e-6)


def test_an_empty_memory_gives_nothing_and_no_nan():
    """Before the first segment, and behind keys whose σ are 0."""
    q, k, v, gate, m, z = inputs(1, segments=2)
    k[:, :SEGMENT] = -1000
    arrays = (q, k, v, gate, 0 * m, 0 * z)
    function = sharded(ring.line(1), update="delta")
    got, gradients = ring.gradients(function)(arrays, (v.repeat(2, 2), m, z))
    near([got[0]], [reference(*map(np.float64, arrays), SEGMENT, "delta")[0]], 2e-6)
    assert all(np.isfinite(x).all() for x in gradients)


def test_16_bits():
    arrays = inputs(2, dtype="bfloat16")
    want = reference(*map(np.float64, arrays), SEGMENT, "delta")
    got = sharded(ring.line(2), update="delta")(*arrays)
    assert got[0].dtype == "bfloat16"
    assert got[1].dtype == np.float32
    near(got, want, 2.0**-7)


@pytest.mark.parametrize("update", ["linear", "delta"])
@pytest.mark.parametrize("segments", [1, 4])
def test_what_travels_does_not_grow_with_length(update, segments):
    arrays = inputs(8, segments)
    text = jax.jit(sharded(ring.line(8), update=update)).lower(*arrays).as_text()
    found = re.findall(r'stablehlo\.all_gather"?.*?-> tensor<([\dx]+)xf32>', text, re.S)
    sizes = sorted(np.prod([int(size) for size in dims.split("x")]) for dims in found)
    m, z, matrix = 4 * 16 * 8, 4 * 16, 4 * 16 * 16
    assert sizes == sorted(8 * x for x in ([m + z] if update == "linear" else [z, matrix, m]))


@pytest.mark.parametrize("update", ["linear", pytest.param("delta", marks=pytest.mark.long)])
def test_memory_does_not_grow_with_length(update):
    """Beyond arguments and results a device needs the arrays of one group of segments."""
    needed = []
    for tokens in (2 * 8_192, 2 * 131_072):
        rows = jax.ShapeDtypeStruct((1, tokens, 2, 16), jnp.bfloat16)
        shapes = (2,), (1, 2, 16, 16), (1, 2, 16)
        gate, m, z = (jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes)
        function = sharded(ring.line(2), update=update, segment_size=2_048)
        run = ring.gradients(function)
        compiled = run.lower((rows, rows, rows, gate, m, z), (rows, m, z)).compile()
        needed.append(compiled.memory_analysis().temp_size_in_bytes)
    assert needed[1] <= 1.1 * needed[0]


@pytest.mark.parametrize(
    ("platform", "tokens", "heads", "group"),
    [
        ("cpu", 32_768, 8, 2_048),
        ("cuda", 32_768, 8, 32_768),
        ("cuda", 131_072, 8, 32_768),
        ("cuda", 32_768, 1_024, 2_048),
    ],
)
def test_groups_are_large_on_gpus_and_bounded(platform, tokens, heads, group):
    """Segments of 2,048 tokens: a group is whole segments, at least one."""
    q = jax.ShapeDtypeStruct((1, tokens, heads, 64), jnp.bfloat16)
    settings = Settings(2_048, "linear", "elu", None)
    segments = Segments(settings, 2_048, lambda x: x)
    plan = plan_of(segments, Rows(q, q, q, None, None), platform)
    assert plan.group == group
    assert plan.group * plan.groups * plan.windows == tokens


def test_vmap_and_remat():
    q, k, v, gate, m, z = inputs(2)
    function = sharded(ring.line(2), update="delta")
    loss = lambda *x: sum(jnp.sum(jnp.sin(y)) for y in function(*x))  # noqa: E731
    kept = jax.checkpoint(loss, policy=ba.save_attention)
    of = [jax.jit(jax.grad(x, argnums=(0, 1, 2)))(q, k, v, gate, m, z) for x in (loss, kept)]
    near(*of, 1e-6)
    run = partial(ba.infini_attention, axis_name="context", segment_size=SEGMENT, update="delta")
    both = P(None, None, "context")
    mapped = jax.shard_map(
        jax.vmap(lambda *x: run(*x, gate)[0]), mesh=ring.line(2), in_specs=both, out_specs=both
    )
    got = jax.jit(mapped)(*(np.stack([x, x[::-1]]) for x in (q, k, v)))
    want = function(q, k, v, gate, 0 * m, 0 * z)[0]
    near(got, (want, want[::-1]), 1e-6)


def test_bad_input():
    q, k, v, gate, m, z = inputs(2)

    def refused(error, words, **options):
        with pytest.raises(error, match=words):
            sharded(ring.line(2), **options)(q, k, v, gate, m, z)

    refused(
        ValueError, "segment_size must divide the tokens of each rank, 48, got 10", segment_size=10
    )
    refused(ValueError, "the tokens of each rank, 48, got 96; take a divisor", segment_size=96)
    refused(ValueError, "segment_size must be at least 1", segment_size=0)
    refused(ValueError, "update must be one of 'linear' or 'delta'", update="sum")
    refused(ValueError, "feature_map must be 'elu' or a function", feature_map="relu")
    words = "spec belongs to global arrays, but infini_attention"
    refused(ValueError, words, spec=X)
    refused(ValueError, "local_key must have shape", local_key=v)
    run = partial(ba.infini_attention, segment_size=8, mesh=ring.line(2), spec=X)
    with pytest.raises(TypeError, match=r"memory must be a pair of arrays \(M, z\)"):
        run(q, k, v, gate, memory=m)
    with pytest.raises(ValueError, match=r"memory\[1\] must have shape \(2, 2, 16\)"):
        run(q, k, v, gate, memory=(m, m))
    with pytest.raises(ValueError, match=r"gate must have shape \(4,\), \[heads\]"):
        run(q, k, v, gate[:2])
