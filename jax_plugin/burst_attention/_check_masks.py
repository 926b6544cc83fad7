"""Checks of what masks, biases and drops weights, and the words of their errors."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from burst_attention._checks import describe, listed, named, static_number

SOFT_CAPS = {"cpu": (1e-30, 1e30), "cuda": (1e-3, 1e3), "xla": (1e-30, 1e30)}
"""The smallest and the largest cap of each implementation."""
NO_LIMIT = -1
"""Of a side of a window, as the custom calls have it."""

Window: TypeAlias = tuple[int, int]
Segments: TypeAlias = tuple[jax.Array, jax.Array]


def window(size: Any, is_causal: bool, positions: int) -> Window:
    """How far a query sees back and ahead, `NO_LIMIT` where that is all of the ``positions``."""
    left, right = (NO_LIMIT, NO_LIMIT) if size is None else _window_sides(size)
    # A window that reaches over everything is none: then less is compared.
    left, right = (NO_LIMIT if side >= positions else side for side in (left, right))
    return left, 0 if is_causal else right


def _window_sides(size: Any) -> Window:
    sides = tuple(size) if isinstance(size, tuple | list) else (size, size)
    if len(sides) != 2:
        raise ValueError(
            f"local_window_size must be one number or (left, right), got {len(sides)} numbers"
        )
    try:
        left, right = (operator.index(_not_bool(side)) for side in sides)
    except TypeError:
        raise TypeError(
            "local_window_size must be an int or (left, right), Python numbers, since they are "
            f"compiled into the program, got {describe(size)}"
        ) from None
    if left < 0 or right < 0:
        raise ValueError(
            f"local_window_size must not be negative, got {size!r}: it counts positions before and "
            "after the query's own, which is always seen; for a side without a limit pass the "
            "length of the sequence, for none None"
        )
    return left, right


def _not_bool(value: Any) -> Any:
    return None if isinstance(value, bool | np.bool_) else value


def segments(value: Any, query: jax.Array, key: jax.Array) -> Segments | None:
    """Segment ids of queries and of keys, or None."""
    if value is None:
        return None
    if not isinstance(value, tuple | list):
        if query.shape[1] != key.shape[1]:
            raise ValueError(
                "segment_ids must be a pair (ids of query, ids of key) where these differ in "
                f"length, got one array for {query.shape[1]} and {key.shape[1]} tokens"
            )
        ids = _segment_ids("segment_ids", value, query)
        return ids, ids
    if len(value) != 2:
        raise ValueError(
            "segment_ids must be one array or a pair (ids of query, ids of key), got "
            f"{len(value)} arrays"
        )
    of_query = _segment_ids("segment_ids of query", value[0], query)
    return of_query, _segment_ids("segment_ids of key", value[1], key)


def _segment_ids(name: str, value: Any, like: jax.Array) -> jax.Array:
    _is_array(name, value)
    if value.dtype != jnp.int32:
        raise TypeError(f"{name} must be int32, got {value.dtype}; use x.astype(jnp.int32)")
    shape, expected = tuple(value.shape), tuple(like.shape[:2])
    if shape != expected:
        hint = "; add the batch dimension with jnp.broadcast_to" if len(shape) == 1 else ""
        raise ValueError(
            f"{name} must have shape {expected}, one id for each token, got shape {shape}{hint}"
        )
    return jnp.asarray(value)


def per_head(name: str, value: Any, heads: int, each: str) -> jax.Array | None:
    """One float32 number for each head of query as an array, or None."""
    if value is None:
        return None
    _is_array(name, value)
    if value.dtype != jnp.float32:
        raise TypeError(f"{name} must be float32, got {value.dtype}; use x.astype(jnp.float32)")
    shape = tuple(value.shape)
    if shape != (heads,):
        whole = len(shape) == 1 and shape[0] > heads and shape[0] % heads == 0
        hint = f"; where heads are sharded, each device takes the {each}s of its own"
        raise ValueError(
            f"{name} must have shape {(heads,)}, one {each} for each head of query, got shape "
            f"{shape}{hint if whole else ''}"
        )
    return jnp.asarray(value)


def soft_cap(cap: Any, implementation: str | None) -> float:
    """Returns the cap of the scores, 0.0 for none."""
    if cap is None:
        return 0.0
    cap = static_number("logits_soft_cap", cap)
    least, most = SOFT_CAPS[implementation or "cpu"]
    if not least <= cap <= most:
        on_gpus = implementation == "cuda"
        where = "on NVIDIA GPUs " if on_gpus else ""
        instead = "; implementation='xla' takes others" if on_gpus else ""
        raise ValueError(
            f"logits_soft_cap must be {where}from {least:g} to {most:g}, or None for no cap, "
            f"got {cap:g}{instead}"
        )
    return cap


def dropout_rate(rate: Any) -> float:
    """The probability that a weight is dropped, in float32, as the custom calls get it."""
    rate = static_number("dropout_rate", rate, "; for none pass 0.0")
    kept = float(np.float32(rate))
    if not 0 <= kept < 1 or math.isnan(kept):
        raise ValueError(f"dropout_rate must be at least 0 and below 1, got {rate:g}")
    return kept


def dropout_words(key: Any, rate: float) -> jax.Array | None:
    """uint32 ``[2]``: first and last word of the key's data; None where nothing is dropped."""
    if not rate:
        return None
    if key is None:
        raise ValueError(
            f"dropout_rate={rate:g} needs dropout_key, a key such as jax.random.key(0), another "
            "one for every step and layer"
        )
    _is_array("dropout_key", key)
    shape = tuple(key.shape)
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if shape:
            raise ValueError(f"dropout_key must be one key, got an array of keys of shape {shape}")
        words = jax.random.key_data(key).reshape(-1)
        return words[jnp.array([0, words.size - 1])]
    if key.dtype != jnp.uint32 or shape != (2,):
        raise TypeError(
            "dropout_key must be a key of jax.random, or its data uint32 of shape (2,), got "
            f"{key.dtype} of shape {shape}"
        )
    return jnp.asarray(key)


