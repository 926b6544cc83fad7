"""Dense attention in float64: the definition that results are compared with."""

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import platforms
from philox import kept

ROWS = 128
"""Queries of a block; blocks bound the memory of long sequences."""
SHORT = 256
"""Up to this many keys, the sums of the terms' absolute values are computed too. With more keys, a
gradient can almost vanish only where a window or segments leave rows few keys."""
EVERYTHING = 1 << 40
"""A number of positions that no sequence has."""
VANISHES = 1e-2
"""A gradient below this part of its terms is left over from cancellation; its error is measured by
its terms."""
CANCELS = 0.1
"""With masks and features, the error of any gradient is measured by at least this part of its
terms."""


ROUNDING = 0.21
"""The error of rounding a number to nearest, in the norm, as a part of the type's epsilon."""


@dataclass(frozen=True)
class Features:
    """The mask and the features. Arrays belong to the whole problem, in the sequence's order."""

    causal: bool = False
    scale: float | None = None
    window: tuple[int, int] | None = None
    """The number of positions that a query sees back and ahead."""
    segments: Any = None
    """(ids of queries, ids of keys), ``[batch, seq]``."""
    soft_cap: float | None = None
    slopes: Any = None
    """``[heads]``"""
    sinks: Any = None
    """``[heads]``"""
    dropout: tuple[float, Any] | None = None
    """(rate, the key's two words)"""
    visible: Any = None
    """(start, stop) of each key's interval of query positions, ``[batch, seq]``, or of its two
    intervals, ``[batch, seq, 2]``."""
    positions: Any = None
    """(positions of queries, positions of keys), ``[batch, seq]``, in place of indices."""
    rounded: Any = None
    """A type of 16 bits to which p, ds and o are rounded, as every attention in 16 bits does."""

    @property
    def is_plain(self):
        """Whether causality and sinks are the only features."""
        masks = (self.window, self.segments, self.visible, self.positions)
        return all(x is None for x in (*masks, self.soft_cap, self.slopes, self.dropout))

    def round(self, x):
        """Returns what takes part in a product."""
        return x if self.rounded is None else x.astype(self.rounded).astype(np.float64)

    @property
    def reach(self):
        """(left, right): the positions that a query sees back and ahead, segments aside."""
        left, right = self.window or (EVERYTHING, EVERYTHING)
        return left, 0 if self.causal else right

    def positions_of(self, batch, queries, keys):
        """Returns the positions of queries and of keys, given by their indices."""
        if self.positions is None:
            return np.arange(queries.start, queries.stop), np.arange(keys.start, keys.stop)
        of_queries, of_keys = (np.asarray(x, np.int64)[batch] for x in self.positions)
        return of_queries[queries], of_keys[keys]


@dataclass
class Gradients:
    """The gradients dq, dk and dv, or arrays of the same shapes."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray

    @classmethod
    def zeros_like(cls, q, k, v):
        return cls(*map(np.zeros_like, (q, k, v)))


@dataclass
class PerHead:
    """The gradient of one number for each head, before the sum over ``[batch, seq]``."""

    rows: np.ndarray
    """Each query's part, ``[batch, seq, heads]``."""
    terms: np.ndarray
    """Each query's sum of the absolute values of its terms."""
    shares: np.ndarray
    """The amount by which each query's part falls when its delta grows by 1."""

    @classmethod
    def zeros(cls, shape):
        return cls(*(np.zeros(shape) for _ in range(3)))

    @property
    def value(self):
        return self.rows.sum((0, 1))


@dataclass
class Dense(Gradients):
    """Output, lse and gradients, and the measures of their errors."""

    o: np.ndarray
    lse: np.ndarray
    is_short: bool = True
    """Whether o is kept in float32 for the backward pass."""
    terms: Gradients | None = None
    """Sums of the absolute values of the gradients' terms, where there are few keys."""
    least: float = CANCELS
    """The part of the terms by which an error is measured at least."""
    per_head: dict[str, PerHead] = field(default_factory=dict)
    """The gradients ``dz`` of the sinks and ``dslopes``, where the problem has sinks or slopes."""
    rounded: "Dense | None" = None
    """The results of the same computation that rounds to the inputs' 16 bits."""
    squares: dict[str, float] = field(default_factory=dict)
    """The sum of the squares of all terms of each result, in a computation that rounds."""


def dense(q, k, v, dout, dlse, *, causal, **features):
    """Computes attention and its gradients in float64::

        s = scale · q kᵀ;  capped: soft_cap · tanh(s / soft_cap)
        s += slope · (key position − query position);  −inf where masked
        lse = ln (Σ e^s + e^sink);  p = e^(s − lse);  w = p ∘ kept / (1 − rate);  o = w v
        delta = rowsum(dout ∘ o);  dv = wᵀ dout;  ds = p ∘ (dout vᵀ ∘ w / p − delta + dlse)
        dslope = Σ ds · (key position − query position);  dsink = Σ e^(sink − lse) (dlse − delta)
        capped: ds ∘= 1 − tanh²;  dq = scale · ds k;  dk = scale · dsᵀ q

    Arrays are ``[batch, seq, heads, head_dim]``, lse and dlse ``[batch, seq, heads]``. A query that
    sees no key has o = 0 and lse = −inf. `Features` lists the keyword arguments.
    """
    features = Features(causal=causal, **features)
    dtype = q.dtype
    q, k, v, dout, dlse = (np.asarray(x, np.float64) for x in (q, k, v, dout, dlse))
    if platforms.current().rounds and dtype.itemsize == 2 and features.rounded is None:
        out = _dense(q, k, v, dout, dlse, features)
        out.rounded = _dense(q, k, v, dout, dlse, replace(features, rounded=dtype))
        return out
    return _dense(q, k, v, dout, dlse, features)


