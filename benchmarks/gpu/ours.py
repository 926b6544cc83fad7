"""Our kernels as functions of torch tensors, [batch, seq, heads, head_dim]."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from .driver import Launcher
from .library import AbsentError

Band = tuple[int, int]
LEAST, MOST = -(2**63), 2**63 - 1
ANY: Band = (LEAST, MOST)
"""A band that hides nothing."""
CAUSAL: Band = (LEAST, 0)
WHOLE = slice(None)
ELEMENTS = {"torch.bfloat16": "bf16", "torch.float16": "f16", "bfloat16": "bf16"}
WHOLE_SUM = (True, True)
"""Whether sums begin with the first step of a launch, and whether they end with its last one."""


def rows(tensor: Any) -> dict[str, int]:
    """Returns address and stride of [batch, rows, heads, head_dim] or its leading dimensions."""
    return {"address": tensor.data_ptr(), "batch_stride": tensor.stride(0)}


def statistics(tensor: Any) -> dict[str, int]:
    """Returns address and strides of [batch, heads, rows]."""
    strides = {"batch_stride": tensor.stride(0), "head_stride": tensor.stride(1)}
    return {"address": tensor.data_ptr(), **strides}


def rectangle(q: Any, k: Any, band: Band, scale: float) -> dict[str, Any]:
    """Returns sizes, types and mask of queries × keys."""
    return {
        "batch": q.shape[0],
        "q_len": q.shape[1],
        "kv_len": k.shape[1],
        "heads": q.shape[2],
        "kv_heads": k.shape[2],
        "head_dim": q.shape[3],
        "value_dim": q.shape[3],
        "element": ELEMENTS[str(q.dtype)],
        "lower": band[0],
        "upper": band[1],
        "softmax_scale": scale,
    }


def shifted(band: Band, queries: slice, keys: slice) -> Band:
    """Returns the band of a part of queries and keys, in rows that count from the part's start."""
    shift = (queries.start or 0) - (keys.start or 0)
    lower, upper = (limit if limit in ANY else limit + shift for limit in band)
    return (lower, upper)


