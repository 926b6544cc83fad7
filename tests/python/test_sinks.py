"""Sinks give right values and gradients under transformations and on meshes, or clear errors."""

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import platforms
import pytest
import ring
from bounds import check, close
from burst_attention._attention.sinks import gradient, join
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import dense
from test_cuda_lowering import GPU, abstract_mesh, calls, lowered, shapes

pytestmark = pytest.mark.oldest_jax

SHAPES = [(2, 32, 4, 32), (2, 32, 2, 32), (2, 32, 2, 32), (4,), (2, 32, 4, 32)]
NAMES = ("o", "dq", "dk", "dv", "dz")


def dense_with_sinks(q, k, v, sinks, dout, dlse, *, causal):
    """Computes the reference from arguments in this file's order."""
    return dense(q, k, v, dout, dlse, causal=causal, sinks=sinks)


def sharded(mesh, spec=ring.SPEC, sinks_spec=None, check_vma=True, **options):
    """Returns `attention` with sinks as a function of global arrays, which gives (out, lse)."""

    def local(q, k, v, sinks):
        return ba.attention(
            q, k, v, sinks=sinks, axis_name="context", return_residual=True, **options
        )

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(spec, spec, spec, P("tensor") if sinks_spec is None else sinks_spec),
        out_specs=(spec, P(*spec[:3])),
        check_vma=check_vma,
    )


def inputs(*leading, seed=0, dtype="float32", problem=SHAPES):
    """Returns q, k, v, sinks, dout and dlse; a sink weighs about as much as all keys together."""
    *qkv, sinks, dout = [(*leading, *shape) for shape in problem]
    q, k, v, dout = ring.normal(seed, *qkv, dout, dtype=dtype)
    sinks, dlse = ring.normal(seed + 1, sinks, dout.shape[:-1], dtype=np.float32)
    return q, k, v, sinks + np.float32(np.log(q.shape[-3])), dout, dlse


CASES = [
    # mesh, layout, causal, dtype, tokens of a rank, group size, backward
    ((1, 1, 1), "contiguous", True, "float32", 33, 1, "auto"),
    ((1, 1, 1), "zigzag", False, "bfloat16", 320, 4, "auto"),
    ((1, 2, 1), "striped", True, "bfloat16", 150, 2, "keys"),
    ((1, 2, 1), "zigzag", True, "float32", 40, 4, "queries"),
    ((1, 4, 1), "contiguous", False, "float32", 7, 2, "keys"),
    ((1, 4, 1), "zigzag", True, "bfloat16", 66, 1, "queries"),
    ((1, 8, 1), "striped", True, "float32", 5, 1, "auto"),
    ((1, 8, 1), "contiguous", True, "bfloat16", 1, 2, "auto"),
    ((1, 8, 1), "zigzag", False, "float16", 36, 2, "auto"),
    ((2, 2, 2), "striped", False, "bfloat16", 9, 4, "queries"),
    ((2, 4, 1), "zigzag", False, "float32", 80, 2, "auto"),
    ((1, 4, 2), "contiguous", True, "float32", 80, 2, "auto"),
]


