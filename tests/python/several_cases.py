"""Problems that several processes must solve as one process does: each schedule, feature, mesh."""

from dataclasses import dataclass

import decode_cases
import infini_cases
import jax
import linear_cases
import numpy as np
import platforms
import ring
from features import PAIR, Problem
from jax.sharding import AxisType, Mesh


@dataclass(frozen=True)
class LinearProblem:
    """Linear attention of all ranks, in a line or in ``outer`` lines of equal length.

    Every token has another decay. The call takes a first state and returns the last one.
    """

    ranks: int
    method: str
    outer: int = 1
    dtype: str = "float32"
    delta: bool = False
    """Whether the recurrence is that of the delta rule."""

    def arrays(self):
        """Returns the arrays of `linear_cases.inputs`, and the delta rule's β or None."""
        if self.delta:
            return linear_cases.delta_inputs(self.ranks, 70, 4, 2, 16, 24, None, False, 1)
        return linear_cases.inputs(self.ranks, 70, 4, 2, 16, 24, None, self.dtype), None

    def found(self, given):
        """Returns results and all gradients by name, on the host."""
        arrays, beta = given
        devices = np.array(jax.devices()).reshape(self.outer, -1)
        mesh = Mesh(devices, PAIR, axis_types=(AxisType.Auto,) * 2)
        return linear_cases.found(mesh, arrays, axes=PAIR, beta=beta, method=self.method)


@dataclass(frozen=True)
class InfiniProblem:
    """Infini-attention of all ranks, from a memory."""

    ranks: int
    update: str
    dtype: str = "float32"

    def arrays(self):
        """Returns q, k, v, gate, M and z."""
        return infini_cases.inputs(self.ranks)

    def found(self, arrays):
        """Returns results and all gradients by name, on the host."""
        function = infini_cases.sharded(ring.line(self.ranks), update=self.update)
        shapes = [arrays[i].shape for i in (2, 4, 5)]
        shapes[0] = (*arrays[0].shape[:3], shapes[0][3])
        cotangents = ring.normal(5, *shapes, dtype=np.float32)
        results, gradients = ring.gradients(function)(arrays, tuple(cotangents))
        names = ("o", "m", "z", "dq", "dk", "dv", "dgate", "dm", "dz")
        return dict(zip(names, map(ring.on_host, results + gradients), strict=True))


@dataclass(frozen=True)
class DecodeProblem:
    """Decoding over a cache in pages, or in rows, of all ranks."""

    ranks: int
    page: int | None = None
    dtype: str = "float32"

    def arrays(self):
        """Returns a problem of `decode_cases`."""
        sharding = decode_cases.Sharding(self.ranks, page=self.page, capacity=32)
        return decode_cases.problem(sharding, [150, 0, 1, 77], 3, dtype=self.dtype)

    def found(self, arrays):
        """Returns out and lse by name, on the host."""
        return dict(zip(("o", "lse"), map(ring.on_host, decode_cases.decode(arrays)), strict=True))


def cases(ranks):
    """Returns the problems for a number of ranks: 2, 4 or 8."""
    decoding = (DecodeProblem(ranks), DecodeProblem(ranks, page=8, dtype="bfloat16"))
    infini = (InfiniProblem(ranks, update="delta"),)
    if "products" in platforms.current().lacks:
        decoding = infini = ()
    line, half = {"mesh": (1, ranks, 1), "q_len": 64, "kv_len": 64}, ranks // 2
    return (
        Problem(**line, causal=True, layout="zigzag", sinks=True),
        Problem(
            mesh=(1, ranks, 1),
            inner=half,
            q_len=128,
            kv_len=128,
            dtype="bfloat16",
            layout="striped",
            backward="queries",
            segments="padded",
        ),
        Problem(**line, schedule="balanced", causal=True, dropout=0.2),
        Problem(
            mesh=(2, half, 1),
            schedule="all_gather",
            dtype="float16",
            window=(9, 2),
            slopes=True,
            soft_cap=2.0,
            value_dim=16,
        ),
        Problem(**line, inner=2, schedule="hybrid", causal=True, layout="zigzag"),
        LinearProblem(ranks, method="ring"),
        LinearProblem(ranks, method="all_gather", dtype="bfloat16"),
        LinearProblem(ranks, method="ring", outer=2),
        LinearProblem(ranks, method="all_gather", outer=2),
        LinearProblem(ranks, method="in_turn"),
        LinearProblem(ranks, method="ring", outer=2, delta=True),
        LinearProblem(ranks, method="all_gather", delta=True),
        *infini,
        *decoding,
    )
