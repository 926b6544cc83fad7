"""Parameters in shards on all devices of a mesh, whole for one layer at a time (FSDP, ZeRO-3).

The mesh has an axis of sequences and an axis along a sequence. Parameters do not depend on either,
so both axes share them. The optimiser's state has the shapes and the shards of the parameters.
"""

from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

AXES = ("data", "context")
Part = TypeVar("Part", bound=nnx.Module)


def parameter_specs(params: Any, mesh: Mesh, stacked: str | None = None) -> Any:
    """Returns the spec of each array: equal shards along an axis, or the whole array if none are.

    Shards are along axis 0. Arrays with `stacked` in their path hold the layers of a `jax.lax.scan`
    along axis 0 and have their shards along axis 1.
    """

    def spec(path: tuple[Any, ...], x: jax.Array) -> P:
        axis = int(stacked is not None and stacked in jax.tree_util.keystr(path))
        is_even = x.ndim > axis and x.shape[axis] % mesh.size == 0
        return P(*[None] * axis, AXES, *[None] * (x.ndim - axis - 1)) if is_even else P()

    return jax.tree.map_with_path(spec, params)


def gathered(part: Part) -> Part:
    """Returns a part of a model with whole parameters, inside `jax.shard_map`.

    Sums of gradients go back in shards: the transpose of the gathering is a reduce-scatter. In
    `nnx.remat` the backward pass gathers again, so a device has few whole layers at a time.
    Parameters that every device has whole stay as they are.
    """

    def whole(x: jax.Array) -> jax.Array:
        is_sharded = bool(jax.typeof(x).manual_axis_type.varying)
        return jax.lax.all_gather(x, AXES, axis=0, tiled=True) if is_sharded else x

    graph, params = nnx.split(part)
    return nnx.merge(graph, jax.tree.map(whole, params))
