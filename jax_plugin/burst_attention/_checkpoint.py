"""What a rematerialised layer should keep of its attention, and where."""

from __future__ import annotations

import jax

OUT_NAME = "burst_attention_out"
LSE_NAME = "burst_attention_lse"
STATE_NAME = "burst_attention_state"

save_attention = jax.checkpoint_policies.save_only_these_names(OUT_NAME, LSE_NAME, STATE_NAME)
"""Policy for ``jax.checkpoint``: keeps output and lse of every attention call, nothing else.

The backward ring needs only these two and q, k, v, which are cheap to recompute, so under this
policy the forward ring never runs a second time::

    layer = jax.checkpoint(layer, policy=burst_attention.save_attention)
    x, _ = jax.lax.scan(layer, x, weights)

Of linear attention it keeps output and states, with the same effect.

To combine it with other names, pass ``"burst_attention_out"``, ``"burst_attention_lse"`` and
``"burst_attention_state"`` to ``jax.checkpoint_policies.save_only_these_names`` with them.
"""

offload_attention = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[OUT_NAME, LSE_NAME, STATE_NAME],
    offload_src="device",
    offload_dst="pinned_host",
)
"""`save_attention` that keeps them in the host's pinned memory until the backward pass.

For where even one output for each layer is too much for a GPU's memory. A layer then sends
batch · seq · heads · (value_dim · b + 4) bytes of its shard to the host and gets them back once, b
those of query's type; XLA decides when, so measure whether that hides behind compute. On CPU
devices, whose memory is the host's, nothing moves.
"""
