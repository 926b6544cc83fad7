"""Measures speed and memory of the attention and of its peers in one run.

Prints a table, writes results/<cpu>.json and draws results/<cpu>.png. Needs jax; uses torch and
matplotlib if this Python has them. `make bench` calls this program.
"""

import argparse
import json
import platform
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import burst_attention as ba
import contenders
import jax
import machine
from cases import Case, load
from timing import alternate

HERE = Path(__file__).parent
QUICK = 16  # --quick divides the length of sequences by this number
COLUMNS = "{:<23} {:<36} {:<8} {:>9} {:>8} {:>7} {:>9} {:>22} {:>22}"


def time_case(case: Case, peak: float, budget_s: float) -> list[dict[str, Any]]:
    """Returns a row for each pass: seconds of every contender, our GFLOP/s and ratios."""
    entrants = [contenders.ours(case)]
    if contenders.jax_nn_bytes(case) < machine.available_bytes() / 2:
        entrants.append(contenders.jax_nn(case))
    if contenders.torch_available():
        entrants.append(contenders.torch_sdpa(case))
    names = [entrant.name for entrant in entrants]
    rows = []
    for which, samples in time_passes(entrants, budget_s).items():
        rounds = dict(zip(names, samples, strict=True))
        seconds = {name: median(values) for name, values in rounds.items()}
        gflops = case.flop(which) / seconds["ours"] / 1e9
        spreads = {name: quartiles(rounds[name], rounds["ours"]) for name in names[1:]}
        rows.append(
            {
                "case": case.name,
                "shape": case.shape,
                "tags": sorted(case.tags),
                "seq": case.seq,
                "pass": which,
                "seconds": seconds,
                "gflops": gflops,
                "of_peak": gflops / peak,
                "times_faster": {name: middle for name, (_, middle, _) in spreads.items()},
                "spread": {name: (first, third) for name, (first, _, third) in spreads.items()},
            }
        )
    return rows


def quartiles(theirs: list[float], ours: list[float]) -> list[float]:
    """Returns the three quartiles of the ratios of all rounds."""
    ratios = [peer / own for peer, own in zip(theirs, ours, strict=True)]
    return quantiles(ratios, n=4, method="inclusive")


def time_passes(
    entrants: list[contenders.Contender], budget_s: float
) -> dict[str, list[list[float]]]:
    """Returns the seconds of every round, for each pass and each entrant."""
    programs = {
        (c.name, which): c.program(which) for c in entrants for which in ("forward", "both")
    }
    taken = alternate(programs, budget_s)
    forward, both = ([taken[c.name, which] for c in entrants] for which in ("forward", "both"))
    # The backward pass can't run alone. Its time is that of both passes less the forward pass.
    backward = [
        [total - part for total, part in zip(totals, parts, strict=True)]
        for totals, parts in zip(both, forward, strict=True)
    ]
    return {"forward": forward, "backward": backward, "both": both}


def print_row(row: dict[str, Any], memory: dict[str, Any]) -> None:
    """Prints one line: shape, time, speed, share of peak, memory, ratios."""
    ratios = [shown(row, name) for name in ("jax.nn", "torch")]
    grown = f"{memory['grown_bytes'] / 2**20:,.0f} MiB" if row["pass"] == "both" else ""
    print(
        COLUMNS.format(
            row["case"],
            row["shape"],
            row["pass"],
            f"{row['seconds']['ours'] * 1e3:,.1f} ms",
            f"{row['gflops']:,.0f}",
            f"{row['of_peak']:.0%}",
            grown,
            *ratios,
        ),
        flush=True,
    )


def shown(row: dict[str, Any], peer: str) -> str:
    """Returns our speed against a peer's, the median of the rounds, and their quartiles."""
    if peer not in row["times_faster"]:
        return "-"
    first, third = row["spread"][peer]
    return f"{row['times_faster'][peer]:.2f} x ({first:.2f} to {third:.2f})"


