"""Times the virtual ring against one launch, masks against a window, and layers against cuDNN."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import burst_attention as ba
import cases
import jax
import jax.numpy as jnp
from gpu.library import AbsentError
from gpu.speed import AGREE, figures, wall_milliseconds
from jax.sharding import NamedSharding

from . import ours, virtual
from .problem import Problem

BARS = {"forward": 1.12, "forward + backward": 1.08}
"""The largest ratio of the virtual ring's time to that of one launch."""
WINDOW = "window-1k"
"""Name of a shared case."""
PRUNED = 3.0
"""The largest ratio of a window's share of the causal mask's time to its share of the pairs."""
WORLD_SIZE = 8
SECONDS = 2.5
"""Seconds for the rounds of one row, about."""
SAMPLE_MS = 40.0
ROOMY = 60e9
"""Bytes of a device that holds 32 heads of 64K tokens twice, with gradients."""


ONE = "one launch"
CONTENDERS = {
    "ring": ("virtual ring", ONE),
    "window": ("with the window", "whole causal mask"),
    "layer": ("ours", "cuDNN"),
}


@dataclass(frozen=True)
class Item:
    """A row: the cost of the ring, its time with a window, or a whole layer."""

    problem: Problem
    kind: str
    which: str

    @property
    def name(self) -> str:
        """Returns the item in words, for tables."""
        p = self.problem
        local = p.seq // p.world_size
        length = f"{local // 1024}K" if local >= 1024 else str(local)
        what = f"layer {p.batch}" if self.kind == "layer" else str(p.world_size)
        what += f" × {length}" + (f", window {p.window[0]}," if p.window else "")
        return f"{what} {p.heads}:{p.kv_heads} D{p.head_dim}, {self.which}"

    @property
    def contenders(self) -> tuple[str, str]:
        """Returns the names of both programs."""
        return CONTENDERS[self.kind]

    @property
    def judge(self) -> str:
        """Returns the name of the program whose results are the reference."""
        return self.contenders[1] if self.kind == "layer" else ONE

    @property
    def bar(self) -> float:
        """Returns the largest ratio of the first time to the second, if the second is no peer."""
        if self.kind == "ring":
            return BARS[self.which]
        whole = replace(self.problem, window=None)
        return PRUNED * self.problem.pairs / whole.pairs

    @property
    def flop(self) -> float:
        """Returns the FLOPs: 4·B·H·D for each pair forward, and 2.5 times as many backward."""
        p = self.problem
        forward = 4.0 * p.batch * p.pairs * p.heads * p.head_dim
        return forward * (1.0 if self.which == "forward" else 3.5)


class Speed:
    """The timed items; items of the ring come first."""

    def names(self, rehearse: bool) -> list[str]:
        """Returns the names of the items."""
        return list(_items(rehearse))

    def measure(self, name: str, rehearse: bool) -> dict[str, Any]:
        """Returns the medians of both contenders, which take turns."""
        item = _items(rehearse)[name]
        contenders = {"ring": _ring, "window": _window, "layer": _layer}[item.kind]
        try:
            return _measure(item, *contenders(item, rehearse), rehearse)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                raise AbsentError(f"not enough memory: {str(error)[:120]}") from error
            raise


def heads(rehearse: bool) -> tuple[int, int]:
    """Returns the query heads, and the key/value heads of grouped problems."""
    if rehearse:
        return 2, 1
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    return (32, 8) if limit >= ROOMY else (8, 2)


def _items(rehearse: bool) -> dict[str, Item]:
    many, few = heads(rehearse)
    unit = 16 if rehearse else 4096
    rings = [
        Problem("", 1, WORLD_SIZE * local, many, kv, 128, world_size=WORLD_SIZE, with_dlse=False)
        for local in (unit, 2 * unit)
        for kv in (many, few)
    ]
    layers = [Problem("", 4, 2 * unit, many, kv, 128, with_dlse=False) for kv in (many, few)]
    if rehearse:
        rings, layers = rings[1:2], layers[1:]
    found = [Item(p, "ring", which) for p in rings for which in BARS]
    found += [Item(_windowed(rehearse), "window", which) for which in BARS]
    found += [Item(p, "layer", which) for p in layers for which in BARS]
    return {item.name: item for item in found}


