"""Which mesh, and which of its axes cut which dimension of global arrays."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from burst_attention import _checks
from burst_attention._mesh import axes_size, axis_name_of, ring_axes
from burst_attention._types import AnyMesh, Axes

Cuts: TypeAlias = tuple[Axes, ...]
"""For each dimension of an array the mesh axes that cut it."""
DIMENSIONS = ("batch", "seq", "heads", "head_dim")


@dataclass(frozen=True)
class Placement:
    """A mesh, and which of its axes cut which dimension of global arrays."""

    mesh: AnyMesh
    ring_axes: Axes
    """The axis of the sequence, or the two axes of a double ring."""
    axes: Mapping[str, Axes]
    """The axes that cut ``batch``, ``q_len``, ``kv_len``, ``heads`` and ``kv_heads``."""

    def spec(self, shape: str) -> PartitionSpec:
        """Returns the sharding of an array, whose shape consists of names."""
        return _spec(self._cuts(shape))

    def spec_of(self, name: str, x: jax.Array, shape: str) -> PartitionSpec:
        """Returns the sharding of an array that may be whole, if its type says so."""
        explicit = set(_of_type(self.mesh, AxisType.Explicit))
        actual = _only(explicit, _actual_axes(x))
        if actual == _only(explicit, self._cuts(shape)):
            return self.spec(shape)
        if any(actual):
            first = "the batch" if x.ndim == 1 else "the first two dimensions"
            like = f"{'the heads' if 'heads' in shape.split() else first} of query"
            raise ValueError(
                f"{name} must be sharded like {like}, {self.spec(shape)}, or not at all, "
                f"got {_spec(actual)}; use jax.reshard"
            )
        return PartitionSpec()

    def _cuts(self, shape: str) -> Cuts:
        return tuple(self.axes.get(length, ()) for length in shape.split())


def find_mesh(mesh: object, query: jax.Array) -> AnyMesh:
    """Returns the mesh given, else the mesh of the array, else the mesh of ``jax.set_mesh``."""
    current = jax.sharding.get_abstract_mesh()
    if current.manual_axes and not (current.auto_axes or current.explicit_axes):
        raise ValueError(
            "dot_product_attention takes global arrays, but is called inside jax.shard_map, where "
            "arrays are shards; call burst_attention.attention there"
        )
    if current.manual_axes:
        # Inside a shard_map over some axes: a shard_map over the remaining axes nests in it.
        return current
    if mesh is None:
        mesh = _mesh_of(query)
    if mesh is None:
        mesh = current
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    if mesh.empty:
        raise ValueError(
            "dot_product_attention needs a mesh, but the arrays are on none; pass mesh= and spec=, "
            "or put the arrays on one with jax.device_put(x, NamedSharding(mesh, spec))"
        )
    return mesh


def _mesh_of(query: jax.Array) -> AnyMesh | None:
    if not isinstance(query, jax.core.Tracer) and isinstance(query.sharding, NamedSharding):
        return query.sharding.mesh
    mesh: AnyMesh = jax.typeof(query).sharding.mesh
    return None if mesh.empty else mesh


def find_placement(
    mesh: AnyMesh,
    spec: object,
    axis_name: object,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
) -> Placement:
    """Returns the placement of ``spec``, or of the arrays' types where all axes are Explicit."""
    if spec is None:
        q_axes, kv_axes = _axes_from_types(mesh, query, key, value)
    else:
        q_axes = kv_axes = _axes_of(spec, mesh)
        if key.shape[2] < axes_size(mesh, q_axes[2]):
            # Key/value heads stay whole if they are fewer than the shards of their axis.
            kv_axes = (*q_axes[:2], (), q_axes[3])
        _check_explicit(mesh, query=(query, q_axes), key=(key, kv_axes), value=(value, kv_axes))
    found = f"got {_spec(q_axes)} and {_spec(kv_axes)}; use jax.reshard"
    if q_axes[:2] != kv_axes[:2]:
        raise ValueError(f"query and key must be sharded alike in batch and seq, {found}")
    ring = _ring_axes(axis_name, q_axes[1], mesh)
    _check_divisible(mesh, q_axes, query.shape, "query")
    _check_divisible(mesh, kv_axes, key.shape, "key")
    (batch, seq, heads, _), kv_heads = q_axes, kv_axes[2]
    if kv_heads not in ((), heads):
        raise ValueError(f"key heads must be sharded like the query heads or not at all, {found}")
    if kv_heads != heads:
        _check_owned(key.shape[2], axes_size(mesh, heads))
    axes = {"batch": batch, "q_len": seq, "kv_len": seq, "heads": heads, "kv_heads": kv_heads}
    return Placement(mesh, ring, axes)


def sequence_axes(
    mesh: AnyMesh, spec: object, axis_name: object, qkv: tuple[jax.Array, jax.Array, jax.Array]
) -> Axes:
    """Returns the axes that are to shard sequences of any length.

    No type says that an axis cuts a length that it does not divide. So ``axis_name`` may name axes
    that do not cut the arrays yet.
    """
    if spec is not None:
        return _ring_axes(axis_name, _axes_of(spec, mesh)[1], mesh)
    found = _axes_from_types(mesh, *qkv)[0][1]
    if found or axis_name is not None:
        return _ring_axes(axis_name, found or ring_axes(axis_name), mesh)
    raise ValueError(
        "axis_name or spec is needed to say which mesh axis shards the sequence, dimension 1 of "
        'query, since its type does not: pass axis_name="context" with the name of the axis'
    )


