"""What `python -m burst_attention check` makes of a child process, whatever the child does."""

import json
import os
import sys

import jax
import numpy as np
import pytest
from burst_attention import __main__ as command
from burst_attention import _confirmed
from burst_attention._cli import check, checks_of_kernels

pytestmark = pytest.mark.needs("text")

CHILD = f"""#!{sys.executable}
import json, os, signal, sys, time
question, told = json.loads(sys.argv[-2]), int(sys.argv[-1])
def tell(what):
    os.write(told, (json.dumps(what) + "\\n").encode())
"""


@pytest.fixture
def child(monkeypatch, tmp_path):
    """Returns a function that makes a program the child of the command."""

    def make(program):
        path = tmp_path / "child"
        path.write_text(CHILD + program)
        path.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(path))

    return make


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Returns a function that runs the command, and returns its code, its lines and the record."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["burst_attention", "check", *arguments])
        code = command.main()
        return code, capsys.readouterr().out.splitlines(), _confirmed.read("GPU")

    return run


@pytest.mark.parametrize(
    "end",
    [
        "print('at the end'); print('and more', file=sys.stderr)",
        "sys.exit('at the end')",
        "os.abort()",
        "time.sleep(60)",
        "os.fork() or time.sleep(5)",
    ],
)
def test_what_a_child_does_after_its_answer_changes_nothing(child, end):
    child(f"print('first'); tell({{'answer': {{'wrong': 'out'}}}})\n{end}")
    assert check._ask({}, 2.0) == {"wrong": "out"}


@pytest.mark.parametrize(
    ("program", "answer"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", {"error": "exit code -9: it said nothing"}),
        ("sys.exit('no memory\\n')", {"error": "exit code 1: no memory"}),
        ("sys.exit(0)", {"error": "exit code 0: it said nothing"}),
        (
            "time.sleep(60)",
            {"error": "no answer within 2 s, of which it waited 0 s for the GPU"},
        ),
        (
            "tell({'launched': time.monotonic()}); tell({'done': 0}); time.sleep(60)",
            {"error": "no answer within 2 s, of which it waited 0 s for the GPU"},
        ),
        (
            "tell({'launched': time.monotonic() - 7}); time.sleep(60)",
            {"wrong": "no answer within 2 s, of which it waited 8 s for the GPU"},
        ),
    ],
)
def test_a_child_without_an_answer_refutes_only_if_it_waits_for_the_gpu(child, program, answer):
    child(program)
    # The child takes a part of the time to start.
    told = {name: words.replace("8 s for", "9 s for") for name, words in answer.items()}
    assert check._ask({}, 2.0) in (answer, told)


@pytest.mark.parametrize(
    ("setting", "platforms"),
    [(None, "cuda,cpu"), ("", "cuda,cpu"), ("cuda", "cuda,cpu"), ("cpu,cuda", "cpu,cuda")],
)
def test_a_child_has_gpus_and_cpu_devices(monkeypatch, child, setting, platforms):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if setting is not None:
        monkeypatch.setenv("JAX_PLATFORMS", setting)
    child("tell({'answer': {'error': os.environ['JAX_PLATFORMS']}})")
    assert check._ask({}, 30.0) == {"error": platforms}


PASSING = """
families = {"attention": {}, "linear_attention": {"wrong": "dq"}, "cudnn": {"absent": "none"}}
failed = {"error": "MemoryError"}
is_first = question["ask"] == "kinds"
tell({"answer": {"kinds": {"GPU": 0}} if is_first else families.get(question["family"], failed)})
"""


