"""What a mesh is made of: the figures that the choice of a schedule rests on."""

import math
from dataclasses import dataclass, fields

from burst_attention._checks import describe, flag, index, static_number

MOST_DEVICES = 4096
"""The most devices along one axis or a pair of axes; the library has the same limit."""


@dataclass(frozen=True)
class Links:
    """What a mesh is made of, for ``schedule="auto"``, and for ``backward="auto"`` with cuDNN.

    None stands for the figure of H200s in nodes of eight, with NVLink in a node and 400 Gb/s for
    each GPU between nodes. `ScheduleChoice.machine` says all figures and their sources.
    """

    inner_gbps: float | None = None
    """Gigabits per second, each way, from a device to other devices of its node."""
    outer_gbps: float | None = None
    """Gigabits per second, each way, from a device to devices of other nodes."""
    inner_latency_us: float | None = None
    """Microseconds until the first byte of a message arrives within a node."""
    outer_latency_us: float | None = None
    """Microseconds until the first byte of a message arrives at another node."""
    tflops_forward: float | None = None
    """10¹² FLOP/s that the kernels of one device reach in the forward pass. None counts rounds of
    blocks on the device's multiprocessors, as an H100 measured them."""
    tflops_backward: float | None = None
    """10¹² FLOP/s that the kernels of one device reach in the backward pass; None as above."""
    launch_us: float | None = None
    """Microseconds that each kernel takes in addition to its arithmetic or its blocks. None is 2.2,
    or 5 with ``tflops_forward`` or ``tflops_backward``."""
    devices_per_node: int | None = None
    """How many neighbours on one axis form a node. Of a pair of axes, the inner axis is a node."""
    shared_link: bool = False
    """Whether the devices of a node share one link to other nodes."""

    def __post_init__(self) -> None:
        flag("shared_link", self.shared_link)
        if self.devices_per_node is not None:
            count = device_count("devices_per_node", self.devices_per_node)
            if count > MOST_DEVICES:
                raise ValueError(f"devices_per_node must be at most {MOST_DEVICES:,}, got {count}")
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if value is None or name in ("shared_link", "devices_per_node"):
                continue
            number = static_number(name, value)
            may_be_zero = name.endswith("_us")
            if not math.isfinite(number) or number < 0 or (number == 0 and not may_be_zero):
                least = "at least 0" if may_be_zero else "above 0"
                raise ValueError(f"{name} must be finite and {least}, got {value!r}")


def check_links(name: str, value: object) -> Links | None:
    """Returns ``value``, `Links` or None."""
    if value is not None and not isinstance(value, Links):
        raise TypeError(f"{name} must be burst_attention.Links or None, got {describe(value)}")
    return value


def device_count(name: str, value: object) -> int:
    """Returns a number of devices, given as an integer of any type."""
    count = index(value)
    if count is None:
        raise TypeError(f"{name} must be made of ints, got {describe(value)}")
    if count < 1:
        raise ValueError(f"{name} must be at least 1, got {count}")
    return count
