"""The stages of `ten_minutes.py`: their items, in the order in which they run.

`STAGES` has the items of each stage as functions. A new item is a function that yields an `Item`,
and a place in this list.
"""

import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import processes
from .session import BENCHMARKS, Budget, module

ROOT = BENCHMARKS.parent
TESTS = ROOT / "tests" / "python"
TELLING = (
    "test_correct",
    "test_gaps",
    "test_features",
    "test_virtual",
    "test_linear",
    "test_decode",
)
"""The test files that come first in their stage."""
QUICK_ROWS = ("carry", "ring", "layer", "packed", "delta", "host")
"""Kinds of rows of which a quick run has the first one."""
SAID = 300
"""Characters of an item's last words."""

Answer = dict[str, Any]


@dataclass(frozen=True)
class Item:
    """A command and how to read its output."""

    name: str
    command: list[str]
    read: Callable[[int, str], Answer]
    """Returns ``passed`` and what to show, given the exit code and stdout."""
    limit_s: float = 120.0


@dataclass(frozen=True)
class Asked:
    """What a run was asked for, and what its items may read while it runs."""

    out: Path
    platform: str
    quick: bool
    budget: Budget
    found: Callable[[str], Answer]
    """What an item has found, by the item's name."""

    def left(self, stage: str) -> float:
        """Returns the seconds that are left to a stage."""
        return self.budget.left(STAGES[stage].share)


Items = Callable[[Asked], Iterator[Item]]


@dataclass(frozen=True)
class Stage:
    """Items that run one after the other."""

    share: float
    """The share of the time at which it ends. It begins when the previous one is done."""
    items: tuple[Items, ...]


def _facts(asked: Asked) -> Iterator[Item]:
    yield Item("facts", module("gpu.facts"), _json_line)


def _rates(asked: Asked) -> Iterator[Item]:
    yield Item("rates", [*module("gpu.facts"), "--rates", *_quick(asked)], _read_rates)


def _images(asked: Asked) -> Iterator[Item]:
    yield Item("images", module("gpu.loads"), _read_images)


def _padding(asked: Asked) -> Iterator[Item]:
    """Padding within a sequence: images that were mended without a GPU."""
    some = "d128-bfloat16-causal" if asked.quick else "d128"
    # Half of the stage is left to the families, should these kernels hang.
    yield replace(_pytest(asked, "padding", "test_gaps", some), limit_s=asked.left("runs") / 2)


def _families(asked: Asked) -> Iterator[Item]:
    # It ends before the stage does, so that it tells which family hangs.
    seconds = max(30.0, min(90.0, asked.left("runs") - 20))
    yield Item("families", _check(seconds), _lines, seconds + 10)


def _processes(asked: Asked) -> Iterator[Item]:
    """Ranks in several processes over NCCL; four processes run only after two have passed."""
    ways = processes.ways(asked.found("facts").get("devices", 1))[: 1 if asked.quick else None]
    for number, (count, way) in enumerate(ways):
        if count == 2 or asked.found(f"2 processes, {way}").get("passed"):
            # It leaves as much time to each later way of as many processes. Others come after them.
            later = [other for other, _ in ways[number:]].count(count)
            seconds = max(1.0, (asked.left("runs") - 10) / later)
            flags = ["--seconds", str(seconds), "--platform", asked.platform, *_quick(asked)]
            command = [*module("gpu.processes"), str(count), way, *flags]
            yield Item(f"{count} processes, {way}", command, _read_processes, seconds + 20)


def _programs(asked: Asked) -> Iterator[Item]:
    only = ["--only", *QUICK_ROWS, "--each", "1"] if asked.quick else []
    yield _benchmark(asked, "programs", "ring_gpu.py", 0.8, only)


def _kernels(asked: Asked) -> Iterator[Item]:
    yield _benchmark(asked, "kernels", "kernels.py", 1.0, [])


def _rings(asked: Asked) -> Iterator[Item]:
    some = "test_ring and 8-" + ("zigzag-keys-causal" if asked.quick else "")
    yield _pytest(asked, "rings on one GPU", "test_virtual", some)
    if asked.found("facts").get("devices", 1) > 1:
        yield _pytest(asked, "rings over NCCL", "test_correct", "1x2x1")


