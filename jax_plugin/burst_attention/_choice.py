"""``schedule="auto"``: which schedule takes least time, and why."""

from __future__ import annotations

import json
import math
import operator
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from burst_attention import _check_masks, _checks, _ffi
from burst_attention._types import Backward, Layout

LINKS = "burst_attention.Links"
MOST_DEVICES = 4096
"""Along one axis or a pair of axes; the library has the same limit."""


@dataclass(frozen=True)
class Links:
    """What a mesh is made of, for ``schedule="auto"``.

    What is None is that of H200s in nodes of eight, with NVLink in a node and 400 Gb/s for each GPU
    between nodes; `ScheduleChoice.machine` says all figures with their sources.
    """

    inner_gbps: float | None = None
    """Gigabits per second, each way, of a device to others of its node."""
    outer_gbps: float | None = None
    """Likewise to other nodes."""
    inner_latency_us: float | None = None
    """Microseconds until the first byte of a message arrives within a node."""
    outer_latency_us: float | None = None
    """Likewise between nodes."""
    tflops_forward: float | None = None
    """10¹² FLOP/s that the kernels of one device reach in the forward pass."""
    tflops_backward: float | None = None
    """Likewise in the backward pass."""
    launch_us: float | None = None
    """Microseconds that each kernel takes beside its arithmetic."""
    devices_per_node: int | None = None
    """Neighbours on one axis that are a node. Of a pair of axes, the inner one is."""
    shared_link: bool = False
    """The devices of a node share one link to other nodes."""

    def __post_init__(self) -> None:
        _checks.flag("shared_link", self.shared_link)
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if name == "shared_link" or value is None:
                continue
            if name == "devices_per_node":
                if _size(name, value) > MOST_DEVICES:
                    raise ValueError(f"{name} must be at most {MOST_DEVICES:,}, got {value}")
                continue
            number = _checks.static_number(name, value)
            least = "at least 0" if name.endswith("_us") else "above 0"
            if not math.isfinite(number) or number < 0 or (number == 0 and least == "above 0"):
                raise ValueError(f"{name} must be finite and {least}, got {value!r}")


@dataclass(frozen=True)
class ScheduleCandidate:
    """What a schedule is predicted to take, forward and backward pass together."""

    schedule: str
    """As `attention` takes it; over two axes ``ring`` is a double ring."""
    impossible: str | None = None
    """Why it is out of the question; then all that follows is None."""
    seconds: float | None = None
    exposed: float | None = None
    """Seconds in which the device that waits longest waits for messages."""
    bytes_within: int | None = None
    """Sent by all devices within nodes."""
    bytes_between: int | None = None
    """Sent by all devices between nodes."""
    backward: str | None = None
    """What travels in the backward pass: ``keys``, ``queries``, or ``heads`` alone."""
    estimated: bool | None = None
    """Worked out from smaller worlds, as the simulation of a large one takes seconds."""


@dataclass(frozen=True)
class ScheduleChoice:
    """What ``schedule="auto"`` takes, and why. As a string: a table."""

    schedule: str
    """As `attention` takes it; over two axes ``ring`` is a double ring."""
    backward: str
    """What travels in the backward pass; without a prediction as it was asked for."""
    reason: str
    candidates: tuple[ScheduleCandidate, ...] = ()
    """All that were looked at; none without a prediction."""
    machine: str = ""
    """What the predictions rest on."""

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


def choose_schedule(
    query: Any,
    key: Any,
    value: Any,
    *,
    axis_sizes: int | tuple[int, int],
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    layout: Layout = "contiguous",
    backward: Backward = "auto",
    links: Links | None = None,
    platform: str = "cuda",
) -> ScheduleChoice:
    """The schedule that ``schedule="auto"`` of `attention` takes, and why.

    Predicted is the time of forward and backward pass together; what takes up to 3% longer than
    the fastest counts as equal, and of equals the ring is taken. On CPU devices, where nothing
    travels, it is the ring unless ``links`` are given.

    Args:
      query: one device's shard, or a ``jax.ShapeDtypeStruct`` of it, as are key and value.
      key: likewise.
      value: likewise.
      axis_sizes: devices along the axis of the sequence, or (outer, inner) of a pair of axes; at
        most 4,096 in all.
      is_causal: as in `attention`, like local_window_size, layout and backward.
      local_window_size: see there.
      layout: see there.
      backward: see there.
      links: what the mesh is made of; default: H200s.
      platform: of the devices, ``cuda`` or ``cpu``.

    Returns:
      A `ScheduleChoice`.

    Raises:
      ValueError, TypeError: with the way out.
    """
    _checks.array_types(query, key, value)
    _checks.choice("platform", platform, _checks.PLATFORMS)
    _checks.choice("layout", layout, _checks.LAYOUTS)
    _checks.choice("backward", backward, _checks.BACKWARDS)
    for name, x in (("query", query), ("key", key)):
        _checks.shard_length(name, x.shape[1], layout)
    sizes = _ring_sizes(axis_sizes)
    arguments = {
        "query": query,
        "key": key,
        "value": value,
        "is_causal": is_causal,
        "local_window_size": local_window_size,
        "layout": layout,
        "backward": backward,
        "links": links,
    }
    return _choice(arguments, sizes, platform)


