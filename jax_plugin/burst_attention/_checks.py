"""Every check of arguments, and the words of every error.

Messages say what was expected, what came and, where there is one, the way out.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from burst_attention._types import Backward, BackwardOrder, Layout, Schedule

AnyMesh: TypeAlias = jax.sharding.Mesh | jax.sharding.AbstractMesh
PLATFORMS = ("cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float16")
MAX_HEAD_DIM = 256
MAX_FLOAT32 = float(np.finfo(np.float32).max)
LAYOUTS: tuple[str, ...] = get_args(Layout)
BACKWARDS: tuple[str, ...] = get_args(Backward)
BACKWARD_ORDERS: tuple[str, ...] = get_args(BackwardOrder)
SCHEDULES: tuple[str, ...] = get_args(Schedule)

REFUSED = {
    "bias": "the whole bias is a sequence × sequence array; alibi_slopes covers linear biases",
    "mask": "the whole mask is a sequence × sequence array; is_causal, local_window_size and "
    "segment_ids cover causal, windowed, packed and padded sequences",
    "query_seq_lengths": "give padding the segment id −1 (segment_ids), as "
    "burst_attention.pad_sequence does",
    "key_value_seq_lengths": "give padding the segment id −1 (segment_ids), as "
    "burst_attention.pad_sequence does",
}
PAD = "burst_attention.pad_sequence pads any length, with segment_ids that mask the padding"
"""The way out of lengths that a layout can't cut."""


def refused_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises for arguments of ``jax.nn.dot_product_attention`` that a ring can't honour."""
    for name, instead in REFUSED.items():
        if arguments.get(name) is not None:
            raise NotImplementedError(
                f"{name} of jax.nn.dot_product_attention is not supported over a sharded "
                f"sequence: {instead}"
            )


def known_options(caller: str, options: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises, as Python would, for keyword arguments that a function does not take."""
    for name in options:
        if name not in known:
            raise TypeError(
                f"{caller}() got an unexpected keyword argument {name!r}; it takes those of "
                f"burst_attention.attention: {', '.join(known)}"
            )


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raises unless ``value`` is one of ``allowed``."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {listed(allowed)}, got {value!r}")


def schedule(value: Any, axes: tuple[str, ...]) -> str:
    """The library's name of a schedule over such axes."""
    choice("schedule", value, SCHEDULES)
    if value == "hybrid" and len(axes) == 1:
        raise ValueError(
            "schedule='hybrid' needs a pair axis_name=(outer, inner): heads are dealt along the "
            f"inner axis, and rings go along the outer one, got {axes[0]!r}; over one axis use "
            "'ulysses' or 'ring'"
        )
    if value in ("auto", "ring"):
        return "ring" if len(axes) == 1 else "double_ring"
    return str(value)


def dealt_heads(schedule: str, heads: int, ranks: int) -> None:
    """Raises unless each of so many ranks can get equally many query heads."""
    if heads % ranks:
        where = "the ring" if schedule == "ulysses" else "the inner axis"
        fewer = ", 'hybrid' deals to the inner of two axes only" if schedule == "ulysses" else ""
        raise ValueError(
            f"schedule={schedule!r} deals query heads to the {ranks} ranks of {where}, so on each "
            f"device they must be a multiple of {ranks}, got {heads}; schedule='ring' takes any "
            f"number of heads{fewer}"
        )


def flag(name: str, value: Any) -> bool:
    """A static bool."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False while tracing, got {describe(value)}")
    return bool(value)


def keeps_float32(residual_dtype: Any, implementation: str | None) -> bool:
    """Whether ``residual_dtype`` asks for out in float32."""
    if residual_dtype is None:
        return False
    if not isinstance(residual_dtype, str | type | np.dtype):
        raise TypeError(
            "residual_dtype must be 'float32' or None, the dtype of query, got "
            f"{describe(residual_dtype)}"
        )
    if residual_dtype not in ("float32", np.float32, jnp.float32):
        raise ValueError(
            f"residual_dtype must be 'float32' or None, the dtype of query, got {residual_dtype!r}"
        )
    if implementation == "cuda":
        raise NotImplementedError(
            "residual_dtype='float32' needs CPU devices or implementation='xla': the kernels for "
            "NVIDIA GPUs round out to query's dtype before they store it"
        )
    return True


def softmax_scale(scale: Any, head_dim: int) -> float:
    """The factor on q·k: ``scale``, by default head_dim^-0.5."""
    if scale is None:
        return float(head_dim**-0.5)
    scale = static_number("scale", scale, "; multiply query by a traced factor instead")
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    if abs(scale) > MAX_FLOAT32:
        raise _beyond_float32("scale", f"{scale:g}")
    return scale


def static_number(name: str, value: Any, instead: str = "") -> float:
    """A Python number."""
    is_scalar = isinstance(value, numbers.Real | np.generic)
    if not is_scalar or isinstance(value, bool | np.bool_):
        raise TypeError(
            f"{name} must be a Python number, since it is compiled into the program, "
            f"got {describe(value)}{instead}"
        )
    try:
        return float(value)
    except OverflowError:
        kind = type(value).__name__
        raise _beyond_float32(name, f"a number of type {kind} beyond that of float64") from None


def _beyond_float32(name: str, got: str) -> ValueError:
    most = f"{MAX_FLOAT32:.3g}"
    return ValueError(
        f"{name} must be within the range of float32, from -{most} to {most}, got {got}"
    )


def integer(name: str, value: Any) -> int:
    """An int of Python, of any type that counts as an index."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {describe(value)}") from None


