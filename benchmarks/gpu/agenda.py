"""What `ring_gpu.py` measures, in the order in which it does: what no GPU has answered comes first.

A row has a kind, which names a method of `rows.Work`, and arguments of that method.
"""

from collections import Counter
from typing import Any

Row = tuple[str, dict[str, Any]]

GROUPED: dict[str, Any] = {"heads": "grouped", "tokens": 8192}
EQUAL: dict[str, Any] = {"heads": "equal", "tokens": 8192}
LONG: dict[str, Any] = {"heads": "equal", "tokens": 32768}
WIDTHS: list[dict[str, Any]] = [{}, {"head_dim": 64}, {"head_dim": 256}]
"""Columns of a head; 128 if a row leaves them out."""
PEERS = {"head_dim": 128, "batch": 4, "tokens": 8192}
"""The batch for which the delta rule's peers publish their times."""

OPEN: list[Row] = [
    ("carry", {"heads": "grouped"}),
    ("ring", GROUPED | {"tokens": 4096}),
    ("ring", GROUPED),
    *(("layer", GROUPED | width) for width in WIDTHS),
    *(("packed", {"causal": True, "document": tokens}) for tokens in (1024, 2048, 4096)),
    *(("layer", LONG | width) for width in WIDTHS),
    ("delta", {"channels": False, "heads": 64} | PEERS),
    ("delta", {"channels": True, "heads": 96} | PEERS),
]
"""The rows that no GPU has measured."""

KNOWN: list[Row] = [
    ("ring", EQUAL | {"tokens": 4096}),
    ("layer", EQUAL),
    ("mask", {}),
    ("window", {}),
    *(("decode", {"tokens": tokens}) for tokens in (131072, 16384)),
    ("host", {}),
    ("packed", {}),
    *(("delta", {"channels": channels}) for channels in (False, True)),
    *(("linear", {"channels": channels}) for channels in (False, True)),
    *(("latents", {"tokens": tokens}) for tokens in (131072, 32768)),
    ("infini", {}),
    *(
        ("memory", {"heads": heads, "by": by})
        for by in ("ring", "launch")
        for heads in ("grouped", "equal")
    ),
    ("ring", EQUAL),
    *(("layer", EQUAL | more) for more in ({"head_dim": 64}, {"causal": False})),
    ("layer", EQUAL | {"head_dim": 64, "causal": False}),
]
"""The rows of which an H100 has measured at least one of each kind."""

AGENDA = OPEN + KNOWN
WITH_PEERS = ("ring", "layer", "packed", "delta")
"""Kinds whose rows have programs that they can do without."""
KINDS = list(dict.fromkeys(kind for kind, _ in AGENDA))


def name_of(kind: str, about: dict[str, Any]) -> str:
    """Returns the name of a row in the file of results."""
    return ", ".join([kind, *(f"{key} {value}" for key, value in about.items())])


def chosen(kinds: list[str], each: int | None = None) -> list[Row]:
    """Returns the rows of some kinds in their order, at most ``each`` of a kind."""
    seen: Counter[str] = Counter()
    found = []
    for kind, about in AGENDA:
        if kind in kinds and (each is None or seen[kind] < each):
            seen[kind] += 1
            found.append((kind, about))
    return found
