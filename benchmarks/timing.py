"""Alternated timing: the contenders take turns, so that a drift of the machine hits all alike."""

import time
from collections.abc import Callable
from typing import Any


def alternate[Key](
    programs: dict[Key, Callable[[], Any]], budget_s: float, least: int = 3, most: int = 15
) -> dict[Key, list[float]]:
    """Seconds of each program in each round, after one call to warm up.

    As many rounds as fit into the budget, between `least` and `most`.
    """
    warm = [_seconds(program) for program in programs.values()]
    rounds = max(least, min(most, int(budget_s / max(sum(warm), 1e-6))))
    taken: dict[Key, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            # Worker threads of the one before may still spin for a while.
            time.sleep(0.2)
            taken[name].append(_seconds(program))
    return taken


def _seconds(program: Callable[[], Any]) -> float:
    start = time.perf_counter()
    result = program()
    elapsed = time.perf_counter() - start
    del result  # what freeing costs is not part of it
    return elapsed
