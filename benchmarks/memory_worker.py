"""Memory of one attention's training steps, in a process of its own: `memory_worker.py NAME`.

Prints a line of JSON for each step that it compiles. Beginning at a length, it doubles the length
until the step no longer fits. Then it tries 1.5 times the longest length that fits.
"""

import argparse
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hlo
import jax
import topology
from memory_attentions import ATTENTIONS
from memory_step import Model, Step

KINDS, KV_HEADS = ("H100", "H200"), (32, 8)
START, SHORTEST = 32_768, 1024
SHARE = 0.95
"""The share of a device's memory that a step may take. CUDA, NCCL and the allocator need some."""
QUICK_MODEL = Model(layers=2, heads=8, kv_heads=8, head_dim=64, hidden=1024, vocabulary=1024)
QUICK_SHARE = 0.005


def figures(compiled: Any) -> dict[str, Any]:
    """Returns the bytes of a program on each device, from `memory_analysis`.

    New weights and moments replace the old ones, so the peak is arguments + outputs − aliased +
    temporaries. ``host`` are the temporaries in the host's pinned memory.
    """
    memory = compiled.memory_analysis()
    found = {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "host": memory.host_temp_size_in_bytes,
    }
    at_once = found["arguments"] + found["outputs"] - found["aliased"] + found["temporaries"]
    return {"peak": at_once} | found


def copies(compiled: Any) -> dict[str, Any]:
    """Returns when a loop over layers copies to the host and back; see `hlo.Program.transfers`.

    ``call`` is the number of products before the attention, and ``products`` that of the whole
    loop, both with the attention's call.
    """
    program = hlo.Program(compiled.as_text())
    return {
        call: program.transfers(body)
        | {"call": program.place(body, call), "products": sum(map(program.computes, body))}
        for call, body in program.bodies().items()
    }


def longest(fits: Callable[[int], bool], start: int) -> int:
    """Returns the longest length that fits, of start · 2ⁿ and 1.5 times these; 0 if none does."""
    length = start
    if fits(length):
        while fits(2 * length):
            length *= 2
    else:
        while not fits(length):
            length //= 2
            if length < SHORTEST:
                return 0
    between = length * 3 // 2
    return between if fits(between) else length


def search(name: str, step: Step, start: int, share: float) -> int:
    """Prints a row for each length that the search compiles. Returns the longest that fits."""
    rows: dict[int, dict[str, Any]] = {}

    def fits(length: int) -> bool:
        if length not in rows:
            compiled = step.compiled(length)
            row: dict[str, Any] = {
                "attention": name,
                "kv_heads": step.model.kv_heads,
                "kind": step.kind,
            }
            row |= {"length": length} | figures(compiled)
            row["fits"] = row["peak"] <= share * topology.KINDS[step.kind].memory
            if row["host"]:
                row["copies"] = copies(compiled)
            rows[length] = row
            print(json.dumps(row), flush=True)
        return bool(rows[length]["fits"])

    return longest(fits, start)


def main() -> None:
    """Compiles the steps of the attention that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=ATTENTIONS)
    parser.add_argument("--quick", action="store_true", help="a small model, one kind of GPU")
    flags = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    model, share = (QUICK_MODEL, QUICK_SHARE) if flags.quick else (Model(), SHARE)
    kinds, counts = (KINDS[:1], (8,)) if flags.quick else (KINDS, KV_HEADS)
    start = START
    for kind, kv_heads in itertools.product(kinds, counts):
        step = Step(replace(model, kv_heads=kv_heads), ATTENTIONS[flags.name], kind)
        try:
            found = search(flags.name, step, start, share)
        except RuntimeError as error:
            about = {"attention": flags.name, "kv_heads": kv_heads, "kind": kind}
            print(json.dumps(about | {"error": str(error).splitlines()[0]}), flush=True)
            return
        if (kind, kv_heads) == (kinds[0], counts[0]) and found:
            # Other heads and GPUs need no short lengths.
            start = 1 << (found.bit_length() - 1)


if __name__ == "__main__":
    main()
