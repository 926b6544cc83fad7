"""Output, lse and gradients of the ring agree with dense float64."""

import jax
import numpy as np
import pytest
import ring
from bounds import check
from reference import dense, error

pytestmark = [pytest.mark.cudnn, pytest.mark.wheel]


def test_ring_equals_dense(case):
    agree(case)


def agree(case, **options):
    """Checks the results and gradients of a case, with further options of `attention`."""
    shapes = (case.q_shape, case.kv_shape, case.kv_shape, case.q_shape)
    q, k, v, dout = ring.normal(len(case.name), *shapes, dtype=case.dtype)
    (dlse,) = ring.normal(1, case.q_shape[:3])
    expected = {}
    for backward, with_dlse in case.variants:
        if with_dlse not in expected:
            expected[with_dlse] = dense(q, k, v, dout, dlse * with_dlse, causal=case.causal)
        found = _run(case, (q, k, v, dout, dlse), with_dlse, backward=backward, **options)
        check(found, expected[with_dlse], dout, case.dtype)


def _run(case, arrays, with_dlse, **options):
    mesh, size = ring.mesh(*case.mesh), case.mesh[1]
    function = ring.sharded(
        mesh,
        is_causal=case.causal,
        layout=case.layout,
        return_residual=with_dlse,
        **options,
    )
    placed = ring.put(mesh, *ring.stored(case.layout, size, *arrays))
    cotangents = (placed[3], placed[4]) if with_dlse else placed[3]
    results, grads = ring.gradients(function)(placed[:3], cotangents)
    outputs = results if with_dlse else (results,)
    names = ("o", "lse")[: len(outputs)] + ("dq", "dk", "dv")
    values = ring.restored(case.layout, size, *outputs, *grads)
    return dict(zip(names, values, strict=True))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_error_does_not_grow_with_the_ring(layout):
    shape = (1, 1024, 2, 64)
    inputs = ring.normal(0, *[shape] * 4)
    expected = dense(*inputs, np.zeros(shape[:3]), causal=True)
    errors = {}
    for size in (1, 8):
        function = ring.gradients(ring.sharded(ring.line(size), is_causal=True, layout=layout))
        *qkv, dout = ring.put(ring.line(size), *ring.stored(layout, size, *inputs))
        _, grads = function(qkv, dout)
        found = dict(zip(("dq", "dk", "dv"), ring.restored(layout, size, *grads), strict=True))
        errors[size] = {name: error(name, x, expected)[0] for name, x in found.items()}
    for name, wrong in errors[8].items():
        assert wrong <= 1.1 * errors[1][name], f"{name}: {wrong:.2e} and {errors[1][name]:.2e}"


def test_scale_is_used_in_both_passes():
    shape = (1, 16, 1, 32)
    q, k, v, dout = ring.normal(3, *[shape] * 4)
    expected = dense(q, k, v, dout, np.zeros(shape[:3]), causal=False, scale=0.3)
    function = ring.gradients(ring.sharded(ring.line(2), scale=0.3))
    o, grads = function((q, k, v), dout)
    names = ("o", "dq", "dk", "dv")
    check(dict(zip(names, ring.restored("contiguous", 1, o, *grads), strict=True)), expected, dout)


def test_results_are_bitwise_repeatable():
    shapes = [(2, 96, 4, 64), (2, 96, 2, 64), (2, 96, 2, 64), (2, 96, 4, 64)]
    *qkv, dout = ring.normal(4, *shapes)
    run = ring.gradients(ring.sharded(ring.mesh(2, 4, 1), is_causal=True))
    first = jax.tree.map(np.asarray, run(qkv, dout))
    for _ in range(20):
        again = jax.tree.map(np.asarray, run(qkv, dout))
        assert jax.tree.all(jax.tree.map(np.array_equal, first, again))
