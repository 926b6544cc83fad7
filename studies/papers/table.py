"""The table of claims as records, and as Markdown."""

import math
from collections.abc import Callable, Iterable
from typing import Any

from papers import figures
from papers.claims import CLAIMS, PREFIXES, RELAY, RELAY_MEASURED, Claim, Paper
from papers.figures import FIGURES, PAPERS, TODAY
from papers.reasons import REASONS

YES, PARTLY, NO = "comes out", "partly", "does not come out"


def verdict(claim: Claim, found: list[float]) -> str:
    """Returns whether the figures are in the claim's range, and whether they reach its ends."""
    inside = claim.low / claim.tolerance <= min(found) <= max(found) <= claim.high * claim.tolerance
    if not inside:
        return NO
    reaches = (
        max(found) >= claim.high / claim.tolerance and min(found) <= claim.low * claim.tolerance
    )
    return YES if reaches or claim.high in (claim.low, math.inf) else PARTLY


def records() -> list[dict[str, Any]]:
    """Returns a record for each claim. Of the figures it has the least and the greatest."""
    return [_record(claim) for claim in CLAIMS]


def _record(claim: Claim) -> dict[str, Any]:
    found, today = (FIGURES[claim.key](site) for site in (PAPERS, TODAY))
    if found is None:
        raise ValueError(f"expected figures on the publication's machine for {claim.key}, got none")
    predicted = list(found)
    judged = verdict(claim, predicted)
    if (judged == YES) == (claim.key in REASONS):
        raise ValueError(
            f"expected a reason where a claim does not come out: {claim.key}, {judged}"
        )
    return {
        "key": claim.key,
        "paper": claim.paper.name,
        "arxiv": claim.paper.arxiv,
        "claim": claim.words,
        "claimed": [claim.low, claim.high if math.isfinite(claim.high) else None],
        "tolerance": claim.tolerance,
        "compared": claim.against,
        "problem": claim.machine,
        "assumed": claim.assumed,
        "added_later": claim.later,
        "predicted": _ends(predicted),
        "predicted_today": None if today is None else _ends(today),
        "verdict": judged,
        "reason": None if judged == YES else REASONS[claim.key](),
    }


def _ends(found: Iterable[float]) -> list[float]:
    values = list(found)
    return [round(end, 4) for end in (min(values), max(values))]


