"""Alternated timing: programs take turns, so a drift of the machine affects all programs alike."""

import time
from collections.abc import Callable
from typing import Any


def alternate[Key](
    programs: dict[Key, Callable[[], Any]],
    budget_s: float,
    least: int = 3,
    most: int = 15,
    turn_s: float = 0.0,
) -> dict[Key, list[float]]:
    """Returns the seconds of each program in each round, after one call to warm up.

    The number of rounds fits the budget and lies between `least` and `most`. A round has the least
    time of as many calls as `turn_s` holds, at least one and at most nine.
    """
    warm = [_seconds(program) for program in programs.values()]
    turns = [max(turn_s, seconds) for seconds in warm]
    rounds = max(least, min(most, int(budget_s / max(sum(turns), 1e-6))))
    taken: dict[Key, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            # Worker threads of the previous program may still spin for a while.
            time.sleep(0.2)
            taken[name].append(_turn(program, turn_s))
    return taken


def _turn(program: Callable[[], Any], turn_s: float) -> float:
    seconds = [_seconds(program)]
    while len(seconds) < 9 and sum(seconds) < turn_s:
        seconds.append(_seconds(program))
    return min(seconds)


def _seconds(program: Callable[[], Any]) -> float:
    start = time.perf_counter()
    result = program()
    elapsed = time.perf_counter() - start
    del result  # the time of freeing is not part of the result
    return elapsed
