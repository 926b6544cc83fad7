"""Attention on global arrays follows meshes, specs and shared heads, with right gradients."""

import bounds
import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import platforms
import pytest
import ring
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import dense

pytestmark = [pytest.mark.cudnn, pytest.mark.oldest_jax]

SIZES = [(1, 8, 1), (2, 4, 1), (1, 4, 2), (2, 2, 2)]


def inputs(heads=4, kv_heads=2, seq=48):
    dim = platforms.columns(32)
    shapes = [(2, seq, heads, dim)] + [(2, seq, kv_heads, dim)] * 2 + [(2, seq, heads, dim)]
    return ring.normal(heads + kv_heads, *shapes)


def check(found, arrays):
    """Checks (out, gradients) of causal attention against the reference."""
    q = arrays[0]
    expected = dense(*arrays, np.zeros(q.shape[:3]), causal=True)
    out, grads = found
    named = dict(zip(("o", "dq", "dk", "dv"), (out, *grads), strict=True))
    bounds.check(named, expected, arrays[3])


@pytest.mark.parametrize("sizes", SIZES)
def test_explicit_mesh_is_inferred(sizes):
    """Mesh, spec and axis come from the types, and results and gradients keep them."""
    mesh, arrays = ring.mesh(*sizes, axis_type=AxisType.Explicit), inputs()
    *qkv, dout = ring.put(mesh, *arrays)

    def function(q, k, v):
        out = ba.dot_product_attention(q, k, v, is_causal=True)
        assert jax.typeof(out).sharding.spec == jax.typeof(q).sharding.spec
        return out

    out, grads = found = ring.gradients(function)(qkv, dout)
    check(found, arrays)
    for x, like in zip((out, *grads), (qkv[0], *qkv), strict=True):
        assert x.sharding.is_equivalent_to(like.sharding, x.ndim)


@pytest.mark.parametrize("sizes", SIZES)
def test_auto_mesh_with_spec(sizes):
    mesh, arrays = ring.mesh(*sizes), inputs()
    *qkv, dout = ring.put(mesh, *arrays)

    def function(q, k, v):
        return ba.dot_product_attention(q, k, v, mesh=mesh, spec=ring.SPEC, is_causal=True)

    run = ring.gradients(function)
    check(run(qkv, dout), arrays)
    assert "all-gather" not in run.lower(qkv, dout).compile().as_text()


def test_mesh_comes_from_the_arrays_or_from_set_mesh():
    mesh, arrays = ring.mesh(1, 4, 1), inputs()

    def function(q, k, v):
        return ba.dot_product_attention(q, k, v, spec=ring.SPEC, is_causal=True)

    *qkv, dout = ring.put(mesh, *arrays)
    check(ring.gradients(function)(qkv, dout), arrays)
    check((function(*qkv), ring.gradients(function)(qkv, dout)[1]), arrays)
    with jax.set_mesh(mesh):
        check(ring.gradients(function)(arrays[:3], arrays[3]), arrays)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layout": "zigzag", "order": "sequence", "schedule": "hybrid"},
        pytest.param(
            {"schedule": "ulysses", "implementation": "xla"}, marks=pytest.mark.needs("products")
        ),
    ],
    ids=str,
)
def test_a_sequence_that_spec_does_not_shard_is_one_rank(axis_type, options):
    mesh, spec, arrays = (
        ring.mesh(2, 1, 2, axis_type=axis_type),
        P("data", None, "tensor"),
        inputs(),
    )
    *qkv, dout = ring.put(mesh, *arrays, spec=spec)

    def run(**more):
        def function(q, k, v):
            return ba.dot_product_attention(q, k, v, mesh=mesh, is_causal=True, **options, **more)

        return ring.gradients(function)(qkv, dout)

    check(run(spec=spec), arrays)
    check(run(spec=spec, axis_name="context"), arrays)
    if axis_type == AxisType.Explicit and "order" not in options:
        with pytest.raises(ValueError, match=r"but is not; .*or pass spec=P\(\) for one rank"):
            run()


