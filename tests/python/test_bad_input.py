"""Impossible arguments give a helpful error while tracing, and extreme ones a defined result."""

import re

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import platforms
import pytest
import ring
from burst_attention import _checks, _ffi
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P


def qkv(batch=1, seq=8, heads=4, kv_heads=2, dim=32, dtype="float32"):
    shapes = [(batch, seq, heads, dim)] + [(batch, seq, kv_heads, dim)] * 2
    return ring.normal(0, *shapes, dtype=dtype)


def call(*arrays, spec=None, axis_name="context", sizes=(1, 2, 1), **options):
    """Runs `attention` on two devices, or on another mesh."""
    spec = P(None, "context") if spec is None else spec

    def local(*arrays):
        return ba.attention(*arrays, axis_name=axis_name, **options)

    mesh = ring.mesh(*sizes)
    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)(*arrays)


def refused(kind, words, *arrays, **options):
    with pytest.raises(kind, match=words):
        call(*(arrays or qkv()), **options)


def test_a_bias_names_the_alternative():
    words = r"bias of jax.nn.dot_product_attention is not supported .* alibi_slopes covers linear"
    refused(NotImplementedError, words, bias=np.zeros(1))


def test_heads_that_can_not_be_scattered():
    words = (
        "'ulysses' scatters query heads over the 2 ranks of the ring, .* multiple of 2, got 3; "
        "schedule='ring' takes any number of heads, 'hybrid' scatters over the inner of two axes"
    )
    refused(ValueError, words, *qkv(heads=3, kv_heads=1), schedule="ulysses")
    words = (
        "'hybrid' scatters .* over the 2 ranks of the inner axis, .* got 3; .* any number of heads"
    )
    pair = ("data", "context")
    refused(ValueError, words, *qkv(heads=3, kv_heads=1), schedule="hybrid", axis_name=pair)


def test_hybrid_takes_two_axes():
    words = r"needs a pair axis_name=\(outer, inner\): .*got 'context'; .* use 'ulysses' or 'ring'"
    refused(ValueError, words, schedule="hybrid")


def test_misspelt_choices_list_what_there_is():
    refused(
        ValueError,
        "layout must be one of 'contiguous', 'zigzag' or 'striped', got 'zigzg'",
        layout="zigzg",
    )
    refused(
        ValueError, "backward must be one of 'auto', 'keys' or 'queries', got 'key'", backward="key"
    )
    words = "backward_order must be one of 'auto', 'fixed' or 'any', got 'random'"
    refused(ValueError, words, backward_order="random")
    refused(ValueError, "schedule must be one of .*'hybrid', got 'rings'", schedule="rings")
    refused(ValueError, "layout must be one of .*, got None", layout=None)


def test_wrong_rank():
    q, k, v = qkv()
    refused(
        ValueError,
        r"query must have 4 dimensions.*got shape \(8, 4, 32\).*x\[None\]",
        q[0],
        k[0],
        v[0],
        spec=P(),
    )
    refused(ValueError, "key must have 4 dimensions", q, k[None], v, spec=P())


def test_shapes_that_do_not_match():
    q, k, v = qkv()
    refused(ValueError, r"key and value must have one shape but for.*last", q, k, v[:, :, :1])
    refused(ValueError, "one batch size, got 2 and 1", np.repeat(q, 2, 0), k, v)
    refused(ValueError, "one head_dim, got 16 and 32", q[..., :16], k, v)
    refused(ValueError, "multiple of key/value heads.*got 3 and 2; give each", q[:, :, :3], k, v)
    refused(ValueError, "heads must be at least 1, got 0 of query", q[:, :, :0], k, v)
    refused(ValueError, "heads must be at least 1", q, k[:, :, :0], v[:, :, :0])


@pytest.mark.parametrize("dim", [257, 264, 0])
def test_head_dim(dim):
    refused(ValueError, rf"^head_dim must be from 1 to 256, got {dim}\b", *qkv(dim=dim))
    (q, k, _), (*_, v) = qkv(), qkv(dim=dim)
    refused(ValueError, rf"head_dim of value must be from 1 to 256, got {dim}\b", q, k, v)


def test_head_dim_of_linear_attention():
    words = "^k_dim must be a multiple of 8 from 8 to 256, got 36; pad with zeros"
    with pytest.raises(ValueError, match=words):
        ba.linear_attention(*qkv(dim=36), axis_name="context")