def test_a_failure_that_may_pass_leaves_the_verdict_of_an_earlier_check(child, run):
    _confirmed.write("GPU", {"delta_rule": "confirmed"})
    child(PASSING)
    code, lines, record = run()
    assert code == 1
    assert lines[:5] == [
        "GPU: attention         confirmed",
        "GPU: linear_attention  dq",
        "GPU: delta_rule        not checked: MemoryError",
        "GPU: decode_attention  not checked: MemoryError",
        "GPU: cudnn             not here: none",
    ]
    expected = {"attention": "confirmed", "linear_attention": "dq", "delta_rule": "confirmed"}
    assert record == expected
    child(PASSING.replace('{"wrong": "dq"}', "{}"))
    assert run()[0] == 2
    child(PASSING.replace('{"wrong": "dq"}', "{}").replace('{"error": "MemoryError"}', "{}"))
    assert run()[0] == 0


def test_where_nothing_can_be_checked_nothing_is_kept(child, run, tmp_path):
    child("tell({'answer': {'error': 'no GPU'}})")
    assert run() == (2, ["there is nothing to check: no GPU"], {})
    child(
        "tell({'answer': {'kinds': {'GPU': 0}} if question['ask'] == 'kinds' else {'error': ''}})"
    )
    code, lines, _ = run()
    assert (code, lines[-1]) == (2, "GPU: cudnn             not checked: ")
    assert not (tmp_path / "burst_attention").exists()


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "0", "1e9", "a minute"])
def test_a_time_that_is_none_is_an_error(run, capsys, seconds):
    with pytest.raises(SystemExit) as ended:
        run(f"--seconds={seconds}")
    assert ended.value.code == 2
    words = f"argument --seconds: expected seconds from 1 to 86400, got '{seconds}'"
    assert words in capsys.readouterr().err


class RefusedError(RuntimeError):
    """An error of the runtime."""


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (MemoryError(), {"error": "MemoryError"}),
        (ValueError("\n\n  words \n"), {"error": "ValueError: words"}),
        (RefusedError("RESOURCE_EXHAUSTED: Out of memory"), None),
        (RefusedError("cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY, out of memory"), None),
        (RefusedError("cuLaunchKernel failed: CUDA_ERROR_DEVICE_UNAVAILABLE, busy"), None),
        (RefusedError("cuStreamSynchronize failed: CUDA_ERROR_ECC_UNCORRECTABLE"), None),
        (
            RefusedError("cuModuleLoadData failed: image: CUDA_ERROR_NO_BINARY_FOR_GPU, none"),
            "wrong",
        ),
        (RefusedError("cuLaunchKernel failed: CUDA_ERROR_LAUNCH_FAILED, unspecified"), "wrong"),
        (RefusedError("INTERNAL\nCUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access"), "wrong"),
    ],
    ids=repr,
)
def test_errors_that_will_come_again_refute(monkeypatch, error, answer):
    def fails(gpu):
        raise error

    monkeypatch.setattr(jax, "local_devices", lambda backend: jax.devices())
    monkeypatch.setitem(checks_of_kernels.FAMILIES, "attention", fails)
    question = {"ask": "family", "family": "attention", "gpu": 0}
    if not isinstance(answer, dict):
        answer = {answer or "error": f"RefusedError: {str(error).splitlines()[0]}"}
    assert checks_of_kernels.answer(question, print) == answer


def test_a_gpu_tells_when_a_program_waits_for_it():
    told = []
    gpu = checks_of_kernels.Gpu(jax.devices()[0], told.append)
    (found,) = gpu.results(lambda x: (x + 1,), [np.ones(2, np.float32)])
    assert found.tolist() == [2, 2]
    assert told == ["launched", "done"]


def test_a_child_answers_in_the_file_of_its_parent(monkeypatch):
    def answer(question, tell):
        tell(question["ask"])
        return {"kinds": {}}

    monkeypatch.setattr(checks_of_kernels, "answer", answer)
    with check._memory("told") as told:
        check._answer({"ask": "launched"}, told.fileno())
        first, last = map(json.loads, check._lines(told))
        assert not os.get_inheritable(told.fileno())
    assert list(first) == ["launched"]
    assert last == {"answer": {"kinds": {}}}
