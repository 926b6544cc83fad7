"""``schedule="auto"``: which schedule takes least time, and why."""

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NotRequired, TypedDict, cast

import jax

from burst_attention import _checks, _ffi
from burst_attention._attention.links import MOST_DEVICES, Links, device_count
from burst_attention._attention.options import (
    BACKWARDS,
    NO_LIMIT,
    SCHEDULES,
    Backward,
    Options,
    Schedule,
    Window,
    check_options,
)
from burst_attention._checks import HEAD_DIM_MULTIPLE
from burst_attention._types import ArrayType, Axes, Layout

PLATFORMS = ("cpu", "cuda")


@dataclass(frozen=True)
class ScheduleCandidate:
    """The predicted figures of a schedule, for forward and backward pass together."""

    schedule: str
    """The schedule as `attention` takes it; over two axes ``ring`` is a double ring."""
    impossible: str | None = None
    """Why the schedule can't be had. Then all further fields are None."""
    seconds: float | None = None
    exposed: float | None = None
    """How many seconds the device that waits longest waits for messages."""
    bytes_within: int | None = None
    """Bytes that all devices send within nodes."""
    bytes_between: int | None = None
    """Bytes that all devices send between nodes."""
    backward: str | None = None
    """What travels in the backward pass: ``keys``, ``queries``, or ``heads`` alone."""
    estimated: bool | None = None
    """Whether the figures follow from smaller worlds: simulating a large one takes seconds."""


@dataclass(frozen=True)
class ScheduleChoice:
    """The schedule that ``schedule="auto"`` takes, and why. As a string: a table."""

    schedule: str
    """The schedule as `attention` takes it; over two axes ``ring`` is a double ring."""
    backward: str
    """What travels in the backward pass; without a prediction the value that was asked for."""
    reason: str
    candidates: tuple[ScheduleCandidate, ...] = ()
    """All schedules that were compared; none without a prediction."""
    machine: str = ""
    """The figures that the predictions rest on."""

    def __str__(self) -> str:
        head = ("schedule", "ms", "exposed ms", "MB in nodes", "MB between", "back")
        rows = [_row(candidate) for candidate in self.candidates if not candidate.impossible]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        shown = [
            f"{row[0]:{widths[0]}}  "
            + "  ".join(f"{x:>{width}}" for x, width in zip(row[1:], widths[1:], strict=True))
            for row in (head, *rows)
        ]
        impossible = [f"{c.schedule}: {c.impossible}" for c in self.candidates if c.impossible]
        table = [*shown, *impossible, self.machine] if self.candidates else []
        return "\n".join([f"{self.schedule}: {self.reason}", *table])


def _row(candidate: ScheduleCandidate) -> tuple[str, ...]:
    seconds, exposed = candidate.seconds or 0.0, candidate.exposed or 0.0
    sent = (candidate.bytes_within or 0, candidate.bytes_between or 0)
    return (
        candidate.schedule,
        f"{'≈' if candidate.estimated else ''}{1e3 * seconds:.3f}",
        f"{1e3 * exposed:.3f}",
        *(f"{size / 1e6:,.1f}" for size in sent),
        str(candidate.backward),
    )


class _Sent(TypedDict):
    within: int
    between: int


class _Candidate(TypedDict):
    schedule: str
    impossible: NotRequired[str]
    seconds: NotRequired[float]
    exposed: NotRequired[float]
    sent: NotRequired[_Sent]
    backward: NotRequired[str]
    estimated: NotRequired[bool]


class _Machine(TypedDict):
    title: str
    sources: dict[str, str]


class _Answer(TypedDict):
    """What the library answers."""

    schedule: str
    reason: str
    candidates: list[_Candidate]
    machine: _Machine


