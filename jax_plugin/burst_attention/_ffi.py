"""The library: loads it, registers its custom calls with XLA and asks it what it knows."""

from __future__ import annotations

import ctypes
import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import jax

FORWARD = "burst_attention_forward"
BACKWARD = "burst_attention_backward"
LINEAR = {name: f"burst_attention_linear_{name}" for name in ("state", "forward", "backward")}
"""The calls of linear attention on CPU devices."""
LINEAR_KERNELS = {name: f"burst_attention_linear_{name}" for name in ("parts", "attend")}
"""Those on GPUs."""
LIBRARY = Path(__file__).with_name("libburst_attention_ffi.so")
STAGES = {
    "cpu": {"instantiate": "instantiate", "execute": "execute"},
    "CUDA": {
        stage: f"cuda_{stage}" for stage in ("instantiate", "prepare", "initialize", "execute")
    },
}
"""For each platform, how the library's function of a stage ends."""


def _load() -> ctypes.CDLL:
    if not LIBRARY.exists():
        raise ImportError(
            f"{LIBRARY} is missing: it is part of the wheel; in a source tree, run `make build`"
        )
    library = ctypes.CDLL(str(LIBRARY))
    library.burst_attention_version.restype = ctypes.c_char_p
    library.burst_attention_describe.restype = ctypes.c_char_p
    library.burst_attention_bytes_sent.restype = ctypes.c_uint64
    library.burst_attention_trace.argtypes = [ctypes.c_char_p]
    for name in ("workspace", "simulate", "choose"):
        function = getattr(library, f"burst_attention_{name}")
        function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_char_p
    return library


def _register(library: ctypes.CDLL) -> None:
    # At import, so that exported programs and cached executables find their custom calls too.
    targets = [(target, platform) for target in (FORWARD, BACKWARD) for platform in STAGES]
    stages = [(target, platform, tuple(STAGES[platform])) for target, platform in targets]
    stages += [(target, "cpu", ("execute",)) for target in LINEAR.values()]
    stages += [(target, "CUDA", ("initialize", "execute")) for target in LINEAR_KERNELS.values()]
    for target, platform, names in stages:
        handlers = {
            name: jax.ffi.pycapsule(getattr(library, f"{target}_{STAGES[platform][name]}"))
            for name in names
        }
        jax.ffi.register_ffi_target(target, handlers, platform=platform)


_library = _load()
_register(_library)


def library_version() -> str:
    """Version of the loaded library."""
    return str(_library.burst_attention_version().decode())


def describe() -> dict[str, Any]:
    """What the library says about itself: instruction sets, threads, CUDA, API versions."""
    found: dict[str, Any] = json.loads(_library.burst_attention_describe())
    return found


def bytes_sent() -> int:
    """Bytes that all rings of this process have sent so far."""
    return int(_library.burst_attention_bytes_sent())


AnyPath: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]


def start_trace(path: AnyPath) -> None:
    """Opens a file and begins to record steps for it.

    Raises:
      OSError: if the file can't be opened.
      ValueError: for a path with a zero byte.
    """
    encoded = os.fsencode(path)
    if b"\0" in encoded:
        raise ValueError(f"path must not contain a zero byte, got {os.fspath(path)!r}")
    _check_traced(_library.burst_attention_trace(encoded), path)


def stop_trace(path: AnyPath) -> None:
    """Ends the recording and writes the file, whose ``path`` an error names.

    Raises:
      OSError: if the file can't be written.
    """
    _check_traced(_library.burst_attention_trace(None), path)


def _check_traced(code: int, path: AnyPath) -> None:
    if code:
        reason = os.strerror(code) if code > 0 else "unknown error"
        what = f"the timeline can't be written: {reason}"
        raise OSError(code, what, os.fspath(path))


def workspace_bytes(**problem: Any) -> int:
    """Bytes that one call on a GPU needs beside its operands and results.

    Raises:
      ValueError: for a problem that the kernels can't compute, with the library's reason.
    """
    return _workspace_bytes(json.dumps(problem))


@lru_cache(maxsize=1024)
def _workspace_bytes(request: str) -> int:
    prefix = "burst_attention on NVIDIA GPUs: "
    return int(_answer(_library.burst_attention_workspace, request, prefix)["bytes"])


def simulate(**request: Any) -> dict[str, Any]:
    """What a problem's schedules would take on a machine; ``ffi/src/simulate.rs`` names the fields.

    Raises:
      ValueError: for what can't be predicted, with the library's reason.
    """
    return _answer(_library.burst_attention_simulate, json.dumps(request))


def choose(request: str) -> dict[str, Any]:
    """Which schedule takes least time; ``ffi/src/choose.rs`` names the fields of the JSON.

    Raises:
      ValueError: for what can't be predicted, with the library's reason.
    """
    return _answer(_library.burst_attention_choose, request)


def _answer(function: Any, request: str, prefix: str = "") -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(function(request.encode()))
    if "error" in answer:
        raise ValueError(prefix + answer["error"])
    return answer
