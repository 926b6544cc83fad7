"""Our kernels against float64 on small problems, beside cuDNN on the same inputs."""

from dataclasses import dataclass
from typing import Any

from .library import Driver
from .ours import ANY, Attention

CAUSAL = (-(2**63), 0)
BAR = 1.5
"""Our relative error may be so many times that of cuDNN."""
ROUNDINGS = {"bf16": 2.0**-8, "f16": 2.0**-11}
ALONE = 1.5
"""Where cuDNN has no such mask: error in units of the type's largest rounding error."""


@dataclass(frozen=True)
class Check:
    """A small problem; `band` limits key row − query row."""

    name: str
    element: str = "bf16"
    batch: int = 2
    q_len: int = 512
    kv_len: int = 512
    heads: int = 4
    kv_heads: int = 4
    dim: int = 128
    band: tuple[int, int] = ANY
    steps: int = 1
    dlse: bool = False


CHECKS = [
    *(Check(f"{e} D{d} {name}", e, dim=d, band=band)
      for e in ("bf16", "f16") for d in (64, 128, 256)
      for name, band in (("full", ANY), ("causal", CAUSAL))),
    Check("padded head dimension", dim=96, band=CAUSAL),
    Check("grouped heads", heads=8, kv_heads=2, band=CAUSAL),
    Check("ragged lengths", q_len=333, kv_len=333, band=CAUSAL),
    Check("one row", q_len=1, kv_len=77),
    Check("window", band=(-100, 30)),
    Check("rows that see nothing", band=(-(2**63), -200)),
    Check("three steps", band=CAUSAL, steps=3),
    Check("lse has a gradient", band=CAUSAL, dlse=True),
]  # fmt: skip


def check(case: Check, driver: Driver) -> dict[str, Any]:
    """Errors of ours and of cuDNN, relative in the norm, and whether the bar holds."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(1)
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[case.element]

    def random(length: int, heads: int) -> Any:
        shape = (case.batch, length, heads, case.dim)
        return torch.randn(shape, device="cuda", generator=generator).to(dtype)

    q, dout = random(case.q_len, case.heads), random(case.q_len, case.heads)
    k, v = random(case.kv_len, case.kv_heads), random(case.kv_len, case.kv_heads)
    dlse = None
    if case.dlse:
        shape = (case.batch, case.q_len, case.heads)
        dlse = torch.randn(shape, device="cuda", generator=generator)
    ours = Attention(driver, q, k, v, case.band, dout, dlse)
    forward = ours.forward() if case.steps == 1 else ours.forward_in_steps(case.steps)
    forward()
    ours.backward()()
    torch.cuda.synchronize()
    exact = reference(q, k, v, dout, dlse, case.band)
    got = {"o": ours.o, "dq": ours.dq, "dk": ours.dk, "dv": ours.dv}
    errors = {name: relative(got[name], exact[name]) for name in got}
    finite = exact["lse"].isfinite()
    errors["lse"] = float((ours.lse.double() - exact["lse"])[finite].abs().max())
    same_empty = bool((ours.lse.isinf() == exact["lse"].isinf()).all())
    peer = cudnn_errors(case, q, k, v, dout, exact)
    limits = {name: BAR * peer[name] if peer else ALONE * ROUNDINGS[case.element] for name in got}
    limits["lse"] = 1e-4
    failed = [name for name in errors if not errors[name] <= limits[name]]
    return {
        "case": case.name,
        "errors": errors,
        "cudnn": peer,
        "passed": not failed and same_empty,
        "failed": failed + ([] if same_empty else ["rows that see nothing"]),
    }


def relative(got: Any, exact: Any) -> float:
    """‖got − exact‖ / ‖exact‖; NaN if anything is."""
    return float((got.double() - exact).norm() / exact.norm())


def reference(
    q: Any, k: Any, v: Any, dout: Any, dlse: Any, band: tuple[int, int]
) -> dict[str, Any]:
    """Dense attention and its gradients in float64."""
    import torch

    group = q.shape[2] // k.shape[2]
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    heads = [inputs[0], *(x.repeat_interleave(group, 2) for x in inputs[1:])]
    qh, kh, vh = (x.transpose(1, 2) for x in heads)
    logits = qh @ kh.mT * q.shape[-1] ** -0.5
    rows = torch.arange(q.shape[1], device=q.device)[:, None]
    diagonal = torch.arange(k.shape[1], device=q.device)[None, :] - rows
    seen = (diagonal >= band[0]) & (diagonal <= band[1])
    some = seen.any(-1, keepdim=True)
    logits = logits.masked_fill(~seen & some, -torch.inf)
    lse = torch.logsumexp(logits, -1)
    weights = torch.exp(logits - lse[..., None]) * some
    o = (weights @ vh).transpose(1, 2)
    loss = (o * dout.double()).sum()
    if dlse is not None:
        loss = loss + (lse.transpose(1, 2) * some.squeeze(-1)[None, :, None] * dlse.double()).sum()
    dq, dk, dv = torch.autograd.grad(loss, inputs)
    lse = lse.masked_fill(~some.squeeze(-1), -torch.inf).transpose(1, 2)
    return {"o": o.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}


def cudnn_errors(
    case: Check, q: Any, k: Any, v: Any, dout: Any, exact: dict[str, Any]
) -> dict[str, float] | None:
    """cuDNN's errors, where it has the mask and the shape."""
    import torch

    if case.band not in (ANY, CAUSAL) or case.dlse or case.q_len == 1:
        return None
    inputs = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            o = torch.nn.functional.scaled_dot_product_attention(
                *inputs, is_causal=case.band == CAUSAL, enable_gqa=case.heads != case.kv_heads
            )
        grads = torch.autograd.grad(o, inputs, dout.transpose(1, 2))
    except RuntimeError:  # cuDNN has no kernel for this shape
        return None
    got = dict(zip(("dq", "dk", "dv"), grads, strict=True)) | {"o": o.detach()}
    return {name: relative(x.transpose(1, 2), exact[name]) for name, x in got.items()}
