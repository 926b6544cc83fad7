"""Flax's attention layers give the same with the ring as with their own attention."""

import inspect
import subprocess
import sys

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from long import some

pytestmark = [pytest.mark.needs("products"), pytest.mark.oldest_jax]

LIMIT = 2e-5
"""Largest relative difference of two programs that compute in float32."""
SPEC = P("data", "context")


@pytest.fixture
def nnx():
    """Returns flax.nnx, or skips the test without flax."""
    reason = "the wheel's environments have JAX and pytest alone"
    return pytest.importorskip("flax.nnx", reason=reason)


@pytest.fixture
def linen():
    """Returns flax.linen, or skips the test without flax."""
    reason = "the wheel's environments have JAX and pytest alone"
    return pytest.importorskip("flax.linen", reason=reason)


def close(found, expected):
    leaves = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for x, y in leaves:
        assert x.shape == y.shape
        assert np.linalg.norm(x - y) <= LIMIT * np.linalg.norm(y)


def inputs(*batch, seq=32, features=24):
    return ring.normal(0, (*batch, seq, features), dtype=np.float32)[0]


def padding(batch, seq=32):
    """Returns which tokens are no padding, ``[batch, seq]``."""
    return np.arange(seq) < np.array([seq - 5, seq - 12])[:batch, None]


def attention(axis_type=AxisType.Auto, **options):
    """Returns a mesh of two by four devices, and the ring on it as Flax takes it."""
    mesh = ring.mesh(2, 4, 1, axis_type=axis_type)
    if axis_type == AxisType.Auto:
        options |= {"mesh": mesh, "spec": SPEC}
    return mesh, ba.flax_attention_fn(**options)


def run_nnx(nnx, x, weights=None, mask=None, is_causal=False, **options):
    """Returns the sum of an nnx layer's squares, its result, and the gradients of its parameters.

    ``weights`` multiply the result before its squares are summed.
    """
    layer = nnx.MultiHeadAttention(
        num_heads=4, num_kv_heads=2, in_features=24, qkv_features=32, decode=False,
        use_bias=False, rngs=nnx.Rngs(0), **options,
    )  # fmt: skip
    weights = jnp.ones_like(x) if weights is None else weights

    @nnx.jit
    @nnx.value_and_grad(has_aux=True)
    def loss(layer, x, weights):
        out = layer(x, mask=mask, is_causal=is_causal)
        return jnp.sum((out * weights) ** 2), out * weights

    return loss(layer, x, weights)


CALLS = [
    (AxisType.Auto, True, "zigzag"),
    (AxisType.Explicit, False, "contiguous"),
    (AxisType.Explicit, True, "striped"),
]


@pytest.mark.parametrize("call", some(CALLS), ids=lambda call: call[2])
def test_nnx_layers(nnx, call):
    """The layer is called with is_causal; tokens stand in the order of the layout."""
    axis_type, is_causal, layout = call
    x = inputs(2)
    mesh, attend = attention(axis_type, layout=layout)
    (loss, out), gradients = run_nnx(nnx, x, is_causal=is_causal)
    want = (loss, ba.to_layout(out, 4, layout)), gradients
    with jax.set_mesh(mesh):
        (given,) = ring.put(mesh, ba.to_layout(x, 4, layout), spec=SPEC)
        close(run_nnx(nnx, given, is_causal=is_causal, attention_fn=attend), want)


@pytest.mark.parametrize("axis_type", some([AxisType.Explicit, AxisType.Auto]))
def test_nnx_masks_of_padding(nnx, axis_type):
    """Masks of keys and of queries; flax's own functions make them float32."""
    x, shown = inputs(2), padding(2)
    mesh, attend = attention(axis_type)
    of_keys, of_queries = shown[:, None, None].astype(np.float32), shown[:, None, :, None]
    for mask, dense in ((of_keys, of_keys), (of_queries, None)):
        want = run_nnx(nnx, x, shown[..., None], dense)
        with jax.set_mesh(mesh):
            given, weights = ring.put(mesh, x, shown[..., None], spec=SPEC)
            close(run_nnx(nnx, given, weights, mask, attention_fn=attend), want)
    q = k = v = ring.normal(0, (2, 32, 4, 8))[0]
    out = attention()[1](q, k, v, mask=of_queries)
    assert not np.any(np.asarray(out)[~shown])