def _axes_from_types(
    mesh: AnyMesh, query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[Cuts, Cuts]:
    """Returns the axes that cut query and key, from their types."""
    auto = mesh.axis_names if mesh.are_all_axes_auto else _of_type(mesh, AxisType.Auto)
    if auto:
        names = ", ".join(map(repr, auto))
        raise ValueError(
            f"spec is needed, since mesh axes {names} are Auto: there an array's type does not say "
            'how it is sharded. Pass spec=P("data", "context", "tensor", None) '
            "with the axes that shard batch, seq and heads, or make the axes Explicit"
        )
    found = [_actual_axes(x) for x in (query, key, value)]
    if found[1] != found[2]:
        raise ValueError(
            f"key and value must be sharded alike, got {_spec(found[1])} and {_spec(found[2])}; "
            "use jax.reshard"
        )
    return found[0], found[1]


def _actual_axes(x: jax.Array) -> Cuts:
    """Returns the axes that cut an array, from its type."""
    spec = tuple(jax.typeof(x).sharding.spec)
    return tuple(_tuple(entry) for entry in spec + (None,) * (x.ndim - len(spec)))


def _axes_of(spec: object, mesh: AnyMesh) -> Cuts:
    """Returns the axes that ``spec`` names for each dimension."""
    if not isinstance(spec, PartitionSpec):
        raise TypeError(f"spec must be a jax.sharding.PartitionSpec, got {type(spec).__name__}")
    if len(spec) > 4:
        raise ValueError(f"spec must have at most 4 entries {list(DIMENSIONS)}, got {spec}")
    if PartitionSpec.UNCONSTRAINED in tuple(spec):
        raise ValueError(
            "spec must say of each dimension which mesh axes cut it, with None for none, got "
            f"PartitionSpec.UNCONSTRAINED in {spec}"
        )
    axes = tuple(_tuple(entry) for entry in tuple(spec) + (None,) * (4 - len(spec)))
    unknown = [name for names in axes for name in names if name not in mesh.axis_names]
    if unknown:
        names = tuple(mesh.axis_names)
        raise ValueError(f"spec must name axes of the mesh {names}, got {unknown[0]!r} in {spec}")
    return axes


def _tuple(entry: str | Axes | None) -> Axes:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _only(some: set[str], cuts: Cuts) -> Cuts:
    return tuple(tuple(name for name in axes if name in some) for axes in cuts)


def _check_owned(kv_heads: int, shards: int) -> None:
    """Raises unless the query heads of each device use whole key/value heads."""
    if kv_heads % shards and shards % kv_heads:
        raise ValueError(
            f"key/value heads and the {shards} shards of the query heads must divide one another, "
            f"got {kv_heads} heads: the query heads of some device would use parts of several "
            "key/value heads. Repeat key and value with jnp.repeat(x, n, axis=2), or shard the "
            "heads over fewer devices"
        )


def _ring_axes(given: object, found: Axes, mesh: AnyMesh) -> Axes:
    """Returns the axes of the sequence, ``found`` in the sharding of query."""
    if given is not None:
        axes = ring_axes(given)
        unknown = [name for name in axes if name not in mesh.axis_names]
        if unknown:
            names = tuple(mesh.axis_names)
            raise ValueError(f"axis_name must be an axis of the mesh {names}, got {unknown[0]!r}")
        if found != axes:
            raise ValueError(
                f"axis_name={axis_name_of(axes)!r} must shard the sequence, dimension 1 of query, "
                f"but that is sharded over {found or None}"
            )
    elif not found:
        raise ValueError(
            "the sequence, dimension 1 of query, must be sharded over a mesh axis, but is not; "
            'reshard it with jax.reshard(x, P(None, "context")), or call '
            "jax.nn.dot_product_attention, which needs no ring"
        )
    return ring_axes(found)


def _check_divisible(mesh: AnyMesh, cuts: Cuts, shape: tuple[int, ...], array: str) -> None:
    """Raises unless the axes cut every dimension into equal parts, and head_dim not at all."""
    if cuts[3]:
        raise ValueError(
            f"head_dim must not be sharded, but spec shards it over {cuts[3]}; shard heads instead"
        )
    for dimension, names, length in zip(DIMENSIONS, cuts, shape, strict=True):
        shards = axes_size(mesh, names)
        if length % shards:
            pad = f"; {_checks.PAD}" if dimension == "seq" else ""
            raise ValueError(
                f"{dimension} of {array} must be a multiple of {shards}, the size of mesh axes "
                f"{names}, got {length}{pad}"
            )


def _check_explicit(mesh: AnyMesh, **arrays: tuple[jax.Array, Cuts]) -> None:
    """Raises where the types of Explicit axes disagree with ``spec``: no array is resharded."""
    explicit = set(_of_type(mesh, AxisType.Explicit))
    for name, (x, cuts) in arrays.items():
        actual = _actual_axes(x)
        if _only(explicit, actual) != _only(explicit, cuts):
            raise ValueError(
                f"{name} must be sharded as {_spec(cuts)} on this Explicit mesh, got "
                f"{_spec(actual)}; use jax.reshard({name}, spec), or leave out spec"
            )


def _of_type(mesh: AnyMesh, kind: AxisType) -> Axes:
    """Returns the axes of a type along which there are several devices."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, found in types if found == kind and mesh.shape[name] > 1)


def _spec(cuts: Cuts) -> PartitionSpec:
    return PartitionSpec(*(axis_name_of(axes) if axes else None for axes in cuts))
