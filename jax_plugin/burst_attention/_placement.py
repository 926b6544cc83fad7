"""Which mesh, and which of its axes cut which dimension of global arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from burst_attention import _checks
from burst_attention._checks import AnyMesh

Axes: TypeAlias = tuple[str, ...]
DIMENSIONS = ("batch", "seq", "heads", "head_dim")


@dataclass(frozen=True)
class Placement:
    """Which mesh axes cut which dimension."""

    axis_name: str | Axes
    """The axis of the sequence, or the two of a double ring."""
    q_axes: tuple[Axes, ...]
    kv_axes: tuple[Axes, ...]
    head_shards: int

    @property
    def q_spec(self) -> PartitionSpec:
        """Of query and of out."""
        return _spec(self.q_axes)

    @property
    def kv_spec(self) -> PartitionSpec:
        """Of key and value."""
        return _spec(self.kv_axes)

    @property
    def kv_heads_whole(self) -> bool:
        """Whether axes cut the query heads while every device holds all key/value heads."""
        return self.kv_axes[2] != self.q_axes[2]


def find_mesh(mesh: AnyMesh | None, query: jax.Array) -> AnyMesh:
    """The mesh given, else that of the array, else that of ``jax.set_mesh``."""
    current = jax.sharding.get_abstract_mesh()
    if current.manual_axes and not (current.auto_axes or current.explicit_axes):
        raise ValueError(
            "dot_product_attention takes global arrays, but is called inside jax.shard_map, where "
            "arrays are shards; call burst_attention.attention there"
        )
    if current.manual_axes:
        # Inside a shard_map over some axes only: a shard_map over the others nests in it.
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
    spec: PartitionSpec | None,
    axis_name: str | tuple[str, ...] | None,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
) -> Placement:
    """From ``spec``, or from the arrays' types where all axes are Explicit."""
    if spec is None:
        q_axes, kv_axes = _axes_from_types(mesh, query, key, value)
    else:
        q_axes = _axes_of(spec, mesh)
        kv_axes = _kv_axes(q_axes, mesh, key.shape[2])
        _check_explicit(mesh, query=(query, q_axes), key=(key, kv_axes), value=(value, kv_axes))
    if q_axes[:2] != kv_axes[:2]:
        raise ValueError(
            "query and key must be sharded alike in batch and seq, got "
            f"{_spec(q_axes)} and {_spec(kv_axes)}; use jax.reshard"
        )
    name = _axis_name(axis_name, q_axes[1], mesh)
    _check_divisible(mesh, q_axes, query.shape, "query")
    _check_divisible(mesh, kv_axes, key.shape, "key")
    shards = _size(mesh, q_axes[2])
    if kv_axes[2] not in ((), q_axes[2]):
        raise ValueError(
            "key heads must be sharded like the query heads or not at all, got "
            f"{_spec(q_axes)} and {_spec(kv_axes)}; use jax.reshard"
        )
    if kv_axes[2] != q_axes[2]:
        _check_owned(key.shape[2], shards)
    return Placement(name, q_axes, kv_axes, shards)


