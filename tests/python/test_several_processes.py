"""Rings over the CPU devices of several processes give the results of one process."""

import re
import time
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import several
from features import Problem
from several_cases import CASES

pytestmark = pytest.mark.needs("host")

SECONDS = 240
SUMMED = ("dz", "dslopes")
"""Results that XLA sums over all ranks, in another order with several processes."""


def assert_close(got, expected, what):
    """Asserts equality up to the last bits, which depend on the number of a process's threads."""
    last_bit = 0 if expected.dtype == np.float32 else float(jnp.finfo(expected.dtype).eps)
    got, expected = got.astype(np.float32), expected.astype(np.float32)
    known = np.isfinite(expected)
    assert np.array_equal(got[~known], expected[~known]), what
    got, expected = got[known], expected[known]
    assert np.allclose(got, expected, rtol=last_bit, atol=2e-6 * np.abs(expected).max()), what


@pytest.fixture(scope="module")
def of_one_process():
    """Returns the results of the ring in plain JAX, which several processes run, in one process."""
    cases = [replace(x, implementation="xla") if isinstance(x, Problem) else x for x in CASES]
    return [case.found(case.arrays()) for case in cases]


@pytest.mark.parametrize(
    ("processes", "devices"), [(2, 4), pytest.param(4, 2, marks=pytest.mark.long)]
)
def test_several_processes_equal_one(tmp_path, of_one_process, processes, devices):
    started = several.start("solve", processes, devices, tmp_path)
    printed = several.outputs(started, SECONDS)
    assert [process.returncode for process in started] == [0] * processes, "\n".join(printed)
    for number, expected in enumerate(of_one_process):
        found = np.load(tmp_path / f"{number}.npz")
        for name, x in expected.items():
            got = found[name].view(x.dtype)
            if isinstance(CASES[number], Problem) or name in SUMMED:
                assert_close(got, x, (CASES[number], name))
            else:
                assert np.array_equal(got, x), (CASES[number], name)


@pytest.mark.long
def test_a_process_that_dies_ends_the_others_with_an_error(tmp_path):
    started = several.start("die", 2, 4, tmp_path)
    started[1].wait(timeout=SECONDS)
    gone = time.monotonic()
    printed = several.outputs(started, 60)
    assert time.monotonic() - gone < 60
    assert started[1].returncode == 3, printed[1]
    assert "ring ran" in printed[0]
    assert "ring ran again" not in printed[0]
    assert started[0].returncode != 0
    # Any word of gloo would not do, since gloo greets its peers by name.
    words = "heartbeat|UNAVAILABLE|Connection closed"
    assert re.search(words, printed[0]), printed[0]
