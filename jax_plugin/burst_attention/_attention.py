# ruff: noqa: F722  (shapes in annotations are not Python)
"""Attention inside ``jax.shard_map``."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import jax
import jax.numpy as jnp

from burst_attention import _check_masks, _checks, _choice, _implementation, _ulysses
from burst_attention._choice import Links
from burst_attention._extras import Extras, dropout_place
from burst_attention._ring import Ring, ring_groups, vary, vary_together, varying_axes
from burst_attention._types import (
    AttentionOptions,
    Backward,
    BackwardOrder,
    Implementation,
    Layout,
    Schedule,
)
from burst_attention._vjp import Qkv, Sinks, ring_attention

if TYPE_CHECKING:
    from typing import Unpack

    from jaxtyping import Array, Float, Float32, Int32, PRNGKeyArray, UInt32

    SegmentIds: TypeAlias = (
        Int32[Array, "batch q_len"]
        | tuple[Int32[Array, "batch q_len"], Int32[Array, "batch kv_len"]]
    )


@overload
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: None = None,
    mask: None = None,
    *,
    axis_name: str | tuple[str, ...],
    return_residual: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> jax.Array: ...


@overload
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: None = None,
    mask: None = None,
    *,
    axis_name: str | tuple[str, ...],
    return_residual: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: None = None,
    mask: None = None,
    *,
    axis_name: str | tuple[str, ...],
    return_residual: bool,
    **options: Unpack[AttentionOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def attention(
    query: Float[Array, "batch q_len heads head_dim"],
    key: Float[Array, "batch kv_len kv_heads head_dim"],
    value: Float[Array, "batch kv_len kv_heads value_dim"],
    bias: None = None,
    mask: None = None,
    *,
    axis_name: str | tuple[str, ...],
    is_causal: bool = False,
    scale: float | None = None,
    query_seq_lengths: None = None,
    key_value_seq_lengths: None = None,
    local_window_size: int | tuple[int, int] | None = None,
    segment_ids: SegmentIds | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float32[Array, " heads"] | None = None,
    alibi_slopes: Float32[Array, " heads"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: PRNGKeyArray | UInt32[Array, " 2"] | None = None,
    batch_axis: str | tuple[str, ...] | None = None,
    head_axis: str | tuple[str, ...] | None = None,
    layout: Layout = "contiguous",
    schedule: Schedule = "auto",
    backward: Backward = "auto",
    backward_order: BackwardOrder = "fixed",
    residual_dtype: Literal["float32"] | None = None,
    links: Links | None = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Exact attention of this device's queries over the whole, sharded sequence.

    Computes, for every query of this shard and the keys of all devices along ``axis_name``::

        s = scale · q kᵀ          with logits_soft_cap: cap · tanh(s / cap)
                                  with alibi_slopes: + slope · (key position − query position)
                                  −inf where the mask hides the key
        lse = ln Σ e^s;   out = e^(s − lse) v          with a sink z, e^z is part of that sum

    A query sees the keys that ``is_causal``, ``local_window_size`` and ``segment_ids`` all allow.
    If that is none, its out is 0, its lse −inf (with a sink: z), and it gives no gradient to key
    and value. Positions are those of the whole sequence; with query and key of different lengths
    both begin at 0. Query head h uses key/value head h // (heads / kv_heads). Names and meaning are
    those of ``jax.nn.dot_product_attention``; the sequence is cut as ``layout`` says. Products are
    accumulated in float32, in the backward pass over the whole ring. Reverse-mode derivatives of
    ``out`` and ``lse`` are one more custom call; forward mode and second derivatives are errors.

    Scores are float32. One that overflows to −∞, below −3.4e38 (on GPUs below −6.9e37), counts as
    hidden: a query of which every visible score does has out 0 and lse −inf, without an error, as
    if it saw no key. A score of +∞ makes its query's out and lse NaN. In the backward pass no
    weight exceeds 1, and on CPU devices a key that takes all weight has exactly 1, however large
    scores are. Between keys that share the weight, lse and so weights lose digits: at scores of
    1e5 they are good to 4e-3. On GPUs weights of the backward pass are good to 2e-7 times the
    score, at most 1, whoever takes the weight.

    Args:
      query: ``[batch, q_len, heads, head_dim]``, this device's part of the sequence. bfloat16,
        float16 or float32; head_dim a multiple of 8 up to 256.
      key: ``[batch, kv_len, kv_heads, head_dim]``, same dtype; kv_heads divides heads.
      value: ``[batch, kv_len, kv_heads, value_dim]``; value_dim like head_dim, but may be another.
      bias: must be None: a sequence × sequence array.
      mask: must be None: a sequence × sequence array.
      axis_name: mesh axis along which the sequence is sharded, or a pair (outer, inner), such as
        nodes and the GPUs of a node: rank = outer · inner size + inner. All axes of the mesh must
        be manual in the surrounding ``shard_map``; each of the others makes rings of its own.
      is_causal: a query sees only keys at its own global position and before.
      scale: factor on q·k, a Python number; default head_dim ** -0.5.
      query_seq_lengths: must be None.
      key_value_seq_lengths: must be None.
      local_window_size: (left, right): a query sees so many positions before its own and after it;
        one number means both. With is_causal right is 0.
      segment_ids: int32 ``[batch, seq]``, in the order of ``layout``: a query sees keys of its own
        segment only, for packed documents. Negative ids match nothing, not even themselves: that
        is padding, see `pad_sequence`. Or a pair: ids of query, ids of key.
      logits_soft_cap: bounds scores smoothly: s becomes cap · tanh(s / cap), before the mask. A
        Python number from 1e-30 to 1e30, on GPUs from 0.001 to 1000.
      sinks: float32 ``[heads]``, for each query head a logit that joins the softmax of every row
        but has no value. Differentiable; where the heads are sharded, a device takes its own. −inf
        is none; +inf takes all weight, so out is 0 and lse +inf.
      alibi_slopes: float32 ``[heads]``, added to scores times the distance (key − query position),
        so positive ones favour near keys of the past. Differentiable; where the heads are
        sharded, a device takes its own.
      dropout_rate: probability, a Python number, with which each weight is dropped after the
        softmax; what is left is divided by 1 − dropout_rate. lse is that without dropout.
      dropout_key: a key of ``jax.random``, or its data, uint32 ``[2]``; the same on all devices of
        a ring. Of longer data the first and the last word count. Which weights are dropped depends
        on the key and on the place of a weight in the whole array only, so it is the same for
        every mesh, layout and schedule, and under ``vmap`` for all instances that share a key.
      batch_axis: mesh axes that shard the batch, the major one first; for dropout only, which
        otherwise treats the shards of other devices alike.
      head_axis: mesh axes that shard the heads, likewise.
      layout: which global positions a device holds: ``contiguous``, ``zigzag`` (balances causal
        work) or ``striped``; see `to_layout`.
      schedule: how chunks travel. ``ring``: from rank to rank. With a pair of axes a double ring:
        chunks of another node cross a slow link once, while those before them go round their inner
        ring. ``balanced``: ranks that would be idle under a causal mask in the contiguous layout
        compute for the others. ``all_gather``: straight from their owner, two at a time.
        ``ulysses``: not at all; all-to-all exchanges deal the heads to the ranks, each of which
        then has the whole sequence of its own heads. ``hybrid``: over a pair of axes, heads are
        dealt to the ranks of the inner one, and rings go along the outer one. Both want query heads
        that the ranks divide; of key and value, heads are repeated as often as that takes, and in
        16 bits the gradients of repeated ones are rounded before they are added up. With
        ``hybrid`` in the striped layout shards change ranks first. ``auto``: what is predicted to
        take least time, see `choose_schedule`.
      backward: what travels in the backward ring: ``keys``, ``queries``, or ``auto``, the one that
        sends fewer bytes.
      backward_order: the order in which kernels of GPUs add to a gradient. ``fixed``: one order, so
        every run gives the same bits. ``any``: any order, so gradients differ from run to run in
        the last bits, and one kernel computes all of them where it can: queries stay at home
        (``backward="keys"``), no feature but segments, heads of up to 128 columns, on Hopper and
        its successors in data centers. On CPU devices both give the same bits, in every run.
      residual_dtype: ``"float32"``, on CPU devices or with ``implementation="xla"``, keeps out in
        float32 for the backward pass, at two more bytes a value than out in 16 bits. By default out
        is kept in query's dtype, but in float32 for up to 256 keys and for windows of up to 64. The
        gradients of query and key are sums of e^(s − lse) · (dout vᵀ − rowsum(dout ∘ out)), in
        which out's rounding to 16 bits does not average out where values have a large common part:
        with bfloat16 inputs uniform in [0, 1) and 1,024 tokens of 64 columns, query's gradient is
        off by 17% of its norm, as in every attention that keeps out in 16 bits, and by 0.17% with
        ``"float32"``.
      links: what the mesh is made of, for ``schedule="auto"``; default: H200s on GPUs. On CPU
        devices ``auto`` is ``ring`` unless links are given.
      implementation: ``"xla"`` computes in plain JAX, on any platform: the same results from a ring
        of ``lax.ppermute``, whatever ``schedule`` says but for ``ulysses`` and ``hybrid``. Keys
        travel in both passes. By default the library's calls compute on CPU devices and NVIDIA
        GPUs, and plain JAX computes what they do not serve: float32 on GPUs, with a warning, other
        platforms, and rings over the CPU devices of several processes.
      return_residual: also return lse.

    Returns:
      ``out``, ``[batch, q_len, heads, value_dim]`` in query's dtype; with ``return_residual=True``
      ``(out, lse)``, lse float32 ``[batch, q_len, heads]``, natural logarithm, differentiable. Both
      vary over the mesh axes of the inputs and the ring. With ``check_vma=False`` and ``jax.grad``
      taken inside the ``shard_map``, gradients of inputs that are equal on several devices are
      those of one device: sum them with ``lax.psum``.

    Raises:
      ValueError, TypeError, NotImplementedError: while tracing, with the way out.
    """
    arguments = dict(locals())
    _checks.refused_arguments(arguments)
    qkv = _checks.arrays(query, key, value)
    sinks = _check_masks.per_head("sinks", sinks, qkv[0].shape[2], "logit")
    extras = _extras(arguments, *qkv[:2])
    with_lse = _checks.flag("return_residual", return_residual)
    ring = _ring(arguments, *qkv[:2], has_sinks=sinks is not None)
    extras = _placed(arguments, ring, extras, qkv[0])
    # Before the custom_vjp: the transpose of this cast is what sums the gradients of an input
    # that several devices share, and inside, the types of the backward rule would not match.
    varying, (qkv, sinks, extras) = vary_together(ring.axes, (qkv, sinks, extras))
    ring = replace(ring, varying=varying)
    if qkv[0].size == 0 or qkv[1].size == 0:
        # No batch entry, query or key: nothing to compute, so no device needs another.
        out, lse = _nothing(ring, qkv, sinks)
    elif ring.schedule in _ulysses.SCHEDULES:
        out, lse = _dealt(ring, qkv, sinks, extras)
    else:
        out, lse = ring_attention(ring, qkv, sinks, _of_entries(extras, qkv[0]))
    return (out, lse) if with_lse else out


