"""Our kernels as functions of torch tensors, [batch, seq, heads, head_dim]."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .library import Driver

ANY = (-(2**63), 2**63 - 1)
"""A band that hides nothing."""


def rows(tensor: Any) -> dict[str, int]:
    """Where [batch, rows, heads, head_dim] or [batch, rows, heads] lies."""
    return {"address": tensor.data_ptr(), "batch_stride": tensor.stride(0)}


def statistics(tensor: Any) -> dict[str, int]:
    """Where [batch, heads, rows] lies."""
    strides = {"batch_stride": tensor.stride(0), "head_stride": tensor.stride(1)}
    return {"address": tensor.data_ptr(), **strides}


def rectangle(q: Any, k: Any, band: tuple[int, int], scale: float) -> dict[str, Any]:
    """Sizes, types and mask of queries × keys."""
    return {
        "batch": q.shape[0],
        "q_len": q.shape[1],
        "kv_len": k.shape[1],
        "heads": q.shape[2],
        "kv_heads": k.shape[2],
        "head_dim": q.shape[3],
        "element": {"bfloat16": "bf16", "float16": "f16"}[str(q.dtype).removeprefix("torch.")],
        "lower": band[0],
        "upper": band[1],
        "softmax_scale": scale,
    }


@dataclass
class Attention:
    """One attention problem on the GPU; results and scratch are poisoned with NaN."""

    driver: Driver
    q: Any
    k: Any
    v: Any
    band: tuple[int, int] = ANY
    dout: Any = None
    dlse: Any = None
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        import torch

        batch, q_len, heads, dim = self.q.shape
        self.scale = dim**-0.5

        def poisoned(*shape: int) -> Any:
            return torch.full(shape, float("nan"), device=self.q.device, dtype=torch.float32)

        self.o = torch.full_like(self.q, float("nan"))
        self.lse = poisoned(batch, q_len, heads)
        self.row_max, self.row_sum = (poisoned(batch, heads, _padded(q_len)) for _ in range(2))
        self.lse_log2, self.delta = (poisoned(batch, heads, _padded(q_len)) for _ in range(2))
        self.dq = torch.full_like(self.q, float("nan"))
        self.dk, self.dv = (torch.full_like(self.k, float("nan")) for _ in range(2))

    def _inputs(self, keys: slice = slice(None)) -> dict[str, Any]:
        k, v = self.k[:, keys], self.v[:, keys]
        start = keys.start or 0
        band = tuple(b if b in ANY else b - start for b in self.band)
        shape = rectangle(self.q, k, (band[0], band[1]), self.scale)
        return {"rectangle": shape, "q": rows(self.q), "k": rows(k), "v": rows(v)}

    def forward(self) -> Callable[[], None]:
        """o and lse in one step."""
        ends = {"first": True, "last": True, "o": rows(self.o), "lse": rows(self.lse)}
        return self.driver.prepare({"forward": self._inputs() | ends})

    def forward_in_steps(self, steps: int) -> Callable[[], None]:
        """o and lse over several rectangles of keys, the state carried between them."""
        import torch

        acc = torch.full(self.q.shape, float("nan"), device=self.q.device, dtype=torch.float32)
        state = {
            "acc": rows(acc),
            "row_max": statistics(self.row_max),
            "row_sum": statistics(self.row_sum),
            "o": rows(self.o),
            "lse": rows(self.lse),
        }
        length = self.k.shape[1]
        cuts = [length * step // steps for step in range(steps + 1)]
        enqueue = []
        for step in range(steps):
            ends = {"first": step == 0, "last": step == steps - 1}
            inputs = self._inputs(slice(cuts[step], cuts[step + 1]))
            enqueue.append(self.driver.prepare({"forward": inputs | state | ends}))

        def run(keep: Any = acc) -> None:
            for each in enqueue:
                each()

        return run

    def make_delta(self) -> Callable[[], None]:
        """delta and lse in base 2, from o, lse, dout."""
        batch, q_len, heads, dim = self.q.shape
        request: dict[str, Any] = {
            "batch": batch,
            "q_len": q_len,
            "heads": heads,
            "head_dim": dim,
            "element": self._inputs()["rectangle"]["element"],
            "o": rows(self.o),
            "dout": rows(self.dout),
            "lse": rows(self.lse),
            "lse_log2": statistics(self.lse_log2),
            "delta": statistics(self.delta),
        }
        if self.dlse is not None:
            request["dlse"] = rows(self.dlse)
        return self.driver.prepare({"delta": request})

    def _gradient_inputs(self) -> dict[str, Any]:
        return self._inputs() | {
            "dout": rows(self.dout),
            "lse_log2": statistics(self.lse_log2),
            "delta": statistics(self.delta),
            "first": True,
            "last": True,
        }

    def key_grads(self) -> Callable[[], None]:
        """dk and dv in one step."""
        results = {"dk": rows(self.dk), "dv": rows(self.dv)}
        return self.driver.prepare({"key_grads": self._gradient_inputs() | results})

    def query_grads(self) -> Callable[[], None]:
        """dq in one step."""
        return self.driver.prepare({"query_grads": self._gradient_inputs() | {"dq": rows(self.dq)}})

    def backward(self) -> Callable[[], None]:
        """delta, then dk and dv, then dq."""
        parts = [self.make_delta(), self.key_grads(), self.query_grads()]

        def run() -> None:
            for part in parts:
                part()

        return run


def _padded(length: int) -> int:
    """Statistics of a head begin at 16 bytes."""
    return -(-length // 4) * 4
