"""`make gpu-check` without a GPU: the rehearsal runs every part, and every failure is reported."""

import json
import subprocess
import sys
import time
import zipfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import gpu_check as command
import jax
import pytest
from check import group, numerics, parts, problem, run, speed, training, virtual
from gpu import session
from gpu.library import AbsentError

pytestmark = pytest.mark.needs("text")

SMALL = problem.Problem("", 2, 70, 4, 2, 32, "bfloat16", True, "striped", 2)
COMMAND = [sys.executable, command.__file__]


@pytest.mark.long
def test_rehearsal_runs_every_part_on_the_wheel(tmp_path):
    wheel = tmp_path / "burst_attention-0-py3-none-any.whl"
    package = Path(virtual.library()._name).parent
    with zipfile.ZipFile(wheel, "w") as content:
        for file in package.rglob("*"):
            if file.suffix in (".py", ".so"):
                content.write(file, file.relative_to(package.parent))
    flags = ["--rehearse", "--out", str(tmp_path), "--wheel", str(wheel)]
    rehearsal = subprocess.run([*COMMAND, *flags], capture_output=True, text=True)
    assert rehearsal.returncode == 0, rehearsal.stdout + rehearsal.stderr
    written = json.loads((tmp_path / "cpu-ring.json").read_text())
    assert written["complete"]
    assert str(package) not in written["environment"]["burst_attention"]
    assert {name: part["verdict"] for name, part in written["parts"].items()} == dict.fromkeys(
        parts.PARTS, "passed"
    )
    about = {name: [row["name"] for row in part["rows"]] for name, part in written["parts"].items()}
    assert len(about["features"]) == len(numerics.Features().names(True)) == 8
    assert any("window" in name for name in about["processes"])
    assert any("window" in name for name in about["speed"])
    assert not any(part["left_out"] for part in written["parts"].values())
    assert written["several processes by"] == "NCCL_HOSTID"
    if find_spec("matplotlib"):
        assert (tmp_path / "cpu-ring.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_gpu_the_command_says_so(tmp_path):
    result = subprocess.run([*COMMAND, "--out", str(tmp_path)], capture_output=True, text=True)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "expected an NVIDIA GPU" in result.stdout


FAULTY = """
import os, signal, sys, time
from check import worker

class Part:
    def __init__(self, name):
        self.name = name

    def names(self, rehearse):
        return ["first", "second"]

    def measure(self, name, rehearse):
        if (self.name, name) == ("one", "first"):
            raise ValueError("it is broken")
        if (self.name, name) == ("virtual", "first"):
            time.sleep(60)
        if (self.name, name) == ("losses", "first"):
            os.kill(os.getpid(), signal.SIGKILL)
        if (self.name, name) == ("ranks", "first"):
            if os.environ["RANK_OF_TEST"] == "1":
                print("last words", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # waits for the other rank
        wrong = ["too slow"] if (self.name, name) == ("speed", "first") else []
        row = {"name": name, "shown": "", "wrong": wrong, "errors": {}}
        return row | {"kind": "layer", "losses": {"ring": [1.0], "plain": [1.0]}}

def join(self, address, count, rank):
    if "NCCL_HOSTID" in os.environ:
        raise RuntimeError("Duplicate GPU detected")
    os.environ["RANK_OF_TEST"] = str(rank)
    return {}

def train(self, steps, attention, devices):
    losses = [2.0 - 0.001 * step for step in range(steps)]
    return {"losses": losses, "gathered": True, "in flight": {}, "scheduler": ""}

worker._part = Part
worker.missing = lambda *_: None
worker.context_is_lost = lambda: None
worker.Work.environment = lambda self: {"device": "Made Up"}
worker.Work.join, worker.Work.train = join, train
worker.main()
"""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """Returns a run on workers that fail in every way: its results and its folder."""
    pytest.importorskip("matplotlib", reason="the wheel's environments have JAX and pytest alone")
    folder = tmp_path_factory.mktemp("faulty")
    worker = [sys.executable, "-c", FAULTY]
    checked = run.Run(session.Budget(100.0), folder, worker=worker, item_s=1.0)
    passed = command.check(checked, list(parts.PARTS))
    return SimpleNamespace(passed=passed, found=checked.found["parts"], folder=folder, run=checked)


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ("one", "ValueError: it is broken"),
        ("virtual", "no answer within 1 s"),
        ("losses", "SIGKILL"),
        ("speed", "too slow"),
        ("processes", "rank 1: the worker ended by SIGKILL; it last said: last words"),
    ],
)
def test_each_kind_of_failure_is_reported_and_hides_nothing(faulty, part, why):
    assert not faulty.passed
    found = faulty.found[part]
    assert found["verdict"] == "FAILED"
    assert any(why in entry["why"] for entry in found["failed"])
    if part == "processes":
        assert any("lost before" in entry["why"] for entry in found["failed"])
    if part != "processes":  # its other problems need processes that have ended
        assert [row["name"] for row in found["rows"]][-1] == "second"


