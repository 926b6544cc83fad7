"""Tables of the results of `memory.py`, for its output and for docs/memory.md."""

from collections.abc import Iterable
from typing import Any

import numpy as np

GIGA = 1e9
OURS = "ring"
PARTS = ("arguments", "outputs", "aliased", "temporaries", "host")
Row = dict[str, Any]


def tokens(length: int) -> str:
    """Returns a length in units of 1,024 tokens, or of 1,048,576."""
    mega = length / 2**20
    return f"{mega:g}M" if mega >= 1 else f"{length // 1024}K"


def in_words(row: Row) -> str:
    """Returns a row as a line of text."""
    about = f"{row['attention']}, {row['kv_heads']} key/value heads, 8 × {row['kind']}"
    if "error" in row:
        return f"{about}: {row['error']}"
    parts = ", ".join(f"{part} {row[part] / GIGA:.1f}" for part in ("peak", *PARTS))
    words = "fits" if row["fits"] else "does not fit"
    return f"{about}, {tokens(row['length'])} tokens: {parts} GB; {words}"


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns a table."""
    titles = list(head)
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def select(results: Row, **wanted: Any) -> list[Row]:
    """Returns the rows of programs that have some values, in order of length."""
    rows = [row for row in results["rows"] if "error" not in row]
    found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    return sorted(found, key=lambda row: row["length"])


def names(results: Row) -> list[str]:
    """Returns the attentions that compiled, in order."""
    return list(dict.fromkeys(row["attention"] for row in results["rows"] if "error" not in row))


def settings(results: Row) -> list[tuple[str, int]]:
    """Returns the kinds of GPUs and numbers of key/value heads, in order."""
    rows = select(results)
    kinds = sorted({row["kind"] for row in rows})
    counts = sorted({row["kv_heads"] for row in rows}, reverse=True)
    return [(kind, count) for count in counts for kind in kinds]


def longest(results: Row, name: str, kind: str, kv_heads: int) -> Row | None:
    """Returns the row of the longest sequence that fits, None if none does."""
    rows = select(results, attention=name, kind=kind, kv_heads=kv_heads, fits=True)
    return rows[-1] if rows else None


def table_of_longest(results: Row) -> str:
    """Returns the longest sequences that fit, and their peaks."""
    where = settings(results)
    head = ["attention", *(f"8 × {kind}, {count} key/value heads" for kind, count in where)]
    lines = []
    for name in names(results):
        rows = (longest(results, name, kind, count) for kind, count in where)
        cells = (
            f"{tokens(row['length'])} ({row['peak'] / GIGA:.1f} GB)" if row else "none"
            for row in rows
        )
        lines.append([name, *cells])
    return markdown(head, lines)


def base(results: Row) -> dict[str, Any]:
    """Returns the kind and the number of key/value heads that have all lengths."""
    kind, kv_heads = settings(results)[0]
    return {"kind": kind, "kv_heads": kv_heads}


def table_of_peaks(results: Row) -> str:
    """Returns the peaks in GB by length; those that do not fit are in brackets."""
    rows = select(results, **base(results))
    lengths = sorted({row["length"] for row in rows if row["length"].bit_count() == 1})
    peaks = {(row["attention"], row["length"]): row for row in rows}

    def cell(row: Row | None) -> str:
        peak = f"{row['peak'] / GIGA:.1f}" if row else ""
        return peak if row is None or row["fits"] else f"({peak})"

    lines = [
        [name, *(cell(peaks.get((name, length))) for length in lengths)] for name in names(results)
    ]
    return markdown(["attention", *map(tokens, lengths)], lines)


def table_of_parts(results: Row) -> str:
    """Returns the parts of the longest step that fits, in GB."""
    lines = []
    for name in names(results):
        if row := longest(results, name, **base(results)):
            parts = (f"{row[part] / GIGA:.1f}" for part in PARTS)
            lines.append([name, tokens(row["length"]), *parts, f"{row['peak'] / GIGA:.1f}"])
    titles = ("arguments", "outputs", "of these in place", "temporaries", "pinned host memory")
    return markdown(["attention", "tokens", *titles, "peak"], lines)


def line(rows: Iterable[Row]) -> tuple[float, float, float]:
    """Returns bytes for each token of a shard, bytes of no tokens, and the largest residual.

    Fits a line to the peaks. The residual is a share of the peak.
    """
    at = np.array([row["length"] / row["devices"] for row in rows], float)
    peaks = np.array([row["peak"] for row in rows], float)
    slope, none = np.polyfit(at, peaks, 1)
    return slope, none, float(np.max(np.abs(none + slope * at - peaks) / peaks))


def table_of_lines(results: Row) -> str:
    """Returns how the peaks grow with the shard, over the doubled lengths that fit."""
    lines = []
    for name in names(results):
        rows = select(results, attention=name, fits=True, **base(results))
        rows = [row for row in rows if row["length"].bit_count() == 1]
        if len(rows) >= 4:
            slope, none, residual = line([row | {"devices": results["devices"]} for row in rows])
            each = (f"{slope / 1e3:.0f} KB", f"{none / GIGA:.1f} GB", f"{100 * residual:.1f}%")
            lines.append([name, str(len(rows)), *each])
    head = ("attention", "lengths", "for each token of a shard", "at no tokens", "largest residual")
    return markdown(head, lines)


def table_of_ratios(results: Row) -> str:
    """Returns how many times longer our sequences are than those of each other attention."""
    where = settings(results)
    head = ["ours against", *(f"8 × {kind}, {count} key/value heads" for kind, count in where)]
    lines = []
    for name in names(results):
        cells = []
        for kind, count in where:
            pair = [longest(results, each, kind, count) for each in (OURS, name)]
            ours, other = (row and row["length"] for row in pair)
            cells.append(f"{ours / other:.2g}×" if ours and other else "none")
        lines.append([name, *cells])
    return markdown(head, [each for each in lines if not each[0].startswith(OURS)])


def table_of_copies(results: Row) -> str:
    """Returns how many matrix products and calls XLA starts while arrays go to the host and back.

    To the host, of those that follow the attention in the loop over layers; back, of those that
    precede its gradients.
    """
    lines = []
    for row in select(results, **base(results)):
        if "copies" in row:
            forward, backward = row["copies"]["forward"], row["copies"]["backward"]
            away, back = (
                min(end - begin for begin, end in each)
                for each in (forward["to"], backward["from"])
            )
            cells = (
                f"{row['host'] / GIGA:.1f} GB",
                f"{away} of {forward['products'] - forward['call'] - 1}",
                f"{back} of {backward['call']}",
                "yes" if row["fits"] else "no",
            )
            lines.append([tokens(row["length"]), *cells])
    head = (
        "tokens",
        "pinned host memory",
        "beside copies to the host",
        "beside copies back",
        "fits",
    )
    return markdown(head, lines)


TABLES = {
    "longest": table_of_longest,
    "ratios": table_of_ratios,
    "peaks": table_of_peaks,
    "parts": table_of_parts,
    "lines": table_of_lines,
    "copies": table_of_copies,
}


def filled(page: str, results: Row) -> str:
    """Returns a page with the tables of results between its marks ``<!-- memory: NAME -->``."""
    for name, table in TABLES.items():
        begin, end = f"<!-- memory: {name} -->\n", "\n<!-- end -->"
        before, rest = page.split(begin)
        page = before + begin + table(results) + end + rest.split(end, 1)[1]
    return page
