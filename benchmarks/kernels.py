"""Our CUDA kernels on a GPU: right by float64, and as fast as whom.

One command, under five minutes, for a machine with an NVIDIA GPU, torch and cuda-bindings, but no
Rust: numerics on small problems, then TFLOP/s beside cuDNN and flash attention. Prints a table,
writes results/<device>.json and .png. Each part reports on its own: one failure hides nothing.
"""

import argparse
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from gpu import numerics, report, speed
from gpu.library import Driver, Kernels, find_library, target_of

ROUNDS = 15


class Parts:
    """Runs the parts, each on its own, and keeps what failed."""

    def __init__(self, budget_s: float):
        self.failed: list[str] = []
        self._end = time.monotonic() + budget_s

    def run(self, name: str, part: Callable[[], Any]) -> Any:
        """What `part` returns, or None if it raised, which is printed."""
        try:
            return part()
        except Exception as error:  # one failure must not hide the rest
            self.failed.append(name)
            print(f"{name:<26}FAILED {type(error).__name__}: {error}", flush=True)
            traceback.print_exc(limit=-2)
            return None

    @property
    def time_left(self) -> bool:
        """Is there time for another part?"""
        return time.monotonic() < self._end


def environment(path: Path) -> dict[str, Any]:
    """What ran: device, versions, clocks."""
    import torch

    query = "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit"
    try:
        command = ["nvidia-smi", query, "--format=csv,noheader"]
        clocks = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        clocks = f"nvidia-smi: {error}"
    found = {
        "device": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
        "driver, clocks, power limit": clocks,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "library": path.name,
    }
    for name, value in found.items():
        print(f"{name:<30}{value}")
    return found


def run(options: argparse.Namespace) -> int:
    """All parts; 0 if every one passed."""
    import torch

    parts = Parts(options.budget)
    path = find_library(options.library)
    results: dict[str, Any] = environment(path) | {"tokens": speed.TOKENS}
    driver = Driver(Kernels(path), target_of(torch.cuda.get_device_capability()))
    file = Path(options.out) / f"{report.slug(results['device'])}.json"

    print(f"\nrelative errors against float64, in brackets cuDNN's; bar {numerics.BAR} × cuDNN's")
    results["numerics"] = []
    for case in numerics.CHECKS[:: 6 if options.quick else 1]:
        row = parts.run(case.name, partial(numerics.check, case, driver))
        if row is not None:
            report.print_check(row)
            results["numerics"].append(row)
            if not row["passed"]:
                parts.failed.append(case.name)
        report.save(results, file)

    peak = parts.run("matrix product", speed.matrix_peak) or float("nan")
    results |= {"peak_tflops": peak, "speed": [], "left_out": []}
    print(f"\nTFLOP/s in bfloat16; matrix product 8192: {peak:.0f}")
    report.print_header()
    for shape in speed.shapes()[: 2 if options.quick else None]:
        if not parts.time_left:
            results["left_out"].append(shape.name)
            continue
        row = parts.run(shape.name, partial(speed.measure, shape, driver, ROUNDS))
        if row is not None:
            report.print_speed(row, peak)
            results["speed"].append(row)
            parts.failed += missed_bars(shape, row)
        report.save(results, file)
    if results["left_out"]:
        print(f"left out, as the time was up: {', '.join(results['left_out'])}")
    if results["speed"]:
        parts.run("picture", lambda: report.draw(results, file.with_suffix(".png")))
    results["failed"] = parts.failed
    report.save(results, file)
    print(f"\n{file}: " + (f"FAILED: {', '.join(parts.failed)}" if parts.failed else "all passed"))
    return 1 if parts.failed else 0


def missed_bars(shape: speed.Shape, row: dict[str, Any]) -> list[str]:
    """The bars that a shape misses, printed either way."""
    missed = []
    for which, bar in speed.BARS.items():
        times = row["passes"][which]
        if shape.decides and "cudnn" in times:
            ratio = times["cudnn"]["ms"] / times["ours"]["ms"]
            print(f"    bar: {which} at least {bar:.2f} × cuDNN, measured {ratio:.2f}")
            if ratio < bar:
                missed.append(f"{which} {shape.name}")
    return missed


def main() -> int:
    """Checks that there is a GPU, then runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", help="libburst_attention_ffi.so; default: the package's")
    parser.add_argument("--out", default=Path(__file__).parent / "results", help="folder")
    parser.add_argument("--quick", action="store_true", help="a look only")
    parser.add_argument("--budget", type=float, default=270.0, help="seconds, then no new part")
    options = parser.parse_args()
    try:
        import torch
        from cuda.bindings import driver as _  # noqa: F401
    except ImportError as error:
        print(f"expected a Python with torch and cuda-bindings, found none: {error}")
        return 2
    if not torch.cuda.is_available():
        print("expected an NVIDIA GPU that torch can use, found none")
        return 2
    torch.zeros(1, device="cuda")  # makes the context that the driver's calls go to
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
