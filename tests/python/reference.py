"""Dense attention in float64: what the ring's results are held against."""

import itertools
from dataclasses import dataclass

import numpy as np

ROWS = 128
SHORT = 256
"""Up to this length, terms are computed too: later no gradient all but vanishes."""
VANISHES = 1e-2
"""A gradient smaller than this part of its terms is all cancellation."""


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
class Dense(Gradients):
    """Output, lse and gradients, and for short sequences what their error may be measured by."""

    o: np.ndarray
    lse: np.ndarray
    terms: Gradients | None = None
    """Sums of the absolute values of what the gradients are sums of."""


def dense(q, k, v, dout, dlse, *, causal, scale=None):
    """Attention and its gradients, written out::

        s = scale · q kᵀ;  lse = ln Σ e^s;  p = e^(s − lse);  o = p v
        dv = pᵀ dout;  ds = p ∘ (dout vᵀ − delta + dlse),  delta = rowsum(dout ∘ o)
        dq = scale · ds k;  dk = scale · dsᵀ q

    Arrays are ``[batch, seq, heads, head_dim]``, lse and dlse ``[batch, seq, heads]``.
    """
    q, k, v, dout, dlse = (np.asarray(x, np.float64) for x in (q, k, v, dout, dlse))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    zeros = [np.zeros_like(x) for x in (q, k, v, q)]
    out = Dense(*zeros, lse=np.zeros(q.shape[:3]))
    if q.shape[1] <= SHORT:
        out.terms = Gradients.zeros_like(q, k, v)
    group, starts = q.shape[2] // k.shape[2], range(0, q.shape[1], ROWS)
    for b, h, start in itertools.product(range(q.shape[0]), range(q.shape[2]), starts):
        rows = (b, slice(start, start + ROWS), h)
        seen = (b, slice(start + ROWS if causal else None), h // group)
        inputs = (q[rows], k[seen], v[seen], dout[rows], dlse[rows])
        _rows(out, rows, seen, inputs, scale, start if causal else None)
    return out


def _rows(out, rows, seen, inputs, scale, causal_from):
    """One block of queries against all keys that it sees."""
    q, k, v, dout, dlse = inputs
    p = q @ k.T
    p *= scale
    if causal_from is not None:
        p[np.arange(len(k))[None, :] > causal_from + np.arange(len(q))[:, None]] = -np.inf
    top = p.max(-1, keepdims=True)
    p -= top
    np.exp(p, out=p)
    total = p.sum(-1, keepdims=True)
    p /= total
    o = p @ v
    out.lse[rows] = (top + np.log(total))[:, 0]
    out.o[rows] = o
    shift = dlse - (dout * o).sum(-1)
    ds = dout @ v.T
    absolute = np.abs(ds) if out.terms else None
    ds += shift[:, None]
    ds *= p
    _add(out, rows, seen, scale * (ds @ k), scale * (ds.T @ q), p.T @ dout)
    if out.terms:
        ds = p * (absolute + np.abs(shift)[:, None])
        dq, dk, dv = ds @ np.abs(k), ds.T @ np.abs(q), p.T @ np.abs(dout)
        _add(out.terms, rows, seen, scale * dq, scale * dk, dv)


def _add(gradients, rows, seen, dq, dk, dv):
    gradients.dq[rows] += dq
    gradients.dk[seen] += dk
    gradients.dv[seen] += dv


def error(name, found, expected):
    """(norm of the error, norm that it is measured against)."""
    true = getattr(expected, name)
    found = np.asarray(found).astype(np.float64)
    assert found.shape == true.shape
    size, terms = np.linalg.norm(true), getattr(expected.terms, name, 0.0)
    terms = np.linalg.norm(terms)
    return np.linalg.norm(found - true), terms if size < VANISHES * terms else size


def rounding(name, expected, dtype):
    """Norm of the error of an exact computation that rounds its inputs and results to ``dtype``."""
    true = getattr(expected, name)
    return np.linalg.norm(true.astype(dtype).astype(np.float64) - true)