def test_parts_without_a_failure_pass_beside_those_with_one(faulty):
    assert faulty.found["memory"]["verdict"] == "passed"
    assert faulty.found["training"]["verdict"] == "passed"
    assert [len(row["losses"]["ring"]) for row in faulty.found["training"]["rows"]] == [200, 40]
    written = json.loads((faulty.folder / "made-up-ring.json").read_text())
    assert written["complete"]
    assert written["parts"]["one"]["failed"] == [
        {"name": "first", "why": "ValueError: it is broken"}
    ]
    if find_spec("matplotlib"):
        assert (faulty.folder / "made-up-ring.png").exists()


def test_the_way_to_share_a_gpu_that_works_is_found_and_the_other_explained(faulty):
    assert faulty.run.found["several processes by"] == "NCCL_MULTI_RANK_GPU_ENABLE"
    assert "Duplicate GPU" in faulty.run.found["several processes not by"]["NCCL_HOSTID"]


def test_part_that_fails_outside_its_workers_fails_alone(tmp_path):
    def broken(run, record, share):
        raise KeyError("names")

    checked = run.Run(session.Budget(100.0), tmp_path)
    checked.carry_out("speed", broken, 1.0)
    assert checked.parts["speed"].failed == [{"name": "speed", "why": "KeyError: 'names'"}]


