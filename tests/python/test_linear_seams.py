"""Linear attention takes what models hand over: shared heads, a scale, and global arrays."""

import re
from functools import partial

import burst_attention as ba
import case_list
import jax
import jax.numpy as jnp
import numpy as np
import platforms
import pytest
import ring
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from linear_cases import X, assert_right, found, grouped, inputs, limit
from linear_reference import recurrence
from long import some

NAMES = ("o", "state", "dq", "dk", "dv", "dlog_decay", "dfirst")
SCALE = 0.25 if platforms.current().rounds else 0.3
"""The factor on queries; GPUs round their product to 16 bits, which a power of two leaves exact."""
HEADS = case_list.of("linear", "own_heads")
"""Heads of query, key and value."""


@pytest.mark.parametrize("own_heads", some(HEADS, 2), ids=str)
@pytest.mark.parametrize("method", ["ring", "all_gather", "in_turn"])
def test_heads_are_shared_and_queries_scaled(own_heads, method):
    arrays = grouped(4, 70, own_heads, 16, 24)
    got = found(ring.line(4), arrays, method=method, scale=SCALE)
    assert_right(got, arrays, scale=SCALE)


@pytest.mark.needs("host")
def test_the_first_segment_begins_with_the_initial_state():
    arrays = inputs(1, 40, 2, 1, 16, 16, 0.9)
    ids = np.broadcast_to(np.repeat(np.array([5, 6], np.int32), [25, 15]), (2, 40))
    got = found(ring.line(1), arrays, segment_ids=ids)
    arrays[3][:, 25] = -np.inf
    assert_right(got, arrays)


@pytest.mark.needs("host")
def test_the_scale_is_not_rounded_to_16_bits():
    arrays = grouped(1, 300, (2, 2, 4), 32, 16, "bfloat16")
    assert_right(found(ring.line(1), arrays, scale=0.3), arrays, "bfloat16", scale=0.3)


@pytest.mark.needs("host")
def test_no_head_is_repeated_in_memory():
    q, k, v, logs, *_ = grouped(2, 16, (1, 1, 4), 8, 16)
    attend = partial(ba.linear_attention, axis_name="context", method="ring")
    function = jax.shard_map(
        lambda q, k, v, logs: attend(q, k, v, log_decay=logs),
        mesh=ring.line(2),
        in_specs=(X,) * 4,
        out_specs=X,
    )
    loss = jax.value_and_grad(lambda *x: function(*x).sum(), (0, 1, 2, 3))
    text = jax.jit(loss).lower(q, k, v, logs).as_text()
    calls = re.findall(r"custom_call @burst_attention_linear_(\w+)\(.*?: \((.*?)\) ->", text)
    one, four, decays = "tensor<2x16x1x8xf32>", "tensor<2x16x4x16xf32>", "tensor<2x16x4xf32>"
    operands = {name: types.split(", ")[:4] for name, types in calls}
    assert operands["forward"] == operands["backward"] == [one, one, four, decays]
    assert operands["state"][:3] == [one, four, decays]


@pytest.mark.needs("products")
@pytest.mark.parametrize("own_heads", HEADS[1:], ids=str)
def test_without_order_heads_are_shared_too(own_heads):
    q, k, v, _, first, dout, dlast = grouped(4, 12, own_heads, 16, 8)
    attend = partial(ba.linear_attention, axis_name="context", is_causal=False, scale=0.5)
    function = jax.shard_map(
        lambda q, k, v, first: attend(q, k, v, initial_state=first, return_state="replicated"),
        mesh=ring.line(4),
        in_specs=(X, X, X, P()),
        out_specs=(X, P()),
    )
    got, gradients = ring.gradients(function)((q, k, v, first), (dout, dlast))
    # Queries at the last of twice as many tokens see the sum over all tokens.
    twice = lambda *parts: np.concatenate(parts, axis=1)  # noqa: E731
    late = [twice(0 * q, q), twice(k, 0 * k), twice(v, 0 * v)]
    zeros = np.zeros((2, 2 * q.shape[1], max(own_heads)))
    want = recurrence(*late, zeros, first, twice(0 * dout, dout), dlast, 0.5)
    tokens = q.shape[1]
    want |= {"o": want["o"][:, tokens:], "dq": want["dq"][:, tokens:]}
    want |= {name: want[name][:, :tokens] for name in ("dk", "dv")}
    names = ("o", "state", "dq", "dk", "dv", "dfirst")
    for name, x in zip(names, got + gradients, strict=True):
        error = np.linalg.norm(x - want[name]) / np.linalg.norm(want[name])
        assert error <= limit(1e-5), (name, error)


