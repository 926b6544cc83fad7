"""Checks of the arguments of recurrences: linear attention and the delta rule."""

import numbers
from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from burst_attention import _checks, _confirmed, _mesh
from burst_attention._attention.arguments import cast
from burst_attention._confirmed import Family
from burst_attention._types import LAYOUTS, AnyMesh

Method: TypeAlias = Literal["auto", "ring", "all_gather", "in_turn"]
"""How the states of linear attention travel."""
METHODS: tuple[Method, ...] = get_args(Method)
ReturnState: TypeAlias = bool | Literal["replicated"]
"""Whether a call returns the last state, and whether JAX types it as the same on all ranks."""
PLATFORMS = ("cpu", "cuda")
"""The platforms of the library. Plain JAX computes on all others."""


class Settings(NamedTuple):
    """The arguments of a call that are no arrays, checked."""

    caller: str
    """The function that users call."""
    scale: float
    is_causal: bool
    return_state: ReturnState
    method: Method


class Inputs(NamedTuple):
    """The arrays of a call, checked: of one device, or global ones."""

    query: Float[Array, "batch seq q_heads k_dim"]
    key: Float[Array, "batch seq k_heads k_dim"]
    value: Float[Array, "batch seq v_heads v_dim"]
    decay: Float32[Array, " heads"] | None
    log_decay: Float32[Array, "batch seq heads"] | Float32[Array, "batch seq heads k_dim"] | None
    beta: Float32[Array, "batch seq heads"] | None
    segment_ids: Int32[Array, "batch seq"] | None
    initial_state: Float32[Array, "batch heads k_dim v_dim"] | None


def settings(caller: str, given: Mapping[str, object], return_state: ReturnState) -> Settings:
    """Returns the arguments of a call that are no arrays, checked."""
    layout(caller, given["layout"])
    in_order = _checks.flag("is_causal", given.get("is_causal", True))
    if not in_order:
        names = ("decay", "log_decay", "segment_ids")
        without_order(**{name: given.get(name) for name in names})
    method = _checks.choice("method", given["method"], METHODS)
    return Settings(caller, scale(given["scale"]), in_order, return_state, method)


def inputs(qkv: tuple[jax.Array, jax.Array, jax.Array], given: Mapping[str, object]) -> Inputs:
    """Returns the arrays of a call, of which q, k and v are checked already."""
    q, _, v = qkv
    shape, before = (*q.shape[:2], heads_of(q, v)), given["initial_state"]
    decay = given.get("decay"), given["log_decay"]
    return Inputs(
        *qkv,
        *decays(*decay, (*shape, q.shape[3]), ("batch", "seq", "heads", "k_dim")),
        betas(given.get("beta"), shape, "[batch, seq, heads]"),
        segments(given["segment_ids"], shape[:2]),
        None if before is None else state("initial_state", before, q, v),
    )


def arrays(query: object, key: object, value: object) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the three inputs as arrays of one sequence, whose heads and columns go together."""
    q, k, v = map(_checks.as_array, _checks.activations(query, key, value))
    for dimension, words in enumerate(
        ("batch size", "length, since a state goes from token to token")
    ):
        sizes = [x.shape[dimension] for x in (q, k, v)]
        if len(set(sizes)) > 1:
            raise ValueError(
                f"query, key and value must have one {words}, got {', '.join(map(str, sizes))}"
            )
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"query and key must have one k_dim, got {q.shape[3]} and {k.shape[3]}")
    for name, dim in (("k_dim", k.shape[3]), ("v_dim", v.shape[3])):
        if dim % 8 or not 8 <= dim <= _checks.MAX_HEAD_DIM:
            raise ValueError(
                f"{name} must be a multiple of 8 from 8 to {_checks.MAX_HEAD_DIM}, got {dim}; pad "
                "with zeros, which add nothing to a state"
            )
    heads, counts = heads_of(q, v), [x.shape[2] for x in (q, k, v)]
    if not all(count and heads % count == 0 for count in counts):
        raise ValueError(
            "the heads of query, key and value must each divide the heads of the result, the "
            "number of query or value, whichever has more (head h of the result uses head "
            f"h // (heads / own heads) of each), got {', '.join(map(str, counts))}"
        )
    return q, k, v


def heads_of(query: jax.Array, value: jax.Array) -> int:
    """Returns the number of heads of the result, of decays and of states."""
    return max(query.shape[2], value.shape[2])


def scale(value: object) -> float:
    """Returns the factor on query."""
    if value is None:
        return 1.0
    factor = _checks.static_number("scale", value, "; multiply query by a traced factor instead")
    if not abs(factor) <= _checks.MAX_FLOAT32:
        raise _checks.beyond_float32("scale", f"{factor:g}")
    return factor


def return_state(value: object) -> ReturnState:
    """Returns whether and how a call returns the last state."""
    if not isinstance(value, str):
        return _checks.flag("return_state", value)
    if value != "replicated":
        raise ValueError(f"return_state must be True, False or 'replicated', got {value!r}")
    return "replicated"


def no_placement(caller: str, **arguments: object) -> None:
    """Raises for arguments that belong to global arrays."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(
                f"{name} belongs to global arrays, but {caller} is called inside "
                "jax.shard_map, where arrays are shards; leave it out there"
            )