def _axes_from_types(
    mesh: AnyMesh, query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[tuple[Axes, ...], tuple[Axes, ...]]:
    """What cuts query and key, from their types."""
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


def _actual_axes(x: jax.Array) -> tuple[Axes, ...]:
    spec = tuple(jax.typeof(x).sharding.spec)
    return tuple(_tuple(entry) for entry in spec + (None,) * (x.ndim - len(spec)))


def _axes_of(spec: PartitionSpec, mesh: AnyMesh) -> tuple[Axes, ...]:
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


def _tuple(entry: Any) -> Axes:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _kv_axes(q_axes: tuple[Axes, ...], mesh: AnyMesh, kv_heads: int) -> tuple[Axes, ...]:
    """Key/value heads fewer than the shards of their axis stay whole on every device."""
    if kv_heads < _size(mesh, q_axes[2]):
        return (*q_axes[:2], (), q_axes[3])
    return q_axes


def spec_of(
    mesh: AnyMesh, name: str, x: jax.Array, expected: tuple[Axes, ...], like: str
) -> PartitionSpec:
    """``expected``, or of no axis where the type of ``x`` says that no axis cuts it."""
    explicit = set(_of_type(mesh, AxisType.Explicit))
    actual = _only(explicit, _actual_axes(x))
    if actual == _only(explicit, expected):
        return _spec(expected)
    if any(actual):
        raise ValueError(
            f"{name} must be sharded like {like}, {_spec(expected)}, or not at all, "
            f"got {_spec(actual)}; use jax.reshard"
        )
    return PartitionSpec()


def _only(kept: set[str], axes: tuple[Axes, ...]) -> tuple[Axes, ...]:
    return tuple(tuple(name for name in names if name in kept) for names in axes)


def _check_owned(kv_heads: int, shards: int) -> None:
    if kv_heads % shards and shards % kv_heads:
        raise ValueError(
            f"key/value heads and the {shards} shards of the query heads must divide one another, "
            f"got {kv_heads} heads: the query heads of some device would use parts of several "
            "key/value heads. Repeat key and value with jnp.repeat(x, n, axis=2), or shard the "
            "heads over fewer devices"
        )


def _axis_name(given: Any, found: Axes, mesh: AnyMesh) -> str | Axes:
    if given is not None:
        axes = _checks.ring_axes(given)
        unknown = [name for name in axes if name not in mesh.axis_names]
        if unknown:
            names = tuple(mesh.axis_names)
            raise ValueError(f"axis_name must be an axis of the mesh {names}, got {unknown[0]!r}")
        if found != axes:
            raise ValueError(
                f"axis_name={_checks.named(axes)!r} must shard the sequence, dimension 1 of query, "
                f"but that is sharded over {found or None}"
            )
    elif not found:
        raise ValueError(
            "the sequence, dimension 1 of query, must be sharded over a mesh axis, but is not; "
            'reshard it with jax.reshard(x, P(None, "context")), or call '
            "jax.nn.dot_product_attention, which needs no ring"
        )
    return _checks.named(_checks.ring_axes(found))


def _check_divisible(
    mesh: AnyMesh, axes: tuple[Axes, ...], shape: tuple[int, ...], array: str
) -> None:
    if axes[3]:
        raise ValueError(
            f"head_dim must not be sharded, but spec shards it over {axes[3]}; shard heads instead"
        )
    for dimension, names, length in zip(DIMENSIONS, axes, shape, strict=True):
        shards = _size(mesh, names)
        if length % shards:
            pad = f"; {_checks.PAD}" if dimension == "seq" else ""
            raise ValueError(
                f"{dimension} of {array} must be a multiple of {shards}, the size of mesh axes "
                f"{names}, got {length}{pad}"
            )


def _check_explicit(mesh: AnyMesh, **arrays: tuple[jax.Array, tuple[Axes, ...]]) -> None:
    """Where axes are Explicit, types must agree with ``spec``: nothing is resharded silently."""
    explicit = set(_of_type(mesh, AxisType.Explicit))
    for name, (x, axes) in arrays.items():
        actual = _actual_axes(x)
        if _only(explicit, actual) != _only(explicit, axes):
            raise ValueError(
                f"{name} must be sharded as {_spec(axes)} on this Explicit mesh, got "
                f"{_spec(actual)}; use jax.reshard({name}, spec), or leave out spec"
            )


def _of_type(mesh: AnyMesh, kind: AxisType) -> Axes:
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, found in types if found == kind and mesh.shape[name] > 1)


def _size(mesh: AnyMesh, names: Axes) -> int:
    return math.prod(mesh.shape[name] for name in names)


def _spec(axes: tuple[Axes, ...]) -> PartitionSpec:
    return PartitionSpec(*(None if not a else a[0] if len(a) == 1 else a for a in axes))
