"""Answers in ten minutes with a GPU: does it run, is it right, is it fast, what to believe?

`run` in the bundle of `make gpu-bundle` calls this program. It goes through five stages. Each item
of a stage runs in a process of its own with a limit on its time, so a hang or a crash costs only
this item. After each item it writes results.json and page.md.

  facts    the GPU, its driver and versions; rates of copies and of products
  runs     every image loads; each family of kernels agrees with plain JAX, and rings with float64;
           memcheck where compute-sanitizer is installed
  right    the Python tests, the most telling files first, as far as the time goes
  fast     the kernels against cuDNN and flash attention, rings against one launch, decoding
  believe  the predictions beside what was measured, and constants for the model

Exit code 0: all that ran passed; 1: something failed, or there is no GPU.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu import believe
from gpu.report import save
from gpu.session import FOLDERS, Budget, module

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests" / "python"
SHARES = {"facts": 0.06, "runs": 0.25, "right": 0.60, "fast": 1.0}
"""The share of the time at which each stage ends. A stage begins when the previous one is done. The
last stage, which compares results, takes no time."""
TELLING = ("test_correct", "test_features", "test_virtual", "test_linear", "test_decode")
"""The test files that come first."""
QUICK_ROWS = ("packed", "decode", "host")
"""Kinds of rows that a quick run has."""
SETTINGS = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Variables of all items: one must leave memory to the next, should it hang."""
SAID = 300
"""Characters of an item's last words."""

Answer = dict[str, Any]


@dataclass
class Item:
    """A command and how to read its output."""

    name: str
    command: list[str]
    read: Callable[[int, str], Answer]
    """Returns ``passed`` and what to show, given the exit code and stdout."""
    limit_s: float = 120.0


@dataclass
class Result:
    """The outcome of an item."""

    stage: str
    name: str
    passed: bool | None
    """None: it was left out, or says something that is neither right nor wrong."""
    words: str
    seconds: float
    found: Answer = field(default_factory=dict)


