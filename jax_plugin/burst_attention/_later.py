"""Functions of the interface that are not there yet: each says so, and what works instead."""

from __future__ import annotations

from typing import Any, NoReturn


def linear_attention(query: Any, key: Any, value: Any, **options: Any) -> NoReturn:
    """Linear attention with decay over a sharded sequence. Not implemented yet.

    Raises:
      NotImplementedError: always.
    """
    raise NotImplementedError(
        "linear_attention is not implemented yet; burst_attention.attention computes exact "
        "softmax attention over the same shards"
    )


def linear_attention_step(query: Any, key: Any, value: Any, state: Any, **options: Any) -> NoReturn:
    """One token of linear attention. Not implemented yet.

    Raises:
      NotImplementedError: always.
    """
    raise NotImplementedError(
        "linear_attention_step is not implemented yet; for one token against a state "
        "[batch, heads, d_k, d_v] jnp.einsum does the same"
    )
