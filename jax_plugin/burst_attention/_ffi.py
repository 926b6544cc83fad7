"""The library: loads it, registers its custom calls with XLA and issues them."""

from __future__ import annotations

import ctypes
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

FORWARD = "burst_attention_forward"
BACKWARD = "burst_attention_backward"
SHORT_SEQUENCE = 256
"""Up to this many tokens in all, the backward pass gets o before it is rounded to 16 bits. There
gradients are small differences (a query that sees one key has none at all), and a rounded o in
delta = rowsum(dout ∘ o) made errors of dq and dk up to 1.6 times those of rounding alone; from 130
tokens on it was 1.11 at most. For long sequences it would cost two bytes more per element."""
LIBRARY = Path(__file__).with_name("libburst_attention_ffi.so")


@dataclass(frozen=True)
class Ring:
    """Everything static about a call: what the custom calls get as attributes."""

    axis_name: str
    world_size: int
    is_causal: bool
    softmax_scale: float
    layout: str
    backward: str
    varying: tuple[str, ...]
    """Mesh axes over which the results differ; empty where ``shard_map`` doesn't track them."""


def _load() -> ctypes.CDLL:
    if not LIBRARY.exists():
        raise ImportError(
            f"{LIBRARY} is missing: it is part of the wheel; in a source tree, run `make build`"
        )
    library = ctypes.CDLL(str(LIBRARY))
    library.burst_attention_version.restype = ctypes.c_char_p
    library.burst_attention_describe.restype = ctypes.c_char_p
    library.burst_attention_bytes_sent.restype = ctypes.c_uint64
    library.burst_attention_trace.argtypes = [ctypes.c_char_p]
    return library


def _register(library: ctypes.CDLL) -> None:
    # At import, so that exported programs and cached executables find their custom calls too.
    for target in (FORWARD, BACKWARD):
        stages = {
            stage: jax.ffi.pycapsule(getattr(library, f"{target}_{stage}"))
            for stage in ("instantiate", "execute")
        }
        jax.ffi.register_ffi_target(target, stages, platform="cpu")


_library = _load()
_register(_library)


def library_version() -> str:
    """Version of the loaded library."""
    return str(_library.burst_attention_version().decode())


def describe() -> dict[str, Any]:
    """What the library says about itself: instruction sets, threads, API versions."""
    found: dict[str, Any] = json.loads(_library.burst_attention_describe())
    return found


def bytes_sent() -> int:
    """Bytes that all rings of this process have sent so far."""
    return int(_library.burst_attention_bytes_sent())


def trace(path: str | None) -> bool:
    """Begins to record steps for ``path``; None ends it and writes the file. False if it can't."""
    encoded = None if path is None else path.encode()
    return int(_library.burst_attention_trace(encoded)) == 0


def forward(ring: Ring, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    """o and lse, float32 ``[batch, seq, heads]``, of one rank from its q, k, v.

    o has the dtype of q, but is float32 for sequences of up to `SHORT_SEQUENCE` tokens.
    """
    q = operands[0]
    short = ring.world_size * q.shape[1] <= SHORT_SEQUENCE
    results = (
        jax.ShapeDtypeStruct(q.shape, jnp.float32 if short else q.dtype),
        jax.ShapeDtypeStruct(q.shape[:3], jnp.float32),
    )
    o, lse = _call(FORWARD, ring, results, *operands)
    return o, lse


def backward(ring: Ring, *operands: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq, dk and dv of one rank from its q, k, v, o, lse, dout and dlse."""
    results = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[:3])
    dq, dk, dv = _call(BACKWARD, ring, results, *operands, backward=ring.backward)
    return dq, dk, dv


def _call(
    target: str,
    ring: Ring,
    results: tuple[jax.ShapeDtypeStruct, ...],
    *operands: jax.Array,
    **attributes: str,
) -> list[jax.Array]:
    # A ring inside one call is pure, so equal calls may be merged and unused ones dropped: all
    # ranks run one program, and what is dropped on one is dropped on all.
    call = jax.ffi.ffi_call(target, results, vmap_method="broadcast_all", has_side_effect=False)
    with jax.named_scope(target):
        outputs = call(
            *operands,
            _place(ring.axis_name),
            world_size=np.int64(ring.world_size),
            layout=ring.layout,
            is_causal=ring.is_causal,
            softmax_scale=np.float32(ring.softmax_scale),
            axis_name=ring.axis_name,
            **attributes,
        )
    return [_vary(output, ring.varying) for output in outputs]


def _place(axis_name: str) -> jax.Array:
    """(rank, ring): the index along the ring's axis, and that of the ring among all of the mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    ring: Any = 0
    for name in mesh.axis_names:
        if name in mesh.manual_axes and name != axis_name and mesh.shape[name] > 1:
            ring = ring * mesh.shape[name] + lax.axis_index(name)
    return jnp.stack([lax.axis_index(axis_name), ring]).astype(jnp.int32)


def _vary(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    # A custom call's results are typed as equal on all devices, unless told.
    missing = tuple(name for name in axes if name not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Mesh axes over which ``x`` differs, as far as ``shard_map`` tracks them."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def vary_together(
    axis_name: str, *inputs: jax.Array
) -> tuple[tuple[str, ...], tuple[jax.Array, ...]]:
    """The union of the inputs' varying axes and the ring's, and the inputs cast to it."""
    # With check_vma=False not even the rank itself is tracked as varying, and nothing is cast.
    tracked = varying_axes(lax.axis_index(axis_name))
    union = tracked.union(*(varying_axes(x) for x in inputs))
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(name for name in mesh.axis_names if name in union)
    return axes, tuple(_vary(x, axes) for x in inputs)
