"""Checks our kernels against float64 on small problems, and cuDNN on the same inputs.

Each kernel gets exact inputs, so a wrong kernel does not spoil the results of another kernel.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import peers, reference
from .driver import Launcher
from .memory import Arrays, unwritten
from .ours import ANY, CAUSAL, LEAST, Attention, Band, cast_request
from .reference import relative

BAR = 1.5
"""The largest ratio of our relative error to cuDNN's."""
ALONE = 1.0
"""The largest error without a figure of cuDNN, in units of the type's rounding error."""
UNITS = {"bf16": 2.0**-8, "f16": 2.0**-11}
ROUNDED_ONCE = 0.6
"""The largest error of a rounded result, in units: nearest gives 0.42, truncation 0.83."""
FLOAT32 = 1e-5
"""The largest relative error of float32 results; absolute for lse."""


RESULTS = {
    "forward": ("o", "lse"),
    "key_grads": ("dk", "dv"),
    "query_grads": ("dq",),
    "all_grads": ("dk", "dv", "dq"),
}
"""Results of each kernel. `all_grads` names three launches: delta, the fused kernel, dq's cast."""
INPUTS = {
    "forward": (),
    "key_grads": ("dout", "lse_log2", "delta"),
    "query_grads": ("dout", "lse_log2", "delta"),
    "all_grads": ("dout", "o", "lse", "dlse"),
}
"""Inputs of each kernel besides q, k, v and segments."""
PASSES = ("forward", "delta", "key_grads", "query_grads")
WITH_FUSED = (*PASSES, "all_grads")
IN_ANY_ORDER = ("all_grads", "dq")
"""The kernel and its result whose sums have no fixed order."""


@dataclass(frozen=True)
class Case:
    """A small problem; `band` limits key row − query row."""

    name: str
    element: str = "bf16"
    batch: int = 2
    q_len: int = 512
    kv_len: int = 512
    heads: int = 4
    kv_heads: int = 4
    dim: int = 128
    band: Band = ANY
    steps: int = 1
    dlse: bool = False
    segments: bool = False
    soft_cap: float = 0.0
    kernels: tuple[str, ...] = PASSES

    @property
    def width(self) -> int:
        """Returns the width of the tile to which the columns are padded."""
        return next(width for width in (64, 128, 256) if self.dim <= width)

    @property
    def plain(self) -> bool:
        """Whether torch's attention can compute the problem."""
        square = self.q_len == self.kv_len
        masked = self.band != ANY and not (self.band == CAUSAL and square)
        return not (masked or self.dlse or self.segments or self.soft_cap)


def _cases() -> list[Case]:
    masks = (("causal", CAUSAL), ("full", ANY))
    common = [
        Case(
            f"{element} D{dim} {name}",
            element,
            dim=dim,
            band=band,
            kernels=WITH_FUSED if dim < 256 else PASSES,
        )
        for element in ("bf16", "f16")
        for dim in (128, 64, 256)
        for name, band in masks
    ]
    special = [
        Case("padded head dimension 96", dim=96, band=CAUSAL),
        Case("padded head dimension 40", dim=40, q_len=200, kv_len=200),
        Case("grouped heads 8:2", heads=8, kv_heads=2, band=CAUSAL, kernels=WITH_FUSED),
        Case("ragged lengths", q_len=333, kv_len=333, band=CAUSAL, kernels=WITH_FUSED),
        Case("other lengths", q_len=70, kv_len=1001, dim=64),
        Case("one row", q_len=1, kv_len=77),
        Case("window", band=(-100, 30)),
        Case("window D256 f16", element="f16", dim=256, band=(-64, 0)),
        Case("ring step, empty rows", q_len=300, kv_len=260, band=(-170, -60)),
        Case("ring step, D64", dim=64, heads=4, kv_heads=2, band=(LEAST, -200)),
        Case("nothing is seen", q_len=200, kv_len=200, band=(LEAST, -1000)),
        Case("three steps", band=CAUSAL, steps=3),
        Case("three steps, ragged", q_len=333, kv_len=401, heads=8, kv_heads=2, steps=3),
        Case("three steps, D256 f16", element="f16", dim=256, band=(-200, 50), steps=3),
        Case("lse has a gradient", band=CAUSAL, dlse=True, kernels=WITH_FUSED),
        Case("segments", band=CAUSAL, segments=True, kernels=WITH_FUSED),
        Case("segments, steps, D64", dim=64, segments=True, soft_cap=20.0, steps=3),
        Case("soft cap", segments=True, soft_cap=5.0, band=CAUSAL),
        Case("2K", batch=1, q_len=2048, kv_len=2048, heads=2, kv_heads=1, band=CAUSAL),
    ]
    sums = [
        Case(f"sum of two, {element} D{dim}", element, dim=dim, q_len=333, kernels=("cast",))
        for element, dim in (("bf16", 128), ("f16", 64), ("bf16", 96), ("bf16", 256))
    ]
    return common[:6] + sums + special + common[6:]


