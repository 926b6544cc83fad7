"""The timed programs: our attention, jax.nn's and torch's, on the same numbers."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import burst_attention as ba
import jax
import jax.numpy as jnp
from cases import Case
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

PAIR = ("node", "context")
"""The axes of the sequence of a double ring."""


@dataclass(frozen=True)
class Contender:
    """Two compiled programs with their inputs in place. A call returns when its work is done."""

    name: str
    forward: Callable[[], Any]
    both: Callable[[], Any]

    def program(self, which: str) -> Callable[[], Any]:
        """Returns the program of the forward pass, or of `both` passes."""
        return self.forward if which == "forward" else self.both


def ours(case: Case, name: str = "ours") -> Contender:
    """Returns `burst_attention.attention` inside shard_map over the case's mesh."""
    data, context, tensor = case.mesh
    axis: Any = PAIR if case.inner else "context"
    sizes = {"data": data, "context": context, "tensor": tensor}
    if case.inner:
        sizes = {"data": data, "node": context // case.inner, "context": case.inner}
        sizes["tensor"] = tensor
    devices = jax.devices()[: data * context * tensor]
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=devices)
    rows, spec = P("data", axis), P("data", axis, "tensor", None)
    extras, ids = {}, case.segment_ids()
    if ids is not None:
        layout: Any = case.layout
        stored = ba.to_layout(ids, context, layout)
        extras["segment_ids"] = jax.device_put(stored, NamedSharding(mesh, rows))

    def local(q: jax.Array, k: jax.Array, v: jax.Array, extras: dict[str, Any]) -> jax.Array:
        return ba.attention(q, k, v, axis_name=axis, **case.options(), **extras)

    sharded = jax.shard_map(local, mesh=mesh, in_specs=(spec, spec, spec, rows), out_specs=spec)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return sharded(q, k, v, extras)

    return compiled(name, attend, *_placed(case, NamedSharding(mesh, spec)))


def jax_nn(case: Case) -> Contender:
    """Returns XLA's own attention, which writes all logits to memory."""
    attend = partial(jax.nn.dot_product_attention, is_causal=case.causal)
    return compiled("jax.nn", attend, *_placed(case, jax.devices()[0]))


def jax_nn_bytes(case: Case) -> int:
    """Estimates the memory of `jax_nn`, both passes: four arrays of logits in float32."""
    return 4 * 4 * case.batch * case.heads * case.seq**2


def _placed(case: Case, place: Any) -> list[jax.Array]:
    """Returns q, k, v and dout of a case in their place."""
    dtype = jnp.dtype(case.dtype)
    return [jax.device_put(x.astype(dtype), place) for x in case.arrays()]


def compiled(name: str, attend: Callable[..., jax.Array], *arrays: Any) -> Contender:
    """Returns the compiled programs of a function; the last of its arrays is its cotangent."""
    *inputs, dout = arrays

    def forward_backward(dout: jax.Array, *inputs: Any) -> Any:
        out, vjp = jax.vjp(attend, *inputs)
        return out, vjp(dout)

    forward = jax.jit(attend).lower(*inputs).compile()
    both = jax.jit(forward_backward).lower(dout, *inputs).compile()
    return Contender(
        name,
        lambda: jax.block_until_ready(forward(*inputs)),
        lambda: jax.block_until_ready(both(dout, *inputs)),
    )


def torch_available() -> bool:
    """Whether this Python has torch."""
    try:
        import torch  # noqa: F401
    except ImportError:
        return False
    return True


def torch_sdpa(case: Case) -> Contender:
    """Returns torch's `scaled_dot_product_attention` on all cores, in its fastest layout."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    dtype = getattr(torch, case.dtype)
    q, k, v, dout = (
        torch.from_numpy(x).to(dtype).transpose(1, 2).contiguous() for x in case.arrays()
    )
    attend = partial(
        torch.nn.functional.scaled_dot_product_attention,
        is_causal=case.causal,
        enable_gqa=case.heads != case.kv_heads,
    )

    def forward() -> Any:
        with torch.no_grad():
            return attend(q, k, v)

    def both() -> Any:
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attend(*inputs)
        return out, torch.autograd.grad(out, inputs, dout)

    return Contender("torch", forward, both)
