"""Measures TFLOP/s of our kernels and of their peers, which take turns."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from . import peers
from .driver import Launcher
from .library import AbsentError
from .ours import ANY, CAUSAL, Attention, sequence

TOKENS = 32 * 1024
BARS = {"forward": 0.85, "backward": 0.70}
"""The least share of cuDNN's speed, at D 128, causal, 8K."""
SIDE = 8192
"""Rows and columns of the matrix product whose speed is the peak."""
FLUSH_BYTES = 512 * 2**20
PRODUCTS = {"forward": 2, "backward": 5, "both": 7, "delta": 0, "dkdv": 4, "dq": 3}
"""Matrix products of B·H·S·S·D: by convention for a pass, as computed for a kernel."""
AGREE = 0.02
"""The largest relative difference between our o and cuDNN's at the timed sizes."""


@dataclass(frozen=True)
class Shape:
    """A timed problem in bfloat16, with batch entries that make 32K tokens."""

    seq: int
    dim: int
    heads: int
    kv_heads: int
    causal: bool

    @property
    def batch(self) -> int:
        """Returns the number of batch entries."""
        return max(1, TOKENS // self.seq)

    @property
    def name(self) -> str:
        """Returns the problem in words, for tables."""
        mask = "causal" if self.causal else "full"
        return f"D{self.dim} {mask} {self.seq // 1024}K {self.heads}:{self.kv_heads}"

    @property
    def decides(self) -> bool:
        """Whether the bars apply to this shape."""
        return self.dim == 128 and self.causal and self.seq == 8192 and self.heads == self.kv_heads

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        """Returns the shape of query and output."""
        return (self.batch, self.seq, self.heads, self.dim)

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        """Returns the shape of key and value."""
        return (self.batch, self.seq, self.kv_heads, self.dim)

    def flop(self, which: str) -> float:
        """Returns 2·B·S²·H·D for each product, half of it if causal: forward 4·…, backward 10·…"""
        product = 2.0 * self.batch * self.seq**2 * self.heads * self.dim
        return PRODUCTS[which] * product / (2 if self.causal else 1)


def shapes() -> list[Shape]:
    """Returns all timed problems, the most important first."""
    found = [
        Shape(seq * 1024, dim, heads, kv_heads, causal)
        for seq in (8, 32, 4, 16, 2)
        for dim in (128, 64, 256)
        for heads, kv_heads in (((32, 32), (32, 8)) if dim < 256 else ((16, 16), (16, 4)))
        for causal in (True, False)
    ]
    grouped = [shape for shape in found if shape.heads != shape.kv_heads]
    # Grouped heads of D 128 come before other widths, grouped heads of other widths at the end.
    late = [shape for shape in grouped if shape.dim != 128]
    return [shape for shape in found if shape not in late] + late


def beside_jax() -> list[Shape]:
    """Returns the shapes for which jax.nn is timed too."""
    return [shape for shape in shapes() if shape.seq == 8192 and shape.heads == shape.kv_heads]


SHAPES = {shape.name: shape for shape in shapes()}


def matrix_peak() -> float:
    """Returns the TFLOP/s of a bfloat16 matrix product of 8192³ on random numbers."""
    import torch

    a, b = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    taken = milliseconds({"product": lambda: a @ b}, budget_s=2.0, most=50)["product"]
    return 2 * SIDE**3 / median(taken) / 1e9


def measure(name: str, which: str, launcher: Launcher, budget_s: float) -> dict[str, Any]:
    """Times a pass of one shape: milliseconds and TFLOP/s of every contender, in turns."""
    shape = SHAPES[name]
    arrays = _arrays(shape)
    programs, absent, notes = _peers(shape, which, arrays)
    row = _row(shape, which) | {"absent": absent, "notes": notes}
    ours = Attention(launcher, arrays, _empty, CAUSAL if shape.causal else ANY)
    kernels: dict[str, Callable[[], None]] = {}
    any_order = Attention(launcher, dict(arrays), _empty, CAUSAL if shape.causal else ANY)
    if which == "forward":
        programs["ours"] = ours.forward()
        row["differs"] = _difference(programs, ours)
    else:
        try:
            programs["any_order"] = any_order.all_grads()
        except AbsentError as reason:
            absent["any_order"] = str(reason)
        # delta comes first, because the other kernels read its results.
        kernels = {"delta": ours.make_delta()}
        kernels |= {"dkdv": ours.key_grads(), "dq": ours.query_grads()}
        programs["ours"] = sequence(*kernels.values())
    taken = milliseconds(programs, budget_s)
    row["contenders"] = {n: figures(times, shape.flop(which)) for n, times in taken.items()}
    taken = milliseconds(kernels, budget_s / 3)
    row["kernels"] = {n: figures(times, shape.flop(n)) for n, times in taken.items()}
    return row


def measure_beside_jax(name: str, launcher: Launcher, budget_s: float) -> dict[str, Any]:
    """Times forward, and forward with backward, of ours and of jax.nn by the wall clock.

    Our events can't enclose jax's calls. Several calls in a row hide the cost of calling.
    """
    shape = SHAPES[name]
    jax = peers.Jax(shape.q_shape, shape.kv_shape, shape.causal)
    ours = Attention(launcher, _arrays(shape), _empty, CAUSAL if shape.causal else ANY)
    forward = ours.forward()
    both = sequence(forward, ours.make_delta(), ours.key_grads(), ours.query_grads())
    row = _row(shape, "both") | {"jax": jax.version, "passes": {}}
    for which, mine, theirs in (("forward", forward, jax.forward), ("both", both, jax.both)):

        def run_ours(call: Callable[[], None] = mine) -> None:
            for _ in range(4):
                call()
            launcher.synchronize()

        def run_jax(call: Callable[[], Any] = theirs) -> None:
            jax.wait([call() for _ in range(4)][-1])

        taken = wall_milliseconds({"ours": run_ours, "jax": run_jax}, budget_s / 2)
        flop = shape.flop(which)
        row["passes"][which] = {
            n: figures([ms / 4 for ms in times], flop) for n, times in taken.items()
        }
    return row


def milliseconds(
    programs: dict[str, Callable[[], Any]], budget_s: float, least: int = 3, most: int = 15
) -> dict[str, list[float]]:
    """Returns the times of each program on the GPU, for as many rounds as the budget allows."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def one(program: Callable[[], Any]) -> float:
        # Runs longer than enqueuing the program takes, and leaves none of its data in the cache.
        flush.zero_()
        start.record()
        result = program()
        end.record()
        end.synchronize()
        del result
        return float(start.elapsed_time(end))

    for program in programs.values():
        one(program)  # the first call may compile, choose and allocate
    began = time.monotonic()
    for program in programs.values():
        one(program)
    rounds = _rounds(budget_s, time.monotonic() - began, least, most)
    taken: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            taken[name].append(one(program))
    return taken


def wall_milliseconds(
    programs: Mapping[str, Callable[[], float | None]],
    budget_s: float,
    least: int = 3,
    most: int = 10,
) -> dict[str, list[float]]:
    """Returns wall-clock times of programs that take turns and return when they are done.

    A program whose work is in another process returns the milliseconds that it took there.
    """

    def one(program: Callable[[], float | None]) -> float:
        began = time.perf_counter()
        told = program()
        return (time.perf_counter() - began) * 1e3 if told is None else told

    for program in programs.values():
        one(program)
    warm = sum(one(program) for program in programs.values()) / 1e3
    taken: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(_rounds(budget_s, warm, least, most)):
        for name, program in programs.items():
            taken[name].append(one(program))
    return taken


def _rounds(budget_s: float, round_s: float, least: int, most: int) -> int:
    return max(least, min(most, int(budget_s / max(round_s, 1e-6))))


def _arrays(shape: Shape) -> dict[str, Any]:
    """Returns inputs for every kernel; o and lse are near the results of random numbers.

    The scores of random numbers are normal, so lse is about log(visible keys) + ½. Gradients then
    have the right range, and no kernel's time depends on another kernel's result.
    """
    import torch

    def random(size: tuple[int, ...]) -> Any:
        return torch.randn(size, device="cuda", dtype=torch.bfloat16)

    arrays = {"q": random(shape.q_shape), "dout": random(shape.q_shape)}
    arrays |= {"k": random(shape.kv_shape), "v": random(shape.kv_shape)}
    seen = torch.full((shape.seq,), float(shape.seq), device="cuda")
    if shape.causal:
        seen = torch.arange(1, shape.seq + 1, device="cuda").float()
    lse = (seen.log() + 0.5)[None, :, None].expand(shape.q_shape[:3]).contiguous()
    o = random(shape.q_shape) * seen.rsqrt()[None, :, None, None].bfloat16()
    return arrays | {"o": o, "lse": lse}


def _empty(name: str, size: tuple[int, ...], dtype: Any) -> Any:
    import torch

    return torch.empty(size, device="cuda", dtype=dtype)


def _peers(
    shape: Shape, which: str, arrays: dict[str, Any]
) -> tuple[dict[str, Callable[[], Any]], dict[str, str], list[str]]:
    """Returns torch's program for each backend, reasons for absent backends, and notes."""
    programs: dict[str, Callable[[], Any]] = {}
    absent, notes = {}, []
    for name in peers.BACKENDS:
        try:
            peer = peers.Torch(name, arrays["q"], arrays["k"], arrays["v"], shape.causal)
            backward = which == "backward"
            programs[name] = peer.backward(arrays["dout"]) if backward else peer.forward
        except AbsentError as reason:
            absent[name] = str(reason)
            continue
        if peer.repeated:
            notes.append(f"{name} has key and value repeated beforehand, which is not timed")
    return programs, absent, notes


def _difference(programs: dict[str, Callable[[], Any]], ours: Attention) -> float | None:
    """Returns the difference between our o and cuDNN's, relative in the norm."""
    if "cudnn" not in programs:
        return None
    programs["ours"]()
    theirs = programs["cudnn"]().detach().transpose(1, 2).float()
    return float((ours.arrays["o"].float() - theirs).norm() / theirs.norm())


def _row(shape: Shape, which: str) -> dict[str, Any]:
    fields = {"seq": shape.seq, "dim": shape.dim, "heads": shape.heads, "causal": shape.causal}
    fields |= {"kv_heads": shape.kv_heads, "batch": shape.batch}
    return {"shape": shape.name, "pass": which, **fields}


def figures(times: list[float], flop: float) -> dict[str, float]:
    """Returns the median, the interquartile range relative to it, and the speed."""
    middle = median(times)
    low, _, high = quantiles(times, n=4)
    return {"ms": middle, "spread": (high - low) / middle, "tflops": flop / middle / 1e9}


def bar_of(row: dict[str, Any]) -> tuple[float, float] | None:
    """Returns the bar of a row and our share of cuDNN's speed; None for a row without a bar."""
    times = row["contenders"]
    if not SHAPES[row["shape"]].decides or not {"ours", "cudnn"} <= times.keys():
        return None
    return BARS[row["pass"]], times["cudnn"]["ms"] / times["ours"]["ms"]