def choose_schedule(
    query: ArrayType,
    key: ArrayType,
    value: ArrayType,
    *,
    axis_sizes: int | tuple[int, int],
    is_causal: bool = False,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    layout: Layout = "contiguous",
    backward: Backward = "auto",
    links: Links | None = None,
    platform: str = "cuda",
) -> ScheduleChoice:
    """Returns the schedule that ``schedule="auto"`` of `attention` takes, and why.

    The prediction is the time of forward and backward pass together. A schedule that takes up to 3%
    longer than the fastest one counts as equal, and of equal schedules ``auto`` takes the ring. On
    CPU devices, where nothing travels, it takes the ring unless ``links`` are given. The rates are
    those of the library's own kernels, also where cuDNN would compute.

    Args:
      query: one device's shard, or a ``jax.ShapeDtypeStruct`` of the shard.
      key: one device's shard, or a ``jax.ShapeDtypeStruct`` of the shard.
      value: one device's shard, or a ``jax.ShapeDtypeStruct`` of the shard.
      axis_sizes: number of devices along the axis of the sequence, or (outer, inner) for a pair of
        axes; at most 4,096 in all.
      is_causal: as in `attention`.
      local_window_size: as in `attention`.
      layout: as in `attention`.
      backward: as in `attention`.
      links: what the mesh is made of; default: H200s.
      platform: platform of the devices, ``cuda`` or ``cpu``.

    Returns:
      A `ScheduleChoice`.

    Raises:
      ValueError, TypeError: with the way out.
    """
    q, k, v = map(_as_computed, _checks.array_types(query, key, value, any_head_dim=True))
    platform = _checks.choice("platform", platform, PLATFORMS)
    given = {
        "is_causal": is_causal,
        "local_window_size": local_window_size,
        "layout": layout,
        "backward": backward,
        "links": links,
    }
    options = check_options("choose_schedule", given)
    for name, x in (("query", query), ("key", key)):
        _checks.shard_length(name, x.shape[1], options.layout)
    sizes = _ring_sizes(axis_sizes)
    window = options.window(math.prod(sizes) * max(query.shape[1], key.shape[1]))
    return _choose(options, (q, k, v), sizes, platform, window)


