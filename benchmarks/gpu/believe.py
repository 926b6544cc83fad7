"""Compares predictions with measured figures, and finds constants for the model.

`python -m gpu.believe FOLDER`, with the benchmarks' folder in PYTHONPATH, prints what the results
in a folder say.
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
ERROR = 0.2
"""How far a prediction may be off: the worst kernel of another model was off by 10 to 14%."""
MODELLED = re.compile("H[12]00")
"""The GPUs that the model of the kernels describes."""
BLOCK_CYCLES, ROW_PASS_TB_S, CLOCK_GHZ = 4750, 3.0, "1.26 to 1.39"
"""The model's cycles of a block around its loops, its rate of passes over rows, and its clock."""
PACKED, STEP_US = (1.19, 1.28), (5.0, 25.0)
"""Predicted: time of packed documents over their share of one, and the host's time for a step."""
CARRY_US = (2.0, 2.9)
"""Predicted: microseconds in which a block of the forward kernel takes sums in, or leaves them."""
STATED = {"A100": (2039, 312), "H100": (3350, 989), "H200": (4800, 989), "B200": (8000, 2250)}
"""GB/s of the memory and dense bfloat16 TFLOP/s that NVIDIA states for the SXM parts."""
REACHED = (0.75, 0.6)
"""The shares of them that a device which nothing slows down reaches. Copies on an H200 reached 0.9,
and products of random numbers 0.8."""
SIDE = 128
"""Rows and keys of the pairs whose cycles are told: the tiles of most kernels differ."""


def predicted() -> dict[str, float]:
    """Returns the TFLOP/s of kernels/rates.tsv by name."""
    lines = (ROOT / "kernels" / "rates.tsv").read_text().splitlines()[1:]
    return {name: float(rate) for name, rate in (line.split("\t") for line in lines)}


