"""Latent attention on global arrays: on their shards, in a ``shard_map`` over the mesh."""

from functools import partial
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec

from burst_attention import _checks
from burst_attention._attention.placement import (
    Placement,
    checked_spec,
    find_mesh,
    find_placement,
)
from burst_attention._attention.vjp import Results
from burst_attention._batching import explained_vmaps
from burst_attention._latent import shards
from burst_attention._latent.shards import Settings
from burst_attention._latent.tiles import Chunk, Inputs, Tree
from burst_attention._mesh import names_of, ring_axes
from burst_attention._types import AnyMesh, Axes

ROWS = "batch q_len"
"""The first dimensions of latents, and those of segments, in the names of a `Placement`."""


class Place(NamedTuple):
    """Where a call says that its arrays are, unchecked."""

    mesh: object
    spec: object
    axis_name: object
    params_spec: Tree


def attend(place: Place, settings: Settings, inputs: Inputs) -> Results:
    """Returns out and lse of all queries."""
    mesh = find_mesh(place.mesh, inputs.query, shards.CALLER)
    axes = None if place.axis_name is None else ring_axes(place.axis_name)
    leaves, tree = jax.tree.flatten(inputs.params)
    specs = _params_specs(place.params_spec, inputs.params)
    with explained_vmaps():
        flat = inputs._replace(params=leaves)
        results: Results = _on_shards(
            mesh, checked_spec(place.spec), axes, specs, tree, settings, flat
        )
    return results


def _params_specs(given: Tree, params: Tree) -> tuple[PartitionSpec, ...]:
    """Returns the sharding of each array of params, in the order of its leaves."""
    if given is None:
        return tuple(jax.typeof(x).sharding.spec for x in jax.tree.leaves(params))
    wrong = [x for x in jax.tree.leaves(given, is_leaf=_is_spec) if not _is_spec(x)]
    if wrong:
        raise TypeError(
            "params_spec must be a jax.sharding.PartitionSpec, or a tree of them like params, got "
            f"{_checks.describe(wrong[0])} in it"
        )
    try:
        whole = jax.tree.broadcast(given, params, is_leaf=_is_spec)
    except ValueError as error:
        raise ValueError(
            "params_spec must be a tree like params, or like the upper part of it, got "
            f"{jax.tree.structure(given, is_leaf=_is_spec)} for {jax.tree.structure(params)}"
        ) from error
    return tuple(jax.tree.leaves(whole, is_leaf=_is_spec))


def _is_spec(x: object) -> bool:
    return isinstance(x, PartitionSpec)


# Outside jit, a call with equal settings and types runs the program of the call before it.
@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4, 5), inline=True)
def _on_shards(
    mesh: AnyMesh,
    spec: PartitionSpec | None,
    axis_name: Axes | None,
    params_specs: tuple[PartitionSpec, ...],
    params_tree: jax.tree_util.PyTreeDef,
    settings: Settings,
    inputs: Inputs,
) -> Results:
    query = inputs.query
    # Latents have no heads, and the heads of keys are known on the shards alone.
    placement = find_placement(mesh, spec, axis_name, query, query, query)
    _check_params(placement, params_specs)

    def of_rows(name: str, tree: Tree) -> Tree:
        return jax.tree.map(lambda x: placement.spec_of(name, x, _shape(x)), tree)

    ids = of_rows("segment_ids", inputs.ids)
    chunk = Chunk(of_rows("an array of latent", inputs.chunk.latent), ids)
    out_spec = placement.spec("batch q_len heads")
    specs = Inputs._make((out_spec, chunk, list(params_specs), ids))

    def local(inputs: Inputs) -> Results:
        own = _own_rows(placement, inputs)
        params = jax.tree.unflatten(params_tree, own.params)
        return shards.attend(placement.ring_axes, settings, own._replace(params=params))

    results: Results = jax.shard_map(
        local,
        mesh=placement.mesh,
        in_specs=(specs,),
        out_specs=out_spec,
    )(inputs)
    return results


def _shape(x: jax.Array) -> str:
    """Returns the shape of an array of tokens in the names of a `Placement`."""
    return " ".join([ROWS, *(["column"] * (x.ndim - 2))])


def _check_params(placement: Placement, specs: tuple[PartitionSpec, ...]) -> None:
    """Raises where axes cut params that do not cut heads: each rank expands with all of them."""
    heads = placement.axes["heads"]
    for spec in specs:
        other = [name for entry in spec for name in names_of(entry) if name not in heads]
        if any(placement.mesh.shape[name] > 1 for name in other):
            raise ValueError(
                f"params must be whole along all mesh axes but those of query's heads, {heads}, "
                f"since a device expands with all of them, got {spec}; use jax.reshard, or leave "
                "these axes out of params_spec"
            )


def _own_rows(placement: Placement, inputs: Inputs) -> Inputs:
    """Returns this device's rows of arrays that may have come whole."""
    lengths = dict(zip(ROWS.split(), inputs.query.shape, strict=False))
    chunk, ids = jax.tree.map(
        lambda x: placement.own_part(x, ROWS, lengths), (inputs.chunk, inputs.ids)
    )
    return inputs._replace(chunk=chunk, ids=ids)
