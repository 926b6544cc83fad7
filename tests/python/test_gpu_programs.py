"""Whole programs on GPUs: XLA's runtime calls the library, between XLA's own kernels."""

import burst_attention as ba
import jax
import jax.numpy as jnp
import linear_cases
import numpy as np
import pytest
import ring
from bounds import check
from burst_attention import _ffi
from features import Problem
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from reference import dense

pytestmark = [pytest.mark.needs("standin"), pytest.mark.standin, pytest.mark.cudnn]


@pytest.mark.parametrize(
    "one",
    [
        Problem(causal=True, layout="zigzag", segments="padded", sinks=True, slopes=True),
        Problem(mesh=(1, 4, 1), inner=2, window=(9, 2), soft_cap=2.0, dropout=0.2, dtype="float16"),
        Problem(mesh=(1, 4, 1), schedule="ulysses", heads=4, kv_heads=4, causal=True),
    ],
    ids=["zigzag", "double ring", "ulysses"],
)
def test_features_agree(one):
    arrays = one.arrays()
    check(one.found(arrays), one.expected(arrays), arrays["dout"], one.dtype)


def test_the_library_finds_the_driver_and_nccl():
    cuda = _ffi.describe()["cuda"]
    assert (cuda["driver"], cuda["nccl"]) == ("CUDA 13.0", "2.30.7")


def test_the_gradient_of_a_sum():
    """XLA makes the cotangents by kernels of its own."""
    shape = (1, 64, 2, 64)
    q, k, v, weight = ring.normal(0, *[shape] * 4)

    @jax.jit
    def run(q, k, v):
        def loss(q, k, v):
            out = ba.dot_product_attention(q, k, v, is_causal=True, mesh=mesh, spec=spec)
            return jnp.sum(out.astype(jnp.float32) * weight), out

        return jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)

    mesh, spec = ring.line(4), P(None, "context")
    grads, out = run(*ring.put(mesh, q, k, v, spec=spec))
    found = dict(zip(("o", "dq", "dk", "dv"), (out, *grads), strict=True))
    expected = dense(q, k, v, weight, np.zeros(shape[:3]), causal=True)
    check({name: np.asarray(x) for name, x in found.items()}, expected, weight)


def test_linear_attention_agrees():
    arrays = linear_cases.inputs(4, 33, 2, 1, 32, 32, None)
    found = linear_cases.found(ring.line(4), arrays)
    linear_cases.assert_right(found, arrays)


def test_rings_of_two_meshes_in_flight():
    """Programs of both meshes are enqueued before the first result is read."""
    one = Problem(mesh=(1, 4, 1), causal=True, batch=1, q_len=32, kv_len=32)
    arrays = one.arrays()
    q, k, v = (arrays[name] for name in "qkv")
    devices = ring.devices(4)
    meshes = [Mesh(order, ("context",)) for order in (devices, devices[::-1])]
    spec = P(None, "context")

    def program(mesh):
        def local(q, k, v):
            return ba.attention(q, k, v, axis_name="context", is_causal=True)

        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec))

    programs = [(program(mesh), ring.put(mesh, q, k, v, spec=spec)) for mesh in meshes]
    results = [run(*placed) for _ in range(4) for run, placed in programs]
    expected = one.expected(arrays)
    for result in results:
        check({"o": np.asarray(result)}, expected, arrays["dout"])