class Run:
    """Carries the stages out, and keeps their results on disk."""

    def __init__(self, out: Path, minutes: float, platform: str, quick: bool):
        self.out, self.platform, self.quick = out, platform, quick
        self.budget = Budget(60 * minutes)
        self.began = datetime.now(UTC).isoformat(timespec="seconds")
        self.results: list[Result] = []

    def all(self) -> bool:
        """Runs all stages; returns whether nothing failed."""
        for stage, share in SHARES.items():
            for item in getattr(self, stage)():
                left = self.budget.left(share)
                if left < 1:
                    self._keep(Result(stage, item.name, None, "left out: the time was up", 0.0))
                else:
                    self._keep(self._one(stage, item, min(item.limit_s, left)))
                if not self.results[0].passed:
                    return False  # there is no GPU
        self._believe()
        return all(result.passed is not False for result in self.results)

    def facts(self) -> Iterator[Item]:
        """Yields the items of the first stage."""
        flags = ["--quick"] if self.quick else []
        yield Item("facts", module("gpu.facts"), _json_line)
        yield Item("rates", [*module("gpu.facts"), "--rates", *flags], _rates)

    def runs(self) -> Iterator[Item]:
        """Yields the items of the second stage."""
        yield Item("images", module("gpu.loads"), _images)
        # It ends before the stage does, so that it tells which family hangs.
        seconds = max(30.0, self.budget.left(SHARES["runs"]) - 20)
        check = [sys.executable, "-m", "burst_attention", "check", "--seconds", str(seconds)]
        yield Item("families", check, _lines, seconds + 10)
        some = "test_ring and 8-" + ("zigzag-keys-causal" if self.quick else "")
        yield self._pytest("rings on one GPU", "test_virtual", some)
        if self._found("facts").get("devices", 1) > 1:
            yield self._pytest("rings over NCCL", "test_correct", "1x2x1")
        if sanitizer := shutil.which("compute-sanitizer"):
            command = [sanitizer, "--error-exitcode", "9", *check]
            yield Item("memcheck", command, _lines, 200.0)

    def right(self) -> Iterator[Item]:
        """Yields the items of the third stage: a file of tests each."""
        files = [path.stem for path in sorted(TESTS.glob("test_*.py"))]
        first = [name for name in TELLING if name in files]
        for name in first[:1] if self.quick else [*first, *sorted(set(files) - set(first))]:
            yield self._pytest(name, name, "1x1x1" if self.quick else "")

    def _pytest(self, name: str, file: str, chosen: str = "") -> Item:
        """Returns an item that runs a file of tests, or the tests whose names have some words."""
        pytest = [sys.executable, "-m", "pytest", f"--platform={self.platform}", "-q"]
        options = ["-o", f"cache_dir={self.out}/pytest", "-c", str(ROOT / "pyproject.toml")]
        path = str(TESTS / f"{file}.py")
        return Item(name, [*pytest, *options, "-k", chosen, path], _tests, 150.0)

    def fast(self) -> Iterator[Item]:
        """Yields the items of the fourth stage."""
        benchmarks, quick = ROOT / "benchmarks", ["--quick"] if self.quick else []
        only = ["--only", *QUICK_ROWS] if self.quick else []
        for name, program, share, more in (
            ("kernels", "kernels.py", 0.5, []),
            ("programs", "ring_gpu.py", 0.9, only),
        ):
            seconds = max(10.0, share * self.budget.left(SHARES["fast"]))
            command = [sys.executable, str(benchmarks / program), "--out", str(self.out)]
            flags = ["--budget", str(seconds), *quick, *more]
            yield Item(name, command + flags, _bench, seconds + 30)

    def _one(self, stage: str, item: Item, limit_s: float) -> Result:
        """Runs an item, and ends its whole group of processes at its limit."""
        began = time.monotonic()
        folders = os.pathsep.join([*map(str, FOLDERS), os.environ.get("PYTHONPATH", "")])
        process = subprocess.Popen(
            item.command,
            env=os.environ | SETTINGS | {"PYTHONPATH": folders},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            out, said = process.communicate(timeout=limit_s)
            answer = item.read(process.returncode, out)
            if not answer["passed"] and not answer["words"]:
                answer["words"] = _ended(process.returncode, said or out)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            out, said = "", ""
            # A process that the driver holds can't be killed, and its pipes stay open.
            with contextlib.suppress(subprocess.TimeoutExpired):
                out, said = process.communicate(timeout=5)
            words = f"no end within {limit_s:.0f} s; it last said: {_tail(out or said)}"
            answer = {"passed": False, "words": words}
        except (ValueError, KeyError, IndexError):
            answer = {"passed": False, "words": _ended(process.returncode, said or out)}
        seconds = round(time.monotonic() - began, 1)
        found = answer.get("found", {})
        return Result(stage, item.name, answer["passed"], answer["words"], seconds, found)

    def _keep(self, result: Result) -> None:
        self.results.append(result)
        print(_line(result), flush=True)
        rows = [asdict(one) for one in self.results]
        save({"began": self.began, "results": rows}, self.out / "results.json")
        (self.out / "page.md").write_text(self._page())

    def _believe(self) -> None:
        """Compares measured figures with predicted ones, unless they are of tiny shapes."""
        if self.quick:
            words = "a quick run measures nothing; all figures stay predicted"
            self._keep(Result("believe", "predictions", None, words, 0.0))
            return
        for words in believe.slow(self._found("facts") | self._found("rates")):
            self._keep(Result("believe", "device", False, words, 0.0))
        for name, passed, words in believe.verdicts(self.out):
            self._keep(Result("believe", name, passed, words, 0.0))
        for name, words in believe.constants(self.out):
            self._keep(Result("believe", f"model: {name}", None, words, 0.0))

    def _found(self, name: str) -> Answer:
        """Returns what an item found; nothing if it failed."""
        return next((one.found for one in self.results if one.name == name), {})

    def _page(self) -> str:
        """Returns the results as a page."""
        facts = self._found("facts")
        device = facts.get("device", "unknown device")
        lines = [f"# {device}, {facts.get('driver', 'unknown driver')}, {self.began}", ""]
        lines += [f"- {name}: {value}" for name, value in facts.items()]
        for stage in [*SHARES, "believe"]:
            rows = [one for one in self.results if one.stage == stage]
            if rows:
                lines += ["", f"## {stage}", "", "| item | verdict | s | |", "|---|---|---|---|"]
                lines += [_row(one) for one in rows]
        return "\n".join(lines) + "\n"


def _verdict(result: Result) -> str:
    return {True: "passed", False: "FAILED", None: "-"}[result.passed]


def _line(result: Result) -> str:
    words = result.words.split("\n")[0][:100]
    return (
        f"{result.stage:8} {result.name:24} {_verdict(result):8} {result.seconds:6.1f} s  {words}"
    )


def _row(result: Result) -> str:
    words = result.words.replace("|", "\\|").replace("\n", "<br>")
    return f"| {result.name} | {_verdict(result)} | {result.seconds} | {words} |"


def _ended(code: int, said: str) -> str:
    """Says how a process ended, with its last words."""
    how = f"{signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{how}: {_tail(said)}"


def _tail(said: str) -> str:
    return " ".join(said.split())[-SAID:]


def _json_line(code: int, out: str) -> Answer:
    found = json.loads(out.splitlines()[-1])
    return {"passed": code == 0, "words": "", "found": found}


def _rates(code: int, out: str) -> Answer:
    found = json.loads(out.splitlines()[-1])
    words = f"copies {found['copy_gb_s']:.0f} GB/s"
    if "product_tflop_s" in found:
        words += f", products {found['product_tflop_s']:.0f} TFLOP/s"
    return {"passed": code == 0, "words": words, "found": found}


def _images(code: int, out: str) -> Answer:
    found = json.loads(out.splitlines()[-1])
    refused = found["refused"]
    words = f"{found['of'] - len(refused)} of {found['of']} images of {found['target']} load"
    lines = [words, *(f"{name}: {error}" for name, error in list(refused.items())[:5])]
    return {"passed": code == 0 and not refused, "words": "\n".join(lines), "found": found}


def _lines(code: int, out: str) -> Answer:
    return {"passed": code == 0, "words": out.strip()}


def _tests(code: int, out: str) -> Answer:
    """Reads pytest's summary; no test that fits the platform is no failure."""
    lines = out.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    words = "\n".join([lines[-1].strip("= "), *failed[:5]]) if lines else ""
    return {"passed": None if code == 5 else code == 0, "words": words}


def _bench(code: int, out: str) -> Answer:
    """Reads a benchmark's output; its last line sums up."""
    words = "\n".join(reversed(out.strip().splitlines()))
    return {"passed": None if code == 2 else code == 0, "words": words}


def main() -> int:
    """Runs the stages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="for all stages, about")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of results")
    parser.add_argument("--quick", action="store_true", help="a few small items of each stage")
    parser.add_argument("--platform", default="cuda", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    flags.out.mkdir(parents=True, exist_ok=True)
    passed = Run(flags.out, flags.minutes, flags.platform, flags.quick).all()
    print(f"results: {flags.out / 'page.md'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