def _dense(q, k, v, dout, dlse, features):
    if features.scale is None:
        features = replace(features, scale=q.shape[3] ** -0.5)
    out = Dense(*map(np.zeros_like, (q, k, v, dout)), lse=np.zeros(q.shape[:3]))
    out.is_short = k.shape[1] <= SHORT
    if features.is_plain and q.shape[1] == k.shape[1]:
        out.least = 0.0
    hides = (features.window, features.segments, features.visible)
    if k.shape[1] <= SHORT or any(x is not None for x in hides):
        out.terms = Gradients.zeros_like(q, k, v)
    per_head = {"dz": features.sinks, "dslopes": features.slopes}
    out.per_head = {n: PerHead.zeros(q.shape[:3]) for n, x in per_head.items() if x is not None}
    group, starts = q.shape[2] // k.shape[2], range(0, q.shape[1], ROWS)
    left, right = features.reach
    for b, h, start in itertools.product(range(q.shape[0]), range(q.shape[2]), starts):
        rows = (b, slice(start, min(start + ROWS, q.shape[1])), h)
        seen = slice(max(0, start - left), min(rows[1].stop + right, k.shape[1]))
        if features.positions is not None:
            seen = slice(0, k.shape[1])
        seen = (b, slice(min(seen.start, seen.stop), seen.stop), h // group)
        inputs = (q[rows], k[seen], v[seen], dout[rows], dlse[rows])
        _rows(out, rows, seen, inputs, features)
    return out


def _rows(out, rows, seen, inputs, features):
    """Adds the results of one block of queries, and its terms of all gradients."""
    q, k, v, dout, dlse = inputs
    (batch, queries, head), keys = rows, seen[1]
    s, cap_slope, distance = _scores(q, k, rows, keys, features)
    top = s.max(-1, keepdims=True, initial=-np.inf)
    sink = None if features.sinks is None else float(features.sinks[head])
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
    dropped = _dropped(features, batch, head, queries, keys)
    # A kernel sums the exact weights and rounds them for the product alone.
    weights = features.round(p * dropped) / total
    p /= total
    o = features.round(weights @ v)
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
    scale = features.scale
    ds *= cap_slope
    ds, weights = features.round(ds), features.round(p * dropped)
    _add(out, rows, seen, scale * (ds @ k), scale * (ds.T @ q), weights.T @ dout)
    if features.rounded is not None:
        factors = {"o": (weights, v), "dq": (scale * ds, k), "dk": (scale * ds.T, q)}
        for name, (a, b) in (factors | {"dv": (weights.T, dout)}).items():
            out.squares[name] = out.squares.get(name, 0.0) + float(((a**2) @ (b**2)).sum())
    if out.terms:
        ds = p * cap_slope * absolute
        dq, dk, dv = ds @ np.abs(k), ds.T @ np.abs(q), weights.T @ np.abs(dout)
        _add(out.terms, rows, seen, scale * dq, scale * dk, dv)


def _scores(q, k, rows, keys, features):
    """Returns s, −inf where masked; the cap's derivative; and distances, or None without slopes.

    A distance is key position − query position.
    """
    batch, queries, head = rows
    s = q @ k.T
    s *= features.scale
    cap_slope = 1.0
    if features.soft_cap is not None:
        s = np.tanh(s / features.soft_cap)
        cap_slope = 1 - s**2
        s *= features.soft_cap
    positions, of_keys = features.positions_of(batch, queries, keys)
    distance = of_keys - positions[:, None]
    left, right = features.reach
    masked = (distance < -left) | (distance > right)
    if features.visible is not None:
        start, stop = (
            np.asarray(x)[batch, keys].reshape(len(of_keys), -1) for x in features.visible
        )
        inside = (start <= positions[:, None, None]) & (positions[:, None, None] < stop)
        masked |= ~inside.any(-1)
    if features.slopes is not None:
        s += float(features.slopes[head]) * distance
    if features.segments is not None:
        ids, of_keys = (np.asarray(x)[batch] for x in features.segments)
        ids, of_keys = ids[queries, None], of_keys[None, keys]
        masked |= (ids != of_keys) | (ids < 0)
    s[masked] = -np.inf
    return s, cap_slope, None if features.slopes is None else distance


def _dropped(features, batch, head, queries, keys):
    """Returns the factors that dropout puts on the weights."""
    if features.dropout is None:
        return 1.0
    rate, words = features.dropout
    positions = features.positions_of(batch, queries, keys)
    return kept(rate, words, batch, head, *positions) / (1 - np.float64(np.float32(rate)))


def _add(gradients, rows, seen, dq, dk, dv):
    gradients.dq[rows] += dq
    gradients.dk[seen] += dk
    gradients.dv[seen] += dv


def _add_per_head(gradient, rows, *parts):
    for whole, part in zip((gradient.rows, gradient.terms, gradient.shares), parts, strict=True):
        whole[rows] += part


def error(name, found, expected):
    """Returns the norm of a result's error and the norm by which it is measured."""
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
    """Returns the norm of the error that rounding an exact result to ``dtype`` makes."""
    true = getattr(expected, name)
    return np.linalg.norm(true.astype(dtype).astype(np.float64) - true)


def cost(name, expected, dtype):
    """Returns the norm of the error that rounding to 16 bits within the computation makes.

    With few numbers the error of one run is chance, hence the second term: the expected norm if
    every term of a product were rounded independently.
    """
    made = np.linalg.norm(
        getattr(expected.rounded, name).astype(dtype).astype(np.float64) - getattr(expected, name)
    )
    independent = ROUNDING * float(ml_dtypes.finfo(dtype).eps)
    return np.hypot(made, independent * np.sqrt(expected.rounded.squares.get(name, 0.0)))
