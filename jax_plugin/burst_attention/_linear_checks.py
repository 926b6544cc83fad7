"""Checks of the arguments of linear attention; the words are those of ``_checks.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from burst_attention import _checks
from burst_attention._types import Method

METHODS: tuple[str, ...] = get_args(Method)
GLOBALLY = (
    "wrap the call: jax.shard_map(lambda q, k, v: burst_attention.linear_attention(q, k, v, "
    "axis_name=...), mesh=mesh, in_specs=spec, out_specs=spec), where spec names the axis in the "
    "place of seq"
)
"""What to do with global arrays."""


def arrays(query: Any, key: Any, value: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The three inputs; queries and keys are of one sequence."""
    q, k, v = _checks.arrays(query, key, value)
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            "query and key must have one length, since a state goes from token to token, got "
            f"{q.shape[1]} and {k.shape[1]}"
        )
    return q, k, v


def options(arguments: Mapping[str, Any]) -> None:
    """The static arguments, and those that exclude each other."""
    _checks.choice("method", arguments["method"], METHODS)
    _checks.choice("layout", arguments["layout"], _checks.LAYOUTS)
    if arguments["layout"] != "contiguous":
        raise NotImplementedError(
            f"layout must be 'contiguous' for linear attention, got {arguments['layout']!r}: its "
            "work is equal on all ranks already, and a state is passed on in the order of the "
            "sequence; reorder arrays with burst_attention.from_layout"
        )
    _checks.flag("return_state", arguments["return_state"])
    if not _checks.flag("is_causal", arguments["is_causal"]):
        for name in ("decay", "log_decay", "segment_ids"):
            if arguments[name] is not None:
                raise ValueError(
                    f"{name} must be None with is_causal=False, where every token sees all others "
                    "alike: there is no order for a state to decay or end in. Padding adds nothing "
                    "where key is 0"
                )


def log_decays(decay: Any, log_decay: Any, shape: tuple[int, ...], words: str) -> jax.Array:
    """ln λ of each token and head, float32, of a shape whose last dimension are heads."""
    if decay is not None and log_decay is not None:
        raise ValueError("decay and log_decay must not both be given: one is the other's logarithm")
    if log_decay is not None:
        return _float32("log_decay", log_decay, shape, f"{words}, as query's")
    if decay is None:
        return jnp.zeros(shape, jnp.float32)
    given, decay = decay, _float32("decay", decay, shape[-1:], "[heads], one for each query head")
    _in_range(given)
    # The logarithm's own derivative at 0 is not finite, but no token passes a decay of 0.
    ends = decay == 0
    logs = jnp.where(ends, -jnp.inf, jnp.log(jnp.where(ends, 1, decay)))
    return jnp.broadcast_to(logs, shape)


def _in_range(decay: Any) -> None:
    """Raises for decays that are known while tracing and not in [0, 1]."""
    if isinstance(decay, jax.core.Tracer) or not getattr(decay, "is_fully_addressable", True):
        return
    values = np.asarray(decay)
    wrong = np.flatnonzero(~((values >= 0) & (values <= 1)))
    if wrong.size:
        head = int(wrong[0])
        raise ValueError(
            f"decay must be from 0 to 1 in every head, got {values[head]} in head {head}; it is "
            "the factor itself: logarithms belong into log_decay, and a learned decay is kept "
            "in range by jax.nn.sigmoid"
        )


def segments(ids: Any, query: jax.Array) -> jax.Array | None:
    """int32 ``[batch, seq]``."""
    if ids is None:
        return None
    if not hasattr(ids, "dtype") or ids.dtype != jnp.int32:
        raise TypeError(
            f"segment_ids must be an int32 array, got {_checks.describe(ids)}; cast with "
            "astype(jnp.int32)"
        )
    if ids.shape != query.shape[:2]:
        raise ValueError(
            f"segment_ids must have shape [batch, seq] = {query.shape[:2]}, got {ids.shape}"
        )
    return jnp.asarray(ids)


def state(value: Any, query: jax.Array, values: jax.Array) -> jax.Array:
    """float32 ``[batch, heads, k_dim, v_dim]``; zeros for none."""
    batch, _, heads, k_dim = query.shape
    shape = (batch, heads, k_dim, values.shape[3])
    if value is None:
        return jnp.zeros(shape, jnp.float32)
    return _float32("the state", value, shape, "[batch, heads, k_dim, v_dim]")


def _float32(name: str, x: Any, shape: tuple[int, ...], words: str) -> jax.Array:
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise TypeError(
            f"{name} must be an array, got {_checks.describe(x)}; give each its own, float32 of "
            f"shape {words}: {tuple(shape)}, such as jnp.full({tuple(shape)}, x, jnp.float32)"
        )
    if x.dtype != jnp.float32:
        raise TypeError(
            f"{name} must be float32, got {x.dtype}: a decay over many tokens needs its digits"
        )
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {words}: {tuple(shape)}, got {tuple(x.shape)}")
    return jnp.asarray(x)