def resolved(
    arguments: dict[str, Any], axes: tuple[str, ...], mesh: Any, implementation: str | None
) -> Any:
    """The schedule that `attention` was asked for, with a name in the place of ``auto``."""
    _check_links(arguments["links"])
    if arguments["schedule"] != "auto":
        return arguments["schedule"]
    if implementation == "xla":
        return "ring"
    return _choice(arguments, tuple(mesh.shape[name] for name in axes), implementation).schedule


def _choice(
    arguments: dict[str, Any], sizes: tuple[int, ...], platform: str | None
) -> ScheduleChoice:
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    links = _check_links(arguments["links"])
    is_empty = 0 in (*query.shape, *key.shape)
    if known := _without_model(math.prod(sizes), is_empty, platform, links):
        return ScheduleChoice("ring", arguments["backward"], known)
    is_causal = _checks.flag("is_causal", arguments["is_causal"])
    positions = math.prod(sizes) * max(query.shape[1], key.shape[1])
    window = _check_masks.window(arguments["local_window_size"], is_causal, positions)
    left, right = (None if side == _check_masks.NO_LIMIT else side for side in window)
    request = {
        "world_size": math.prod(sizes),
        "inner": sizes[1] if len(sizes) == 2 else None,
        "batch": query.shape[0],
        "q_len": query.shape[1],
        "kv_len": key.shape[1],
        "heads": query.shape[2],
        "kv_heads": key.shape[2],
        "head_dim": query.shape[3],
        "value_dim": value.shape[3],
        "dtype": str(query.dtype),
        "layout": arguments["layout"],
        "backward": arguments["backward"],
        "window_left": left,
        "window_right": right,
        "machine": _machine(links or Links(), sizes),
        "refused": _refused(len(sizes)),
    }
    return _predicted(json.dumps(request))


def _without_model(
    world_size: int, is_empty: bool, platform: str | None, links: Links | None
) -> str | None:
    """Why it is the ring at once, if it is."""
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
    found = _ffi.choose(request)
    candidates = tuple(_candidate(each) for each in found["candidates"])
    machine = found["machine"]
    sources = "; ".join(f"{name}: {source}" for name, source in machine["sources"].items())
    schedule = found["schedule"]
    backward = next(each.backward for each in candidates if each.schedule == schedule)
    return ScheduleChoice(
        schedule=schedule,
        backward=str(backward),
        reason=found["reason"],
        candidates=candidates,
        machine=f"on {machine['title']}; {sources}",
    )


def _candidate(found: dict[str, Any]) -> ScheduleCandidate:
    if "impossible" in found:
        return ScheduleCandidate(found["schedule"], found["impossible"])
    sent = found.pop("sent")
    return ScheduleCandidate(**found, bytes_within=sent["within"], bytes_between=sent["between"])


def _machine(links: Links, sizes: tuple[int, ...]) -> dict[str, Any]:
    return {
        "ranks_per_node": sizes[1] if len(sizes) == 2 else _per_node(links),
        "shared": links.shared_link,
        "tflops": [links.tflops_forward, links.tflops_backward],
        "link_gbps": [links.inner_gbps, links.outer_gbps],
        "latency_us": [links.inner_latency_us, links.outer_latency_us],
        "launch_us": links.launch_us,
    }


def _per_node(links: Links) -> int | None:
    count = links.devices_per_node
    return None if count is None else _size("devices_per_node", count)


def _refused(axes: int) -> dict[str, str]:
    """The schedules that can't be had over so many axes, and why."""
    refused = {}
    for name in _checks.SCHEDULES:
        try:
            _checks.schedule(name, ("",) * axes)
        except ValueError as error:
            refused[name] = str(error)
    return refused


def _check_links(value: Any) -> Links | None:
    if value is not None and not isinstance(value, Links):
        raise TypeError(f"links must be {LINKS} or None, got {_checks.describe(value)}")
    return value


def _size(name: str, value: Any) -> int:
    """A number of devices, of any type of integers."""
    try:
        size = operator.index(value)
    except TypeError:
        size = None
    if size is None or isinstance(value, bool):
        raise TypeError(f"{name} must be made of ints, got {_checks.describe(value)}")
    if size < 1:
        raise ValueError(f"{name} must be at least 1, got {size}")
    return size


def _ring_sizes(axis_sizes: Any) -> tuple[int, ...]:
    """The lengths of one axis or two."""
    sizes = axis_sizes if isinstance(axis_sizes, tuple | list) else (axis_sizes,)
    if len(sizes) not in (1, 2):
        raise ValueError(f"axis_sizes must be one number or (outer, inner), got {axis_sizes!r}")
    sizes = tuple(_size("axis_sizes", size) for size in sizes)
    if math.prod(sizes) > MOST_DEVICES:
        raise ValueError(
            f"axis_sizes must be at most {MOST_DEVICES:,} devices in all, got {axis_sizes!r}: "
            "shard the batch or the heads over further devices"
        )
    return sizes
