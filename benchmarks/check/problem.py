"""A problem over a ring and its inputs; shared.py makes problems of ../../tests/cases.json."""

import math
import zlib
from dataclasses import dataclass, replace
from typing import Any, Literal

import features  # type: ignore[import-not-found]
import jax.numpy as jnp
import numpy as np

Layout = Literal["contiguous", "zigzag", "striped"]
Schedule = Literal["ring", "double_ring", "balanced", "all_gather"]
LAYOUTS: tuple[Layout, ...] = ("zigzag", "contiguous", "striped")
SHORT = {"bfloat16": "bf16", "float16": "f16"}
OPERANDS = ("q", "k", "v", "dout", "dlse")
RESULTS = ("o", "lse", "dq", "dk", "dv")
PER_HEAD = {"sinks": "dz", "alibi_slopes": "dslopes"}
"""Inputs with one number for each head, and their gradients."""


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
    """Number of keys; 0 means the number of queries."""
    value_dim: int = 0
    """Head dimension of values; 0 means head_dim."""
    window: tuple[int, int] | None = None
    soft_cap: float | None = None
    segments: str | None = None
    slopes: bool = False
    sinks: bool = False
    dropout: float = 0.0
    schedule: Schedule = "ring"
    inner: int = 0
    """Ranks of an inner ring of a double ring."""

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        """Returns the shape of query."""
        return (self.batch, self.seq, self.heads, self.head_dim)

    @property
    def o_shape(self) -> tuple[int, int, int, int]:
        """Returns the shape of output."""
        return (*self.q_shape[:3], self.value_dim or self.head_dim)

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        """Returns the shape of key."""
        return (self.batch, self.kv_seq or self.seq, self.kv_heads, self.head_dim)

    @property
    def v_shape(self) -> tuple[int, int, int, int]:
        """Returns the shape of value."""
        return (*self.kv_shape[:3], self.value_dim or self.head_dim)

    @property
    def softmax_scale(self) -> float:
        """Returns the default of the public functions."""
        return float(self.head_dim**-0.5)

    @property
    def reach(self) -> tuple[int, int]:
        """Returns how far a query sees back and ahead, without regard to segments."""
        everything = max(self.seq, self.kv_shape[1])
        left, right = self.window or (everything, everything)
        return left, 0 if self.is_causal else right

    @property
    def pairs(self) -> float:
        """Returns the pairs that a causal mask and the window allow, without regard to edges."""
        return min(self.seq / 2, sum(self.reach) + 1) * self.seq

    @property
    def results(self) -> tuple[str, ...]:
        """Returns the names of the results of forward and backward pass."""
        given = {"sinks": self.sinks, "alibi_slopes": self.slopes}
        return (*RESULTS, *(PER_HEAD[name] for name in PER_HEAD if given[name]))

    @property
    def unit_bytes(self) -> int:
        """Returns the bytes of one tensor of the query's shape."""
        return 2 * math.prod(self.q_shape)

    def on_one_rank(self) -> "Problem":
        """Returns the problem without a ring."""
        return replace(self, world_size=1, schedule="ring", inner=0)

    def inputs(self) -> dict[str, Any]:
        """Returns q, k, v, dout, dlse and arrays of features, on the host, in sequence order."""
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
        """Returns the arrays of features, as the tests make them."""
        names = ("batch", "heads", "segments", "slopes", "sinks", "dropout")
        kept = {name: getattr(self, name) for name in names}
        lengths = {"q_len": self.seq, "kv_len": self.kv_shape[1]}
        found: dict[str, Any] = features.Problem(**kept, **lengths).feature_arrays()
        return found
