"""``python -m burst_attention``: what a bug report needs, and self-checks of seconds.

``python -m burst_attention schedule`` predicts what a schedule takes on a machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import burst_attention as ba
from burst_attention import _ffi, _nccl, _schedule

WIDTH = 30
LIMITS = {"float32": 2e-6, "bfloat16": 1e-2}
"""Largest relative error, in the norm, of a self-check in each dtype."""


def main() -> int:
    """Carries out the command; without one, prints the report. 0 if all went well."""
    parser = argparse.ArgumentParser(prog="python -m burst_attention", description=__doc__)
    _schedule.add_parser(parser.add_subparsers(title="commands"))
    parser.set_defaults(run=lambda _: report())
    flags = parser.parse_args()
    return int(flags.run(flags))


def report() -> int:
    """Prints the report; 0 if every self-check passed."""
    _ask_for_cpu_devices(8)
    for name, value in _report().items():
        print(f"{name:{WIDTH}}{value}")
    passed = [_reported("self-check, CPU", lambda: jax.devices("cpu"), "float32")]
    if gpus := _gpus():
        # One device: a ring of its own, which needs no communicator.
        passed.append(_reported("self-check, GPU", lambda: gpus[:1], "bfloat16"))
    return 0 if all(passed) else 1


def _reported(name: str, devices: Callable[[], list[Any]], dtype: str) -> bool:
    """Runs a self-check and prints how it went."""
    try:
        size, errors = _self_check(devices(), dtype)
    except Exception as error:  # the report must name whatever went wrong
        print(f"{name:{WIDTH}}failed: {type(error).__name__}: {error}")
        return False
    passed = all(error <= LIMITS[dtype] for error in errors.values())
    shown = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    verdict = "ok" if passed else "failed"
    print(f"{name:{WIDTH}}{verdict}: ring of {size}, {dtype}, relative error {shown}")
    return passed


def _gpus() -> list[Any]:
    try:
        return jax.devices("cuda")
    except RuntimeError:
        return []  # no NVIDIA GPU, or JAX was told not to use it


def _ask_for_cpu_devices(count: int) -> None:
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", count)


def _report() -> dict[str, Any]:
    devices = jax.devices()
    report = {
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


def _self_check(
    devices: list[Any],
    dtype: str,
    seq: int = 512,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
) -> tuple[int, dict[str, float]]:
    """Size of a causal ring, and its relative errors against dense float64."""
    size = max(n for n in (1, 2, 4, 8) if n <= len(devices))
    mesh = jax.sharding.Mesh(np.array(devices[:size]), ("context",))
    generator = np.random.default_rng(0)
    shapes = [(1, seq, heads, head_dim)] + [(1, seq, kv_heads, head_dim)] * 2
    shapes.append(shapes[0])
    q, k, v, dout = (generator.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in shapes)

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
        def ring(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return ba.dot_product_attention(
                q, k, v, mesh=mesh, spec=P(None, "context"), is_causal=True, layout="zigzag"
            )

        out, pullback = jax.vjp(ring, q, k, v)
        return out, *pullback(dout)

    sharding = jax.sharding.NamedSharding(mesh, P(None, "context"))
    stored = (ba.to_layout(x, size, "zigzag") for x in (q, k, v, dout))
    found = run(*(jax.device_put(x, sharding) for x in stored))
    restored = [ba.from_layout(np.asarray(x, np.float64), size, "zigzag") for x in found]
    expected = _dense(*(x.astype(np.float64) for x in (q, k, v, dout)))
    names = ("out", "dq", "dk", "dv")
    return size, {
        name: float(np.linalg.norm(x - y) / np.linalg.norm(y))
        for name, x, y in zip(names, restored, expected, strict=True)
    }


def _dense(q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, ...]:
    """Causal attention and its gradients, written out in float64."""
    group = q.shape[2] // k.shape[2]
    scale, seq = q.shape[3] ** -0.5, q.shape[1]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    s = np.einsum("bqhd,bkhd->bhqk", q, k) * scale
    s = np.where(np.tril(np.ones((seq, seq), bool)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out = np.einsum("bhqk,bkhd->bqhd", p, v)
    delta = np.einsum("bqhd,bqhd->bhq", dout, out)
    ds = p * (np.einsum("bqhd,bkhd->bhqk", dout, v) - delta[..., None]) * scale
    dk, dv = np.einsum("bhqk,bqhd->bkhd", ds, q), np.einsum("bhqk,bqhd->bkhd", p, dout)
    dk, dv = (x.reshape(*x.shape[:2], -1, group, x.shape[3]).sum(3) for x in (dk, dv))
    return out, np.einsum("bhqk,bkhd->bqhd", ds, k), dk, dv


if __name__ == "__main__":
    sys.exit(main())
