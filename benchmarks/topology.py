"""Kinds of GPU that XLA's compiler compiles for on a machine that has none of them.

JAX must find its CUDA plugin: `make` puts it into `.venv/cuda`, outside the packages of `.venv`.
A kind becomes a text in the format of XLA's `GpuTargetConfigProto`. Its numbers are facts from
openxla/xla, whose folder `xla/backends/gpu/target_config/specs` has a file for each kind. The text
holds the fields that bound launches and memory. It leaves out the rates of arithmetic units.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

EQUAL = """
    device_vendor: "NVIDIA Corporation" device_address_bits: 64
    threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
    shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
    shared_memory_per_core: 233472 fpus_per_core: 128
    registers_per_core_limit: 65536 registers_per_block_limit: 65536
    block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
    thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
    driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0"
    device_interconnect_info { active_links: 18 }
"""
"""The fields that are equal on all kinds."""


@dataclass(frozen=True)
class Kind:
    """The numbers in which the kinds differ."""

    name: str
    major: int
    """First part of the compute capability; the second part is 0."""
    multiprocessors: int
    gigahertz: float
    memory: int
    """Bytes."""
    bandwidth: int
    """Bytes per second."""
    cache: int
    """Bytes of the L2 cache."""
    host: int = 8
    """GPUs of a host."""
    links: int = 8
    """GPUs that NVLink connects."""

    def text(self) -> str:
        """Returns the description that XLA's compiler takes."""
        return f"""
            gpu_device_info {{
              name: "{self.name}"
              cuda_compute_capability {{
                major: {self.major}
                feature_extension: ACCELERATED_FEATURES
              }}
              core_count: {self.multiprocessors}
              clock_rate_ghz: {self.gigahertz}
              device_memory_size: {self.memory}
              memory_bandwidth: {self.bandwidth}
              l2_cache_size: {self.cache}
              {EQUAL}
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 }}
            device_description_str: "{self.name}"
        """


KINDS = {
    "H100": Kind("NVIDIA H100 80GB HBM3", 9, 132, 1.98, 84942979072, 3352320000000, 52428800),
    "H200": Kind("NVIDIA H200 141GB HBM3e", 9, 132, 1.98, 151397597184, 4800000000000, 52428800),
    "B200": Kind("NVIDIA B200", 10, 148, 1.965, 191514411008, 7672320000000, 132644864),
    "GB200": Kind(
        "NVIDIA GB200", 10, 152, 2.062, 197897748480, 7928064000000, 135528448, host=4, links=64
    ),
}


@cache
def devices(name: str, count: int) -> Any:
    """Returns ``count`` devices of a kind, over as many hosts as they need."""
    kind = KINDS[name]
    domain, host = min(count, kind.links), min(count, kind.host)
    # NVLink domains × hosts of a domain × GPUs of a host.
    shape = f"{count // domain}x{domain // host}x{host}"
    found = topologies.get_topology_desc(
        platform="cuda", topology_name=f"{name} {shape}", topology=shape, target_config=kind.text()
    )
    return found.devices


def mesh(kind: str, axes: tuple[tuple[str, int], ...]) -> Mesh:
    """Returns a mesh of devices of a kind; ``axes`` are names and sizes."""
    sizes = tuple(size for _, size in axes)
    found = np.array(devices(kind, int(np.prod(sizes)))).reshape(sizes)
    return Mesh(found, tuple(name for name, _ in axes))
