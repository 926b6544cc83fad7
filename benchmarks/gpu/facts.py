"""Prints facts about a machine's GPU as a line of JSON: `python -m gpu.facts`.

Needs JAX alone. With `--rates` it prints what copies and products of random numbers reach. Where
cuDNN's frontend is installed, it prints the device's properties as cuDNN sees them.
"""

import importlib
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from .serve import nvidia_smi, package

PACKAGES = (
    "jax",
    "jaxlib",
    "burst-attention",
    "nvidia-cudnn-cu13",
    "nvidia-nccl-cu13",
    "torch",
    "flash-linear-attention",
)
ROUNDS = 8


def _seconds(call: Callable[[], jax.Array]) -> float:
    """Returns the shortest time of a call, after one that compiles."""
    jax.block_until_ready(call())
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - begin)
    return min(times)


def rates(quick: bool) -> dict[str, float]:
    """Returns gigabytes per second that a copy reads and writes, and TFLOP/s of a product."""
    numbers = jnp.arange(1 << (16 if quick else 29), dtype=jnp.int32)
    negated = jax.jit(jnp.negative)
    found = {"copy_gb_s": 2 * numbers.nbytes / _seconds(lambda: negated(numbers)) / 1e9}
    if quick:
        return found
    size = 8192
    a, b = (
        jax.random.normal(key, (size, size), jnp.bfloat16)
        for key in jax.random.split(jax.random.key(0))
    )
    product = jax.jit(jnp.matmul)
    return found | {"product_tflop_s": 2 * size**3 / _seconds(lambda: product(a, b)) / 1e12}


def cudnn_properties() -> Any:
    """Returns the device's properties by cuDNN's frontend, or why there are none."""
    try:
        cudnn = importlib.import_module("cudnn")
        return str(cudnn.DeviceProperties(0).serialize())
    except Exception as error:  # an absent package, an old one, or a refusal
        return f"unknown: {type(error).__name__}: {error}"


def main() -> None:
    """Prints the facts, or the rates."""
    if "--rates" in sys.argv:
        print(json.dumps(rates("--quick" in sys.argv)))
        return
    devices = jax.local_devices()
    if devices[0].platform != "gpu":
        sys.exit(f"expected an NVIDIA GPU that JAX can use, found {devices[0].device_kind}")
    module = Path("/proc/driver/nvidia/version")
    facts = {
        "device": devices[0].device_kind,
        "devices": len(devices),
        "driver": module.read_text().split("\n")[0] if module.exists() else "unknown",
        "nvidia-smi": nvidia_smi(),
        "python": platform.python_version(),
        "packages": {name: package(name) for name in PACKAGES},
        "cudnn": cudnn_properties(),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
