"""Does one item after another in a process of its own: `worker.py [LIBRARY]`, called by session.py.

Reads items from stdin and answers on stdout, each a line of JSON. A kernel that hangs or corrupts
the context takes this process with it, not what was measured before.
"""

import functools
import gc
import platform
import sys
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu import numerics, speed
from gpu import serve as shared
from gpu.driver import Driver, version
from gpu.library import Kernels, find_library, target_of

PACKAGES = ("torch", "cuda-bindings", "jax", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "matplotlib")


class Work:
    """The parts of the benchmark, by name."""

    def __init__(self, library: str | None):
        self._library = library

    @functools.cached_property
    def launcher(self) -> Driver:
        """Made when first needed, so that its absence is the failure of those who need it."""
        import torch

        kernels = Kernels(find_library(self._library))
        return Driver(kernels, target_of(torch.cuda.get_device_capability()))

    def environment(self) -> dict[str, Any]:
        """What runs: device, versions, clocks."""
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
        """Loads every image for this device."""
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
        """See numerics.py."""
        return numerics.check(case, kernel, self.launcher, "cuda")

    def peak(self) -> dict[str, Any]:
        """TFLOP/s of a matrix product, and the clocks just after it."""
        return {"tflops": speed.matrix_peak(), "nvidia-smi": shared.nvidia_smi()}

    def speed(self, shape: str, which: str, seconds: float) -> dict[str, Any]:
        """See speed.py."""
        return speed.measure(shape, which, self.launcher, seconds)

    def jax(self, shape: str, seconds: float) -> dict[str, Any]:
        """See speed.py."""
        return speed.measure_beside_jax(shape, self.launcher, seconds)


def context_is_lost() -> str | None:
    """The error after which this process can do no more on the GPU, if there was one."""
    import torch

    try:
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
    except Exception as error:  # torch has more than one type for it
        return str(error).split("\n")[0]
    return None


def missing() -> str | None:
    """What this Python or machine lacks to run anything at all."""
    try:
        import torch
        from cuda.bindings import driver  # noqa: F401
    except ImportError as error:
        return f"expected a Python with torch and cuda-bindings, found none: {error}"
    if not torch.cuda.is_available():
        return "expected an NVIDIA GPU that torch can use, found none"
    torch.zeros(1, device="cuda")  # makes the context that the driver's calls go to
    return None


def serve(work: Any, items: TextIO, answers: TextIO) -> None:
    """Until there are no more items, or the context is lost."""
    shared.serve(work, items, answers, missing, context_is_lost)


if __name__ == "__main__":
    ANSWERS = shared.own_output()
    serve(Work(sys.argv[1] if len(sys.argv) > 1 else None), sys.stdin, ANSWERS)