def test_processes_that_can_not_share_the_device_are_absent(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise session.LostError("rank 0: Duplicate GPU detected")

    monkeypatch.setattr(parts, "form", refuse)
    checked = run.Run(session.Budget(100.0), tmp_path)
    checked.carry_out("processes", parts.processes, 1.0)
    assert checked.parts["processes"].verdict == "absent"
    assert len(checked.parts["processes"].left_out) == 2
    assert "Duplicate GPU" in checked.parts["processes"].left_out[1]["why"]


def test_time_that_is_up_fails_what_must_be_checked_alone(tmp_path):
    now = [0.0]
    checked = run.Run(session.Budget(100.0, lambda: now[0]), tmp_path)
    now[0] = 101.0
    for name in ("one", "speed", "processes"):
        checked.carry_out(name, *parts.PARTS[name])
    verdicts = {name: part.verdict for name, part in checked.parts.items()}
    assert verdicts == {"one": "FAILED", "speed": "absent", "processes": "FAILED"}


def test_group_ends_those_that_wait_for_one_that_died(monkeypatch):
    monkeypatch.setattr(group, "GRACE_S", 0.2)
    code = """
import json, os, sys, time
print(json.dumps({"missing": None}), flush=True)
item = json.loads(input())
time.sleep(60) if item["rank"] else os._exit(3)
"""
    pair = group.Group([sys.executable, "-c", code], [{}, {}])
    try:
        pair.start()
        began = time.monotonic()
        answers = pair.ask([{"rank": 0}, {"rank": 1}], 50.0)
        assert time.monotonic() - began < 20
    finally:
        pair.close()
    assert "code 3" in answers[0]["error"]
    assert "SIGKILL" in answers[1]["error"]


def test_each_process_seems_to_be_on_a_host_of_its_own(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    monkeypatch.delenv("NCCL_NET", raising=False)
    first, second = group.environments("NCCL_HOSTID", 2, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert first["NCCL_HOSTID"] != second["NCCL_HOSTID"]
    for one in (first, second):
        assert one["CUDA_VISIBLE_DEVICES"] == "3"
        assert one["NCCL_NET"] == "Socket"
        assert one["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
        assert float(one["XLA_PYTHON_CLIENT_MEM_FRACTION"]) <= 0.5


def test_each_process_gets_a_gpu_where_there_are_enough(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6")
    both = group.environments(group.EACH, 2, {})
    assert [one["CUDA_VISIBLE_DEVICES"] for one in both] == ["3", "5"]
    for one in both:
        assert "NCCL_HOSTID" not in one
        assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in one
    with_two = SimpleNamespace(rehearse=False, found={})
    assert parts._ways(with_two, 2)[0] == group.EACH
    assert group.EACH not in parts._ways(with_two, 4)
    with_two.found[parts.BY] = group.EACH
    assert parts._ways(with_two, 3)[0] == group.EACH
    assert parts._ways(with_two, 4)[0] == "NCCL_HOSTID"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", "")
    assert group.gpus() == ["0"]


def test_losses_must_agree_be_finite_and_fall():
    falling = [3.0, 2.5, 2.0]
    assert parts.compare(falling, [3.0, 2.51, 2.0], 0.01)[1] == []
    assert "step 2" in parts.compare(falling, [3.0, 2.6, 2.0], 0.01)[1][0]
    assert "nothing is learnt" in parts.compare(falling[::-1], falling[::-1])[1][0]
    assert "finite" in parts.compare([3.0, float("nan")], [3.0, 2.0])[1][0]
    assert "as many" in parts.compare(falling, falling[:2])[1][0]


def test_calls_beside_a_collective_are_counted():
    program = """HloModule step, is_scheduled=true
  %s = (f32[4], f32[8]) all-gather-start(f32[4] %x)
  %a = f32[8] custom-call(%q), custom_call_target="burst_attention_forward"
  %d = f32[8] all-gather-done((f32[4], f32[8]) %s)
  %b = f32[8] custom-call(%q), custom_call_target="burst_attention_backward"
"""
    assert training._in_flight(program) == {"calls": 2, "beside a collective": 1}


def test_ring_slower_than_its_bar_fails(monkeypatch):
    monkeypatch.setattr(speed, "SECONDS", 0.0)
    monkeypatch.setattr(speed, "SAMPLE_MS", 1.0)
    item = speed.Item(SMALL, "ring", "forward")
    slow, fast = (lambda seconds=s: time.sleep(seconds) for s in (0.02, 0.01))
    row = speed._measure(item, slow, fast, lambda: [0.0], rehearse=False)
    assert 1.5 < row["ratio"] < 2.5
    assert "expected at most 1.12" in row["wrong"][0]
    assert speed._measure(item, fast, fast, lambda: [0.5], False)["wrong"][0].startswith("result 0")


def test_window_that_is_not_pruned_fails(monkeypatch):
    monkeypatch.setattr(speed, "SECONDS", 0.0)
    monkeypatch.setattr(speed, "SAMPLE_MS", 1.0)
    item = next(item for item in speed._items(False).values() if item.kind == "window")
    assert 0.09 < item.bar < 0.1  # three times 1,025 of 65,536 / 2 keys
    slow, fast = (lambda seconds=s: time.sleep(seconds) for s in (0.02, 0.0005))
    assert speed._measure(item, fast, slow, lambda: [0.0], rehearse=False)["wrong"] == []
    row = speed._measure(item, slow, slow, lambda: [0.0], rehearse=False)
    assert "× whole causal mask, expected at most 0.09" in row["wrong"][0]


def test_full_device_is_no_failure_of_a_row(monkeypatch):
    def full(item, rehearse):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(speed, "_ring", full)
    with pytest.raises(AbsentError, match="not enough memory"):
        speed.Speed().measure(next(iter(speed.Speed().names(True))), True)
