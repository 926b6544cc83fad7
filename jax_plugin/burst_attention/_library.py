"""Loads the library. An error says why it can't be loaded, and what to do."""

import contextlib
import ctypes
import os
from pathlib import Path

LIBRARY = Path(__file__).with_name("libburst_attention_ffi.so")
WAY_OUT = (
    "install the package again with `pip install --force-reinstall burst-attention`; in a source "
    "tree run `make build`"
)
PROCESSORS = {3: "i386", 62: "x86_64", 183: "aarch64", 243: "riscv64"}
"""Names of processors, by their numbers in ELF files."""


def load() -> ctypes.CDLL:
    """Returns the library, with the types of its functions.

    Raises:
      ImportError: where there is no library that this process can load.
    """
    if not LIBRARY.parent.is_dir():
        raise ImportError(
            "burst_attention must lie in a folder, since the system loads its library from a file, "
            f"got {LIBRARY.parent}; install the wheel with pip, or unpack the archive"
        )
    if not LIBRARY.exists():
        raise ImportError(
            f"{LIBRARY} is missing: it is part of the wheel; in a source tree, run `make build`"
        )
    if other := _other_copy():
        raise ImportError(
            f"a process must have one copy of burst_attention, since XLA keeps the first one's "
            f"calls, got {LIBRARY} after {other}; restart the process, such as the notebook's "
            "kernel, and leave one copy on the path"
        )
    try:
        library = ctypes.CDLL(str(LIBRARY))
        library.burst_attention_version.restype = ctypes.c_char_p
        library.burst_attention_ask.argtypes = [ctypes.c_char_p]
        library.burst_attention_ask.restype = ctypes.c_char_p
        library.burst_attention_bytes_sent.restype = ctypes.c_uint64
        library.burst_attention_trace.argtypes = [ctypes.c_char_p]
    except (OSError, AttributeError) as error:
        raise ImportError(_reason(error)) from error
    return library


def _other_copy() -> str | None:
    """Returns the path of another copy of the library that this process has loaded."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines():
            path = line.split(maxsplit=5)[-1]
            is_copy = path.endswith(f"/{LIBRARY.name}") and os.path.exists(path)
            if is_copy and not os.path.samefile(path, LIBRARY):
                return path
    return None


def _reason(error: Exception) -> str:
    """Returns why the library can't be loaded, and what to do."""
    head, own = _head(LIBRARY), _head(Path("/proc/self/exe"))
    if head.startswith(b"version https://git-lfs"):
        return (
            f"{LIBRARY} must be a library, got the text by which Git LFS points to it; run `git "
            "lfs pull`, or `make build`"
        )
    if head[:4] == own[:4] == b"\x7fELF" and _processor(head) != _processor(own):
        return (
            f"{LIBRARY} must be a library for {_processor(own)}, this process's processor, got one "
            f"for {_processor(head)}; install the wheel for {_processor(own)}, or run `make build`"
        )
    return (
        f"{LIBRARY} must be the library of this package for this system, got a file that does not "
        f"load: {error}; {WAY_OUT}"
    )


def _head(path: Path) -> bytes:
    """Returns the first bytes of a file; none if it can't be read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(64)
    return b""


def _processor(head: bytes) -> str:
    """Returns the processor that an ELF file is for."""
    is_big_endian = head[5:6] == b"\x02"
    number = int.from_bytes(head[18:20], "big" if is_big_endian else "little")
    return PROCESSORS.get(number, f"the processor of ELF number {number}")
