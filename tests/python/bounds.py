"""Bounds on the errors of results against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import platforms
from reference import cost, error, rounding

OUTPUT_LIMIT, GRADIENT_LIMIT = 1e-6, 1.5e-6
"""Relative errors in the norm of results that are computed in float32."""
ROUNDING_LIMIT = 1.15
"""The error of a result in 16 bits, as a multiple of the error of rounding the exact result."""
COST_LIMIT = 1.5
"""The error of a GPU kernel's result, as a multiple of the cost of rounding to 16 bits."""
GPU_LSE_LIMIT = 1e-5
"""The relative error of lse on GPUs, which is float32 but sums approximate exponentials."""


def check(found, expected, dout, dtype="float32"):
    """Checks the results and gradients, by name, of attention in ``dtype``."""
    dtype = jnp.dtype(platforms.dtype(dtype))
    for name, value in found.items():
        value = np.asarray(value)
        per_head = expected.per_head.get(name)
        kept = np.float32 if name == "lse" or per_head else dtype
        assert value.dtype == kept, name
        if per_head:
            wrong = np.linalg.norm(value - per_head.value)
            limit = _per_head_limit(name, per_head, expected, found, dout, dtype)
        else:
            wrong, size = error(name, value, expected)
            limit = (OUTPUT_LIMIT if name in ("o", "lse") else GRADIENT_LIMIT) * size
            if expected.rounded and name == "lse":
                limit = GPU_LSE_LIMIT * size
            elif kept != np.float32:
                limit = max(limit, narrow_limit(name, expected, dtype))
        assert wrong <= limit, f"{name}: error {wrong:.2e}, allowed {limit:.2e}"


def close(found, expected, limit=GRADIENT_LIMIT):
    """Checks that two programs give the same results but for the order of their sums.

    The relative difference in the norm of each result is at most ``limit``, or what rounding to the
    result's type makes. A limit of 0 asks for the same numbers.
    """
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        most = limit and max(limit, float(jnp.finfo(x.dtype).eps) / 2)
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert x.shape == y.shape
        assert np.linalg.norm(x - y) <= most * np.linalg.norm(y)


def narrow_limit(name, expected, dtype):
    """Returns the largest error, in the norm, of a result in 16 bits."""
    if expected.rounded:
        return COST_LIMIT * cost(name, expected, dtype)
    return ROUNDING_LIMIT * rounding(name, expected, dtype)


def _per_head_limit(name, per_head, expected, found, dout, dtype):
    """Returns the error that float32 rows, and for long sequences the rounded o in delta, may make.

    The rounding is that of the o that was found, since delta is computed from it: a value in the
    middle of two neighbours may be rounded to either of them.
    """
    limit = GRADIENT_LIMIT * np.linalg.norm(per_head.terms)
    if dtype == jnp.float32 or (expected.is_short and not expected.rounded):
        return limit
    o = found.get("o", expected.o if expected.rounded is None else expected.rounded.o)
    rounded = np.asarray(o, np.float64) - expected.o
    delta = (rounded * np.asarray(dout, np.float64)).sum(-1)
    of_delta = np.linalg.norm((per_head.shares * delta).sum((0, 1)))
    if not expected.rounded:
        return limit + ROUNDING_LIMIT * of_delta
    made = np.linalg.norm(expected.rounded.per_head[name].value - per_head.value)
    return limit + COST_LIMIT * np.hypot(made, of_delta)
