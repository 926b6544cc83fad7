"""A problem over a ring and its inputs; ../../tests/cases.json as such problems is in shared.py."""

import math
import sys
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "python"))

Layout = Literal["contiguous", "zigzag", "striped"]
Schedule = Literal["ring", "double_ring", "balanced", "all_gather"]
LAYOUTS: tuple[Layout, ...] = ("zigzag", "contiguous", "striped")
SHORT = {"bfloat16": "bf16", "float16": "f16"}
OPERANDS = ("q", "k", "v", "dout", "dlse")
RESULTS = ("o", "lse", "dq", "dk", "dv")
PER_HEAD = {"sinks": "dz", "alibi_slopes": "dslopes"}
"""Inputs of a number for each head, and their gradients."""


@dataclass(frozen=True)
class Problem:
    """Attention of a whole sequence, cut over `world_size` ranks."""

    name: str
    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    is_causal: bool = True
    layout: Layout = "zigzag"
    world_size: int = 1
    backward: str = "auto"
    backward_order: str = "fixed"
    with_dlse: bool = True
    kv_seq: int = 0
    """Keys; 0: as many as queries."""
    value_dim: int = 0
    """0: head_dim."""
    window: tuple[int, int] | None = None
    soft_cap: float | None = None
    segments: str | None = None
    slopes: bool = False
    sinks: bool = False
    dropout: float = 0.0
    schedule: Schedule = "ring"
    inner: int = 0
    """Ranks of an inner ring, of a double ring."""

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        """Of query."""
        return (self.batch, self.seq, self.heads, self.head_dim)

    @property
    def o_shape(self) -> tuple[int, int, int, int]:
        """Of output."""
        return (*self.q_shape[:3], self.value_dim or self.head_dim)

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        """Of key."""
        return (self.batch, self.kv_seq or self.seq, self.kv_heads, self.head_dim)

    @property
    def v_shape(self) -> tuple[int, int, int, int]:
        """Of value."""
        return (*self.kv_shape[:3], self.value_dim or self.head_dim)

    @property
    def softmax_scale(self) -> float:
        """As the public functions have it by default."""
        return float(self.head_dim**-0.5)

    @property
    def reach(self) -> tuple[int, int]:
        """How far a query sees back and ahead, whatever the segments."""
        everything = max(self.seq, self.kv_shape[1])
        left, right = self.window or (everything, everything)
        return left, 0 if self.is_causal else right

    @property
    def pairs(self) -> float:
        """Of a query and a key that a causal mask allows, edges aside."""
        return min(self.seq / 2, sum(self.reach) + 1) * self.seq

    @property
    def results(self) -> tuple[str, ...]:
        """What comes out of forward and backward through the public function."""
        given = {"sinks": self.sinks, "alibi_slopes": self.slopes}
        return (*RESULTS, *(PER_HEAD[name] for name in PER_HEAD if given[name]))

    @property
    def unit_bytes(self) -> int:
        """Of one tensor of the query's shape."""
        return 2 * math.prod(self.q_shape)

    def on_one_rank(self) -> "Problem":
        """The same without a ring."""
        return replace(self, world_size=1, schedule="ring", inner=0)

    def inputs(self) -> dict[str, Any]:
        """q, k, v, dout, dlse and what features need, on the host, in the order of the sequence."""
        seed = [self.seq, self.heads, self.head_dim, zlib.crc32(self.dtype.encode())]
        random, dtype = np.random.default_rng(seed), jnp.dtype(self.dtype)
        shapes = {"q": self.q_shape, "k": self.kv_shape, "v": self.v_shape, "dout": self.o_shape}
        arrays: dict[str, Any] = {
            name: random.standard_normal(shape, np.float32).astype(dtype)
            for name, shape in shapes.items()
        }
        arrays["dlse"] = random.standard_normal(self.q_shape[:3], np.float32) * self.with_dlse
        return arrays | self._extras()

    def _extras(self) -> dict[str, Any]:
        """Of features, as the tests make them: only their names are other ones."""
        import features  # type: ignore[import-not-found]

        names = ("batch", "heads", "segments", "slopes", "sinks", "dropout")
        kept = {name: getattr(self, name) for name in names}
        lengths = {"q_len": self.seq, "kv_len": self.kv_shape[1]}
        found: dict[str, Any] = features.Problem(**kept, **lengths).extras()
        return found
