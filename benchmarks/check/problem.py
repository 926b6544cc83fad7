"""A problem over a ring, its inputs, and the shared cases as such problems in 16-bit types."""

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
LAYOUTS: tuple[Layout, ...] = ("zigzag", "contiguous", "striped")
SHORT = {"bfloat16": "bf16", "float16": "f16"}


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
    with_dlse: bool = True

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        """Of query and output."""
        return (self.batch, self.seq, self.heads, self.head_dim)

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        """Of key and value."""
        return (self.batch, self.seq, self.kv_heads, self.head_dim)

    @property
    def softmax_scale(self) -> float:
        """As the public functions have it by default."""
        return float(self.head_dim**-0.5)

    @property
    def unit_bytes(self) -> int:
        """Of one tensor of the query's shape."""
        return 2 * math.prod(self.q_shape)

    def on_one_rank(self) -> "Problem":
        """The same without a ring."""
        return replace(self, world_size=1)

    def inputs(self) -> dict[str, Any]:
        """q, k, v, dout and dlse on the host, in the order of the sequence."""
        seed = [self.seq, self.heads, self.head_dim, zlib.crc32(self.dtype.encode())]
        random, dtype = np.random.default_rng(seed), jnp.dtype(self.dtype)
        shapes = {"q": self.q_shape, "k": self.kv_shape, "v": self.kv_shape, "dout": self.q_shape}
        arrays: dict[str, Any] = {
            name: random.standard_normal(shape, np.float32).astype(dtype)
            for name, shape in shapes.items()
        }
        arrays["dlse"] = random.standard_normal(self.q_shape[:3], np.float32) * self.with_dlse
        return arrays


def shared() -> list[Problem]:
    """tests/cases.json as the correctness tests choose from it; float32 becomes bfloat16.

    Axes beside the ring's only make batch and heads smaller, so that a ring of the same length
    takes the whole of them.
    """
    import case_list  # type: ignore[import-not-found]

    return [_problem(case) for case in case_list.correctness_cases()]


def _problem(case: Any) -> Problem:
    backward, with_dlse = case.variants[0]
    cast = case.dtype == "float32"
    return Problem(
        name=case.name + ("-as-bfloat16" if cast else ""),
        batch=case.batch,
        seq=case.seq,
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        dtype="bfloat16" if cast else case.dtype,
        is_causal=case.causal,
        layout=case.layout,
        world_size=case.mesh[1],
        backward=backward,
        with_dlse=with_dlse,
    )


def systematic() -> list[Problem]:
    """Rings of 2, 4 and 8: every layout, both backward modes, both masks.

    With grouped heads, two batch entries, lengths that fit no tile (odd ones, but for zigzag,
    whose shards are two chunks), and both types and two widths in turn.
    """
    found: list[Problem] = []
    for world_size in (2, 4, 8):
        for layout in LAYOUTS:
            for backward in ("keys", "queries"):
                for is_causal in (True, False):
                    head_dim = 128 if len(found) % 3 else 64
                    dtype = "float16" if len(found) % 4 == 3 else "bfloat16"
                    local = 198 if layout == "zigzag" else 197
                    mask = "causal" if is_causal else "full"
                    found.append(
                        Problem(
                            name=f"ring of {world_size}, {layout} {mask}, {backward} travel, "
                            f"D{head_dim} {SHORT[dtype]}",
                            batch=2,
                            seq=local * world_size,
                            heads=8,
                            kv_heads=2,
                            head_dim=head_dim,
                            dtype=dtype,
                            is_causal=is_causal,
                            layout=layout,
                            world_size=world_size,
                            backward=backward,
                        )
                    )
    return found
