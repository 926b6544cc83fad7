"""Which implementation computes a call: the library's calls or plain JAX.

The library has calls for CPU devices (``cpu``) and NVIDIA GPUs (``cuda``). What they do not serve,
the ring in plain JAX (``xla``) computes: float32 on GPUs, devices of other kinds, and rings over
the CPU devices of several processes.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from burst_attention import _checks
from burst_attention._check_masks import SOFT_CAPS
from burst_attention._types import Implementation

ASKED: Implementation = "xla"


def chosen(asked: Any, mesh: _checks.AnyMesh, dtype: Any, world_size: int) -> str | None:
    """Returns ``cpu``, ``cuda`` or ``xla`` for a ring along some axes of a mesh.

    Returns None where the mesh does not tell what its devices are. Then lowering decides.
    """
    if asked is not None and not (isinstance(asked, str) and asked == ASKED):
        raise ValueError(
            f"implementation must be None or {ASKED!r}, got {asked!r}; None takes the library's "
            "calls where they serve, and plain JAX elsewhere"
        )
    if asked is not None:
        return ASKED
    platform = _checks.platform(mesh)
    if platform is None or serves(platform, dtype, world_size):
        return platform
    if platform in ("cuda", "rocm"):
        why = "float32" if platform == "cuda" else "GPUs that are not NVIDIA's"
        cast = "; bfloat16 and float16 have kernels" if platform == "cuda" else ""
        warnings.warn(
            f"burst_attention has no kernels for {why}, so attention is computed in plain JAX, "
            f"which is slower{cast}. implementation='xla' asks for it and silences this warning",
            skip_file_prefixes=(str(Path(__file__).parent),),
        )
    return ASKED


def serves(
    platform: str, dtype: Any, world_size: int, *, keeps_float32: bool = False, soft_cap: float = 0
) -> bool:
    """Whether the library computes such a call on devices of a platform."""
    if platform == "cpu":
        return world_size == 1 or jax.process_count() == 1
    if platform == "cuda":
        least, most = SOFT_CAPS["cuda"]
        in_range = not soft_cap or least <= soft_cap <= most
        return dtype != jnp.float32 and in_range and not keeps_float32
    return False
