"""Infini-attention of consecutive segments on one device: what tokens find, and the memory after.

Between segments there are a few products of small matrices, which XLA computes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Shaped

from burst_attention._attention import shards
from burst_attention._attention.features import Features
from burst_attention._attention.options import Options
from burst_attention._linear import states
from burst_attention._linear.states import Matrix
from burst_attention._linear.units import power_within
from burst_attention._mesh import vary_like

Update: TypeAlias = Literal["linear", "delta"]
"""How a segment changes the memory."""
FeatureMap: TypeAlias = Literal["elu"] | Callable[[jax.Array], jax.Array]
"""σ, the function of queries and keys, as a call gives it."""
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
SINGLE = np.dtype(np.float32)


class Settings(NamedTuple):
    """The arguments of a call that are no arrays, checked."""

    segment_size: int
    update: Update
    feature_map: Literal["elu"] | None
    """σ; None where query and key of `Rows` are features already."""
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
        return mixed.astype(rows.value.dtype), after

    def recall(
        self, memory: Memory, rows: Rows, gate: Gates
    ) -> tuple[Float32[Array, "batch seq heads value_dim"], Memory]:
        """Returns the memory's part of the outputs of tokens, and the memory after them."""
        before, after = self._memories(memory, rows.key, rows.value)
        m, z = map(self.own_heads, before)
        q = rows.query
        batch, tokens, heads, dim = q.shape
        queries = self._by_head(q).reshape(
            batch, -1, m.shape[2], heads // m.shape[2] * self.size, dim
        )
        features = self._features(queries)
        of_rows, unit = _units(features, z)
        dtype = rows.value.dtype
        rounded = _rounded(features / of_rows, dtype), _rounded(m / unit, dtype)
        found = _product("bnhsk,bnhkv->bnhsv", *rounded, dtype)
        known = _product("bnhsk,bnhkv->bnhsv", features / of_rows, z[..., None] / unit)
        shape = (batch, -1, heads, self.size)
        weight = jax.nn.sigmoid(gate)[:, None, :, None] * _inverse(known).reshape(shape)
        mixed = weight[..., None] * found.reshape(*shape, found.shape[4])
        return mixed.swapaxes(2, 3).reshape(batch, tokens, heads, -1), after

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
        keys, values = map(self._by_head, (k, v))
        features = self._features(keys)
        zs, last_z = _passed_on(z[..., None], None, jnp.sum(features, axis=3)[..., None])
        added = _summed(v.dtype, _rounded(features, v.dtype), values)
        transfers = None
        if self.settings.update == "delta":
            of_rows, unit = _units(features, zs[..., 0])
            known = _product("bnhsk,bnhkv->bnhsv", features / of_rows, zs / unit)
            weighed = _inverse(known) * (features / of_rows) / unit
            rounded = _rounded(features, v.dtype), _rounded(weighed, v.dtype)
            taken = _summed(v.dtype, *rounded)
            transfers = states.identity(taken) - taken
        # Tokens add nothing to columns that say what is left of the memory before.
        added = jnp.pad(added, [(0, 0)] * 4 + [(m.shape[3] - added.shape[4], 0)])
        ms, last_m = _passed_on(m, transfers, added)
        return (ms, zs[..., 0]), (last_m, last_z[..., 0])

    def _by_head(
        self, x: Shaped[Array, "batch seq heads dim"]
    ) -> Shaped[Array, "batch segments heads size dim"]:
        """Returns the rows of each head of each segment, as the products take them."""
        return x.reshape(x.shape[0], -1, self.size, *x.shape[2:]).swapaxes(2, 3)

    def _features(self, x: jax.Array) -> jax.Array:
        """Returns σ of queries or keys, float32."""
        if self.settings.feature_map is None:
            return x
        return lax.optimization_barrier(_elu_and_1(x.astype(jnp.float32)))


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
    first = vary_like(added, first)
    if transfers is None:
        sums = jnp.cumsum(jnp.concatenate([first[:, None], added], axis=1), axis=1)
        return sums[:, :-1], sums[:, -1]

    def step(state: jax.Array, segment: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        transfer, more = segment
        return states.apply(Matrix(transfer), state) + more, state

    by_segment = jnp.moveaxis(transfers, 1, 0), jnp.moveaxis(added, 1, 0)
    last, found = lax.scan(step, first, by_segment)
    return jnp.moveaxis(found, 0, 1), last


def _units(
    features: Float32[Array, "batch segments heads rows head_dim"],
    z: Float32[Array, "batch segments heads head_dim"],
) -> tuple[
    Float32[Array, "batch segments heads rows 1"], Float32[Array, "batch segments heads 1 1"]
]:
    """Returns a unit of σ for each row, and a unit of M and z.

    σ M / (σ z) is the same in any units. In these, no product of tiny numbers is 0 unless a factor
    is. They are powers of two, which round nothing.
    """
    of_rows = power_within(features.max(axis=4, keepdims=True))
    return of_rows, power_within(z.max(axis=3)[..., None, None])


def _rounded(x: Float32[Array, "*shape"], dtype: np.dtype) -> Float[Array, "*shape"]:
    """Returns ``x`` with the digits of a type, and the range of float32.

    A memory grows with the text, beyond float16. GPUs multiply float32 by types that have float16's
    digits and float32's range.
    """
    if dtype == jnp.float16:
        return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10)
    return x.astype(dtype)


def _product(formula: str, a: jax.Array, b: jax.Array, digits: np.dtype = SINGLE) -> jax.Array:
    """Returns a product with sums in float32; ``digits`` is a type that has all digits of factors.

    Digits of 16 bits are exact in float32, and in the types by which GPUs multiply float32. XLA's
    CPU compiler does not take such types as they are.
    """
    exact = digits == SINGLE
    precision = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT
    return jnp.einsum(formula, *(x.astype(jnp.float32) for x in (a, b)), precision=precision)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed(
    digits: np.dtype,
    a: Float[Array, "batch segments kv_heads size k_dim"],
    b: Float[Array, "batch segments kv_heads size columns"],
) -> Matrices:
    """Returns Σ aᵀ b over the rows of each segment; ``digits`` is as in `_product`."""
    return _product("bnhsk,bnhsv->bnhkv", a, b, digits)


def _summed_rule(
    digits: np.dtype, a: jax.Array, b: jax.Array
) -> tuple[Matrices, tuple[jax.Array, jax.Array]]:
    return _summed(digits, a, b), (a, b)


def _summed_back(
    digits: np.dtype, rows: tuple[jax.Array, jax.Array], d: Matrices
) -> tuple[jax.Array, jax.Array]:
    # JAX's own rule turns the results, and XLA's CPU compiler reads them in strides of a segment.
    a, b = rows
    da = _product("bnhsv,bnhkv->bnhsk", b, d)
    db = _product("bnhsk,bnhkv->bnhsv", a, d)
    return da.astype(a.dtype), db.astype(b.dtype)


_summed.defvjp(_summed_rule, _summed_back)


@jax.custom_jvp
def _inverse(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Returns 1 / x, and 0 where x is 0: there the memory is empty."""
    return jnp.where(x == 0, 0, 1 / jnp.where(x == 0, 1, x))


@_inverse.defjvp
def _inverse_rule(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    # The square of a small x is 0 in float32, and that of its power of two times x is not.
    (x,), (tangent,) = primals, tangents
    power = 1 / power_within(x)
    square = jnp.where(x == 0, 0, (x * power) ** -2)
    return _inverse(x), -tangent * power * square * power
