"""Versions of cuDNN, and other GPUs, each on a stand-in in a process of its own."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import platforms
import pytest
from test_cudnn import PROBLEMS, assert_near, errors

pytestmark = pytest.mark.needs("standin")


def of_process(program, **environment):
    """Runs a program in a process of its own, whose stand-in is another one."""
    return subprocess.run(
        [sys.executable, "-c", f"import platforms; platforms.choose('standin', False); {program}"],
        cwd=platforms.ROOT / "tests" / "python",
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def answer_of(call, **environment):
    """Returns what a call returns in a process of its own, and the lines that the process writes to
    stderr. Fails where the stand-in complains."""
    program = f"import json, test_cudnn, test_cudnn_versions; print(json.dumps({call}))"
    ran = of_process(program, **environment)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "stand-in: " not in ran.stderr, ran.stderr[-2000:]
    return json.loads(ran.stdout.splitlines()[-1]), ran.stderr


def test_errors_in_a_fixed_order_are_near_those_of_the_own_kernels_on_blackwell():
    """The gradient of queries is rounded there, on other GPUs than this process has."""
    names = ("wide", "unequal widths", "256 columns")
    ratios, _ = answer_of(f"test_cudnn.fixed_ratios{names}", STANDIN_KIND="b200")
    assert_near(ratios)


def worst_error():
    """Returns the largest error in any order and in a fixed one, relative to a result's norm. The
    lengths divide no alignment of statistics."""
    one = replace(PROBLEMS["zigzag"], mesh=(1, 2, 1), q_len=140, kv_len=140)
    arrays = one.arrays()
    return max(max(errors(one, arrays, order).values()) for order in ("any", "fixed"))


@pytest.mark.parametrize(
    ("version", "has_fixed_order"), [("91900", False), ("92499", False), ("92500", True)]
)
def test_older_versions_compute_what_they_can(version, has_fixed_order):
    environment = {"STANDIN_CUDNN": version, "BURST_ATTENTION_EXPLAIN": "1"}
    error, told = answer_of("test_cudnn_versions.worst_error()", **environment)
    assert error <= 6e-3
    assert "key_grads by cudnn" in told
    assert ("it needs version 9.25.0 or newer for this, got 9." in told) is not has_fixed_order


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"STANDIN_WITHOUT": "libcudnn.so.9"}, "libcudnn.so.9"),
        ({"STANDIN_CUDNN": "91899"}, "expected version 9.19.0 to 9.29.99, got 9.18.99"),
        ({"STANDIN_CUDNN": "93000"}, "expected version 9.19.0 to 9.29.99, got 9.30.0"),
        ({"STANDIN_CUDNN": "92000", "STANDIN_WITHOUT": "libnvrtc.so.13"}, "nvidia-cuda-nvrtc"),
    ],
    ids=["missing", "older", "newer", "without its compiler"],
)
def test_a_library_that_can_not_be_used_is_told_with_the_way_out(variables, reason):
    program = "import test_cudnn as t; a = t.PLAIN.arrays(); t.results(t.PLAIN, a)"
    ran = of_process(program, **variables)
    assert ran.returncode != 0
    library = variables.get("STANDIN_WITHOUT", "libcudnn.so.9")
    assert f"{library} can't be used" in ran.stderr, ran.stderr[-2000:]
    assert reason in ran.stderr
    assert "nvidia-cudnn-cu13" in ran.stderr


PACKED, BY_ROWS = (20, 10, 1, 1), (20, 1, 2, 1)


@pytest.mark.parametrize(
    ("version", "engine", "strides", "told"),
    [
        ("92499", 6, PACKED, "3000"),
        ("92500", 5, PACKED, "3000"),
        ("92500", 6, PACKED, "0"),
        ("92599", 6, BY_ROWS, "0 cuDNN before 9.26 reads statistics without gaps, got strides"),
        ("92600", 6, BY_ROWS, "0"),
    ],
)
def test_the_stand_in_refuses_and_complains_as_versions_do(version, engine, strides, told):
    """Other engines are refused; statistics that are read wrong are not, so it complains."""
    script = platforms.ROOT / "tests" / "python" / "cudnn_plans.py"
    ran = subprocess.run(
        [sys.executable, script, str(engine), *map(str, strides)],
        env=os.environ | {"STANDIN_CUDNN": version},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    found = ran.stdout.strip()
    assert found == told or (" " in told and found.startswith(told)), found
