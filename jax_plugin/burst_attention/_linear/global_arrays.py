"""Recurrences on global arrays: on their shards, in a ``shard_map`` over the mesh."""

from functools import partial

import jax
from jax.sharding import PartitionSpec

from burst_attention._attention.placement import (
    Placement,
    checked_spec,
    find_mesh,
    find_placement,
)
from burst_attention._batching import explained_vmaps
from burst_attention._linear import checks, shards
from burst_attention._linear.checks import Inputs, Settings
from burst_attention._linear.shards import Results
from burst_attention._mesh import ring_axes
from burst_attention._types import AnyMesh, Axes

QKV = {"query": "batch q_len q_heads", "key": "batch q_len k_heads", "value": "batch q_len v_heads"}
OTHERS = {
    "decay": "heads",
    "log_decay": "batch q_len heads k_dim",
    "beta": "batch q_len heads",
    "segment_ids": "batch q_len",
    "initial_state": "batch heads k_dim v_dim",
}
"""The shapes of arrays that may come whole, in the names of a `Placement`. Decays of heads have no
k_dim."""


def attend(
    mesh: object, spec: object, axis_name: object, settings: Settings, inputs: Inputs
) -> Results:
    """Returns the outputs of all tokens, and the state after them if the settings ask for it."""
    found = find_mesh(mesh, inputs.query, settings.caller)
    axes = None if axis_name is None else ring_axes(axis_name)
    with explained_vmaps():
        results: Results = _on_shards(found, checked_spec(spec), axes, settings, inputs)
    return results


# Outside jit, a call with equal settings and types runs the program of the call before it.
@partial(jax.jit, static_argnums=(0, 1, 2, 3), inline=True)
def _on_shards(
    mesh: AnyMesh,
    spec: PartitionSpec | None,
    axis_name: Axes | None,
    settings: Settings,
    inputs: Inputs,
) -> Results:
    qkv = inputs[:3]
    placement = find_placement(mesh, spec, axis_name, *qkv)
    arrays = {name: x for name, x in inputs._asdict().items() if x is not None}
    specs = {name: placement.spec(shape) for name, shape in QKV.items()}
    for name in OTHERS.keys() & arrays:
        specs[name] = placement.spec_of(name, arrays[name], _shape(name, arrays[name]))
    out_spec, state_spec = placement.spec("batch q_len heads"), placement.spec("batch heads")
    if settings.return_state:
        settings = settings._replace(return_state="replicated")

    def local(arrays: dict[str, jax.Array]) -> Results:
        return shards.attend(placement.ring_axes, settings, _own_parts(placement, arrays))

    return placement.on_shards(local, (specs,), (out_spec, state_spec))(arrays)


def _own_parts(placement: Placement, arrays: dict[str, jax.Array]) -> Inputs:
    """Returns this device's part of arrays that may have come whole."""
    q, k, v = (placement.own_heads(arrays[name], QKV[name].split()[2]) for name in QKV)
    lengths = {"batch": q.shape[0], "q_len": q.shape[1], "heads": checks.heads_of(q, v)}

    def own(name: str) -> jax.Array | None:
        x = arrays.get(name)
        return None if x is None else placement.own_part(x, _shape(name, x), lengths)

    return Inputs(q, k, v, **{name: own(name) for name in OTHERS})


def _shape(name: str, x: jax.Array) -> str:
    """Returns the shape of an array in the names of a `Placement`."""
    return " ".join(OTHERS[name].split()[: x.ndim])
