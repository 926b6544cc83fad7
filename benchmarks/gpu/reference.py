"""Dense attention and its gradients in float64, by torch on the GPU.

The reference of the tests, tests/python/reference.py, needs NumPy; the Python that runs this
benchmark needs only torch and cuda-bindings.
"""

from typing import Any

from .ours import Band

LOG2E = 1.4426950408889634
HUGE = 1.0e38
"""lse in base 2 of a row that sees no key, as the kernels write it."""


def visible(q: Any, k: Any, band: Band, segments: tuple[Any, Any] | None) -> Any:
    """Returns whether each query sees each key, [batch or 1, 1, q_len, kv_len]."""
    import torch

    queries = torch.arange(q.shape[1], device=q.device)[:, None]
    diagonal = torch.arange(k.shape[1], device=q.device)[None, :] - queries
    seen = ((diagonal >= band[0]) & (diagonal <= band[1]))[None, None]
    if segments is None:
        return seen
    of_q, of_k = (x.long() for x in segments)
    same = (of_q[:, :, None] == of_k[:, None, :]) & (of_q >= 0)[:, :, None]
    return seen & same[:, None]


def exact(arrays: dict[str, Any], band: Band, soft_cap: float) -> dict[str, Any]:
    """Returns o, lse, dq, dk and dv from q, k, v, dout and, if given, dlse and segments.

    s = q·k / √d, with a cap c · tanh(s / c); lse = log Σ exp s over visible keys, −inf for a row
    without any; o = Σ exp(s − lse) v. The gradients are those of Σ o ∘ dout + Σ lse ∘ dlse.
    """
    import torch

    q, k, v = (arrays[name].double().requires_grad_() for name in ("q", "k", "v"))
    group = q.shape[2] // k.shape[2]
    keys, values = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    scores = q.transpose(1, 2) @ keys.mT * q.shape[-1] ** -0.5
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    segments = (arrays["q_segments"], arrays["kv_segments"]) if "q_segments" in arrays else None
    seen = visible(q, k, band, segments)
    some = seen.any(-1, keepdim=True)
    # A row that sees no key stays unmasked and has weight 0: no NaN, no gradient.
    scores = scores.masked_fill(~seen & some, -torch.inf)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    o = ((torch.exp(scores - lse) * some) @ values).transpose(1, 2)
    lse_rows = lse.squeeze(-1).transpose(1, 2)
    some_rows = some.squeeze(-1).transpose(1, 2).expand_as(lse_rows)
    loss = (o * arrays["dout"].double()).sum()
    if "dlse" in arrays:
        loss = loss + (lse_rows * some_rows * arrays["dlse"].double()).sum()
    dq, dk, dv = torch.autograd.grad(loss, (q, k, v))
    lse_rows = lse_rows.detach().masked_fill(~some_rows, -torch.inf)
    return {"o": o.detach(), "lse": lse_rows, "dq": dq, "dk": dk, "dv": dv}


def statistics(arrays: dict[str, Any]) -> dict[str, Any]:
    """Returns lse_log2 and delta, float64 [batch, heads, rows], from o, dout, lse and dlse."""
    delta = (arrays["o"].double() * arrays["dout"].double()).sum(-1)
    if "dlse" in arrays:
        delta = delta - arrays["dlse"].double()
    lse = arrays["lse"].double()
    lse_log2 = (lse * LOG2E).masked_fill(lse.isneginf(), HUGE)
    return {name: x.transpose(1, 2) for name, x in (("lse_log2", lse_log2), ("delta", delta))}


def relative(got: Any, wanted: Any) -> float:
    """Returns ‖got − wanted‖ / ‖wanted‖ in float64, or ‖got‖ for ‖wanted‖ = 0; NaN gives NaN."""
    norm = float(wanted.norm())
    return float((got.double() - wanted).norm()) / (norm or 1.0)
