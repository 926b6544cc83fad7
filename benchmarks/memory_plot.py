"""Draws peak memory against length: `memory_plot.py RESULTS.json` writes RESULTS.png."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import memory_table

matplotlib.use("Agg")
from matplotlib import pyplot

MARKS = "osD^v<>pPX*"


def draw(results: dict[str, Any], path: Path) -> None:
    """Draws the peak of each attention, with the limit of each kind of GPU."""
    figure, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    base, lengths = memory_table.base(results), set()
    for name, mark in zip(memory_table.names(results), MARKS, strict=False):
        rows = memory_table.select(results, attention=name, **base)
        points = [(row["length"], row["peak"] / memory_table.GIGA) for row in rows]
        lengths |= {length for length, _ in points if length.bit_count() == 1}
        style = "-" if name.startswith(memory_table.OURS) else "--"
        axes.plot(*zip(*points, strict=True), marker=mark, linestyle=style, label=name)
    for kind, bytes_ in results["limits"].items():
        axes.axhline(bytes_ / memory_table.GIGA, color="black", linestyle=":")
        axes.annotate(f"limit of {kind}", (min(lengths), bytes_ / memory_table.GIGA), va="bottom")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(sorted(lengths), [memory_table.tokens(n) for n in sorted(lengths)])
    ticks = [2**n for n in range(3, 9)]
    axes.set_yticks(ticks, [str(n) for n in ticks])
    axes.set(
        xlabel="tokens",
        ylabel="peak of a device, GB",
        title=f"training step of Llama-7B's shape, {base['kv_heads']} key/value heads,"
        f" 8 × {base['kind']}\ncompiled by XLA (jaxlib {results['jaxlib']}), not run",
    )
    axes.grid(which="both", alpha=0.25)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    draw(json.loads(source.read_text()), source.with_suffix(".png"))