@pytest.mark.needs("products")
def test_single_tokens_continue_with_shared_heads():
    q, k, v, logs, first, *_ = arrays = grouped(1, 20, (2, 1, 4), 16, 8)
    want, state, outs = recurrence(*arrays, 0.3), first, []
    step = jax.jit(partial(ba.linear_attention_step, scale=0.3))
    for t in range(20):
        out, state = step(q[:, t], k[:, t], v[:, t], state, log_decay=logs[:, t])
        outs.append(out)
    assert np.allclose(np.stack(outs, 1), want["o"], limit(1e-5), limit(1e-5))
    assert np.allclose(state, want["state"], limit(1e-5), limit(1e-5))


STATE = P("data", "tensor")
SPECS = (*[ring.SPEC] * 3, P(*ring.AXES), STATE, ring.SPEC, STATE)
"""The shardings of what `grouped` returns."""


def on_global_arrays(mesh, arrays, whole=(), **options):
    """Returns the results that `recurrence` names, from global arrays on a mesh.

    Arrays whose indices are in ``whole`` are not cut, and few heads of q, k and v neither.
    """
    few = [i for i, x in enumerate(arrays[:3]) if x.shape[2] < mesh.shape["tensor"]]
    specs = [P() if i in whole else P("data", "context") if i in few else spec
             for i, spec in enumerate(SPECS)]  # fmt: skip
    *primals, dout, dlast = (
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)
    )

    def function(q, k, v, logs, first):
        results = ba.linear_attention(
            q, k, v, log_decay=logs, initial_state=first, return_state=True, **options
        )
        if "spec" not in options:
            shardings = [jax.typeof(x).sharding.spec for x in results]
            assert shardings == [ring.SPEC, P(*STATE, None, None)]
        return results

    results, gradients = ring.gradients(function)(tuple(primals), (dout, dlast))
    return dict(zip(NAMES, map(ring.on_host, results + gradients), strict=True))


@pytest.mark.parametrize("sizes", some([(2, 2, 2), (1, 8, 1), (1, 2, 4)], 2), ids=str)
def test_types_of_an_explicit_mesh_say_all(sizes):
    mesh = ring.mesh(*sizes, axis_type=AxisType.Explicit)
    arrays = grouped(sizes[1], 40, (4, 4, 4), 16, 8)
    assert_right(on_global_arrays(mesh, arrays), arrays)


@pytest.mark.parametrize("own_heads", some([(2, 1, 8), (8, 2, 2), (4, 4, 8)], 2), ids=str)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_few_heads_stay_whole(axis_type, own_heads):
    """Four devices share heads of query or key that are fewer; gradients are summed."""
    mesh = ring.mesh(1, 2, 4, axis_type=axis_type)
    arrays = grouped(2, 40, own_heads, 16, 8)
    options = {"scale": SCALE, "method": "ring"}
    if axis_type == AxisType.Auto:
        options |= {"spec": ring.SPEC, "axis_name": "context"}
    assert_right(on_global_arrays(mesh, arrays, **options), arrays, scale=SCALE)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_decays_and_states_may_come_whole(axis_type):
    mesh = ring.mesh(2, 2, 2, axis_type=axis_type)
    arrays = grouped(2, 40, (2, 2, 4), 16, 8)
    options = {} if axis_type == AxisType.Explicit else {"spec": ring.SPEC}
    assert_right(on_global_arrays(mesh, arrays, whole=(3, 4), **options), arrays)


@pytest.mark.parametrize("cut", [True, False])
def test_global_decays_of_heads_and_segments(cut):
    """Arrays that are cut or whole give the bits of the call inside shard_map."""
    mesh = ring.mesh(2, 2, 2, axis_type=AxisType.Explicit)
    q, k, v, *_ = inputs(2, 30, 4, 2, 16, 8, 1.0)
    decay = np.array([0.5, 0.9, 1, 0.99], np.float32)
    ids = np.repeat(np.array([[0, 0, 1, 1, 1, -1], [3, 2, 2, 2, 2, 2]], np.int32), 10, axis=1)
    attend = partial(ba.linear_attention, return_state=True)
    inside = jax.shard_map(
        lambda q, k, v, decay, ids: attend(q, k, v, axis_name="context", decay=decay,
                                           segment_ids=ids, return_state="replicated"),
        mesh=ring.mesh(2, 2, 2),
        in_specs=(*[ring.SPEC] * 3, P("tensor"), P("data", "context")),
        out_specs=(ring.SPEC, STATE),
    )  # fmt: skip
    want = jax.jit(inside)(q, k, v, decay, ids)
    qkv = ring.put(mesh, q, k, v)
    specs = (P("tensor"), P("data", "context")) if cut else (P(), P())
    others = (jax.device_put(x, NamedSharding(mesh, spec))
              for x, spec in zip((decay, ids), specs, strict=True))  # fmt: skip
    got = jax.jit(lambda *x: attend(*x[:3], decay=x[3], segment_ids=x[4]))(*qkv, *others)
    assert all(np.array_equal(x, y) for x, y in zip(got, want, strict=True))


