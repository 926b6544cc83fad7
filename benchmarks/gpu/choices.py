"""Which kernels compute a problem on this GPU: why cuDNN or the fused kernel would not.

A call that asks for cuDNN's kernels takes the library's own where cuDNN does not serve, so a row
asks beforehand, and never times one in the name of the other.
"""

import json
from typing import Any

import jax

from .library import target_of
from .race import FLOP

FORWARD, BOTH = FLOP


def missing_of_cudnn(one: Any, order: str) -> dict[str, str]:
    """Returns by pass why cuDNN does not compute any tile of a problem."""
    from burst_attention import _confirmed

    device = jax.local_devices()[0]
    if device.platform != "gpu":
        return dict.fromkeys(FLOP, f"{device.device_kind} is no GPU")
    version = _confirmed.cudnn()
    if not version[:1].isdigit():
        return dict.fromkeys(FLOP, version)
    verdict = _confirmed.read(device.device_kind).get("cudnn", _confirmed.CONFIRMED)
    if verdict != _confirmed.CONFIRMED:
        return dict.fromkeys(FLOP, f"`check` found it wrong: {verdict}")
    return refused_by_cudnn(one, order, _target(device))


def missing_of_fused(one: Any) -> dict[str, str]:
    """Returns, under the pass with gradients, why sums in any order change nothing."""
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        return {}
    if is_fused(one, _target(device)):
        return {}
    return {BOTH: f"two kernels compute gradients of {one.head_dim} columns on this GPU"}


def refused_by_cudnn(one: Any, order: str, target: str) -> dict[str, str]:
    """Returns by pass why cuDNN would not compute any tile of a problem on a kind of GPU."""
    found = zip(FLOP, _backends(one, order, "cudnn", target), strict=True)
    return {which: refused for which, each in found if (refused := _refusal(each))}


def is_fused(one: Any, target: str) -> bool:
    """Whether one kernel computes all gradients of a problem, with sums in any order."""
    _, backward = _backends(one, "any", "tile", target)
    return all(each["operation"] != "query_grads" for each in backward)


def _target(device: Any) -> str:
    """Returns the target of a GPU."""
    major, minor = map(int, str(device.compute_capability).split("."))
    return target_of((major, minor))


def _refusal(operations: list[dict[str, Any]]) -> str | None:
    """Returns why cuDNN computes no operation of a pass, or None if it computes some."""
    if any(each["backend"] == "cudnn" for each in operations):
        return None
    reasons = [
        refused["reason"]
        for each in operations
        for refused in each["refusals"]
        if refused["backend"] == "cudnn"
    ]
    return "; ".join(dict.fromkeys(reasons)) or "it serves no operation of this pass"


def _backends(one: Any, order: str, kernels: str, target: str) -> list[list[dict[str, Any]]]:
    """Returns the operations of both passes, each with its backend and with refusals."""
    from burst_attention import _ffi

    ranks = one.mesh[1]
    left, right = one.window or (None, None)
    names = ("batch", "heads", "kv_heads", "head_dim", "value_dim", "dtype", "layout")
    question = {name: getattr(one, name) for name in names} | {
        "ask": "backends",
        "schedule": "ring",
        "ranks_per_node": 1,
        "world_size": ranks,
        "q_len": one.q_len // ranks,
        "kv_len": one.kv_len // ranks,
        "window": {"left": left, "right": 0 if one.causal else right},
        "softmax_scale": one.head_dim**-0.5,
        "backward": "keys",
        "backward_order": order,
        "kernels": kernels,
        "target": target,
    }
    answer: dict[str, Any] = _ffi.ask(json.dumps(question))
    return [each["operations"] for each in answer["passes"]]
