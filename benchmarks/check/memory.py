"""Measures the peak memory of forward and backward, in a fresh process."""

from typing import Any

import jax
import jax.numpy as jnp
from gpu.library import AbsentError
from jax.sharding import NamedSharding

from . import ours, virtual
from .problem import Problem
from .speed import WORLD_SIZE, heads

BAR = 14.0
"""The largest peak, as a multiple of one 16-bit tensor of the query's shape, over all ranks."""
BAR_EQUAL_HEADS = 24.0
"""The largest peak with as many key/value heads as query heads. Inputs and results alone take 8,
double-buffered float32 sums of dq, dk and dv take 12, and travelling queries and dout take 4."""


class Memory:
    """Rings of eight and of one, with and without grouped heads."""

    def names(self, rehearse: bool) -> list[str]:
        """Returns the names of the items."""
        return list(_problems(rehearse))

    def measure(self, name: str, rehearse: bool) -> dict[str, Any]:
        """Returns the peak of one problem."""
        problem = _problems(rehearse)[name]
        arrays = [
            *(problem.q_shape, problem.kv_shape, problem.kv_shape, problem.q_shape),
            problem.q_shape[:3],
        ]
        types = [jnp.bfloat16] * 4 + [jnp.float32]
        # Constants, because making random numbers would take memory.
        inputs = [jnp.zeros(s, t) for s, t in zip(_shapes(problem, arrays), types, strict=True)]
        if problem.world_size > 1:
            run = virtual.passes(problem, virtual.ring(rehearse))
        else:
            mesh = ours.line(1)
            inputs = [jax.device_put(x, NamedSharding(mesh, ours.SPEC)) for x in inputs]
            run = ours.passes(problem, mesh)
        results = jax.block_until_ready(run(*inputs))
        stand_in = sum(x.nbytes for x in (*inputs, *results))
        stats = {"peak_bytes_in_use": stand_in} if rehearse else _stats()
        peak = int(stats["peak_bytes_in_use"])
        multiple = peak / problem.unit_bytes
        bar = BAR_EQUAL_HEADS if problem.heads == problem.kv_heads else BAR
        wrong = [] if multiple <= bar else [f"{multiple:.1f} ×, expected at most {bar:g}"]
        shown = f"{peak / 2**30:.2f} GiB, {multiple:.1f} × one tensor like q, bar {bar:g}"
        row = {"name": name, "peak_bytes": peak, "multiple": multiple, "bar": bar}
        return row | {"arguments and results": stand_in, "shown": shown, "wrong": wrong}


def _problems(rehearse: bool) -> dict[str, Problem]:
    many, few = heads(rehearse)
    local = 32 if rehearse else 8192
    found = {}
    for size in (WORLD_SIZE, 1):
        for kv in (many, few)[: 1 if rehearse else 2]:
            name = f"{size} × {local} tokens, {many}:{kv} D128"
            found[name] = Problem(name, 1, size * local, many, kv, 128, world_size=size)
    return found


def _shapes(problem: Problem, shapes: list[Any]) -> list[Any]:
    size = problem.world_size
    if size == 1:
        return shapes
    return [(size, shape[0], shape[1] // size, *shape[2:]) for shape in shapes]


def _stats() -> dict[str, Any]:
    found = jax.local_devices()[0].memory_stats()
    if not found or "peak_bytes_in_use" not in found:
        raise AbsentError("this device's allocator does not tell its peak")
    return dict(found)
