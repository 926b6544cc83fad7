"""The delta rule of one GPU's tokens: kernels, and XLA's own code between them.

The delta rule is linear attention with corrected values u. So tokens are cut into parts as there
(see `gpu`), and most of the work is done by its kernel:

    forward   u = corrected(k, v, S);  o = attend(q, k, u, S)
    backward  dy = gradients(q, k, dout, D);  dv = β dy;  dq = attend(dout, u, k, Sᵀ)
              dk = keys(u, dout, q, dv, k, Dᵀ) − attend(dv, u, k, Sᵀ, strict)

S is the state before each part and D the gradient of the state after it. A part turns the state
before it into A S + M. A kernel computes A and M of all parts at once, and products of these small
matrices give the state where each part begins. One more kernel inverts a triangular matrix for each
tile of tokens, which needs no state. `kernels/compiler/src/device/delta_rule.rs` has the formulas.

With decays of channels XLA computes what the kernels take instead of log decays (see `channels`).

With float16 all arrays of a part are divided by its units (see `units`).

The kernels take arrays of one number of heads, so XLA repeats heads where numbers differ. With
documents kernels get finite operands only (see `isolation`); what overflows in a kernel spoils its
tile. Without documents a value that is not finite may pass a log decay of −∞.
"""

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32

from burst_attention import _ffi
from burst_attention._linear import channels, gpu
from burst_attention._linear.channels import TILE
from burst_attention._linear.cuts import Cut, cut
from burst_attention._linear.gpu import Dots, States
from burst_attention._linear.isolation import finite, poisoned, reached, spoilt
from burst_attention._linear.states import Betas, Logs, Matrix, State, apply, identity, product
from burst_attention._linear.units import units_of
from burst_attention._mesh import vary_like
from burst_attention._types import Arrays

Columns: TypeAlias = Float32[Array, "batch heads k_dim columns"]
"""A and M of tokens, side by side."""
Transfers: TypeAlias = Float32[Array, "batch parts heads k_dim k_dim"]
"""A of each part."""
Begins: TypeAlias = Float32[Array, "batch begins heads k_dim columns"]
"""A and M of all parts before each part, and of all parts."""


LEAST_RATE = 2.0**-6
"""The least β by which products are divided. β dy keeps the digits of dy where β is no smaller."""


class Again(NamedTuple):
    """What `left` and `grad_left` leave for a later call."""

    inverse: Float[Array, "batch seq heads tile"]
    """Row t of the inverse of token t's tile."""
    begins: Begins


class _Tokens(NamedTuple):
    """Operands as kernels take them: of all heads, and finite if there are documents."""

    parts: Cut
    beta: Float32[Array, "batch heads padded_seq"]
    k: Float[Array, "batch seq heads k_dim"]


def left(
    has_documents: bool, k: jax.Array, v: jax.Array, logs: Logs, beta: Betas
) -> tuple[Columns, Again]:
    """Returns A and M of all tokens, and what `forward` can use again."""
    tokens = _tokens(has_documents, k, logs, beta)
    inverse = _inverse(tokens)
    (values,) = _of_heads(has_documents, logs, v)
    of_parts = _states("parts", "forward", tokens, inverse, (values,))
    begins = _between(*of_parts, back=False)
    if has_documents:
        came = reached(_spoilt(logs, beta, k, v), tokens.parts.resets, back=False)
        begins = _with_nan(begins, gpu.ends(came, tokens.parts, back=False))
    return begins[:, -1], Again(inverse, begins)


def grad_left(
    has_documents: bool, q: jax.Array, k: jax.Array, dout: jax.Array, logs: Logs, beta: Betas
) -> tuple[State, Again]:
    """Returns the gradient of the state before all tokens, and what `backward` can use again.

    The gradient is that from the outputs alone.
    """
    tokens = _tokens(has_documents, k, logs, beta)
    inverse = _inverse(tokens)
    given = _of_heads(has_documents, logs, q, dout)
    of_parts = _states("grad_parts", "backward", tokens, inverse, given)
    begins = _between(*of_parts, back=True)
    if has_documents:
        came = reached(_spoilt(logs, beta, q, k, dout), tokens.parts.resets, back=True)
        begins = _with_nan(begins, gpu.ends(came, tokens.parts, back=True))
    return begins[:, -1, ..., k.shape[3] :], Again(inverse, begins)


