"""A timeline of the steps of rings, for profilers."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from burst_attention import _ffi


@contextmanager
def trace(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> Iterator[None]:
    """Records every step of every ring that runs inside the ``with`` block.

    The file is Chrome trace JSON, which Perfetto and the viewers of JAX's profiler open. It has one
    process for each ring, one thread for each rank and one event for each step. An event such as
    ``Backward Queries step 3 of 8`` names the pass, the travelling arrays and the step. Times are
    microseconds. The argument ``pairs`` of an event says of how many pairs of query and key, over
    batch and heads, the rank computed scores. Calls return before their rings have run, so wait for
    results inside the block, for example with ``jax.block_until_ready``.

    Args:
      path: file to write, any path that ``open`` takes. The block empties the file when it begins
        and writes it when it ends.

    Raises:
      OSError: if the file can't be opened when the block begins, or written when the block ends.
      ValueError: for a path with a zero byte.
    """
    path = os.fspath(path)
    _ffi.start_trace(path)
    try:
        yield
    finally:
        _ffi.stop_trace(path)
