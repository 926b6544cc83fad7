"""The benchmark cases of tests/cases.json and their cost."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).parents[1] / "tests" / "cases.json"


@dataclass(frozen=True)
class Case:
    """One attention problem; the mesh is (data, context, tensor)."""

    name: str
    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    causal: bool
    layout: str
    mesh: tuple[int, int, int]
    tags: frozenset[str]
    window: tuple[int, int] | None = None
    """How many positions a query sees before and after its own."""
    documents: int = 1
    """Number of documents of equal length in the sequence."""
    schedule: str = "ring"
    inner: int = 0
    """Ranks of an inner ring. If positive, the sequence has two axes, ``node`` and ``context``."""

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        """Returns the shape of query and output."""
        return (self.batch, self.seq, self.heads, self.head_dim)

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        """Returns the shape of key and value."""
        return (self.batch, self.seq, self.kv_heads, self.head_dim)

    @property
    def shape(self) -> str:
        """Returns the problem in words, for tables."""
        heads = f"H{self.heads}" + (f":{self.kv_heads}" if self.kv_heads != self.heads else "")
        mask = "causal" if self.causal else "full"
        mask += f" window {self.window[0]}" if self.window else ""
        mask += f" {self.documents} documents" if self.documents > 1 else ""
        return f"B{self.batch} S{self.seq} {heads} D{self.head_dim} {mask} {self.dtype}"

    def seen(self) -> float:
        """Returns the share of all pairs that the mask allows, without regard to its edges."""
        part = (0.5 if self.causal else 1.0) / self.documents
        return min(part, (sum(self.window) + 1) / self.seq) if self.window else part

    def flop(self, which: str) -> float:
        """Returns the FLOPs: forward 4·B·S²·H·D · `seen`, backward 2.5 times as many, or both."""
        forward = 4.0 * self.batch * self.seq**2 * self.heads * self.head_dim
        forward *= self.seen()
        return forward * {"forward": 1.0, "backward": 2.5, "both": 3.5}[which]

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Returns q, k, v and dout in float32, from a fixed seed."""
        random = np.random.default_rng(0)
        shapes = (self.q_shape, self.kv_shape, self.kv_shape, self.q_shape)
        q, k, v, dout = (random.standard_normal(shape, np.float32) for shape in shapes)
        return q, k, v, dout

    def options(self) -> dict[str, Any]:
        """Returns the arguments of `burst_attention.attention`, without segment ids."""
        return {
            "is_causal": self.causal,
            "local_window_size": self.window,
            "layout": self.layout,
            "schedule": self.schedule,
        }

    def segment_ids(self) -> np.ndarray | None:
        """Returns int32 ``[batch, seq]`` in the order of the sequence; None for one document."""
        if self.documents == 1:
            return None
        ids = np.arange(self.seq) * self.documents // self.seq
        return np.broadcast_to(ids.astype(np.int32), (self.batch, self.seq))

    def without_mask(self) -> "Case":
        """Returns the case without window and documents."""
        return replace(self, window=None, documents=1)

    def on_one_device(self) -> "Case":
        """Returns the same global problem without a ring."""
        return replace(self, mesh=(1, 1, 1), layout="contiguous")


def load() -> list[Case]:
    """Returns all cases with the tag `bench`, in the order of the file."""
    entries: list[dict[str, Any]] = json.loads(FILE.read_text())["cases"]
    return [_case(entry) for entry in entries if "bench" in entry["tags"]]


def sizes(kind: str) -> dict[str, Any]:
    """Returns the sizes of the benchmarks of ``decode`` or ``linear`` attention."""
    found: dict[str, Any] = json.loads(FILE.read_text())[kind]["bench"]
    return found


def find(name: str, seq: int | None = None) -> Case:
    """Returns the case of a name, with another length if ``seq`` is given."""
    for case in load():
        if case.name == name:
            return case if seq is None else replace(case, seq=seq)
    raise SystemExit(f"no benchmark case {name} in {FILE}")


def _case(entry: dict[str, Any]) -> Case:
    data, context, tensor = entry["mesh"]
    taken = ("name", "batch", "heads", "kv_heads", "head_dim", "dtype", "causal", "layout")
    return Case(
        seq=entry.get("seq") or entry["tokens_per_rank"] * context,
        mesh=(data, context, tensor),
        tags=frozenset(entry["tags"]),
        window=tuple(entry["window"]) if "window" in entry else None,
        documents=entry.get("documents", 1),
        **{name: entry[name] for name in taken},
    )