def forward(
    has_documents: bool, operands: Arrays, again: Again | None
) -> tuple[jax.Array, State, States]:
    """Returns outputs, the state after the last token, and the states for `backward`.

    ``operands`` are q, k, v, log decays, β and the state before the first token. ``again`` is the
    second result of `left`, if it was called.
    """
    q, k, v, logs, beta, start = operands
    if again is None:
        _, again = left(has_documents, k, v, logs, beta)
    tokens = _tokens(has_documents, k, logs, beta)
    states = _states_from(again.begins, start)
    queries, values = _of_heads(has_documents, logs, q, v)
    before = finite(states[:, :-1]) if has_documents else states[:, :-1]
    unit = units_of(before, tokens.parts.rows, q.dtype)
    before, values = unit.of_states(before), unit.of_rows(values)
    u = _corrected(tokens, again.inverse, values, before)
    given = (queries, tokens.k, u, before)
    out, _ = gpu.attended("out", tokens.parts, given, None, back=False)
    out = unit.rows(out).astype(q.dtype)
    if has_documents:
        came = gpu.reached_from(start, tokens.parts, _spoilt(logs, beta, k, v), back=False)
        out = poisoned(out, came | spoilt(logs, q))
    return out, states[:, -1], states


def backward(has_documents: bool, operands: Arrays, again: Again | None) -> Arrays:
    """Returns the gradients of q, k, v, log decays, β and of the state before the first token.

    ``operands`` are q, k, v, log decays, β, the states of `forward` or the first of these alone,
    dout and the gradient of the state after the last token. ``again`` is the second result of
    `grad_left`, if it was called.
    """
    q, k, v, logs, beta, states, dout, dafter = operands
    if states.ndim == dafter.ndim:
        _, of_states = left(has_documents, k, v, logs, beta)
        states = _states_from(of_states.begins, states)
    if again is None:
        _, again = grad_left(has_documents, q, k, dout, logs, beta)
    tokens = _tokens(has_documents, k, logs, beta)
    parts, inverse = tokens.parts, again.inverse
    behind = _states_from(again.begins, dafter)
    before, d = states[:, :-1], behind[:, -2::-1]
    known = (finite(before), finite(d)) if has_documents else (before, d)
    # Of u and of dy, and so of what follows from them.
    unit, d_unit = (units_of(x, parts.rows, q.dtype) for x in known)
    crossing = gpu.crossings(parts, states[:, 1:], d_unit.of_states(d), q.dtype)
    before, d = unit.of_states(known[0]), d_unit.of_states(known[1])
    queries, values, given_dout = _of_heads(has_documents, logs, q, v, dout)
    u = _corrected(tokens, inverse, unit.of_rows(values), before)
    in_units = d_unit.of_rows(given_dout)
    dy = _changes(tokens, inverse, (queries, in_units), d)
    rate = (finite(beta) if has_documents else beta)[..., None]
    dv = (rate * dy.astype(jnp.float32)).astype(dy.dtype)
    turned = before.swapaxes(3, 4)
    dq, of_queries = gpu.attended("dq", parts, (given_dout, u, tokens.k, turned), queries)
    # Products of β dy in `seen` and in `keys` cancel in dlogs, so both take it rounded once.
    is_small = rate < LEAST_RATE
    rest, own = jnp.where(is_small, rate, 1), jnp.where(is_small, 1, rate)
    given = (jnp.where(is_small, dy, dv), u, tokens.k, turned)
    seen, of_seen = gpu.attended("seen", parts, given, tokens.k, strict=True)
    dk, of_keys = _keys(tokens, (queries, u, in_units, dv, d.swapaxes(3, 4)))
    dk = (dk.astype(jnp.float32) - rest * seen.astype(jnp.float32)).astype(dk.dtype)
    of_values = jnp.einsum("bshv,bshv->bsh", dy, values, preferred_element_type=jnp.float32)
    rest, own = rest.swapaxes(1, 2), own[..., 0]
    if parts.channels:
        of_tokens = of_seen.sum(axis=3)
    else:
        of_tokens, rest = of_seen, rest[..., 0]
    # Without the barrier XLA sums rows one by one, where it turns arrays of one number a token.
    of_values, of_tokens = lax.optimization_barrier((of_values, of_tokens))
    dbeta = of_values - unit.dots(of_tokens).swapaxes(1, 2) / own
    of_seen, of_keys = (d_unit.dots(unit.dots(x)) for x in (rest * of_seen, of_keys))
    dots = unit.dots(of_queries) - of_seen - of_keys
    dq, dk, dv = unit.rows(dq), d_unit.rows(unit.rows(dk)), d_unit.rows(dv)
    gradients: Arrays = (dq, dk, dv, d_unit.rows(dbeta[..., None]))
    if has_documents:
        gradients, dots = _spread(parts, operands, states[:, 0], gradients, dots)
    dlogs = gpu.decay_gradients(parts, dots, d_unit.crossings(crossing))
    groups = (logs.shape[2] // x.shape[2] for x in (q, k, v))
    *dqkv, dbeta = gradients
    sums = (gpu.of_group(x, group) for x, group in zip(dqkv, groups, strict=True))
    dq, dk, dv = (x.astype(q.dtype) for x in sums)
    return dq, dk, dv, dlogs, dbeta[..., 0], behind[:, -1]


def _tokens(has_documents: bool, k: jax.Array, logs: Logs, beta: Betas) -> _Tokens:
    beta = finite(beta) if has_documents else beta
    padding = [(0, 0), (0, 0), (0, -beta.shape[1] % TILE)]
    (keys,) = _of_heads(has_documents, logs, k)
    return _Tokens(cut(logs, has_documents), jnp.pad(beta.swapaxes(1, 2), padding), keys)


def _of_heads(has_documents: bool, logs: Logs, *rows: jax.Array) -> Arrays:
    """Returns rows with all heads, as kernels take them."""
    return gpu.kernel_rows(has_documents, *(gpu.of_heads(x, logs.shape[2]) for x in rows))


def _spoilt(logs: Logs, beta: Betas, *rows: jax.Array) -> Bool[Array, "batch seq heads"]:
    """Returns which tokens hold a value that is not finite."""
    return spoilt(logs, beta[..., None], *rows)


def _with_nan(begins: Begins, ends: Bool[Array, "batch parts heads"]) -> Begins:
    """Returns ``begins`` with NaN in M behind parts that a spoilt token leaves."""
    k_dim = begins.shape[3]
    ends = jnp.pad(ends, [(0, 0), (1, 0), (0, 0)])[..., None, None]
    states = jnp.where(ends, jnp.nan, begins[..., k_dim:])
    return jnp.concatenate([begins[..., :k_dim], states], axis=4)


def _between(states: States, transfers: Transfers, *, back: bool) -> Begins:
    """Returns A and M of all parts before each part, and of all parts.

    With ``back`` parts are counted from the last one. A part whose A is 0 passes nothing, not even
    NaN.
    """
    columns = jnp.concatenate([transfers, states], axis=4)
    passes = (transfers != 0).any(axis=(3, 4), keepdims=True)
    if back:
        columns, passes = columns[:, ::-1], passes[:, ::-1]
    k_dim = transfers.shape[4]
    is_state = np.arange(columns.shape[4]) >= k_dim

    def combine(
        first: tuple[jax.Array, jax.Array], then: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        after = jnp.where(then[1], product(then[0][..., :k_dim], first[0]), 0)
        # XLA fuses this sum with the line above, unlike an update of some columns.
        return after + jnp.where(is_state, then[0], 0), first[1] & then[1]

    sums, _ = lax.associative_scan(combine, (columns, passes), axis=1)
    return jnp.concatenate([identity(sums[:, :1]), sums], axis=1)


def _states_from(begins: Begins, start: State) -> Float32[Array, "batch begins heads k_dim v_dim"]:
    """Returns A S + M for the state S before all parts, where each part begins and behind all."""
    k_dim = begins.shape[3]
    return begins[..., k_dim:] + apply(Matrix(begins[..., :k_dim]), start[:, None])


def _spread(
    parts: Cut, operands: Arrays, first: State, gradients: Arrays, dots: jax.Array
) -> tuple[Arrays, jax.Array]:
    """Returns gradients and the products by token, with NaN where a spoilt operand reaches."""
    q, k, v, logs, beta, _, dout, dafter = operands
    earlier = gpu.reached_from(first, parts, _spoilt(logs, beta, k, v), back=False)
    later = gpu.reached_from(dafter, parts, _spoilt(logs, beta, q, k, dout), back=True)
    to_queries, to_keys = earlier | spoilt(logs, dout), earlier | later
    reaches = (to_queries, to_keys, later, to_keys)
    found = tuple(map(poisoned, gradients, reaches))
    return found, gpu.with_nan(dots, to_queries | to_keys)


def _inverse(tokens: _Tokens) -> Float[Array, "batch seq heads tile"]:
    """Returns the rows of the inverses of all tiles."""
    k, parts = tokens.k, tokens.parts
    shape = jax.ShapeDtypeStruct((*k.shape[:3], TILE), k.dtype)
    pairs = (gpu.pairs_of(parts, k, k),) if parts.channels else ()
    return _call("inverse", "", parts, (k, parts.sums, tokens.beta, *pairs), [shape])[0]


def _states(
    name: str, label: str, tokens: _Tokens, inverse: jax.Array, given: Arrays
) -> tuple[States, Transfers]:
    """Returns M and A of each part; of the gradient of the state for ``grad_parts``."""
    parts, k_dim = tokens.parts, tokens.k.shape[3]
    batch, heads, count = parts.totals.shape[:3]
    shapes = [
        jax.ShapeDtypeStruct((batch, count, heads, k_dim, columns), jnp.float32)
        for columns in (given[-1].shape[3], k_dim)
    ]
    states, transfers = _pass(name, label, tokens, inverse, given, (), shapes)
    return states, transfers


def _corrected(
    tokens: _Tokens, inverse: jax.Array, v: jax.Array, before: States
) -> Float[Array, "batch seq heads v_dim"]:
    """Returns the corrected values of all tokens, from the state before each part."""
    return _pass("parts", "values", tokens, inverse, (v,), (before,), [_like(v)])[0]


def _changes(
    tokens: _Tokens, inverse: jax.Array, given: Arrays, behind: States
) -> Float[Array, "batch seq heads v_dim"]:
    """Returns dy of all tokens, from the gradient of the state behind each part."""
    return _pass("grad_parts", "values", tokens, inverse, given, (behind,), [_like(given[1])])[0]


def _pass(
    name: str,
    label: str,
    tokens: _Tokens,
    inverse: jax.Array,
    given: Arrays,
    states: Arrays,
    shapes: list[jax.ShapeDtypeStruct],
) -> Arrays:
    """Calls a kernel that goes through parts, with what decays of channels bring."""
    k, parts, of = tokens.k, tokens.parts, tokens.parts.channels
    brought: Arrays = ()
    if of:
        brought = (channels.faded(k, of.to_end),)
        if name == "grad_parts":
            q, dout = given
            brought = (*brought, channels.turned(gpu.pairs_of(parts, q, k)))
            given = (channels.faded(q, of.from_start), dout)
        k = channels.faded(k, of.from_start)
    operands = (k, inverse, parts.sums, tokens.beta, *given, *states, *brought)
    return _call(name, label, parts, operands, shapes)


def _keys(tokens: _Tokens, given: Arrays) -> tuple[Float[Array, "batch seq heads k_dim"], Dots]:
    """Returns the gradients that keys get from states they add to, and their products with keys.

    With decays of channels the products are those of each channel, as in `gpu.attended`.
    """
    k, parts, of = tokens.k, tokens.parts, tokens.parts.channels
    operands = (k, parts.sums, *given)
    if of:
        levels = channels.met(of, given[0], k), channels.met(of, k, k)
        operands = (*operands, *levels, of.to_middle.astype(k.dtype))
        shapes = [_like(k), jax.ShapeDtypeStruct(parts.sums.shape, jnp.float32)]
        dk, dots = _call("keys", "", parts, operands, shapes)
        return dk, dots.swapaxes(1, 2)[:, :, : k.shape[1]]
    batch, seq, heads, k_dim = k.shape
    columns = -(-k_dim // gpu.COLUMNS)
    rows = (batch, heads * columns, parts.sums.shape[2])
    shapes = [_like(k), jax.ShapeDtypeStruct(rows, jnp.float32)]
    dk, dots = _call("keys", "", parts, operands, shapes)
    return dk, dots.reshape(batch, heads, columns, -1).sum(axis=2)[..., :seq]


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _call(
    name: str, label: str, parts: Cut, operands: Arrays, shapes: list[jax.ShapeDtypeStruct]
) -> Arrays:
    decays = np.int64(gpu.KEYS if parts.channels else gpu.HEADS)
    attributes: _ffi.Attributes = {"part_rows": np.int64(parts.rows), "decays": decays}
    outputs = _ffi.call(_ffi.DELTA_KERNELS[name], shapes, operands, attributes, label=label)
    return vary_like(operands[0], outputs)
