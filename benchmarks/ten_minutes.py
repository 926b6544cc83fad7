"""Answers in ten minutes with a GPU: does it run, is it right, is it fast, what to believe?

`run` in the bundle of `make gpu-bundle` calls this program. It goes through five stages, and what
no GPU has answered comes first. Each item of a stage runs in a process of its own with a limit on
its time, so a hang or a crash costs only this item. After each item it writes results.json and
page.md. gpu/stages.py has the items.

  facts    the GPU, its driver and versions; rates of copies and of products
  runs     all images load; padding within a sequence; each family of kernels agrees with plain JAX;
           ranks in several processes, which share a GPU if there is one only, over NCCL
  fast     single launches, rings and layers by own kernels, by cuDNN and by their peers
  right    rings agree with float64; memcheck where compute-sanitizer is installed; the Python
           tests, the most telling files first, as far as the time goes
  believe  the predictions beside what was measured, and constants for the model

Exit code 0: all that ran passed; 1: something failed, or there is no GPU.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

from gpu import believe
from gpu.report import save
from gpu.session import FOLDERS, Budget
from gpu.stages import STAGES, Answer, Asked, Item, ended, tail

SETTINGS = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Variables of all items: one must leave memory to the next, should it hang."""


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
        self.out, self.quick = out, quick
        self.asked = Asked(out, platform, quick, Budget(60 * minutes), self._found)
        self.began = datetime.now(UTC).isoformat(timespec="seconds")
        self.results: list[Result] = []

    def all(self) -> bool:
        """Runs all stages; returns whether nothing failed."""
        for name, stage in STAGES.items():
            for item in chain.from_iterable(items(self.asked) for items in stage.items):
                left = self.asked.left(name)
                if left < 1:
                    self._keep(Result(name, item.name, None, "left out: the time was up", 0.0))
                else:
                    self._keep(self._one(name, item, min(item.limit_s, left)))
                if not self.results[0].passed:
                    return False  # there is no GPU
        self._believe()
        return all(result.passed is not False for result in self.results)

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
                answer["words"] = ended(process.returncode, said or out)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            out, said = "", ""
            # A process that the driver holds can't be killed, and its pipes stay open.
            with contextlib.suppress(subprocess.TimeoutExpired):
                out, said = process.communicate(timeout=5)
            words = f"no end within {limit_s:.0f} s; it last said: {tail(out or said)}"
            answer = {"passed": False, "words": words}
        except (ValueError, KeyError, IndexError):
            answer = {"passed": False, "words": ended(process.returncode, said or out)}
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
        for stage in [*STAGES, "believe"]:
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
