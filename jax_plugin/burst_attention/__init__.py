"""Exact attention over a sequence that is sharded across devices.

Inside ``jax.shard_map``, where arrays are one device's shard of the sequence, call `attention`;
on global arrays under ``jit`` call `dot_product_attention`. Forward and backward are one XLA
custom call each: chunks travel round the ring of devices while the arrived ones are computed, and
nothing of size sequence × sequence exists anywhere.
"""

from burst_attention._attention import attention
from burst_attention._checkpoint import offload_attention, save_attention
from burst_attention._choice import Links, ScheduleCandidate, ScheduleChoice, choose_schedule
from burst_attention._global import dot_product_attention
from burst_attention._layouts import from_layout, layout_positions, local_positions, to_layout
from burst_attention._linear import linear_attention, linear_attention_step
from burst_attention._nccl import order_launches
from burst_attention._padding import pad_sequence
from burst_attention._trace import trace
from burst_attention._version import __version__

order_launches()

__all__ = [
    "Links",
    "ScheduleCandidate",
    "ScheduleChoice",
    "__version__",
    "attention",
    "choose_schedule",
    "dot_product_attention",
    "from_layout",
    "layout_positions",
    "linear_attention",
    "linear_attention_step",
    "local_positions",
    "offload_attention",
    "pad_sequence",
    "save_attention",
    "to_layout",
    "trace",
]
