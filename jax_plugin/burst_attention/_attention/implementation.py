"""Which implementation computes a call: the library's calls or plain JAX.

The library has calls for CPU devices (``cpu``) and NVIDIA GPUs (``cuda``). The ring in plain JAX
(``xla``) computes what the library does not serve: float32 on GPUs, devices of other kinds, and
rings over the CPU devices of several processes. It also computes on GPUs whose kernels
``python -m burst_attention check`` found wrong.
"""

import warnings
from pathlib import Path

import jax
import jax.numpy as jnp

from burst_attention import _confirmed, _mesh
from burst_attention._attention.options import Implementation
from burst_attention._types import AnyMesh

SOFT_CAPS = {"cpu": (1e-30, 1e30), "cuda": (1e-3, 1e3), "xla": (1e-30, 1e30)}
"""The smallest and the largest soft cap of each implementation."""
PACKAGE = str(Path(__file__).parents[1])


def chosen(
    asked: Implementation | None, mesh: AnyMesh, dtype: jnp.dtype, world_size: int
) -> str | None:
    """Returns ``cpu``, ``cuda`` or ``xla`` for a ring of ``world_size`` devices of a mesh.

    Returns None where the mesh does not tell what its devices are. Then lowering decides.
    """
    if asked is not None:
        return asked
    platform = _mesh.platform(mesh)
    if platform is None or serves(platform, dtype, world_size):
        is_refuted = platform == "cuda" and _confirmed.refuted("attention", platform)
        return "xla" if is_refuted else platform
    if platform in ("cuda", "rocm"):
        warn_of_plain("float32" if platform == "cuda" else "GPUs that are not NVIDIA's")
    return "xla"


def warn_of_plain(what: str) -> None:
    """Warns that plain JAX computes what GPUs have no kernels for."""
    others = "bfloat16 and float16 have kernels. " if "float32" in what else ""
    warnings.warn(
        f"burst_attention has no kernels for {what}, so plain JAX computes it, more slowly. "
        f"{others}implementation='xla' asks for it and silences this warning",
        skip_file_prefixes=(PACKAGE,),
    )


def serves(
    platform: str,
    dtype: jnp.dtype,
    world_size: int,
    *,
    keeps_float32: bool = False,
    soft_cap: float | None = None,
) -> bool:
    """Returns whether the library computes such a call on devices of a platform."""
    if platform == "cpu":
        return world_size == 1 or jax.process_count() == 1
    if platform == "cuda":
        least, most = SOFT_CAPS["cuda"]
        in_range = soft_cap is None or least <= soft_cap <= most
        return dtype != jnp.float32 and in_range and not keeps_float32
    return False


def check_soft_cap(cap: float | None, implementation: str | None) -> None:
    """Raises for a cap of the scores that an implementation does not take."""
    least, most = SOFT_CAPS[implementation or "cpu"]
    if cap is not None and not least <= cap <= most:
        on_gpus = implementation == "cuda"
        where = "on NVIDIA GPUs " if on_gpus else ""
        instead = "; implementation='xla' takes others" if on_gpus else ""
        raise ValueError(
            f"logits_soft_cap must be {where}from {least:g} to {most:g}, or None for no cap, "
            f"got {cap:g}{instead}"
        )


def check_residual_dtype(keeps_float32: bool, implementation: str | None) -> None:
    """Raises where an implementation can't keep out in float32 for the backward pass."""
    if keeps_float32 and implementation == "cuda":
        raise NotImplementedError(
            "residual_dtype='float32' needs CPU devices or implementation='xla': the kernels for "
            "NVIDIA GPUs round out to query's dtype before they store it"
        )
