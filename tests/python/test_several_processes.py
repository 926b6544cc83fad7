"""Rings over the devices of several processes: results, and the end after a process died.

On CPU devices several processes compute in plain JAX, and results are those of one process. On GPUs
results agree with float64.
"""

import re
import time
from dataclasses import replace
from functools import cache

import bounds
import decode_cases
import infini_cases
import jax
import jax.numpy as jnp
import linear_cases
import numpy as np
import platforms
import pytest
import ring
import several
from decode_reference import dense
from features import Problem
from several_cases import DecodeProblem, InfiniProblem, PoolProblem, cases

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
def of_one_process(ranks):
    """Returns the results of the ring in plain JAX, which several processes run, in one process."""
    problems = (
        replace(x, implementation="xla") if isinstance(x, Problem) else x for x in cases(ranks)
    )
    return [one.found(one.arrays()) for one in problems]


def assert_equals_one_process(one, got, expected):
    """Asserts that several processes give the results of one process."""
    for name, x in expected.items():
        if isinstance(one, Problem | DecodeProblem | InfiniProblem) or name in SUMMED:
            assert_close(got[name], x, (one, name))
        else:
            assert np.array_equal(got[name], x), (one, name)


def assert_right(one, got):
    """Asserts that results agree with float64."""
    arrays = one.arrays()
    if isinstance(one, Problem):
        bounds.check(got, one.expected(arrays), arrays["dout"], one.dtype)
    elif isinstance(one, DecodeProblem):
        exact = dense(arrays.q, arrays.k, arrays.v, arrays.lengths)
        decode_cases.check((got["o"], got["lse"]), exact)
    elif isinstance(one, InfiniProblem):
        exact = map(np.float64, arrays)
        want = infini_cases.reference(*exact, infini_cases.SEGMENT, one.update)
        infini_cases.near([got[name] for name in ("o", "m", "z")], want, 2e-6)
    else:
        arrays, beta = arrays
        linear_cases.assert_right(got, arrays, one.dtype, beta=beta)


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
def test_results(tmp_path, processes, devices):
    ranks = processes * devices
    if jax.device_count() > 1 or processes > SHARING:
        ring.devices(ranks)
    started = several.start("solve", processes, devices, tmp_path)
    printed = several.outputs(started, SECONDS)
    assert [process.returncode for process in started] == [0] * processes, "\n".join(printed)
    for number, one in enumerate(cases(ranks)):
        with np.load(tmp_path / f"{number}.npz") as found:
            # numpy's files name no bfloat16.
            got = {n: x.view(jnp.bfloat16) if x.dtype.kind == "V" else x for n, x in found.items()}
        if platforms.current().name == "cpu":
            assert_equals_one_process(one, got, of_one_process(ranks)[number])
        else:
            assert_right(one, got)


@pytest.mark.long
def test_a_process_that_dies_ends_the_others_with_an_error(tmp_path):
    started = several.start("die", *SPLITS[platforms.current().name][0], tmp_path)
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
