"""Loads every image for the first GPU: `python -m gpu.loads`.

Prints a line of JSON: the target, the number of its images, and the driver's error for each image
that it refuses.
"""

import ctypes
import json

import jax

from .library import Kernels, find_library, target_of

MAJOR, MINOR = 75, 76
"""The driver's numbers for the two parts of the compute capability."""


class Driver:
    """The calls of the driver that load an image."""

    def __init__(self) -> None:
        # JAX loads the driver, wherever it lies, and a library that is loaded is found by its name.
        jax.local_devices()
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._check("cuInit", 0)
        self._device = ctypes.c_int()
        self._check("cuDeviceGet", ctypes.byref(self._device), 0)
        context = ctypes.c_void_p()
        self._check("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self._check("cuCtxSetCurrent", context)

    def capability(self) -> tuple[int, int]:
        """Returns the compute capability of the device."""
        parts = []
        for attribute in (MAJOR, MINOR):
            value = ctypes.c_int()
            self._check("cuDeviceGetAttribute", ctypes.byref(value), attribute, self._device)
            parts.append(value.value)
        return parts[0], parts[1]

    def load(self, image: bytes, entry: str) -> None:
        """Loads an image, finds its function and unloads it."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._check("cuModuleLoadData", ctypes.byref(module), image)
        try:
            self._check("cuModuleGetFunction", ctypes.byref(function), module, entry.encode())
        finally:
            self._check("cuModuleUnload", module)

    def _check(self, name: str, *arguments: object) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            said = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(said))
            words = said.value.decode() if said.value else "no words"
            raise RuntimeError(f"{name}: error {code}, {words}")


def main() -> None:
    """Loads the images and prints what the driver refuses."""
    driver, kernels = Driver(), Kernels(find_library(None))
    target = target_of(driver.capability())
    names, refused = kernels.images_for(target), {}
    for name in names:
        try:
            driver.load(kernels.image(name), kernels.images[name]["entry"])
        except RuntimeError as error:
            refused[name] = str(error)
    print(json.dumps({"target": target, "of": len(names), "refused": refused}))


if __name__ == "__main__":
    main()
