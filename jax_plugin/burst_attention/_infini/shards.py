"""Infini-attention of one device's tokens: the memory of segments, and what tokens find in it.

Between segments there are a few products of small matrices, which XLA computes. Segments do not
cross ranks, so the softmax attention needs no exchange.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32

from burst_attention import _mesh
from burst_attention._attention import shards
from burst_attention._attention.features import Features
from burst_attention._attention.options import Options
from burst_attention._batching import differentiable, spread
from burst_attention._checkpoint import STATE_NAME
from burst_attention._linear import states
from burst_attention._linear.shards import of_last_rank
from burst_attention._linear.states import Call, Matrix, State, Transfer
from burst_attention._mesh import vary_like, vary_together
from burst_attention._types import Axes

Update: TypeAlias = Literal["linear", "delta"]
"""How a segment changes the memory."""
FeatureMap: TypeAlias = Literal["elu"] | Callable[[jax.Array], jax.Array]
"""σ, the function of queries and keys."""
Memory: TypeAlias = tuple[
    Float32[Array, "batch kv_heads head_dim value_dim"], Float32[Array, "batch kv_heads head_dim"]
]
Sums: TypeAlias = Float32[Array, "batch segments kv_heads head_dim columns"]
Transfers: TypeAlias = Float32[Array, "batch segments kv_heads head_dim head_dim"] | None


class Settings(NamedTuple):
    """The arguments of a call that are no arrays, checked."""

    segment_size: int
    update: Update
    feature_map: FeatureMap
    options: Options
    """The options of the softmax attention."""


class Inputs(NamedTuple):
    """The arrays of a call, checked: of one device, or global ones."""

    query: Float[Array, "batch seq heads head_dim"]
    key: Float[Array, "batch seq kv_heads head_dim"]
    value: Float[Array, "batch seq kv_heads value_dim"]
    gate: Float32[Array, " heads"]
    m: Float32[Array, "batch kv_heads head_dim value_dim"]
    z: Float32[Array, "batch kv_heads head_dim"]
    local_query: Float[Array, "batch seq heads head_dim"]
    local_key: Float[Array, "batch seq kv_heads head_dim"]


def attend(
    axes: Axes,
    settings: Settings,
    inputs: Inputs,
    whole: Axes = (),
    own_heads: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> tuple[jax.Array, Memory]:
    """Returns the results for this device's tokens.

    Along the axes ``whole`` devices have different heads of queries, and all heads of keys.
    ``own_heads`` takes the heads of keys that this device's queries use, dimension 2.
    """
    inputs = spread(vary_together(axes, inputs))
    q, k, v, gate, m, z, local_q, local_k = inputs
    call = _call(axes, m)
    segment = _segment(settings.segment_size, q.shape[1], call.world_size)
    before, after = _memories(call, settings, segment, k, v, (m, z))
    found = _retrieved(settings, segment, q, *map(own_heads, before))
    # Segments are sequences of a batch, each on one device.
    query, key, value = (
        x.reshape(-1, segment, *x.shape[2:]) for x in (local_q, own_heads(local_k), own_heads(v))
    )
    out, _ = shards.attend((), settings.options, (query, key, value), Features(), False)
    weight = jax.nn.sigmoid(gate)[None, None, :, None]
    mixed = weight * found + (1 - weight) * out.reshape(found.shape).astype(jnp.float32)
    one_of_all = partial(of_last_rank, call._replace(axes=axes + whole))
    return mixed.astype(q.dtype), (one_of_all(after[0]), one_of_all(after[1]))


def _call(axes: Axes, m: State) -> Call:
    mesh = _mesh.ring_mesh(axes, "infini_attention")
    size = _mesh.axes_size(mesh, axes)
    travelling = m.size * (1 + m.shape[2] / m.shape[3])
    method = states.chosen("auto", size, round(travelling))
    return Call(axes, size, method, None, has_kernels=False, has_documents=False, scale=1.0)


def _segment(size: int, tokens: int, world_size: int) -> int:
    """Returns the tokens of this call's segments."""
    if tokens % size == 0:
        return size
    if world_size == 1 and tokens < size:
        return tokens
    raise ValueError(
        f"segment_size must divide the tokens of each rank, {tokens}, got {size}; take a divisor, "
        "or give the last piece of a text, of less than a segment, to one rank (spec=P())"
    )


