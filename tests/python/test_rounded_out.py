"""An ``out`` in 16 bits costs gradients digits, and ``residual_dtype`` avoids that."""

import functools
import re

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import ring
from bounds import ROUNDING_LIMIT
from jax.sharding import PartitionSpec as P
from test_cuda_lowering import GPU, abstract_mesh

pytestmark = pytest.mark.needs("host")

TOKENS = 1024


def uncentred():
    """Returns bfloat16 inputs uniform in [0, 1), whose values have a large common part."""
    generator = np.random.default_rng(0)
    shape = (1, TOKENS, 4, 64)
    arrays = [generator.random(shape, dtype=np.float32).astype(jnp.bfloat16) for _ in range(4)]
    return arrays[:3], arrays[3]


@functools.cache
def dense():
    """Returns exact dq and dk, and two lists of errors in the norm.

    The first list is for dense attention in plain JAX, the second one for rounding exact results.
    """
    qkv, dout = uncentred()
    found, right = ring.gradients(jax.nn.dot_product_attention)(qkv, dout)[1][:2], exact(qkv, dout)
    rounded = [x.astype(jnp.bfloat16) for x in right]
    return right, *(
        [distance(*pair) for pair in zip(x, right, strict=True)] for x in (found, rounded)
    )


def exact(qkv, dout, out=None):
    """Returns dq and dk in float64, with rowsum(dout ∘ out) of the exact or of the given ``out``.

    A gradient of lse adds to rowsum(dout ∘ out), so it can turn the exact out into the given one.
    """
    dlse = np.zeros(dout.shape[:3])
    found = reference.dense(*qkv, dout, dlse, causal=False)
    if out is not None:
        off = found.o - np.asarray(out, np.float64)
        dlse = (np.asarray(dout, np.float64) * off).sum(-1)
        found = reference.dense(*qkv, dout, dlse, causal=False)
    return found.dq, found.dk


def distance(x, y):
    return np.linalg.norm(np.asarray(x, np.float64) - np.asarray(y, np.float64))


def found(axes, qkv, dout, policy=None, **options):
    """Returns out, dq and dk over four devices, in two lines of two for a pair of axes."""
    devices = ring.devices(4) if axes == "context" else ring.devices(2, 2)
    mesh = jax.sharding.Mesh(devices, axes)

    def function(q, k, v):
        return ba.dot_product_attention(
            q, k, v, mesh=mesh, spec=P(None, axes), axis_name=axes, **options
        )

    function = jax.checkpoint(function, policy=policy) if policy else function
    out, (dq, dk, _) = ring.gradients(function)(qkv, dout)
    return out, dq, dk


def test_error_is_that_of_exact_arithmetic_with_the_same_out():
    qkv, dout = uncentred()
    out, *gradients = found("context", qkv, dout)
    same_out, right = exact(qkv, dout, out), dense()[0]
    for name, got, rounded, x in zip(("dq", "dk"), gradients, same_out, right, strict=True):
        assert distance(got, x) <= 1.05 * distance(rounded.astype(jnp.bfloat16), x), name


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ("context", {"schedule": "ring", "policy": ba.save_attention}),
        ("context", {"schedule": "all_gather", "backward": "queries", "layout": "zigzag"}),
        ("context", {"schedule": "ulysses", "policy": ba.offload_attention}),
        (("node", "context"), {"schedule": "ring", "layout": "striped"}),
        (("node", "context"), {"schedule": "hybrid"}),
    ],
    ids=["ring", "all_gather", "ulysses", "double_ring", "hybrid"],
)
def test_out_in_float32_is_as_good_as_dense_attention(axes, options):
    qkv, dout = uncentred()
    out, *gradients = found(axes, qkv, dout, residual_dtype="float32", **options)
    assert out.dtype == jnp.bfloat16
    for name, got, right, of_dense, of_rounding in zip(
        ("dq", "dk"), gradients, *dense(), strict=True
    ):
        wrong = distance(got, right)
        assert wrong <= 1.05 * of_dense, name
        assert wrong <= ROUNDING_LIMIT * of_rounding, name


def test_the_name_that_policies_know_is_that_of_out_in_float32():
    """By default, the name stands for out in query's dtype."""
    shape = jax.ShapeDtypeStruct((1, TOKENS, 4, 64), "bfloat16")

    def kept(residual_dtype):
        def loss(q):
            out = ba.dot_product_attention(
                q, q, q, mesh=ring.line(4), spec=ring.SPEC, residual_dtype=residual_dtype
            )
            return jnp.sum(out.astype(jnp.float32))

        named = r"(\w+)\[[\d,]+\]\S*\s=\sname\[\s*name=burst_attention_out\s*\]"
        return re.findall(named, str(jax.make_jaxpr(jax.grad(loss))(shape)))

    assert kept("float32") == ["f32"]
    assert kept(None) == ["bf16"]


def refused(kind, words, value, mesh=None):
    q = np.zeros((2, 16, 2, 8), jnp.bfloat16)
    with pytest.raises(kind, match=words):
        jax.eval_shape(
            lambda q: ba.dot_product_attention(
                q, q, q, mesh=mesh or ring.line(2), spec=ring.SPEC, residual_dtype=value
            ),
            q,
        )


def test_other_dtypes_are_refused():
    refused(ValueError, "must be 'float32' or None, .* got 'bfloat16'", "bfloat16")
    refused(ValueError, "must be 'float32' or None, .* got <class 'int'>", int)
    refused(TypeError, "must be 'float32' or None, .* got 32", 32)
    refused(NotImplementedError, "needs CPU devices", "float32", mesh=abstract_mesh(GPU))
    for value in (None, "float32", jnp.float32, np.dtype("float32")):
        q = np.zeros((1, 16, 2, 8), jnp.bfloat16)
        attend = functools.partial(
            ba.dot_product_attention, mesh=ring.line(2), spec=ring.SPEC, residual_dtype=value
        )
        assert jax.eval_shape(attend, q, q, q).dtype == q.dtype
