"""Problems that several processes must solve as one process does: each schedule, feature, mesh."""

from dataclasses import dataclass

import burst_attention as ba
import decode_cases
import infini_cases
import jax
import linear_cases
import numpy as np
import platforms
import ring
from features import PAIR, Problem
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P


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


@dataclass(frozen=True)
class PoolProblem:
    """A prompt and a token over a pool: the second half of each process's devices."""

    ranks: int

    def arrays(self):
        """Returns query, key and value of seven tokens."""
        return ring.normal(0, *[(2, 7, heads, 16) for heads in (4, 2, 2)])

    def found(self, arrays, there=None):
        """Returns what the prompt and the last token gave, on the host.

        ``there`` is another pool than the second half of each process's devices.
        """
        devices = np.array(jax.devices()).reshape(jax.process_count(), 2, -1)
        mesh = Mesh(devices[:, 0].ravel(), ("tensor",), axis_types=(AxisType.Auto,))
        there = there or ba.CachePool(list(devices[:, 1].ravel()))
        caches = there.init(batch=2, positions=9, kv_heads=2, head_dim=16, dtype=arrays[0].dtype)
        options, found = {"implementation": "xla", "return_residual": True}, {}
        for name, part in {"prompt": slice(6), "token": slice(6, 7)}.items():
            tokens = ring.put(mesh, *(x[:, part] for x in arrays), spec=P(None, None, None, None))
            call = there.prefill if name == "prompt" else there.attend
            lengths = np.full(2, part.stop, np.int32)
            (out, lse), caches = call(caches, *tokens, lengths, **options)
            found |= {name: ring.on_host(out), f"{name} lse": ring.on_host(lse)}
        return found


def cases(ranks):
    """Returns the problems for a number of ranks: 2, 4 or 8."""
    decoding = (DecodeProblem(ranks), DecodeProblem(ranks, page=8, dtype="bfloat16"))
    of_products = (
        LinearProblem(ranks, method="ring", outer=2, delta=True),
        LinearProblem(ranks, method="all_gather", delta=True),
        InfiniProblem(ranks, update="delta"),
    )
    if "products" in platforms.current().lacks:
        decoding = of_products = ()
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
        *of_products,
        *decoding,
    )