def layout(caller: str, value: object) -> None:
    """Raises unless the layout is contiguous."""
    if _checks.choice("layout", value, LAYOUTS) != "contiguous":
        raise NotImplementedError(
            f"layout must be 'contiguous' for {caller}, got {value!r}: its "
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


def platform(mesh: AnyMesh, dtype: np.dtype, family: Family) -> str | None:
    """Returns the platform of a mesh, ``cpu`` or ``cuda``; ``xla`` where plain JAX computes.

    Returns None where an abstract mesh does not tell. Raises for a dtype without kernels.
    """
    found = _mesh.platform(mesh)
    if found == "cuda" and dtype == jnp.float32:
        raise NotImplementedError(
            "on NVIDIA GPUs query, key and value must be bfloat16 or float16, got float32, for "
            "which there is no kernel yet; cast them with x.astype(jnp.bfloat16) (accumulation is "
            "float32 all the same), or use a mesh of jax.devices('cpu')"
        )
    if found == "cuda" and _confirmed.refuted(family, found):
        return "xla"
    return found if found in (None, *PLATFORMS) else "xla"


def decays(
    decay: object, log_decay: object, shape: tuple[int, ...], words: tuple[str, ...]
) -> tuple[Float32[Array, " heads"] | None, Float32[Array, "..."] | None]:
    """Returns λ of each head, or ln λ of each token and head, or of each token, head and channel.

    ``shape`` is that of decays of channels, and ``words`` name its dimensions.
    """
    if decay is not None and log_decay is not None:
        raise ValueError("decay and log_decay must not both be given: one is the other's logarithm")
    if log_decay is not None:
        of_channels = getattr(log_decay, "ndim", None) == len(shape)
        heads, channels = (f"[{', '.join(words[:count])}]" for count in (-1, None))
        own, own_words = (shape, channels) if of_channels else (shape[:-1], heads)
        own_words = f"{own_words}, as the result's, or {heads if of_channels else channels}"
        return None, _float32("log_decay", "logarithm", log_decay, own, own_words)
    if decay is None:
        return None, None
    words_of_decay = "[heads], one for each head of the result"
    factors = _float32("decay", "factor", decay, shape[-2:-1], words_of_decay)
    _check_range(decay)
    return factors, None


def betas(value: object, shape: tuple[int, ...], words: str) -> Float32[Array, "..."] | None:
    """Returns β of each token and head, of ``shape``, which ``words`` describe."""
    return None if value is None else _float32("beta", "factor", value, shape, words)


def needed_beta(value: object) -> object:
    """Returns β of a call. Raises if it is None."""
    if value is None:
        raise TypeError(
            "beta must be an array, got None; without beta this is linear attention: call "
            "linear_attention"
        )
    return value


def logs_of(
    decay: Float32[Array, " heads"] | None,
    log_decay: Float32[Array, "..."] | None,
    shape: tuple[int, ...],
) -> Float32[Array, "..."]:
    """Returns ln λ of each token and head, of ``shape``, or of its channels too."""
    if log_decay is not None:
        return log_decay
    if decay is None:
        return jnp.zeros(shape, jnp.float32)
    # The logarithm's own derivative at 0 is not finite, but no token passes a decay of 0.
    ends = decay == 0
    logs = jnp.where(ends, -jnp.inf, jnp.log(jnp.where(ends, 1, decay)))
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
    found = cast("segment_ids", "id", ids, "int32")
    return _checks.shaped("segment_ids", found, "int32", shape, "[batch, seq]")


def state(
    name: str, value: object, query: jax.Array, values: jax.Array
) -> Float32[Array, "batch heads k_dim v_dim"]:
    """Returns a state, which an argument brings; zeros for None."""
    shape = (query.shape[0], heads_of(query, values), query.shape[3], values.shape[3])
    if value is None:
        return jnp.zeros(shape, jnp.float32)
    return _float32(name, "element", value, shape, "[batch, heads, k_dim, v_dim]")


def _float32(
    name: str, each: str, value: object, shape: tuple[int, ...], words: str
) -> Float32[Array, "..."]:
    """Returns an array of any float type in float32, of a shape, which ``words`` describe."""
    if isinstance(value, numbers.Number):
        raise TypeError(
            f"{name} must be an array, got {_checks.describe(value)}; give float32 of shape "
            f"{words}: {shape}, such as jnp.full({shape}, x, jnp.float32)"
        )
    return _checks.shaped(name, cast(name, each, value, "float32"), "float32", shape, words)
