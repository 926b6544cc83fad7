"""Does one item after another in a process of its own: `worker.py [--rehearse] [--rank]`.

`--rank` is one of several processes, which joins the others before JAX looks for devices.
"""

import gc
import importlib
import os
import platform
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

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
    """What can be asked, by name."""

    def __init__(self, rehearse: bool):
        self._rehearse = rehearse

    def environment(self) -> dict[str, Any]:
        """What runs: device, versions, clocks."""
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
        """Items of a part."""
        found: list[str] = _part(of).names(self._rehearse)
        return found

    def measure(self, of: str, name: str) -> dict[str, Any]:
        """One item of a part."""
        row: dict[str, Any] = _part(of).measure(name, self._rehearse)
        return row

    def join(self, **arguments: Any) -> dict[str, Any]:
        """See ranks.py."""
        from check import ranks

        return ranks.join(**arguments)

    def train(self, **arguments: Any) -> dict[str, Any]:
        """See training.py."""
        from check import training

        return training.train(rehearse=self._rehearse, **arguments)


def _part(name: str) -> Any:
    module, kind = PARTS[name].split(":")
    return getattr(importlib.import_module(module), kind)()


def missing(rehearse: bool, rank: bool) -> str | None:
    """What this Python or machine lacks to run anything at all."""
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
    """The error after which this process can do no more on its device, if there was one."""
    import jax
    import jax.numpy as jnp

    gc.collect()
    try:
        jax.block_until_ready(jnp.zeros(8) + 1)
    except Exception as error:  # jax has more than one type for it
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
        # One rank alone must not start what the others do not: it is asked for little.
        (lambda: None) if rank else context_is_lost,
    )


if __name__ == "__main__":
    main()
