"""Attention on global arrays: finds mesh and axes, and computes on shards in a ``shard_map``."""

from dataclasses import replace
from functools import partial
from typing import Unpack, cast, overload

import jax
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from burst_attention import _checks
from burst_attention._attention.features import Features, batch_of_one, lengths
from burst_attention._attention.options import AttentionOptions, Mask, Options
from burst_attention._attention.order import ORDERS, InSequence, Order
from burst_attention._attention.placement import (
    Placement,
    checked_spec,
    find_mesh,
    find_placement,
    sequence_axes,
)
from burst_attention._attention.shards import attend, check_call
from burst_attention._attention.vjp import Qkv
from burst_attention._batching import explained_vmaps
from burst_attention._mesh import ring_axes
from burst_attention._signatures import Alone, Either, WithLse
from burst_attention._types import AnyMesh, Axes, X


class _Options(AttentionOptions, total=False):
    mesh: AnyMesh | None
    spec: PartitionSpec | None
    axis_name: str | Axes | None
    order: Order


class _Alone(_Options, Alone): ...


class _WithLse(_Options, WithLse): ...


class _Either(_Options, Either): ...


@overload
def dot_product_attention(
    query: X, key: X, value: X, bias: None = None, mask: Mask = None, **options: Unpack[_Alone]
) -> X: ...
@overload
def dot_product_attention(
    query: X, key: X, value: X, bias: None = None, mask: Mask = None, **options: Unpack[_WithLse]
) -> tuple[X, X]: ...
@overload
def dot_product_attention(
    query: X, key: X, value: X, bias: None = None, mask: Mask = None, **options: Unpack[_Either]
) -> X | tuple[X, X]: ...


