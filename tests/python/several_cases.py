"""Problems that several processes must solve: each schedule, layout, feature and mesh, by name."""

from dataclasses import dataclass

import bounds
import burst_attention as ba
import decode_cases
import infini_cases
import jax
import linear_cases
import numpy as np
import platforms
import ring
from decode_reference import dense
from features import PAIR, Problem
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

NOT_ON_STANDIN = {
    "delta rule, double ring": "takes as long as three rings",
    "linear attention, all-gather twice": "takes as long as three rings",
    "Infini-attention": "takes a loop in a CUDA graph, which the stand-in does not have",
}
"""Why the stand-in leaves problems out."""


@dataclass(frozen=True)
class MessagesProblem:
    """Messages of XLA alone: each rank's numbers go to the next rank, and their sum to all."""

    ranks: int

    def arrays(self):
        """Returns a mebibyte of numbers for each rank; float32 holds their sums exactly."""
        return np.arange(self.ranks << 18, dtype=np.float32)

    def found(self, numbers):
        """Returns the numbers that each rank got, and the sums, on the host."""
        line = [(rank, (rank + 1) % self.ranks) for rank in range(self.ranks)]

        def local(x):
            return jax.lax.ppermute(x, "context", line), jax.lax.psum(x, "context")

        mesh, shards = ring.line(self.ranks), P("context")
        function = jax.shard_map(local, mesh=mesh, in_specs=shards, out_specs=(shards, P()))
        moved, sums = jax.jit(function)(numbers)
        return {"moved": ring.on_host(moved), "sums": ring.on_host(sums)}

    def assert_right(self, got, numbers):
        """Asserts that all numbers arrived."""
        assert np.array_equal(got["moved"], np.roll(numbers, 1 << 18))
        assert np.array_equal(got["sums"], numbers.reshape(self.ranks, -1).sum(0))


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

    def assert_right(self, got, given):
        """Asserts that results agree with the recurrence in float64."""
        arrays, beta = given
        linear_cases.assert_right(got, arrays, self.dtype, beta=beta)


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

    def assert_right(self, got, arrays):
        """Asserts that results agree with the recurrence in float64."""
        exact = map(np.float64, arrays)
        want = infini_cases.reference(*exact, infini_cases.SEGMENT, self.update)
        infini_cases.near([got[name] for name in ("o", "m", "z")], want, 2e-6)


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

    def assert_right(self, got, arrays):
        """Asserts that results agree with attention in float64."""
        exact = dense(arrays.q, arrays.k, arrays.v, arrays.lengths)
        decode_cases.check((got["o"], got["lse"]), exact)


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
    """Returns the problems for 2, 4 or 8 ranks by name, the most telling first."""
    line, half = {"mesh": (1, ranks, 1), "q_len": 64, "kv_len": 64}, ranks // 2
    found = {
        "messages of XLA": MessagesProblem(ranks),
        "ring, zigzag": Problem(**line, causal=True, layout="zigzag", sinks=True),
        "linear attention, ring": LinearProblem(ranks, method="ring"),
        "ring, striped, queries travel": Problem(
            **line, causal=True, layout="striped", backward="queries"
        ),
        "ring, contiguous, keys travel": Problem(**line, window=(40, 3), backward="keys"),
        "double ring": Problem(
            mesh=(1, ranks, 1),
            inner=half,
            q_len=128,
            kv_len=128,
            dtype="bfloat16",
            layout="striped",
            backward="queries",
            segments="padded",
        ),
        "balanced": Problem(**line, schedule="balanced", causal=True, dropout=0.2),
        "hybrid": Problem(**line, inner=2, schedule="hybrid", causal=True, layout="zigzag"),
        "all-gather": Problem(
            mesh=(2, half, 1),
            schedule="all_gather",
            dtype="float16",
            window=(9, 2),
            slopes=True,
            soft_cap=2.0,
            value_dim=16,
        ),
        "decoding": DecodeProblem(ranks),
        "decoding, pages": DecodeProblem(ranks, page=8, dtype="bfloat16"),
        "delta rule, double ring": LinearProblem(ranks, method="ring", outer=2, delta=True),
        "delta rule, all-gather": LinearProblem(ranks, method="all_gather", delta=True),
        "linear attention, all-gather": LinearProblem(ranks, method="all_gather", dtype="bfloat16"),
        "linear attention, double ring": LinearProblem(ranks, method="ring", outer=2),
        "linear attention, all-gather twice": LinearProblem(ranks, method="all_gather", outer=2),
        "linear attention, in turn": LinearProblem(ranks, method="in_turn"),
        "Infini-attention": InfiniProblem(ranks, update="delta"),
    }
    left_out = NOT_ON_STANDIN if platforms.current().name == "standin" else ()
    return {name: case for name, case in found.items() if name not in left_out}


def assert_right(case, got):
    """Asserts that results agree with float64."""
    arrays = case.arrays()
    if isinstance(case, Problem):
        bounds.check(got, case.expected(arrays), arrays["dout"], case.dtype)
    else:
        case.assert_right(got, arrays)