def test_dtypes():
    q, k, v = qkv()
    refused(
        TypeError, "query must be float32, bfloat16 or float16, got int32", q.astype("int32"), k, v
    )
    words = f"one dtype, got {q.dtype}, float16 and {q.dtype}"
    refused(TypeError, words, q, k.astype("float16"), v)
    with pytest.raises(TypeError, match="query must be an array, got dict"):
        _checks.arrays({}, k, v)
    with pytest.raises(TypeError, match="got float64; cast to float32"):
        _checks.arrays(q.astype("float64"), k, v)


def test_odd_zigzag_shard():
    refused(
        ValueError,
        "even in layout 'zigzag'.*got 5 of query; use layout 'striped'.*pad_sequence pads",
        *qkv(seq=10),
        layout="zigzag",
    )
    (q, *_), (_, k, v) = qkv(), qkv(seq=10)
    refused(ValueError, "even in layout 'zigzag'.*got 5 of key", q, k, v, layout="zigzag")


def test_scale_and_flags_are_static():
    refused(ValueError, "scale must be finite, got nan", scale=float("nan"))
    refused(TypeError, "scale must be a Python number.*compiled into", scale="half")
    refused(TypeError, "is_causal must be True or False", is_causal="yes")
    refused(TypeError, "return_residual must be True or False", return_residual=1)
    q, k, v = qkv()
    with pytest.raises(TypeError, match=r"scale must be .* got a traced array ~float32\[\]"):
        jax.jit(lambda s: call(q, k, v, scale=s))(1.0)
    with pytest.raises(TypeError, match=r"is_causal must be True or False .* got a traced array"):
        jax.jit(lambda c: call(q, k, v, is_causal=c))(True)
    assert np.array_equal(call(q, k, v, scale=np.float32(0.5)), call(q, k, v, scale=0.5))


def test_scale_beyond_float32():
    words = r"scale must be within the range of float32, from -3.4e\+38 to 3.4e\+38, got "
    for scale in (1e39, -1e39, np.float64(1e300)):
        refused(ValueError, words + re.escape(f"{scale:g}"), scale=scale)
    for scale in (10**400, -(10**5000)):
        refused(ValueError, words + "a number of type int beyond that of float64", scale=scale)


def test_bytes_in_the_other_order():
    q, k, v = qkv(dtype=np.float32)
    swapped = q.astype(">f4")
    words = r"query must be float32, .*, got >f4; .*use x.astype\(x.dtype.newbyteorder\('='\)\)"
    with pytest.raises(TypeError, match=words):
        _checks.arrays(swapped, k, v)
    _checks.arrays(swapped.astype(swapped.dtype.newbyteorder("=")), k, v)


def test_axis_names():
    refused(
        ValueError,
        r"an axis of the surrounding jax.shard_map, one of 'data', .*got 'ring'",
        axis_name="ring",
    )
    refused(
        ValueError, r"one of 'data', .*got \('ring', 'context'\)", axis_name=("ring", "context")
    )
    refused(ValueError, "one mesh axis or two different ones", axis_name=("context", "context"))
    three = {"axis_name": ring.AXES, "spec": P(None, ring.AXES), "sizes": (2, 2, 2)}
    refused(ValueError, "at most two hold", **three)
    refused(
        TypeError, r"axis_name must be the name of a mesh axis, or a pair .*got 1 ", axis_name=1
    )


def test_outside_shard_map():
    q, k, v = qkv()
    words = "must be called inside jax.shard_map.*dot_product_attention"
    for run in (ba.attention, jax.jit(ba.attention, static_argnames="axis_name")):
        with pytest.raises(ValueError, match=words):
            run(q, k, v, axis_name="context")
    with pytest.raises(ValueError, match="a vmap axis has none"):
        jax.vmap(lambda *x: ba.attention(*x, axis_name="context"), axis_name="context")(
            q[None], k[None], v[None]
        )


def test_axes_left_to_the_compiler():
    mesh = ring.mesh(2, 4, 1)
    function = jax.shard_map(
        lambda *x: ba.attention(*x, axis_name="context"),
        mesh=mesh,
        axis_names={"context"},
        in_specs=P(None, "context"),
        out_specs=P(None, "context"),
    )
    with pytest.raises(ValueError, match=r"every mesh axis must be manual .* 'data' is not"):
        jax.jit(function)(*qkv(batch=2))


def abstract_mesh(platform, kind):
    device = AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
    return AbstractMesh((2,), ("context",), axis_types=(AxisType.Auto,), abstract_device=device)


