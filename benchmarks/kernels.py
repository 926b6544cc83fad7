"""Checks our CUDA kernels on a GPU against float64, and times them against their peers.

One command, under five minutes, for a machine with an NVIDIA GPU, torch and cuda-bindings, but no
Rust. It loads every image, checks each kernel on small problems, and measures TFLOP/s of ours,
cuDNN and flash attention. It prints tables and writes results/<device>.json and .png as it goes. A
worker process does all the work. If a kernel hangs or crashes, a new worker goes on with the next
item.

Exit code 0: all passed; 1: something failed or missed its bar; 2: nothing to measure with.
"""

import argparse
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from gpu import numerics, report, speed
from gpu.session import Budget, LostError, Session, UnusableError

RESULTS = Path(__file__).parent / "results"
SHARES = {"images": 0.20, "numerics": 0.50, "speed": 0.90, "jax": 1.0}
"""The share of the budget at which each part ends. A part begins when the previous part is done."""
SLACK_S = 8.0
"""Seconds over the budget that the last item may take before the session ends its worker."""
ITEM_S = 45.0
"""Seconds after which an item counts as hanging."""
TIMING_S = 2.0
"""Seconds for timing one row. Afterwards the fewest rounds that give a median suffice."""
FORGIVEN = 2
"""Number of workers that a kernel of one width may lose before the benchmark leaves it out."""