def slices(length: int, steps: int) -> list[slice]:
    """Returns parts of about the same length, in order; each starts at a multiple of 4 rows."""
    cuts = [length * step // steps // 4 * 4 for step in range(steps)] + [length]
    return [slice(start, end) for start, end in pairwise(cuts)]


def padded(length: int) -> int:
    """Returns the rows of a head in an array of statistics: each head is aligned to 16 bytes."""
    return -(-length // 4) * 4


class Attention:
    """One problem: its arrays by name, and functions that enqueue the kernels.

    `arrays` has q, k, v and, for the backward pass, dout, o, lse, lse_log2, delta and perhaps dlse,
    q_segments and kv_segments. The functions add results to it, which `empty(name, shape, dtype)`
    makes; `float32` is its type of sums, by default torch's. The caller keeps `arrays` alive while
    it calls the functions. Where `ends` are false, launches take sums in, or leave sums to others.
    """

    def __init__(
        self,
        launcher: Launcher,
        arrays: dict[str, Any],
        empty: Callable[[str, tuple[int, ...], Any], Any],
        band: Band = ANY,
        soft_cap: float = 0.0,
        float32: Any = None,
    ):
        self.arrays = arrays
        self._launcher, self._empty, self._band, self._soft_cap = launcher, empty, band, soft_cap
        self._float32 = float32

    def forward(self, steps: int = 1, ends: tuple[bool, bool] = WHOLE_SUM) -> Callable[[], None]:
        """Computes o and lse, with the keys in ``steps`` parts."""
        q = self.arrays["q"]
        state = {"o": rows(self._like("o", "q")), "lse": rows(self._new("lse", q.shape[:3]))}
        if steps > 1 or ends != WHOLE_SUM:
            state["acc"] = rows(self._new("acc", q.shape))
            state |= {name: statistics(self.statistic(name)) for name in ("row_max", "row_sum")}
        return self._in_steps(
            "forward", steps, ends, "k", lambda keys: self._pair(WHOLE, keys) | state
        )

    def make_delta(self, zeros: bool = False) -> Callable[[], None]:
        """Computes delta, and lse in base 2. With `zeros`, also sets dq's accumulator to 0."""
        q = self.arrays["q"]
        request = {
            "batch": q.shape[0],
            "q_len": q.shape[1],
            "heads": q.shape[2],
            "head_dim": q.shape[3],
            "element": ELEMENTS[str(q.dtype)],
            **{name: rows(self.arrays[name]) for name in ("o", "dout", "lse")},
            **{name: statistics(self.statistic(name)) for name in ("lse_log2", "delta")},
        }
        if "dlse" in self.arrays:
            request["dlse"] = rows(self.arrays["dlse"])
        if zeros:
            request["zeros"] = rows(self._new("dq_acc", q.shape))
        return self._launcher.prepare({"delta": request})

    def key_grads(
        self, steps: int = 1, ends: tuple[bool, bool] = WHOLE_SUM, fused: bool = False
    ) -> Callable[[], None]:
        """Computes dk and dv, with the queries in ``steps`` parts.

        With `fused`, the kernel also adds to dq's accumulator.
        """
        running = {name: rows(self._like(name, "k")) for name in ("dk", "dv")}
        if fused:
            running["dq_acc"] = rows(self.arrays["dq_acc"])
        if steps > 1 or ends != WHOLE_SUM:
            shape = self.arrays["k"].shape
            running |= {name: rows(self._new(name, shape)) for name in ("dk_acc", "dv_acc")}
        return self._in_steps(
            "key_grads", steps, ends, "q", lambda part: self._gradient(part, WHOLE) | running
        )

    def all_grads(self) -> Callable[[], None]:
        """Computes dk, dv and dq by three launches: delta, the fused kernel, dq's cast.

        Raises AbsentError if the device has no fused kernel for the problem.
        """
        q = self.arrays["q"]
        first = self.make_delta(zeros=True)
        try:
            kernel = self.key_grads(fused=True)
        except ValueError as error:
            if "no fused kernel" not in str(error):
                raise
            raise AbsentError(
                f"{q.shape[3]} columns on this device have no fused kernel"
            ) from error
        cast = cast_request(self.arrays["dq_acc"], None, self._like("dq", "q"))
        cast["cast"]["scale"] = q.shape[3] ** -0.5
        return sequence(first, kernel, self._launcher.prepare(cast))

    def query_grads(
        self, steps: int = 1, ends: tuple[bool, bool] = WHOLE_SUM
    ) -> Callable[[], None]:
        """Computes dq, with the keys in ``steps`` parts."""
        running = {"dq": rows(self._like("dq", "q"))}
        if steps > 1 or ends != WHOLE_SUM:
            running["dq_acc"] = rows(self._new("dq_acc", self.arrays["q"].shape))
        return self._in_steps(
            "query_grads", steps, ends, "k", lambda part: self._gradient(WHOLE, part) | running
        )

    def statistic(self, name: str) -> Any:
        """Returns a new array [batch, heads, rows]."""
        batch, q_len, heads, _ = self.arrays["q"].shape
        return self._new(name, (batch, heads, padded(q_len)))[:, :, :q_len]

    def _in_steps(
        self,
        kernel: str,
        steps: int,
        ends: tuple[bool, bool],
        along: str,
        request: Callable[[slice], dict[str, Any]],
    ) -> Callable[[], None]:
        parts = slices(self.arrays[along].shape[1], steps) if steps > 1 else [WHOLE]
        begins, finishes = ends
        prepared = [
            self._launcher.prepare(
                {
                    kernel: request(part)
                    | {"first": begins and n == 0, "last": finishes and n == steps - 1}
                }
            )
            for n, part in enumerate(parts)
        ]
        return sequence(*prepared)

    def _pair(self, queries: slice, keys: slice) -> dict[str, Any]:
        q = self.arrays["q"][:, queries]
        k, v = (self.arrays[name][:, keys] for name in ("k", "v"))
        shape = rectangle(q, k, shifted(self._band, queries, keys), q.shape[3] ** -0.5)
        found = {"rectangle": shape, "q": rows(q), "k": rows(k), "v": rows(v)}
        found["features"] = {"soft_cap": self._soft_cap}
        if "q_segments" in self.arrays:
            found["features"]["segments"] = {
                "queries": rows(self.arrays["q_segments"][:, queries]),
                "keys": rows(self.arrays["kv_segments"][:, keys]),
                "ranges": rows(self._ranges()),
            }
        return found

    def _ranges(self) -> Any:
        """Returns the array for the row ranges that launches compute from segments."""
        if "ranges" not in self.arrays:
            ids = self.arrays["q_segments"]
            length = max(ids.shape[1], self.arrays["kv_segments"].shape[1])
            shape = (ids.shape[0], -(-length // 64), 4)
            self.arrays["ranges"] = self._empty("ranges", shape, ids.dtype)
        return self.arrays["ranges"]

    def _gradient(self, queries: slice, keys: slice) -> dict[str, Any]:
        per_row = {n: statistics(self.arrays[n][:, :, queries]) for n in ("lse_log2", "delta")}
        dout = rows(self.arrays["dout"][:, queries])
        return self._pair(queries, keys) | {"dout": dout} | per_row

    def _like(self, name: str, model: str) -> Any:
        like = self.arrays[model]
        self.arrays[name] = self._empty(name, tuple(like.shape), like.dtype)
        return self.arrays[name]

    def _new(self, name: str, shape: tuple[int, ...]) -> Any:
        if self._float32 is None:
            import torch

            self._float32 = torch.float32
        self.arrays[name] = self._empty(name, tuple(shape), self._float32)
        return self.arrays[name]


def sequence(*parts: Callable[[], None]) -> Callable[[], None]:
    """Returns one function that calls all parts in order."""

    def run() -> None:
        for part in parts:
            part()

    return run


def cast_request(a: Any, b: Any, out: Any) -> dict[str, Any]:
    """Returns the request of out = a + b, or a alone, rounded to the type of `out`."""
    batch, length, heads, dim = out.shape
    found = {"batch": batch, "rows": length, "heads": heads, "head_dim": dim}
    found |= {"element": ELEMENTS[str(out.dtype)], "a": rows(a), "out": rows(out)}
    return {"cast": found if b is None else found | {"b": rows(b)}}
