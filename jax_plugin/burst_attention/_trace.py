"""A timeline of the rings' steps, for profilers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from burst_attention import _ffi


@contextmanager
def trace(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> Iterator[None]:
    """Records every step of every ring that runs inside the ``with`` block.

    Writes Chrome trace JSON, which Perfetto and the viewers of JAX's profiler open: one process per
    ring, one thread per rank, one event per step, such as ``Backward Queries step 3 of 8`` (pass,
    what travels, step). Times are microseconds. Wait for results inside the block, for example
    with ``jax.block_until_ready``: calls return before their rings have run.

    Args:
      path: file to write, any path that ``open`` takes. It is opened, and emptied, when the block
        begins, and written when the block ends.

    Raises:
      OSError: if the file can't be opened, when the block begins; if it can't be written, when the
        block ends.
      ValueError: for a path with a zero byte.
    """
    _ffi.start_trace(path)
    try:
        yield
    finally:
        _ffi.stop_trace(path)