def _as_computed(x: ArrayType) -> ArrayType:
    """Returns the type of an array with the head dimension that kernels compute."""
    head_dim = -(-x.shape[3] // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE
    return jax.ShapeDtypeStruct((*x.shape[:3], head_dim), x.dtype)


def resolved(
    options: Options,
    qkv: tuple[ArrayType, ArrayType, ArrayType],
    sizes: tuple[int, ...],
    implementation: str | None,
    window: Window,
) -> Schedule:
    """Returns the schedule of a call, with a name in place of ``auto``."""
    if options.schedule != "auto":
        return options.schedule
    if implementation == "xla":
        return "ring"
    found = _choose(options, qkv, sizes, implementation, window).schedule
    return _checks.choice("schedule", found, SCHEDULES)


def travelling(problem: dict[str, object], links: Links | None, node: int | None) -> Backward:
    """Returns what travels in the backward ring of a call whose gradients cuDNN may compute.

    With as many key as query heads, queries and their sums are a third less bytes than keys and
    theirs. But where queries travel, the library's own kernels compute. So the simulator predicts
    both rings, on H200s unless ``links`` say otherwise, and the faster one is taken. The prediction
    depends on static facts alone: all ranks choose alike. Where cuDNN computes no gradient, bytes
    decide.

    Args:
      problem: the call, as ``ffi/src/travels.rs`` reads it.
      links: what the mesh is made of.
      node: how many neighbours on the ring form a node, None for the machine's number.
    """
    machine = _machine(links or Links(), ()) | {"name": "h200-400g-cudnn"}
    if node is not None:
        machine["ranks_per_node"] = node
    request = problem | {"ask": "travels", "machine": machine}
    return _checks.choice("backward", _travelling(json.dumps(request)), BACKWARDS)


@lru_cache(maxsize=1024)
def _travelling(request: str) -> str:
    return str(_ffi.ask(request)["travels"])


def library_name(schedule: Schedule, axes: Axes) -> str:
    """Returns the library's name of a schedule over axes of the sequence; ``ring`` without axes."""
    if not axes:
        return "ring"
    if schedule == "hybrid" and len(axes) == 1:
        raise ValueError(
            "schedule='hybrid' needs a pair axis_name=(outer, inner): heads are scattered over the "
            f"inner axis, and rings go along the outer one, got {axes[0]!r}; over one axis use "
            "'ulysses' or 'ring'"
        )
    if schedule in ("auto", "ring"):
        return "ring" if len(axes) == 1 else "double_ring"
    return schedule


def _choose(
    options: Options,
    qkv: tuple[ArrayType, ArrayType, ArrayType],
    sizes: tuple[int, ...],
    platform: str | None,
    window: Window,
) -> ScheduleChoice:
    query, key, value = qkv
    world_size, is_empty = math.prod(sizes), 0 in (*query.shape, *key.shape)
    if known := _known_reason(world_size, is_empty, platform, options.links):
        return ScheduleChoice("ring", options.backward, known)
    left, right = (None if side == NO_LIMIT else side for side in window)
    request = _ffi.shapes(query, key, value) | {
        "ask": "choose",
        "world_size": world_size,
        "inner": sizes[1] if len(sizes) == 2 else None,
        "layout": options.layout,
        "backward": options.backward,
        "window": {"left": left, "right": right},
        "softmax_scale": 1.0,
        "machine": _machine(options.links or Links(), sizes),
        "refused": _refused(len(sizes)),
    }
    return _predicted(json.dumps(request))


def _known_reason(
    world_size: int, is_empty: bool, platform: str | None, links: Links | None
) -> str | None:
    """Returns why the choice is the ring without a prediction, or None."""
    if world_size == 1:
        return "there is one device"
    if is_empty:
        return "there is nothing to compute"
    if platform == "cpu" and links is None:
        return "devices of a CPU share its cores and memory, so nothing travels"
    if platform is None and links is None:
        return "the mesh does not tell while tracing what its devices are"
    return None


@lru_cache(maxsize=1024)
def _predicted(request: str) -> ScheduleChoice:
    found = cast(_Answer, _ffi.ask(request))
    candidates = tuple(map(_candidate, found["candidates"]))
    machine, schedule = found["machine"], found["schedule"]
    sources = "; ".join(f"{name}: {source}" for name, source in machine["sources"].items())
    backward = next(each.backward for each in candidates if each.schedule == schedule)
    return ScheduleChoice(
        schedule=schedule,
        backward=str(backward),
        reason=found["reason"],
        candidates=candidates,
        machine=f"on {machine['title']}; {sources}",
    )


def _candidate(found: _Candidate) -> ScheduleCandidate:
    sent = found.get("sent")
    return ScheduleCandidate(
        found["schedule"],
        impossible=found.get("impossible"),
        seconds=found.get("seconds"),
        exposed=found.get("exposed"),
        bytes_within=sent and sent["within"],
        bytes_between=sent and sent["between"],
        backward=found.get("backward"),
        estimated=found.get("estimated"),
    )


def _machine(links: Links, sizes: tuple[int, ...]) -> dict[str, object]:
    count = sizes[1] if len(sizes) == 2 else links.devices_per_node
    return {
        "ranks_per_node": None if count is None else int(count),
        "shared": links.shared_link,
        "tflops": [links.tflops_forward, links.tflops_backward],
        "link_gbps": [links.inner_gbps, links.outer_gbps],
        "latency_us": [links.inner_latency_us, links.outer_latency_us],
        "launch_us": links.launch_us,
    }


def _refused(axes: int) -> dict[str, str]:
    """Returns the schedules that can't be had over a number of axes, and why."""
    refused: dict[str, str] = {}
    for name in SCHEDULES:
        try:
            library_name(name, ("",) * axes)
        except ValueError as error:
            refused[name] = str(error)
    return refused


def _ring_sizes(axis_sizes: object) -> tuple[int, ...]:
    """Returns the lengths of one axis or two."""
    given = axis_sizes if isinstance(axis_sizes, tuple | list) else (axis_sizes,)
    if len(given) not in (1, 2):
        got = _checks.shown(axis_sizes)
        raise ValueError(f"axis_sizes must be one number or (outer, inner), got {got}")
    sizes = tuple(device_count("axis_sizes", size) for size in given)
    if math.prod(sizes) > MOST_DEVICES:
        raise ValueError(
            f"axis_sizes must be at most {MOST_DEVICES:,} devices in all, got {axis_sizes!r}: "
            "shard the batch or the heads over further devices"
        )
    return sizes
