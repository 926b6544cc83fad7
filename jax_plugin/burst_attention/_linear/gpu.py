"""Linear attention of one GPU's tokens: two kernels, and XLA's own code between them.

Tokens are cut into parts, enough that the parts of all heads keep a GPU busy. One kernel computes
the state that each part leaves. A product of small matrices makes from these the state where each
part begins, and the other kernel goes through all parts at once:

    forward   o = attend(q, k, v, S)
    backward  dq = attend(dout, v, k, Sᵀ);  dk = attend(v, dout, q, Dᵀ);  dv = attend(k, q, dout, D)

S is the state before each part and D the gradient of the state after it; dk and dv go from the last
token to the first. `kernels/compiler/src/device/linear.rs` has the formulas.

Values that are not finite do not pass a log decay of −∞, unless one tile of a kernel holds both.
With documents they do not pass there either: kernels get finite operands only (see `isolation`).

The kernels take k and v of one number of heads. So XLA repeats heads where these numbers differ,
and in the backward pass the heads of q. With decays of channels it repeats all heads, and computes
what the kernels take instead of log decays (see `channels`).
"""

from math import lcm
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32

from burst_attention import _ffi
from burst_attention._linear import channels, sums
from burst_attention._linear.channels import TILE
from burst_attention._linear.cuts import Cut, Totals, cut
from burst_attention._linear.isolation import finite, poisoned, reached, spoilt
from burst_attention._linear.states import Decay, Logs, State, Transfer, apply, compose
from burst_attention._mesh import vary_like
from burst_attention._types import Arrays

Dots: TypeAlias = Float32[Array, "batch heads seq"] | Float32[Array, "batch heads seq k_dim"]
States: TypeAlias = Float32[Array, "batch parts heads k_dim v_dim"]
Begins: TypeAlias = Float32[Array, "batch parts+1 heads k_dim v_dim"]
"""States where each part begins, and after the last part."""

COLUMNS = 64
"""Value columns of a block."""

HEADS, KEYS, VALUES = range(3)
"""What has a decay in a call of kernels: heads, columns of keys, or columns of values."""


def scaled(x: Float[Array, "batch seq _ dim"], scale: float) -> Float[Array, "batch seq _ dim"]:
    """Returns ``x`` times a factor, rounded to its type."""
    return x if scale == 1 else (x.astype(jnp.float32) * scale).astype(x.dtype)


