"""Times one head on one worker and on all: `linear_workers.py RECURRENCE LENGTH` prints lines.

`linear.py` starts this program once for each number of workers, and lets both run in turns: for
each line of input a program runs forward and backward pass once and prints the seconds.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

WORKERS_VARIABLE = "BURST_ATTENTION_THREADS"


def speedup(recurrence: str, length: int, rounds: int) -> dict[str, Any]:
    """Returns seconds by one worker and by all cores in turns, one head, and their ratio."""
    import machine

    counts = (1, machine.cores())
    command = [sys.executable, str(Path(__file__)), recurrence, str(length)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    workers: list[Any] = [
        subprocess.Popen(command, env=os.environ | {WORKERS_VARIABLE: str(count)}, **pipes)
        for count in counts
    ]
    seconds: list[list[float]] = [[], []]
    try:
        for _ in range(rounds + 2):
            for worker, taken in zip(workers, seconds, strict=True):
                print(file=worker.stdin, flush=True)
                taken.append(float(worker.stdout.readline()))
    finally:
        for worker in workers:
            worker.stdin.close()
            worker.wait()
    # The first two rounds warm up.
    one, all_cores = ({"median_s": median(x[2:]), "least_s": min(x[2:])} for x in seconds)
    ratios = {key: one[key] / all_cores[key] for key in one}
    return {"workers": counts[1], "one": one, "all": all_cores, "one_to_all": ratios}


def main() -> None:
    """Runs the program that the command line names once for each line of input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recurrence")
    parser.add_argument("length", type=int)
    flags = parser.parse_args()
    import jax
    from linear_memory import RECURRENCES
    from linear_programs import DEVICES, Program

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    program = Program("ours, 1 devices", flags.length, 1, RECURRENCES[flags.recurrence])
    inputs = program.inputs()
    for _ in sys.stdin:
        start = time.perf_counter()
        results = program.run(inputs)
        print(time.perf_counter() - start, flush=True)
        del results


if __name__ == "__main__":
    main()
