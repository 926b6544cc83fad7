"""Checks output, lse and gradients against float64, on one rank and on the virtual ring."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from . import exact, ours, shared, virtual
from .problem import RESULTS, Problem

FEW = ("smallest-head", "2x4x1-zigzag-causal-n2-g4")
"""Shared cases that a rehearsal runs."""
FEW_FEATURES = ("window 7/3", "slopes", "sinks", "dropout 0.2", "value_dim 64")
ONE_RANK = ", one rank"
GROWTH = "error against the length of the ring"


class One:
    """The shared cases through `burst_attention.attention` on one device."""

    def names(self, rehearse: bool) -> list[str]:
        """Returns the names of the items."""
        return list(_chosen(shared.correctness(), rehearse))

    def measure(self, name: str, rehearse: bool) -> dict[str, Any]:
        """Returns the errors of one case."""
        problem = _chosen(shared.correctness(), rehearse)[name].on_one_rank()
        return _one(name, problem)


class Virtual:
    """The shared cases with several ranks, a systematic list, the other schedules, and the growth
    of errors with the length of the ring."""

    def names(self, rehearse: bool) -> list[str]:
        """Returns the names of the items."""
        return [*self._problems(rehearse), GROWTH]

    def measure(self, name: str, rehearse: bool) -> dict[str, Any]:
        """Returns the errors of one problem."""
        ring = virtual.ring(rehearse)
        if name == GROWTH:
            return _growth(ring, 128 if rehearse else 2048, (2,) if rehearse else (2, 4, 8))
        return _virtual(name, self._problems(rehearse)[name], ring)

    def _problems(self, rehearse: bool) -> dict[str, Problem]:
        rings = [problem for problem in shared.correctness() if problem.world_size > 1]
        ordered, others = shared.systematic(), [*shared.families(), *shared.in_any_order()]
        if rehearse:
            one, other = ordered[17], others[4]
            ordered = [replace(one, seq=one.world_size * 21)]
            others = [replace(other, seq=other.world_size * 12)]
        ordered += others
        return _chosen(rings, rehearse) | {problem.name: problem for problem in ordered}


class Features:
    """Features and windows: on one rank through `burst_attention.attention`, with all gradients,
    and on the virtual ring."""

    def names(self, rehearse: bool) -> list[str]:
        """Returns the names of the items."""
        return list(self._problems(rehearse))

    def measure(self, name: str, rehearse: bool) -> dict[str, Any]:
        """Returns the errors of one problem."""
        problem = self._problems(rehearse)[name]
        if name.endswith(ONE_RANK):
            return _one(name, problem.on_one_rank())
        return _virtual(name, problem, virtual.ring(rehearse))

    def _problems(self, rehearse: bool) -> dict[str, Problem]:
        found = {}
        for problem in shared.features(1 if rehearse else shared.LONGER):
            about = problem.name.split(shared.RING)[0]
            if rehearse and about not in FEW_FEATURES:
                continue
            if virtual.is_possible(problem):
                found[problem.name] = problem
            found[about + ONE_RANK] = problem
        return found


def _chosen(problems: list[Problem], rehearse: bool) -> dict[str, Problem]:
    return {
        problem.name: problem
        for problem in problems
        if not rehearse or problem.name.startswith(FEW)
    }


def _one(name: str, problem: Problem) -> dict[str, Any]:
    mesh = ours.line(1)
    run, given = ours.passes(problem, mesh), ours.put(mesh, problem)
    return _row(name, problem, run, given, problem.results)


def _virtual(name: str, problem: Problem, ring: Any) -> dict[str, Any]:
    run, given = virtual.passes(problem, ring), virtual.given(problem)
    return _row(name, problem, run, given, RESULTS, virtual.merged)


def _row(
    name: str,
    problem: Problem,
    run: Any,
    given: list[Any],
    results: tuple[str, ...],
    merge: Any = None,
) -> Any:
    """Runs twice: results must be right, and equal in both runs if sums have a fixed order."""
    first, again = (jax.tree.map(np.asarray, run(*given)) for _ in range(2))
    whole = [merge(x) for x in first] if merge else list(first)
    row = exact.judge(problem, ours.restored(problem, dict(zip(results, whole, strict=True))))
    for result, x, y in zip(results, first, again, strict=True):
        is_repeatable = problem.backward_order == "fixed" or result in ("o", "lse")
        if is_repeatable and x.tobytes() != y.tobytes():
            row["wrong"].append(f"{result}: differs between two runs")
    return {"name": name, "shown": exact.shown(row["errors"]), **row}


def _growth(ring: Any, seq: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Compares rings with one rank: accumulators stay in float32, so the length must not matter."""
    base = Problem("", batch=1, seq=seq, heads=4, kv_heads=2, head_dim=128)
    rows = {size: _virtual("", replace(base, world_size=size), ring) for size in sizes}
    alone = _one("", base)
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