@pytest.mark.parametrize("axis_type", some([AxisType.Explicit, AxisType.Auto]))
def test_leading_dimensions_are_one_batch(nnx, axis_type):
    x, shown = inputs(2, 3), padding(2)
    mask = np.broadcast_to(shown[:, None, None, None], (2, 1, 1, 1, 32))
    mesh, attend = attention(axis_type)
    want = run_nnx(nnx, x, mask=np.broadcast_to(mask, (2, 3, 1, 1, 32)))
    with jax.set_mesh(mesh):
        (given,) = ring.put(mesh, x, spec=P("data", None, "context"))
        close(run_nnx(nnx, given, mask=mask, attention_fn=attend), want)


def test_a_sequence_without_a_batch(nnx):
    x = inputs()
    attend = ba.flax_attention_fn(mesh=ring.line(4), spec=P(None, "context"))
    close(run_nnx(nnx, x, attention_fn=attend), run_nnx(nnx, x))


def test_linen_layers(linen):
    x, shown = inputs(2), padding(2)
    _, attend = attention(is_causal=True)
    causal, keys = linen.make_causal_mask(x[..., 0]), shown[:, None, None]

    def run(mask, **options):
        layer = linen.MultiHeadDotProductAttention(
            num_heads=4, qkv_features=32, use_bias=False, **options
        )
        parameters = jax.jit(layer.init)(jax.random.key(0), x)

        @jax.jit
        @jax.value_and_grad
        def loss(parameters):
            out = layer.apply(parameters, x, mask=mask)
            return jnp.sum((out * shown[..., None]) ** 2)

        return loss(parameters)

    close(run(None, attention_fn=attend), run(causal))
    both = linen.combine_masks(causal, np.broadcast_to(keys, causal.shape))
    close(run(keys, attention_fn=attend), run(both))


@pytest.mark.parametrize("axis_type", some([AxisType.Explicit, AxisType.Auto]))
def test_dropout_is_that_of_its_key(nnx, axis_type):
    mesh, attend = attention(axis_type)
    (x,) = ring.put(mesh, inputs(2), spec=SPEC)
    layer = nnx.MultiHeadAttention(
        num_heads=4, in_features=24, qkv_features=32, decode=False, dropout_rate=0.5,
        attention_fn=attend, rngs=nnx.Rngs(0),
    )  # fmt: skip

    run = nnx.jit(lambda layer, x, key: layer(x, deterministic=False, rngs=nnx.Rngs(key)))
    with jax.set_mesh(mesh):
        first, again, other = (run(layer, x, jax.random.key(seed)) for seed in (1, 1, 2))
        kept = nnx.jit(lambda layer, x: layer(x, deterministic=True))(layer, x)
        layer.dropout_rate = 0.0
        plain = nnx.jit(lambda layer, x: layer(x))(layer, x)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first, kept)
    assert np.array_equal(plain, kept)


