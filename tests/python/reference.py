"""Dense attention in float64: what the ring's results are held against."""

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from philox import kept

ROWS = 128
SHORT = 256
"""Up to this length, terms are computed too: later no gradient all but vanishes, unless a window or
segments leave rows few keys."""
EVERYTHING = 1 << 40
"""More positions than there are."""
VANISHES = 1e-2
"""A gradient smaller than this part of its terms is all cancellation."""
CANCELS = 0.1
"""With masks and features, the error of any other is measured by at least this part of them."""


@dataclass(frozen=True)
class Options:
    """Mask and features. Arrays are those of the whole problem, in the order of the sequence."""

    causal: bool = False
    scale: float | None = None
    window: tuple[int, int] | None = None
    """How far a query sees back and ahead."""
    segments: Any = None
    """(ids of queries, ids of keys), ``[batch, seq]``."""
    soft_cap: float | None = None
    slopes: Any = None
    """``[heads]``"""
    sinks: Any = None
    """``[heads]``"""
    dropout: tuple[float, Any] | None = None
    """(rate, the key's two words)"""

    @property
    def is_plain(self):
        """Whether nothing but causality and sinks decides what a query makes of the keys."""
        beside = (self.window, self.segments, self.soft_cap, self.slopes, self.dropout)
        return all(x is None for x in beside)

    @property
    def reach(self):
        """(left, right): how far a query sees, whatever the segments."""
        left, right = self.window or (EVERYTHING, EVERYTHING)
        return left, 0 if self.causal else right


@dataclass
class Gradients:
    """dq, dk, dv or something of their shapes."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray

    @classmethod
    def zeros_like(cls, q, k, v):
        return cls(*map(np.zeros_like, (q, k, v)))


@dataclass
class PerHead:
    """Gradient of a number that each head has, as the rows ``[batch, seq, heads]`` it sums up."""

    rows: np.ndarray
    terms: np.ndarray
    """Sums of the absolute values of what the rows are sums of."""
    shares: np.ndarray
    """What a row changes by with its delta."""

    @classmethod
    def zeros(cls, shape):
        return cls(*(np.zeros(shape) for _ in range(3)))

    @property
    def value(self):
        return self.rows.sum((0, 1))


@dataclass
class Dense(Gradients):
    """Output, lse and gradients, and for few keys what their error may be measured by."""

    o: np.ndarray
    lse: np.ndarray
    is_short: bool = True
    """Whether o is kept in float32 for the backward pass."""
    terms: Gradients | None = None
    """Sums of the absolute values of what the gradients are sums of."""
    least: float = CANCELS
    """The part of the terms that an error is measured by at least."""
    per_head: dict[str, PerHead] = field(default_factory=dict)
    """Of ``dz``, sinks, and ``dslopes``."""


def dense(q, k, v, dout, dlse, *, causal, **options):
    """Attention and its gradients, written out::

        s = scale · q kᵀ;  capped: soft_cap · tanh(s / soft_cap)
        s += slope · (key position − query position);  −inf where masked
        lse = ln (Σ e^s + e^sink);  p = e^(s − lse);  w = p ∘ kept / (1 − rate);  o = w v
        delta = rowsum(dout ∘ o);  dv = wᵀ dout;  ds = p ∘ (dout vᵀ ∘ w / p − delta + dlse)
        dslope = Σ ds · (key position − query position);  dsink = Σ e^(sink − lse) (dlse − delta)
        capped: ds ∘= 1 − tanh²;  dq = scale · ds k;  dk = scale · dsᵀ q

    Arrays are ``[batch, seq, heads, head_dim]``, lse and dlse ``[batch, seq, heads]``. A row that
    sees nothing has o = 0 and lse = −inf.
    """
    options = Options(causal=causal, **options)
    q, k, v, dout, dlse = (np.asarray(x, np.float64) for x in (q, k, v, dout, dlse))
    if options.scale is None:
        options = replace(options, scale=q.shape[3] ** -0.5)
    out = Dense(*map(np.zeros_like, (q, k, v, dout)), lse=np.zeros(q.shape[:3]))
    out.is_short = k.shape[1] <= SHORT
    if options.is_plain and q.shape[1] == k.shape[1]:
        out.least = 0.0
    if k.shape[1] <= SHORT or options.window or options.segments:
        out.terms = Gradients.zeros_like(q, k, v)
    given = {"dz": options.sinks, "dslopes": options.slopes}
    out.per_head = {n: PerHead.zeros(q.shape[:3]) for n, x in given.items() if x is not None}
    group, starts = q.shape[2] // k.shape[2], range(0, q.shape[1], ROWS)
    left, right = options.reach
    for b, h, start in itertools.product(range(q.shape[0]), range(q.shape[2]), starts):
        rows = (b, slice(start, min(start + ROWS, q.shape[1])), h)
        seen = slice(max(0, start - left), min(rows[1].stop + right, k.shape[1]))
        seen = (b, slice(min(seen.start, seen.stop), seen.stop), h // group)
        inputs = (q[rows], k[seen], v[seen], dout[rows], dlse[rows])
        _rows(out, rows, seen, inputs, options)
    return out


def _rows(out, rows, seen, inputs, options):
    """One block of queries against all keys that it may see."""
    q, k, v, dout, dlse = inputs
    (batch, queries, head), keys = rows, seen[1]
    s, cap_slope, distance = _scores(q, k, rows, keys, options)
    top = s.max(-1, keepdims=True, initial=-np.inf)
    sink = None if options.sinks is None else float(options.sinks[head])
    if sink is not None:
        top = np.maximum(top, sink)
    top[np.isneginf(top)] = 0
    s -= top
    p = np.exp(s, out=s)
    total = p.sum(-1, keepdims=True)
    if sink is not None:
        total += np.exp(sink - top)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[:, 0]
    total[total == 0] = 1
    p /= total
    dropped = _dropped(options.dropout, batch, head, queries, keys)
    o = (p * dropped) @ v
    out.lse[rows], out.o[rows] = lse, o
    shift = dlse - (dout * o).sum(-1)
    ds = dout @ v.T
    ds *= dropped
    absolute = np.abs(ds) + np.abs(shift)[:, None] if out.terms or out.per_head else None
    ds += shift[:, None]
    ds *= p
    if sink is not None:
        share = (np.exp(sink - top) / total)[:, 0]
        _add_per_head(out.per_head["dz"], rows, share * shift, np.abs(share * shift), share)
    if distance is not None:
        terms = (p * absolute * np.abs(distance)).sum(-1)
        parts = (ds * distance).sum(-1), terms, (p * distance).sum(-1)
        _add_per_head(out.per_head["dslopes"], rows, *parts)
    scale = options.scale
    ds *= cap_slope
    weights = p * dropped
    _add(out, rows, seen, scale * (ds @ k), scale * (ds.T @ q), weights.T @ dout)
    if out.terms:
        ds = p * cap_slope * absolute
        dq, dk, dv = ds @ np.abs(k), ds.T @ np.abs(q), weights.T @ np.abs(dout)
        _add(out.terms, rows, seen, scale * dq, scale * dk, dv)


def _scores(q, k, rows, keys, options):
    """s, −inf where masked; the cap's derivative; key positions − query positions, with slopes."""
    batch, queries, head = rows
    s = q @ k.T
    s *= options.scale
    cap_slope = 1.0
    if options.soft_cap is not None:
        s = np.tanh(s / options.soft_cap)
        cap_slope = 1 - s**2
        s *= options.soft_cap
    distance = np.arange(keys.start, keys.stop) - np.arange(queries.start, queries.stop)[:, None]
    left, right = options.reach
    masked = (distance < -left) | (distance > right)
    if options.slopes is not None:
        s += float(options.slopes[head]) * distance
    if options.segments is not None:
        ids, of_keys = (np.asarray(x)[batch] for x in options.segments)
        ids, of_keys = ids[queries, None], of_keys[None, keys]
        masked |= (ids != of_keys) | (ids < 0)
    s[masked] = -np.inf
    return s, cap_slope, None if options.slopes is None else distance


