"""One order for all work of NCCL on a GPU: an environment variable, set on import.

On a GPU the ring has a communicator of its own besides the communicators of XLA's collectives. NCCL
runs the work of several communicators of one device safely only if all devices of the job take it
in the same order. Otherwise two devices can wait for each other, each in an operation that the
other device has not begun.

``NCCL_LAUNCH_ORDER_IMPLICIT=1`` (NCCL 2.26 and later; default 0) makes the device follow the order
of the host's launches. XLA launches the operations of a program in one order on all devices. NCCL
reads the variable once, so import burst_attention before the first collective runs.
"""

import os
import warnings
from importlib import metadata

VARIABLE = "NCCL_LAUNCH_ORDER_IMPLICIT"


def order_launches() -> None:
    """Sets the variable if it is unset, and warns if its value allows deadlocks."""
    value = os.environ.get(VARIABLE)
    if value is None:
        if not _is_for_amd():
            os.environ[VARIABLE] = "1"
    elif value != "1":
        warnings.warn(
            f"{VARIABLE} must be 1 on NVIDIA GPUs, got {value!r}: without it, NCCL may run the "
            "ring's transfers and XLA's collectives in different orders on different GPUs, which "
            f"then wait for each other for ever. Unset {VARIABLE} or set it to 1 before "
            "burst_attention is imported; programs on CPU devices are not affected",
            UserWarning,
            stacklevel=3,
        )


def launch_order() -> str:
    """Returns the variable's value, for reports."""
    return os.environ.get(VARIABLE, "not set")


def _is_for_amd() -> bool:
    # RCCL, AMD's library behind the same interface, reads the variable too and crashes with it
    # (github.com/ROCm/aorta, issue 512).
    return any("rocm" in plugin.name for plugin in metadata.entry_points(group="jax_plugins"))
