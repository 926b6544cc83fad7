"""Times linear attention and the delta rule against plain JAX, in one run.

Prints tables of forward + backward: time against peers, length and number of devices, and memory
against length. Writes results/linear-<cpu>.json and, with matplotlib, draws
results/linear-<cpu>.png. `make linear-bench` calls this program.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import delta_programs
import jax
import machine
from linear_memory import RECURRENCES, SHARDED
from linear_programs import CHUNKED, DEVICES, HEAD_DIM, LINEAR, OURS, SIZES, Program, Recurrence
from linear_workers import speedup
from timing import alternate

HERE = Path(__file__).parent
SHORT, TOKENS, LONG = 32_768, 2_048, SIZES["lengths"]
REMEMBERED = (65_536, 262_144, 1_048_576)
"""Lengths for the measurement of memory. With few heads the longest one fits."""
REMEMBERED_HEADS = 2
ONE_HEAD = 65_536
"""Tokens of one head for the measurement of workers."""
MEBI = 2**20
Seconds = dict[str, dict[str, float]]


def timed(
    entrants: Iterable[tuple[str, int]],
    heads: int,
    budget_s: float,
    recurrence: Recurrence = LINEAR,
) -> Seconds:
    """Prints and returns median and minimum of all programs, which take turns."""
    programs: dict[str, Callable[[], Any]] = {}
    for name, length in entrants:
        program = Program(name, length, heads, recurrence)
        programs[f"{name}, S {length}"] = partial(program.run, program.inputs())
    found = {}
    for label, each in alternate(programs, budget_s).items():
        found[label] = {"median_s": median(each), "least_s": min(each), "rounds": len(each)}
        times = " ".join(f"{found[label][key] * 1e3:10,.1f} ms" for key in ("median_s", "least_s"))
        print(f"  {label:<44} {times}  of {len(each)}", flush=True)
    return found


def ratio(seconds: Seconds, slower: str, faster: str) -> dict[str, float]:
    """Returns the time of ``slower`` divided by that of ``faster``, by medians and by minima."""
    return {key: seconds[slower][key] / seconds[faster][key] for key in ("median_s", "least_s")}


def said(ratio: dict[str, float]) -> str:
    """Returns a ratio in words."""
    return f"{ratio['median_s']:.2f} x (of minima {ratio['least_s']:.2f})"


def speed(flags: argparse.Namespace, scale: int) -> dict[str, Any]:
    """Times ours against plain JAX at one length, and token by token at a short length."""
    length, few = SHORT // scale, TOKENS // scale
    seconds = timed([(name, length) for name in [*CHUNKED, *OURS]], flags.heads, flags.budget)
    fastest = min(CHUNKED, key=lambda name: seconds[f"{name}, S {length}"]["median_s"])
    chunks = ratio(seconds, f"{fastest}, S {length}", f"ours, 1 devices, S {length}")
    print(f"  {fastest}, the fastest of them, take {said(chunks)} the time of one device of ours")
    names = ("plain JAX, lax.scan", "ours, 1 devices")
    tokens = timed([(name, few) for name in names], flags.heads, flags.budget / 4)
    by_token = ratio(tokens, *(f"{name}, S {few}" for name in names))
    print(f"  token by token takes {said(by_token)} the time of ours")
    return {
        "seconds": seconds | tokens,
        "fastest_chunked": fastest,
        "fastest_chunked_to_ours": chunks,
        "token_by_token_to_ours": by_token,
    }


def delta(flags: argparse.Namespace, scale: int) -> dict[str, Any]:
    """Times the delta rule against plain JAX, and Infini-attention against its two parts."""
    length, found = SHORT // scale, {}
    programs = delta_programs.OURS | delta_programs.CHUNKED
    for title, channels in (("decays of heads", False), ("decays of channels", True)):
        print(f"the delta rule, {title}")
        recurrence = Recurrence(programs, channels, delta=True)
        entrants = [(name, length) for name in programs]
        seconds = timed(entrants, flags.heads, flags.budget, recurrence)
        fastest = min(delta_programs.CHUNKED, key=lambda x: seconds[f"{x}, S {length}"]["median_s"])
        one, all_devices = (f"{name}, S {length}" for name in delta_programs.OURS)
        chunks = ratio(seconds, f"{fastest}, S {length}", one)
        print(f"  {fastest}, the fastest of them, take {said(chunks)} the time of ours")
        ring = ratio(seconds, all_devices, one)
        print(f"  {DEVICES} devices take {said(ring)} the time of one")
        found[title] = {"seconds": seconds, "fastest_chunked": fastest}
        found[title] |= {"fastest_chunked_to_ours": chunks, "devices_to_one": ring}
    print("Infini-attention")
    entrants = [(name, length) for name in delta_programs.INFINI]
    seconds = timed(entrants, flags.heads, flags.budget, Recurrence(delta_programs.INFINI))
    whole, *parts = (seconds[f"{name}, S {length}"]["median_s"] for name in delta_programs.INFINI)
    print(f"  the whole takes {whole / sum(parts):.2f} x the time of both parts")
    return found | {"infini": {"seconds": seconds, "whole_to_parts": whole / sum(parts)}}


def growth(flags: argparse.Namespace, scale: int, fastest: str) -> dict[str, Any]:
    """Times ours at two lengths, each in turns with the plain program.

    In turns, the memory for results was freed seconds ago at either length. When ours ran alone,
    or in turns with the other length, the ratio was 2.3 and 3.4 to 3.7 instead of 2.1. The system
    takes half of the time to provide memory for results, and this time seems to depend on when the
    memory was freed.
    """
    ours: Seconds = {}
    found: dict[str, Any] = {"ours": ours, "beside_plain": {}}
    for length in (at // scale for at in LONG):
        entrants = [(fastest, length), (SHARDED, length)]
        needed = sum(Program(name, length, flags.heads).all_bytes for name, _ in entrants)
        fits = needed <= machine.available_bytes()
        seconds = timed(entrants if fits else entrants[1:], flags.heads, flags.budget)
        label = f"{SHARDED}, S {length}"
        ours[label] = seconds[label]
        if not fits:
            print(f"  {fastest}, S {length}: left out, it needs {needed / 2**30:.0f} GiB")
            continue
        plain = ratio(seconds, *(f"{name}, S {at}" for name, at in entrants))
        print(f"  the plain program takes {said(plain)} the time of ours")
        found["beside_plain"][str(length)] = {"seconds": seconds, "plain_to_ours": plain}
    short, long = ours
    found["twice_the_length"] = ratio(ours, long, short)
    print(
        f"  twice the length takes {said(found['twice_the_length'])} the time; expected at most 2.2"
    )
    return found


def memory(scale: int, fastest: str) -> list[dict[str, Any]]:
    """Measures the bytes besides arguments and results, each in a process of its own."""
    print(f"memory besides arguments and results, {REMEMBERED_HEADS} heads: planned, measured")
    names, lengths = (SHARDED, fastest, f"{fastest}, remat"), [x // scale for x in REMEMBERED]
    return [remembered("linear", name, length) for name in names for length in lengths]


def memory_of_others(scale: int) -> list[dict[str, Any]]:
    """Measures the bytes of ours besides arguments and results, for the other recurrences."""
    lengths = [length // scale for length in LONG]
    others = [name for name in RECURRENCES if name != "linear"]
    return [remembered(name, SHARDED, length) for name in others for length in lengths]


def remembered(recurrence: str, name: str, length: int) -> dict[str, Any]:
    """Measures, prints and returns the bytes of one program in a process of its own."""
    command = [sys.executable, str(HERE / "linear_memory.py"), name, str(length)]
    command += ["--heads", str(REMEMBERED_HEADS), "--recurrence", recurrence]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    row: dict[str, Any] = {"recurrence": recurrence, "name": name, "length": length}
    row |= json.loads(output.splitlines()[-1])
    planned, seen = row["planned_bytes"] / MEBI, row.get("extra_bytes")
    words = "too much for this machine" if seen is None else f"{seen / MEBI:10,.1f} MiB"
    print(f"  {f'{recurrence}: {name}, S {length}':<60} {planned:10,.1f} MiB {words}", flush=True)
    return row


def workers(flags: argparse.Namespace, scale: int) -> dict[str, Any]:
    """Times one head on one worker and on all, which share its chunks."""
    print(f"one head on one worker and on {machine.cores()}")
    found = {}
    for name in ("linear", "delta", "delta of channels"):
        found[name] = speedup(name, ONE_HEAD // scale, 3 if flags.quick else 15)
        words = said(found[name]["one_to_all"])
        print(f"  {name}: one worker takes {words} the time of all", flush=True)
    return found


def bench(flags: argparse.Namespace) -> dict[str, Any]:
    """Measures everything, and prints each result at once."""
    scale = 16 if flags.quick else 1
    print(f"{flags.heads} heads, D {HEAD_DIM}, float32, forward + backward: median, minimum")
    fast = speed(flags, scale)
    fastest = fast["fastest_chunked"]
    found = {"speed": fast, "delta": delta(flags, scale)}
    return (
        found
        | {"length": growth(flags, scale, fastest)}
        | {
            "memory_heads": REMEMBERED_HEADS,
            "memory": memory(scale, fastest),
            "memory_of_others": memory_of_others(scale),
            "workers": workers(flags, scale),
        }
    )


def main() -> None:
    """Measures, prints, writes and draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="use short sequences, as a smoke test")
    parser.add_argument("--budget", type=float, default=40.0, help="seconds of timing per table")
    flags = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    print(f"{machine.cpu_name()}, {machine.cores()} cores")
    results = {"cpu": machine.cpu_name(), "cores": machine.cores(), "heads": flags.heads}
    results |= {"head_dim": HEAD_DIM} | bench(flags)
    folder = HERE / "results" / ("partial" if flags.quick else "")
    folder.mkdir(exist_ok=True)
    path = folder / f"linear-{machine.slug()}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"wrote {path}")
    if importlib.util.find_spec("matplotlib"):
        from linear_plot import draw

        draw(results, path.with_suffix(".png"))
        print(f"drew {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
