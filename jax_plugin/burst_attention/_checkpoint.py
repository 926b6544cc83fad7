"""What a rematerialised layer should keep of its attention."""

from __future__ import annotations

import jax

OUT_NAME = "burst_attention_out"
LSE_NAME = "burst_attention_lse"

save_attention = jax.checkpoint_policies.save_only_these_names(OUT_NAME, LSE_NAME)
"""Policy for ``jax.checkpoint``: keeps output and lse of every attention call, nothing else.

The backward ring needs only these two and q, k, v, which are cheap to recompute, so under this
policy the forward ring never runs a second time::

    layer = jax.checkpoint(layer, policy=burst_attention.save_attention)

To combine it with other names, pass ``"burst_attention_out"`` and ``"burst_attention_lse"`` to
``jax.checkpoint_policies.save_only_these_names`` together with them.
"""
