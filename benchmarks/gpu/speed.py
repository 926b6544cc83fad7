"""TFLOP/s of our kernels and of their peers, which take turns."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from .library import Driver
from .numerics import CAUSAL
from .ours import ANY, Attention

TOKENS = 32 * 1024
BARS = {"forward": 0.85, "backward": 0.70}
"""Least share of cuDNN's speed, at D 128, causal, 8K."""


@dataclass(frozen=True)
class Shape:
    """A timed problem in bfloat16; as many batch entries as make 32K tokens."""

    seq: int
    dim: int
    heads: int
    kv_heads: int
    causal: bool

    @property
    def batch(self) -> int:
        """Batch entries."""
        return max(1, TOKENS // self.seq)

    @property
    def name(self) -> str:
        """For people."""
        mask = "causal" if self.causal else "full"
        return f"D{self.dim} {mask} {self.seq // 1024}K {self.heads}:{self.kv_heads}"

    @property
    def decides(self) -> bool:
        """Do the bars stand for this shape?"""
        return self.dim == 128 and self.causal and self.seq == 8192 and self.heads == self.kv_heads

    def flop(self, which: str) -> float:
        """Forward 4·B·S²·H·D, half of it if causal; backward 2.5 times that."""
        forward = 4.0 * self.batch * self.seq**2 * self.heads * self.dim
        forward /= 2 if self.causal else 1
        return forward * {"forward": 1.0, "backward": 2.5}[which]


def shapes() -> list[Shape]:
    """All timed problems, the ones that matter most first."""
    found = [
        Shape(seq * 1024, dim, heads, kv_heads, causal)
        for dim in (128, 64, 256)
        for heads, kv_heads in (((32, 32), (32, 8)) if dim < 256 else ((16, 16), (16, 4)))
        for causal in (True, False)
        for seq in (8, 2, 4, 16, 32)
    ]
    return sorted(found, key=lambda shape: (not shape.decides, shape.dim != 128))


def milliseconds(programs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Times of each program on the GPU, the programs taking turns."""
    import torch

    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for program in programs.values():
        program()
    torch.cuda.synchronize()
    taken: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            events[0].record()
            program()
            events[1].record()
            events[1].synchronize()
            taken[name].append(events[0].elapsed_time(events[1]))
    return taken


def matrix_peak() -> float:
    """TFLOP/s of a bfloat16 matrix product of 8192³."""
    import torch

    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    taken = milliseconds({"product": lambda: a @ a}, 20)["product"]
    return 2 * 8192**3 / median(taken) / 1e9


def measure(shape: Shape, driver: Driver, rounds: int) -> dict[str, Any]:
    """Median milliseconds and TFLOP/s of every contender, both passes."""
    import torch

    def random(heads: int) -> Any:
        size = (shape.batch, shape.seq, heads, shape.dim)
        return torch.randn(size, device="cuda", dtype=torch.bfloat16)

    q, dout = random(shape.heads), random(shape.heads)
    k, v = random(shape.kv_heads), random(shape.kv_heads)
    ours = Attention(driver, q, k, v, CAUSAL if shape.causal else ANY, dout)
    forward, backward = {"ours": ours.forward()}, {"ours": ours.backward()}
    missing = {}
    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
        label = name.split("_")[0].lower()
        try:
            forward[label], backward[label] = torch_sdpa(name, shape, q, k, v, dout)
        except RuntimeError as error:
            missing[label] = str(error).splitlines()[0]
    forward["ours"]()  # backward reads o and lse
    found: dict[str, Any] = {"shape": shape.name, "missing": missing, "passes": {}}
    for which, programs in (("forward", forward), ("backward", backward)):
        taken = milliseconds(programs, rounds)
        found["passes"][which] = {
            name: {
                "ms": median(times),
                "spread": (max(times) - min(times)) / median(times),
                "tflops": shape.flop(which) / median(times) / 1e9,
            }
            for name, times in taken.items()
        }
    parts = {"delta": ours.make_delta(), "dkdv": ours.key_grads(), "dq": ours.query_grads()}
    found["parts_ms"] = {n: median(t) for n, t in milliseconds(parts, rounds).items()}
    return found


def torch_sdpa(
    backend: str, shape: Shape, q: Any, k: Any, v: Any, dout: Any
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """torch's attention by one backend, forward and backward, on the same memory."""
    import torch

    inputs = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]

    def forward() -> Any:
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(
                *inputs, is_causal=shape.causal, enable_gqa=shape.heads != shape.kv_heads
            )

    o, gradient = forward(), dout.transpose(1, 2)

    def backward() -> Any:
        return torch.autograd.grad(o, inputs, gradient, retain_graph=True)

    return forward, backward
