"""Policies of ``jax.checkpoint``: the results of attention that a rematerialised layer keeps."""

import jax

OUT_NAME = "burst_attention_out"
LSE_NAME = "burst_attention_lse"
STATE_NAME = "burst_attention_state"

save_attention = jax.checkpoint_policies.save_only_these_names(OUT_NAME, LSE_NAME, STATE_NAME)
"""Policy for ``jax.checkpoint``: keeps output and lse of every attention call, nothing else.

The backward ring needs output, lse, q, k and v. Recomputing q, k and v is cheap, so under this
policy the forward ring never runs a second time::

    layer = jax.checkpoint(layer, policy=burst_attention.save_attention)
    x, _ = jax.lax.scan(layer, x, weights)

For linear attention the policy keeps output and states, with the same effect.

To keep other names too, pass them to ``jax.checkpoint_policies.save_only_these_names`` together
with ``"burst_attention_out"``, ``"burst_attention_lse"`` and ``"burst_attention_state"``.
"""

offload_attention = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[OUT_NAME, LSE_NAME, STATE_NAME],
    offload_src="device",
    offload_dst="pinned_host",
)
"""Policy like `save_attention` that keeps the results in the host's pinned memory.

It serves models for which even one output for each layer exceeds a GPU's memory. A layer sends
batch · seq · heads · (value_dim · b + 4) bytes of its shard to the host and gets them back once for
the backward pass, where b is the number of bytes of query's dtype. XLA decides when, so measure
whether compute hides the transfers. CPU devices share the host's memory, so they move nothing.
"""