def markdown(found: list[dict[str, Any]]) -> str:
    """Returns the generated part of the page."""
    papers: dict[str, Paper] = {claim.paper.name: claim.paper for claim in CLAIMS}
    yes, partly, no = (
        sum(each["verdict"] == which for each in found) for which in (YES, PARTLY, NO)
    )
    cells = sum(each["paper"] == RELAY.name for each in found)
    later = sum(each["added_later"] for each in found)
    parts = [
        f"Of {len(found)} rows {yes} come out, {partly} partly, and {no} do not. {cells} rows are "
        f"cells of RelayAttention's table, and {later} came later."
    ]
    for name, paper in papers.items():
        rows = [each for each in found if each["paper"] == name]
        parts.append(f"### {name}\n\n[arXiv:{paper.arxiv}](https://arxiv.org/abs/{paper.arxiv})")
        parts += _relay(rows) if paper is RELAY else _rows(rows)
    return "\n\n".join([*parts, *_decoding()])


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Returns a Markdown table."""
    lines = [list(head), ["---"] * len(list(head)), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _rows(rows: list[dict[str, Any]]) -> list[str]:
    head = ("claim", "compared", "machine and problem", "tolerance", "predicted", "verdict", "H200")
    lines = [
        (
            each["claim"],
            each["compared"],
            f"{each['problem']} (assumed: {each['assumed']})",
            f"{each['tolerance']:g}×",
            f"**{_figures(each, each['predicted'])}**",
            each["verdict"] + (", row added later" if each["added_later"] else ""),
            _figures(each, each["predicted_today"]),
        )
        for each in rows
    ]
    reasons: dict[str, list[str]] = {}
    for each in rows:
        if each["reason"]:
            reasons.setdefault(each["reason"], []).append(_short(each))
    listed = [f"- *{'; '.join(which)}:* {reason}" for reason, which in reasons.items()]
    return [table(head, lines), "\n".join(listed)] if listed else [table(head, lines)]


def _short(each: dict[str, Any]) -> str:
    later = ", with a port for each GPU" if each["added_later"] else ""
    return f"{each['claim']}{later}, predicted {_figures(each, each['predicted'])}"


def _figures(each: dict[str, Any], ends: list[float] | None) -> str:
    """Returns a figure or a range, as a share, a length in tokens or a ratio."""
    if ends is None:
        return "–"
    shown: Callable[[float], str] = _ratio
    if each["claim"].startswith("40% less"):
        shown = _share
    elif each["claimed"][0] > 1000:
        shown = _tokens
    low, high = map(shown, ends)
    return low if low == high else f"{low} to {high}"


def _ratio(value: float) -> str:
    return f"{value:.2f}×"


def _share(value: float) -> str:
    return f"{value:.0%}"


def _tokens(value: float) -> str:
    return f"{value / 1024:,.0f}K"


def _relay(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the table by requests and length of the prefix: measured, predicted, on an H200."""
    by_key = {each["key"]: each for each in rows}

    def cell(requests: int, prefix: int) -> str:
        each = by_key[f"relay-{requests}-{prefix}"]
        mark = "" if each["verdict"] == YES else f" ({each['verdict']})"
        predicted, today = each["predicted"][0], each["predicted_today"][0]
        return f"{each['claimed'][0]:g} / **{predicted:.3g}** / {today:.3g}{mark}"

    head = ("requests", *(f"prefix of {prefix:,}" for prefix in PREFIXES))
    lines = [
        (requests, *(cell(requests, prefix) for prefix in PREFIXES)) for requests in RELAY_MEASURED
    ]
    first, outs = rows[0], sum(each["verdict"] == YES for each in rows)
    words = (
        f"Measured by the authors / **predicted** / predicted for an H200: {first['compared']}. "
        f"{first['problem']} (assumed: {first['assumed']}). Tolerance {first['tolerance']:g}×: "
        f"{outs} of {len(rows)} cells come out."
    )
    return [words, table(head, lines)]


def _decoding() -> list[str]:
    """Returns the tables of decoding that no claim asks for."""
    return [
        "### Attention apart from the weights, by devices",
        "Tokens per second and dollar of LLaMA-65B with 2 A100 for the weights and RTX 4090 for "
        "cache and attention, over the best of 2, 4 and 8 A100 alone. It pays above 1.",
        table(
            ("context", *(f"{count} RTX 4090" for count in figures.HOLDERS), "pays from, per A100"),
            (
                (
                    f"{context:,} tokens",
                    *(f"{ratio:.2f}" for ratio in figures.offload_ratios(context)),
                    f"{figures.pays_from(context):g} RTX 4090",
                )
                for context in figures.CONTEXTS
            ),
        ),
        "### A sharded cache against tensor-parallel heads",
        "A layer's attention for one token of each of 32 requests with 32,768 tokens in the cache, "
        "32 query and 8 key/value heads of 128 columns, H200s in nodes of eight, 400 Gb/s per GPU. "
        "More ranks than key/value heads read the same keys; a sharded cache pays for an exchange.",
        table(
            ("ranks", "heads over ranks", "cache over ranks", "speed"),
            (
                (
                    ranks,
                    f"{1e6 * by_heads:.0f} µs",
                    f"{1e6 * by_cache:.0f} µs",
                    f"{by_heads / by_cache:.2f}×",
                )
                for ranks in (2, 4, 8, 16, 32)
                for by_heads, by_cache in [figures.sharded_cache(ranks)]
            ),
        ),
    ]
