"""Draws time and memory against length: `linear_plot.py RESULTS.json` writes RESULTS.png."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

COLOURS = ("tab:red", "tab:blue", "tab:green")
Points = dict[str, list[tuple[int, float]]]


def draw(results: dict[str, Any], path: Path) -> None:
    """Draws two panels with logarithmic axes, one line per program."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.5), layout="constrained")
    fill(left, times(results), f"{results['heads']} heads", "seconds (median)")
    title = f"{results['memory_heads']} heads"
    fill(right, peaks(results), title, "MiB besides arguments and results")
    figure.suptitle(
        f"linear attention, forward + backward, D {results['head_dim']} float32\n"
        f"{results['cpu']}, {results['cores']} cores"
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def times(results: dict[str, Any]) -> Points:
    """Returns seconds by length, of the fastest plain program and of ours over all devices."""
    fastest = results["speed"]["fastest_chunked"]
    ours = results["memory"][0]["name"]
    found = results["speed"]["seconds"] | results["length"]["ours"]
    for beside in results["length"]["beside_plain"].values():
        found = beside["seconds"] | found
    points: Points = {ours: [], fastest: []}
    for label, seconds in found.items():
        name, length = label.rsplit(", S ", 1)
        if name in points:
            points[name].append((int(length), seconds["median_s"]))
    return points


def peaks(results: dict[str, Any]) -> Points:
    """Returns MiB by length: as measured, or as XLA plans where the run did not fit."""
    points: Points = {}
    for row in results["memory"]:
        seen = row.get("extra_bytes", row["planned_bytes"])
        points.setdefault(row["name"], []).append((row["length"], seen / 2**20))
    return points


def fill(axes: Axes, points: Points, title: str, label: str) -> None:
    """Draws one panel."""
    for colour, (name, line) in zip(COLOURS, points.items(), strict=False):
        axes.plot(*zip(*sorted(line), strict=True), marker="o", color=colour, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = sorted({length for line in points.values() for length, _ in line})
    axes.set_xticks(lengths, [f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in lengths])
    axes.set(xlabel="sequence length, tokens", ylabel=label, title=title)
    axes.grid(which="both", alpha=0.25)
    axes.margins(y=0.2)
    axes.legend(loc="upper left", fontsize="small")


if __name__ == "__main__":
    source = Path(sys.argv[1])
    draw(json.loads(source.read_text()), source.with_suffix(".png"))