def test_eagerly_and_nested_in_a_shard_map_over_another_axis():
    mesh = ring.mesh(2, 4, 1)
    q, k, v, logs, *_ = inputs(4, 16, 2, 1, 16, 8, 0.9)
    spec = P(None, "context")
    attend = partial(ba.linear_attention, spec=spec)
    eager = attend(q, k, v, log_decay=logs, mesh=mesh)
    nested = jax.shard_map(
        lambda q, k, v, logs: attend(q, k, v, log_decay=logs),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names={"data"},
    )
    assert np.array_equal(jax.jit(nested)(q, k, v, logs), eager)
    want = recurrence(*inputs(4, 16, 2, 1, 16, 8, 0.9))["o"] * 0
    first = np.zeros((2, 2, 16, 8))
    want = recurrence(q, k, v, logs, first, want, first)["o"]
    assert np.linalg.norm(eager - want) <= limit(2e-6) * np.linalg.norm(want)


def of_shards(return_state, check_vma=True, world=4, **options):
    """Returns `linear_attention` over a line of ranks, with a state that is whole."""

    def local(q, k, v, logs, first):
        return ba.linear_attention(
            q, k, v, axis_name="context", log_decay=logs, initial_state=first,
            return_state=return_state, **options,
        )  # fmt: skip

    return jax.shard_map(
        local, mesh=ring.line(world), in_specs=(*[X] * 4, P()), out_specs=(X, P()),
        check_vma=check_vma,
    )  # fmt: skip


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("method", ["ring", "all_gather", "in_turn"])
@pytest.mark.parametrize("world", some([4, 1]))
def test_a_replicated_state_is_whole(world, method, check_vma):
    *primals, dout, dlast = arrays = inputs(world, 50, 2, 1, 16, 8, 0.95)
    function = of_shards("replicated", check_vma, world, method=method)
    results, gradients = ring.gradients(function)(tuple(primals), (dout, dlast))
    assert_right(dict(zip(NAMES, map(np.asarray, results + gradients), strict=True)), arrays)


def test_without_replicated_the_state_varies():
    primals = inputs(2, 16, 2, 1, 16, 8, 0.95)[:5]
    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(of_shards(True, world=2), *primals)
    # Without tokens the state is the first one.
    q, k, v, logs, first = (x[:, :0] if x.ndim < 4 or x.shape[1] > 2 else x for x in primals)
    assert np.array_equal(of_shards("replicated", world=2)(q, k, v, logs, first)[1], first)


@pytest.mark.parametrize(("method", "more"), [("ring", 0), ("in_turn", 0), ("all_gather", 1)])
def test_what_a_replicated_state_costs(method, more):
    primals = inputs(4, 16, 2, 1, 16, 8, 0.95)[:5]

    def reduced(return_state):
        function = of_shards(return_state, check_vma=False, method=method)
        return jax.jit(function).lower(*primals).as_text().count("stablehlo.all_reduce")

    assert reduced("replicated") == reduced(True) + more


def refused(kind, words, arrays=None, **options):
    given = arrays or ring.normal(0, *[(2, 16, 2, 8)] * 3)
    mesh = {"mesh": ring.mesh(2, 2, 2), "spec": ring.SPEC}
    with pytest.raises(kind, match=words):
        ba.linear_attention(*given, **mesh | options)


@pytest.mark.needs("float32")
def test_a_sequence_that_spec_does_not_shard_is_one_rank():
    arrays = ring.normal(0, *[(2, 16, 2, 8)] * 3)
    whole = ba.linear_attention(*arrays, mesh=ring.mesh(2, 1, 2), spec=P("data", None, "tensor"))
    cut = ba.linear_attention(*arrays, mesh=ring.mesh(2, 2, 2), spec=ring.SPEC)
    assert np.allclose(whole, cut, atol=1e-5)