def _dropped(dropout, batch, head, queries, keys):
    """What dropout multiplies the weights by."""
    if dropout is None:
        return 1.0
    rate, words = dropout
    positions = (np.arange(part.start, part.stop) for part in (queries, keys))
    return kept(rate, words, batch, head, *positions) / (1 - np.float64(np.float32(rate)))


def _add(gradients, rows, seen, dq, dk, dv):
    gradients.dq[rows] += dq
    gradients.dk[seen] += dk
    gradients.dv[seen] += dv


def _add_per_head(gradient, rows, *parts):
    for whole, part in zip((gradient.rows, gradient.terms, gradient.shares), parts, strict=True):
        whole[rows] += part


def error(name, found, expected):
    """(norm of the error, norm that it is measured against)."""
    true = getattr(expected, name)
    found = np.asarray(found).astype(np.float64)
    assert found.shape == true.shape
    nothing = np.isneginf(true)
    assert np.array_equal(np.isneginf(found), nothing)
    found, true = (np.where(nothing, 0, x) for x in (found, true))
    size, terms = np.linalg.norm(true), getattr(expected.terms, name, 0.0)
    terms = np.linalg.norm(terms)
    measure = terms if size < VANISHES * terms else max(size, expected.least * terms)
    return np.linalg.norm(found - true), measure


def rounding(name, expected, dtype):
    """Norm of the error of an exact computation that rounds its inputs and results to ``dtype``."""
    true = getattr(expected, name)
    return np.linalg.norm(true.astype(dtype).astype(np.float64) - true)