CASES = {case.name: case for case in _cases()}
QUICK = ("bf16 D128 causal", "bf16 D64 full", "three steps", "sum of two, bf16 D128")


def check(name: str, kernel: str, launcher: Launcher, device: str) -> dict[str, Any]:
    """Returns the errors of a kernel and of cuDNN, relative in the norm, and all faults."""
    case = CASES[name]
    measure = {"delta": _delta, "cast": _cast}.get(kernel, _attention)
    arrays = Arrays(device)
    given, run, wanted = measure(case, kernel, launcher, arrays)
    before = {key: array.clone() for key, array in given.items()}
    first = _outcome(run, launcher, wanted)
    again = _outcome(run, launcher, wanted)
    limits = _limits(case, kernel, wanted, device)
    errors = {key: _error(key, got, wanted[key][1]) for key, got in first.items()}
    return {
        "case": name,
        "kernel": kernel,
        "errors": errors,
        "limits": limits,
        "cudnn": {k: e for k, e in _peer(case, device).items() if k in errors},
        "wrong": [
            *(
                f"{key}: error {error:.1e}, expected at most {limits[key]:.1e}"
                for key, error in errors.items()
                if not error <= limits[key]
            ),
            *(
                f"{key}: {count} elements never written"
                for key, (array, _) in wanted.items()
                if (count := unwritten(array))
            ),
            *(
                f"{key}: differs between two runs"
                for key in first
                if (kernel, key) != IN_ANY_ORDER and not _same(first[key], again[key])
            ),
            *(f"{key}: wrote outside the array" for key in arrays.overrun()),
            *(
                f"{key}: changed, although it is an input"
                for key in given
                if not _same(given[key], before[key])
            ),
        ],
    }


Measured = tuple[dict[str, Any], Callable[[], None], dict[str, tuple[Any, Any]]]
"""Inputs, the function that launches the kernel, and by name our and the exact result."""


def _attention(case: Case, kernel: str, launcher: Launcher, arrays: Arrays) -> Measured:
    problem, exact = _problem(case, arrays.device)
    names = ["q", "k", "v", "q_segments", "kv_segments"]
    names += INPUTS[kernel]
    given = {name: _placed(arrays, name, problem[name]) for name in names if name in problem}
    ours = Attention(launcher, dict(given), arrays.empty, case.band, case.soft_cap)
    run = {"forward": ours.forward, "key_grads": ours.key_grads, "query_grads": ours.query_grads}
    enqueue = ours.all_grads() if kernel == "all_grads" else run[kernel](case.steps)
    return given, enqueue, {n: (ours.arrays[n], exact[n]) for n in RESULTS[kernel]}


def _delta(case: Case, kernel: str, launcher: Launcher, arrays: Arrays) -> Measured:
    problem, _ = _problem(case, arrays.device)
    names = ("q", "o", "dout", "lse", "dlse")
    given = {name: arrays.holding(name, problem[name]) for name in names if name in problem}
    ours = Attention(launcher, dict(given), arrays.empty)
    enqueue = ours.make_delta()
    q_len = case.q_len
    wanted = reference.statistics(given)
    return given, enqueue, {n: (ours.arrays[n][:, :, :q_len], x) for n, x in wanted.items()}


def _cast(case: Case, kernel: str, launcher: Launcher, arrays: Arrays) -> Measured:
    import torch

    random = _random(arrays.device)
    shape = (case.batch, case.q_len, case.heads, case.dim)
    given = {name: arrays.holding(name, random(shape, torch.float32)) for name in ("a", "b")}
    both, one = (arrays.empty(n, shape, _dtype(case)) for n in ("a + b", "a alone"))
    summed = launcher.prepare(cast_request(given["a"], given["b"], both))
    cast = launcher.prepare(cast_request(given["a"], None, one))
    a, b = given["a"].double(), given["b"].double()

    def enqueue() -> None:
        summed()
        cast()

    return given, enqueue, {"a + b": (both, a + b), "a alone": (one, a)}


