"""The report of ``python -m burst_attention``: versions, devices, the library, and self-checks."""

import os
import platform
from collections.abc import Callable
from functools import partial
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import burst_attention as ba
from burst_attention import _ffi, _nccl
from burst_attention._types import Arrays

WIDTH = 30
LIMITS = {"float32": 2e-6, "bfloat16": 1e-2}
"""The largest relative error, in the norm, that a self-check allows in each dtype."""


def report() -> int:
    """Prints the report. Returns 0 if every self-check passed."""
    _ask_for_cpu_devices(8)
    for name, value in _report().items():
        print(f"{name:{WIDTH}}{value}")
    passed = [_reported("self-check, CPU", lambda: jax.devices("cpu"), "float32")]
    if gpus := _gpus():
        # One device is a ring of its own, which needs no communicator.
        passed.append(_reported("self-check, GPU", lambda: gpus[:1], "bfloat16"))
    return 0 if all(passed) else 1


def _reported(name: str, devices: Callable[[], list[jax.Device]], dtype: str) -> bool:
    """Runs a self-check and prints its errors. Returns whether it passed."""
    try:
        size, errors = _self_check(devices(), dtype)
    except Exception as error:  # the report names every failure
        print(f"{name:{WIDTH}}failed: {type(error).__name__}: {error}")
        return False
    passed = all(error <= LIMITS[dtype] for error in errors.values())
    shown = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    verdict = "ok" if passed else "failed"
    print(f"{name:{WIDTH}}{verdict}: ring of {size}, {dtype}, relative error {shown}")
    return passed


def _gpus() -> list[jax.Device]:
    try:
        return jax.devices("cuda")
    except RuntimeError:
        return []  # no NVIDIA GPU, or JAX was told not to use it


def _ask_for_cpu_devices(count: int) -> None:
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", count)


def _report() -> dict[str, object]:
    devices = jax.devices()
    report: dict[str, object] = {
        "burst_attention": f"{ba.__version__} (library {_ffi.library_version()})",
        "jax, jaxlib": f"{jax.__version__}, {metadata.version('jaxlib')}",
        "python": f"{platform.python_version()}, numpy {np.__version__}",
        "platform": f"{platform.platform()}, {os.cpu_count()} cores",
        "devices": f"{len(devices)} × {devices[0].device_kind} ({jax.default_backend()})",
        "implementation": "the library for CPU devices and NVIDIA GPUs, plain JAX elsewhere",
    }
    for name, value in _ffi.describe().items():
        nested = value.items() if isinstance(value, dict) else [("", value)]
        report |= {f"  {name} {inner}".rstrip(): found for inner, found in nested}
    return report | {_nccl.VARIABLE: _nccl.launch_order()}


def _self_check(devices: list[jax.Device], dtype: str) -> tuple[int, dict[str, float]]:
    """Returns the size of a causal ring and its relative errors against attention without a ring.

    Inputs are rounded to ``dtype``; attention without a ring computes in float32.
    """
    size = max(n for n in (1, 2, 4, 8) if n <= len(devices))
    mesh = jax.sharding.Mesh(np.array(devices[:size]), ("context",))
    spec = P(None, "context")
    generator = np.random.default_rng(0)
    shapes = [(1, 512, heads, 64) for heads in (4, 2, 2, 4)]
    arrays = [generator.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in shapes]

    def ring(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return ba.dot_product_attention(
            q, k, v, mesh=mesh, spec=spec, is_causal=True, layout="zigzag"
        )

    sharding = jax.sharding.NamedSharding(mesh, spec)
    stored = [jax.device_put(ba.to_layout(x, size, "zigzag"), sharding) for x in arrays]
    found = [
        ba.from_layout(np.asarray(x, np.float64), size, "zigzag")
        for x in _with_gradients(ring, *stored)
    ]
    with jax.default_matmul_precision("highest"):
        dense = partial(jax.nn.dot_product_attention, is_causal=True)
        expected = _with_gradients(dense, *(x.astype(np.float32) for x in arrays))
    names = ("out", "dq", "dk", "dv")
    return size, {
        name: float(np.linalg.norm(x - y) / np.linalg.norm(y))
        for name, x, y in zip(names, found, expected, strict=True)
    }


@partial(jax.jit, static_argnums=0)
def _with_gradients(
    attend: Callable[..., jax.Array], q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array
) -> Arrays:
    """Returns the results of attention and its gradients."""
    out, pullback = jax.vjp(attend, q, k, v)
    return out, *pullback(dout)
