"""A timeline of the steps of rings and of the calls of decode, for profilers."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from burst_attention import _ffi


@contextmanager
def trace(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> Iterator[None]:
    """Records every step of a ring and every call of decode in the block, on CPU devices.

    The file is Chrome trace JSON, which Perfetto and the viewers of JAX's profiler open. It has one
    process for each ring, one thread for each rank and one event for each step. An event such as
    ``Backward Queries step 3 of 8`` names the pass, the travelling arrays and the step. Times are
    microseconds. The argument ``pairs`` of an event says of how many pairs of query and key, over
    batch and heads, the rank computed scores.

    `decode_attention`, `shared_prefix_attention` and `CachePool.attend` share the process
    ``Decode``. It has one thread for each device, by the device's ``local_hardware_id``, and one
    event for each call on a device; a prefix has a call of its own. An event such as
    ``Decode 4 sequences, 8192 positions`` says how many sequences see keys on this device, and how
    many positions of this device they see. Positions of a prefix that sequences share count once.
    The arguments are these numbers, ``sequences`` and ``rows``; ``bytes``, which the rows take in
    the cache; ``pairs``, as above, of what queries see; the query ``heads``; and the device's
    ``rank``.

    Work on GPUs has no events, nor has work in plain JAX, such as `append_to_cache`. Calls return
    before the devices have computed, so wait for results inside the block, for example with
    ``jax.block_until_ready``.

    Args:
      path: file to write, any path that ``open`` takes. The block empties the file when it begins
        and writes it when it ends.

    Raises:
      OSError: if the file can't be opened when the block begins, or written when the block ends.
      RuntimeError: within another block, of this thread or another one, whose timeline goes on.
      ValueError: for a path with a zero byte.
    """
    path = os.fspath(path)
    _ffi.start_trace(path)
    try:
        yield
    finally:
        _ffi.stop_trace(path)