def worker(measurement: str, case: Case, budget_s: float) -> dict[str, Any]:
    """Runs worker.py and reads its JSON."""
    command = [sys.executable, str(HERE / "worker.py"), measurement, case.name]
    command += ["--seq", str(case.seq), "--budget", str(budget_s)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    measured: dict[str, Any] = json.loads(output.splitlines()[-1])
    return measured


COMPARED = {
    "ring": ("ring", "ring tax", "ring_s", "one device"),
    "mask": ("masks", "mask", "masked_s", "without"),
    "latents": ("latents", "latents", "latents_s", "expanded before"),
}
"""For each tag of cases the key of the results, and the label, the key of the seconds and the other
way in the printed lines."""


def compare(tag: str, case: Case, budget_s: float) -> dict[str, Any]:
    """Prints and returns the times of one way to compute a case as ratios to another way."""
    _, label, seconds, other = COMPARED[tag]
    found = worker(tag, case, budget_s)
    if tag == "mask":
        other += f" (of the pairs {case.seen() / case.without_mask().seen():.3f})"
    for which in ("forward", "both"):
        print(
            f"{label}: {case.shape}, {case.mesh[1]} devices {case.layout}, {which}: "
            f"{found[which][seconds]:.3f} s, {found[which]['ratio']:.3f} x {other}"
        )
    return found


def bench(cases: list[Case], peak: machine.Peak, budget_s: float) -> dict[str, Any]:
    """Measures everything, and prints each result at once."""
    results: dict[str, Any] = {kind: [] for kind in ("cases", "checkpoint", "memory")}
    single = [case for case in cases if case.tags & {"speed", "length"}]
    print(
        COLUMNS.format(
            "case", "shape", "pass", "time", "GFLOP/s", "of peak", "memory", "vs jax.nn", "vs torch"
        )
    )
    for case in single:
        memory = worker("memory", case, budget_s)
        rows = time_case(case, peak.gflops, budget_s)
        for row in rows:
            print_row(row, memory)
        results["cases"] += [row | {"grown_bytes": memory["grown_bytes"]} for row in rows]
    for tag, (key, *_) in COMPARED.items():
        results[key] = [compare(tag, case, budget_s) for case in cases if tag in case.tags]
    for case in (case for case in cases if "checkpoint" in case.tags):
        gain = worker("checkpoint", case, budget_s)
        results["checkpoint"].append(gain)
        print(
            f"checkpoint: {gain['layers']} layers, {case.shape}, {case.mesh[1]} devices "
            f"{case.layout}, gradients: {gain['kept_s']:.3f} s with attention kept, "
            f"{gain['ratio']:.3f} x with nothing kept ({gain['plain_s']:.3f} s without checkpoint)"
        )
    for case in (case for case in cases if "memory" in case.tags):
        memory = worker("memory", case, budget_s)
        results["memory"].append(memory)
        print(
            f"memory: {case.shape}, {case.mesh[1]} devices {case.layout}, both: "
            f"{memory['extra_bytes'] / 2**20:,.0f} MiB beyond inputs, output and gradients, "
            f"{memory['of_kv']:.2f} x key and value in float32"
        )
    return results


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peak", type=Path, required=True, help="program burst-attention-peak")
    parser.add_argument("--only", help="run only cases with this name or tag")
    parser.add_argument("--quick", action="store_true", help="use short sequences, as a smoke test")
    parser.add_argument("--budget", type=float, default=40.0, help="seconds of timing per case")
    parser.add_argument("--out", type=Path, help="folder of the results")
    return parser.parse_args()


def main() -> None:
    """Measures, prints, writes and draws."""
    flags = parse()
    jax.config.update("jax_platforms", "cpu")
    cases = [case for case in load() if not flags.only or flags.only in {case.name, *case.tags}]
    if not cases:
        raise SystemExit(f"--only {flags.only}: no benchmark case has this name or tag")
    if flags.quick:
        cases = [replace(case, seq=case.seq // QUICK) for case in cases]
    budget_s = 0.1 if flags.quick else flags.budget

    peak = machine.Peak(flags.peak, 1024 if flags.quick else 4096)
    for _ in range(2):
        peak.measure()
    versions = {"burst_attention": ba.__version__, "jax": jax.__version__}
    if contenders.torch_available():
        import torch

        versions["torch"] = torch.__version__
    print(
        f"{machine.cpu_name()}, {machine.cores()} cores; {platform.platform()}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
    )
    print(
        f"matrix product {peak.size}^3 float32: gemm crate {peak.gemm:,.0f} GFLOP/s, "
        f"XLA {peak.xla:,.0f} GFLOP/s; peak is the better"
    )
    results = {
        "cpu": machine.cpu_name(),
        "cores": machine.cores(),
        "versions": versions,
        "quick": flags.quick,
        "peak": peak.as_dict(),
        **bench(cases, peak, budget_s),
    }
    write(results, flags.out or HERE / "results" / ("partial" if flags.quick or flags.only else ""))


def write(results: dict[str, Any], folder: Path) -> None:
    """Writes the JSON file, and draws the curve if cases of the tag `length` ran."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{machine.slug()}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"wrote {path}")
    try:
        from plot import draw
    except ImportError:
        warnings.warn("no curve: this Python has no matplotlib", stacklevel=1)
        return
    if any("length" in row["tags"] for row in results["cases"]):
        draw(results, path.with_suffix(".png"))
        print(f"drew {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
