"""`make gpu-check` without a GPU: its benchmark and its tests run, on CPU devices and stand-ins."""

import json
import os
import subprocess
import sys

import platforms
import pytest

BENCHMARK = platforms.ROOT / "benchmarks" / "ring_gpu.py"
ON_STANDIN = pytest.mark.needs("standin")
LOSES_ITS_GPU = """
import jax
import pytest
import test_standin
from ctypes import c_uint64

@pytest.mark.parametrize("number", range(4))
def test_adds(number):
    add = jax.jit(lambda x: x + 1)
    assert add(0) == 1
    if number == 1:
        test_standin.driver = test_standin.Driver()
        test_standin.use(0)
        test_standin.fill(c_uint64(4096), 1, test_standin.stream())
    assert add(number) == number + 1
"""


def output_of(code, *command, **environment):
    """Returns what a command prints, on one device, and checks its exit code."""
    environment = os.environ | {"STANDIN_DEVICES": "1"} | environment
    ran = subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True
    )
    assert ran.returncode == code, ran.stdout + ran.stderr
    return ran.stdout


def gpu_tests(code, *arguments):
    """Returns what the tests print that take the stand-in for a GPU."""
    pytest.importorskip("xdist", reason="the wheel's environments have no pytest-xdist")
    command = ("-m", "pytest", "-c", platforms.ROOT / "pyproject.toml", "--platform=cuda", "-n1")
    return output_of(code, *command, "--dist=worksteal", *arguments)


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(["layer", "linear"], marks=[pytest.mark.needs("host"), pytest.mark.rare]),
        pytest.param(
            ["carry", "ring", "window", "mask", "layer", "packed", "delta", "memory"],
            marks=[ON_STANDIN, pytest.mark.long],
        ),
    ],
    ids=",".join,
)
def test_the_benchmark_runs(tmp_path, kinds):
    flags = ("--quick", "--each", 3, "--out", tmp_path, "--only", *kinds)
    printed = output_of(0, BENCHMARK, *flags, XLA_PYTHON_CLIENT_ALLOCATOR="default")
    (file,) = tmp_path.glob("*-ring.json")
    found = json.loads(file.read_text())
    assert not found["failed"]
    assert {name.split(",")[0] for name in found["rows"]} == set(kinds)
    assert all("shown" in row for row in found["rows"].values()), printed
    assert found["device"] != "unknown device"


@ON_STANDIN
@pytest.mark.long
def test_a_cudnn_that_is_not_served_or_fails_is_named_in_its_place(tmp_path):
    """The own kernels of the row are timed all the same, and none in cuDNN's name."""
    flags = ("--quick", "--each", 1, "--out", tmp_path, "--only", "layer")
    old = output_of(0, BENCHMARK, *flags, STANDIN_CUDNN="90000")
    assert "forward: no cuDNN: " in old
    assert "9.0.0" in old
    broken = output_of(0, BENCHMARK, *flags, STANDIN_FAIL="call=cudnnBackendExecute code=3000")
    assert "forward: no cuDNN: it can't: " in broken
    (file,) = tmp_path.glob("*-ring.json")
    (row,) = json.loads(file.read_text())["rows"].values()
    for found in row["passes"].values():
        assert {"ours", "own kernels"} <= set(found["contenders"])
        assert "cuDNN" in found["absent"]


@pytest.mark.long
@pytest.mark.needs("host")
def test_the_benchmark_says_that_it_needs_a_gpu(tmp_path):
    assert "expected an NVIDIA GPU" in output_of(2, BENCHMARK, "--out", tmp_path)


@ON_STANDIN
def test_tests_for_more_gpus_than_there_are_are_skipped_and_counted():
    chosen = "1x1x1-contiguous-full-n1-g1-d32-float32 or test_scale_is_used_in_both_passes"
    printed = gpu_tests(0, "tests/python/test_correct.py", "-k", chosen)
    assert "passed" in printed
    assert "needs 2 GPUs, and this machine has 1" in printed


@ON_STANDIN
def test_a_lost_gpu_ends_its_worker_alone(tmp_path):
    file = tmp_path / "test_loses.py"
    file.write_text(LOSES_ITS_GPU)
    printed = gpu_tests(1, file, "-p", "conftest", "--rootdir", tmp_path)
    assert "2 failed, 3 passed" in printed
