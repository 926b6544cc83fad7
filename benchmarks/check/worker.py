"""Does one item after another in a process of its own, which gpu/session.py starts.

`python -m check.worker [--rehearse] [--rank]`, with the folders of the benchmarks and of the tests
in PYTHONPATH.

`--rank` makes it one of several processes, which join before JAX looks for devices.
"""

import gc
import importlib
import os
import platform
import sys
from pathlib import Path
from typing import Any

from gpu import serve

PARTS = {
    "one": "check.numerics:One",
    "virtual": "check.numerics:Virtual",
    "features": "check.numerics:Features",
    "linear": "check.linear:Linear",
    "losses": "check.losses:Losses",
    "speed": "check.speed:Speed",
    "memory": "check.memory:Memory",
    "ranks": "check.ranks:Members",
}
PACKAGES = (
    *("burst-attention", "jax", "jaxlib", "jax-cuda13-plugin", "nvidia-nccl-cu13"),
    *("nvidia-cudnn-cu13", "numpy", "matplotlib"),
)


class Work:
    """The kinds of items, by name."""

    def __init__(self, rehearse: bool):
        self._rehearse = rehearse

    def environment(self) -> dict[str, Any]:
        """Returns device, versions and clocks."""
        import burst_attention as ba
        import jax

        device = jax.devices()[0]
        return {
            "device": device.device_kind,
            "platform": device.platform,
            "jax's platform": device.client.platform_version.replace("\n", " "),
            "capability": getattr(device, "compute_capability", None),
            "nvidia-smi": serve.nvidia_smi(),
            "burst_attention": f"{ba.__version__} in {Path(ba.__file__).parent}",
            "launch order": os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT"),
            "python": platform.python_version(),
            "packages": {name: serve.package(name) for name in PACKAGES},
        }

    def names(self, of: str) -> list[str]:
        """Returns the names of a part's items."""
        found: list[str] = _part(of).names(self._rehearse)
        return found

    def measure(self, of: str, name: str) -> dict[str, Any]:
        """Returns the result of one item of a part."""
        row: dict[str, Any] = _part(of).measure(name, self._rehearse)
        return row

    def join(self, **arguments: Any) -> dict[str, Any]:
        """Joins the processes, see ranks.py."""
        from check import ranks

        return ranks.join(**arguments)

    def train(self, **arguments: Any) -> dict[str, Any]:
        """Trains a small model, see training.py."""
        from check import training

        return training.train(rehearse=self._rehearse, **arguments)


def _part(name: str) -> Any:
    module, kind = PARTS[name].split(":")
    return getattr(importlib.import_module(module), kind)()


def missing(rehearse: bool, rank: bool) -> str | None:
    """Returns what this Python or machine lacks to run at all, or None."""
    try:
        import burst_attention  # noqa: F401
        import jax
    except ImportError as error:
        return f"expected a Python with jax and burst_attention, found none: {error}"
    if rehearse or rank:
        return None
    try:
        jax.devices("gpu")
    except RuntimeError as error:
        return f"expected an NVIDIA GPU that jax can use, found none: {error}"
    return None


def context_is_lost() -> str | None:
    """Returns the error that lost the device for this process, or None."""
    import jax
    import jax.numpy as jnp

    gc.collect()
    try:
        jax.block_until_ready(jnp.zeros(8) + 1)
    except Exception as error:  # jax raises more than one type
        return str(error).split("\n")[0]
    return None


def main() -> None:
    """Serves until stdin ends."""
    rehearse, rank = ("--rehearse" in sys.argv), ("--rank" in sys.argv)
    answers = serve.own_output()
    serve.serve(
        Work(rehearse),
        sys.stdin,
        answers,
        lambda: missing(rehearse, rank),
        # A rank must not start programs alone, so it gets no check of its device.
        (lambda: None) if rank else context_is_lost,
    )


if __name__ == "__main__":
    main()