def _extras(arguments: dict[str, Any], query: jax.Array, key: jax.Array) -> Extras:
    """Segments, slopes ``[heads]`` and the key's words ``[2]``, as they came."""
    slopes = _check_masks.per_head(
        "alibi_slopes", arguments["alibi_slopes"], query.shape[2], "slope"
    )
    segments = _check_masks.segments(arguments["segment_ids"], query, key) or (None, None)
    rate = _check_masks.dropout_rate(arguments["dropout_rate"])
    words = _check_masks.dropout_words(arguments["dropout_key"], rate)
    return Extras(segments[0], segments[1], slopes, words)


def _ring(arguments: dict[str, Any], query: jax.Array, key: jax.Array, *, has_sinks: bool) -> Ring:
    """The static side of the call; which axes the results vary over comes later."""
    _checks.choice("layout", arguments["layout"], _checks.LAYOUTS)
    _checks.choice("backward", arguments["backward"], _checks.BACKWARDS)
    _checks.choice("backward_order", arguments["backward_order"], _checks.BACKWARD_ORDERS)
    is_causal = _checks.flag("is_causal", arguments["is_causal"])
    softmax_scale = _checks.softmax_scale(arguments["scale"], query.shape[3])
    axes = _checks.ring_axes(arguments["axis_name"])
    mesh = _checks.ring_mesh(axes)
    _checks.all_axes_manual(mesh)
    world_size = math.prod(mesh.shape[name] for name in axes)
    implementation = _implementation.chosen(
        arguments["implementation"], mesh, query.dtype, world_size
    )
    schedule = _choice.resolved(arguments, axes, mesh, implementation)
    schedule = _checks.schedule(schedule, axes)
    for name, x in (("query", query), ("key", key)):
        _checks.shard_length(name, x.shape[1], arguments["layout"])
    positions = world_size * max(query.shape[1], key.shape[1])
    return Ring(
        axes=axes,
        world_size=world_size,
        schedule=schedule,
        inner_size=mesh.shape[axes[1]] if schedule == "double_ring" else 0,
        window=_check_masks.window(arguments["local_window_size"], is_causal, positions),
        softmax_scale=softmax_scale,
        keeps_float32=_checks.keeps_float32(arguments["residual_dtype"], implementation),
        soft_cap=_check_masks.soft_cap(arguments["logits_soft_cap"], implementation),
        dropout_rate=_check_masks.dropout_rate(arguments["dropout_rate"]),
        layout=arguments["layout"],
        backward=arguments["backward"],
        backward_order=arguments["backward_order"],
        varying=(),
        implementation=implementation,
        groups=ring_groups(mesh, axes),
        has_sinks=has_sinks,
    )