def of_heads(x: Float[Array, "batch seq _ dim"], heads: int) -> Float[Array, "batch seq _ dim"]:
    """Returns ``x`` with its heads repeated to a number of heads."""
    return x if x.shape[2] == heads else jnp.repeat(x, heads // x.shape[2], axis=2)


def _paired(k: jax.Array, v: jax.Array, logs: Logs) -> tuple[jax.Array, jax.Array]:
    """Returns k and v with one number of heads, as kernels take them."""
    heads = lcm(k.shape[2], v.shape[2]) if logs.ndim == 3 else logs.shape[2]
    return of_heads(k, heads), of_heads(v, heads)


def between(totals: Totals, left: States, back: bool) -> Begins:
    """Returns the state where each part begins, and after all parts, from a state of zeros::

        E_p = Σ_(j<p) 2^(Σ_(j<i<p) totals_i) left_j,   p = 0 … parts

    With ``back`` p counts from the last part.
    """
    if back:
        totals, left = totals[:, :, ::-1], left[:, ::-1]

    def combine(
        first: tuple[Transfer, jax.Array], then: tuple[Transfer, jax.Array]
    ) -> tuple[Transfer, jax.Array]:
        return compose(first[0], then[0]), apply(then[0], first[1], jnp.exp2) + then[1]

    _, found = lax.associative_scan(combine, (Decay(totals.swapaxes(1, 2)), left), axis=1)
    return jnp.pad(found, [(0, 0), (1, 0), (0, 0), (0, 0), (0, 0)])


def states_from(totals: Totals, zero: Begins, start: State, back: bool) -> Begins:
    """Returns the states of `between`, but from ``start``; ``zero`` is the result of `between`."""
    if back:
        totals = totals[:, :, ::-1]
    padding = [(0, 0), (0, 0), (1, 0), (0, 0)][: totals.ndim]
    before = jnp.pad(jnp.cumsum(totals, axis=2), padding)
    return zero + apply(Decay(before.swapaxes(1, 2)), start[:, None], jnp.exp2)


def left(
    has_documents: bool, k: jax.Array, v: jax.Array, logs: Logs, *, back: bool = False
) -> tuple[State, jax.Array]:
    """Returns the state that all tokens leave, and the result of `between` for their parts."""
    parts = cut(logs, has_documents)
    keys, values = kernel_rows(has_documents, *_paired(k, v, logs))
    zero = between(parts.totals, _parts(parts, keys, values, back), back)
    if has_documents:
        came = reached(spoilt(logs, k, v), parts.resets, back=back)
        spoilt_ends = ends(came, parts, back)[..., None, None]
        zero = jnp.where(jnp.pad(spoilt_ends, [(0, 0), (1, 0)] + [(0, 0)] * 3), jnp.nan, zero)
    return zero[:, -1], zero


def kernel_rows(has_documents: bool, *rows: jax.Array) -> Arrays:
    """Returns rows as kernels take them."""
    return tuple(map(finite, rows)) if has_documents else rows


def ends(
    came: Bool[Array, "batch seq heads"], parts: Cut, back: bool
) -> Bool[Array, "batch parts heads"]:
    """Returns ``came`` of the token at which each part is left."""
    count, tokens = parts.totals.shape[2], came.shape[1]
    if back:
        # Nothing leaves a token with a reset.
        return (came & ~parts.resets)[:, np.arange(count)[::-1] * parts.rows]
    return came[:, np.minimum(np.arange(1, count + 1) * parts.rows, tokens) - 1]


def reached_from(
    state: State, parts: Cut, found: Bool[Array, "batch seq heads"], *, back: bool
) -> Bool[Array, "batch seq heads"]:
    """Returns which tokens a spoilt token reaches, or the state before the first token.

    With ``back``: the gradient of the state after the last token.
    """
    is_bad = ~jnp.isfinite(state).all(axis=(2, 3))
    token = -1 if back else 0
    is_bad &= back | ~parts.resets[:, token]
    return reached(found.at[:, token].set(found[:, token] | is_bad), parts.resets, back=back)


def forward(
    has_documents: bool, operands: Arrays, zero: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns outputs, the state after the last token, and the states of `states_from`.

    ``operands`` are q, k, v, log decays and the state before the first token. ``zero`` is the
    second result of `left`, if it was called.
    """
    q, k, v, logs, start = operands
    parts = cut(logs, has_documents)
    if zero is None:
        _, zero = left(has_documents, k, v, logs)
    states = states_from(parts.totals, zero, start, back=False)
    q_heads = logs.shape[2] if parts.channels else q.shape[2]
    paired = (of_heads(q, q_heads), *_paired(k, v, logs))
    queries, keys, values, before = kernel_rows(has_documents, *paired, states[:, :-1])
    out, _ = attended("out", parts, (queries, keys, values, before), None, back=False)
    if has_documents:
        came = reached_from(start, parts, spoilt(logs, k, v), back=False)
        out = poisoned(out, came | spoilt(logs, q))
    return out, states[:, -1], states


def backward(has_documents: bool, operands: Arrays, zero: jax.Array | None) -> Arrays:
    """Returns the gradients of q, k, v, log decays and of the state before the first token.

    ``operands`` are q, k, v, log decays, the states of `forward` or the first of these alone, dout
    and the gradient of the state after the last token. ``zero`` is the second result of `left` with
    ``back``, if it was called.
    """
    q, k, v, logs, states, dout, dafter = operands
    parts = cut(logs, has_documents)
    if states.ndim == dafter.ndim:
        _, from_zero = left(has_documents, k, v, logs)
        states = states_from(parts.totals, from_zero, states, back=False)
    if zero is None:
        _, zero = left(has_documents, q, dout, logs, back=True)
    own_heads, all_heads = [x.shape[2] for x in (q, k, v)], logs.shape[2]
    paired = (of_heads(q, all_heads), *_paired(k, v, logs), dout)
    q, k, v, dout = kernel_rows(has_documents, *paired)
    behind = states_from(parts.totals, zero, dafter, back=True)
    later = behind[:, -2::-1]
    before, d = kernel_rows(has_documents, states[:, :-1], later)
    s_turned, d_turned = (x.swapaxes(3, 4) for x in (before, d))
    dq, of_queries = attended("dq", parts, (dout, v, k, s_turned), q, back=False)
    dk, of_keys = attended("dk", parts, (v, dout, q, d_turned), k, back=True)
    dv, _ = attended("dv", parts, (k, q, dout, d), None, back=True)
    gradients: Arrays = (dq, dk, dv)
    dots = of_queries - of_keys
    if has_documents:
        gradients, dots = _spread(parts, operands, states[:, 0], gradients, dots)
    dlogs = decay_gradients(parts, dots, crossings(parts, states[:, 1:], later, q.dtype))
    groups = (all_heads // own for own in own_heads)
    dq, dk, dv = (of_group(x, group) for x, group in zip(gradients, groups, strict=True))
    return dq, dk, dv, dlogs, behind[:, -1]


def _spread(
    parts: Cut, operands: Arrays, first: State, gradients: Arrays, dots: jax.Array
) -> tuple[Arrays, jax.Array]:
    """Returns dq, dk, dv and the products by token, with NaN where a spoilt operand reaches."""
    q, k, v, logs, _, dout, dafter = operands
    from_keys = reached_from(first, parts, spoilt(logs, k, v), back=False)
    from_queries = reached_from(dafter, parts, spoilt(logs, q, dout), back=True)
    to_queries = from_keys | spoilt(logs, dout)
    to_keys, to_values = (from_queries | spoilt(logs, x) for x in (v, k))
    found = tuple(map(poisoned, gradients, (to_queries, to_keys, to_values)))
    return found, with_nan(dots, to_queries | to_keys)


def with_nan(dots: Dots, where: Bool[Array, "batch seq heads"]) -> Dots:
    """Returns products with NaN for some tokens."""
    where = where.swapaxes(1, 2)
    return jnp.where(jnp.expand_dims(where, range(3, dots.ndim)), jnp.nan, dots)


def crossings(parts: Cut, states: States, d: States, dtype: np.dtype) -> Totals:
    """Returns ⟨S, D⟩ of the states after parts, or of each row of the states.

    D is rounded as in the kernel for dk, so that terms cancel exactly under a strong decay.
    """
    largest = jnp.max(jnp.abs(d), axis=(3, 4), keepdims=True)
    bound = jnp.maximum(1, largest * 2.0**-15) if dtype == jnp.float16 else 1
    narrowed = (d / bound).astype(dtype).astype(d.dtype) * bound
    products = "bphkv,bphkv->" + ("bhpk" if parts.channels else "bhp")
    return jnp.einsum(products, states, narrowed, precision="highest")


def of_group(gradient: jax.Array, group: int) -> jax.Array:
    """Returns the sum over the heads that share a head of q, k or v."""
    if group == 1:
        return gradient
    batch, tokens, heads, dim = gradient.shape
    by_head = gradient.reshape(batch, tokens, heads // group, group, dim)
    return by_head.sum(axis=3, dtype=jnp.float32).astype(gradient.dtype)


def decay_gradients(parts: Cut, of_tokens: Dots, crossing: Totals) -> Logs:
    """Returns the gradient of the log decays.

    d log λ_t = Σ_(s≥t) (q_s·dq_s − k_s·dk_s) within a part and a run, and ⟨S, D⟩ at its end.
    ``of_tokens`` are these differences, ``crossing`` the products ⟨S, D⟩. Decays of channels have
    differences and products of their own.
    """
    stops = parts.channels.stops if parts.channels else parts.resets
    tokens = stops.shape[1]
    # Tokens come last.
    terms, behind = (jnp.moveaxis(x, 2, -1) for x in (of_tokens, crossing))
    stop = jnp.moveaxis(stops, 1, -1)
    padding = [(0, 0)] * (stop.ndim - 1) + [(0, behind.shape[-1] * parts.rows - tokens)]
    shape = (*behind.shape, parts.rows)
    terms, stop = (jnp.pad(x, padding).reshape(shape) for x in (terms, stop))
    # Otherwise XLA computes them again for each row that reads them.
    terms, stop = lax.optimization_barrier((terms, stop))
    # The product behind the last part's padding belongs to the last token as well.
    passes = jnp.pad(~stop[..., 1:], [(0, 0)] * (stop.ndim - 1) + [(0, 1)], constant_values=True)
    found = jnp.where(stop, 0, sums.from_behind(terms, passes, behind))
    return jnp.moveaxis(found.reshape(*shape[:-2], -1)[..., :tokens], -1, 1)


def _parts(
    parts: Cut,
    k: Float[Array, "batch seq _ k_dim"],
    v: Float[Array, "batch seq _ v_dim"],
    back: bool,
) -> States:
    """Returns the state that each part leaves, from a state of zeros."""
    batch, heads, count = parts.totals.shape[:3]
    if parts.channels:
        k = channels.faded(k, parts.channels.from_start if back else parts.channels.to_end)
    shape = (batch, count, heads, k.shape[3], v.shape[3])
    result = jax.ShapeDtypeStruct(shape, jnp.float32)
    label = "backward" if back else "forward"
    decays = KEYS if parts.channels else HEADS
    (state,) = _call("parts", label, parts, (k, v, parts.sums), [result], back, decays=decays)
    return state


def attended(
    label: str,
    parts: Cut,
    operands: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    other: jax.Array | None,
    *,
    back: bool = False,
    strict: bool = False,
) -> tuple[Float[Array, "batch seq heads v_dim"], Dots]:
    """Returns the results of q, k, v and states, and their products with ``other`` by row.

    Without ``other`` the products are zeros. With ``strict`` a token's own key and value give it
    nothing. With decays of channels the products are those of each channel.
    """
    q, k, v, states = operands
    batch, tokens, heads = q.shape[0], q.shape[1], parts.totals.shape[1]
    results = [jax.ShapeDtypeStruct((batch, tokens, heads, v.shape[3]), q.dtype)]
    if parts.channels:
        return _attended_in_channels(label, parts, operands, other, results, back, strict)
    given: Arrays = (q, k, v, parts.sums, states)
    if other is None:
        (out,) = _call("attend", label, parts, given, results, back, strict)
        return out, jnp.zeros((batch, heads, tokens), jnp.float32)
    columns = -(-v.shape[3] // COLUMNS)
    rows = (batch, heads * columns, parts.sums.shape[2])
    results.append(jax.ShapeDtypeStruct(rows, jnp.float32))
    out, dots = _call("attend", label, parts, (*given, other), results, back, strict)
    return out, dots.reshape(batch, heads, columns, -1).sum(axis=2)[..., :tokens]


def _attended_in_channels(
    label: str,
    parts: Cut,
    operands: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    other: jax.Array | None,
    results: list[jax.ShapeDtypeStruct],
    back: bool,
    strict: bool,
) -> tuple[Float[Array, "batch seq heads v_dim"], Float32[Array, "batch heads seq v_dim"]]:
    """Returns the results of `attended` with decays of channels.

    Without ``other`` q and k have the channels. Otherwise the values have them, and the products
    are those of all elements, without what a token's own key and value give it.
    """
    q, k, v, states = operands
    of = parts.channels
    assert of is not None
    if other is None:
        pairs = pairs_of(parts, k, q) if back else pairs_of(parts, q, k)
        pairs = channels.turned(pairs) if back else pairs
        received, left = (of.to_end, of.from_start) if back else (of.from_start, of.to_end)
        rows = (channels.faded(q, received), channels.faded(k, left), v)
        given = (*rows, parts.sums, states, pairs)
        (out,) = _call("attend", label, parts, given, results, back, strict, KEYS)
        return out, jnp.zeros((*parts.totals.shape[:2], *out.shape[1::2]), jnp.float32)
    met = channels.met(of, v, other) if back else channels.met(of, other, v)
    theirs = (q, k, v, parts.sums, states, other, met, of.to_middle.astype(q.dtype))
    results.append(jax.ShapeDtypeStruct((*parts.sums.shape[:3], v.shape[3]), jnp.float32))
    out, dots = _call("attend", label, parts, theirs, results, back, strict, VALUES)
    return out, dots.swapaxes(1, 2)[:, :, : q.shape[1]]


def pairs_of(
    parts: Cut, q: Float[Array, "batch seq heads k_dim"], k: Float[Array, "batch seq heads k_dim"]
) -> Float32[Array, "batch padded_seq heads tile"]:
    """Returns the products of queries with keys of their tile under decays of channels."""
    assert parts.channels is not None
    shape = jax.ShapeDtypeStruct((*parts.sums.shape[:3], TILE), jnp.float32)
    operands = (q, k, channels.met(parts.channels, q, k))
    return _call("pairs", "", parts, operands, [shape])[0]


def _call(
    name: str,
    label: str,
    parts: Cut,
    operands: Arrays,
    shapes: list[jax.ShapeDtypeStruct],
    back: bool = False,
    strict: bool = False,
    decays: int = HEADS,
) -> Arrays:
    attributes: _ffi.Attributes = {"part_rows": np.int64(parts.rows)}
    if name != "pairs":
        attributes |= {"reverse": np.bool_(back), "decays": np.int64(decays)}
    if name == "attend":
        attributes |= {"strict": np.bool_(strict)}
    target = _ffi.LINEAR_KERNELS[name]
    outputs = _ffi.call(target, shapes, operands, attributes, label=label)
    return vary_like(operands[0], outputs)
