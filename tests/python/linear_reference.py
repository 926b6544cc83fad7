"""Linear attention token by token in float64: the definition, with all gradients."""

import numpy as np


def recurrence(q, k, v, log_decay, first, dout, dlast, scale=1.0):
    """Returns o, state, dq, dk, dv, dlog_decay and dfirst by name::

        S_t = λ_t S_(t−1) + k_t v_tᵀ;  o_t = scale · q_tᵀ S_t
        D_(t−1) = λ_t (D_t + scale · q_t dout_tᵀ)

    ``first`` is the state before the first token, ``dlast`` the gradient of the state after the
    last one. Heads of q, k and v serve equally many heads of the result.
    """
    own = [np.asarray(x, np.float64) for x in (q, k, v)]
    log_decay, dout = (np.asarray(x, np.float64) for x in (log_decay, dout))
    heads = log_decay.shape[2]
    queries, keys, values = (np.repeat(x, heads // x.shape[2], axis=2) for x in own)
    q = scale * queries
    decay, length = np.exp(log_decay), q.shape[1]
    states = [np.asarray(first, np.float64)]
    o = np.empty((*q.shape[:3], v.shape[3]))
    for t in range(length):
        outer = keys[:, t, :, :, None] * values[:, t, :, None, :]
        states.append(decay[:, t, :, None, None] * states[-1] + outer)
        o[:, t] = np.einsum("bhk,bhkv->bhv", q[:, t], states[-1])
    dq, dk, dv, dlogs = (np.empty_like(x) for x in (q, keys, values, log_decay))
    d = np.asarray(dlast, np.float64)
    for t in reversed(range(length)):
        d = d + q[:, t, :, :, None] * dout[:, t, :, None, :]
        dq[:, t] = np.einsum("bhkv,bhv->bhk", states[t + 1], dout[:, t])
        dk[:, t] = np.einsum("bhkv,bhv->bhk", d, values[:, t])
        dv[:, t] = np.einsum("bhkv,bhk->bhv", d, keys[:, t])
        dlogs[:, t] = decay[:, t] * np.einsum("bhkv,bhkv->bh", states[t], d)
        d = decay[:, t, :, None, None] * d
    dq, dk, dv = (
        x.reshape(*y.shape[:3], -1, y.shape[3]).sum(axis=3)
        for x, y in zip((scale * dq, dk, dv), own, strict=True)
    )
    found = {"o": o, "state": states[-1], "dq": dq, "dk": dk, "dv": dv}
    return found | {"dlog_decay": dlogs, "dfirst": d}
