"""Checks of the arguments of linear attention."""

from typing import Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from burst_attention import _checks, _mesh
from burst_attention._types import LAYOUTS, AnyMesh, ArrayType

Method: TypeAlias = Literal["auto", "ring", "all_gather"]
"""How the states of linear attention travel."""
METHODS: tuple[Method, ...] = get_args(Method)
PLATFORMS = ("cpu", "cuda")
GLOBALLY = (
    "wrap the call: jax.shard_map(lambda q, k, v: burst_attention.linear_attention(q, k, v, "
    "axis_name=...), mesh=mesh, in_specs=spec, out_specs=spec), where spec names the axis in the "
    "place of seq"
)
"""What to do with global arrays."""


def arrays(query: object, key: object, value: object) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the three inputs as arrays; queries and keys belong to one sequence."""
    q, k, v = _checks.arrays(query, key, value)
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            "query and key must have one length, since a state goes from token to token, got "
            f"{q.shape[1]} and {k.shape[1]}"
        )
    return q, k, v


def layout(value: object) -> None:
    """Raises unless the layout is contiguous."""
    if _checks.choice("layout", value, LAYOUTS) != "contiguous":
        raise NotImplementedError(
            f"layout must be 'contiguous' for linear attention, got {value!r}: its "
            "work is equal on all ranks already, and a state is passed on in the order of the "
            "sequence; reorder arrays with burst_attention.from_layout"
        )


def without_order(**arguments: object) -> None:
    """Raises for arguments that need an order of tokens, which ``is_causal=False`` has not."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(
                f"{name} must be None with is_causal=False, where every token sees all tokens "
                "alike: there is no order for a state to decay or end in. Padding adds nothing "
                "where key is 0"
            )


def platform(mesh: AnyMesh, dtype: np.dtype) -> str | None:
    """Returns the platform of a mesh, ``cpu`` or ``cuda``.

    Returns None where an abstract mesh does not tell. Raises for devices or a dtype without calls.
    """
    found = _mesh.platform(mesh)
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


def log_decays(
    decay: object, log_decay: object, shape: tuple[int, ...], words: str
) -> Float32[Array, "*tokens heads"]:
    """Returns ln λ of each token and head, of ``shape``, which ``words`` describe."""
    if decay is not None and log_decay is not None:
        raise ValueError("decay and log_decay must not both be given: one is the other's logarithm")
    if log_decay is not None:
        return _float32("log_decay", log_decay, shape, f"{words}, as query's")
    if decay is None:
        return jnp.zeros(shape, jnp.float32)
    factors = _float32("decay", decay, shape[-1:], "[heads], one for each query head")
    _check_range(decay)
    # The logarithm's own derivative at 0 is not finite, but no token passes a decay of 0.
    ends = factors == 0
    logs = jnp.where(ends, -jnp.inf, jnp.log(jnp.where(ends, 1, factors)))
    return jnp.broadcast_to(logs, shape)


def _check_range(decay: object) -> None:
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


def segments(ids: object, shape: tuple[int, ...]) -> Int32[Array, "batch seq"] | None:
    """Returns segment ids of a shape."""
    if ids is None:
        return None
    return _checks.shaped("segment_ids", ids, "int32", shape, "[batch, seq]")


def state(
    value: object, query: jax.Array, values: jax.Array
) -> Float32[Array, "batch heads k_dim v_dim"]:
    """Returns a state; zeros for None."""
    batch, _, heads, k_dim = query.shape
    shape = (batch, heads, k_dim, values.shape[3])
    if value is None:
        return jnp.zeros(shape, jnp.float32)
    return _float32("the state", value, shape, "[batch, heads, k_dim, v_dim]")


def _float32(name: str, value: object, shape: tuple[int, ...], words: str) -> Float32[Array, "..."]:
    """Returns an array in float32 of a shape, which ``words`` describe."""
    if not isinstance(value, ArrayType):
        raise TypeError(
            f"{name} must be an array, got {_checks.describe(value)}; give float32 of shape "
            f"{words}: {shape}, such as jnp.full({shape}, x, jnp.float32)"
        )
    return _checks.shaped(name, value, "float32", shape, words)
