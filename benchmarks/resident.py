"""Measures how far a call raises the resident memory of this process."""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


def growth(run: Callable[[], Any]) -> tuple[int, int]:
    """Returns the rise of memory from start to peak, in bytes, with and without the results."""
    ctypes.CDLL(None).malloc_trim(0)  # free memory of the compiler would hide growth
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _status("VmRSS")
    results = run()
    grown = _status("VmHWM") - before
    return grown, grown - sum(leaf.nbytes for leaf in jax.tree.leaves(results))


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found is not None, f"/proc/self/status has no {field}"
    return int(found[1]) * 1024
