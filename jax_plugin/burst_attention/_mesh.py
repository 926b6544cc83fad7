"""The mesh: axes along which rings run, ranks on them, and the axes that arrays vary over."""

import math
from collections.abc import Callable, Iterable, Sequence, Set
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Int32

from burst_attention._checks import describe, listed
from burst_attention._types import AnyMesh, Axes

Function = TypeVar("Function", bound=Callable[..., object])
Inputs = TypeVar("Inputs")
"""Arrays, in any tree."""


def ring_axes(axis_name: object) -> Axes:
    """Returns the mesh axes of the sequence, the outermost one first.

    `levels` checks that a mesh has rings along them.
    """
    axes = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(axes, tuple | list) or not all(isinstance(axis, str) for axis in axes):
        raise TypeError(
            "axis_name must be the name of a mesh axis, or a pair (outer, inner) of names, got "
            f"{describe(axis_name)}"
        )
    if not axes or len(set(axes)) < len(axes):
        raise _not_a_ring(repr(axis_name))
    return tuple(axes)


def levels(mesh: AnyMesh, axes: Axes) -> Axes:
    """Returns the axis of a ring, or the two axes of a double ring, the outer one first.

    Of more than two axes, it leaves out axes of one device, the last ones first.
    """
    spare = [name for name in axes if mesh.shape[name] == 1][::-1][: max(0, len(axes) - 2)]
    found = tuple(name for name in axes if name not in spare)
    if len(found) > 2:
        raise _not_a_ring(f"{found}, all of several devices")
    return found


def _not_a_ring(words: str) -> ValueError:
    return ValueError(
        "axis_name must be one mesh axis or two different ones, (outer, inner), got "
        f"{words}; reshape the mesh so that at most two hold the sequence"
    )


def axis_name_of(axes: Axes) -> str | Axes:
    """Returns ``axis_name`` as users write it."""
    return axes[0] if len(axes) == 1 else axes


def ring_mesh(
    axes: Axes,
    caller: str = "attention",
    globally: str = "on global arrays use burst_attention.dot_product_attention",
) -> AbstractMesh:
    """Returns the mesh of the surrounding ``shard_map``, in which a ring along ``axes`` can run.

    ``globally`` tells users of global arrays what to do.
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = mesh.manual_axes
    if not manual:
        raise ValueError(
            f"{caller} must be called inside jax.shard_map, which gives "
            f"axis_name={axis_name_of(axes)!r} its devices (a vmap axis has none); {globally}"
        )
    if any(name not in manual for name in axes):
        raise ValueError(
            f"axis_name must be an axis of the surrounding jax.shard_map, one of "
            f"{listed(manual)}, got {axis_name_of(axes)!r}"
        )
    levels(mesh, axes)
    return mesh


def axes_inside(caller: str, axis_name: object) -> Axes | None:
    """Returns the axes along which the surrounding ``shard_map`` makes arrays shards.

    Returns None where arrays are global: outside of any ``shard_map``, and inside one over other
    axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = None if axis_name is None else ring_axes(axis_name)
    if axes and set(axes).intersection(mesh.manual_axes):
        return axes
    if not mesh.manual_axes or mesh.auto_axes or mesh.explicit_axes:
        return None
    if axes is None:
        raise ValueError(
            f"{caller} needs axis_name inside jax.shard_map, where arrays are shards: the axis "
            f"that shards the sequence, one of {listed(mesh.manual_axes)}"
        )
    return axes


def all_axes_manual(
    mesh: AbstractMesh,
    *arrays: jax.Array,
    globally: str = ", or call burst_attention.dot_product_attention on global arrays",
) -> None:
    """Raises where the surrounding ``shard_map`` leaves to the compiler axes that cut arrays.

    Auto axes may cut any array. The types of arrays say whether Explicit axes cut them.
    """
    cutting = {
        axis for x in arrays for entry in jax.typeof(x).sharding.spec for axis in names_of(entry)
    }
    left = [name for name in mesh.axis_names if name in mesh.auto_axes or name in cutting]
    left = [name for name in left if mesh.shape[name] > 1]
    if left:
        raise ValueError(
            f"every mesh axis must be manual in the surrounding jax.shard_map, but {listed(left)} "
            f"{'is' if len(left) == 1 else 'are'} not: the compiler would gather batch and heads "
            "along them. Leave out axis_names of shard_map and name these axes in in_specs and "
            f"out_specs{globally}"
        )