def test_axis_of_one_device():
    arrays = inputs()
    mesh = ring.mesh(2, 1, 1, axis_type=AxisType.Explicit)
    *qkv, dout = ring.put(mesh, *arrays)

    def function(q, k, v):
        return ba.dot_product_attention(q, k, v, axis_name="context", is_causal=True)

    check(ring.gradients(function)(qkv, dout), arrays)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_few_key_heads_stay_whole_and_owned_ones_are_sliced(axis_type, kv_heads):
    """Four shards of eight query heads share one or two key/value heads; gradients are summed."""
    mesh, arrays = ring.mesh(1, 2, 4, axis_type=axis_type), inputs(8, kv_heads)
    q, dout = ring.put(mesh, arrays[0], arrays[3])
    k, v = ring.put(mesh, *arrays[1:3], spec=P("data", "context"))
    options = {"is_causal": True}
    if axis_type == AxisType.Auto:
        options |= {"mesh": mesh, "spec": ring.SPEC}

    def function(q, k, v):
        return ba.dot_product_attention(q, k, v, **options)

    check(ring.gradients(function)((q, k, v), dout), arrays)


def test_return_residual_and_layout():
    mesh, (q, k, v, _) = ring.mesh(2, 4, 1, axis_type=AxisType.Explicit), inputs()

    @jax.jit
    def run(*qkv):
        qkv = [ba.to_layout(x, 4, "zigzag") for x in qkv]
        out, lse = ba.dot_product_attention(
            *qkv, is_causal=True, layout="zigzag", return_residual=True
        )
        return [ba.from_layout(x, 4, "zigzag") for x in (out, lse)]

    out, lse = run(*ring.put(mesh, q, k, v))
    expected = dense(q, k, v, q, lse, causal=True)
    assert lse.dtype == jnp.float32
    bounds.check({"o": out, "lse": lse}, expected, q)


