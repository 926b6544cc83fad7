"""Launches kernels on JAX's arrays with the CUDA driver, where there is no torch."""

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from .library import Kernels, arguments, find_library, target_of
from .loads import Driver

MULTIPROCESSORS = 16
"""The driver's number for how many multiprocessors a device has."""


@dataclass(frozen=True)
class OnDevice:
    """A contiguous JAX array with the part of a torch tensor's face that requests are made of."""

    array: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the sizes."""
        return self.array.shape

    @property
    def dtype(self) -> Any:
        """Returns the type of an element."""
        return self.array.dtype

    def data_ptr(self) -> int:
        """Returns the address."""
        return self.array.unsafe_buffer_pointer()

    def stride(self, axis: int) -> int:
        """Returns the elements from one place of an axis to the next."""
        return math.prod(self.shape[axis + 1 :])

    def __getitem__(self, key: Any) -> "OnDevice":
        """Returns itself, since kernels here take whole arrays."""
        keys = key if isinstance(key, tuple) else (key,)
        for part, size in zip(keys, self.shape, strict=False):
            if part.indices(size) != (0, size, 1):
                raise ValueError(f"expected a whole axis of {size}, got {part}")
        return self


class Stream(Driver):
    """Runs requests on a stream of its own; JAX has made the context."""

    def __init__(self) -> None:
        super().__init__()
        self._kernels = Kernels(find_library(None))
        self._target = target_of(self.capability())
        self._functions: dict[str, ctypes.c_void_p] = {}
        self._stream = ctypes.c_void_p()
        self._check("cuStreamCreate", ctypes.byref(self._stream), 1)  # waits for no other stream

    def multiprocessors(self) -> int:
        """Returns how many multiprocessors the device has."""
        value = ctypes.c_int()
        self._check("cuDeviceGetAttribute", ctypes.byref(value), MULTIPROCESSORS, self._device)
        return value.value

    def blocks(self, request: dict[str, Any]) -> int:
        """Returns the blocks of a request's last launch."""
        return math.prod(self._kernels.launches(self._target, request)[-1]["grid"])

    def prepare(self, request: dict[str, Any]) -> Callable[[], None]:
        """Loads the images of `request`; returns a function that launches them."""
        prepared = []
        for launch in self._kernels.launches(self._target, request):
            function = self._function(launch["image"], launch["entry"])
            values, types = arguments(launch["values"])
            cells = [kind(value) for kind, value in zip(types, values, strict=True)]
            places = (ctypes.c_void_p * len(cells))(*map(ctypes.addressof, cells))
            shape = (*launch["grid"], *launch["block"], launch["shared_bytes"])
            prepared.append((function, shape, places, cells))  # the places point to the cells

        def enqueue() -> None:
            for function, shape, places, _ in prepared:
                self._check("cuLaunchKernel", function, *shape, self._stream, places, None)

        return enqueue

    def synchronize(self) -> None:
        """Waits until all enqueued work is done."""
        self._check("cuStreamSynchronize", self._stream)

    def _function(self, image: str, entry: str) -> ctypes.c_void_p:
        if image not in self._functions:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            cubin = self._kernels.image(image)
            self._check("cuModuleLoadData", ctypes.byref(module), cubin)
            self._check("cuModuleGetFunction", ctypes.byref(function), module, entry.encode())
            self._functions[image] = function
        return self._functions[image]
