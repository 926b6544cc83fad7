"""``python -m burst_attention``: what a bug report needs, and a two-second self-check."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from importlib import metadata
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import burst_attention as ba
from burst_attention import _ffi

WIDTH = 30
LIMIT = 2e-6
"""Largest relative error, in the norm, of the float32 self-check."""


def main() -> int:
    """Prints the report; 0 if the self-check passed."""
    argparse.ArgumentParser(prog="python -m burst_attention", description=__doc__).parse_args()
    _ask_for_cpu_devices(8)
    for name, value in _report().items():
        print(f"{name:{WIDTH}}{value}")
    try:
        size, errors = _self_check()
    except Exception as error:  # the report must name whatever went wrong
        print(f"{'self-check':{WIDTH}}failed: {type(error).__name__}: {error}")
        return 1
    passed = all(error <= LIMIT for error in errors.values())
    shown = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    verdict = "ok" if passed else "failed"
    print(f"{'self-check':{WIDTH}}{verdict}: ring of {size}, relative error {shown}")
    return 0 if passed else 1


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
        "kernels": "CPU, on host devices; the CUDA images are not used yet",
    }
    report |= {f"  {name}": value for name, value in _ffi.describe().items()}
    return report | {"nccl": "not used"}


def _self_check(
    seq: int = 512, heads: int = 4, kv_heads: int = 2, head_dim: int = 64
) -> tuple[int, dict[str, float]]:
    """Size of a causal ring, and its relative errors against dense float64."""
    devices = jax.devices("cpu")
    size = max(n for n in (1, 2, 4, 8) if n <= len(devices))
    mesh = jax.sharding.Mesh(np.array(devices[:size]), ("context",))
    generator = np.random.default_rng(0)
    shapes = [(1, seq, heads, head_dim)] + [(1, seq, kv_heads, head_dim)] * 2
    shapes.append(shapes[0])
    q, k, v, dout = (generator.standard_normal(shape, dtype=np.float32) for shape in shapes)

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
    restored = [ba.from_layout(np.asarray(x), size, "zigzag") for x in found]
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
