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


def pad_sequence(x: Any, axis_size: int, layout: str, axis: int = 1) -> NoReturn:
    """Pads a sequence of any length, with segment ids. Not implemented yet.

    Raises:
      NotImplementedError: always.
    """
    raise NotImplementedError(
        "pad_sequence is not implemented yet, since padding must be masked by segment ids; cut or "
        "pack the sequence to a multiple of the ring's size (twice that for layout 'zigzag'). "
        "With is_causal=True, padding at the end of the sequence is seen by no real token, so "
        "np.pad at the end will do"
    )