@pytest.mark.parametrize(
    ("sizes", "layout", "causal", "dtype", "tokens", "group", "backward"),
    CASES,
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_ring_with_sinks_equals_dense(sizes, layout, causal, dtype, tokens, group, backward):
    mesh, size = ring.mesh(*sizes), sizes[1]
    shape, kv_shape = ((2, size * tokens, heads, 32) for heads in (2 * group, 2))
    problem = [shape, kv_shape, kv_shape, (2 * group,), shape]
    q, k, v, sinks, dout, dlse = inputs(seed=tokens, dtype=dtype, problem=problem)
    expected = dense_with_sinks(q, k, v, sinks, dout, dlse, causal=causal)
    function = sharded(mesh, is_causal=causal, layout=layout, backward=backward)
    *qkv, g, h = ring.put(mesh, *ring.stored(layout, size, q, k, v, dout, dlse))
    (o, lse), (*grads, dz) = ring.gradients(function)((*qkv, sinks), (g, h))
    arrays = ring.restored(layout, size, o, lse, *grads)
    names = ("o", "lse", "dq", "dk", "dv", "dz")
    check(dict(zip(names, (*arrays, dz), strict=True)), expected, dout, dtype)


@pytest.mark.parametrize("dtype", platforms.dtypes("float32", "bfloat16"))
def test_sinks_that_weigh_nothing_change_no_bit(dtype):
    """As in gpt-oss, eight query heads share one key/value head of 64 columns."""
    problem = [(1, 320, 8, 64), (1, 320, 1, 64), (1, 320, 1, 64), (8,), (1, 320, 8, 64)]
    q, k, v, _, *cotangents = inputs(dtype=dtype, problem=problem)
    options = {"is_causal": True, "layout": "zigzag"}
    plain = ring.sharded(ring.line(2), return_residual=True, **options)
    expected = ring.gradients(plain)((q, k, v), tuple(cotangents))
    run = ring.gradients(sharded(ring.line(2), **options))
    for sink in (-np.inf, -1e30):
        results, (*grads, dz) = run((q, k, v, np.full(8, sink, np.float32)), tuple(cotangents))
        assert jax.tree.all(jax.tree.map(np.array_equal, (results, tuple(grads)), expected))
        assert np.array_equal(dz, np.zeros(8))


@pytest.mark.parametrize("dtype", platforms.dtypes("float32", "bfloat16"))
def test_rows_that_see_nothing(dtype):
    """Half of the rows have o = 0 and lse = −inf, and one of two heads has no sink."""
    o, dout = ring.normal(0, (1, 6, 2, 8), (1, 6, 2, 8), dtype=dtype)
    lse, dlse = ring.normal(1, (1, 6, 2), (1, 6, 2))
    sinks = np.array([0.5, -np.inf], np.float32)
    o[:, ::2], lse[:, ::2] = 0, -np.inf
    joined, joined_lse = map(np.asarray, jax.jit(join)(o, lse, sinks))
    assert np.array_equal(joined[:, ::2], np.zeros((1, 3, 2, 8)))
    assert np.array_equal(joined_lse[:, ::2], np.broadcast_to(sinks, (1, 3, 2)))
    assert np.array_equal(joined[:, :, 1], o[:, :, 1].astype(np.float32))
    assert np.array_equal(joined_lse[:, :, 1], lse[:, :, 1])
    dz = jax.jit(gradient)(sinks[None], joined, joined_lse, dout, dlse)[0]
    # Such a row's lse is the sink, and its output depends on nothing.
    (seeing,) = jax.jit(gradient)(
        sinks[None], joined[:, 1::2], joined_lse[:, 1::2], dout[:, 1::2], dlse[:, 1::2]
    )
    assert np.allclose(dz, seeing + np.array([dlse[:, ::2, 0].sum(), 0]), atol=1e-6)
    assert dz[1] == 0


def loss(function, q, k, v, sinks, dout, dlse):
    out, lse = function(q, k, v, sinks)
    return jnp.sum(out * dout) + jnp.sum(lse * dlse)


def test_gradients_inside_and_outside_of_shard_map():
    """All devices share the sinks, so the sinks' gradient is the sum over devices."""
    mesh, arrays = ring.mesh(2, 4, 1), inputs()
    expected = dense_with_sinks(*arrays, causal=True)

    def local(*arrays):
        def one(q, k, v, sinks):
            return ba.attention(
                q, k, v, sinks=sinks, axis_name="context", is_causal=True, return_residual=True
            )

        return jax.grad(loss, (1, 2, 3, 4))(one, *arrays)

    spec, rows = ring.SPEC, P("data", "context")
    inside = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(spec, spec, spec, P(), spec, rows),
        out_specs=(spec, spec, spec, P()),
    )
    found = [jax.jit(inside)(*arrays)]
    for check_vma in (True, False):
        outside = sharded(mesh, check_vma=check_vma, is_causal=True)
        found.append(jax.jit(jax.grad(loss, (1, 2, 3, 4)), static_argnums=0)(outside, *arrays))
    for grads in found:
        check(dict(zip(NAMES[1:], grads, strict=True)), expected, arrays[4])


