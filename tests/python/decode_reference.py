"""Decoding in float64: dense attention over each whole sequence."""

import numpy as np


def dense(q, k, v, lengths, *, counts=None, window=None, soft_cap=None, slopes=None, sinks=None):
    """Returns o and lse of the new tokens q, ``[batch, T, heads, head_dim]``.

    k and v hold whole sequences, ``[batch, seq, kv_heads, dim]``. Query t of entry b stands at
    position lengths[b] − counts[b] + t and sees the keys up to it.
    """
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    batch, tokens, heads, head_dim = q.shape
    counts = np.full(batch, tokens) if counts is None else counts
    o = np.zeros((*q.shape[:3], v.shape[3]))
    lse = np.full(q.shape[:3], -np.inf)
    for b, t, h in np.ndindex(*lse.shape):
        place = int(lengths[b] - counts[b] + t)
        keys = np.arange(max(0, min(place + 1, lengths[b], k.shape[1])))
        if window is not None:
            keys = keys[keys >= place - window]
        row = (b, keys, h * k.shape[2] // heads)
        s = k[row] @ q[b, t, h] * head_dim**-0.5
        if soft_cap is not None:
            s = soft_cap * np.tanh(s / soft_cap)
        if slopes is not None:
            s += float(slopes[h]) * (keys - place)
        if place < 0 or t >= counts[b]:
            s, row = s[:0], (b, keys[:0], row[2])
        terms = s if sinks is None else np.append(s, float(sinks[h]))
        if terms.size:
            lse[b, t, h] = np.logaddexp.reduce(terms)
        o[b, t, h] = np.exp(s - lse[b, t, h]) @ v[row] if s.size else 0
    return o, lse
