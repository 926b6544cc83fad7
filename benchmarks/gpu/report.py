"""The table, the JSON file and the picture."""

import json
import re
from pathlib import Path
from typing import Any

COLOURS = {"ours": "tab:red", "cudnn": "tab:green", "flash": "tab:orange"}
LABELS = {"ours": "burst_attention", "cudnn": "cuDNN", "flash": "flash attention (torch)"}
COLUMNS = "{:<24}{:<10}{:>9}{:>9}{:>8}{:>9}{:>9}"


def slug(device: str) -> str:
    """A device's name as a file name."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def save(results: dict[str, Any], path: Path) -> None:
    """Writes the results so far; a kill loses nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(results, indent=1) + "\n")
    fresh.replace(path)


def print_check(row: dict[str, Any]) -> None:
    """One line: our errors, and in brackets cuDNN's."""
    peer = row["cudnn"] or {}
    shown = [
        f"{name} {error:.1e}" + (f" ({peer[name]:.1e})" if name in peer else "")
        for name, error in row["errors"].items()
    ]
    verdict = "ok" if row["passed"] else "FAILED: " + ", ".join(row["failed"])
    print(f"{row['case']:<26}{'  '.join(shown)}  {verdict}", flush=True)


def print_header() -> None:
    """Above the lines of `print_speed`."""
    print(COLUMNS.format("shape", "pass", "ours", "ms", "peak", "/cuDNN", "/flash"))


def print_speed(row: dict[str, Any], peak: float) -> None:
    """A line for each pass: TFLOP/s, milliseconds, share of the peak, ratios to the peers."""
    for which, times in row["passes"].items():
        ours = times["ours"]

        def ratio(peer: str, times: dict[str, Any] = times) -> str:
            return f"{times[peer]['ms'] / times['ours']['ms']:.2f}" if peer in times else "-"

        line = (f"{ours['tflops']:.0f}", f"{ours['ms']:.3f}", f"{ours['tflops'] / peak:.0%}")
        print(
            COLUMNS.format(row["shape"], which, *line, ratio("cudnn"), ratio("flash")), flush=True
        )


def draw(results: dict[str, Any], path: Path) -> None:
    """TFLOP/s against length, a panel for each head dimension, mask and pass; heads 1:1."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in results["speed"] if _equal_heads(row["shape"])]
    dims = sorted({_field(row, 0) for row in rows}, key=lambda dim: int(dim[1:]))
    panels = [(which, mask) for which in ("forward", "backward") for mask in ("causal", "full")]
    figure, axes = pyplot.subplots(
        len(dims), 4, figsize=(15, 3.2 * len(dims)), layout="constrained", squeeze=False
    )
    for line, dim in enumerate(dims):
        for axis, (which, mask) in zip(axes[line], panels, strict=True):
            chosen = [row for row in rows if _field(row, 0) == dim and _field(row, 1) == mask]
            chosen.sort(key=_length)
            for name, label in LABELS.items():
                points = [
                    (_length(row), row["passes"][which][name]["tflops"])
                    for row in chosen
                    if name in row["passes"][which]
                ]
                if points:
                    axis.plot(*zip(*points, strict=True), "o-", color=COLOURS[name], label=label)
            axis.axhline(results["peak_tflops"], color="grey", ls=":", label="matrix product")
            axis.set_xscale("log", base=2)
            lengths = [_length(row) for row in chosen]
            axis.set_xticks(lengths, [f"{length}K" for length in lengths])
            axis.set_ylim(0)
            axis.set_title(f"{dim} {mask} {which}")
            axis.grid(alpha=0.25)
        axes[line][0].set_ylabel("TFLOP/s")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.suptitle(f"{results['device']}, bfloat16, {results['tokens'] // 1024}K tokens a batch")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _field(row: dict[str, Any], index: int) -> str:
    return str(row["shape"].split()[index])


def _length(row: dict[str, Any]) -> int:
    return int(_field(row, 2).removesuffix("K"))


def _equal_heads(shape: str) -> bool:
    heads, kv_heads = shape.split()[3].split(":")
    return heads == kv_heads