class Benchmark:
    """Gives the items to the session, and keeps the answers, on disk too."""

    def __init__(self, session: Any, budget: Budget, folder: Path, quick: bool = False):
        self._session, self._budget, self._folder, self._quick = session, budget, folder, quick
        self._lost: Counter[str] = Counter()
        self.results: dict[str, Any] = {
            "quick": quick,
            "tokens": speed.TOKENS,
            "numerics": [],
            "speed": [],
            "jax": [],
            "left_out": [],
            "failed": [],
            "complete": False,
        }

    @property
    def file(self) -> Path:
        """Returns the path of the results."""
        device = self.results.get("environment", {}).get("device", "unknown device")
        return self._folder / f"{report.slug(device)}.json"

    @property
    def failed(self) -> list[dict[str, str]]:
        """Returns the failed items with their reasons."""
        found: list[dict[str, str]] = self.results["failed"]
        return found

    def run(self) -> bool:
        """Runs all parts; returns whether all passed."""
        self._environment()
        if self._images():
            self._numerics()
            self._speed()
            self._jax()
        if self.results["speed"]:
            self._picture()
        self.results |= {"complete": True, "seconds": round(self._budget.spent, 1)}
        report.save(self.results, self.file)
        self._summary()
        return not self.failed

    def _environment(self) -> None:
        row = self._ask("environment", {"part": "environment"}, 1.0)
        if row is not None:
            self.results["environment"] = row
            report.print_environment(row)

    def _images(self) -> bool:
        """Loads all images; returns whether there is a kernel to run."""
        print()
        row = self._ask("images", {"part": "images"}, SHARES["images"], limit_s=4 * ITEM_S)
        if row is None:
            return False
        self.results["images"] = row
        report.print_images(row)
        for name, error in row["refused"].items():
            self._fail(name, error, tell=False)
        report.save(self.results, self.file)
        return bool(row["of"] > len(row["refused"]))

    def _numerics(self) -> None:
        print(f"\nerrors relative to float64, in brackets cuDNN's; bar {numerics.BAR} × cuDNN's")
        for case in numerics.QUICK if self._quick else numerics.CASES:
            for kernel in numerics.CASES[case].kernels:
                item = {"part": "numerics", "case": case, "kernel": kernel}
                name = f"{case}, {kernel}"
                kept = f"{kernel} D{numerics.CASES[case].width}"
                row = self._ask(name, item, SHARES["numerics"], kept, must=True)
                if row is not None:
                    report.print_check(row)
                    self._keep("numerics", row)
                    if row["wrong"]:
                        self._fail(name, "; ".join(row["wrong"]), tell=False)

    def _speed(self) -> None:
        row = self._ask("matrix product", {"part": "peak"}, SHARES["speed"])
        peak = row["tflops"] if row else float("nan")
        self.results["peak_tflops"] = row and row["tflops"]
        self.results["peak_smi"] = row and row["nvidia-smi"]
        print(f"\nspeed in bfloat16; matrix product of {speed.SIDE}³: {peak:.0f} TFLOP/s")
        report.print_header()
        for shape in speed.shapes()[: 2 if self._quick else None]:
            for which in ("forward", "backward"):
                item = {"part": "speed", "shape": shape.name, "which": which, "seconds": TIMING_S}
                name = f"{shape.name}, {which}"
                row = self._ask(name, item, SHARES["speed"], f"timed {which} D{shape.dim}")
                if row is not None:
                    report.print_speed(row, peak)
                    self._keep("speed", row)
                    self._judge(name, row)

    def _judge(self, name: str, row: dict[str, Any]) -> None:
        differs = row.get("differs")
        if differs is not None and not differs <= speed.AGREE:
            self._fail(name, f"o differs from cuDNN's by {differs:.1e}, expected {speed.AGREE}")
        bar = speed.bar_of(row)
        if bar is not None and not bar[1] >= bar[0]:
            self._fail(name, f"{bar[1]:.2f} × cuDNN, expected at least {bar[0]:.2f}", tell=False)

    def _jax(self) -> None:
        print("\nbeside jax.nn.dot_product_attention, by the clock on the wall")
        for shape in speed.beside_jax()[: 1 if self._quick else None]:
            item = {"part": "jax", "shape": shape.name, "seconds": TIMING_S}
            row = self._ask(f"{shape.name}, jax", item, SHARES["jax"], "timed beside jax")
            if row is not None:
                report.print_jax(row)
                self._keep("jax", row)

    def _picture(self) -> None:
        try:
            report.draw(self.results, self.file.with_suffix(".png"))
        except ImportError:
            warnings.warn("no picture: this Python has no matplotlib", stacklevel=1)
        except Exception as error:  # the numbers count without a picture
            self._fail("picture", repr(error))

    def _ask(
        self,
        name: str,
        item: dict[str, Any],
        share: float,
        kernel: str = "",
        must: bool = False,
        limit_s: float = ITEM_S,
    ) -> dict[str, Any] | None:
        """Returns the answer to an item. None: it failed or was left out, as the results say."""
        left = self._budget.left(share)
        if left <= 0 or self._lost[kernel] >= FORGIVEN:
            why = "the time was up" if left <= 0 else f"{kernel} crashed or hung {FORGIVEN} times"
            self.results["left_out"].append({"name": name, "why": why})
            if must:
                self._fail(name, f"not checked: {why}", tell=False)
            return None
        limit_s = max(1.0, min(limit_s, self._budget.left() + SLACK_S))
        answer = self._session.ask(item, limit_s)
        if answer.get("lost") and kernel:
            self._lost[kernel] += 1
        if "absent" in answer:
            print(f"{name}: left out: {answer['absent']}", flush=True)
            self.results["left_out"].append({"name": name, "why": answer["absent"]})
        if "error" in answer:
            self._fail(name, answer["error"])
            print(answer.get("trace", ""), end="", file=sys.stderr)
        found: dict[str, Any] | None = answer.get("result")
        return found

    def _keep(self, part: str, row: dict[str, Any]) -> None:
        self.results[part].append(row)
        report.save(self.results, self.file)

    def _fail(self, name: str, why: str, tell: bool = True) -> None:
        self.failed.append({"name": name, "why": why})
        if tell:
            print(f"{name}: FAILED: {why}", flush=True)
        report.save(self.results, self.file)

    def _summary(self) -> None:
        left_out = Counter(entry["why"] for entry in self.results["left_out"])
        for why, count in left_out.items():
            names = [entry["name"] for entry in self.results["left_out"] if entry["why"] == why]
            some = ", ".join(names[:8]) + (f" and {count - 8} more" if count > 8 else "")
            print(f"\nleft out, {why}: {some}")
        checked, timed = len(self.results["numerics"]), len(self.results["speed"])
        print(
            f"\n{checked} checks, {timed} rows of speed in {self._budget.spent:.0f} s: {self.file}"
        )
        print(f"{len(self.failed)} FAILED" if self.failed else "all passed")
        for entry in self.failed[:30]:
            print(f"    {entry['name']}: {entry['why'][:160]}")
        if len(self.failed) > 30:
            print(f"    and {len(self.failed) - 30} more, in the file")


def main() -> int:
    """Looks for a GPU, then measures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--library", help="libburst_attention_ffi.so; default: the package's")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="run a few items only")
    parser.add_argument("--budget", type=float, default=280.0, help="seconds for all parts, about")
    flags = parser.parse_args()
    budget = Budget(flags.budget)
    session = Session(flags.library)
    folder = flags.out or (RESULTS / "partial" if flags.quick else RESULTS)
    try:
        session.start()
        return 0 if Benchmark(session, budget, folder, flags.quick).run() else 1
    except (LostError, UnusableError) as why:
        print(why)
        return 2
    finally:
        session.close()


if __name__ == "__main__":
    sys.exit(main())
