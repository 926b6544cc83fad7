"""Memory of a recurrence in a process of its own: `linear_memory.py NAME LENGTH` prints JSON.

`planned_bytes` is the memory that XLA plans besides arguments and results. `extra_bytes` is the
rise of resident memory during the first call, above the arguments and without the results. It
includes the allocations of a custom call and the stacks of new threads. It is absent if this
machine has too little memory.
"""

import argparse
import json
from functools import partial
from typing import Any

import delta_programs
import jax
import machine
from linear_programs import DEVICES, LINEAR, Program, Recurrence
from resident import growth

SHARDED = f"ours, {DEVICES} devices"
RECURRENCES = {
    "linear": LINEAR,
    "delta": Recurrence(delta_programs.OURS, delta=True),
    "delta of channels": Recurrence(delta_programs.OURS, channels=True, delta=True),
    "infini": Recurrence({SHARDED: (partial(delta_programs.infini, DEVICES), DEVICES)}),
}


def measure(program: Program) -> dict[str, Any]:
    """Returns the figures that the module describes."""
    found: dict[str, Any] = {"planned_bytes": program.planned_bytes("temp")}
    if program.all_bytes < 0.8 * machine.available_bytes():
        inputs = program.inputs()
        jax.block_until_ready(inputs)
        found["extra_bytes"] = growth(lambda: program.run(inputs))[1]
    return found


def main() -> None:
    """Measures the program that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("length", type=int)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--recurrence", choices=[*RECURRENCES], default="linear")
    flags = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    recurrence = RECURRENCES[flags.recurrence]
    print(json.dumps(measure(Program(flags.name, flags.length, flags.heads, recurrence))))


if __name__ == "__main__":
    main()
