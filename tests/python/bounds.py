"""How far results may be from the reference."""

import jax.numpy as jnp
import numpy as np
from reference import error, rounding

OUTPUT_LIMIT, GRADIENT_LIMIT = 1e-6, 1.5e-6
"""In the norm, for what is computed in float32."""
ROUNDING_LIMIT = 1.15
"""Of results in 16 bits, as a multiple of what rounding an exact result costs."""


def check(found, expected, dout, dtype="float32"):
    """Results and gradients by name, of attention in ``dtype``."""
    dtype = jnp.dtype(dtype)
    for name, value in found.items():
        per_head = expected.per_head.get(name)
        kept = np.float32 if name == "lse" or per_head else dtype
        assert value.dtype == kept, name
        if per_head:
            wrong = np.linalg.norm(value - per_head.value)
            limit = _per_head_limit(per_head, expected, found, dout, dtype)
        else:
            wrong, size = error(name, value, expected)
            limit = (OUTPUT_LIMIT if name in ("o", "lse") else GRADIENT_LIMIT) * size
            if kept != np.float32:
                limit = max(limit, ROUNDING_LIMIT * rounding(name, expected, dtype))
        assert wrong <= limit, f"{name}: error {wrong:.2e}, allowed {limit:.2e}"


def _per_head_limit(per_head, expected, found, dout, dtype):
    """float32 of independent rows, and for long sequences what rounding o does to delta.

    The o that was found, since that is what delta is formed of: a value in the middle of two
    neighbours may go to either of them.
    """
    limit = GRADIENT_LIMIT * np.linalg.norm(per_head.terms)
    if dtype == jnp.float32 or expected.is_short:
        return limit
    rounded = np.asarray(found["o"], np.float64) - expected.o
    delta = (rounded * np.asarray(dout, np.float64)).sum(-1)
    return limit + ROUNDING_LIMIT * np.linalg.norm((per_head.shares * delta).sum((0, 1)))
