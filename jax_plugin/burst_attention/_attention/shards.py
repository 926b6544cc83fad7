"""Attention inside ``jax.shard_map``."""

from typing import Unpack, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from burst_attention import _checks
from burst_attention._attention import heads, visibility
from burst_attention._attention.features import Features, as_operands, check_features
from burst_attention._attention.options import (
    AttentionOptions,
    Mask,
    Options,
    check_options,
    shows_options,
)
from burst_attention._attention.padding import pad_head_dims, padding_as_ids
from burst_attention._attention.ring import Ring, ring_along
from burst_attention._attention.vjp import Qkv, ring_attention
from burst_attention._batching import spread
from burst_attention._derivatives import without_transpose
from burst_attention._mesh import axis_name_of, ring_axes, vary_like, vary_together, varying_axes
from burst_attention._signatures import Alone, Either, WithLse
from burst_attention._types import Axes, X

_WHOLE = "give the lengths in the whole sequence, not those of the shards"
SAME_ON_RING = {
    "dropout": "drop what makes it differ, such as fold_in(key, axis_index)",
    "query_seq_lengths": _WHOLE,
    "key_value_seq_lengths": _WHOLE,
}
"""Arrays that are the same on all devices of a ring, and what to do where they are not."""


class _Options(AttentionOptions):
    axis_name: str | Axes


class _Alone(_Options, Alone): ...


class _WithLse(_Options, WithLse): ...


class _Either(_Options, Either): ...


@overload
def attention(
    query: X, key: X, value: X, bias: None = None, mask: Mask = None, **options: Unpack[_Alone]
) -> X: ...
@overload
def attention(
    query: X, key: X, value: X, bias: None = None, mask: Mask = None, **options: Unpack[_WithLse]
) -> tuple[X, X]: ...
@overload
def attention(
    query: X, key: X, value: X, bias: None = None, mask: Mask = None, **options: Unpack[_Either]
) -> X | tuple[X, X]: ...