def test_linen_dropout_is_that_of_its_key(linen):
    x, attend = inputs(2), attention()[1]
    layer = linen.MultiHeadDotProductAttention(
        num_heads=4, qkv_features=32, dropout_rate=0.25, attention_fn=attend
    )
    parameters = jax.jit(layer.init, static_argnames="deterministic")(
        jax.random.key(0), x, deterministic=True
    )

    @jax.jit
    def run(key):
        return layer.apply(parameters, x, deterministic=False, rngs={"dropout": key})

    first, again, other = (run(jax.random.key(seed)) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    # Arguments stand in flax's order, and mean what they mean in the package.
    q, k, v = ring.normal(0, *[(2, 32, 4, 8)] * 3)
    key, options = jax.random.key(3), {"mesh": ring.mesh(2, 4, 1), "spec": SPEC}
    options |= {"dropout_key": key, "dropout_rate": 0.25}
    want = jax.jit(lambda *x: ba.dot_product_attention(*x, **options))(q, k, v)
    got = jax.jit(lambda *x: attend(*x, None, None, True, key, 0.25))(q, k, v)
    assert np.array_equal(got, want)


def test_the_type_to_compute_with(nnx):
    layer = nnx.MultiHeadAttention(
        num_heads=4, in_features=24, qkv_features=32, decode=False, dtype=jnp.bfloat16,
        normalize_qk=True, attention_fn=attention()[1], rngs=nnx.Rngs(0),
    )  # fmt: skip
    assert nnx.jit(lambda layer, x: layer(x))(layer, inputs(2)).dtype == jnp.bfloat16
    q, k, v = ring.normal(0, *[(2, 32, 4, 8)] * 3)
    mixed = attention()[1](q, k.astype(jnp.bfloat16), v.astype(jnp.bfloat16))
    assert mixed.dtype == jnp.float32


def test_masks_over_queries_and_keys_are_refused(nnx, linen):
    x, shown = inputs(2), padding(2)
    _, attend = attention()
    words = "pass is_causal=True to flax_attention_fn and no mask"
    causal = nnx.make_causal_mask(x[..., 0])
    both = nnx.make_attention_mask(shown, shown)
    heads = np.ones((2, 4, 1, 32), bool)
    for mask in (causal, both, nnx.combine_masks(causal, both), heads):
        why = "a mask for each head" if mask is heads else "a sequence × sequence array"
        with pytest.raises(NotImplementedError, match=rf"{why}.*{words}.*visible=\(start, stop\)"):
            run_nnx(nnx, x, mask=mask, attention_fn=attend)
    layer = linen.MultiHeadDotProductAttention(num_heads=4, attention_fn=attend)
    with pytest.raises(NotImplementedError, match=words):
        layer.init(jax.random.key(0), x, mask=causal)


def test_bad_input(nnx, linen):
    x = inputs(2)
    _, attend = attention()
    q, k, v = ring.normal(0, *[(2, 32, 4, 8)] * 3)

    def refused(kind, words, *arrays, **options):
        with pytest.raises(kind, match=words):
            attend(*(arrays or (q, k, v)), **options)

    refused(ValueError, r"must have shape \(2, 1, 1, 32\).*\(2, 1, 1, 30\)",
            mask=np.ones((2, 1, 1, 30)))  # fmt: skip
    refused(ValueError, r"must have batch dimensions \(2,\)", mask=np.ones((3, 1, 32, 1)))
    refused(TypeError, "mask must be an array", mask="padding")
    refused(ValueError, "mask must have at most 4 dimensions, got", mask=np.ones((1,) * 6))
    refused(TypeError, "query must be an array", "q", k, v)
    refused(ValueError, "same batch dimensions", q[0], k, v)
    refused(
        ValueError, r"must be \[batch..., length, heads, head_dim\]", *(x[0, 0] for x in (q, k, v))
    )
    refused(ValueError, "dropout_rate=0.5 needs dropout_key", dropout_rate=0.5)
    refused(TypeError, "deterministic must be True or False", dropout_rate=0.5, deterministic=q)
    words = "dropout_rate must be a Python number, .* for none pass 0.0"
    refused(TypeError, words, dropout_rate=None)
    with pytest.raises(TypeError, match=f"{words[:36]}, .* got a traced array"):
        jax.jit(lambda rate: attend(q, k, v, dropout_rate=rate))(0.5)
    refused(TypeError, "is_causal must be True or False", is_causal=1)
    refused(NotImplementedError, "bias of jax.nn.dot_product_attention", q, k, v, q)
    refused(NotImplementedError, "input_positions.*rotate queries", input_positions=q)
    for name, what in (("qk_attn_weights_einsum", q), ("attn_weights_value_einsum", q)):
        refused(NotImplementedError, f"{name} is not supported.*{name}_cls", **{name: what})
    layer = nnx.MultiHeadAttention(4, 24, 32, decode=False, attention_fn=attend, rngs=nnx.Rngs(0))
    with pytest.raises(
        NotImplementedError, match="sow_weights=True asks for the attention weights"
    ):
        layer(x, sow_weights=True)
    layer = linen.MultiHeadDotProductAttention(num_heads=4, attention_fn=attend)
    with pytest.raises(
        NotImplementedError, match="sow_weights=True asks for the attention weights"
    ):
        layer.init(jax.random.key(0), x, sow_weights=True)


def test_wrong_options_are_refused_when_the_function_is_made():
    def refused(kind, words, **options):
        with pytest.raises(kind, match=words):
            ba.flax_attention_fn(**options)

    refused(TypeError, "takes no dropout_rate: dropout_rate of the layer says it", dropout_rate=0.5)
    refused(TypeError, "takes no dropout_key: rngs of the layer's call", dropout_key=None)
    refused(TypeError, "takes no batch_axis: spec says it", batch_axis="data")
    refused(
        TypeError, r"flax_attention_fn\(\) got an unexpected keyword argument 'causal'", causal=1
    )
    refused(ValueError, "layout must be one of", layout="diagonal")


def test_every_argument_of_flax_is_taken(nnx, linen):
    """Linen leaves out arguments that a function does not name, so each must be named."""
    ours = set(inspect.signature(ba.flax_attention_fn()).parameters)
    for function in (nnx.dot_product_attention, linen.dot_product_attention):
        missing = set(inspect.signature(function).parameters) - ours
        # The layers do not hand these on.
        assert missing <= {"promote_dtype", "einsum_dot_general", "einsum"}, missing


def test_the_package_does_not_import_flax():
    code = "import sys, burst_attention; sys.exit('flax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
