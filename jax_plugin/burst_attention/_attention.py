# ruff: noqa: F722  (shapes in annotations are not Python)
"""Attention inside ``jax.shard_map``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import jax
import jax.numpy as jnp

from burst_attention import _checks
from burst_attention._ring import Ring, ring_groups, vary_together
from burst_attention._types import AttentionOptions, Backward, Layout, Schedule
from burst_attention._vjp import ring_attention

if TYPE_CHECKING:
    from typing import Unpack

    from jaxtyping import Array, Float, Float32, Int32, PRNGKeyArray


@overload
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: None = None,
    mask: None = None,
    *,
    axis_name: str,
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
    axis_name: str,
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
    axis_name: str,
    return_residual: bool,
    **options: Unpack[AttentionOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def attention(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    bias: None = None,
    mask: None = None,
    *,
    axis_name: str,
    is_causal: bool = False,
    scale: float | None = None,
    query_seq_lengths: None = None,
    key_value_seq_lengths: None = None,
    local_window_size: int | tuple[int, int] | None = None,
    segment_ids: Int32[Array, "batch seq"] | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float32[Array, " heads"] | None = None,
    alibi_slopes: Float32[Array, " heads"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: PRNGKeyArray | None = None,
    batch_axis: str | None = None,
    head_axis: str | None = None,
    layout: Layout = "contiguous",
    schedule: Schedule = "auto",
    backward: Backward = "auto",
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Exact attention of this device's queries over the whole, sharded sequence.

    Computes, for every query of this shard and the keys of all devices along ``axis_name``::

        s = scale · q kᵀ          −inf where is_causal and the key is later than the query
        lse = ln Σ e^s;   out = e^(s − lse) v          with a sink z, e^z is part of that sum

    Query head h uses key/value head h // (heads / kv_heads). Names and meaning are those of
    ``jax.nn.dot_product_attention``; the sequence is cut as ``layout`` says. Products are
    accumulated in float32, in the backward pass over the whole ring. Reverse-mode derivatives of
    ``out`` and ``lse`` are one more custom call; forward mode and second derivatives are errors.

    Args:
      query: ``[batch, seq, heads, head_dim]``, this device's part of the sequence. bfloat16 or
        float16, on CPU devices also float32; head_dim a multiple of 8 up to 256.
      key: ``[batch, seq, kv_heads, head_dim]``, same dtype; kv_heads divides heads.
      value: like key.
      bias: must be None: a sequence × sequence array.
      mask: must be None: a sequence × sequence array.
      axis_name: mesh axis along which the sequence is sharded. All axes of the mesh must be manual
        in the surrounding ``shard_map``; each of the others makes rings of its own.
      is_causal: a query sees only keys at its own global position and before.
      scale: factor on q·k, a Python number; default head_dim ** -0.5.
      query_seq_lengths: must be None.
      key_value_seq_lengths: must be None.
      local_window_size: not implemented yet.
      segment_ids: not implemented yet.
      logits_soft_cap: not implemented yet.
      sinks: float32 ``[heads]``, for each query head a logit that joins the softmax of every row
        but has no value. Differentiable; where the heads are sharded, a device takes its own.
      alibi_slopes: not implemented yet.
      dropout_rate: must be 0: not implemented yet.
      dropout_key: not used while dropout_rate is 0.
      batch_axis: not implemented yet.
      head_axis: not implemented yet.
      layout: which global positions a device holds: ``contiguous``, ``zigzag`` (balances causal
        work) or ``striped``; see `to_layout`.
      schedule: ``auto`` or ``ring``.
      backward: what travels in the backward ring: ``keys``, ``queries``, or ``auto``, the one that
        sends fewer bytes.
      return_residual: also return lse.

    Returns:
      ``out`` like query; with ``return_residual=True`` ``(out, lse)``, lse float32
      ``[batch, seq, heads]``, natural logarithm, differentiable. Both vary over the mesh axes of
      the inputs and the ring. With ``check_vma=False`` and ``jax.grad`` taken inside the
      ``shard_map``, gradients of inputs that are equal on several devices are those of one device:
      sum them with ``lax.psum``.

    Raises:
      ValueError, TypeError, NotImplementedError: while tracing, with the way out.
    """
    arguments = dict(locals())
    _checks.refused_arguments(arguments)
    _checks.later_arguments(arguments)
    query, key, value = _checks.arrays(query, key, value)
    sinks = _checks.sinks(sinks, query.shape[2])
    ring, operands = _ring(arguments, query, key, value, sinks)
    with_lse = _checks.flag("return_residual", return_residual)
    if query.size == 0:
        # No token or no batch entry: nothing to compute, so no device needs another.
        out, lse = operands[0], jnp.zeros_like(operands[0][..., 0], dtype=jnp.float32)
    else:
        out, lse = ring_attention(ring, *operands)
    return (out, lse) if with_lse else out


def _ring(
    arguments: dict[str, Any],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sinks: jax.Array | None,
) -> tuple[Ring, tuple[jax.Array, ...]]:
    """The static side of the call, and the inputs cast to one set of varying axes."""
    _checks.choice("layout", arguments["layout"], _checks.LAYOUTS)
    _checks.choice("backward", arguments["backward"], _checks.BACKWARDS)
    _checks.schedule(arguments["schedule"])
    is_causal = _checks.flag("is_causal", arguments["is_causal"])
    softmax_scale = _checks.softmax_scale(arguments["scale"], query.shape[3])
    axis_name = _checks.axis(arguments["axis_name"])
    mesh = _checks.ring_mesh(axis_name)
    _checks.all_axes_manual(mesh)
    platform = _checks.devices(mesh, query.dtype)
    _checks.shard_length(query.shape[1], arguments["layout"])
    # Before the custom_vjp: the transpose of this cast is what sums the gradients of an input
    # that several devices share, and inside, the types of the backward rule would not match.
    inputs = (query, key, value) if sinks is None else (query, key, value, sinks)
    varying, operands = vary_together(axis_name, *inputs)
    ring = Ring(
        axis_name=axis_name,
        world_size=mesh.shape[axis_name],
        is_causal=is_causal,
        softmax_scale=softmax_scale,
        layout=arguments["layout"],
        backward=arguments["backward"],
        varying=varying,
        platform=platform,
        groups=ring_groups(mesh, axis_name),
        has_sinks=sinks is not None,
    )
    return ring, operands
