"""Times masks as data against the calls that they replace, and counts the pairs they compute.

Prints three tables of forward + backward: a causal mask as intervals against `is_causal`, a prefix
tree against one row for each leaf, and balanced documents, with the time of each rank. A share of
pairs is the number of pairs of query and key whose scores the devices compute, over the number of
pairs that the mask allows. Writes results/masks-<cpu>.json. `make masks-bench` calls this program.
"""

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import burst_attention as ba
import jax
import machine
import numpy as np
from jax.sharding import PartitionSpec as P
from timing import alternate

HERE = Path(__file__).parent
DEVICES, HEADS, HEAD_DIM = 8, 2, 64
CAUSAL, SHARED, LEAF, LEAVES, DOCUMENTS = 16_384, 6_144, 2_048, 8, 131_072
Program = Callable[[], Any]


def program(batch: int, length: int, mask: ba.masks.Mask | None, **options: Any) -> Program:
    """Returns a compiled program that computes results and gradients over all devices."""
    mesh = jax.make_mesh((DEVICES,), ("context",))
    sharding = jax.NamedSharding(mesh, P(None, "context"))
    generator = np.random.default_rng(0)
    shape = (batch, length, HEADS, HEAD_DIM)
    qkv = tuple(generator.standard_normal(shape, dtype=np.float32) for _ in range(3))
    qkv, mask = jax.device_put((qkv, mask), sharding)

    def loss(qkv: Any, mask: ba.masks.Mask | None) -> jax.Array:
        arguments: dict[str, Any] = options if mask is None else mask.arguments | options
        return ba.dot_product_attention(*qkv, **arguments).sum()

    run = jax.jit(jax.grad(loss)).lower(qkv, mask).compile()
    return lambda: jax.block_until_ready(run(qkv, mask))


def timed(programs: dict[str, Program], budget_s: float) -> dict[str, float]:
    """Prints and returns the median time of all programs, which take turns."""
    seconds = {name: median(each) for name, each in alternate(programs, budget_s).items()}
    for name, each in seconds.items():
        print(f"  {name:<44} {each * 1e3:10,.1f} ms", flush=True)
    return seconds


def steps(run: Program) -> list[dict[str, Any]]:
    """Returns the steps of all ranks during a call."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        with ba.trace(file.name):
            run()
        return json.loads(Path(file.name).read_text())["traceEvents"]


def shares(events: list[dict[str, Any]], allowed: int) -> dict[str, float]:
    """Prints and returns for each pass the pairs that are computed over the pairs allowed."""
    pairs = Counter[str]()
    for event in events:
        pairs[event["name"].split()[0].lower()] += event["args"]["pairs"]
    found = {which: count / HEADS / allowed for which, count in pairs.items()}
    words = ", ".join(f"{which} {share:.3f}" for which, share in found.items())
    print(f"  pairs computed over pairs allowed: {words}", flush=True)
    return found


def causal(scale: int, budget_s: float) -> dict[str, Any]:
    """Times a causal mask as intervals against `is_causal`."""
    length = CAUSAL // scale
    print(f"causal, S {length:,}, zigzag")
    mask = ba.masks.chunked(length, length).to_layout(DEVICES, "zigzag")
    make = partial(program, 1, length, layout="zigzag")
    seconds = timed({"is_causal": make(None, is_causal=True), "visible": make(mask)}, budget_s)
    ratio = seconds["visible"] / seconds["is_causal"]
    print(f"  intervals take {ratio:.3f} x the time of is_causal; expected at most 1.05")
    return {"seconds": seconds, "visible_to_is_causal": ratio}


def tree(scale: int, budget_s: float) -> dict[str, Any]:
    """Times a prefix and its leaves in one row against one row for each leaf."""
    shared, leaf = SHARED // scale, LEAF // scale
    length = shared + LEAVES * leaf
    print(f"tree, {LEAVES} leaves of {leaf:,} behind a prefix of {shared:,} tokens, zigzag")
    mask = ba.masks.prefix_tree([-1] + LEAVES * [0], [shared] + LEAVES * [leaf])
    run = program(1, length, mask.to_layout(DEVICES, "zigzag"), layout="zigzag")
    apart = program(LEAVES, shared + leaf, None, is_causal=True, layout="zigzag")
    seconds = timed({"one row": run, "a row for each leaf": apart}, budget_s)
    ratio = seconds["a row for each leaf"] / seconds["one row"]
    rows, each = LEAVES * triangle(shared + leaf), triangle(shared + leaf) - triangle(shared)
    allowed = triangle(shared) + LEAVES * each
    print(f"  rows for each leaf take {ratio:.2f} x the time; the pairs say {rows / allowed:.2f}")
    found = {"seconds": seconds, "apart_to_tree": ratio, "apart_to_tree_in_pairs": rows / allowed}
    return found | {"shares": shares(steps(run), allowed)}


def documents(scale: int) -> dict[str, Any]:
    """Counts the pairs and times the ranks of packed documents in blocks."""
    length = DOCUMENTS // scale
    print(f"documents, log-normal around 2,048 tokens, S {length:,}, in blocks of 128")
    lengths = packed(length)
    balance = ba.balance_documents(lengths, DEVICES, seq_len=length)
    events = steps(program(1, length, balance.mask))
    pairs, seconds = Counter[int](), Counter[int]()
    for event in events:
        pairs[event["tid"]] += event["args"]["pairs"]
        seconds[event["tid"]] += event["dur"]
    busiest = {"pairs": _busiest(pairs), "time": _busiest(seconds)}
    words = ", ".join(f"in {name} {x:.3f}" for name, x in busiest.items())
    print(f"  busiest rank over the mean: {words} (ranks share the cores)")
    found = {"lengths": lengths, "max_over_mean": busiest}
    return found | {"shares": shares(events, sum(map(triangle, lengths)))}


def _busiest(ranks: Counter[int]) -> float:
    """Returns the largest count over the mean."""
    return max(ranks.values()) * len(ranks) / sum(ranks.values())


def packed(length: int) -> list[int]:
    """Returns lengths of documents that fill a row."""
    generator, found = np.random.default_rng(0), list[int]()
    while sum(found) < length:
        drawn = int(np.exp(generator.normal(np.log(2048), 1.2)))
        found.append(max(1, min(drawn, length - sum(found))))
    return found


def triangle(length: int) -> int:
    """Returns the number of pairs that a causal mask allows."""
    return length * (length + 1) // 2


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="use short sequences, as a smoke test")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of timing per table")
    flags = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    scale = 8 if flags.quick else 1
    print(f"{machine.cpu_name()}, {machine.cores()} cores")
    print(f"{HEADS} heads, D {HEAD_DIM}, float32, {DEVICES} devices, forward + backward")
    results = {
        "cpu": machine.cpu_name(),
        "cores": machine.cores(),
        "causal": causal(scale, flags.budget),
        "tree": tree(scale, flags.budget),
        "documents": documents(scale),
    }
    folder = HERE / "results" / ("partial" if flags.quick else "")
    folder.mkdir(exist_ok=True)
    path = folder / f"masks-{machine.slug()}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
