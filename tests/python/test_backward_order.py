"""Backward calls for GPUs carry `backward_order`, and it changes no bit on CPU devices."""

from functools import partial

import burst_attention as ba
import jax
import numpy as np
import pytest
import ring
from burst_attention import _ffi
from test_cuda_lowering import (
    KNOWN,
    abstract_mesh,
    calls,
    lowered,
    problem,
    shapes,
    with_gradient,
)

pytestmark = pytest.mark.needs("host")

WRAPS = {
    "plain": lambda function: function,
    "recomputed": jax.checkpoint,
    "saved": partial(jax.checkpoint, policy=ba.save_attention),
}
GIVEN = {"fixed": {}, "any": {"backward_order": "any"}}
"""Options that ask for each order; the default is fixed."""


def orders(function):
    """Returns each target and the order in its attributes, from a program for GPUs."""
    found = calls(lowered(with_gradient(function), shapes()))
    return {(call.target, call.attributes.get("backward_order")) for call in found}


@pytest.mark.parametrize("order", GIVEN)
@pytest.mark.parametrize("wrap", WRAPS)
@KNOWN
def test_only_backward_calls_for_gpus_carry_the_order(device, wrap, order):
    function = WRAPS[wrap](ring.sharded(abstract_mesh(device), **GIVEN[order]))
    assert orders(function) == {(_ffi.FORWARD, None), (_ffi.BACKWARD, f'"{order}"')}


@pytest.mark.parametrize("schedule", ["auto", "all_gather", "ulysses"])
def test_global_arrays_and_every_schedule_pass_the_order_on(schedule):
    where = {"mesh": abstract_mesh(None, (2, 2, 2)), "spec": ring.SPEC, "schedule": schedule}
    function = partial(ba.dot_product_attention, **where, backward_order="any")
    assert orders(function) == {(_ffi.FORWARD, None), (_ffi.BACKWARD, '"any"')}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cpu_devices_give_the_same_bits(dtype):
    mesh = ring.line(4)
    inputs = ring.put(mesh, *ring.normal(0, *[(2, 64, 4, 32)] * 4, dtype=dtype))
    options = {"is_causal": True, "layout": "zigzag"}
    programs, gradients = [], []
    for given in GIVEN.values():
        function = ring.sharded(mesh, **options, **given)
        programs.append(lowered(with_gradient(function), inputs[:3], "cpu"))
        gradients.append(ring.gradients(function)(inputs[:3], inputs[3])[1])
    assert programs[0] == programs[1]
    assert all(np.any(x) for x in gradients[0])
    assert jax.tree.all(jax.tree.map(np.array_equal, *gradients))


def test_the_library_reads_the_order_where_it_plans_a_backward_pass():
    sizes = {
        name: _ffi.workspace_bytes(**problem("backward", backward_order=name)) for name in GIVEN
    }
    assert all(size > 0 for size in sizes.values())
    with pytest.raises(ValueError, match="backward_order.*fixed or any.*some"):
        _ffi.workspace_bytes(**problem("backward", backward_order="some"))
