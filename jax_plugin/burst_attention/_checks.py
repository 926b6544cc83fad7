"""Checks of arguments, and the words of their errors.

A message says what was expected, what came and, where there is one, the way out.
"""

import numbers
import operator
import reprlib
from collections.abc import Buffer, Callable, Iterable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from burst_attention._types import ArrayType, Layout

Name = TypeVar("Name", bound=str)

DTYPES = ("float32", "bfloat16", "float16")
MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8
"""What divides the head dimensions that kernels compute."""
MAX_FLOAT32 = float(np.finfo(np.float32).max)
MAX_INT32 = 2**31 - 1

PAD = "burst_attention.pad_sequence pads any length, with segment_ids that mask the padding"
"""The way out of lengths that a layout can't cut."""


def no_bias(value: object) -> None:
    """Raises for a bias, which a ring can't honour."""
    if value is not None:
        raise NotImplementedError(
            "bias of jax.nn.dot_product_attention is not supported over a sharded sequence: the "
            "whole bias is a sequence × sequence array; alibi_slopes covers linear biases"
        )


def choice(name: str, value: object, allowed: tuple[Name, ...]) -> Name:
    """Returns ``value``, one of ``allowed``."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {listed(allowed)}, got {shown(value)}")
    return allowed[allowed.index(value)]


def flag(name: str, value: object) -> bool:
    """Returns a static bool."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False while tracing, got {describe(value)}")
    return bool(value)


def static_number(name: str, value: object, instead: str = "") -> float:
    """Returns a Python number."""
    is_bool = isinstance(value, bool | np.bool_)
    if is_bool or not isinstance(value, numbers.Real | np.generic):
        raise TypeError(
            f"{name} must be a Python number, since it is compiled into the program, "
            f"got {describe(value)}{instead}"
        )
    try:
        return float(value)
    except OverflowError:
        kind = type(value).__name__
        raise beyond_float32(name, f"a number of type {kind} beyond that of float64") from None


def beyond_float32(name: str, got: str) -> ValueError:
    """Returns the error for a number that float32 can't hold."""
    most = f"{MAX_FLOAT32:.3g}"
    return ValueError(
        f"{name} must be within the range of float32, from -{most} to {most}, got {got}"
    )


def beyond_int32(name: str, value: object) -> ValueError:
    """Returns the error for numbers of Python that int32 can't hold."""
    return ValueError(f"{name} must be within int32, got {describe(value)}")


def integer(name: str, value: object) -> int:
    """Returns an integer of any type as an int of Python."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an int, got {describe(value)}") from None


def at_least_1(name: str, value: object) -> int:
    """Returns a positive integer of any type as an int of Python."""
    found = integer(name, value)
    if found < 1:
        raise ValueError(f"{name} must be at least 1, got {found}")
    return found


def size(name: str, value: object) -> int:
    """Returns a positive integer within int32, as an int of Python."""
    found = at_least_1(name, value)
    if found > MAX_INT32:
        raise beyond_int32(name, found)
    return found


def index(value: object) -> int | None:
    """Returns an integer of any type as an int of Python, None for bools and for other values."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def array_type(name: str, value: object) -> ArrayType:
    """Returns ``value``, an array or the type of one; of other values what ``jnp.asarray`` makes.

    Numbers of Python are no arrays here: every array argument has dimensions.
    """
    if isinstance(value, ArrayType):
        return value
    if not isinstance(value, numbers.Number | str | None):
        is_in_host = isinstance(value, Buffer) or hasattr(value, "__array__")
        is_in_host &= not hasattr(value, "__jax_array__")
        try:
            return as_array(np.asarray(value)) if is_in_host else jnp.asarray(value)
        except OverflowError:
            raise beyond_int32(name, value) from None
        except (TypeError, ValueError):
            pass
    raise TypeError(f"{name} must be an array, got {type(value).__name__}")


def shaped(
    title: str,
    value: object,
    dtype: str,
    shape: tuple[int, ...],
    words: str,
    hint: Callable[[tuple[int, ...]], str] = lambda _: "",
) -> jax.Array:
    """Returns an array of a dtype and a shape, which ``words`` describe.

    ``hint`` returns the way out of another shape.
    """
    x = array_type(title, value)
    if x.dtype != dtype:
        raise TypeError(f"{title} must be {dtype}, got {x.dtype}; use x.astype(jnp.{dtype})")
    found = tuple(x.shape)
    if found != shape:
        raise ValueError(
            f"{title} must have shape {shape}, {words}, got shape {found}{hint(found)}"
        )
    return as_array(x)


def as_array(x: ArrayType) -> jax.Array:
    """Returns an array of JAX, which does not change with an array of numpy.

    JAX may read the memory of an array of numpy after the call, when its caller has changed it, and
    even ``jnp.array`` does so. So JAX gets a copy. Of an array of JAX ``jnp.asarray`` would add an
    operation to derivatives, also where there is nothing to convert.
    """
    if isinstance(x, jax.Array):
        return x
    return jnp.asarray(x.copy() if isinstance(x, np.ndarray) else x)