def measured(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the TFLOP/s of rows of `kernels.py` under the names of the predictions."""
    found = {}
    for row in rows:
        if row["heads"] == row["kv_heads"]:
            *shape, _ = row["shape"].lower().split()
            for contender, before in (("ours", ""), ("any_order", "fused_")):
                if contender in row["contenders"]:
                    name = "_".join([before + row["pass"], *shape])
                    found[name] = row["contenders"][contender]["tflops"]
    return found


def verdicts(folder: Path) -> Iterator[tuple[str, bool | None, str]]:
    """Yields name, verdict and words of each prediction that the results in a folder test."""
    rates, found = predicted(), measured(_speed(folder))
    for name in [name for name in rates if name in found]:
        ratio = found[name] / rates[name]
        words = f"predicted {rates[name]:.0f} TFLOP/s, measured {found[name]:.0f}, {ratio:.2f} ×"
        yield name, 1 - ERROR <= ratio <= 1 + ERROR, words
    if not rates.keys() & found.keys():
        yield "predictions", None, f"nothing was measured; {len(rates)} rates stay predicted"
    for row in _rows(folder):
        for which, one in row.get("passes", {}).items():
            if "share" in one:
                words = f"predicted {PACKED[0]} to {PACKED[1]} × the share, {one['share']:.2f} ×"
                yield f"packed, {which}", _within(one["share"], *PACKED), words
        carried = row.get("passes", {}).get("forward", {}).get("us_a_block", {})
        for way in [way for way in ("in", "out") if way in carried]:
            words = f"predicted {CARRY_US[0]} to {CARRY_US[1]} µs a block, {carried[way]:.2f} µs"
            yield f"sums {way}", _within(carried[way], *CARRY_US), words
        for which, us in row.get("us_a_step", {}).items():
            words = f"predicted {STEP_US[0]:.0f} to {STEP_US[1]:.0f} µs a step, {us:.0f} µs"
            yield f"host, {which}", us <= STEP_US[1] * (1 + ERROR), words


def slow(facts: dict[str, Any]) -> list[str]:
    """Returns in what a device is slower than expected, given both outputs of `gpu.facts`."""
    stated = [rates for name, rates in STATED.items() if name in str(facts.get("device"))]
    found = (facts.get("copy_gb_s"), facts.get("product_tflop_s"))
    named = zip(("copies", "products"), found, *stated[:1] or [(0, 0)], REACHED, strict=True)
    return [
        f"{name} reach {rate / most:.2f} of what NVIDIA states, expected {share}: does another "
        "program use the GPU, or is its clock or power limited?"
        for name, rate, most, share in named
        if rate and most and rate < share * most
    ]


def constants(folder: Path) -> Iterator[tuple[str, str]]:
    """Yields the constants that a recalibration of the model would take, by name."""
    (results,) = [found for found in _results(folder) if found.get("speed")][:1] or [{}]
    if not results:
        return
    rows, clock = results["speed"], _clock(results)
    yield "clock under load", f"{clock or 'unknown'} GHz, the model's {CLOCK_GHZ}"
    times = [(row, row["kernels"]["delta"]["ms"]) for row in rows if "delta" in row["kernels"]]
    if times:
        rate = median(4 * _elements(row) / ms / 1e9 for row, ms in times)
        yield "passes over rows", f"{rate:.2f} TB/s, the model's {ROW_PASS_TB_S}"
    cores = results["environment"]["multiprocessors"]
    for dim in (64, 128):
        for name, which, part in _KERNELS:
            chosen = [row for row in rows if _is_plain(row, dim, which)]
            points = [
                (row, row[part[0]][part[1]]["ms"]) for row in chosen if part[1] in row[part[0]]
            ]
            if clock and len({row["seq"] for row, _ in points}) >= 3:
                cycles, around = _line(points, clock * 1e6 * cores)
                words = f"{cycles:.0f} cycles for {SIDE}² pairs, {around:.0f} around {SIDE} rows"
                yield f"{name} d{dim}", f"{words}; the model's around a block {BLOCK_CYCLES}"


_KERNELS = (
    ("forward", "forward", ("contenders", "ours")),
    ("dk and dv", "backward", ("kernels", "dkdv")),
    ("dq", "backward", ("kernels", "dq")),
)
"""Names of the kernels, their pass, and where a row has their time."""


def _line(points: list[tuple[dict[str, Any], float]], cycles_a_ms: float) -> tuple[float, float]:
    """Fits cycles of a multiprocessor = blocks · (pairs · cycles + around), by least squares."""
    blocks = [row["batch"] * row["heads"] * row["seq"] / SIDE for row, _ in points]
    unknowns = [[n * row["seq"] / SIDE, n] for n, (row, _) in zip(blocks, points, strict=True)]
    solved, *_ = np.linalg.lstsq(np.array(unknowns), [ms * cycles_a_ms for _, ms in points])
    return float(solved[0]), float(solved[1])


def _clock(results: dict[str, Any]) -> float | None:
    """Returns the GHz that nvidia-smi told after products of matrices, if it did."""
    told = re.search(r"(\d+) MHz", results.get("peak_smi") or "")
    return told and int(told[1]) / 1e3


def _is_plain(row: dict[str, Any], dim: int, which: str) -> bool:
    return bool(
        row["pass"] == which
        and row["dim"] == dim
        and not row["causal"]
        and row["heads"] == row["kv_heads"]
    )


def _elements(row: dict[str, Any]) -> float:
    return float(row["batch"] * row["seq"] * row["heads"] * row["dim"])


def _within(x: float, low: float, high: float) -> bool:
    return low * (1 - ERROR) <= x <= high * (1 + ERROR)


def _results(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the results of the GPUs that the model describes."""
    for file in sorted(folder.glob("*.json")):
        found = json.loads(file.read_text())
        device = found.get("device") or found.get("environment", {}).get("device", "")
        if MODELLED.search(device):
            yield found


def _speed(folder: Path) -> list[dict[str, Any]]:
    return [row for found in _results(folder) for row in found.get("speed", [])]


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [row for found in _results(folder) for row in found.get("rows", {}).values()]


def main() -> None:
    """Prints what a folder of results says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "benchmarks" / "results")
    flags = parser.parse_args()
    for name, passed, words in verdicts(flags.folder):
        print(f"{name:<32}{'OFF  ' if passed is False else '     '}{words}")
    for name, words in constants(flags.folder):
        print(f"{name:<37}{words}")


if __name__ == "__main__":
    main()