def names_of(entry: str | Axes | None) -> Axes:
    """Returns the axes of an entry of a ``PartitionSpec``."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def explicit_axes(*arrays: jax.Array) -> Axes:
    """Returns the Explicit axes, of several devices, of the mesh that arrays lie on."""
    meshes = [jax.typeof(x).sharding.mesh for x in arrays]
    mesh = next((mesh for mesh in meshes if not mesh.empty), None)
    return tuple(name for name in mesh.explicit_axes if mesh.shape[name] > 1) if mesh else ()


def over_axes(
    function: Function, in_specs: object, out_specs: object, axes: Set[str] = frozenset()
) -> Function:
    """Returns a function in a ``shard_map`` over ``axes``, within the surrounding one.

    By default it takes all axes that are left, but for those that an outer ``vmap`` maps.
    """
    mesh = jax.sharding.get_abstract_mesh()
    # An inner shard_map tracks what arrays vary over if the surrounding one does.
    tracks = not mesh.manual_axes or bool(varying_axes(lax.axis_index(mesh.manual_axes)))
    return jax.shard_map(
        function, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=tracks
    )


def axes_size(mesh: AnyMesh, axes: Axes) -> int:
    """Returns how many devices a mesh has along some axes."""
    return math.prod(mesh.shape[name] for name in axes)


def platform(mesh: AnyMesh) -> str | None:
    """Returns ``cpu``, ``cuda``, ``rocm``, ``tpu`` …; None where an abstract mesh does not tell."""
    abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    device = abstract.abstract_device
    if device is None:
        return None
    if device.platform != "gpu":
        return str(device.platform)
    # JAX calls the GPUs of all vendors "gpu".
    return "rocm" if device.device_kind.startswith(("AMD", "gfx")) else "cuda"


def ring_groups(mesh: AbstractMesh, axes: Axes) -> tuple[int, ...]:
    """Returns the logical device ids of all rings along ``axes``, ring after ring, in rank order.

    The logical id of a device is its position in the mesh, row-major over all axes. The replica
    groups of XLA's own collectives consist of the same ids.
    """
    ids = np.arange(mesh.size).reshape(mesh.axis_sizes)
    places = [mesh.axis_names.index(name) for name in axes]
    rings = np.moveaxis(ids, places, range(-len(places), 0))
    return tuple(rings.reshape(-1).tolist())


def rank_and_ring(axes: Axes) -> Int32[Array, "2"]:
    """Returns the rank along the ring's axes and the index of the ring among all of the mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    others = [x for x in mesh.axis_names if x in mesh.manual_axes and x not in axes]
    ring: jax.Array | int = 0
    for name in others:
        if mesh.shape[name] > 1:
            ring = ring * mesh.shape[name] + lax.axis_index(name)
    return jnp.stack([lax.axis_index(axes), ring]).astype(jnp.int32)


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Returns the mesh axes over which ``x`` differs, as far as ``shard_map`` tracks them."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def vary_together(axes: Axes, inputs: Inputs) -> Inputs:
    """Returns inputs typed as different along ``axes`` and along the axes of any input."""
    return vary_like((lax.axis_index(axes), inputs), inputs)


def vary_like(like: object, inputs: Inputs) -> Inputs:
    """Returns arrays typed as different along the axes of any array in ``like``."""
    # With check_vma=False JAX tracks not even the rank itself as varying, and casts nothing.
    return vary_over(union_of_varying(jax.tree.leaves(like)), inputs)


def union_of_varying(arrays: Iterable[jax.Array]) -> frozenset[str]:
    """Returns the mesh axes over which any of the arrays differs, as far as JAX tracks them."""
    return frozenset[str]().union(*map(varying_axes, arrays))


def vary_over(axes: Set[str], inputs: Inputs) -> Inputs:
    """Returns arrays typed as different along ``axes`` too."""
    names = [name for name in jax.sharding.get_abstract_mesh().axis_names if name in axes]

    def cast(x: jax.Array) -> jax.Array:
        missing = [name for name in names if name not in varying_axes(x)]
        # Gradients along reduced axes are not summed yet. JAX does not cast them with other axes.
        reduced = jax.typeof(x).manual_axis_type.reduced
        for is_reduced in (True, False):
            axes = tuple(name for name in missing if (name in reduced) == is_reduced)
            x = lax.pcast(x, axes, to="varying") if axes else x
        return x

    return jax.tree.map(cast, inputs)


def send_on(arrays: Inputs, axes: Axes, size: int, hops: int = 1) -> Inputs:
    """Sends arrays some ranks on, of ``size`` ranks, and returns the arrays that arrive."""
    if hops % size == 0:
        return arrays
    pairs = [(rank, (rank + hops) % size) for rank in range(size)]
    return jax.tree.map(lambda x: permute(x, axes, pairs), arrays)


def permute(x: jax.Array, axes: Axes, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """Sends arrays from rank to rank, for each pair (sender, receiver); zeros where none arrives.

    Ranks count in the order of ``axes``. JAX counts them in the order of the mesh here, and
    nowhere else.
    """
    mesh = jax.sharding.get_abstract_mesh()
    declared = tuple(name for name in mesh.axis_names if name in axes)
    ranks = np.arange(axes_size(mesh, axes)).reshape([mesh.shape[name] for name in axes])
    place = np.argsort(ranks.transpose([axes.index(name) for name in declared]).reshape(-1))
    return lax.ppermute(x, declared, [(int(place[a]), int(place[b])) for a, b in pairs])