@pytest.mark.parametrize(
    ("platform", "kind"),
    [("tpu", "TPU v5e"), ("gpu", "AMD Instinct MI300X"), ("rocm", "gfx942")],
)
def test_linear_attention_is_plain_jax_on_other_platforms(platform, kind):
    local = jax.shard_map(
        lambda *x: ba.linear_attention(*x, axis_name="context"),
        mesh=abstract_mesh(platform, kind),
        in_specs=P(None, "context"),
        out_specs=P(None, "context"),
    )
    assert "ffi_call" not in str(jax.make_jaxpr(local)(*qkv(dtype="bfloat16")))


def test_second_derivative():
    q, k, v = qkv()
    function = ring.sharded(ring.line(2))

    def loss(q):
        return jnp.sum(function(q, k, v) ** 2)

    words = "second derivatives of burst_attention are not implemented"
    with pytest.raises(NotImplementedError, match=words):
        jax.grad(lambda q: jnp.sum(jax.grad(loss)(q)))(q)
    with pytest.raises(NotImplementedError, match=words):
        jax.jit(lambda q: jax.jvp(jax.grad(loss), (q,), (q,)))(q)
    with pytest.raises(NotImplementedError, match=words):
        jax.jit(jax.hessian(loss))(q)


def test_forward_mode():
    q, k, v = qkv()
    function = ring.sharded(ring.line(2))
    words = r"can't apply forward-mode autodiff \(jvp\)"
    with pytest.raises(TypeError, match=words):
        jax.jit(lambda q: jax.jvp(lambda q: function(q, k, v), (q,), (q,)))(q)
    with pytest.raises(TypeError, match=words):
        jax.jacfwd(lambda q: function(q, k, v))(q)


def test_nan_in_one_query_reaches_its_row_only():
    q, k, v = qkv()
    q[0, 3, 1, 5] = np.nan
    function = ring.sharded(ring.line(2), is_causal=True, return_residual=True)
    out, lse = jax.jit(function)(q, k, v)
    expected = np.zeros((1, 8, 4), bool)
    expected[0, 3, 1] = True
    assert np.array_equal(np.isnan(lse), expected)
    assert np.array_equal(np.isnan(out).all(-1), expected)
    assert np.array_equal(np.isnan(out).any(-1), expected)
    run = ring.gradients(ring.sharded(ring.line(2), is_causal=True))
    dq, dk, dv = map(np.asarray, run((q, k, v), q * 0 + 1)[1])
    assert np.isnan(dq[0, 3, 1]).all()
    assert np.isfinite(dq[0, :3]).all()
    assert np.isnan(dk).any()
    assert np.isnan(dv).any()


@pytest.mark.parametrize("backward", ["keys", "queries"])
def test_nan_in_one_key_reaches_the_rows_that_see_it(backward):
    """And, through these rows' gradients, all keys that they see.

    Products of tiles multiply the gradients of hidden pairs, which are 0, with the key, too.
    """
    q, k, v = qkv()
    k[0, 5, 0, 2] = np.nan
    options = {"is_causal": True, "return_residual": True, "backward": backward, "schedule": "ring"}
    function = ring.sharded(ring.line(2), **options)
    cotangents = q * 0 + 1, np.zeros(q.shape[:3], np.float32)
    (out, lse), (dq, dk, dv) = ring.gradients(function)((q, k, v), cotangents)
    rows, keys = np.zeros((1, 8, 4), bool), np.zeros((1, 8, 2), bool)
    rows[0, 5:, :2] = keys[..., 0] = True
    assert np.array_equal(np.isnan(lse), rows)
    tile = rows.copy()
    tile[0, 4:, :2] = True
    of_dq = tile if platforms.current().rounds else rows
    for x, expected in ((out, rows), (dq, of_dq), (dk, keys), (dv, keys)):
        assert np.array_equal(np.isnan(x).any(-1), expected)


@pytest.mark.parametrize("empty", [{"batch": 0}, {"seq": 0}])
def test_nothing_to_compute(empty):
    """Without batch entries or tokens, results and gradients are empty and nothing is sent."""
    arrays = qkv(**empty)
    before = _ffi.bytes_sent()
    function = ring.sharded(ring.line(2), return_residual=True)
    cotangents = arrays[0], np.zeros(arrays[0].shape[:3], np.float32)
    (out, lse), grads = ring.gradients(function)(arrays, cotangents)
    assert out.shape == arrays[0].shape
    assert lse.shape == arrays[0].shape[:3]
    assert lse.dtype == jnp.float32
    assert [g.shape for g in grads] == [x.shape for x in arrays]
    assert _ffi.bytes_sent() == before


def test_one_token_on_each_device():
    q, k, v = qkv(seq=2)
    out = np.asarray(call(q, k, v, is_causal=True))
    assert np.allclose(out[:, 0], np.repeat(v[:, 0], 2, axis=1), atol=1e-6)
