"""The state that all parts of the check share: workers, clock, and results, on disk too."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu import report
from gpu.session import Budget, Session, module

from .group import first_gpu

ITEM_S = 60.0
"""Seconds after which an item counts as hanging."""
SLACK_S = 8.0
"""Seconds over the budget that the last item may take before the session ends its worker."""
REHEARSAL = {
    "JAX_PLATFORMS": "cpu",
    # Two devices, and code that compiles fast rather than runs fast.
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true",
}


@dataclass
class Part:
    """The outcome of a part."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    failed: list[dict[str, str]] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        """Returns the outcome in a word."""
        if self.failed:
            return "FAILED"
        return "passed" if self.rows else "absent"


class Run:
    """Asks workers for items and keeps the answers."""

    def __init__(
        self,
        budget: Budget,
        folder: Path,
        rehearse: bool = False,
        worker: list[str] | None = None,
        item_s: float = ITEM_S,
    ):
        self.rehearse, self.budget, self._folder, self._item_s = rehearse, budget, folder, item_s
        flags = ["--rehearse"] if rehearse else []
        self.command = [*(worker or module("check.worker")), *flags]
        self.environment = dict(REHEARSAL) if rehearse else first_gpu()
        self.session = Session(None, self.command, self.environment)
        self.parts: dict[str, Part] = {}
        self.found: dict[str, Any] = {"rehearsal": rehearse, "complete": False}

    @property
    def file(self) -> Path:
        """Returns the path of the results."""
        device = self.found.get("environment", {}).get("device", "unknown device")
        return self._folder / f"{report.slug(device)}-ring.json"

    def carry_out(
        self, name: str, part: Callable[["Run", Part, float], None], share: float
    ) -> None:
        """Carries out one part; its failure does not end the run."""
        print(f"\n== {name}", flush=True)
        self.parts[name] = record = Part()
        began = time.monotonic()
        try:
            part(self, record, share)
        except Exception as error:  # any error: the next part still runs
            self.fail(record, name, f"{type(error).__name__}: {error}")
        record.seconds = round(time.monotonic() - began, 1)
        self.save()

    def ask(
        self,
        record: Part,
        name: str,
        item: dict[str, Any],
        share: float,
        must: bool = True,
        limit_s: float | None = None,
    ) -> Any:
        """Returns the result of an item; None if it failed or was left out, which `record` keeps.

        If the time is up, an item that `must` run fails, and another item is left out.
        """
        limit_s = self.limit(record, name, share, must, limit_s)
        return None if limit_s is None else self.take(record, name, self.session.ask(item, limit_s))

    def limit(
        self, record: Part, name: str, share: float, must: bool, limit_s: float | None = None
    ) -> float | None:
        """Returns the seconds for an item; None if the time is up, which `record` keeps."""
        if self.budget.left(share) > 0:
            return max(1.0, min(limit_s or self._item_s, self.budget.left() + SLACK_S))
        record.left_out.append({"name": name, "why": "the time was up"})
        if must:
            self.fail(record, name, "not checked: the time was up")
        return None

    def take(self, record: Part, name: str, answer: dict[str, Any]) -> Any:
        """Returns the result in an answer; None without a result, and `record` keeps the reason."""
        if "absent" in answer:
            self.leave_out(record, name, answer["absent"])
        elif "error" in answer:
            self.fail(record, name, answer["error"])
            print(answer.get("trace", ""), end="", file=sys.stderr)
        return answer.get("result")

    def keep(self, record: Part, row: dict[str, Any]) -> None:
        """Prints and keeps a row of the table, and its failure if it has one."""
        verdict = "FAILED: " + "; ".join(row["wrong"]) if row["wrong"] else "ok"
        print(f"{row['name']:<64} {row['shown']}  {verdict}", flush=True)
        record.rows.append(row)
        if row["wrong"]:
            self.fail(record, row["name"], "; ".join(row["wrong"]), tell=False)
        self.save()

    def fail(self, record: Part, name: str, why: str, tell: bool = True) -> None:
        """Keeps a failure."""
        record.failed.append({"name": name, "why": why})
        if tell:
            print(f"{name}: FAILED: {why}", flush=True)

    def leave_out(self, record: Part, name: str, why: str) -> None:
        """Keeps an item that can't run here."""
        record.left_out.append({"name": name, "why": why})
        print(f"{name}: absent: {why}", flush=True)

    def save(self) -> None:
        """Writes the results so far."""
        self.found["seconds"] = round(self.budget.spent, 1)
        self.found["parts"] = {
            name: {"verdict": part.verdict, **vars(part)} for name, part in self.parts.items()
        }
        report.save(self.found, self.file)

    def summary(self) -> bool:
        """Prints the outcome of each part; returns whether all parts that ran passed."""
        print(f"\n{'part':<14}{'verdict':<10}{'ok':>5}{'failed':>8}{'absent':>8}{'seconds':>9}")
        for name, part in self.parts.items():
            fine = sum(not row["wrong"] for row in part.rows)
            counts = f"{fine:>5}{len(part.failed):>8}{len(part.left_out):>8}{part.seconds:>9.1f}"
            print(f"{name:<14}{part.verdict:<10}{counts}")
        for name, part in self.parts.items():
            for entry in part.failed[:10]:
                print(f"    {name}: {entry['name']}: {entry['why'][:240]}")
            if len(part.failed) > 10:
                print(f"    {name}: and {len(part.failed) - 10} more, in the file")
        print(f"{self.budget.spent:.0f} s; {self.file}", flush=True)
        return not any(part.failed for part in self.parts.values())