@shows_options
def attention(
    query: Float[Array, "batch q_len heads head_dim"],
    key: Float[Array, "batch kv_len kv_heads head_dim"],
    value: Float[Array, "batch kv_len kv_heads value_dim"],
    bias: None = None,
    mask: Mask = None,
    *,
    axis_name: str | Axes,
    return_residual: bool = False,
    **options: Unpack[AttentionOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Exact attention of this device's queries over the whole, sharded sequence.

    Computes, for every query of this shard and the keys of all devices along ``axis_name``::

        s = scale · q kᵀ          with logits_soft_cap: cap · tanh(s / cap)
                                  with alibi_slopes: + slope · (key position − query position)
                                  −inf where the mask hides the key
        lse = ln Σ e^s;   out = e^(s − lse) v          with a sink z, e^z is part of that sum

    A query sees the keys that ``is_causal``, ``local_window_size``, ``segment_ids``, ``visible``,
    ``mask`` and the lengths all allow. If they allow no key, the query's out is 0, its lse is −inf
    (with a sink: z), and it gives no gradient to key and value. Positions count in the whole
    sequence; query and key of different lengths both begin at 0, unless ``query_offset`` or
    positions say otherwise. Query head h uses key/value head h // (heads / kv_heads). Names and
    meaning follow ``jax.nn.dot_product_attention``; ``layout`` says how the sequence is cut.
    Products are accumulated in float32, in the backward pass over the whole ring. Reverse-mode
    derivatives of ``out`` and ``lse`` take one more custom call; forward mode and second
    derivatives are errors.

    Scores are float32. A score that overflows to −∞, below −3.4e38 (on GPUs below −6.9e37), counts
    as hidden. If all visible scores of a query overflow so, its out is 0 and its lse is −inf,
    without an error, as if it saw no key. A score of +∞ makes its query's out and lse NaN. In the
    backward pass no weight exceeds 1. On CPU devices a key that takes all weight has exactly
    weight 1, however large scores are. Between keys that share the weight, lse loses digits, and
    so do weights: at scores of 1e5 they are good to 4e-3. On GPUs weights of the backward pass are
    good to 2e-7 times the score, at most 1, whichever key takes the weight.

    Args:
      query: ``[batch, q_len, heads, head_dim]``, this device's part of the sequence. bfloat16,
        float16 or float32; head_dim from 1 to 256. One that is no multiple of 8 is padded with
        zeros inside the call, which copies the array; the default scale is that of the given one.
      key: ``[batch, kv_len, kv_heads, head_dim]``, of query's dtype; kv_heads divides heads.
      value: ``[batch, kv_len, kv_heads, value_dim]``; value_dim from 1 to 256, which may differ
        from head_dim.
      bias: must be None: a sequence × sequence array.
      mask: bool, padding of keys ``[batch, 1, 1, kv_len]`` or of queries ``[batch, 1, q_len, 1]``,
        in the order of ``layout``; the batch may be 1. A key where it is False is hidden. A query
        where it is False sees no key, where ``jax.nn`` returns the mean of all values. Masks of
        pairs and masks of single heads are errors; ``visible`` says most masks of pairs.
      axis_name: mesh axis along which the sequence is sharded, or a pair (outer, inner), such as
        nodes and the GPUs of a node: rank = outer · inner size + inner. All axes of the mesh must
        be manual in the surrounding ``shard_map``; along each other axis, rings run side by side.
      return_residual: whether to also return lse.
      **options: see `AttentionOptions`.

    Returns:
      ``out``, ``[batch, q_len, heads, value_dim]`` in query's dtype; with ``return_residual=True``
      ``(out, lse)``. lse is float32 ``[batch, q_len, heads]``, a natural logarithm, and
      differentiable. Both vary over the mesh axes of the inputs and the ring. With
      ``check_vma=False`` and ``jax.grad`` taken inside the ``shard_map``, each device gets only its
      own gradient of an input that several devices share: sum these gradients with ``lax.psum``.

    Raises:
      ValueError, TypeError, NotImplementedError: while tracing, with the way out.
    """
    checked, qkv, features = check_call("attention", (query, key, value), bias, mask, options)
    with_lse = _checks.flag("return_residual", return_residual)
    out, lse = attend(ring_axes(axis_name), checked, qkv, features, with_lse)
    return (out, lse) if with_lse else out


def check_call(
    caller: str,
    qkv: tuple[object, object, object],
    bias: object,
    mask: object,
    options: AttentionOptions,
) -> tuple[Options, Qkv, Features]:
    """Returns the arguments of ``caller``, checked: options, q, k and v, and other arrays."""
    _checks.no_bias(bias)
    checked, arrays = check_options(caller, options), _checks.arrays(*qkv, any_head_dim=True)
    given = {**options, "mask": mask}
    return checked, arrays, check_features(given, *arrays[:2], checked.dropout_rate)


def attend(
    axes: Axes, options: Options, qkv: Qkv, features: Features, with_lse: bool
) -> tuple[Float[Array, "batch q_len heads value_dim"], Float32[Array, "batch q_len heads"]]:
    """Returns out and lse of this device's queries; all arguments are checked.

    Without ``with_lse``, nothing may follow from lse: its gradient counts as zero.
    """
    value_dim = qkv[2].shape[3]
    ring, qkv, features = prepared(axes, options, qkv, features, with_lse)
    if qkv[0].size == 0 or qkv[1].size == 0:
        out, lse = _empty_result(qkv, features)
    elif ring.schedule in heads.SCHEDULES:
        out, lse = heads.scattered(ring, qkv, features)
    else:
        out, lse = ring_attention(ring, qkv, features)
    return without_transpose((out[..., :value_dim], lse))


def prepared(
    axes: Axes, options: Options, qkv: Qkv, features: Features, with_lse: bool
) -> tuple[Ring, tuple[jax.Array, jax.Array, jax.Array], Features]:
    """Returns the ring of a call, and its arrays as kernels take them, with padded columns."""
    options, qkv = pad_head_dims(options, qkv)
    ring = ring_along(axes, options, qkv, features, with_lse)
    _check_same_on_ring(features, axes)
    features = padding_as_ids(features, qkv, options, ring.positions)
    features = visibility.completed(ring, qkv, features)
    options = ring.options
    offset_axes: Axes = ()
    if features.dropout is not None:
        offset_axes = options.batch_axis + options.head_axis
    # Before the custom_vjp: the transpose of this cast sums the gradients of an input that several
    # devices share. Inside, the types of the backward rule would not match.
    qkv, features = spread(vary_together(axes + offset_axes, (qkv, features)))
    batch, _, count, _ = qkv[0].shape
    return ring, qkv, as_operands(features, batch, count, options.batch_axis, options.head_axis)


def _check_same_on_ring(features: Features, axes: Axes) -> None:
    """Raises for arrays of the whole ring that are typed as different on its devices."""
    for row, x in features.present():
        if row.name in SAME_ON_RING and varying_axes(x).intersection(axes):
            raise ValueError(
                f"{row.argument} must be the same on all devices of a ring, but varies over "
                f"{axis_name_of(axes)!r}, axis_name; {SAME_ON_RING[row.name]}"
            )


def _empty_result(qkv: Qkv, features: Features) -> tuple[jax.Array, jax.Array]:
    """Returns out and lse where there is no batch entry, query or key, so no device computes."""
    q, _, v = qkv
    lse = jnp.float32(-jnp.inf) if features.sinks is None else features.sinks[:, None]
    out = jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype)
    return vary_like(q, (out, jnp.broadcast_to(lse, q.shape[:3])))
