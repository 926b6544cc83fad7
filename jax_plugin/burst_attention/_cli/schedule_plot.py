"""Draws the prediction of ``python -m burst_attention schedule``, with matplotlib."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import Patch

KINDS = {
    "compute": ("tab:blue", "computes"),
    "exposed": ("tab:red", "waits for a message"),
    "late": ("tab:orange", "waits for a rank that is late"),
    "send_within": ("tab:green", "sends within its node"),
    "send_between": ("tab:purple", "sends to another node"),
}
"""Colour and meaning of events. The sends of a rank stand below its other events."""
TITLE_SIZE = 10


def draw(found: dict[str, Any], title: str, path: Path) -> None:
    """Draws for each pass a timeline of all ranks and a map of each rank's work at each step."""
    passes = found["passes"]
    world = len(passes[0]["ranks"])
    figure, axes = pyplot.subplots(
        *(len(passes), 2),
        figsize=(13, 1.2 + len(passes) * max(2.6, 1.0 + 0.2 * world)),
        width_ratios=(3, 1),
        layout="constrained",
        squeeze=False,
    )
    figure.suptitle(f"{title}\n{found['machine']['title']}, predicted", fontsize=TITLE_SIZE + 1)
    seen: set[str] = set()
    for each, (left, right) in zip(passes, axes, strict=True):
        seen |= _timeline(left, each)
        _work(figure, right, each)
    shown = [
        Patch(color=colour, label=label) for kind, (colour, label) in KINDS.items() if kind in seen
    ]
    figure.legend(handles=shown, loc="outside lower center", ncols=len(shown), frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _timeline(axes: Any, each: dict[str, Any]) -> set[str]:
    """Draws one bar for each rank, with its sends below. Returns the kinds of events drawn."""
    world = len(each["ranks"])
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for event in each["timeline"]:
        start, end = 1e3 * event["start"], 1e3 * event["end"]
        bars.setdefault((event["rank"], event["what"]), []).append((start, end - start))
    for (rank, what), spans in bars.items():
        top, height = (rank + 0.14, 0.24) if what.startswith("send") else (rank - 0.4, 0.5)
        # Lines in the colour of the paper separate neighbours.
        axes.broken_barh(
            *(spans, (top, height)), facecolors=KINDS[what][0], edgecolor="white", linewidth=0.3
        )
    total = 1e3 * each["seconds"]
    axes.set(
        xlim=(0, max(total, 1e-9)),
        ylim=(world - 0.5, -0.5),
        xlabel="time, ms",
        ylabel="rank",
        yticks=_ticks(world, 16),
    )
    axes.set_title(
        f"{each['pass']}, {each['travels']} travel: {total:.3f} ms, idle {each['idle_share']:.1%}",
        fontsize=TITLE_SIZE,
    )
    return {what for _, what in bars}


def _work(figure: Any, axes: Any, each: dict[str, Any]) -> None:
    """Draws the milliseconds that each rank computes in each step, idle steps in white."""
    computed = [event for event in each["timeline"] if event["what"] == "compute"]
    steps = 1 + max((event["step"] for event in computed), default=0)
    work = np.zeros((len(each["ranks"]), steps))
    for event in computed:
        work[event["rank"], event["step"]] += 1e3 * (event["end"] - event["start"])
    image = axes.imshow(
        np.where(work > 0, work, np.nan),
        aspect="auto",
        interpolation="nearest",
        cmap="viridis",
        vmin=0,
    )
    axes.set(xlabel="step", xticks=_ticks(steps, 8), yticks=_ticks(len(each["ranks"]), 16))
    axes.set_title("work of a step, ms", fontsize=TITLE_SIZE)
    figure.colorbar(image, ax=axes)


def _ticks(count: int, most: int) -> range:
    """Returns at most ``most`` whole numbers below ``count``."""
    return range(0, count, -(-count // most))
