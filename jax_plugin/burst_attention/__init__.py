"""Exact attention over a sequence that is sharded across devices.

Inside ``jax.shard_map``, where arrays are one device's shard of the sequence, call `attention`. On
global arrays under ``jit`` call `dot_product_attention`. Forward and backward pass are one XLA
custom call each: chunks travel round the ring of devices while the devices compute with the chunks
that have arrived. No array has the size sequence × sequence.
"""

from burst_attention import _jax as _jax
from burst_attention import masks
from burst_attention._attention.choice import ScheduleCandidate, ScheduleChoice, choose_schedule
from burst_attention._attention.flops import AttentionFlops, attention_flops
from burst_attention._attention.global_arrays import dot_product_attention
from burst_attention._attention.links import Links
from burst_attention._attention.shards import attention
from burst_attention._balance import BalancedDocuments, balance_documents
from burst_attention._checkpoint import offload_attention, save_attention
from burst_attention._decode.append import append_to_cache
from burst_attention._decode.attention import decode_attention
from burst_attention._decode.merge import merge_attention
from burst_attention._decode.prefix import shared_prefix_attention
from burst_attention._flax import flax_attention_fn
from burst_attention._infini.attention import infini_attention
from burst_attention._latent.attention import latent_attention
from burst_attention._layouts import from_layout, layout_positions, local_positions, to_layout
from burst_attention._linear.attention import linear_attention
from burst_attention._linear.delta import delta_attention, delta_attention_step
from burst_attention._linear.step import linear_attention_step
from burst_attention._nccl import order_launches
from burst_attention._padding import pad_sequence, segment_ids_from_cu_seqlens
from burst_attention._pool.alternate import alternate
from burst_attention._pool.pool import CachePool
from burst_attention._shift import shift
from burst_attention._trace import trace
from burst_attention._version import __version__

order_launches()

__all__ = [
    "AttentionFlops",
    "BalancedDocuments",
    "CachePool",
    "Links",
    "ScheduleCandidate",
    "ScheduleChoice",
    "__version__",
    "alternate",
    "append_to_cache",
    "attention",
    "attention_flops",
    "balance_documents",
    "choose_schedule",
    "decode_attention",
    "delta_attention",
    "delta_attention_step",
    "dot_product_attention",
    "flax_attention_fn",
    "from_layout",
    "infini_attention",
    "latent_attention",
    "layout_positions",
    "linear_attention",
    "linear_attention_step",
    "local_positions",
    "masks",
    "merge_attention",
    "offload_attention",
    "pad_sequence",
    "save_attention",
    "segment_ids_from_cu_seqlens",
    "shared_prefix_attention",
    "shift",
    "to_layout",
    "trace",
]
