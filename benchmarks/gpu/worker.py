"""Does one item after another in a process of its own, which session.py starts.

`python -m gpu.worker [LIBRARY]`, with the benchmarks' folder in PYTHONPATH.

Reads items from stdin and answers on stdout, each a line of JSON. A kernel that hangs or corrupts
the context ends this process, and earlier results stay.
"""

import functools
import gc
import platform
import sys
from typing import Any, TextIO

from . import numerics, speed
from . import serve as shared
from .driver import Driver, version
from .library import Kernels, find_library, target_of

PACKAGES = ("torch", "cuda-bindings", "jax", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "matplotlib")


class Work:
    """The parts of the benchmark, by name."""

    def __init__(self, library: str | None):
        self._library = library

    @functools.cached_property
    def launcher(self) -> Driver:
        """Returns the launcher. The first use makes it, so only its users fail without a driver."""
        import torch

        kernels = Kernels(find_library(self._library))
        return Driver(kernels, target_of(torch.cuda.get_device_capability()))

    def environment(self) -> dict[str, Any]:
        """Returns device, versions and clocks."""
        import torch
        from cuda.bindings import driver as cuda

        properties = torch.cuda.get_device_properties(0)
        return {
            "device": torch.cuda.get_device_name(),
            "capability": list(torch.cuda.get_device_capability()),
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "nvidia-smi": shared.nvidia_smi(),
            "driver's CUDA": version(cuda),
            "torch's CUDA": torch.version.cuda,
            "torch's cuDNN": torch.backends.cudnn.version(),
            "python": platform.python_version(),
            "packages": {name: shared.package(name) for name in PACKAGES},
        }

    def images(self) -> dict[str, Any]:
        """Loads every image for this device; returns the errors of refused images."""
        launcher = self.launcher
        kernels, target = launcher.kernels, launcher.target
        refused = {}
        names = kernels.images_for(target)
        for name in names:
            try:
                launcher.load(name)
            except RuntimeError as error:
                refused[name] = str(error)
        return {
            "target": target,
            "of": len(names),
            "refused": refused,
            "library": kernels.path.name,
        }

    def numerics(self, case: str, kernel: str) -> dict[str, Any]:
        """Returns the check of one kernel, see numerics.py."""
        return numerics.check(case, kernel, self.launcher, "cuda")

    def peak(self) -> dict[str, Any]:
        """Returns the TFLOP/s of a matrix product, and the clocks just after it."""
        return {"tflops": speed.matrix_peak(), "nvidia-smi": shared.nvidia_smi()}

    def speed(self, shape: str, which: str, seconds: float) -> dict[str, Any]:
        """Returns the figures of one shape, see speed.py, and the clock around it."""
        before = shared.clock()
        row = speed.measure(shape, which, self.launcher, seconds)
        return row | {"clock": {"before": before, "after": shared.clock()}}

    def jax(self, shape: str, seconds: float) -> dict[str, Any]:
        """Returns the figures of one shape against jax.nn, see speed.py."""
        return speed.measure_beside_jax(shape, self.launcher, seconds)


def context_is_lost() -> str | None:
    """Returns the error that lost the GPU for this process, or None."""
    import torch

    try:
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
    except Exception as error:  # torch raises more than one type
        return str(error).split("\n")[0]
    return None


def missing() -> str | None:
    """Returns what this Python or machine lacks to run at all, or None."""
    try:
        import torch
        from cuda.bindings import driver  # noqa: F401
    except ImportError as error:
        return f"expected a Python with torch and cuda-bindings, found none: {error}"
    if not torch.cuda.is_available():
        return "expected an NVIDIA GPU that torch can use, found none"
    torch.zeros(1, device="cuda")  # makes the context for the driver's calls
    return None


def serve(work: Any, items: TextIO, answers: TextIO) -> None:
    """Answers items until they end or the context is lost."""
    shared.serve(work, items, answers, missing, context_is_lost)


if __name__ == "__main__":
    ANSWERS = shared.own_output()
    serve(Work(sys.argv[1] if len(sys.argv) > 1 else None), sys.stdin, ANSWERS)