def test_results_vary_over_the_axes_of_the_sinks_too():
    def local(q, k, v, sinks):
        out = ba.attention(q, k, v, sinks=sinks, axis_name="context")
        assert jax.typeof(out).manual_axis_type.varying == {"context", "tensor"}
        return out

    spec = P(None, "context")
    function = jax.shard_map(
        local,
        mesh=ring.mesh(1, 2, 2),
        in_specs=(spec, spec, spec, P("tensor")),
        out_specs=P(None, "context", "tensor"),
    )
    q, k, v, sinks, *_ = inputs()
    assert jax.eval_shape(function, q, k, v, np.tile(sinks, 2)).shape == (2, 32, 8, 32)


@pytest.mark.parametrize("mapped", [(None, 0), (0, None), (1, 1)])
def test_vmap(mapped):
    """vmap maps the sinks, the other arrays, or both along other axes."""
    arrays = inputs(3)
    mesh, (axis, sinks_axis) = ring.line(2), mapped
    *rest, sinks = (*arrays[:3], *arrays[4:], arrays[3])
    rest = [x[0] if axis is None else np.moveaxis(x, 0, axis) for x in rest]
    sinks = sinks[0] if sinks_axis is None else np.moveaxis(sinks, 0, sinks_axis)
    function = sharded(mesh, is_causal=True)

    def one(rest, sinks):
        q, k, v, dout, dlse = rest
        return jax.grad(loss, 4)(function, q, k, v, sinks, dout, dlse)

    found = jax.jit(jax.vmap(one, in_axes=mapped))(rest, sinks)
    for index in range(3):
        q, k, v, dout, dlse = (x if axis is None else np.take(x, index, axis) for x in rest)
        z = sinks if sinks_axis is None else np.take(sinks, index, sinks_axis)
        expected = dense_with_sinks(q, k, v, z, dout, dlse, causal=True)
        check({"dz": found[index]}, expected, dout)


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scan"])
def test_checkpoint_runs_the_ring_once_under_the_policy(scan):
    """Without the policy the ring runs twice, for the same gradients."""
    x = inputs()[0]
    layers = (*ring.normal(1, (2, 3, 32), dtype=x.dtype), *ring.normal(2, (2, 4)))
    function = sharded(ring.line(4), is_causal=True)

    def layer(x, parameters):
        weights, sinks = parameters
        return x + function(*(x * weight for weight in weights), sinks)[0], None

    def run(policy):
        step = jax.checkpoint(layer, policy=policy)

        def scanned(layers):
            y = x
            if scan:
                y = jax.lax.scan(step, y, layers)[0]
            else:
                for parameters in zip(*layers, strict=True):
                    y = step(y, parameters)[0]
            return jnp.sum(y**2)

        compiled = jax.jit(jax.grad(scanned)).lower(layers).compile()
        text, count = compiled.as_text(), 1 if scan else 2
        for name, times in (("forward", 1 if policy else 2), ("backward", 1)):
            assert text.count(f'_call_target="burst_attention_{name}"') == times * count
        return compiled(layers)

    close(run(ba.save_attention), run(None))


@pytest.mark.parametrize("sinks_spec", [P("tensor"), P()], ids=["sharded", "whole"])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_global_arrays(axis_type, sinks_spec):
    """Eight query heads lie in four shards, and two key/value heads stay whole."""
    mesh = ring.mesh(1, 2, 4, axis_type=axis_type)
    problem = [(1, 24, 8, 32), (1, 24, 2, 32), (1, 24, 2, 32), (8,), (1, 24, 8, 32)]
    arrays = inputs(problem=problem)
    q, dout, dlse = ring.put(mesh, arrays[0], *arrays[4:])
    k, v = ring.put(mesh, *arrays[1:3], spec=P("data", "context"))
    sinks = jax.device_put(arrays[3], NamedSharding(mesh, sinks_spec))
    options = {"mesh": mesh, "spec": ring.SPEC} if axis_type == AxisType.Auto else {}

    def function(q, k, v, sinks):
        return ba.dot_product_attention(
            q, k, v, sinks=sinks, is_causal=True, return_residual=True, **options
        )

    (o, lse), grads = ring.gradients(function)((q, k, v, sinks), (dout, dlse))
    expected = dense_with_sinks(*arrays, causal=True)
    names = ("o", "lse", "dq", "dk", "dv", "dz")
    check(dict(zip(names, (o, lse, *grads), strict=True)), expected, arrays[4])
    if axis_type == AxisType.Explicit:
        assert grads[3].sharding.is_equivalent_to(sinks.sharding, 1)