def test_bad_input():
    q, k, v = ring.normal(0, *[(2, 16, 4, 8)] * 3)
    words = r"must each divide the heads of the result, .*\), got {}"
    refused(ValueError, words.format("4, 3, 4"), (q, k[:, :, :3], v))
    refused(ValueError, words.format("2, 4, 2"), (q[:, :, :2], k, v[:, :, :2]))
    refused(ValueError, words.format("0, 4, 4"), (q[:, :, :0], k, v))
    refused(ValueError, "must have one batch size, got 2, 1, 2", (q, k[:1], v))
    refused(ValueError, "must have one length, since .*, got 16, 16, 8", (q, k, v[:, :8]))
    refused(ValueError, "must have one k_dim, got 8 and 16", (q, np.repeat(k, 2, 3), v))
    refused(ValueError, "v_dim must be a multiple of 8 from 8 to 256, got 4", (q, k, v[..., :4]))
    refused(TypeError, "must have one dtype", (q, k, v.astype(np.float16)))
    refused(TypeError, "scale must be a Python number.*multiply query", scale=jnp.float32(2))
    for wrong in (np.nan, np.inf, 1e39):
        refused(ValueError, "scale must be within the range of float32", scale=wrong)
    refused(ValueError, "return_state must be True, False or 'replicated', got 'all'",
            return_state="all")  # fmt: skip
    refused(TypeError, "return_state must be True or False", return_state=1)
    refused(ValueError, r"decay must have shape \(2,\)", decay=np.ones(3, np.float32))
    refused(ValueError, "decay must be from 0 to 1", decay=np.array([1, 2], np.float32))
    refused(ValueError, "axis_name='data' must shard the sequence", axis_name="data")
    refused(TypeError, "mesh must be a jax.sharding.Mesh", mesh="context")
    refused(ValueError, "seq of query must be a multiple of 2", (q[:, :15], k[:, :15], v[:, :15]))
    with pytest.raises(ValueError, match="spec is needed"):
        ba.linear_attention(*ring.put(ring.mesh(2, 2, 2), q, k, v))


def test_heads_and_shardings_that_do_not_fit_are_refused():
    shapes = [(1, 16, heads, 8) for heads in (3, 3, 12)]
    three = ring.normal(0, *shapes)
    mesh = ring.mesh(1, 2, 4)
    words = "query heads and the 4 shards of the value heads must divide one another, got 3"
    refused(ValueError, words, three, mesh=mesh)
    mesh = ring.mesh(1, 2, 4, axis_type=AxisType.Explicit)
    *qkv, logs = ring.put(mesh, *ring.normal(0, *[(2, 16, 4, 8)] * 3, (2, 16, 4)))
    wrong = jax.device_put(logs, NamedSharding(mesh, P(None, "context")))
    words = "log_decay must be sharded like the result, .*'tensor'.* got .*use jax.reshard"
    refused(ValueError, words, qkv, mesh=None, spec=None, log_decay=wrong)
    v = jax.device_put(qkv[2], NamedSharding(mesh, P(None, "context")))
    words = "key and value must be sharded alike"
    refused(ValueError, words, (*qkv[:2], v), mesh=None, spec=None)


@pytest.mark.parametrize("name", ["mesh", "spec"])
def test_mesh_and_spec_inside_shard_map_are_refused(name):
    qkv, mesh = ring.normal(0, *[(1, 16, 2, 8)] * 3), ring.line(2)
    given = {"mesh": mesh, "spec": X}

    def run(**options):
        function = partial(ba.linear_attention, **options)
        jax.shard_map(function, mesh=mesh, in_specs=(X,) * 3, out_specs=X)(*qkv)

    with pytest.raises(ValueError, match=f"^{name} belongs to global arrays"):
        run(axis_name="context", **{name: given[name]})
    with pytest.raises(ValueError, match="^linear_attention needs axis_name inside jax.shard_map"):
        run()
    with pytest.raises(ValueError, match="must be an axis of the surrounding jax.shard_map"):
        run(axis_name="ring")


def test_arrays_are_cast_as_in_attention():
    """Other float and integer types give what float32 and int32 give."""
    q, k, v, logs, state, *_ = inputs(1, 16, 4, 4, 16, 16, 1.0)
    place = {"mesh": ring.line(1), "spec": X, "return_state": True}
    ids = np.repeat([[0, -7]] * 2, 8, 1)
    for given in (
        {"decay": np.array([1, 0.5, 0.25, 0]), "initial_state": state.astype(np.float16)},
        {"log_decay": logs.astype(np.float16), "segment_ids": ids},
    ):
        narrow = {"i": np.int32, "f": np.float32}
        exact = {name: x.astype(narrow[x.dtype.kind]) for name, x in given.items()}
        found, expected = (ba.linear_attention(q, k, v, **place, **x) for x in (given, exact))
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_array_equal(x, y)
