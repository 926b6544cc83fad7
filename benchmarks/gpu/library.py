"""The library's C functions for its CUDA kernels: their images and their launches."""

import ctypes
import importlib.util
import json
from pathlib import Path
from typing import Any

NAME = "libburst_attention_ffi.so"
TARGETS = {(9, 0): "sm_90", (10, 0): "sm_100", (10, 3): "sm_103", (12, 0): "sm_120"}


def find_library(path: str | None) -> Path:
    """Returns `path`, or the library of the installed package, without importing it."""
    if path is not None:
        return Path(path)
    package = importlib.util.find_spec("burst_attention")
    if package is None or not package.submodule_search_locations:
        raise RuntimeError(
            f"expected burst_attention to be installed, or --library to name {NAME}; found neither"
        )
    return Path(package.submodule_search_locations[0]) / NAME


def target_of(capability: tuple[int, int]) -> str:
    """Returns the target whose images run on a device of compute capability `major, minor`."""
    if capability[0] == 8:
        return "sm_80"
    if capability not in TARGETS:
        known = ", ".join(f"{major}.{minor}" for major, minor in TARGETS)
        raise RuntimeError(
            f"expected compute capability 8.x, {known}; this device has {capability}"
        )
    return TARGETS[capability]


class AbsentError(Exception):
    """Says that something optional for a measurement is absent; the message names it."""


class Kernels:
    """The images and launches that the library describes."""

    def __init__(self, path: Path):
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._library.burst_attention_ask.restype = ctypes.c_char_p
        self._library.burst_attention_kernel_image.restype = ctypes.c_void_p
        described = json.loads(self._library.burst_attention_ask(b'{"ask": "kernels"}'))
        self.images: dict[str, dict[str, Any]] = {i["name"]: i for i in described["images"]}

    def images_for(self, target: str) -> list[str]:
        """Returns the names of the images for a target."""
        return [name for name, image in self.images.items() if image["target"] == target]

    def image(self, name: str) -> bytes:
        """Returns a cubin."""
        count = ctypes.c_uint64()
        at = self._library.burst_attention_kernel_image(name.encode(), ctypes.byref(count))
        if not at:
            raise RuntimeError(
                f"no image {name} beside {self.path}: a wheel has them all, and in a source tree "
                "`make images` builds them"
            )
        return ctypes.string_at(at, count.value)

    def launches(self, target: str, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the launches that compute `request`."""
        question = {"ask": "kernel_launches", "target": target, "compute": request}
        answer = json.loads(self._library.burst_attention_ask(json.dumps(question).encode()))
        if "error" in answer:
            raise ValueError(f"{next(iter(request))}: {answer['error']}")
        found: list[dict[str, Any]] = answer["launches"]
        return found


def arguments(values: list[dict[str, Any]]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns values and C types of a launch, as cuLaunchKernel of cuda-bindings takes them."""
    types = {"pointer": ctypes.c_void_p, "i32": ctypes.c_int, "f32": ctypes.c_float}
    pairs = [next(iter(value.items())) for value in values]
    return tuple(value for _, value in pairs), tuple(types[kind] for kind, _ in pairs)
