"""Rings over the devices of several processes: results, and the end after a process died.

On CPU devices several processes compute in plain JAX, and results are those of one process. On GPUs
results agree with float64.
"""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import platforms
import pytest
import ring
import several
from features import Problem
from several_cases import DecodeProblem, InfiniProblem, PoolProblem, assert_right, cases

SPLITS = {
    "cpu": [(2, 4), (4, 2)],
    "cuda": [(2, 1), (4, 1), (8, 1)],
    "standin": [(2, 2)],
}
"""Numbers of processes, and of the devices of each."""
pytestmark = [pytest.mark.long] if platforms.current().name == "cpu" else []
SHARING = 4
"""The most processes that share a machine's only GPU."""
SECONDS = 480
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


@cache
def of_one_process(ranks, name):
    """Returns a problem's results in plain JAX, which several processes run, in one process."""
    case = cases(ranks)[name]
    case = replace(case, implementation="xla") if isinstance(case, Problem) else case
    return case.found(case.arrays())


def assert_equals_one_process(one, got, expected):
    """Asserts that several processes give the results of one process."""
    for name, x in expected.items():
        if isinstance(one, Problem | DecodeProblem | InfiniProblem) or name in SUMMED:
            assert_close(got[name], x, (one, name))
        else:
            assert np.array_equal(got[name], x), (one, name)


@pytest.mark.needs("host")
def test_a_pool_has_devices_of_each_process(tmp_path):
    started = several.start("pool", 2, 4, tmp_path)
    printed = several.outputs(started, SECONDS)
    assert [process.returncode for process in started] == [0, 0], "\n".join(printed)
    for text in printed:
        assert (
            "got a model in processes [0, 1] and a pool in processes [0]; take devices of" in text
        )
    case = PoolProblem(8)
    expected = case.found(case.arrays())
    with np.load(tmp_path / "pool.npz") as found:
        assert set(found) == set(expected)
        for name, x in expected.items():
            assert_close(found[name], x, name)


@pytest.mark.parametrize(("processes", "devices"), SPLITS[platforms.current().name])
def test_results(processes, devices):
    ranks = processes * devices
    if jax.device_count() > 1 or processes > SHARING:
        ring.devices(ranks)
    with several.Group(processes, devices) as group:
        for name, case in cases(ranks).items():
            got = group.solve(name, SECONDS)
            if platforms.current().name == "cpu":
                assert_equals_one_process(case, got, of_one_process(ranks, name))
            else:
                assert_right(case, got)
        group.end(SECONDS)


@pytest.mark.long
def test_a_process_that_dies_ends_the_others_with_an_error():
    several.assert_death_ends_all(*SPLITS[platforms.current().name][0], SECONDS)


@pytest.mark.long
def test_a_problem_that_fails_or_hangs_costs_only_itself():
    processes, devices = SPLITS[platforms.current().name][0]
    name = "messages of XLA"
    with several.Group(processes, devices) as group:
        with pytest.raises(several.FailedError, match=r"process \d ended by 1.*KeyError: 'none'"):
            group.solve("none", SECONDS)
        with pytest.raises(several.FailedError, match="no end within 1 s; process 0 last said: "):
            group.solve(name, 1)
        assert_right(cases(processes * devices)[name], group.solve(name, SECONDS))
        group.end(SECONDS)
