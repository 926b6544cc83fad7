# ruff: noqa: F722  (shapes in annotations are not Python)
"""Attention on global arrays: finds mesh and axes, then calls `attention` in a ``shard_map``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import jax
from jax import lax
from jax.sharding import PartitionSpec

from burst_attention import _check_masks, _checks
from burst_attention._attention import attention
from burst_attention._checks import AnyMesh
from burst_attention._placement import Axes, Placement, find_mesh, find_placement, spec_of
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
    axis_name: str | tuple[str, ...] | None = None,
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
    axis_name: str | tuple[str, ...] | None = None,
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
    axis_name: str | tuple[str, ...] | None = None,
    return_residual: bool,
    **options: Unpack[AttentionOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def dot_product_attention(
    query: Float[Array, "batch q_len heads head_dim"],
    key: Float[Array, "batch kv_len kv_heads head_dim"],
    value: Float[Array, "batch kv_len kv_heads value_dim"],
    bias: None = None,
    mask: None = None,
    *,
    mesh: AnyMesh | None = None,
    spec: PartitionSpec | None = None,
    axis_name: str | tuple[str, ...] | None = None,
    return_residual: bool = False,
    **options: Unpack[AttentionOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Exact attention on global arrays that are sharded over a mesh, anywhere under ``jit``.

    Computes `attention` on every shard, in a ``jax.shard_map`` over all axes of the mesh. Where the
    arrays' mesh axes are Explicit, mesh, spec and axis_name are known from the arrays' types.

    Args:
      query: ``[batch, q_len, heads, head_dim]``, the whole sequence in the order of ``layout``.
      key: ``[batch, kv_len, kv_heads, head_dim]``.
      value: ``[batch, kv_len, kv_heads, value_dim]``.
      bias: must be None: a sequence × sequence array.
      mask: must be None: a sequence × sequence array.
      mesh: default: that of the arrays, or of ``jax.set_mesh``.
      spec: sharding of query, key and value, such as ``P("data", "context", "tensor", None)``.
        Needed on Auto meshes. Key/value heads fewer than the shards of their axis stay whole, and
        each device takes the ones that its query heads use.
      axis_name: mesh axis of the sequence, or a pair (outer, inner); default: what shards
        dimension 1.
      return_residual: also return lse.
      **options: those of `attention` but batch_axis and head_axis, which spec says. segment_ids
        are those of the whole sequence, sharded like the first two dimensions of query; sinks and
        alibi_slopes are those of all heads, sharded like the heads of query; all three may also be
        whole on every device. Inside a ``shard_map`` over other axes, dropout does not know their
        indices: fold them into dropout_key.

    Returns:
      ``out``, sharded like query; with ``return_residual=True`` ``(out, lse)``.

    Raises:
      ValueError, TypeError, NotImplementedError: while tracing, with the way out.
    """
    _checks.refused_arguments({"bias": bias, "mask": mask, **options})
    _checks.known_options("dot_product_attention", options, AttentionOptions.__annotations__)
    _check_masks.axes_are_known(options)
    query, key, value = _checks.arrays(query, key, value)
    extras = _extras(options, query, key)
    mesh = find_mesh(mesh, query)
    placement = find_placement(mesh, spec, axis_name, query, key, value)
    with_lse = _checks.flag("return_residual", return_residual)
    local = partial(
        _local,
        placement=placement,
        kv_heads=key.shape[2],
        return_residual=with_lse,
        options=options,
    )
    q_spec, kv_spec = placement.q_spec, placement.kv_spec
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(q_spec, kv_spec, kv_spec, _extra_specs(mesh, placement, extras)),
        out_specs=(q_spec, PartitionSpec(*q_spec[:3])) if with_lse else q_spec,
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
    )(query, key, value, extras)


def _extras(options: AttentionOptions, query: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
    """Takes the arrays among the options out of them."""
    heads = query.shape[2]
    segments = _check_masks.segments(options.pop("segment_ids", None), query, key)
    rate = _check_masks.dropout_rate(options.get("dropout_rate", 0.0))
    found = {
        "q_segments": segments and segments[0],
        "kv_segments": segments and segments[1],
        "sinks": _check_masks.per_head("sinks", options.pop("sinks", None), heads, "logit"),
        "alibi_slopes": _check_masks.per_head(
            "alibi_slopes", options.pop("alibi_slopes", None), heads, "slope"
        ),
        "dropout_key": _check_masks.dropout_words(options.pop("dropout_key", None), rate),
    }
    return {name: x for name, x in found.items() if x is not None}


def _extra_axes(placement: Placement) -> dict[str, tuple[Axes, ...]]:
    """The axes that cut the dimensions of each, where it is not whole."""
    heads = placement.q_axes[2:3]
    return {
        "q_segments": placement.q_axes[:2],
        "kv_segments": placement.kv_axes[:2],
        "sinks": heads,
        "alibi_slopes": heads,
        "dropout_key": ((),),
    }


def _extra_specs(
    mesh: AnyMesh, placement: Placement, extras: dict[str, jax.Array]
) -> dict[str, PartitionSpec]:
    axes = _extra_axes(placement)
    return {
        name: spec_of(
            mesh,
            "segment_ids" if name.endswith("segments") else name,
            x,
            axes[name],
            "the first two dimensions of query" if x.ndim == 2 else "the heads of query",
        )
        for name, x in extras.items()
    }


def _local(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    extras: dict[str, jax.Array],
    *,
    placement: Placement,
    kv_heads: int,
    return_residual: bool,
    options: AttentionOptions,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    batch_axes, _, head_axes, _ = placement.q_axes
    if placement.kv_heads_whole:
        count = max(1, kv_heads // placement.head_shards)
        start = lax.axis_index(head_axes) * kv_heads // placement.head_shards
        key, value = (lax.dynamic_slice_in_dim(x, start, count, axis=2) for x in (key, value))
    shapes = {"q_segments": query.shape[:2], "kv_segments": key.shape[:2]}
    shapes |= dict.fromkeys(("sinks", "alibi_slopes"), query.shape[2:3])
    axes = _extra_axes(placement)
    own: dict[str, Any] = {
        name: _own(x, shapes.get(name, x.shape), axes[name]) for name, x in extras.items()
    }
    if "q_segments" in own:
        own["segment_ids"] = (own.pop("q_segments"), own.pop("kv_segments"))
    options = {**options, **own, "batch_axis": batch_axes, "head_axis": head_axes}  # type: ignore[typeddict-item]
    return attention(
        query, key, value, axis_name=placement.axis_name, return_residual=return_residual, **options
    )


def _own(x: jax.Array, shape: tuple[int, ...], axes: tuple[Axes, ...]) -> jax.Array:
    """This device's part of an array that may have come whole."""
    for dimension, (length, names) in enumerate(zip(shape, axes, strict=True)):
        if x.shape[dimension] > length:
            start = lax.axis_index(names) * length
            x = lax.dynamic_slice_in_dim(x, start, length, axis=dimension)
    return x
