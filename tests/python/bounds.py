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
            limit = _per_head_limit(per_head, expected, dout, dtype)
        else:
            wrong, size = error(name, value, expected)
            limit = (OUTPUT_LIMIT if name in ("o", "lse") else GRADIENT_LIMIT) * size
            if kept != np.float32:
                limit = max(limit, ROUNDING_LIMIT * rounding(name, expected, dtype))
        assert wrong <= limit, f"{name}: error {wrong:.2e}, allowed {limit:.2e}"


def _per_head_limit(per_head, expected, dout, dtype):
    """float32 of independent rows, and for long sequences what rounding o alone does to delta.

    An error that o may have before it is rounded sends some of its elements to their other
    neighbour. That changes the sum by chance, by twice its standard deviation at most.
    """
    limit = GRADIENT_LIMIT * np.linalg.norm(per_head.terms)
    if dtype == jnp.float32 or expected.is_short:
        return limit
    o, dout = expected.o, np.asarray(dout, np.float64)
    delta = ((o.astype(dtype).astype(np.float64) - o) * dout).sum(-1)
    unit = float(jnp.finfo(dtype).eps) * np.exp2(np.floor(np.log2(np.abs(o) + 1e-300)))
    turned = 2 * OUTPUT_LIMIT * np.abs(o) * unit * dout**2
    turned = (per_head.shares**2 * turned.sum(-1)).sum()
    rounded = np.linalg.norm((per_head.shares * delta).sum((0, 1)))
    return limit + ROUNDING_LIMIT * rounded + 2 * np.sqrt(turned)