def _memories(
    call: Call, settings: Settings, segment: int, k: jax.Array, v: jax.Array, memory: Memory
) -> tuple[tuple[Sums, jax.Array], Memory]:
    """Returns M and z before each segment, and after all tokens of this rank or of all ranks."""
    keys, values = (x.reshape(x.shape[0], -1, segment, *x.shape[2:]) for x in (k, v))
    features = _features(settings, keys)
    sums = jnp.sum(features, axis=2, dtype=jnp.float32)[..., None]
    added = _product("bnshk,bnshv->bnhkv", features.astype(v.dtype), values)
    (m, z), before = memory, partial(_before_segments, call)
    if settings.update == "linear":
        # z is a column of the memory: the sum of values of 1.
        both = jnp.concatenate([m, z[..., None]], axis=3)
        found, last = before(both, None, jnp.concatenate([added, sums], axis=4))
        return (found[..., :-1], found[..., -1]), (last[..., :-1], last[..., -1])
    zs, last_z = before(z[..., None], None, sums)
    weight = _inverse(_product("bnshk,bnhkv->bnshv", features, zs))
    weighed = (weight * features).astype(v.dtype)
    taken = _product("bnshk,bnshj->bnhkj", features.astype(v.dtype), weighed)
    transfers = states.identity(taken) - taken
    ms, last_m = before(m, transfers, added)
    return (ms, zs[..., 0]), (last_m, last_z[..., 0])


def _before_segments(
    call: Call, first: State, transfers: Transfers, added: Sums
) -> tuple[Sums, State]:
    """Returns the state before each of this rank's segments, and the state after all segments.

    A segment turns a state S into T S + M: T is ``transfers``, or 1 for None, and M is ``added``.
    """

    passed_on = differentiable(_passed_on)
    if call.world_size == 1:
        return passed_on(first, transfers, added)
    transfer: Transfer = None
    columns, k_dim = added, first.shape[2]
    start = vary_like(added, jnp.zeros_like(first))
    if transfers is not None:
        # What all segments do to a state: the state of columns that begin with the identity.
        padding = [(0, 0)] * 4 + [(k_dim, 0)]
        columns, start = jnp.pad(added, padding), states.identity(jnp.pad(start, padding[1:]))
    _, left = passed_on(start, transfers, columns)
    if transfers is not None:
        transfer, left = Matrix(left[..., :k_dim]), left[..., k_dim:]
    first, last = differentiable(partial(states.before, call))(first, transfer, left)
    found, _ = passed_on(checkpoint_name(first, STATE_NAME), transfers, added)
    return found, last


def _passed_on(first: State, transfers: Transfers, added: Sums) -> tuple[Sums, State]:
    """Returns the state before each segment of one rank, and the state after them."""

    def step(state: State, segment: tuple[jax.Array | None, jax.Array]) -> tuple[State, State]:
        transfer, more = segment
        kept = state if transfer is None else states.apply(Matrix(transfer), state)
        return kept + more, state

    by_segment = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (transfers, added))
    last, found = lax.scan(step, first, by_segment)
    return jnp.moveaxis(found, 0, 1), last


def _retrieved(
    settings: Settings,
    segment: int,
    q: jax.Array,
    m: Float32[Array, "batch segments kv_heads head_dim value_dim"],
    z: Float32[Array, "batch segments kv_heads head_dim"],
) -> Float32[Array, "batch seq heads value_dim"]:
    """Returns what queries find in the memory before their segment."""
    batch, tokens, heads, dim = q.shape
    queries = q.reshape(batch, -1, segment, m.shape[2], heads // m.shape[2], dim)
    features = _features(settings, queries)
    found = _product("bnshgk,bnhkv->bnshgv", features.astype(q.dtype), m.astype(q.dtype))
    inverse = _inverse(_product("bnshgk,bnhkv->bnshgv", features, z[..., None]))
    return (inverse * found).reshape(batch, tokens, heads, m.shape[4])


def _features(settings: Settings, x: jax.Array) -> jax.Array:
    """Returns σ of queries or keys, float32."""
    x = x.astype(jnp.float32)
    return jax.nn.elu(x) + 1 if settings.feature_map == "elu" else settings.feature_map(x)


def _product(formula: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a product with sums in float32.

    Factors of 16 bits are exact in float32, and in the types by which GPUs multiply float32. XLA's
    CPU compiler does not take them as they are.
    """
    exact = jnp.float32 in (a.dtype, b.dtype)
    precision = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT
    return jnp.einsum(formula, *(x.astype(jnp.float32) for x in (a, b)), precision=precision)


def _inverse(x: jax.Array) -> jax.Array:
    """Returns 1 / x, and 0 where x is 0: there the memory is empty."""
    return jnp.where(x == 0, 0, 1 / jnp.where(x == 0, 1, x))
