"""A timeline of the rings' steps, for profilers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from burst_attention import _ffi


@contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """Records every step of every ring that runs inside the ``with`` block.

    Writes Chrome trace JSON, which Perfetto and the viewers of JAX's profiler open: one process per
    ring, one thread per rank, one event per step, such as ``Backward Queries step 3 of 8`` (pass,
    what travels, step). Times are microseconds. Wait for results inside the block, for example
    with ``jax.block_until_ready``: calls return before their rings have run.

    Args:
      path: file to write when the block ends.

    Raises:
      OSError: if the file can't be written.
    """
    _ffi.trace(os.fspath(path))
    try:
        yield
    finally:
        if not _ffi.trace(None):
            raise OSError(f"the timeline could not be written to {os.fspath(path)!r}")
