"""Which mesh, and which of its axes cut which dimension of global arrays."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from burst_attention import _checks
from burst_attention._mesh import axes_size, axis_name_of, levels, names_of, ring_axes
from burst_attention._types import AnyMesh, Axes

Results = TypeVar("Results")
"""Arrays, in any tree."""
Cuts: TypeAlias = tuple[Axes, ...]
"""For each dimension of an array the mesh axes that cut it."""
DIMENSIONS = ("batch", "seq", "heads", "head_dim")
WAYS_OUT = {
    "batch": "pad the batch and drop the end of the result, or shard it over fewer devices",
    "seq": _checks.PAD,
    "heads": "shard the heads over fewer devices; heads of key and value may also be repeated with "
    "jnp.repeat(x, n, axis=2)",
}
"""For each dimension that may be sharded, the way out of a length that its axes do not divide."""
LIKE = {
    "heads": "the heads of query",
    "batch q_len": "the first two dimensions of query",
    "batch kv_len": "the first two dimensions of query",
    "batch kv_len 2": "the first two dimensions of query",
    "batch": "the batch of query",
}
"""What an array of a shape is sharded like, in the words of errors; by default like the result."""


@dataclass(frozen=True)
class Placement:
    """A mesh, and which of its axes cut which dimension of global arrays."""

    mesh: AnyMesh
    ring_axes: Axes
    """The axis of the sequence, or the two axes of a double ring."""
    axes: Mapping[str, Axes]
    """The axes that cut ``batch``, ``q_len``, ``kv_len``, ``heads`` of the result, and the heads of
    each array: ``q_heads``, ``k_heads`` and ``v_heads``, and ``kv_heads``, which are k_heads."""

    def spec(self, shape: str) -> PartitionSpec:
        """Returns the sharding of an array, whose shape consists of names."""
        return _spec(self._cuts(shape))

    def spec_of(self, name: str, x: jax.Array, shape: str) -> PartitionSpec:
        """Returns the sharding of an array that may be whole, if its type says so."""
        explicit = _of_type(self.mesh, AxisType.Explicit)
        actual = _only(explicit, _actual_axes(x))
        if actual == _only(explicit, self._cuts(shape)):
            return self.spec(shape)
        if any(actual):
            like = LIKE.get(shape, "the result")
            raise ValueError(
                f"{name} must be sharded like {like}, {self.spec(shape)}, or not at all, "
                f"got {_spec(actual)}; use jax.reshard"
            )
        return PartitionSpec()

    def of_several(self, spec: PartitionSpec) -> PartitionSpec:
        """Returns a spec without axes of one device."""
        cuts = cuts_of(spec, len(spec))
        several = _several(self.mesh, cuts)
        # A spec may also say along which axes gradients are not summed.
        return spec if several == cuts else _spec(several)

    def on_shards(
        self, function: Callable[..., Results], in_specs: object, out_specs: object
    ) -> Callable[..., Results]:
        """Returns a function of global arrays that computes on their shards.

        Axes of one device cut nothing, but ``shard_map`` wants to see them in the types of arrays.
        So arrays take the types that their specs say. Arrays that lie on no mesh can't take one:
        their specs name no Explicit axes.
        """

        def compute(*arrays: object) -> Results:
            specs = jax.tree.map(
                lambda spec, tree: jax.tree.map(lambda x: self._known_to(x, spec), tree),
                in_specs,
                arrays,
            )
            typed = jax.tree.map(self._typed, arrays, specs)
            mapped: Callable[..., Results] = jax.shard_map(
                function, mesh=self.mesh, in_specs=specs, out_specs=out_specs
            )
            return mapped(*typed)

        return compute

    def _known_to(self, x: jax.Array, spec: PartitionSpec) -> PartitionSpec:
        """Returns a spec without the axes that the type of an array can't name."""
        if not jax.typeof(x).sharding.mesh.empty:
            return spec
        others = [name for name in self.mesh.axis_names if name not in self.mesh.explicit_axes]
        return _spec(_only(others, cuts_of(spec, x.ndim)))

    def _typed(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Returns an array whose type names the Explicit axes of a spec."""
        if jax.typeof(x).sharding.spec == spec:
            return x
        cuts = _only(self.mesh.explicit_axes, cuts_of(spec, x.ndim))
        if _only(self.mesh.explicit_axes, _actual_axes(x)) == cuts:
            return x
        return jax.reshard(x, NamedSharding(self.mesh, _spec(cuts)))

    def own_heads(self, x: jax.Array, name: str) -> jax.Array:
        """Returns the heads of an array that this device's heads of the result use.

        ``name`` is the name of the number of its heads.
        """
        if self.axes[name] == self.axes["heads"]:
            return x
        heads, shards = x.shape[2], axes_size(self.mesh, self.axes["heads"])
        start, count = lax.axis_index(self.axes["heads"]) * heads // shards, max(1, heads // shards)
        return lax.dynamic_slice_in_dim(x, start, count, axis=2)

    def own_part(self, x: jax.Array, shape: str, lengths: Mapping[str, int]) -> jax.Array:
        """Returns this device's part of an array that may be whole.

        ``lengths`` are those of this device's dimensions, by the names in ``shape``.
        """
        for dimension, name in enumerate(shape.split()):
            length = lengths.get(name, x.shape[dimension])
            if x.shape[dimension] > length:
                start = lax.axis_index(self.axes[name]) * length
                x = lax.dynamic_slice_in_dim(x, start, length, axis=dimension)
        return x

    def _cuts(self, shape: str) -> Cuts:
        return tuple(self.axes.get(length, ()) for length in shape.split())


def find_mesh(mesh: object, query: jax.Array, caller: str = "dot_product_attention") -> AnyMesh:
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
            f"{caller} needs a mesh, but the arrays are on none; pass mesh= and spec=, "
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
    axis_name: object,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
) -> Placement:
    """Returns the placement of ``spec``, or of the arrays' types where all axes are Explicit.

    The result has the heads of query, or of value if these are more.
    """
    arrays = {"query": query, "key": key, "value": value}
    most = "query" if query.shape[2] >= value.shape[2] else "value"
    if spec is None:
        cuts = _cuts_from_types(mesh, arrays)
    else:
        whole = _axes_of(spec, mesh)
        # Heads stay whole if they are fewer than the shards of their axis.
        few = (*whole[:2], (), whole[3])
        shards = axes_size(mesh, whole[2])
        cuts = {
            name: few if name != most and x.shape[2] < shards else whole
            for name, x in arrays.items()
        }
        for name, x in arrays.items():
            check_explicit(mesh, name, x, cuts[name], "spec")
    cuts = {name: _named_like(mesh, own, cuts[most]) for name, own in cuts.items()}
    _check_alike(cuts, same_heads=key.shape[2] == value.shape[2])
    batch, seq, heads, _ = cuts[most]
    ring = _ring_axes(axis_name, seq, mesh, is_said=spec is not None)
    for name, x in arrays.items():
        _check_divisible(mesh, cuts[name], x.shape, name)
    for name, x in arrays.items():
        if cuts[name][2] not in ((), heads):
            raise ValueError(
                f"{name} heads must be sharded like the {most} heads or not at all, got "
                f"{_spec(cuts[most])} and {_spec(cuts[name])}; use jax.reshard"
            )
        if cuts[name][2] != heads:
            _check_owned(name, x.shape[2], most, axes_size(mesh, heads))
    axes = {"batch": batch, "q_len": seq, "kv_len": seq, "heads": heads}
    axes |= {f"{name[0]}_heads": found[2] for name, found in cuts.items()}
    return Placement(mesh, ring, axes | {"kv_heads": axes["k_heads"]})


def sequence_axes(
    mesh: AnyMesh,
    spec: PartitionSpec | None,
    axis_name: object,
    qkv: tuple[jax.Array, jax.Array, jax.Array],
) -> Axes:
    """Returns the axes that are to shard sequences of any length.

    No type says that an axis cuts a length that it does not divide. So ``axis_name`` may name axes
    that do not cut the arrays yet.
    """
    if spec is not None:
        return _ring_axes(axis_name, _axes_of(spec, mesh)[1], mesh, is_said=True)
    arrays = dict(zip(("query", "key", "value"), qkv, strict=True))
    found = _cuts_from_types(mesh, arrays)["query"][1]
    if found or axis_name is not None:
        return _ring_axes(axis_name, found or ring_axes(axis_name), mesh, is_said=False)
    raise ValueError(
        "axis_name or spec is needed to say which mesh axis shards the sequence, dimension 1 of "
        'query, since its type does not: pass axis_name="context" with the name of the axis'
    )


def _check_alike(cuts: Mapping[str, Cuts], same_heads: bool) -> None:
    """Raises unless all arrays are cut alike in batch and seq, and key and value in equal heads."""
    query, key, value = cuts.values()
    if query[:2] != key[:2]:
        raise ValueError(
            "query and key must be sharded alike in batch and seq, got "
            f"{_spec(query)} and {_spec(key)}; use jax.reshard"
        )
    if key[:2] != value[:2] or (same_heads and key != value):
        raise ValueError(
            f"key and value must be sharded alike, got {_spec(key)} and {_spec(value)}; "
            "use jax.reshard"
        )


def _cuts_from_types(mesh: AnyMesh, arrays: Mapping[str, jax.Array]) -> dict[str, Cuts]:
    """Returns the axes that cut each array, from its type."""
    auto = mesh.axis_names if mesh.are_all_axes_auto else _of_type(mesh, AxisType.Auto)
    if auto:
        names = ", ".join(map(repr, auto))
        raise ValueError(
            f"spec is needed, since mesh axes {names} are Auto: there an array's type does not say "
            'how it is sharded. Pass spec=P("data", "context", "tensor", None) '
            "with the axes that shard batch, seq and heads, or make the axes Explicit"
        )
    return {name: _actual_axes(x) for name, x in arrays.items()}


def _actual_axes(x: jax.Array) -> Cuts:
    """Returns the axes that cut an array, from its type."""
    return cuts_of(jax.typeof(x).sharding.spec, x.ndim)


def cuts_of(spec: PartitionSpec, ndim: int) -> Cuts:
    """Returns the axes that a spec names for each dimension."""
    return tuple(names_of(entry) for entry in (*spec.partitions, *(None,) * (ndim - len(spec))))


def checked_spec(spec: object) -> PartitionSpec | None:
    """Returns the ``spec`` of a call; None where it is not given."""
    if not isinstance(spec, PartitionSpec | None):
        raise TypeError(f"spec must be a jax.sharding.PartitionSpec, got {type(spec).__name__}")
    return spec


def _axes_of(spec: PartitionSpec, mesh: AnyMesh) -> Cuts:
    """Returns the axes that ``spec`` names for each dimension."""
    if len(spec) > 4:
        raise ValueError(f"spec must have at most 4 entries {list(DIMENSIONS)}, got {spec}")
    if PartitionSpec.UNCONSTRAINED in tuple(spec):
        raise ValueError(
            "spec must say of each dimension which mesh axes cut it, with None for none, got "
            f"PartitionSpec.UNCONSTRAINED in {spec}"
        )
    axes = cuts_of(spec, 4)
    unknown = [name for names in axes for name in names if name not in mesh.axis_names]
    if unknown:
        names = tuple(mesh.axis_names)
        raise ValueError(f"spec must name axes of the mesh {names}, got {unknown[0]!r} in {spec}")
    return axes


def _only(some: Sequence[str], cuts: Cuts) -> Cuts:
    return tuple(tuple(name for name in axes if name in some) for axes in cuts)


def _several(mesh: AnyMesh, cuts: Cuts) -> Cuts:
    """Returns cuts without the axes of one device."""
    return _only([name for name in mesh.axis_names if mesh.shape[name] > 1], cuts)


def _named_like(mesh: AnyMesh, cuts: Cuts, like: Cuts) -> Cuts:
    """Returns cuts that name axes of one device only where others do that cut alike."""
    pairs = zip(_several(mesh, cuts), _several(mesh, like), like, strict=True)
    return tuple(names if own == its else own for own, its, names in pairs)


def _check_owned(name: str, count: int, most: str, shards: int) -> None:
    """Raises unless the heads of the result on each device use whole heads of an array."""
    if count % shards and shards % count:
        raise ValueError(
            f"{name} heads and the {shards} shards of the {most} heads must divide one another, "
            f"got {count} heads: the {most} heads of some device would use parts of several "
            f"{name} heads. Repeat {name} with jnp.repeat(x, n, axis=2), or shard the heads over "
            "fewer devices"
        )


def _ring_axes(given: object, found: Axes, mesh: AnyMesh, *, is_said: bool) -> Axes:
    """Returns the axes of the sequence, ``found`` in the sharding of query.

    Without axes each device has the whole sequence: one rank. ``is_said`` tells whether the caller
    said so.
    """
    if given is not None:
        axes = ring_axes(given)
        unknown = [name for name in axes if name not in mesh.axis_names]
        if unknown:
            names = tuple(mesh.axis_names)
            raise ValueError(f"axis_name must be an axis of the mesh {names}, got {unknown[0]!r}")
        # Programs leave axes of one device out of a spec.
        if _several(mesh, (found,)) != _several(mesh, (axes,)):
            raise ValueError(
                f"axis_name={axis_name_of(axes)!r} must shard the sequence, dimension 1 of query, "
                f"but that is sharded over {found or None}"
            )
    elif not found and not is_said:
        raise ValueError(
            "the sequence, dimension 1 of query, must be sharded over a mesh axis, but is not; "
            'reshard it with jax.reshard(x, P(None, "context")), or pass spec=P() for one rank '
            "with the whole sequence"
        )
    levels(mesh, found)
    return found


def _check_divisible(mesh: AnyMesh, cuts: Cuts, shape: tuple[int, ...], array: str) -> None:
    """Raises unless the axes cut every dimension into equal parts, and head_dim not at all."""
    if cuts[3]:
        raise ValueError(
            f"head_dim must not be sharded, but spec shards it over {cuts[3]}; shard heads instead"
        )
    for dimension, names, length in zip(DIMENSIONS, cuts, shape, strict=True):
        shards = axes_size(mesh, names)
        if length % shards:
            raise ValueError(
                f"{dimension} of {array} must be a multiple of {shards}, the size of mesh axes "
                f"{names}, got {length}; {WAYS_OUT[dimension]}"
            )


def check_explicit(mesh: AnyMesh, name: str, x: jax.Array, cuts: Cuts, argument: str) -> None:
    """Raises where the type of Explicit axes disagrees with an argument: no array is resharded."""
    explicit, actual = _of_type(mesh, AxisType.Explicit), _actual_axes(x)
    if _only(explicit, actual) != _only(explicit, cuts):
        raise ValueError(
            f"{name} must be sharded as {_spec(cuts)} on this Explicit mesh, got {_spec(actual)}; "
            f"use jax.reshard({name}, {argument}), or leave out {argument}"
        )


def _of_type(mesh: AnyMesh, kind: AxisType) -> Axes:
    """Returns the axes of a type along which there are several devices."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, found in types if found == kind and mesh.shape[name] > 1)


def _spec(cuts: Cuts) -> PartitionSpec:
    return PartitionSpec(*(axis_name_of(axes) if axes else None for axes in cuts))
