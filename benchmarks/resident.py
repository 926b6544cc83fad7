"""How far a call raises the resident memory of this process."""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


def growth(run: Callable[[], Any]) -> tuple[int, int]:
    """Bytes that the highest point of a call lies above its start, with its results and without."""
    ctypes.CDLL(None).malloc_trim(0)  # memory that the compiler left free would hide growth
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again here
    before = _status("VmRSS")
    results = run()
    grown = _status("VmHWM") - before
    return grown, grown - sum(leaf.nbytes for leaf in jax.tree.leaves(results))


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found is not None, f"/proc/self/status has no {field}"
    return int(found[1]) * 1024
