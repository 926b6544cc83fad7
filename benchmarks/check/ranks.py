"""The work of each of several processes: it joins the processes, then computes its rank."""

from dataclasses import replace
from typing import Any

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from . import exact, ours, plain, shared
from .problem import Layout, Problem, Schedule

OTHERS: tuple[tuple[Schedule, Layout], ...] = (
    ("double_ring", "zigzag"),
    ("balanced", "contiguous"),
    ("all_gather", "striped"),
)
MEMBERS = {
    "zigzag causal, keys travel": Problem(
        "", 2, 1584, 8, 2, 128, "bfloat16", True, "zigzag", backward="keys"
    ),
    "zigzag causal, queries travel": Problem(
        "", 2, 1584, 8, 2, 128, "bfloat16", True, "zigzag", backward="queries"
    ),
    "striped causal, float16": Problem("", 1, 788, 4, 4, 64, "float16", True, "striped"),
    "contiguous full": Problem("", 2, 788, 8, 1, 64, "bfloat16", False, "contiguous"),
    "messages of megabytes": Problem("", 1, 8192, 8, 8, 128, "bfloat16", True, "zigzag"),
} | {
    f"{schedule}, {backward} travel": Problem(
        "", 2, 1584, 8, 2, 64, "bfloat16", True, layout, backward=backward, schedule=schedule
    )
    for schedule, layout in OTHERS
    for backward in ("keys", "queries")
}
FEW = ("zigzag causal, keys travel", "window 127/0, sinks", "double_ring, keys travel")
REHEARSED = 200
"""The largest number of positions in a rehearsal."""


def join(address: str, count: int, rank: int) -> dict[str, Any]:
    """Connects the processes, one device each, and adds up a number over all processes."""
    jax.distributed.initialize(address, count, rank, local_device_ids=[0])
    assert jax.process_count() == count, f"{jax.process_count()} processes, expected {count}"
    assert jax.device_count() == count, f"{jax.device_count()} devices, expected {count}"
    found = multihost_utils.process_allgather(jnp.asarray(1 << rank)).sum()
    assert int(found) == (1 << count) - 1, f"a sum over all ranks gave {found}"
    return {"device": jax.local_devices()[0].device_kind}


def _members() -> dict[str, Problem]:
    """Returns `MEMBERS` and the combinations of features of the shared list."""
    together = shared.together()
    return MEMBERS | {problem.name.split(shared.RING)[0]: problem for problem in together}


class Members:
    """Problems for the ring over all processes."""

    def names(self, rehearse: bool) -> list[str]:
        """Returns the names of the items."""
        return [name for name in _members() if not rehearse or name in FEW]

    def measure(self, name: str, rehearse: bool) -> dict[str, Any]:
        """Returns the errors of output, lse and gradients of the ring over all processes."""
        size = jax.device_count()
        problem = _members()[name]
        seq = min(problem.seq, REHEARSED) if rehearse else problem.seq
        seq = seq // (2 * size) * 2 * size
        # A double ring takes the ranks as two nodes.
        inner = size // 2 if problem.schedule == "double_ring" else 0
        problem = replace(problem, seq=seq, kv_seq=seq, world_size=size, inner=inner)
        mesh = ours.mesh_of(problem)
        attention = plain.gathered if rehearse else ba.attention
        run, given = ours.passes(problem, mesh, attention), ours.put(mesh, problem)
        first, again = (jax.block_until_ready(run(*given)) for _ in range(2))
        names = problem.results
        whole = [multihost_utils.process_allgather(x, tiled=True) for x in first]
        row = exact.judge(problem, ours.restored(problem, dict(zip(names, whole, strict=True))))
        for result, x, y in zip(names, first, again, strict=True):
            mine = (np.asarray(part.addressable_data(0)).tobytes() for part in (x, y))
            if len(set(mine)) != 1:
                row["wrong"].append(f"{result}: differs between two runs")
        return {"name": name, "shown": exact.shown(row["errors"]), **row}
