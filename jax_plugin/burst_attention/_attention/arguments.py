"""Arrays as models and ``jax.nn.dot_product_attention`` have them, in the form of the features."""

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from burst_attention._attention.options import AnyArray
from burst_attention._checks import MAX_INT32, array_type, describe
from burst_attention._padding import PADDING
from burst_attention._types import ArrayType

Value = TypeVar("Value")

KINDS = {"int32": (jnp.integer, "an integer type"), "float32": (jnp.floating, "a float type")}
"""For each dtype the dtypes that are cast to it, and their name in errors."""
INSTEAD = (
    "is_causal, local_window_size and segment_ids cover causal, windowed and packed sequences, and "
    "visible=(start, stop) every mask in which an interval of query positions sees each key"
)
"""The way out of masks that are no padding."""


def cast(title: str, each: str, value: object, dtype: str) -> ArrayType:
    """Returns an array of ``dtype``, cast from any other dtype of its kind.

    Of wide ids the lowest 31 bits count, and every negative id becomes −1. Lengths and intervals
    beyond int32 end where int32 does. Positions beyond int32 are errors, where values are known.
    """
    x = array_type(title, value)
    if x.dtype == dtype or dtype not in KINDS:
        return x
    kind, words = KINDS[dtype]
    if not jnp.issubdtype(x.dtype, kind):
        raise TypeError(f"{title} must have {words}, which is cast to {dtype}, got {x.dtype}")
    x = _array(x)
    module = np if isinstance(x, np.ndarray) else jnp
    if x.dtype.itemsize >= 4 and each == "id":
        return module.where(x < 0, np.int32(PADDING), (x & MAX_INT32).astype(dtype))
    if x.dtype.itemsize >= 4 and each == "length":
        x = module.clip(x, 0, MAX_INT32)
    if x.dtype.itemsize >= 4 and each in ("interval", "position"):
        clipped = module.clip(x, 0 if x.dtype.kind == "u" else -MAX_INT32 - 1, MAX_INT32)
        if each == "position" and not isinstance(x, jax.core.Tracer) and (clipped != x).any():
            raise ValueError(f"{title} must be within int32, got {x.min()} to {x.max()}")
        x = clipped
    return x.astype(dtype)


def intervals(value: object, batch: int, kv_len: int) -> dict[str, tuple[str, ArrayType]]:
    """Returns the first and the second interval of each key, ``[batch, kv_len, 2]``, with a title.

    ``value`` is (start, stop), each ``[batch, kv_len]``, or ``[batch, kv_len, 2]`` for two
    intervals of each key.
    """
    if value is None:
        return {}
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise TypeError(f"visible must be a pair of arrays (start, stop), got {describe(value)}")
    words = ("start of visible", "stop of visible")
    start, stop = (
        _array(cast(*x, "int32")) for x in zip(words, ["interval"] * 2, value, strict=True)
    )
    expected = (batch, kv_len)
    if start.shape != stop.shape or start.shape not in (expected, (*expected, 2)):
        raise ValueError(
            f"start and stop of visible must have shape {expected}, [batch, kv_len], or "
            f"{(*expected, 2)} for two intervals of each key, got {start.shape} and {stop.shape}"
        )
    module = np if isinstance(start, np.ndarray) and isinstance(stop, np.ndarray) else jnp
    pair = module.stack([start, stop], -1)
    each = [pair] if pair.ndim == 3 else [pair[:, :, 0], pair[:, :, 1]]
    names = ("visible", "also_visible")
    return {name: ("visible", x) for name, x in zip(names, each, strict=False)}


def mask_sides(
    mask: object, batch: int, q_len: int, kv_len: int
) -> dict[str, tuple[str, ArrayType]]:
    """Returns a mask of padding, with its title, as the feature of queries or of keys.

    Masks as ``jax.nn`` takes them are ``[batch, heads, queries, keys]``, and True lets a key pass.
    A mask without queries hides keys, a mask without keys hides queries.
    """
    if mask is None:
        return {}
    x = _array(array_type("mask", mask))
    if x.dtype != bool:
        raise TypeError(
            f"mask must be bool, True where a query may see a key, got {x.dtype}; a mask that is "
            "added to scores is a bias"
        )
    if x.ndim > 4:
        raise ValueError(f"mask must have at most 4 dimensions, got shape {tuple(x.shape)}")
    x = x[(None,) * (4 - x.ndim)]
    of_batch, of_heads, queries, keys = x.shape
    if of_heads != 1 or 1 not in (queries, keys):
        raise NotImplementedError(
            "mask of jax.nn.dot_product_attention is supported over a sharded sequence where it "
            "marks padding of keys, [batch, 1, 1, kv_len], or of queries, [batch, 1, q_len, 1], "
            f"got shape {tuple(x.shape)}: {beyond_padding(queries, keys)}; {INSTEAD}"
        )
    # A mask of one element belongs to the side that has one token.
    of_keys = queries == 1 and (keys != 1 or kv_len == 1)
    name, length = ("key_mask", kv_len) if of_keys else ("query_mask", q_len)
    if of_batch not in (1, batch) or (keys if of_keys else queries) != length:
        raise ValueError(
            f"mask must have shape {(batch, 1, 1, kv_len)}, padding of keys, or "
            f"{(batch, 1, q_len, 1)}, padding of queries, got shape {tuple(x.shape)}"
        )
    module = np if isinstance(x, np.ndarray) else jnp
    return {name: ("mask", module.broadcast_to(x.reshape(of_batch, length), (batch, length)))}


def beyond_padding(queries: int, keys: int) -> str:
    """Returns why a call can't take a mask that is no padding, in the words of errors."""
    if 1 in (queries, keys):
        return (
            "it is a mask for each head, and a call has one mask for all heads; call once for the "
            "heads that share a mask"
        )
    return "the whole mask is a sequence × sequence array"


def batched(value: Value, dimensions: int) -> Value:
    """Returns an array of ``dimensions`` with a batch of one, all other values as they are."""
    if hasattr(value, "__jax_array__") and not isinstance(value, AnyArray):
        return batched(jnp.asarray(value), dimensions)  # type: ignore[return-value]
    if isinstance(value, tuple | list):
        return type(value)(batched(x, dimensions) for x in value)
    if isinstance(value, jax.ShapeDtypeStruct) and value.ndim == dimensions:
        return jax.ShapeDtypeStruct((1, *value.shape), value.dtype)  # type: ignore[return-value]
    if isinstance(value, AnyArray) and value.ndim == dimensions:
        return value[None]  # type: ignore[return-value]
    return value


def _array(x: ArrayType) -> AnyArray:
    return x if isinstance(x, np.ndarray) else jnp.asarray(x)
