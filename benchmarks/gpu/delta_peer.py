"""The delta rule of flash-linear-attention, which needs torch: `python -m gpu.delta_peer`.

Serves the parts of a row as serve.py describes. Inputs are random: bfloat16, keys of unit norm, log
decays of 0.99 in float32. Times are by the clock on the wall, as those of the row's other programs.
"""

import importlib
import math
import sys
import time
from typing import Any

from . import serve


class Work:
    """The parts, by name."""

    def __init__(self) -> None:
        self._inputs: list[Any] = []
        self._attend: Any = None
        self._dout: Any = None

    def prepare(
        self, channels: bool, batch: int, tokens: int, heads: int, head_dim: int
    ) -> dict[str, str | None]:
        """Makes inputs ``[batch, tokens, heads, head_dim]``; decays are of heads or of channels."""
        import torch

        if channels:
            from fla.ops.kda import chunk_kda as attend  # type: ignore[import-not-found]
        else:
            from fla.ops.gated_delta_rule import (  # type: ignore[import-not-found]
                chunk_gated_delta_rule as attend,
            )
        rows = (batch, tokens, heads)
        whole = (*rows, head_dim)

        def random(shape: tuple[int, ...]) -> Any:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

        q, k, v, self._dout = (random(whole) for _ in range(4))
        k = torch.nn.functional.normalize(k.float(), dim=-1).to(k.dtype)
        decays = torch.full(whole if channels else rows, math.log(0.99), device="cuda")
        beta = torch.sigmoid(random(rows).float()).to(q.dtype)
        self._inputs = [x.detach().requires_grad_() for x in (q, k, v, decays, beta)]
        self._attend = attend
        return {name: serve.package(name) for name in ("torch", "triton", "flash-linear-attention")}

    def milliseconds(self, which: str, calls: int) -> float:
        """Returns the time of some calls of a pass in a row."""
        import torch

        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            self._once(which)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) * 1e3

    def _once(self, which: str) -> None:
        import torch

        if which == "forward":
            with torch.no_grad():
                self._attend(*self._inputs)
            return
        out, _ = self._attend(*self._inputs)
        torch.autograd.grad(out, self._inputs, self._dout)


def missing() -> str | None:
    """Returns what this Python or machine lacks, or None."""
    try:
        import torch

        importlib.import_module("fla")
    except Exception as error:  # a package may fail in its own ways where its parts don't fit
        return f"expected torch and flash-linear-attention: {type(error).__name__}: {error}"[:300]
    if not torch.cuda.is_available():
        return "expected an NVIDIA GPU that torch can use, found none"
    return None


if __name__ == "__main__":
    serve.serve(Work(), sys.stdin, serve.own_output(), missing, lambda: None)
