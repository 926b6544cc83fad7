"""Times every schedule, and rings of several processes, against the zigzag ring of one process.

All runs take turns on the same problem, each with eight CPU devices. The processes of a run wait
while another run computes. Prints a table and writes results/partial/schedules-<cpu>.json. `make
schedule-bench` calls this program.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import machine
from cases import Case, find

HERE = Path(__file__).parent
DEVICES = 8
BASE = ("one process", "ring")
WAYS: dict[str, dict[str, Any]] = {
    "ring": {},
    "double ring 2 x 4": {"inner": 4},
    "double ring 4 x 2": {"inner": 2},
    "all_gather": {"schedule": "all_gather"},
    "ulysses": {"schedule": "ulysses", "layout": "contiguous"},
    "hybrid 2 x 4": {"schedule": "hybrid", "inner": 4},
    "balanced": {"schedule": "balanced", "layout": "contiguous"},
    "ring contiguous": {"layout": "contiguous"},
}
"""The changes of each run to the ring in layout zigzag."""
APART = ("ring", "double ring 2 x 4")
"""The runs over several processes."""


class Processes:
    """Processes with eight devices together, which run programs by name."""

    def __init__(self, count: int, case: str, seq: int | None) -> None:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        flags = f"--xla_force_host_platform_device_count={DEVICES // count}"
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        command = [sys.executable, __file__, "--case", case, "--port", str(port)]
        command += ["--processes", str(count)] + (["--seq", str(seq)] if seq else [])
        self.started = [
            subprocess.Popen(
                [*command, "--rank", str(rank)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(count)
        ]

    def seconds(self, way: str, which: str) -> float:
        """Returns the time of a program in the slowest process; compiles it at the first call."""
        for process in self.started:
            assert process.stdin is not None
            process.stdin.write(json.dumps([way, which]) + "\n")
            process.stdin.flush()
        return max(map(_answer, self.started))

    def end(self) -> None:
        """Ends all processes."""
        for process in self.started:
            process.kill()


def _answer(process: subprocess.Popen[str]) -> float:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("seconds "):
            return float(line.split()[1])
    raise SystemExit("a process ended before it had measured; its error is above")


def work(flags: argparse.Namespace) -> None:
    """Runs in each process: reads names of programs, runs them, and prints their seconds."""
    import jax

    if flags.processes > 1:
        jax.distributed.initialize(f"localhost:{flags.port}", flags.processes, flags.rank)
    from contenders import ours

    base, programs = find(flags.case, flags.seq), {}
    for line in sys.stdin:
        way, which = json.loads(line)
        if way not in programs:
            programs[way] = ours(replace(base, **WAYS[way]), way)
            programs[way].forward()
            programs[way].both()
        start = time.perf_counter()
        programs[way].program(which)()
        print(f"seconds {time.perf_counter() - start}", flush=True)


def bench(case: Case, flags: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the table's rows: median seconds and the ratio to the ring of one process."""
    groups = {"one process": Processes(1, case.name, flags.seq)}
    groups |= {f"{n} processes": Processes(n, case.name, flags.seq) for n in (2, 4)}
    entrants = [(BASE[0], way) for way in WAYS]
    entrants += [(group, way) for group in list(groups)[1:] for way in APART]
    keys = [(*entrant, which) for entrant in entrants for which in ("forward", "both")]
    taken: dict[tuple[str, str, str], list[float]] = {key: [] for key in keys}
    try:
        for round_ in range(flags.rounds + 1):
            print(f"round {round_} of {flags.rounds}", file=sys.stderr, flush=True)
            for group, way, which in keys:
                seconds = groups[group].seconds(way, which)
                if round_ > 0:
                    taken[group, way, which].append(seconds)
    finally:
        for group_ in groups.values():
            group_.end()
    rows = []
    for (group, way, which), values in taken.items():
        seconds = median(values)
        ratio = seconds / median(taken[*BASE, which])
        rows.append({"where": group, "way": way, "pass": which, "s": seconds, "ratio": ratio})
        print(f"{group:<12} {way:<18} {which:<8} {seconds:8.3f} s  {ratio:6.3f} x", flush=True)
    return rows


def main() -> None:
    """Measures, or serves as one of the processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", default="ring-8-zigzag", help="of tests/cases.json")
    parser.add_argument("--seq", type=int, help="another length")
    parser.add_argument("--rounds", type=int, default=7)
    for name in ("--rank", "--processes", "--port"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.rank is not None:
        return work(flags)
    case = find(flags.case, flags.seq)
    print(f"{machine.cpu_name()}, {machine.cores()} cores; {case.shape}; {DEVICES} devices")
    results = {"cpu": machine.cpu_name(), "shape": case.shape, "rows": bench(case, flags)}
    folder = HERE / "results" / ("" if flags.seq is None else "partial")
    folder.mkdir(exist_ok=True)
    path = folder / f"schedules-{machine.slug()}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"wrote {path}")
    return None


if __name__ == "__main__":
    main()