def arrays(
    query: object, key: object, value: object, *, any_head_dim: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the three inputs as arrays of one dtype whose shapes go together.

    ``any_head_dim`` takes head dimensions that are no multiple of 8.
    """
    q, k, v = array_types(query, key, value, any_head_dim=any_head_dim)
    return as_array(q), as_array(k), as_array(v)


def array_types(
    query: object, key: object, value: object, *, any_head_dim: bool = False
) -> tuple[ArrayType, ArrayType, ArrayType]:
    """Returns the three inputs, arrays or their types, of one dtype and shapes that go together."""
    q, k, v = activations(query, key, value)
    _shapes(tuple(q.shape), tuple(k.shape), tuple(v.shape))
    head_dim("head_dim", q.shape[3], any_head_dim)
    head_dim("head_dim of value", v.shape[3], any_head_dim)
    return q, k, v


def activations(
    query: object, key: object, value: object
) -> tuple[ArrayType, ArrayType, ArrayType]:
    """Returns the three inputs, arrays or their types, of one dtype and four dimensions."""
    named = (("query", query), ("key", key), ("value", value))
    q, k, v = (activation(name, x, "[batch, seq, heads, head_dim]") for name, x in named)
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"query, key and value must have one dtype, got {q.dtype}, {k.dtype} and "
            f"{v.dtype}; cast them to the one to compute with"
        )
    return q, k, v


def activation(name: str, value: object, words: str) -> ArrayType:
    """Returns an array, or its type, of a float dtype and four dimensions, which ``words`` name."""
    x = array_type(name, value)
    if str(x.dtype) not in DTYPES:
        raise TypeError(
            f"{name} must be {listed(DTYPES, quote=False)}, got {x.dtype}{_cast(x.dtype)}"
        )
    if len(x.shape) != 4:
        hint = "; add a batch dimension with x[None]" if len(x.shape) == 3 else ""
        raise ValueError(f"{name} must have 4 dimensions {words}, got shape {tuple(x.shape)}{hint}")
    return x


def _shapes(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> None:
    if key[:3] != value[:3]:
        raise ValueError(
            f"key and value must have one shape but for their last dimension, got {key} and {value}"
        )
    (batch, _, heads, head_dim), (kv_batch, _, kv_heads, kv_dim) = query, key
    if batch != kv_batch:
        raise ValueError(f"query and key must have one batch size, got {batch} and {kv_batch}")
    if head_dim != kv_dim:
        raise ValueError(f"query and key must have one head_dim, got {head_dim} and {kv_dim}")
    grouped_heads(heads, kv_heads)


def grouped_heads(heads: int, kv_heads: int) -> None:
    """Raises unless each key/value head serves equally many query heads."""
    if heads == 0 or kv_heads == 0:
        raise ValueError(f"heads must be at least 1, got {heads} of query and {kv_heads} of key")
    if heads % kv_heads:
        raise ValueError(
            f"query heads must be a multiple of key/value heads (query head h uses key/value head "
            f"h // group_size), got {heads} and {kv_heads}; give each query head a key and "
            "a value of its own with x[:, :, index], an index for each query head"
        )


def head_dim(name: str, dim: int, any_head_dim: bool = False, most: int = MAX_HEAD_DIM) -> None:
    """Raises for a head dimension that nothing computes."""
    if not 1 <= dim <= most or (dim % HEAD_DIM_MULTIPLE and not any_head_dim):
        expected = (
            "from 1"
            if any_head_dim
            else f"a multiple of {HEAD_DIM_MULTIPLE} from {HEAD_DIM_MULTIPLE}"
        )
        instead = "; pad it with zeros" if 0 < dim < most else ""
        raise ValueError(f"{name} must be {expected} to {most}, got {dim}{instead}")


def _cast(dtype: np.dtype) -> str:
    if str(dtype) == "float64":
        return "; cast to float32 (accumulation is float32 and does not lose with length)"
    if isinstance(dtype, np.dtype) and not dtype.isnative:
        return "; its bytes are in the other order: use x.astype(x.dtype.newbyteorder('='))"
    return ""


def shard_length(array: str, length: int, layout: Layout) -> None:
    """Raises for a shard that ``layout`` can't cut."""
    if layout == "zigzag" and length % 2:
        raise ValueError(
            f"tokens per device must be even in layout 'zigzag' (a shard is two chunks), got "
            f"{length} of {array}; use layout 'striped' or a sequence divisible by twice the "
            f"ring's size: {PAD}"
        )


def sequence_axis(x: object, axis: object) -> int:
    """Returns the index, counted from 0, of a dimension of a numpy or JAX array."""
    if not isinstance(x, np.ndarray | jax.Array):
        raise TypeError(f"x must be a numpy or jax array, got {type(x).__name__}")
    found = integer("axis", axis)
    if not -x.ndim <= found < x.ndim:
        raise ValueError(f"axis must be one of the {x.ndim} dimensions of x, got {found}")
    return found % x.ndim


def listed(values: Iterable[object], quote: bool = True) -> str:
    """Returns the values as ``'a', 'b' or 'c'``."""
    words = [repr(value) if quote else str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


SHORT = reprlib.Repr(maxstring=100, maxother=100)
"""Leaves out the middle of long values."""


def shown(value: object) -> str:
    """Returns a value in the words of an error, a long one without its middle."""
    return SHORT.repr(value)


def describe(value: object) -> str:
    """Returns a wrong value in the words of an error: the value and its type."""
    if isinstance(value, jax.core.Tracer):
        return f"a traced array {jax.typeof(value)}"
    return f"{shown(value)} ({type(value).__name__})"
