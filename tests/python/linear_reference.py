"""Recurrences token by token in float64: the definitions, with all gradients."""

import numpy as np


def recurrence(q, k, v, log_decay, first, dout, dlast, scale=1.0, beta=None):
    """Returns o, state, dq, dk, dv, dlog_decay, dfirst and with ``beta`` dbeta by name::

        S_t = α_t ∘ S_(t−1) + k_t u_tᵀ;  o_t = scale · q_tᵀ S_t
        u_t = v_t, or with beta β_t (v_t − (α_t ∘ S_(t−1))ᵀ k_t)

    α = exp(log_decay), of a head or of each row of S. ``first`` is the state before the first
    token, ``dlast`` the gradient of the state after the last one. Heads of q, k and v serve equally
    many heads of the result.
    """
    own = [np.asarray(x, np.float64) for x in (q, k, v)]
    log_decay, dout = (np.asarray(x, np.float64) for x in (log_decay, dout))
    heads, length = log_decay.shape[2], log_decay.shape[1]
    queries, keys, values = (np.repeat(x, heads // x.shape[2], axis=2) for x in own)
    q, decay = scale * queries, np.exp(log_decay)
    decay = decay[..., None] if log_decay.ndim == 4 else decay[..., None, None]
    states, written, missed = [np.asarray(first, np.float64)], [], []
    o = np.empty((*q.shape[:3], v.shape[3]))
    for t in range(length):
        state, u = decay[:, t] * states[-1], values[:, t]
        if beta is not None:
            missed.append(u - np.einsum("bhk,bhkv->bhv", keys[:, t], state))
            u = np.float64(beta[:, t])[..., None] * missed[t]
        written.append(u)
        states.append(state + keys[:, t, :, :, None] * u[:, :, None, :])
        o[:, t] = np.einsum("bhk,bhkv->bhv", q[:, t], states[-1])
    dq, dk, dv, dlogs = (np.empty_like(x) for x in (q, keys, values, log_decay))
    dbeta = None if beta is None else np.empty(beta.shape)
    d = np.asarray(dlast, np.float64)
    for t in reversed(range(length)):
        d = d + q[:, t, :, :, None] * dout[:, t, :, None, :]
        dq[:, t] = np.einsum("bhkv,bhv->bhk", states[t + 1], dout[:, t])
        dk[:, t] = np.einsum("bhkv,bhv->bhk", d, written[t])
        dv[:, t] = np.einsum("bhkv,bhk->bhv", d, keys[:, t])
        faded = decay[:, t] * states[t]
        if beta is not None:
            dbeta[:, t] = np.einsum("bhv,bhv->bh", dv[:, t], missed[t])
            dv[:, t] *= beta[:, t, :, None]
            dk[:, t] -= np.einsum("bhkv,bhv->bhk", faded, dv[:, t])
            d = d - keys[:, t, :, :, None] * dv[:, t, :, None, :]
        of_channels = np.einsum("bhkv,bhkv->bhk", faded, d)
        dlogs[:, t] = of_channels if log_decay.ndim == 4 else of_channels.sum(axis=2)
        d = decay[:, t] * d
    dq, dk, dv = (
        x.reshape(*y.shape[:3], -1, y.shape[3]).sum(axis=3)
        for x, y in zip((scale * dq, dk, dv), own, strict=True)
    )
    found = {"o": o, "state": states[-1], "dq": dq, "dk": dk, "dv": dv}
    found |= {"dlog_decay": dlogs, "dfirst": d}
    return found if beta is None else found | {"dbeta": dbeta}