def _tests(asked: Asked) -> Iterator[Item]:
    """A file of tests each, the most telling ones first."""
    files = [path.stem for path in sorted(TESTS.glob("test_*.py"))]
    first = [name for name in TELLING if name in files]
    for name in first[:1] if asked.quick else [*first, *sorted(set(files) - set(first))]:
        yield _pytest(asked, name, name, "1x1x1" if asked.quick else "")


def _memcheck(asked: Asked) -> Iterator[Item]:
    if sanitizer := shutil.which("compute-sanitizer"):
        command = [sanitizer, "--error-exitcode", "9", *_check(180.0)]
        yield Item("memcheck", command, _lines, 200.0)


STAGES = {
    "facts": Stage(0.06, (_facts, _rates)),
    "runs": Stage(0.40, (_images, _padding, _families, _processes)),
    "fast": Stage(0.85, (_programs, _kernels)),
    "right": Stage(1.0, (_rings, _memcheck, _tests)),
}
"""The stages by name. What no GPU has answered comes first."""


def _quick(asked: Asked) -> list[str]:
    return ["--quick"] if asked.quick else []


def _check(seconds: float) -> list[str]:
    return [sys.executable, "-m", "burst_attention", "check", "--seconds", str(seconds)]


def _pytest(asked: Asked, name: str, file: str, chosen: str = "") -> Item:
    """Returns an item that runs a file of tests, or the tests whose names have some words."""
    pytest = [sys.executable, "-m", "pytest", f"--platform={asked.platform}", "-q"]
    options = ["-o", f"cache_dir={asked.out}/pytest", "-c", str(ROOT / "pyproject.toml")]
    path = str(TESTS / f"{file}.py")
    return Item(name, [*pytest, *options, "-k", chosen, path], _read_tests, 150.0)


def _benchmark(asked: Asked, name: str, program: str, share: float, more: list[str]) -> Item:
    """Returns an item that runs a benchmark for a share of what is left to the stage."""
    seconds = max(10.0, share * asked.left("fast"))
    command = [sys.executable, str(BENCHMARKS / program), "--out", str(asked.out)]
    flags = ["--budget", str(seconds), *_quick(asked), *more]
    return Item(name, command + flags, _read_benchmark, seconds + 30)


def ended(code: int, said: str) -> str:
    """Says how a process ended, with its last words."""
    how = f"{signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{how}: {tail(said)}"


def tail(said: str) -> str:
    """Returns the last words of a process."""
    return " ".join(said.split())[-SAID:]


def _json_line(code: int, out: str) -> Answer:
    found = json.loads(out.splitlines()[-1])
    return {"passed": code == 0, "words": "", "found": found}


def _read_rates(code: int, out: str) -> Answer:
    found = json.loads(out.splitlines()[-1])
    words = f"copies {found['copy_gb_s']:.0f} GB/s"
    if "product_tflop_s" in found:
        words += f", products {found['product_tflop_s']:.0f} TFLOP/s"
    return {"passed": code == 0, "words": words, "found": found}


def _read_images(code: int, out: str) -> Answer:
    found = json.loads(out.splitlines()[-1])
    refused = found["refused"]
    words = f"{found['of'] - len(refused)} of {found['of']} images of {found['target']} load"
    lines = [words, *(f"{name}: {error}" for name, error in list(refused.items())[:5])]
    return {"passed": code == 0 and not refused, "words": "\n".join(lines), "found": found}


def _lines(code: int, out: str) -> Answer:
    return {"passed": code == 0, "words": out.strip()}


def _read_tests(code: int, out: str) -> Answer:
    """Reads pytest's summary; no test that fits the platform is no failure."""
    lines = out.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    words = "\n".join([lines[-1].strip("= "), *failed[:5]]) if lines else ""
    return {"passed": None if code == 5 else code == 0, "words": words}


def _read_processes(code: int, out: str) -> Answer:
    """Reads the output of `gpu.processes`, and keeps whether all passed for later items."""
    return _read_benchmark(code, out) | {"found": {"passed": code == 0}}


def _read_benchmark(code: int, out: str) -> Answer:
    """Reads a benchmark's output; its last line sums up."""
    words = "\n".join(reversed(out.strip().splitlines()))
    return {"passed": None if code == 2 else code == 0, "words": words}
