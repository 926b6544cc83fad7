"""Names for the values that the public functions take."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, TypedDict

Layout: TypeAlias = Literal["contiguous", "zigzag", "striped"]
"""Which global positions a rank holds."""

Schedule: TypeAlias = Literal["auto", "ring", "balanced", "all_gather", "ulysses", "hybrid"]
"""How chunks meet."""

Backward: TypeAlias = Literal["auto", "keys", "queries"]
"""What travels in the backward ring."""

BackwardOrder: TypeAlias = Literal["fixed", "any"]
"""The order in which kernels of GPUs add to a gradient."""


Method: TypeAlias = Literal["auto", "ring", "all_gather"]
"""How the states of linear attention travel."""


Implementation: TypeAlias = Literal["xla"]
"""What `attention` may be asked to be computed with: plain JAX."""


class AttentionOptions(TypedDict, total=False):
    """Keyword arguments that `attention` and `dot_product_attention` share."""

    is_causal: bool
    scale: float | None
    query_seq_lengths: None
    key_value_seq_lengths: None
    local_window_size: int | tuple[int, int] | None
    segment_ids: Any
    logits_soft_cap: float | None
    sinks: Any
    alibi_slopes: Any
    dropout_rate: float
    dropout_key: Any
    batch_axis: str | tuple[str, ...] | None
    head_axis: str | tuple[str, ...] | None
    layout: Layout
    schedule: Schedule
    backward: Backward
    backward_order: BackwardOrder
    residual_dtype: Literal["float32"] | None
    links: Any
    implementation: Implementation | None
