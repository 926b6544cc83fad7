"""Draws time against length: `decode_plot.py RESULTS.json` writes RESULTS.png."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

COLOURS = {"ours": "tab:blue", "jax.nn": "tab:red", "torch": "tab:orange"}


def draw(results: dict[str, Any], path: Path) -> None:
    """Draws a panel for each type with logarithmic axes: contenders and the roof."""
    types = list(dict.fromkeys(row["dtype"] for row in results["lengths"]))
    figure, panels = pyplot.subplots(1, len(types), figsize=(10, 4.5), layout="constrained")
    for dtype, axes in zip(types, panels, strict=True):
        rows = [row for row in results["lengths"] if row["dtype"] == dtype]
        lengths = [row["length"] for row in rows]
        for name in rows[0]["seconds"]:
            times = [row["seconds"][name]["median_s"] * 1e3 for row in rows]
            axes.plot(lengths, times, marker="o", color=COLOURS[name], label=name)
        roofs = [row["roof_s"] * 1e3 for row in rows]
        axes.plot(lengths, roofs, color="black", linestyle="--", label="roof")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in lengths])
        axes.set(xlabel="tokens in the cache", ylabel="ms (median)", title=dtype)
        axes.grid(which="both", alpha=0.25)
        axes.legend(loc="upper left", fontsize="small")
    heads, kv_heads = results["heads"]
    figure.suptitle(
        f"one query, {heads}:{kv_heads} heads, D {results['head_dim']}\n"
        f"{results['cpu']}, {results['cores']} cores"
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    draw(json.loads(source.read_text()), source.with_suffix(".png"))
