"""Latent attention on global arrays: on their shards, in a ``shard_map`` over the mesh."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from burst_attention import _checks
from burst_attention._attention.options import Options
from burst_attention._attention.placement import (
    Placement,
    check_explicit,
    checked_spec,
    cuts_of,
    find_mesh,
    find_placement,
)
from burst_attention._attention.vjp import Results
from burst_attention._batching import explained_vmaps
from burst_attention._latent import shards
from burst_attention._latent.expansion import Captured, Expansion, Leaves, OfLeaves, Tree
from burst_attention._latent.shards import Settings
from burst_attention._latent.tiles import Chunk, Inputs
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
    params_tree: jax.tree_util.PyTreeDef


class Cut(NamedTuple):
    """How a call cuts its arrays."""

    mesh: AnyMesh
    spec: PartitionSpec | None
    axes: Axes | None
    params_specs: tuple[PartitionSpec, ...]


def attend(
    place: Place, expand: OfLeaves, options: Options, with_lse: bool, inputs: Inputs
) -> Results:
    """Returns out and lse of all queries."""
    mesh = find_mesh(place.mesh, inputs.query, shards.CALLER)
    axes = None if place.axis_name is None else ring_axes(place.axis_name)
    params = jax.tree.unflatten(place.params_tree, inputs.params)
    specs = _params_specs(place.params_spec, params)
    cut = Cut(mesh, checked_spec(place.spec), axes, specs)
    with explained_vmaps():
        expansion, inputs = _traced(cut, expand, options, inputs)
        settings = Settings(expansion, options, with_lse)
        if _is_traced():
            # Under a vmap over mesh axes, jax.jit would trace for another mesh than _traced did.
            return _of_shards(cut, settings, inputs)
        if (text := _text(cut, settings, inputs)) is None:
            results: Results = _new_program(cut, settings)(inputs)
        else:
            settings = settings._replace(expand=replace(expansion, text=text))
            results = _program(cut, settings)(inputs)
    return results


def _of_shards(cut: Cut, settings: Settings, inputs: Inputs) -> Results:
    """Computes a call."""
    results: Results = _on_shards(cut, partial(shards.attend, settings=settings), inputs)
    return results


def _new_program(cut: Cut, settings: Settings) -> Callable[[Inputs], Results]:
    """Returns a program of its own that computes a call."""
    return jax.jit(partial(_of_shards, cut, settings))


# Outside jit, a call with an equal text and equal types runs the program of the call before it.
_program = lru_cache(maxsize=128)(_new_program)


def _is_traced() -> bool:
    """Whether the surroundings put operations into a program, as ``jax.jit`` does."""
    return isinstance(lax.neg(np.int32(0)), jax.core.Tracer)


def _traced(
    cut: Cut, expand: OfLeaves, options: Options, inputs: Inputs
) -> tuple[Expansion, Inputs]:
    """Returns the programs of ``expand``, and the inputs with the arrays that it captured."""
    found: list[tuple[Expansion, Captured]] = []

    def local(axes: Axes, inputs: Inputs) -> tuple[()]:
        found.append(shards.trace(axes, expand, options, inputs))
        return ()

    def run(inputs: Inputs) -> Any:
        return _on_shards(cut, local, inputs, ())

    # A vmap with spmd_axis_name shows its axes only in the program of which it is a part.
    _ = run(inputs) if _is_traced() else jax.eval_shape(run, inputs)
    expansion, captured = found[0]
    return expansion, inputs._replace(captured=captured)


def _text(cut: Cut, settings: Settings, inputs: Inputs) -> str | None:
    """Returns all that ``expand`` computes, with gradients where JAX may ask for them.

    It is None where a text does not show all.
    """
    if not settings.expand.shows_all():
        return None
    every = PartitionSpec(cut.mesh.axis_names)

    def local(axes: Axes, *cotangents: jax.Array, inputs: Inputs) -> Leaves:
        results = shards.samples(axes, settings, inputs, *cotangents)
        return [x.reshape(1, -1) for x in results]

    lower = jax.jit(lambda inputs, *whole: _on_shards(cut, local, inputs, every, *whole)).lower
    if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(inputs)):
        return lower(inputs).as_text()
    try:
        return lower(inputs, np.ones(2, np.float32)).as_text()
    except Exception:
        # Without derivatives there is no text of them. If the call needs some, JAX says what lacks.
        return None


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


def _on_shards(
    cut: Cut,
    function: Callable[..., Any],
    inputs: Inputs,
    out_specs: Any = None,
    *whole: jax.Array,
) -> Any:
    """Returns results of each device's inputs and of whole arrays.

    By default the results are sharded like query.
    """
    query = inputs.query
    # Latents have no heads, and the heads of keys are known on the shards alone.
    placement = find_placement(cut.mesh, cut.spec, cut.axes, query, query, query)
    _check_params(placement, cut.params_specs)
    for x, each in zip(inputs.params, cut.params_specs, strict=True):
        if each != jax.typeof(x).sharding.spec:
            check_explicit(cut.mesh, "params", x, cuts_of(each, x.ndim), "params_spec")
    params_specs = list(map(placement.of_several, cut.params_specs))

    def of_rows(name: str, tree: Tree) -> Tree:
        return jax.tree.map(lambda x: placement.spec_of(name, x, _shape(x)), tree)

    ids = of_rows("segment_ids", inputs.ids)
    chunk = Chunk(of_rows("an array of latent", inputs.chunk.latent), ids)
    out_spec = placement.spec("batch q_len heads")
    captured, specs_of_whole = jax.tree.map(lambda _: PartitionSpec(), (inputs.captured, whole))
    specs = Inputs._make((out_spec, chunk, params_specs, ids, captured))

    def local(inputs: Inputs, *whole: jax.Array) -> Any:
        return function(placement.ring_axes, *whole, inputs=_own_rows(placement, inputs))

    in_specs = (specs, *specs_of_whole)
    return placement.on_shards(local, in_specs, out_spec if out_specs is None else out_specs)(
        inputs, *whole
    )


def _shape(x: jax.Array) -> str:
    """Returns the shape of an array of tokens in the names of a `Placement`."""
    return " ".join([ROWS, *(["column"] * (x.ndim - 2))])


def _check_params(placement: Placement, specs: tuple[PartitionSpec, ...]) -> None:
    """Raises where axes cut params that do not cut heads: each rank expands with all of them."""
    heads = placement.axes["heads"]
    for spec in specs:
        cut = [name for entry in spec.partitions for name in names_of(entry)]
        other = [name for name in cut if name not in heads]
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
