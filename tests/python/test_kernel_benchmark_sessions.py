"""In the GPU kernels' benchmark, a worker that hangs or crashes costs one item."""

import json
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
from gpu import library, session, worker

import kernels as command

pytestmark = pytest.mark.needs("text")

SERVANT = """
import json, os, sys, time
print(json.dumps({"missing": None}), flush=True)
for line in sys.stdin:
    item = json.loads(line)
    if item["do"] == "crash":
        print("it went wrong here", file=sys.stderr, flush=True)
        os.abort()
    if item["do"] == "hang":
        time.sleep(60)
    print(json.dumps({"result": [item["do"], os.getpid()]}), flush=True)
"""


@pytest.fixture
def asking():
    opened = []

    def make(code):
        opened.append(session.Session(None, [sys.executable, "-c", textwrap.dedent(code)]))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def test_session_replaces_a_worker_that_crashes_or_hangs(asking):
    servant = asking(SERVANT)
    first, again = (servant.ask({"do": "work"}, 30.0)["result"] for _ in range(2))
    assert first == again
    crashed = servant.ask({"do": "crash"}, 30.0)
    assert crashed["lost"]
    assert "SIGABRT" in crashed["error"]
    assert "it went wrong here" in crashed["error"]
    second = servant.ask({"do": "work"}, 30.0)["result"]
    assert second[1] != first[1]
    hung = servant.ask({"do": "hang"}, 0.2)
    assert hung["lost"]
    assert "no answer within" in hung["error"]
    assert servant.ask({"do": "work"}, 30.0)["result"][0] == "work"
    assert servant.losses == 2


def test_session_says_what_the_machine_lacks(asking):
    with pytest.raises(session.UnusableError, match="no GPU"):
        asking('print(\'{"missing": "no GPU"}\')').start(30.0)
    with pytest.raises(session.LostError, match="code 3"):
        asking("raise SystemExit(3)").start(30.0)


def test_worker_answers_every_item_and_stops_when_the_gpu_is_lost(monkeypatch):
    def absent():
        raise library.AbsentError("not here")

    work = SimpleNamespace(divide=lambda by: 6 / by, absent=absent)
    health = iter([None, None, None, "illegal address", None])
    monkeypatch.setattr(worker, "missing", lambda: None)
    monkeypatch.setattr(worker, "context_is_lost", lambda: next(health))
    items = [{"part": "divide", "by": by} for by in (2, 0)]
    items += [{"part": "absent"}, {"part": "divide", "by": 3}, {"part": "divide", "by": 1}]
    told = []
    answers = SimpleNamespace(write=told.append, flush=lambda: None)
    worker.serve(work, [json.dumps(item) for item in items], answers)
    ready, result, error, without, lost = (json.loads(line) for line in told if line != "\n")
    assert ready == {"missing": None}
    assert result == {"result": 3.0}
    assert error["error"].startswith("ZeroDivisionError")
    assert without == {"absent": "not here"}
    assert lost == {"error": "lost the GPU: illegal address", "lost": True}


def test_without_a_gpu_the_command_says_so():
    result = subprocess.run([sys.executable, command.__file__], capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    assert result.stdout.startswith("expected")
    assert "found none" in result.stdout
