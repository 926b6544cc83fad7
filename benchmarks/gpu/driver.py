"""Loads images with the CUDA driver and launches them on torch's current stream."""

from collections.abc import Callable
from typing import Any, Protocol

from .library import Kernels, arguments

LOG_BYTES = 8192


class Launcher(Protocol):
    """Runs requests: `Driver`, or its stand-in on a machine without a GPU."""

    def prepare(self, request: dict[str, Any]) -> Callable[[], None]:
        """Returns a function that launches the kernels of `request`, and does nothing else."""

    def synchronize(self) -> None:
        """Waits until all enqueued work is done."""


class Driver:
    """The CUDA driver through cuda-bindings; torch has made the context."""

    def __init__(self, kernels: Kernels, target: str, cuda: Any = None):
        self.kernels, self.target, self._cuda = kernels, target, cuda or _bindings()
        self._functions: dict[str, Any] = {}

    def prepare(self, request: dict[str, Any]) -> Callable[[], None]:
        """Loads the images of `request`; returns a function that launches them."""
        prepared = []
        for launch in self.kernels.launches(self.target, request):
            function = self.load(launch["image"], launch["entry"])
            where = f"{launch['image']}, grid {launch['grid']}"
            shape = (*launch["grid"], *launch["block"], launch["shared_bytes"])
            prepared.append((function, shape, arguments(launch["values"]), where))

        def enqueue() -> None:
            stream = self._stream()
            for function, shape, values, where in prepared:
                result = self._cuda.cuLaunchKernel(function, *shape, stream, values, 0)
                self._check(result, f"launching {where}")

        return enqueue

    def synchronize(self) -> None:
        """Waits until all enqueued work is done."""
        import torch

        torch.cuda.synchronize()

    def load(self, image: str, entry: str | None = None) -> Any:
        """Returns the kernel of an image, which it loads once."""
        if image not in self._functions:
            module = self._module(image)
            entry = entry or self.kernels.images[image]["entry"]
            function = self._cuda.cuModuleGetFunction(module, entry.encode())
            self._functions[image] = self._check(function, f"finding {entry} in {image}")
        return self._functions[image]

    def _module(self, image: str) -> Any:
        """Loads an image; if that fails, loads it again for the driver's log."""
        cubin = self.kernels.image(image)
        error, module = self._cuda.cuModuleLoadData(cubin)
        if error == self._cuda.CUresult.CUDA_SUCCESS:
            return module
        what = f"loading {image} ({len(cubin)} bytes); the driver's log: {self._log(cubin)}"
        return self._check((error,), what)

    def _log(self, cubin: bytes) -> str:
        option = self._cuda.CUjit_option
        errors, infos = bytearray(LOG_BYTES), bytearray(LOG_BYTES)
        options = {
            option.CU_JIT_ERROR_LOG_BUFFER: errors,
            option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES: LOG_BYTES,
            option.CU_JIT_INFO_LOG_BUFFER: infos,
            option.CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES: LOG_BYTES,
        }
        try:
            self._cuda.cuModuleLoadDataEx(cubin, len(options), [*options], [*options.values()])
        except Exception as error:  # reading the log must not fail itself
            return f"cuModuleLoadDataEx raised {error!r}"
        texts = (bytes(log).split(b"\0")[0].decode(errors="replace") for log in (errors, infos))
        return " ".join(text.strip() for text in texts if text) or "empty"

    def _stream(self) -> int:
        import torch

        stream: int = torch.cuda.current_stream().cuda_stream
        return stream

    def _check(self, result: tuple[Any, ...], what: str) -> Any:
        error, *values = result
        if error == self._cuda.CUresult.CUDA_SUCCESS:
            return values[0] if values else None
        _, text = self._cuda.cuGetErrorString(error)
        explained = text.decode() if text else "no description"
        raise RuntimeError(
            f"{what}: {error.name}, {explained}; the driver is of CUDA {version(self._cuda)}"
        )


def _bindings() -> Any:
    from cuda.bindings import driver

    return driver


def version(cuda: Any) -> str:
    """Returns the version of CUDA that the driver knows."""
    _, number = cuda.cuDriverGetVersion()
    return f"{number // 1000}.{number % 1000 // 10}"
