"""Times decoding over a cache against the machine's roof, jax.nn and torch, in one run.

The roof of a step is the longer of two times: to read its keys and values as fast as this machine
reads memory, and to compute its products at 0.8 of the speed of matrix products. Shares of the roof
and ratios are medians over rounds, in which a probe of the memory and the programs take turns.
Prints tables of one query for each sequence: time against length, latents, pages and ragged
lengths, ranks, shared prefixes, and appending. Writes results/decode-<cpu>.json and, with
matplotlib, draws results/decode-<cpu>.png. `make decode-bench` calls this program.
"""

import argparse
import importlib.util
import json
import subprocess
from pathlib import Path
from statistics import median
from typing import Any

import decode_programs as programs
import jax
import machine
from decode_programs import DEVICES, HEAD_DIM, HEADS, KV_HEADS, Program, Work
from timing import alternate

HERE = Path(__file__).parent
TYPES = ("float32", "bfloat16")
LENGTHS = programs.SIZES["lengths"]
LONG, SHORT, PAGE = LENGTHS[-1], LENGTHS[0], 16
REQUESTS, PREFIX, CONTEXT = 32, 8_192, 128
STEPS, APPENDED = 200, 200_000
PROBE, TURN_S = "reads of memory", 0.5


def ratios(slower: list[float], faster: list[float]) -> list[float]:
    """Returns the ratio of each round."""
    return [x / y for x, y in zip(slower, faster, strict=True)]