def _placed(arrays: Arrays, name: str, values: Any) -> Any:
    if name not in ("lse_log2", "delta"):
        return arrays.holding(name, values)
    batch, heads, length = values.shape
    array = arrays.empty(name, (batch, heads, -(-length // 4) * 4), values.dtype)[:, :, :length]
    return array.copy_(values)


def _outcome(run: Callable[[], None], launcher: Launcher, wanted: dict[str, Any]) -> dict[str, Any]:
    run()
    launcher.synchronize()
    return {name: array.clone() for name, (array, _) in wanted.items()}


def _error(name: str, got: Any, wanted: Any) -> float:
    if name == "lse_log2":  # huge values would hide the error of the rest
        empty = wanted == reference.HUGE
        if not bool((got[empty] > reference.HUGE / 2).all()):
            return float("inf")
        return relative(got[~empty], wanted[~empty])
    if name != "lse":
        return relative(got, wanted)
    finite = wanted.isfinite()
    if not bool((got[~finite] == wanted[~finite]).all()):
        return float("inf")
    off = (got.double() - wanted)[finite].abs()
    return float(off.max()) if off.numel() else 0.0


def _limits(case: Case, kernel: str, wanted: dict[str, Any], device: str) -> dict[str, float]:
    if kernel == "cast":
        return dict.fromkeys(wanted, ROUNDED_ONCE * UNITS[case.element])
    peer = _peer(case, device)
    limits = dict.fromkeys(wanted, ALONE * UNITS[case.element])
    limits |= {name: BAR * error for name, error in peer.items() if name in wanted}
    limits |= {name: FLOAT32 for name in wanted if name in ("lse", "lse_log2", "delta")}
    return limits


@functools.lru_cache(maxsize=1)
def _problem(case: Case, device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the inputs of all kernels, exact but for rounding, and the exact results."""
    import torch

    random, dtype = _random(device), _dtype(case)
    q_shape = (case.batch, case.q_len, case.heads, case.dim)
    kv_shape = (case.batch, case.kv_len, case.kv_heads, case.dim)
    arrays = {"q": random(q_shape, dtype), "dout": random(q_shape, dtype)}
    arrays |= {"k": random(kv_shape, dtype), "v": random(kv_shape, dtype)}
    if case.dlse:
        arrays["dlse"] = random(q_shape[:3], torch.float32)
    if case.segments:
        for name, length in (("q_segments", case.q_len), ("kv_segments", case.kv_len)):
            # Three segments, whose lengths depend on the batch entry. The last rows have none, nor
            # have some rows within the third, so that a thread has rows with and without one.
            place = torch.arange(length, device=device)
            row = place * 7 // (2 * length)
            row = torch.where((row == 2) & (place % 40 < 8), 3, row)
            entries = [torch.where(row < 3, (row + n) // (n + 1), -1) for n in range(case.batch)]
            arrays[name] = torch.stack(entries).int()
    exact = reference.exact(arrays, case.band, case.soft_cap)
    arrays |= {"o": exact["o"].to(dtype), "lse": exact["lse"].float()}
    arrays |= {name: x.float() for name, x in reference.statistics(arrays).items()}
    return arrays, exact


@functools.lru_cache(maxsize=1)
def _peer(case: Case, device: str) -> dict[str, float]:
    """Returns cuDNN's errors, for the results that it can compute."""
    if device != "cuda" or not case.plain or case.kernels == ("cast",):
        return {}
    arrays, exact = _problem(case, device)
    got = peers.results("cudnn", arrays, causal=case.band == CAUSAL)
    errors = {name: relative(x, exact[name]) for name, x in got.items()}
    # A wrong peer is no measure. The bar is then the same as without a peer.
    return {name: error for name, error in errors.items() if error < 8 * UNITS[case.element]}


def _same(a: Any, b: Any) -> bool:
    import torch

    bits = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return bool(torch.equal(a.contiguous().view(bits), b.contiguous().view(bits)))


def _dtype(case: Case) -> Any:
    import torch

    return {"bf16": torch.bfloat16, "f16": torch.float16}[case.element]


def _random(device: str) -> Callable[[tuple[int, ...], Any], Any]:
    import torch

    generator = torch.Generator(device=device).manual_seed(1)
    return lambda shape, dtype: torch.randn(shape, device=device, generator=generator).to(dtype)
