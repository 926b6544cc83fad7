"""Infini-attention of consecutive segments on one device: what tokens find, and the memory after.

Between segments there are a few products of small matrices, which XLA computes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from burst_attention._attention import shards
from burst_attention._attention.features import Features
from burst_attention._attention.options import Options
from burst_attention._linear import states
from burst_attention._linear.states import Matrix
from burst_attention._mesh import vary_like

Update: TypeAlias = Literal["linear", "delta"]
"""How a segment changes the memory."""
FeatureMap: TypeAlias = Literal["elu"] | Callable[[jax.Array], jax.Array]
"""σ, the function of queries and keys."""
Memory: TypeAlias = tuple[
    Float32[Array, "batch kv_heads head_dim columns"], Float32[Array, "batch kv_heads head_dim"]
]
"""M and z. Where M is a function of the M before, it has a column for each of that one's rows."""
Memories: TypeAlias = tuple[
    Float32[Array, "batch segments kv_heads head_dim columns"],
    Float32[Array, "batch segments kv_heads head_dim"],
]
"""M and z before each segment."""
Matrices: TypeAlias = Float32[Array, "batch segments kv_heads head_dim columns"]
Gates: TypeAlias = Float32[Array, "batch heads"]


class Settings(NamedTuple):
    """The arguments of a call that are no arrays, checked."""

    segment_size: int
    update: Update
    feature_map: FeatureMap
    options: Options
    """The options of the softmax attention."""


class Rows(NamedTuple):
    """Arrays of consecutive tokens, or their gradients."""

    query: Float[Array, "batch seq heads head_dim"]
    key: Float[Array, "batch seq kv_heads head_dim"]
    value: Float[Array, "batch seq kv_heads value_dim"]
    local_query: Float[Array, "batch seq heads head_dim"] | None
    """Queries of the softmax attention, if they are others."""
    local_key: Float[Array, "batch seq kv_heads head_dim"] | None


@dataclass(frozen=True)
class Segments:
    """What is static about the segments of a device."""

    settings: Settings
    size: int
    """Tokens of a segment."""
    own_heads: Callable[[jax.Array], jax.Array]
    """Takes the heads of keys that this device's queries use, dimension 2."""

    def attend(
        self, memory: Memory, rows: Rows, gate: Gates
    ) -> tuple[Float[Array, "batch seq heads value_dim"], Memory]:
        """Returns the outputs of tokens, and the memory after them."""
        of_memory, after = self.recall(memory, rows, gate)
        # Segments are sequences of a batch, each on one device.
        softmax = (
            rows.query if rows.local_query is None else rows.local_query,
            self.own_heads(rows.key if rows.local_key is None else rows.local_key),
            self.own_heads(rows.value),
        )
        query, key, value = (x.reshape(-1, self.size, *x.shape[2:]) for x in softmax)
        options = self.settings.options
        out, _ = shards.attend((), options, (query, key, value), Features(), False)
        of_softmax = out.reshape(of_memory.shape).astype(jnp.float32)
        mixed = of_memory + jax.nn.sigmoid(-gate)[:, None, :, None] * of_softmax
        return mixed.astype(rows.query.dtype), after

    def recall(
        self, memory: Memory, rows: Rows, gate: Gates
    ) -> tuple[Float32[Array, "batch seq heads value_dim"], Memory]:
        """Returns the memory's part of the outputs of tokens, and the memory after them."""
        before, after = self._memories(memory, rows.key, rows.value)
        m, z = map(self.own_heads, before)
        q = rows.query
        batch, tokens, heads, dim = q.shape
        queries = q.reshape(batch, -1, self.size, m.shape[2], heads // m.shape[2], dim)
        features = self._features(queries)
        found = _product("bnshgk,bnhkv->bnshgv", features.astype(q.dtype), m.astype(q.dtype))
        known = _product("bnshgk,bnhkv->bnshgv", features, z[..., None])
        weight = jax.nn.sigmoid(gate).reshape(batch, 1, 1, *known.shape[3:5], 1)
        return (weight * _inverse(known) * found).reshape(batch, tokens, heads, -1), after

    def advance(
        self,
        memory: Memory,
        k: Float[Array, "batch seq kv_heads head_dim"],
        v: Float[Array, "batch seq kv_heads value_dim"],
    ) -> Memory:
        """Returns the memory after tokens."""
        return self._memories(memory, k, v)[1]

    def sums(
        self, k: Float[Array, "batch seq kv_heads head_dim"]
    ) -> Float32[Array, "batch kv_heads head_dim"]:
        """Returns what tokens add to z."""
        return jnp.sum(self._features(k), axis=1, dtype=jnp.float32)

    def _memories(
        self,
        memory: Memory,
        k: Float[Array, "batch seq kv_heads head_dim"],
        v: Float[Array, "batch seq kv_heads value_dim"],
    ) -> tuple[Memories, Memory]:
        """Returns the memory before each segment, and after the last one."""
        m, z = memory
        keys, values = (x.reshape(x.shape[0], -1, self.size, *x.shape[2:]) for x in (k, v))
        features = self._features(keys)
        zs, last_z = _passed_on(z[..., None], None, jnp.sum(features, axis=2)[..., None])
        added = _product("bnshk,bnshv->bnhkv", features.astype(v.dtype), values)
        transfers = None
        if self.settings.update == "delta":
            weight = _inverse(_product("bnshk,bnhkv->bnshv", features, zs))
            weighed = (weight * features).astype(v.dtype)
            taken = _product("bnshk,bnshj->bnhkj", features.astype(v.dtype), weighed)
            transfers = states.identity(taken) - taken
        # Tokens add nothing to columns that say what is left of the memory before.
        added = jnp.pad(added, [(0, 0)] * 4 + [(m.shape[3] - added.shape[4], 0)])
        ms, last_m = _passed_on(m, transfers, added)
        return (ms, zs[..., 0]), (last_m, last_z[..., 0])

    def _features(self, x: jax.Array) -> jax.Array:
        """Returns σ of queries or keys, float32."""
        x, function = x.astype(jnp.float32), self.settings.feature_map
        return lax.optimization_barrier(_elu_and_1(x) if function == "elu" else function(x))


@jax.custom_jvp
def _elu_and_1(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Returns ELU + 1. Its derivative is its value, at most 1, so e^x is computed once."""
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.where(x > 0, 0, x)))


@_elu_and_1.defjvp
def _elu_and_1_rule(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    found = _elu_and_1(*primals)
    return found, jnp.minimum(found, 1) * tangents[0]


def _passed_on(
    first: Float32[Array, "batch kv_heads head_dim columns"],
    transfers: Float32[Array, "batch segments kv_heads head_dim head_dim"] | None,
    added: Matrices,
) -> tuple[Matrices, Float32[Array, "batch kv_heads head_dim columns"]]:
    """Returns the state before each segment, and the state after them.

    A segment turns a state S into T S + M: T is ``transfers``, or 1 for None, and M is ``added``.
    """

    def step(
        state: jax.Array, segment: tuple[jax.Array | None, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        transfer, more = segment
        kept = state if transfer is None else states.apply(Matrix(transfer), state)
        return kept + more, state

    by_segment = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (transfers, added))
    last, found = lax.scan(step, vary_like(added, first), by_segment)
    return jnp.moveaxis(found, 0, 1), last


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