def _windowed(rehearse: bool) -> Problem:
    """Returns the shared case, with enough heads to occupy a GPU."""
    case = cases.find(WINDOW)
    assert case.window
    many, few = heads(rehearse)
    seq = 16 * WORLD_SIZE if rehearse else case.seq
    window = (case.window[0] * seq // case.seq, 0)
    return Problem(
        "",
        *(1, seq, many, few, 128),
        layout="contiguous",
        world_size=case.mesh[1],
        with_dlse=False,
        window=window,
    )


Program = Callable[[], Any]


def _ring(item: Item, rehearse: bool) -> tuple[Program, Program, Any]:
    """Returns the virtual ring, one launch of the same work, and their results' differences."""
    problem, calls = item.problem, virtual.ring(rehearse)
    inputs = _inputs(problem)
    with jax.default_device(jax.local_devices()[0]):
        cut = jax.jit(lambda xs: [virtual.stacked(problem, x) for x in xs])(inputs)
    mesh = ours.line(1)
    whole = [jax.device_put(x, NamedSharding(mesh, ours.SPEC)) for x in inputs]
    one = problem.on_one_rank()
    if item.which == "forward":
        ring_pass = jax.jit(functools.partial(calls.forward, problem))
        one_pass = jax.jit(_attend(one, mesh))
        cut, whole = cut[:3], whole[:3]
    else:
        ring_pass, one_pass = virtual.passes(problem, calls), ours.passes(one, mesh)

    def apart() -> list[float]:
        pairs = zip(ring_pass(*cut), one_pass(*whole), strict=True)
        return [float(_apart(virtual.unstacked(problem, x), y)) for x, y in pairs]

    return lambda: ring_pass(*cut), lambda: one_pass(*whole), apart


def _window(item: Item, rehearse: bool) -> tuple[Program, Program, Any]:
    """Returns the virtual ring with and without the window, and the differences to one launch."""
    mine, _, apart = _ring(item, rehearse)
    whole = replace(item, problem=replace(item.problem, window=None))
    other, _, _ = _ring(whole, rehearse)
    return mine, other, apart


def _attend(problem: Problem, mesh: Any) -> Callable[..., Any]:
    local = functools.partial(
        ba.attention,
        axis_name=ours.AXIS,
        is_causal=problem.is_causal,
        local_window_size=problem.window,
        layout=problem.layout,
        return_residual=True,
    )
    specs = (ours.SPEC,) * 3
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[:2])


def _layer(item: Item, rehearse: bool) -> tuple[Program, Program, Any]:
    """Returns our function on global arrays, jax.nn's by cuDNN, and their differences."""
    mesh = ours.line(1)
    *qkv, dout, _ = (
        jax.device_put(x, NamedSharding(mesh, ours.SPEC)) for x in _inputs(item.problem)
    )
    mine = functools.partial(
        ba.dot_product_attention, mesh=mesh, spec=ours.SPEC, is_causal=True, layout="zigzag"
    )
    theirs = functools.partial(
        jax.nn.dot_product_attention,
        is_causal=True,
        implementation="xla" if rehearse else "cudnn",
    )

    def program(attend: Callable[..., jax.Array]) -> Callable[[], Any]:
        def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
            o, pullback = jax.vjp(attend, q, k, v)
            return o, *pullback(dout)

        if item.which == "forward":
            forward = jax.jit(lambda q, k, v: (attend(q, k, v),))
            return lambda: forward(*qkv)
        jitted = jax.jit(both)
        return lambda: jitted(*qkv, dout)

    ours_, peer = program(mine), program(theirs)
    try:
        jax.block_until_ready(peer())
    except Exception as error:  # any type of error: a peer may fail
        raise AbsentError(f"jax.nn can't: {error}"[:300]) from error
    return ours_, peer, lambda: [float(_apart(x, y)) for x, y in zip(ours_(), peer(), strict=True)]


def _measure(item: Item, mine: Program, other: Program, apart: Any, rehearse: bool) -> Any:
    names = item.contenders
    differs = apart()
    wrong = [
        f"result {index} differs from that of {item.judge} by {x:.1e}, expected at most {AGREE}"
        for index, x in enumerate(differs)
        if not x <= AGREE
    ]
    once = wall_milliseconds(
        {n: _waited(p, 1) for n, p in zip(names, (mine, other), strict=True)}, 0
    )
    fastest = min(median(times) for times in once.values())
    repeat = 2 if rehearse else max(2, min(50, int(SAMPLE_MS / fastest) + 1))
    programs = {n: _waited(p, repeat) for n, p in zip(names, (mine, other), strict=True)}
    taken = wall_milliseconds(programs, 0.0 if rehearse else SECONDS)
    contenders = {
        n: figures([ms / repeat for ms in times], item.flop) for n, times in taken.items()
    }
    first, second = (contenders[n] for n in names)
    row: dict[str, Any] = {
        "name": item.name,
        "kind": item.kind,
        "which": item.which,
        "contenders": contenders,
    }
    if item.kind != "layer":
        ratio, bar = first["ms"] / second["ms"], item.bar
        verdict = f"{ratio:.3f} × {names[1]}, bar {bar:.2f}"
        if not ratio <= bar and not rehearse:
            wrong.append(f"{ratio:.3f} × {names[1]}, expected at most {bar:.2f}")
        row |= {"ratio": ratio, "bar": bar}
    else:
        ratio = second["ms"] / first["ms"]
        verdict = f"{ratio:.2f} × its speed" + (" (XLA stands in)" if rehearse else "")
        row |= {"ratio": ratio}
    shown = (
        f"{first['tflops']:.0f} TFLOP/s  {first['ms']:.2f} ms (spread {first['spread']:.1%}), "
        f"{names[1]} {second['ms']:.2f} ms: {verdict}"
    )
    return row | {"differs": differs, "repeat": repeat, "shown": shown, "wrong": wrong}


def _waited(program: Program, repeat: int) -> Callable[[], None]:
    """Returns several calls in a row, which hide the cost of calling."""

    def run() -> None:
        result = None
        for _ in range(repeat):
            result = program()
        jax.block_until_ready(result)

    return run


def _inputs(problem: Problem) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (problem.q_shape, problem.kv_shape, problem.kv_shape, problem.q_shape)
    arrays = [jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)]
    return [*arrays, jnp.zeros(problem.q_shape[:3], jnp.float32)]


@jax.jit
def _apart(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the relative difference, in the norm."""
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.linalg.norm((x - y).ravel()) / jnp.linalg.norm(y.ravel())
