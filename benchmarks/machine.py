"""Names this machine and measures how fast it multiplies matrices."""

import json
import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp


def cpu_name() -> str:
    """Returns the name in /proc/cpuinfo, with family and model: some hypervisors hide the name."""
    found = dict(
        re.findall(r"^(model name|cpu family|model)\s*: (.*)$", _read("/proc/cpuinfo"), re.M)
    )
    if "model name" not in found:
        return platform.machine()
    return f"{found['model name']} (family {found['cpu family']}, model {found['model']})"


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def slug() -> str:
    """Returns CPU and cores as a file name."""
    return re.sub(r"[^a-z0-9]+", "-", f"{cpu_name()} {cores()} cores".lower()).strip("-")


def available_bytes() -> int:
    """Returns the bytes of memory that are available without swapping."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"), re.M)
    return int(found[1]) * 1024 if found else 0


class Peak:
    """The fastest float32 matrix product so far, in GFLOP/s, of the gemm crate and of XLA."""

    def __init__(self, binary: Path, size: int):
        self.binary, self.size = binary, size
        self.gemm = self.xla = 0.0

    def measure(self) -> None:
        """Runs both products and keeps the best of all calls."""
        output = subprocess.run(
            [self.binary, str(self.size)], check=True, capture_output=True, text=True
        ).stdout
        self.gemm = max(self.gemm, float(json.loads(output)["gflops"]))
        self.xla = max(self.xla, self._xla_gflops())

    @property
    def gflops(self) -> float:
        """Returns the better speed of the two products."""
        return max(self.gemm, self.xla)

    def as_dict(self) -> dict[str, Any]:
        """Returns the figures for the file of results."""
        return {"size": self.size, "gemm_crate_gflops": self.gemm, "xla_dot_gflops": self.xla}

    def _xla_gflops(self, rounds: int = 5) -> float:
        a, b = jax.random.normal(jax.random.key(0), (2, self.size, self.size), jnp.float32)
        multiply = jax.jit(jnp.matmul)
        multiply(a, b).block_until_ready()
        best = float("inf")
        for _ in range(rounds):
            start = time.perf_counter()
            multiply(a, b).block_until_ready()
            best = min(best, time.perf_counter() - start)
        return 2.0 * self.size**3 / best / 1e9


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