def _placed(arguments: dict[str, Any], ring: Ring, extras: Extras, query: jax.Array) -> Extras:
    """With what dropout needs to know of each batch entry in the place of the key's words."""
    mesh = _checks.ring_mesh(ring.axes)
    axes = [
        _check_masks.offset_axes(name, arguments[name], mesh, ring.axes)
        for name in ("batch_axis", "head_axis")
    ]
    if extras.dropout is None:
        return extras
    _check_masks.same_on_the_ring("dropout_key", varying_axes(extras.dropout), ring.axes)
    batch, _, heads, _ = query.shape
    return extras._replace(dropout=dropout_place(extras.dropout, batch, heads, *axes))


def _dealt(ring: Ring, qkv: Qkv, sinks: Sinks, extras: Extras) -> tuple[jax.Array, jax.Array]:
    """out and lse where each rank computes some of the heads."""
    heads = qkv[0].shape[2]
    exchange, ring = _ulysses.exchange(ring, heads)
    qkv, extras = exchange.qkv(qkv), exchange.extras(extras, heads)
    sinks = None if sinks is None else exchange.own(sinks)
    out, lse = ring_attention(ring, qkv, sinks, _of_entries(extras, qkv[0]))
    return exchange.results(out), exchange.results(lse)


def _of_entries(extras: Extras, query: jax.Array) -> Extras:
    """With slopes of each batch entry in the place of those that all share."""
    if extras.slopes is None:
        return extras
    shape = (query.shape[0], query.shape[2])
    return extras._replace(slopes=jnp.broadcast_to(extras.slopes, shape))


def _nothing(ring: Ring, qkv: Qkv, sinks: Sinks) -> tuple[jax.Array, jax.Array]:
    """out and lse of queries that see no key: there are none of the one or the other."""
    rows = qkv[0].shape[:3]
    out = jnp.zeros((*rows, qkv[2].shape[3]), qkv[0].dtype)
    lse = jnp.broadcast_to(jnp.float32(-jnp.inf) if sinks is None else sinks, rows)
    return vary(out, ring.varying), vary(lse, ring.varying)
