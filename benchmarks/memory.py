"""Finds the longest sequence of a training step that fits on 8 GPUs, with XLA's compiler alone.

For each attention, number of key/value heads and kind of GPU it compiles the step of `memory_step`
at growing lengths, and reads what memory XLA plans. No step runs. It writes
results/memory-h100-h200.json, its plot, and the tables of docs/memory.md. With --draw it does so
from the results that are there. `make memory-bench` calls this program.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import memory_plot
import memory_table
import topology
from memory_attentions import ATTENTIONS
from memory_step import AXES, Model
from memory_worker import KINDS, QUICK_MODEL, QUICK_SHARE, SHARE

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs/memory.md"
NAME = f"memory-{'-'.join(KINDS).lower()}.json"


def measure(name: str, quick: bool) -> list[dict[str, Any]]:
    """Returns the rows of an attention, from a process of its own, and prints each at once."""
    command = [sys.executable, str(HERE / "memory_worker.py"), name, *["--quick"] * quick]

    def rows(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
        for line in lines:
            yield json.loads(line)
            print(memory_table.in_words(json.loads(line)), flush=True)

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = list(rows(process.stdout))
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return found


def about(quick: bool) -> dict[str, Any]:
    """Returns what the rows have in common."""
    share = QUICK_SHARE if quick else SHARE
    return {
        "note": "compiled, not run: memory_analysis() of XLA's compiler for GPUs, in bytes",
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
        "cuda_plugin": version("jax-cuda13-plugin"),
        "model": asdict(QUICK_MODEL if quick else Model()),
        "devices": AXES[0][1],
        "kinds": {kind: asdict(topology.KINDS[kind]) for kind in KINDS},
        "share": share,
        "limits": {kind: int(share * topology.KINDS[kind].memory) for kind in KINDS},
    }


def main() -> None:
    """Compiles, prints, writes and draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="use a small model, as a smoke test")
    parser.add_argument("--only", nargs="+", choices=ATTENTIONS, default=list(ATTENTIONS))
    parser.add_argument("--jobs", type=int, default=1, help="attentions to compile at a time")
    parser.add_argument("--draw", action="store_true", help="take the results that are there")
    parser.add_argument("--out", type=Path, help="folder of the results")
    flags = parser.parse_args()
    is_part = flags.quick or flags.only != list(ATTENTIONS)
    folder = flags.out or HERE / "results" / ("partial" if is_part else "")
    folder.mkdir(exist_ok=True)
    path = folder / NAME
    if flags.draw:
        results = json.loads(path.read_text())
    else:
        with ThreadPoolExecutor(flags.jobs) as pool:
            found = pool.map(partial(measure, quick=flags.quick), flags.only)
            results = about(flags.quick) | {"rows": [row for rows in found for row in rows]}
        path.write_text(json.dumps(results, indent=1) + "\n")
    memory_plot.draw(results, path.with_suffix(".png"))
    print(f"wrote {path} and its plot")
    if is_part:
        print(*(f"\n{table(results)}" for table in memory_table.TABLES.values()), sep="\n")
    else:
        PAGE.write_text(memory_table.filled(PAGE.read_text(), results))
        print(f"wrote the tables of {PAGE}")


if __name__ == "__main__":
    main()