def _is_array(name: str, value: Any) -> None:
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        raise TypeError(f"{name} must be an array, got {type(value).__name__}")


def offset_axes(
    name: str, value: Any, mesh: jax.sharding.AbstractMesh, ring_axes: tuple[str, ...]
) -> tuple[str, ...]:
    """Mesh axes that shard the batch or the heads, the major one first."""
    names = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(names, tuple | list) or not all(isinstance(x, str) for x in names):
        raise TypeError(
            f"{name} must be the name of a mesh axis or a tuple of names, got {describe(value)}"
        )
    if set(names) & set(ring_axes):
        raise ValueError(
            f"{name} must not name the axis that shards the sequence, "
            f"axis_name={named(ring_axes)!r}, got {value!r}"
        )
    unknown = [x for x in names if x not in mesh.manual_axes]
    if unknown:
        raise ValueError(
            f"{name} must name axes of the surrounding jax.shard_map, of "
            f"{listed(mesh.manual_axes)}, got {unknown[0]!r}"
        )
    return tuple(names)


def axes_are_known(options: Mapping[str, Any]) -> None:
    """Raises for arguments of `attention` that a placement says."""
    for name in ("batch_axis", "head_axis"):
        if options.get(name) is not None:
            raise TypeError(
                f"{name} is known from spec or the arrays' types in dot_product_attention, got "
                f"{describe(options[name])}; leave it out"
            )


def same_on_the_ring(name: str, varying: frozenset[str], axes: tuple[str, ...]) -> None:
    """Raises for an input that is typed as different on the devices of a ring."""
    if varying.intersection(axes):
        raise ValueError(
            f"{name} must be the same on all devices of a ring, but varies over {named(axes)!r}, "
            "axis_name; drop what makes it differ, such as fold_in(key, axis_index)"
        )
