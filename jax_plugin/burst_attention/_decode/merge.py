"""Merges the results of attention over parts of the keys."""

import functools
import operator
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from burst_attention import _checks

Pair: TypeAlias = tuple[Float32[Array, "*rows value_dim"], Float32[Array, "*rows"]]
"""out and lse of rows."""


def merge_attention(
    *parts: tuple[Float[Array, "*rows value_dim"], Float[Array, "*rows"]],
) -> tuple[jax.Array, jax.Array]:
    """Merges the results of attention over disjoint parts of the keys::

        lse = ln Σ_i e^lse_i;   out = Σ_i e^(lse_i − lse) out_i

    The result is that of attention over all keys together. Each part is an ``(out, lse)``, as
    `attention` and `decode_attention` return it with ``return_residual=True``. A part that sees no
    key, of lse −∞, adds nothing, even if its out is NaN. Rows of which no part sees a key have out
    0 and lse −∞. Give sinks to one part alone: a sink that joins several parts counts several
    times.

    Plain JAX, on any device, differentiable in every way.

    Args:
      *parts: one pair or more. out is ``[*rows, value_dim]`` of any float type, lse ``[*rows]``, a
        natural logarithm. All parts have the same shapes.

    Returns:
      ``(out, lse)``, both float32.

    Raises:
      ValueError, TypeError: while tracing, with the way out.
    """
    if not parts:
        raise ValueError("merge_attention needs at least one pair (out, lse), got none")
    checked = [_part(index, part) for index, part in enumerate(parts)]
    first = checked[0][0].shape
    for index, (out, _) in enumerate(checked):
        if out.shape != first:
            raise ValueError(
                f"the outs of all parts must have one shape, got {first} and, in part {index}, "
                f"{out.shape}"
            )
    outs, logs = zip(*checked, strict=True)
    return merged(jnp.stack(outs), jnp.stack(logs))


def _part(index: int, part: object) -> tuple[jax.Array, jax.Array]:
    """Returns out and lse of a part, checked, in float32."""
    if not isinstance(part, tuple | list) or len(part) != 2:
        raise TypeError(
            f"part {index} must be a pair (out, lse), got {type(part).__name__}; "
            "return_residual=True returns such a pair"
        )
    names = (f"out of part {index}", f"lse of part {index}")
    out, lse = (_checks.array_type(*each) for each in zip(names, part, strict=True))
    for name, x in zip(names, (out, lse), strict=True):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} must have a float type, got {x.dtype}")
    if tuple(out.shape[:-1]) != tuple(lse.shape) or not out.shape:
        raise ValueError(
            f"lse of part {index} must have the shape of out but for the last dimension, got out "
            f"{tuple(out.shape)} and lse {tuple(lse.shape)}"
        )
    out, lse = (_checks.as_array(x).astype(jnp.float32) for x in (out, lse))
    return out, lse


def merged(
    outs: Float32[Array, "parts *rows value_dim"], logs: Float32[Array, "parts ..."]
) -> Pair:
    """Returns out and lse of rows whose parts stand along the first dimension.

    The weights e^(lse_i − max lse) are not above 1. Parts are added one after the other, in their
    order. In a reduction, XLA would choose the order by the shapes.
    """
    top = lax.stop_gradient(logs.max(0))
    base = jnp.where(jnp.isinf(top), 0, top)
    # A part of lse +∞, as a sink makes it, takes all weight.
    takes_all = jnp.isposinf(logs)
    weights = jnp.exp(jnp.where(takes_all, 0, logs) - base[None])
    weights = jnp.where(jnp.isposinf(top)[None], takes_all.astype(jnp.float32), weights)
    total = functools.reduce(operator.add, weights)
    is_blind = total == 0
    total = jnp.where(is_blind, 1, total)
    # What a part without keys returns as out may be anything, and 0 · NaN is NaN.
    outs = jnp.where(jnp.isneginf(logs)[..., None], 0, outs)
    out = functools.reduce(operator.add, weights[..., None] * outs) / total[..., None]
    lse = jnp.where(is_blind, -jnp.inf, base + jnp.log(total))
    return out, jnp.where(jnp.isposinf(top), jnp.inf, lse)
