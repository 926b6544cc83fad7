# ruff: noqa: F722  (shapes in annotations are not Python)
"""Attention on global arrays: finds mesh and axes, then calls `attention` in a ``shard_map``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal, overload

import jax
from jax import lax
from jax.sharding import PartitionSpec

from burst_attention import _checks
from burst_attention._attention import attention
from burst_attention._checks import AnyMesh
from burst_attention._placement import Placement, find_mesh, find_placement
from burst_attention._types import AttentionOptions

if TYPE_CHECKING:
    from typing import Unpack

    from jaxtyping import Array, Float


@overload
def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: None = None,
    mask: None = None,
    *,
    mesh: AnyMesh | None = None,
    spec: PartitionSpec | None = None,
    axis_name: str | None = None,
    return_residual: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> jax.Array: ...


@overload
def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: None = None,
    mask: None = None,
    *,
    mesh: AnyMesh | None = None,
    spec: PartitionSpec | None = None,
    axis_name: str | None = None,
    return_residual: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: None = None,
    mask: None = None,
    *,
    mesh: AnyMesh | None = None,
    spec: PartitionSpec | None = None,
    axis_name: str | None = None,
    return_residual: bool,
    **options: Unpack[AttentionOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def dot_product_attention(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    bias: None = None,
    mask: None = None,
    *,
    mesh: AnyMesh | None = None,
    spec: PartitionSpec | None = None,
    axis_name: str | None = None,
    return_residual: bool = False,
    **options: Unpack[AttentionOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Exact attention on global arrays that are sharded over a mesh, anywhere under ``jit``.

    Computes `attention` on every shard, in a ``jax.shard_map`` over all axes of the mesh. Where the
    arrays' mesh axes are Explicit, mesh, spec and axis_name are known from the arrays' types.

    Args:
      query: ``[batch, seq, heads, head_dim]``, the whole sequence in the order of ``layout``.
      key: ``[batch, seq, kv_heads, head_dim]``.
      value: like key.
      bias: must be None: a sequence × sequence array.
      mask: must be None: a sequence × sequence array.
      mesh: default: that of the arrays, or of ``jax.set_mesh``.
      spec: sharding of query, key and value, such as ``P("data", "context", "tensor", None)``.
        Needed on Auto meshes. Key/value heads fewer than the shards of their axis stay whole, and
        each device takes the ones that its query heads use.
      axis_name: mesh axis of the sequence; default: the one that shards dimension 1.
      return_residual: also return lse.
      **options: those of `attention`. sinks are those of all heads, sharded like the heads of query
        or not at all.

    Returns:
      ``out``, sharded like query; with ``return_residual=True`` ``(out, lse)``.

    Raises:
      ValueError, TypeError, NotImplementedError: while tracing, with the way out.
    """
    _checks.refused_arguments({"bias": bias, "mask": mask, **options})
    _checks.later_arguments(options)
    query, key, value = _checks.arrays(query, key, value)
    sinks = _checks.sinks(options.pop("sinks", None), query.shape[2])
    mesh = find_mesh(mesh, query)
    _checks.devices(mesh, query.dtype)
    placement = find_placement(mesh, spec, axis_name, query, key, value, sinks)
    with_lse = _checks.flag("return_residual", return_residual)
    local = partial(
        _local,
        placement=placement,
        kv_heads=key.shape[2],
        return_residual=with_lse,
        options=options,
    )
    out_specs = (
        (placement.q_spec, PartitionSpec(*placement.q_spec[:3])) if with_lse else placement.q_spec
    )
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(placement.q_spec, placement.kv_spec, placement.kv_spec, placement.sinks_spec),
        out_specs=out_specs,
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
    )(query, key, value, sinks)


def _local(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sinks: jax.Array | None,
    *,
    placement: Placement,
    kv_heads: int,
    return_residual: bool,
    options: AttentionOptions,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    if placement.head_axes:
        count = max(1, kv_heads // placement.head_shards)
        start = lax.axis_index(placement.head_axes) * kv_heads // placement.head_shards
        key, value = (lax.dynamic_slice_in_dim(x, start, count, axis=2) for x in (key, value))
    heads = query.shape[2]
    if sinks is not None and sinks.shape[0] > heads:
        start = lax.axis_index(placement.q_spec[2]) * heads
        sinks = lax.dynamic_slice_in_dim(sinks, start, heads)
    options = {**options, "sinks": sinks}
    return attention(
        query, key, value, axis_name=placement.axis_name, return_residual=return_residual, **options
    )
