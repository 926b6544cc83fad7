"""What is static about a ring, its place in the mesh, and the mesh axes its results vary over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Inputs = TypeVar("Inputs")
"""Arrays, in any tree."""


@dataclass(frozen=True)
class Ring:
    """Everything static about a call: what the custom calls get as attributes."""

    axes: tuple[str, ...]
    """Mesh axes of the sequence, the major one first: rank = outer · inner size + inner. Of none,
    each device is a ring."""
    world_size: int
    schedule: str
    """As the library names it; ``double_ring`` for rings over two axes."""
    inner_size: int
    """Ranks of an inner ring; 0 but for double rings."""
    window: tuple[int, int]
    """How many positions back and ahead a query sees; −1 for no limit."""
    softmax_scale: float
    soft_cap: float
    """0 for none."""
    dropout_rate: float
    """0 for none."""
    layout: str
    backward: str
    backward_order: str
    """Only the backward calls of GPUs get it: CPU devices compute in one order."""
    varying: tuple[str, ...]
    """Mesh axes over which the results differ; empty where ``shard_map`` doesn't track them."""
    implementation: str | None
    """``cpu``, ``cuda`` or ``xla``; None where lowering decides. See `_implementation`."""
    groups: tuple[int, ...]
    """Logical ids of the devices of all rings, see `ring_groups`."""
    keeps_float32: bool
    """Whether the backward pass gets o in float32 however many keys there are."""
    has_sinks: bool
    """Whether sink logits join the rows: then o comes in float32, to be rounded after them."""


def ring_groups(mesh: jax.sharding.AbstractMesh, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Logical device ids of all rings along axes, ring after ring, each in the ring's order.

    The logical id of a device is its position in the mesh, row-major over all axes: what the
    replica groups of XLA's own collectives consist of.
    """
    ids = np.arange(mesh.size).reshape(mesh.axis_sizes)
    places = [mesh.axis_names.index(name) for name in axes]
    rings = np.moveaxis(ids, places, range(-len(places), 0))
    return tuple(rings.reshape(-1).tolist())


def place(axes: tuple[str, ...]) -> jax.Array:
    """(rank, ring): the index along the ring's axes, and that of the ring among all of the mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    ring: Any = 0
    for name in mesh.axis_names:
        if name in mesh.manual_axes and name not in axes and mesh.shape[name] > 1:
            ring = ring * mesh.shape[name] + lax.axis_index(name)
    return jnp.stack([lax.axis_index(axes), ring]).astype(jnp.int32)


def vary(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """``x`` typed as different along ``axes``."""
    missing = tuple(name for name in axes if name not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Mesh axes over which ``x`` differs, as far as ``shard_map`` tracks them."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def vary_together(ring_axes: tuple[str, ...], inputs: Inputs) -> tuple[tuple[str, ...], Inputs]:
    """The union of the inputs' varying axes and the ring's, and the inputs cast to it."""
    # With check_vma=False not even the rank itself is tracked as varying, and nothing is cast.
    tracked = varying_axes(lax.axis_index(ring_axes))
    union = tracked.union(*(varying_axes(x) for x in jax.tree.leaves(inputs)))
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(name for name in mesh.axis_names if name in union)
    return axes, jax.tree.map(lambda x: vary(x, axes), inputs)