def arrays(query: Any, key: Any, value: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The three inputs as arrays, with their ranks, dtypes and heads checked."""
    array_types(query, key, value)
    return jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)


def array_types(query: Any, key: Any, value: Any) -> None:
    """Raises for inputs, or their ``jax.ShapeDtypeStruct``, that do not go together."""
    named = {"query": query, "key": key, "value": value}
    for name, x in named.items():
        if not hasattr(x, "dtype") or not hasattr(x, "shape"):
            raise TypeError(f"{name} must be an array, got {type(x).__name__}")
        if str(x.dtype) not in DTYPES:
            raise TypeError(
                f"{name} must be {listed(DTYPES, quote=False)}, got {x.dtype}{_cast(x)}"
            )
        if len(x.shape) != 4:
            raise ValueError(
                f"{name} must have 4 dimensions [batch, seq, heads, head_dim], got shape "
                f"{tuple(x.shape)}{_rank_hint(x)}"
            )
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(
            f"query, key and value must have one dtype, got {query.dtype}, {key.dtype} and "
            f"{value.dtype}; cast them to the one to compute with"
        )
    _shapes(tuple(query.shape), tuple(key.shape), tuple(value.shape))


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
    if heads == 0 or kv_heads == 0:
        raise ValueError(f"heads must be at least 1, got {heads} of query and {kv_heads} of key")
    if heads % kv_heads:
        raise ValueError(
            f"query heads must be a multiple of key/value heads (query head h uses key/value head "
            f"h // group_size), got {heads} and {kv_heads}"
        )
    _head_dim("head_dim", head_dim, f"pad query and key with zeros and pass scale={head_dim}**-0.5")
    _head_dim(
        "head_dim of value", value[3], "pad value with zeros and drop these columns of the output"
    )


def _head_dim(name: str, dim: int, instead: str) -> None:
    if dim % 8 or not 8 <= dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"{name} must be a multiple of 8 from 8 to {MAX_HEAD_DIM}, got {dim}"
            f"{f'; {instead}' if 0 < dim < MAX_HEAD_DIM else ''}"
        )


def shard_length(array: str, length: int, layout: str) -> None:
    """Raises for a shard that ``layout`` can't cut."""
    if layout == "zigzag" and length % 2:
        raise ValueError(
            f"tokens per device must be even in layout 'zigzag' (a shard is two chunks), got "
            f"{length} of {array}; use layout 'striped' or a sequence divisible by twice the "
            f"ring's size: {PAD}"
        )


def dimension(axis: int, count: int) -> int:
    """A dimension of ``count``, from 0."""
    axis = integer("axis", axis)
    if not -count <= axis < count:
        raise ValueError(f"axis must be one of the {count} dimensions of x, got {axis}")
    return axis % count


def ring_axes(name: Any) -> tuple[str, ...]:
    """The mesh axis of a ring, or the two of a double ring, the outer one first."""
    axes = (name,) if isinstance(name, str) else name
    if not isinstance(axes, tuple | list) or not all(isinstance(axis, str) for axis in axes):
        raise TypeError(
            "axis_name must be the name of a mesh axis, or a pair (outer, inner) of names, got "
            f"{describe(name)}"
        )
    if len(axes) not in (1, 2) or len(set(axes)) < len(axes):
        raise ValueError(
            f"axis_name must be one mesh axis or two different ones, (outer, inner), got {name!r}; "
            "reshape the mesh so that at most two hold the sequence"
        )
    return tuple(axes)


def ring_mesh(
    axes: tuple[str, ...],
    caller: str = "attention",
    globally: str = "on global arrays use burst_attention.dot_product_attention",
) -> jax.sharding.AbstractMesh:
    """The mesh of the surrounding ``shard_map``, in which a ring along ``axes`` can run."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = mesh.manual_axes
    if not manual:
        raise ValueError(
            f"{caller} must be called inside jax.shard_map, which gives axis_name={named(axes)!r} "
            f"its devices (a vmap axis has none); {globally}"
        )
    if any(name not in manual for name in axes):
        raise ValueError(
            f"axis_name must be an axis of the surrounding jax.shard_map, one of "
            f"{listed(manual)}, got {named(axes)!r}"
        )
    return mesh


def named(axes: tuple[str, ...]) -> str | tuple[str, ...]:
    """``axis_name`` as users write it."""
    return axes[0] if len(axes) == 1 else axes


def all_axes_manual(
    mesh: jax.sharding.AbstractMesh,
    globally: str = ", or call burst_attention.dot_product_attention on global arrays",
) -> None:
    """Raises where the surrounding ``shard_map`` leaves axes to the compiler."""
    left = [name for name in mesh.axis_names if name not in mesh.manual_axes]
    left = [name for name in left if mesh.shape[name] > 1]
    if left:
        raise ValueError(
            f"every mesh axis must be manual in the surrounding jax.shard_map, but {listed(left)} "
            f"{'is' if len(left) == 1 else 'are'} not: the compiler would gather batch and heads "
            "along them. Leave out axis_names of shard_map and name these axes in in_specs and "
            f"out_specs{globally}"
        )


def devices(mesh: AnyMesh, dtype: Any) -> str | None:
    """Returns the platform of a mesh for linear attention, ``cpu`` or ``cuda``.

    Returns None where an abstract mesh does not tell. Raises for devices or a dtype without calls.
    """
    found = platform(mesh)
    if found not in (None, *PLATFORMS):
        raise NotImplementedError(
            f"linear attention runs on CPU devices and NVIDIA GPUs, got a mesh of {found} devices; "
            "make the mesh of jax.devices('cpu') or jax.devices('cuda')"
        )
    if found == "cuda" and dtype == jnp.float32:
        raise NotImplementedError(
            "on NVIDIA GPUs query, key and value must be bfloat16 or float16, got float32, for "
            "which there is no kernel yet; cast them with x.astype(jnp.bfloat16) (accumulation is "
            "float32 all the same), or use a mesh of jax.devices('cpu')"
        )
    return found


def platform(mesh: AnyMesh) -> str | None:
    """Returns ``cpu``, ``cuda``, ``rocm``, ``tpu`` …; None where an abstract mesh does not tell."""
    abstract = mesh.abstract_mesh if isinstance(mesh, jax.sharding.Mesh) else mesh
    device = abstract.abstract_device
    if device is None:
        return None
    if device.platform != "gpu":
        return str(device.platform)
    # JAX calls the GPUs of all vendors "gpu".
    return "rocm" if device.device_kind.startswith(("AMD", "gfx")) else "cuda"


def listed(values: Any, quote: bool = True) -> str:
    """``'a', 'b' or 'c'``."""
    words = [repr(value) if quote else str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def describe(value: Any) -> str:
    """What came, for an error."""
    if isinstance(value, jax.core.Tracer):
        return f"a traced array {jax.typeof(value)}"
    return f"{value!r} ({type(value).__name__})"


def _cast(x: Any) -> str:
    if str(x.dtype) == "float64":
        return "; cast to float32 (accumulation is float32 and does not lose with length)"
    if isinstance(x.dtype, np.dtype) and not x.dtype.isnative:
        return "; its bytes are in the other order: use x.astype(x.dtype.newbyteorder('='))"
    return ""


def _rank_hint(x: Any) -> str:
    return "; add a batch dimension with x[None]" if len(x.shape) == 3 else ""
