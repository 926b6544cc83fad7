"""The peers: torch's attention, by cuDNN or flash attention, and jax.nn's attention."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

from .library import AbsentError

BACKENDS = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION"}


class Torch:
    """scaled_dot_product_attention by one backend, on the memory of [batch, seq, heads, dim].

    Raises `AbsentError` with torch's reasons if the backend can't compute the problem. If the
    backend has no grouped heads, the constructor repeats key and value, and `repeated` is true.
    """

    def __init__(self, backend: str, q: Any, k: Any, v: Any, causal: bool):
        self._backend, self._causal = backend, causal
        self._inputs = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
        self._group = q.shape[2] // k.shape[2]
        self.repeated = False
        try:
            self._attempt()
        except AbsentError:
            if self._group == 1:
                raise
            self._inputs[1:] = [
                x.detach().repeat_interleave(self._group, 1).requires_grad_()
                for x in self._inputs[1:]
            ]
            self.repeated = True
            self._attempt()

    def forward(self) -> Any:
        """Returns o, [batch, heads, seq, dim]; keeps lse for a backward pass, as ours does."""
        return self._call()

    def backward(self, dout: Any) -> Callable[[], Any]:
        """Returns a function that computes dq, dk and dv; runs the forward pass first."""
        import torch

        o, gradient = _or_absent(self._call), dout.transpose(1, 2)

        def run() -> Any:
            return torch.autograd.grad(o, self._inputs, gradient, retain_graph=True)

        _or_absent(run)
        return run

    def _call(self) -> Any:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(getattr(SDPBackend, BACKENDS[self._backend])):
            return torch.nn.functional.scaled_dot_product_attention(
                *self._inputs,
                is_causal=self._causal,
                enable_gqa=self._group > 1 and not self.repeated,
            )

    def _attempt(self) -> None:
        _or_absent(self.forward)


def _or_absent(call: Callable[[], Any]) -> Any:
    """Returns the finished result of a call; raises `AbsentError` with the reason of a failure."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = call()
            torch.cuda.synchronize()
        except Exception as error:  # any type of error: a peer may fail
            reasons = [str(warning.message) for warning in caught]
            raise AbsentError(" ".join([str(error).split("\n")[0], *reasons])[:500]) from error
    return found


def results(backend: str, arrays: dict[str, Any], causal: bool) -> dict[str, Any]:
    """Returns o, dq, dk and dv, or fewer if the backend can't compute all of them."""
    found = {}
    try:
        peer = Torch(backend, arrays["q"], arrays["k"], arrays["v"], causal)
        if not peer.repeated:
            found["o"] = peer.forward().detach().transpose(1, 2)
            gradients = peer.backward(arrays["dout"])()
            names = ("dq", "dk", "dv")
            found |= {n: x.transpose(1, 2) for n, x in zip(names, gradients, strict=True)}
    except AbsentError:
        pass
    return found


class Jax:
    """jax.nn.dot_product_attention by cuDNN on random numbers; calls return at once."""

    def __init__(self, q_shape: tuple[int, ...], kv_shape: tuple[int, ...], causal: bool):
        try:
            import jax
            import jax.numpy as jnp

            device = jax.devices("gpu")[0]
        except (ImportError, RuntimeError) as error:
            raise AbsentError(f"jax sees no GPU: {error}") from error
        self.version: str = jax.__version__
        with jax.default_device(device):
            keys = jax.random.split(jax.random.key(0), 4)
            shapes = (q_shape, kv_shape, kv_shape, q_shape)
            *qkv, dout = (
                jax.random.normal(key, shape, jnp.bfloat16)
                for key, shape in zip(keys, shapes, strict=True)
            )
        attend = functools.partial(
            jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn"
        )

        def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
            o, vjp = jax.vjp(attend, q, k, v)
            return o, vjp(dout)

        forward, forward_backward = jax.jit(attend), jax.jit(both)
        self.forward: Callable[[], Any] = lambda: forward(*qkv)
        self.both: Callable[[], Any] = lambda: forward_backward(*qkv, dout)
        try:
            for call in (self.forward, self.both):
                self.wait(call())
        except Exception as error:  # any type of error: a peer may fail
            raise AbsentError(f"jax.nn can't: {error}"[:500]) from error

    def wait(self, result: Any) -> None:
        """Waits for the result."""
        import jax

        jax.block_until_ready(result)