def test_sinks_of_the_host_on_an_explicit_mesh():
    """numpy arrays and arrays on no mesh count as whole."""
    mesh, (*arrays, sinks, dout, dlse) = ring.mesh(1, 2, 2, axis_type=AxisType.Explicit), inputs()
    expected = dense_with_sinks(*arrays, sinks, dout, dlse, causal=False)
    qkv = ring.put(mesh, *arrays)
    for given in (sinks, jnp.asarray(sinks)):
        out = jax.jit(ba.dot_product_attention)(*qkv, sinks=given)
        check({"o": out}, expected, dout)


def test_explicit_sinks_on_other_axes_are_refused():
    mesh, (*arrays, sinks, _, _) = ring.mesh(2, 2, 2, axis_type=AxisType.Explicit), inputs()
    qkv = ring.put(mesh, *arrays)
    sinks = jax.device_put(sinks, NamedSharding(mesh, P("data")))
    words = r"sinks must be sharded like the heads of query, .*'tensor'.* got .*'data'.*reshard"
    with pytest.raises(ValueError, match=words):
        ba.dot_product_attention(*qkv, sinks=sinks)


@pytest.mark.parametrize(
    ("kind", "words", "bad"),
    [
        (TypeError, "sinks must be an array, got str", "zeros"),
        (TypeError, "sinks must be an array, got float", 0.0),
        (TypeError, "sinks must have a float type, .* got int32", np.zeros(4, np.int32)),
        (TypeError, "sinks must have a float type, .* got bool", np.zeros(4, bool)),
        (ValueError, r"shape \(4,\), one logit .* got shape \(\)(?!;)", np.float32(0)),
        (ValueError, r"shape \(4,\), .* got shape \(2,\)(?!;)", np.zeros(2, np.float32)),
        (ValueError, r"shape \(4,\), .* got shape \(1, 4\)(?!;)", np.zeros((1, 4), np.float32)),
        (ValueError, r"got shape \(8,\); where heads are sharded", np.zeros(8, np.float32)),
    ],
)
def test_sinks_that_do_not_fit(kind, words, bad):
    q, k, v, *_ = inputs()
    with pytest.raises(kind, match=words):
        ring.sharded(ring.line(2), sinks=bad)(q, k, v)
    with pytest.raises(kind, match=words):
        ba.dot_product_attention(q, k, v, mesh=ring.line(2), spec=ring.SPEC, sinks=bad)


@pytest.mark.parametrize("empty", [0, 1])
def test_nothing_to_compute(empty):
    """Without batch entries or tokens, the sinks' gradient is zero."""
    q, k, v, sinks, dout, dlse = inputs()
    q, k, v, dout, dlse = (np.take(x, [], empty) for x in (q, k, v, dout, dlse))
    run = ring.gradients(sharded(ring.line(2)))
    (out, lse), grads = run((q, k, v, sinks), (dout, dlse))
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    assert np.array_equal(grads[3], np.zeros(4))


def test_second_derivative():
    q, k, v, sinks, *_ = inputs()
    function = sharded(ring.line(2))

    def of_sinks(sinks):
        return jnp.sum(function(q, k, v, sinks)[0] ** 2)

    with pytest.raises(NotImplementedError, match="second derivatives of burst_attention"):
        jax.jit(jax.hessian(of_sinks))(sinks)


def test_calls_on_gpus_do_not_know_of_sinks():
    function = sharded(abstract_mesh(GPU))
    q, k, v = shapes()
    sinks = jax.ShapeDtypeStruct((q.shape[2],), jnp.float32)

    def run(*operands):
        results, pullback = jax.vjp(function, *operands)
        return pullback(results)

    forward, backward = calls(lowered(run, (q, k, v, sinks)))
    shard, kv, lse = "2x256x2x64xbf16", "2x256x1x64xbf16", "2x256x2xf32"
    assert (forward.operands, forward.results[:2]) == ([shard, kv, kv], [shard, lse])
    assert backward.operands == [shard, kv, kv, shard, lse, shard, lse]