def test_nested_in_a_shard_map_over_another_axis():
    """Attention's shard_map runs inside a pipeline's shard_map over another axis.

    The test runs the forward pass only: JAX itself can't lower the gradient of nested shard_maps
    that keep residuals.
    """
    mesh, (q, k, v, _) = ring.mesh(2, 4, 1), inputs()

    def local(q, k, v):
        return ba.dot_product_attention(q, k, v, spec=P(None, "context"), is_causal=True)

    function = jax.shard_map(
        local, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    expected = ring.sharded(mesh, is_causal=True)(q, k, v)
    assert np.array_equal(jax.jit(function)(q, k, v), expected)


def refused(kind, words, *arrays, **options):
    with pytest.raises(kind, match=words):
        ba.dot_product_attention(*arrays, **options)


def test_auto_mesh_without_spec_is_refused():
    mesh = ring.mesh(2, 4, 1)
    qkv = ring.put(mesh, *inputs()[:3])
    refused(
        ValueError, r"spec is needed, since mesh axes 'data', 'context', 'tensor' are Auto", *qkv
    )
    refused(ValueError, "spec is needed", *qkv, mesh=mesh)
    with pytest.raises(ValueError, match="spec is needed"):
        jax.jit(ba.dot_product_attention)(*qkv)


def test_specs_that_do_not_fit_are_refused():
    mesh = ring.mesh(2, 4, 1)
    q, k, v, _ = inputs()
    auto = {"mesh": mesh, "spec": ring.SPEC}
    refused(ValueError, "needs a mesh", q, k, v)
    refused(ValueError, "needs a mesh", *map(jnp.asarray, (q, k, v)), spec=ring.SPEC)
    refused(TypeError, "mesh must be a jax.sharding.Mesh, got str", q, k, v, mesh="context")
    refused(TypeError, "spec must be a jax.sharding.PartitionSpec", q, k, v, mesh=mesh, spec="a")
    refused(ValueError, "'sequence' in", q, k, v, mesh=mesh, spec=P("data", "sequence"))
    refused(ValueError, "at most 4 entries", q, k, v, mesh=mesh, spec=P(*[None] * 5))
    words = "which mesh axes cut it, with None for none, got PartitionSpec.UNCONSTRAINED in"
    refused(ValueError, words, q, k, v, mesh=mesh, spec=P(P.UNCONSTRAINED, "context"))
    refused(
        ValueError,
        "head_dim must not be sharded",
        q,
        k,
        v,
        mesh=mesh,
        spec=P(None, "context", None, "data"),
    )
    refused(
        ValueError, "axis_name='data' must shard the sequence", q, k, v, axis_name="data", **auto
    )
    refused(ValueError, "axis_name must be an axis of the mesh", q, k, v, axis_name="ring", **auto)
    refused(ValueError, "an axis of the mesh", q, k, v, axis_name=("a", "b"), **auto)
    pair = ("data", "context")
    refused(ValueError, r"\('data', 'context'\) must shard", q, k, v, axis_name=pair, **auto)
    refused(
        ValueError,
        r"seq of query must be a multiple of 4, .* got 46; .*pad_sequence pads any length",
        q[:, :46],
        k[:, :46],
        v[:, :46],
        **auto,
    )
    refused(
        ValueError,
        r"batch of query must be a .* of 2, .* got 1; pad",
        q[:1],
        k[:1],
        v[:1],
        **auto,
    )


def test_heads_that_no_shard_owns_are_refused():
    q, k, v, _ = inputs(12, 3)
    auto = {"mesh": ring.mesh(1, 2, 4), "spec": ring.SPEC}
    refused(ValueError, "must divide one another, got 3 heads", q, k, v, **auto)
    q, k, v, _ = inputs(12, 6)
    refused(
        ValueError,
        "heads of key must be a multiple of 4, .* got 6; shard",
        q,
        k,
        v,
        **auto,
    )


def test_explicit_types_that_disagree_are_refused():
    mesh = ring.mesh(2, 2, 2, axis_type=AxisType.Explicit)
    q, k, v, _ = ring.put(mesh, *inputs())
    other = jax.device_put(k, NamedSharding(mesh, P("data")))
    refused(ValueError, "query and key must be sharded alike", q, other, other)
    refused(ValueError, "key and value must be sharded alike", q, k, other)
    heads = jax.device_put(k, NamedSharding(mesh, P(None, "context", "data")))
    refused(ValueError, "sharded alike", q, heads, heads)
    refused(
        ValueError, "query must be sharded as .* use jax.reshard", q, k, v, spec=P(None, "data")
    )
    refused(ValueError, "must be sharded over a mesh axis", other, other, other)
    tensor = jax.device_put(q, NamedSharding(mesh, P("data", "context")))
    refused(ValueError, "key heads must be sharded like", tensor, k, v)


def test_inside_shard_map_is_refused():
    mesh = ring.mesh(1, 4, 1)
    q, k, v, _ = inputs()
    function = jax.shard_map(
        ba.dot_product_attention, mesh=mesh, in_specs=ring.SPEC, out_specs=ring.SPEC
    )
    with pytest.raises(ValueError, match=r"takes global arrays.*call burst_attention.attention"):
        function(q, k, v)


def test_options_are_checked_before_the_mesh():
    q, k, v, _ = inputs()
    refused(TypeError, "mask must be bool", q, k, v, None, q)
    refused(TypeError, "key_value_seq_lengths must have an", q, k, v, key_value_seq_lengths=q)
    refused(
        ValueError,
        "segment_ids must be a pair .*differ in length",
        q,
        k[:, :8],
        v[:, :8],
        segment_ids=q,
    )
    refused(
        TypeError,
        "return_residual must be True or False",
        q,
        k,
        v,
        return_residual=1,
        mesh=ring.mesh(1, 4, 1),
        spec=ring.SPEC,
    )
    refused(
        TypeError,
        r"^dot_product_attention\(\) got an unexpected keyword argument 'causal'; .*is_causal",
        q,
        k,
        v,
        causal=True,
        mesh=ring.mesh(1, 4, 1),
        spec=ring.SPEC,
    )
