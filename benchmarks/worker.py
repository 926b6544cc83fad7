"""One measurement in a process of its own: `worker.py MEASUREMENT CASE [--seq N]` prints JSON.

`ring` times a case on its mesh against the same global problem on one device, both in one process
with the virtual devices of the mesh. `mask` times a case against the case without window and
documents. `latents` times attention over latents that travel against their expansion before
attention. `checkpoint` times a model whose layers are rematerialised, with and without kept
attention. `memory` runs forward and backward once.
"""

import argparse
import json
import os
from statistics import median
from typing import TYPE_CHECKING, Any

import jax
from cases import Case, find

if TYPE_CHECKING:
    from contenders import Contender


def ring_tax(case: Case, budget_s: float) -> dict[str, Any]:
    """Returns the median seconds with and without the ring, alternated, and their ratio."""
    return _compare(case, case.on_one_device(), ("ring", "one_device"), budget_s)


def mask_gain(case: Case, budget_s: float) -> dict[str, Any]:
    """Returns the median seconds with and without window and documents, and their ratio."""
    return _compare(case, case.without_mask(), ("masked", "whole"), budget_s)


def latent_cost(case: Case, budget_s: float) -> dict[str, Any]:
    """Returns the median seconds of latents that travel and of keys that do, and their ratio."""
    from latents import NAMES, contenders

    return _ratios(case, contenders(case), NAMES, budget_s)


def _compare(case: Case, other: Case, names: tuple[str, str], budget_s: float) -> dict[str, Any]:
    from contenders import ours

    contenders = [ours(one, name) for one, name in zip((case, other), names, strict=True)]
    return _ratios(case, contenders, names, budget_s)


def _ratios(
    case: Case, contenders: list["Contender"], names: tuple[str, str], budget_s: float
) -> dict[str, Any]:
    from timing import alternate

    result: dict[str, Any] = {"case": case.name, "shape": case.shape, "world_size": case.mesh[1]}
    for which in ("forward", "both"):
        taken = alternate({c.name: c.program(which) for c in contenders}, budget_s)
        seconds = {name: median(taken[name]) for name in names}
        result[which] = {f"{name}_s": value for name, value in seconds.items()}
        result[which]["ratio"] = seconds[names[0]] / seconds[names[1]]
    return result


def checkpoint_gain(case: Case, budget_s: float) -> dict[str, Any]:
    """Returns the median seconds of loss and gradients of a model, for each wrapper of layers."""
    from layers import LAYERS, programs
    from timing import alternate

    taken = alternate(programs(case), budget_s)
    seconds = {name: median(times) for name, times in taken.items()}
    return {
        "case": case.name,
        "shape": case.shape,
        "world_size": case.mesh[1],
        "layers": LAYERS,
        **{f"{name}_s": value for name, value in seconds.items()},
        "ratio": seconds["kept"] / seconds["recomputed"],
    }


COMPARISONS = {
    "ring": ring_tax,
    "mask": mask_gain,
    "latents": latent_cost,
    "checkpoint": checkpoint_gain,
}


def peak_memory(case: Case) -> dict[str, Any]:
    """Returns the bytes by which a run raises resident memory, with the inputs in place.

    `extra_bytes` excludes the results (output and gradients). `of_kv` is the ratio of `extra_bytes`
    to key and value in float32.
    """
    from contenders import ours
    from resident import growth

    grown, extra = growth(ours(case).both)
    kv = 2 * 4 * case.batch * case.seq * case.kv_heads * case.head_dim
    return {
        "case": case.name,
        "shape": case.shape,
        "grown_bytes": grown,
        "extra_bytes": extra,
        "of_kv": extra / kv,
    }


def main() -> None:
    """Carries out the measurement that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measurement", choices=[*COMPARISONS, "memory"])
    parser.add_argument("case")
    parser.add_argument("--seq", type=int, help="another length")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of timing per pass")
    flags = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    case = find(flags.case, flags.seq)
    jax.config.update("jax_num_cpu_devices", case.mesh[0] * case.mesh[1] * case.mesh[2])
    if compare := COMPARISONS.get(flags.measurement):
        print(json.dumps(compare(case, flags.budget)))
    else:
        print(json.dumps(peak_memory(case)))


if __name__ == "__main__":
    main()
