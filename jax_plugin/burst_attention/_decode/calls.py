"""Implementations of the partial of one rank."""

import jax.numpy as jnp

from burst_attention._decode import plain
from burst_attention._decode.merge import Pair
from burst_attention._decode.work import Operands, Work
from burst_attention._mesh import vary_like


def partial(work: Work, operands: Operands) -> Pair:
    """Returns o ``[batch, queries, heads, value_dim]`` and lse of this rank's keys, float32."""
    query, keys, values = operands[:3]
    if query.size == 0 or keys.size == 0 or operands.page_table.size == 0:
        o = jnp.zeros((*query.shape[:3], values.shape[3]), jnp.float32)
        return vary_like(operands, (o, jnp.full(o.shape[:3], -jnp.inf, jnp.float32)))
    return plain.partial(work, operands)
