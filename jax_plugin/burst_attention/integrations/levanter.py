"""Levanter's models of ``levanter.grug`` with the attention of this package.

Two lines in the place of the import of ``levanter.grug.attention.attention``, or from outside::

    from burst_attention.integrations.levanter import attention
    snowball.attention = attention
"""

from typing import Any

import jax
import jax.numpy as jnp

from burst_attention._attention.global_arrays import dot_product_attention
from burst_attention._checks import at_least_1

__all__ = ["attention"]


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Any,
    *,
    implementation: object = None,
    axis_name: str = "context",
) -> jax.Array:
    """Stands for ``attention`` of ``levanter.grug.attention`` on a mesh of Explicit axes.

    Arrays stay in the order of the sequence. Inside the call they are exchanged into a layout of
    balanced work where that pays: not for windows.

    Args:
      q: ``[batch, seq, heads, head_dim]``.
      k: ``[batch, seq, kv_heads, head_dim]``.
      v: ``[batch, seq, kv_heads, value_dim]``.
      mask: an AttentionMask of Levanter, or None. Its ``sliding_window`` counts the query's own
        position. A negative segment id is padding: it sees nothing, and its out is 0.
      implementation: not used; models of Levanter pass it.
      axis_name: the mesh axis that shards the sequence.

    Returns:
      ``[batch, seq, heads, value_dim]``, sharded like q.

    Raises:
      NotImplementedError: for a dense mask, and for a mask whose window only ``fa4_bounds`` know.
      ValueError, TypeError: see `dot_product_attention`.
    """
    options: dict[str, Any] = {"axis_name": axis_name, "order": "sequence"}
    if mask is None:
        return dot_product_attention(q, k, v, **options)
    if not hasattr(mask, "segment_ids") or getattr(mask, "fa4_bounds", None) is not None:
        raise NotImplementedError(
            "expected an AttentionMask with sliding_window and segment_ids, got a dense mask or "
            "fa4_bounds, which hide the window; build the mask without them"
        )
    window, ids = None, mask.segment_ids
    if mask.sliding_window is not None:
        back = at_least_1("sliding_window", mask.sliding_window) - 1
        window = (back, 0 if mask.is_causal else None)
    if ids is not None:
        ids = tuple(jnp.broadcast_to(x, y.shape[:2]) for x, y in zip(ids, (q, k), strict=True))
    return dot_product_attention(
        q,
        k,
        v,
        is_causal=mask.is_causal,
        local_window_size=window,
        segment_ids=ids,
        layout="zigzag" if mask.is_causal and window is None else "contiguous",
        **options,
    )
