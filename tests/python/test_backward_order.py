"""Backward calls for GPUs carry `backward_order`, and it changes no bit on CPU devices."""

import json
import os
import subprocess
import sys
from functools import partial

import burst_attention as ba
import jax
import numpy as np
import platforms
import pytest
import ring
from burst_attention import _environment, _ffi
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
GIVEN = {name: {"backward_order": name} for name in ("auto", "fixed", "any")}
"""Options that ask for each order."""
DETERMINISM = "--xla_gpu_deterministic_ops"
OTHER_DETERMINISM = "--xla_gpu_exclude_nondeterministic_ops"


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
    assert len(set(programs)) == 1
    assert all(np.any(x) for x in gradients[0])
    for others in gradients[1:]:
        assert jax.tree.all(jax.tree.map(np.array_equal, gradients[0], others))


def test_the_library_reads_the_order_where_it_plans_a_backward_pass():
    sizes = {
        name: _ffi.workspace_bytes(**problem("backward", backward_order=name)) for name in GIVEN
    }
    assert all(size > 0 for size in sizes.values())
    with pytest.raises(ValueError, match="backward_order.*fixed, any or auto.*some"):
        _ffi.workspace_bytes(**problem("backward", backward_order="some"))


@pytest.mark.parametrize(
    ("flags", "asks"),
    [
        (None, False),
        ("", False),
        (DETERMINISM, True),
        (f"{OTHER_DETERMINISM}=true", True),
        (f"--xla_dump_to=/tmp {DETERMINISM}=1", True),
        (f"  {DETERMINISM}=True", True),
        (f"'{DETERMINISM}=true'", False),  # the name of a file
        (f'--xla_dump_to="/my dumps" {DETERMINISM}="true"', True),
        (f"{DETERMINISM}=false", False),
        (f"{OTHER_DETERMINISM}=0", False),
        (f"{DETERMINISM}=false {DETERMINISM}", True),
        (f"{DETERMINISM} {DETERMINISM}=0", False),
        (f"{DETERMINISM} {OTHER_DETERMINISM}=0", True),
        (f"{DETERMINISM}_of_another_name", False),
        (f'--xla_dump_to="/tmp {DETERMINISM}', True),  # XLA refuses it
    ],
    ids=str,
)
def test_which_flags_ask_for_determinism(monkeypatch, flags, asks):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    if flags is not None:
        monkeypatch.setenv("XLA_FLAGS", flags)
    assert _environment.asks_for_determinism.__wrapped__() == asks


def test_flags_in_a_file_ask_for_determinism(monkeypatch, tmp_path):
    file = tmp_path / "flags"
    file.write_text(f"--xla_dump_to=/tmp\n{DETERMINISM}=true\n")
    monkeypatch.setenv("XLA_FLAGS", str(file))
    assert _environment.asks_for_determinism.__wrapped__()


def orders_before_and_after():
    """Returns the orders of calls that ask for each order or for none, and once more for none after
    the flags in the environment have changed."""

    def order(**given):
        where = {"mesh": abstract_mesh(None, (2, 2, 2)), "spec": ring.SPEC}
        found = orders(partial(ba.dot_product_attention, **where, **given))
        return next(order.strip('"') for target, order in found if target == _ffi.BACKWARD)

    found = {"default": order()} | {name: order(**given) for name, given in GIVEN.items()}
    asks = _environment.asks_for_determinism()
    os.environ["XLA_FLAGS"] += f" {DETERMINISM}={str(not asks).lower()}"
    return found | {"later": order()}


@pytest.mark.parametrize(
    ("flags", "default"),
    [
        (f"{DETERMINISM}=true", "fixed"),
        (f"{DETERMINISM} {DETERMINISM}=false", "auto"),
    ],
    ids=["asked", "taken back"],
)
def test_flags_decide_at_the_first_call_of_a_process(flags, default):
    start = "import platforms; platforms.choose('cpu', False); import json; "
    program = "import test_backward_order as t; print(json.dumps(t.orders_before_and_after()))"
    ran = subprocess.run(
        [sys.executable, "-c", start + program],
        cwd=platforms.ROOT / "tests" / "python",
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    expected = {"default": default, "auto": default, "fixed": "fixed", "any": "any"}
    assert json.loads(ran.stdout.splitlines()[-1]) == expected | {"later": default}