def dot_product_attention(
    query: Float[Array, "batch q_len heads head_dim"],
    key: Float[Array, "batch kv_len kv_heads head_dim"],
    value: Float[Array, "batch kv_len kv_heads value_dim"],
    bias: None = None,
    mask: Mask = None,
    *,
    mesh: AnyMesh | None = None,
    spec: PartitionSpec | None = None,
    axis_name: str | Axes | None = None,
    order: Order = "layout",
    return_residual: bool = False,
    **options: Unpack[AttentionOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Exact attention on global arrays that are sharded over a mesh, anywhere under ``jit``.

    Computes `attention` on every shard, in a ``jax.shard_map`` over all axes of the mesh. Where the
    arrays' mesh axes are Explicit, the arrays' types say mesh, spec and axis_name. Arrays of three
    dimensions are one batch entry, as in ``jax.nn``; spec then names three dimensions.

    Args:
      query: ``[batch, q_len, heads, head_dim]`` or ``[q_len, heads, head_dim]``, the whole sequence
        in the order that ``order`` says.
      key: ``[batch, kv_len, kv_heads, head_dim]``.
      value: ``[batch, kv_len, kv_heads, value_dim]``.
      bias: must be None: a sequence × sequence array.
      mask: padding of keys or queries of the whole sequence, see `attention`.
      mesh: default: the mesh of the arrays, or of ``jax.set_mesh``.
      spec: sharding of query, key and value, such as ``P("data", "context", "tensor", None)``.
        Auto meshes need it. Key/value heads stay whole if they are fewer than the shards of their
        axis; each device then takes the heads that its query heads use. A sequence that spec does
        not shard is whole on each device: a ring of one.
      axis_name: mesh axis of the sequence, or a pair (outer, inner); default: the axes that shard
        dimension 1. With ``order="sequence"`` it may name an axis that does not shard arrays of
        Explicit axes yet.
      order: ``"layout"``: arrays are in the order of ``layout``, of lengths that the layout can
        cut. ``"sequence"``: arrays are in the order of the sequence, of any length. The call then
        pads them at the end, brings them into the layout, and takes out and lse back. This copies
        arrays once in each direction, for ``contiguous`` only where a length needs padding. A
        causal mask over as many keys as queries hides the padding by itself; other masks get
        segment ids.
      return_residual: whether to also return lse.
      **options: the options of `attention` except batch_axis and head_axis, which follow from spec.
        segment_ids, visible and positions belong to the whole sequence and are sharded like the
        first two dimensions of query; sinks and alibi_slopes belong to all heads and are sharded
        like the heads of query. Lengths are sharded by batch. All of them may also be whole on
        every device. Inside a ``shard_map`` over other axes, dropout does not know the indices
        along these axes: fold them into dropout_key.

    Returns:
      ``out``, sharded like query; with ``return_residual=True`` ``(out, lse)``. Both lack the batch
      where query has three dimensions.

    Raises:
      ValueError, TypeError, NotImplementedError: while tracing, with the way out.
    """
    first = _checks.array_type("query", query)
    qkv = (first, _checks.array_type("key", key), _checks.array_type("value", value))
    spec, is_single = checked_spec(spec), len(first.shape) == 3
    if is_single:
        qkv, of_batch = batch_of_one(qkv, options)
        spec = None if spec is None else PartitionSpec(None, *spec)
        options = cast(AttentionOptions, of_batch)
    checked, qkv, features = check_call("dot_product_attention", qkv, bias, mask, options)
    for name in ("batch_axis", "head_axis"):
        if axes := getattr(checked, name):
            raise TypeError(
                f"{name} is known from spec or the arrays' types in dot_product_attention, got "
                f"{axes!r}; leave it out"
            )
    with_lse = _checks.flag("return_residual", return_residual)
    in_sequence = _checks.choice("order", order, ORDERS) == "sequence"
    mesh, axes = find_mesh(mesh, qkv[0]), None if axis_name is None else ring_axes(axis_name)
    with explained_vmaps():
        if in_sequence:
            way = InSequence(mesh, sequence_axes(mesh, spec, axes, qkv), checked)
            results = _in_sequence(way, spec, axes, with_lse, qkv, features)
            results = tuple(way.placed(x, qkv[0]) for x in results)
        else:
            results = _on_shards(mesh, spec, axes, None, checked, with_lse, qkv, features)
    if is_single:
        results = tuple(lax.squeeze(x, [0]) for x in results)
    return (results[0], results[1]) if with_lse else results[0]


# Outside jit, a call with equal options and types runs the program of the call before it. In a
# program of the user these functions leave no trace.
@partial(jax.jit, static_argnums=(0, 1, 2, 3), inline=True)
def _in_sequence(
    way: InSequence,
    spec: PartitionSpec | None,
    axis_name: Axes | None,
    with_lse: bool,
    qkv: Qkv,
    features: Features,
) -> tuple[jax.Array, ...]:
    """Returns out and, if asked for, lse of arrays in the order of the sequence."""
    padded = way.padded(qkv, features)
    results = _on_shards(way.mesh, spec, axis_name, way, way.options, with_lse, *padded)
    return tuple(way.result(x, qkv[0]) for x in results)


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4, 5), inline=True)
def _on_shards(
    mesh: AnyMesh,
    spec: PartitionSpec | None,
    axis_name: Axes | None,
    way: InSequence | None,
    options: Options,
    with_lse: bool,
    qkv: Qkv,
    features: Features,
) -> tuple[jax.Array, ...]:
    """Returns out and, if asked for, lse of global arrays that the layout can cut."""
    placement = find_placement(mesh, spec, axis_name, *qkv)
    axes = placement.axes
    options = replace(options, batch_axis=axes["batch"], head_axis=axes["heads"])

    def local(qkv: Qkv, arrays: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        own = _own_parts(placement, qkv, Features(**arrays))
        own = own if way is None else way.into_layout(*own)
        results = attend(placement.ring_axes, options, *own, with_lse)[: 1 + with_lse]
        return results if way is None else tuple(map(way.out_of_layout, results))

    q_spec, kv_spec = placement.spec("batch q_len heads"), placement.spec("batch kv_len kv_heads")
    arrays = {row.name: x for row, x in features.present()}
    specs = {
        row.name: placement.spec_of(row.argument, x, row.shape) for row, x in features.present()
    }
    in_specs, out_specs = ((q_spec, kv_spec, kv_spec), specs), (q_spec,) * (1 + with_lse)
    return placement.on_shards(local, in_specs, out_specs)(qkv, arrays)


def _own_parts(
    placement: Placement, qkv: Qkv, features: Features
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], Features]:
    """Returns this device's part of arrays that may have come whole."""
    query, key, value = qkv
    key, value = (placement.own_heads(x, "kv_heads") for x in (key, value))
    sizes = lengths(query, key)
    own = {row.name: placement.own_part(x, row.shape, sizes) for row, x in features.present()}
    return (query, key, value), Features(**own)
