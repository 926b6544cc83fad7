"""Draws time against length: `plot.py RESULTS.json` writes RESULTS.png."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

COLOURS = {"ours": "tab:red", "torch": "tab:orange", "jax.nn": "tab:blue"}
LABELS = {
    "ours": "burst_attention",
    "torch": "torch scaled_dot_product_attention",
    "jax.nn": "jax.nn.dot_product_attention",
}


def draw(results: dict[str, Any], path: Path) -> None:
    """Draws forward and backward together, on logarithmic axes, one line per contender."""
    rows = [r for r in results["cases"] if "length" in r["tags"] and r["pass"] == "both"]
    figure, axes = pyplot.subplots(figsize=(7.5, 5), layout="constrained")
    for name, label in LABELS.items():
        points = sorted((r["seq"], r["seconds"][name]) for r in rows if name in r["seconds"])
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", color=COLOURS[name], label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = sorted({row["seq"] for row in rows})
    axes.set_xticks(lengths, [f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in lengths])
    shape = " ".join(part for part in rows[0]["shape"].split() if not part.startswith("S"))
    axes.set(
        xlabel="sequence length, tokens",
        ylabel="forward + backward, seconds (median)",
        title=f"{shape}\n{results['cpu']}, {results['cores']} cores",
    )
    axes.grid(which="both", alpha=0.25)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    draw(json.loads(source.read_text()), source.with_suffix(".png"))
