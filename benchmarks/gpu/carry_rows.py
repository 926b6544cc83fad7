"""The row of single launches, which read sums of earlier launches or write sums for later ones."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .launching import OnDevice, Stream
from .ours import Attention, sequence
from .problems import Rows
from .race import arrays_of, in_turns
from .serve import clock
from .speed import AGREE, PRODUCTS, figures

HOP = (4096, 2048)
"""Queries and keys of a step of a zigzag ring with 4,096 tokens on a rank."""
ENDS = {"11": (True, True), "10": (True, False), "01": (False, True), "00": (False, False)}
"""Whether a launch begins its sums, and whether it ends them, by name."""
IN_A_ROW = 30
"""Launches whose time hides the host's."""
SECONDS = 1.5
KERNELS = {"forward": ("forward", "o"), "key_grads": ("dkdv", "dk"), "query_grads": ("dq", "dq")}
"""By method of `Attention`: the name in `PRODUCTS`, and a result."""


class Hop:
    """The kernels of a hop on arrays of their own. It is the launcher of their requests."""

    def __init__(self, arrays: dict[str, jax.Array]):
        self._stream, self.blocks = Stream(), dict[str, int]()
        self._made: dict[str, OnDevice] = {}
        given = {name: OnDevice(arrays[name]) for name in ("q", "k", "v", "dout")}
        jax.block_until_ready(arrays)
        self._attention = Attention(self, given, self._empty, float32=jnp.dtype("float32"))
        sequence(self._attention.forward(), self._attention.make_delta())()
        self.synchronize()

    def prepare(self, request: dict[str, Any]) -> Callable[[], None]:
        """Returns a function that launches a request, whose blocks it counts."""
        self.blocks[next(iter(request))] = self._stream.blocks(request)
        return self._stream.prepare(request)

    def synchronize(self) -> None:
        """Waits until all enqueued work is done."""
        self._stream.synchronize()

    def launched(self, kernel: str, ends: tuple[bool, bool]) -> Callable[[], None]:
        """Returns a function that launches a kernel, a method of `Attention`."""
        found: Callable[[], None] = getattr(self._attention, kernel)(ends=ends)
        return found

    def rounds(self, kernel: str) -> int:
        """Returns how many blocks a multiprocessor runs, one at a time."""
        return math.ceil(self.blocks[kernel] / self._stream.multiprocessors())

    def difference(self, kernel: str, result: str) -> float:
        """Returns how far two launches over the same keys are from what one launch gives.

        A second launch over the same keys or queries leaves o as it is, and doubles gradients.
        """
        once, twice = (self._outcome(kernel, result, names) for names in (["11"], ["10", "01"]))
        expected = once if result == "o" else 2 * once
        return float(jnp.linalg.norm(twice - expected) / jnp.linalg.norm(expected))

    def _outcome(self, kernel: str, result: str, names: list[str]) -> jax.Array:
        sequence(*(self.launched(kernel, ENDS[name]) for name in names))()
        self.synchronize()
        found = jnp.array(self._attention.arrays[result].array, jnp.float32, copy=True).ravel()
        return jax.block_until_ready(found)

    def _empty(self, name: str, shape: tuple[int, ...], dtype: Any) -> OnDevice:
        """Returns an array of zeros, the same one for each name, so that launches share sums."""
        if name not in self._made:
            self._made[name] = OnDevice(jax.block_until_ready(jnp.zeros(shape, dtype)))
        return self._made[name]


class CarryRows(Rows):
    """Rows of single launches, without XLA."""

    def carry(self, **about: Any) -> dict[str, Any]:
        """Times launches of a hop that take sums in or not, and leave sums or results."""
        queries, keys = (128, 64) if self._quick else HOP
        one = self._problem(tokens=queries, ranks=1, causal=False, **about)
        one = replace(one, q_len=queries, kv_len=keys)
        hop = Hop(arrays_of(one))
        row: dict[str, Any] = {"passes": {}, "shown": [], "wrong": []}
        for kernel, (products, result) in KERNELS.items():
            off = hop.difference(kernel, result)
            if not off <= AGREE:
                row["wrong"].append(f"{kernel} in two launches is off by {off:.1e}")
            flop = PRODUCTS[products] * 2.0 * queries * keys * one.heads * one.head_dim
            found = self._timed(hop, kernel, flop) | {"differs": off}
            row["passes"][kernel] = found
            each = ", ".join(f"{n} {times['ms']:.4f}" for n, times in found["contenders"].items())
            more = ", ".join(f"{way} {us:.2f}" for way, us in found["us_a_block"].items())
            row["shown"].append(f"{kernel}, ms: {each}; µs of a block for sums: {more}")
        return row

    def _timed(self, hop: Hop, kernel: str, flop: float) -> dict[str, Any]:
        """Returns the times of a kernel's launches, and of what a block spends on its sums."""
        count = 1 if self._quick else IN_A_ROW
        programs: dict[str, Callable[[], float | None]] = {
            name: partial(_in_a_row, hop, hop.launched(kernel, ends), count)
            for name, ends in ENDS.items()
        }
        before = clock()
        taken = in_turns(programs, self._quick, SECONDS)
        found = {n: figures([ms / count for ms in each], flop) for n, each in taken.items()}
        us = {n: 1e3 * (found[n]["ms"] - found["11"]["ms"]) / hop.rounds(kernel) for n in found}
        return {
            "contenders": found,
            "us_a_block": {"in": us["01"], "out": us["10"], "both": us["00"]},
            "blocks": hop.blocks[kernel],
            "clock": {"before": before, "after": clock()},
        }


def _in_a_row(hop: Hop, launch: Callable[[], None], count: int) -> None:
    """Launches a kernel several times, and waits for it."""
    for _ in range(count):
        launch()
    hop.synchronize()
