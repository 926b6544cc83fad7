"""Output, lse and gradients against float64: a ring of one rank, and the virtual ring."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from . import exact, ours, virtual
from .problem import Problem, shared, systematic

FEW = ("smallest-head", "2x4x1-zigzag-causal-n2-g4")
"""Shared cases that a rehearsal runs."""
GROWTH = "error against the length of the ring"


class One:
    """The shared cases through `burst_attention.attention` on one device."""

    def names(self, rehearse: bool) -> list[str]:
        """Of the items."""
        return list(_chosen(shared(), rehearse))

    def measure(self, name: str, rehearse: bool) -> dict[str, Any]:
        """Errors of one case."""
        problem = _chosen(shared(), rehearse)[name].on_one_rank()
        mesh = ours.line(1)
        return _row(name, problem, ours.passes(problem, mesh), ours.put(mesh, problem))


class Virtual:
    """The shared cases of more than one rank, a systematic list, and what the length adds."""

    def names(self, rehearse: bool) -> list[str]:
        """Of the items."""
        return [*self._problems(rehearse), GROWTH]

    def measure(self, name: str, rehearse: bool) -> dict[str, Any]:
        """Errors of one problem."""
        ring = virtual.ring(rehearse)
        if name == GROWTH:
            return _growth(ring, 128 if rehearse else 2048, (2,) if rehearse else (2, 4, 8))
        return _virtual(name, self._problems(rehearse)[name], ring)

    def _problems(self, rehearse: bool) -> dict[str, Problem]:
        rings = [problem for problem in shared() if problem.world_size > 1]
        ordered = systematic()
        if rehearse:
            one = ordered[17]
            ordered = [replace(one, seq=one.world_size * 21)]
        return _chosen(rings, rehearse) | {problem.name: problem for problem in ordered}


def _chosen(problems: list[Problem], rehearse: bool) -> dict[str, Problem]:
    return {
        problem.name: problem
        for problem in problems
        if not rehearse or problem.name.startswith(FEW)
    }


def _virtual(name: str, problem: Problem, ring: Any) -> dict[str, Any]:
    given = [virtual.stacked(problem, x) for x in problem.inputs().values()]
    return _row(name, problem, virtual.passes(problem, ring), given, virtual.merged)


def _row(name: str, problem: Problem, run: Any, given: list[Any], merge: Any = None) -> Any:
    """Runs twice: the results must be right, and the same again."""
    first, again = (jax.tree.map(np.asarray, run(*given)) for _ in range(2))
    found = ours.restored(problem, [merge(x) for x in first] if merge else list(first))
    row = exact.judge(problem, found)
    for result, x, y in zip(ours.NAMES, first, again, strict=True):
        if x.tobytes() != y.tobytes():
            row["wrong"].append(f"{result}: not the same again")
    return {"name": name, "shown": exact.shown(row["errors"]), **row}


def _growth(ring: Any, seq: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Accumulators stay in float32 over the ring, so that its length must not matter."""
    base = Problem("", batch=1, seq=seq, heads=4, kv_heads=2, head_dim=128)
    rows = {size: _virtual("", replace(base, world_size=size), ring) for size in sizes}
    mesh = ours.line(1)
    alone = _row("", base, ours.passes(base, mesh), ours.put(mesh, base))
    errors = {1: alone["errors"], **{size: row["errors"] for size, row in rows.items()}}
    wrong = [reason for row in (alone, *rows.values()) for reason in row["wrong"]]
    ratios = {
        name: max(errors[size][name] for size in rows) / error
        for name, error in errors[1].items()
        if name != "lse"
    }
    wrong += [
        f"{name}: {ratio:.2f} × the error of one rank, expected at most {exact.GROWTH:g}"
        for name, ratio in ratios.items()
        if not ratio <= exact.GROWTH
    ]
    shown = "  ".join(f"{name} {ratio:.2f} ×" for name, ratio in ratios.items())
    return {"name": GROWTH, "shown": shown, "errors": errors, "ratios": ratios, "wrong": wrong}