class Bench:
    """The flags, and the roof of this machine."""

    def __init__(self, flags: argparse.Namespace):
        self.budget_s, self.scale = flags.budget, 16 if flags.quick else 1
        self.probe = [flags.peak, "read", str(1024 // self.scale), "9"]
        self.reads: list[float] = []
        self.peak = machine.Peak(flags.peak, 4096 // self.scale)
        self.peak.measure()
        print(f"products {self.peak.gflops:.0f} GFLOP/s")

    def read(self) -> None:
        """Measures how fast this machine reads memory, which changes within seconds."""
        output = subprocess.run(self.probe, check=True, capture_output=True, text=True).stdout
        self.reads.append(json.loads(output)["gigabytes_per_s"])

    def roofs_s(self, work: Work, rounds: int) -> list[float]:
        """Returns the least seconds of a step on this machine in each of the last rounds."""
        peak = 0.8e9 * self.peak.gflops
        return [work.roof_s(read * 1e9, peak) for read in self.reads[-rounds:]]

    def timed(self, entrants: dict[str, Program], works: dict[str, Work]) -> dict[str, Any]:
        """Prints and returns the seconds of programs, and their shares of the roof.

        In each round a probe of the memory and all programs take turns. The probe has the least
        time of nine reads, and a program that of up to nine calls.
        """
        turns = {PROBE: self.read, **entrants} if works else entrants
        taken = alternate(turns, self.budget_s, least=5, turn_s=TURN_S / self.scale)
        if works:
            last = self.reads[-len(taken[PROBE]) :]
            print(f"  reads {min(last):.0f} to {max(last):.0f} GB/s")
        found: dict[str, Any] = {}
        for name in entrants:
            each = taken[name]
            found[name] = {"median_s": median(each), "seconds": each}
            words = ""
            if name in works:
                roofs = self.roofs_s(works[name], len(each))
                found[name]["of_roof"] = median(ratios(roofs, each))
                words = f"{found[name]['of_roof']:6.2f} of the roof"
            print(f"  {name:<44} {median(each) * 1e3:10,.3f} ms {words}", flush=True)
        return found

    def compare(self, found: dict[str, Any], slower: str, faster: str, bar: str) -> float:
        """Prints and returns the time of ``slower`` divided by that of ``faster``, as a median."""
        ratio = median(ratios(found[slower]["seconds"], found[faster]["seconds"]))
        print(f"  {slower} takes {ratio:.2f} x the time of {faster}; the bar is {bar}", flush=True)
        return ratio


def lengths(bench: Bench) -> list[dict[str, Any]]:
    """Times one sequence at several lengths against jax.nn and torch."""
    rows = []
    for dtype, length in ((dtype, length // bench.scale) for dtype in TYPES for length in LENGTHS):
        print(f"one sequence of {length:,} tokens, {dtype}")
        entrants = programs.plain(length, dtype)
        work = Work(length, length, dtype)
        found = bench.timed(entrants, dict.fromkeys(entrants, work))
        rows.append({"dtype": dtype, "length": length, "seconds": found})
        rows[-1]["roof_s"] = median(bench.roofs_s(work, len(found["ours"]["seconds"])))
        for peer, bar in (("jax.nn", "at least 3"), ("torch", "at least 1.5")):
            if peer in found:
                rows[-1][f"{peer}_to_ours"] = bench.compare(found, peer, "ours", bar)
    return rows


def latents(bench: Bench) -> list[dict[str, Any]]:
    """Times one query of many heads over latents against the faster of two programs of jax.nn."""
    rows, sizes = [], programs.LATENTS
    lengths = [length // bench.scale for length in sizes["lengths"]]
    for dtype, length in ((dtype, length) for dtype in TYPES for length in lengths):
        print(f"{sizes['heads']} heads over {length:,} latents, {dtype}")
        entrants = programs.latents(length, dtype)
        work = programs.work_on_latents(length, dtype)
        found = bench.timed(entrants, dict.fromkeys(entrants, work))
        peers = [name for name in entrants if name != "ours"]
        peer = min(peers, key=lambda name: found[name]["median_s"])
        ratio = bench.compare(found, peer, "ours", "at least 1")
        rows.append({"dtype": dtype, "length": length, "seconds": found, "peer": peer})
        rows[-1]["jax.nn_to_ours"] = ratio
    return rows


def pages(bench: Bench) -> dict[str, Any]:
    """Times pages of 16 rows against a contiguous cache, and ragged lengths against equal ones."""
    long, short = LONG // bench.scale, SHORT // bench.scale
    print(f"pages of {PAGE}, bfloat16")
    one, ragged = Work(long, long, "bfloat16"), [long] + 31 * [short]
    equal = 32 * [sum(ragged) // 32 // PAGE * PAGE]
    entrants = {
        "contiguous": programs.plain(long, "bfloat16")["ours"],
        "paged": programs.paged([long], PAGE, "bfloat16"),
        "ragged": programs.paged(ragged, PAGE, "bfloat16"),
        "equal": programs.paged(equal, PAGE, "bfloat16"),
    }
    works = {"contiguous": one, "paged": one}
    works |= {
        name: Work(sum(rows), sum(rows), "bfloat16")
        for name, rows in (("ragged", ragged), ("equal", equal))
    }
    found = bench.timed(entrants, works)
    return {
        "seconds": found,
        "paged_to_contiguous": bench.compare(found, "paged", "contiguous", "at most 1.10"),
        "ragged_to_equal": bench.compare(found, "ragged", "equal", "at most 1.10"),
    }


def ranks(bench: Bench) -> dict[str, Any]:
    """Times a cache that all devices share against one device, and a step with almost no cache."""
    length = LONG // bench.scale
    print(f"one sequence of {length:,} tokens over {DEVICES} devices, bfloat16")
    several, loop = f"{DEVICES} devices", f"{STEPS} steps of 64 tokens"
    entrants = {
        "1 device": programs.plain(length, "bfloat16")["ours"],
        several: programs.sharded(length, "bfloat16"),
        loop: programs.sharded(64, "bfloat16", STEPS),
    }
    work = Work(length, length, "bfloat16")
    found = bench.timed(entrants, {"1 device": work, several: work})
    step = found[loop]["median_s"] / STEPS
    print(f"  a step in a compiled loop costs {step * 1e3:.3f} ms; the bar is at most 0.7")
    ratio = bench.compare(found, several, "1 device", "at most 1.10")
    return {"seconds": found, "several_to_one": ratio, "overhead_s": step}


def prefixes(bench: Bench) -> list[dict[str, Any]]:
    """Times requests that share a prefix against separate decoding, also for one request."""
    rows, prefix = [], PREFIX // bench.scale
    for dtype, requests in ((dtype, requests) for dtype in TYPES for requests in (REQUESTS, 1)):
        print(f"{requests} requests behind a prefix of {prefix:,}, {dtype}")
        entrants = programs.prefixed(requests, prefix, CONTEXT, dtype)
        pairs = requests * (prefix + CONTEXT)
        works = {"separate": Work(pairs, pairs, dtype)}
        works["shared prefix"] = Work(prefix + requests * CONTEXT, pairs, dtype)
        found = bench.timed(entrants, works)
        of = [bench.roofs_s(work, len(found["separate"]["seconds"])) for work in works.values()]
        roofs = median(ratios(*of))
        bar = f"at least {0.95 if requests == 1 else 3 if dtype == 'float32' else 0.75 * roofs:.2f}"
        ratio = bench.compare(found, "separate", "shared prefix", bar)
        rows.append({"dtype": dtype, "requests": requests, "seconds": found})
        rows[-1] |= {"separate_to_shared": ratio, "of_roofs": roofs}
    return rows


def appending(bench: Bench) -> dict[str, Any]:
    """Times a loop that appends tokens to a small and to a large cache."""
    small, large = (f"capacity {rows:,}" for rows in (SHORT // bench.scale, LONG // bench.scale))
    print(f"appending {APPENDED:,} tokens in a loop, bfloat16")
    found = bench.timed(
        {
            small: programs.appended(SHORT // bench.scale, APPENDED, "bfloat16"),
            large: programs.appended(LONG // bench.scale, APPENDED, "bfloat16"),
        },
        {},
    )
    return {"seconds": found, "ratio": bench.compare(found, large, small, "at most 1.10")}


TABLES = {table.__name__: table for table in (lengths, latents, pages, ranks, prefixes, appending)}


def main() -> None:
    """Measures, prints, writes and draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peak", type=Path, required=True, help="the program that measures roofs")
    parser.add_argument("--quick", action="store_true", help="use short sequences, as a smoke test")
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES), help="tables")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds of timing per table")
    flags = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    print(f"{machine.cpu_name()}, {machine.cores()} cores; {HEADS}:{KV_HEADS} heads, D {HEAD_DIM}")
    bench = Bench(flags)
    results = {
        "cpu": machine.cpu_name(),
        "cores": machine.cores(),
        "heads": [HEADS, KV_HEADS],
        "head_dim": HEAD_DIM,
        "peak": bench.peak.as_dict(),
        **{name: TABLES[name](bench) for name in flags.only},
        "reads_gb_per_s": bench.reads,
    }
    is_whole = len(flags.only) == len(TABLES) and not flags.quick
    folder = HERE / "results" / ("" if is_whole else "partial")
    folder.mkdir(exist_ok=True)
    path = folder / f"decode-{machine.slug()}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"wrote {path}")
    if "lengths" in results and importlib.util.find_spec("matplotlib"):
        from decode_plot import draw

        draw(results, path.with_suffix(".png"))
        print(f"drew {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
