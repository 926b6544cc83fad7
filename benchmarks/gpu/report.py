"""Prints the table, writes the JSON file and draws the picture."""

import json
import math
import re
from pathlib import Path
from typing import Any

from .speed import bar_of

COLOURS = {
    "ours": "tab:red",
    "any_order": "tab:purple",
    "cudnn": "tab:green",
    "flash": "tab:orange",
}
LABELS = {
    "ours": "burst_attention",
    "any_order": 'burst_attention, backward_order="any"',
    "cudnn": "cuDNN (torch)",
    "flash": "flash attention (torch)",
}
COLUMNS = "{:<23}{:<10}{:>9}{:>10}{:>8}{:>6}{:>9}{:>9}  {}"


def slug(device: str) -> str:
    """Returns a device's name as a file name."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def save(results: dict[str, Any], path: Path) -> None:
    """Writes the results so far, so that a killed run loses none of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(results, indent=1) + "\n")
    fresh.replace(path)


def print_environment(found: dict[str, Any]) -> None:
    """Prints a line for each entry."""
    for name, value in found.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {number}" for key, number in value.items() if number)
        print(f"{name:<16}{value}", flush=True)


def print_images(row: dict[str, Any]) -> None:
    """Prints how many images load, and the driver's errors for the rest."""
    loaded = row["of"] - len(row["refused"])
    print(f"{row['library']}: {loaded} of {row['of']} images of {row['target']} load", flush=True)
    for name, error in list(row["refused"].items())[:3]:
        print(f"    {name}: {error}", flush=True)


def print_check(row: dict[str, Any]) -> None:
    """Prints one line: our errors, and cuDNN's in brackets."""
    peer = row["cudnn"]
    shown = [
        f"{name} {error:.1e}" + (f" ({peer[name]:.1e})" if name in peer else "")
        for name, error in row["errors"].items()
    ]
    verdict = "FAILED: " + "; ".join(row["wrong"]) if row["wrong"] else "ok"
    print(f"{row['case']:<26}{row['kernel']:<13}{'  '.join(shown)}  {verdict}", flush=True)


def print_header() -> None:
    """Prints the header of the lines of `print_speed`."""
    columns = ("shape", "pass", "TFLOP/s", "ms", "spread", "peak", "× cuDNN", "× flash")
    print(COLUMNS.format(*columns, "alone: ms, TFLOP/s of its products"), flush=True)


def print_speed(row: dict[str, Any], peak: float) -> None:
    """Prints our speed, share of peak, ratios to peers, the kernels alone, and notes."""
    times = row["contenders"]
    ours = times["ours"]
    line = (f"{ours['tflops']:.0f}", f"{ours['ms']:.3f}", f"{ours['spread']:.0%}")
    ratios = (
        f"{times[peer]['ms'] / ours['ms']:.2f}" if peer in times else "-"
        for peer in ("cudnn", "flash")
    )
    share = f"{ours['tflops'] / peak:.0%}" if math.isfinite(peak) else "-"
    alone = ", ".join(
        f"{name} {found['ms']:.3f}" + (f" {found['tflops']:.0f}" if found["tflops"] else "")
        for name, found in row["kernels"].items()
    )
    print(COLUMNS.format(row["shape"], row["pass"], *line, share, *ratios, alone), flush=True)
    if "any_order" in times:
        found = times["any_order"]
        print(f"    in any order {found['ms']:.3f} ms, {found['tflops']:.0f} TFLOP/s", flush=True)
    for note in [*row["notes"], *(f"no {name}: {why}" for name, why in row["absent"].items())]:
        print(f"    {note[:150]}", flush=True)
    bar = bar_of(row)
    if bar is not None:
        verdict = "met" if bar[1] >= bar[0] else "MISSED"
        print(
            f"    bar {verdict}: at least {bar[0]:.2f} × cuDNN, measured {bar[1]:.2f}", flush=True
        )


def print_jax(row: dict[str, Any]) -> None:
    """Prints a line for each pass."""
    for which, times in row["passes"].items():
        ours, jax = times["ours"], times["jax"]
        print(
            f"{row['shape']:<23}{which:<10}{ours['tflops']:>9.0f}{ours['ms']:>10.3f} ms  "
            f"{jax['ms'] / ours['ms']:.2f} × jax.nn with cuDNN ({jax['tflops']:.0f} TFLOP/s)",
            flush=True,
        )


def draw(results: dict[str, Any], path: Path) -> None:
    """Draws TFLOP/s against length: a row of panels for each head dimension, without grouped heads.

    Shapes that were left out have no points.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in results["speed"] if row["heads"] == row["kv_heads"]]
    dims = sorted({row["dim"] for row in rows})
    columns = [(which, causal) for which in ("forward", "backward") for causal in (True, False)]
    figure, axes = pyplot.subplots(
        max(1, len(dims)),
        len(columns),
        figsize=(14, 0.9 + 2.9 * max(1, len(dims))),
        layout="constrained",
        squeeze=False,
        sharey="row",
    )
    peak = results.get("peak_tflops")
    lines: dict[str, Any] = {}
    for dim, panels in zip(dims, axes, strict=False):
        for axis, (which, causal) in zip(panels, columns, strict=True):
            wanted = {"dim": dim, "pass": which, "causal": causal}
            chosen = [row for row in rows if wanted.items() <= row.items()]
            lines |= _panel(axis, sorted(chosen, key=lambda row: row["seq"]), peak)
            axis.set_title(f"{which}, {'causal' if causal else 'full'}, D {dim}", fontsize=10)
        panels[0].set_ylabel("TFLOP/s")
        panels[0].set_ylim(0)
    for axis in axes[-1]:
        axis.set_xlabel("sequence length, tokens")
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(
        f"Attention on {results['environment']['device']}, bfloat16, "
        f"{results['tokens'] // 1024}K tokens a batch"
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(axis: Any, rows: list[dict[str, Any]], peak: float | None) -> dict[str, Any]:
    """Draws a panel and returns its lines by label."""
    lines = {}
    for name, label in LABELS.items():
        points = [
            (row["seq"], row["contenders"][name]["tflops"])
            for row in rows
            if name in row["contenders"]
        ]
        if points:
            style = {"lw": 2.2, "zorder": 3} if name == "ours" else {"lw": 1.4}
            (lines[label],) = axis.plot(
                *zip(*points, strict=True), "o-", ms=4, color=COLOURS[name], **style
            )
    if peak:
        lines["matrix product of 8192³"] = axis.axhline(peak, color="grey", ls=":")
    axis.set_xscale("log", base=2)
    lengths = [row["seq"] for row in rows]
    axis.set_xticks(lengths, [f"{length // 1024}K" for length in lengths])
    axis.minorticks_off()
    axis.grid(alpha=0.25)
    return lines
