"""Draws errors, the cost of the ring and training losses in one picture."""

from pathlib import Path
from typing import Any

ERRORS = ("o", "dq", "dk", "dv")


def draw(results: dict[str, Any], path: Path) -> None:
    """Draws three panels; an empty panel says that nothing was measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parts = {name: part["rows"] for name, part in results["parts"].items()}
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    checked = [row for n in ("one", "virtual", "features", "processes") for row in parts.get(n, [])]
    _errors(left, [row for row in checked if "bar" in row])
    _tax(middle, [row for row in parts.get("speed", []) if row["kind"] != "layer"])
    _losses(right, [*parts.get("losses", []), *parts.get("training", [])])
    rehearsal = " (REHEARSAL with stand-ins)" if results["rehearsal"] else ""
    figure.suptitle(f"The ring on {results.get('environment', {}).get('device')}{rehearsal}")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _errors(axis: Any, rows: list[dict[str, Any]]) -> None:
    axis.set_title("error against float64")
    if not rows:
        return _nothing(axis)
    for at, name in enumerate(ERRORS):
        values = [row["errors"][name] for row in rows if name in row["errors"]]
        spread = [at + 0.5 * index / max(1, len(values)) - 0.25 for index in range(len(values))]
        axis.plot(spread, values, ".", ms=4, color="tab:red")
    axis.axhline(rows[0]["bar"], color="grey", ls=":", label="bound")
    axis.set_xticks(range(len(ERRORS)), ERRORS)
    axis.set_ylabel("multiple of the cost of rounding")
    axis.set_ylim(0)
    axis.legend(frameon=False)
    return None


def _tax(axis: Any, rows: list[dict[str, Any]]) -> None:
    axis.set_title("virtual ring, time of one launch = 1; windows: of the causal mask")
    if not rows:
        return _nothing(axis)
    for at, row in enumerate(rows):
        axis.barh(at, row["ratio"], color="tab:red")
        axis.plot([row["bar"]] * 2, [at - 0.4, at + 0.4], color="black")
    axis.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("bars: measured; black lines: bound")
    return None


def _losses(axis: Any, rows: list[dict[str, Any]]) -> None:
    axis.set_title("training loss; dashed: plain attention")
    if not rows:
        return _nothing(axis)
    for row in rows:
        (line,) = axis.plot(row["losses"]["ring"], lw=1.5, label=row["name"])
        axis.plot(row["losses"]["plain"], "--", lw=1.0, color=line.get_color(), alpha=0.6)
    axis.set_xlabel("step")
    axis.legend(frameon=False, fontsize=8)
    return None


def _nothing(axis: Any) -> None:
    axis.text(0.5, 0.5, "nothing measured", ha="center", transform=axis.transAxes)
