"""Rows of linear attention, the delta rule and Infini-attention."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .library import AbsentError
from .problems import Rows
from .race import Contender, arrays_of
from .session import LostError, Session, UnusableError, module

PEER = "flash-linear-attention"
PEER_S = 90.0
"""Seconds in which the peer must answer. It compiles in its first call."""


@dataclass(frozen=True)
class PeerPass:
    """A pass of the peer, which computes in a process of its own, with torch."""

    session: Session
    which: str

    def __call__(self) -> None:
        """Computes it once."""
        self.milliseconds(1)

    def milliseconds(self, calls: int) -> float:
        """Returns the time of some calls in a row."""
        item = {"part": "milliseconds", "which": self.which, "calls": calls}
        return float(_result(self.session.ask(item, PEER_S)))


@dataclass
class Peer(Contender):
    """The delta rule of flash-linear-attention on random inputs of some shape."""

    session: Session = field(default_factory=lambda: Session(None, module("gpu.delta_peer")))

    def program(self, which: str) -> Callable[[], Any]:
        """Returns a pass; raises `AbsentError` where torch or the package is not installed."""
        try:
            self.session.start(PEER_S)
        except (UnusableError, LostError) as why:
            raise AbsentError(str(why)) from why
        _result(self.session.ask({"part": "prepare", **self.given}, PEER_S))
        return PeerPass(self.session, which)

    def close(self) -> None:
        """Ends its process."""
        self.session.close()


class RecurrentRows(Rows):
    """Rows of recurrences."""

    def linear(self, channels: bool) -> dict[str, Any]:
        """Times linear attention against plain JAX in chunks."""
        from linear_programs import CHUNKS, chunked, ours

        contenders: dict[str, Any] = {"ours": lambda *x: ours(1, *x[:4])}
        if channels:
            contenders["decays of heads"] = lambda *x: ours(1, *x[:3], x[3][..., 0])
        else:
            for chunk in CHUNKS:
                plain = partial(chunked, chunk, again=True)
                contenders[f"plain JAX, chunks of {chunk}"] = lambda *x, run=plain: run(*x[:4])
        return self._recurrence(contenders, channels)

    def delta(self, channels: bool, **sizes: int) -> dict[str, Any]:
        """Times the delta rule against plain JAX in chunks, or in the sizes of its peers."""
        from delta_programs import CHUNKS, chunked, ours

        contenders: dict[str, Any] = {"ours": partial(ours, 1)}
        if not sizes:
            contenders |= {
                f"plain JAX, chunks of {chunk}": partial(_in_float32, partial(chunked, chunk))
                for chunk in CHUNKS
            }
        return self._recurrence(contenders, channels, **sizes)

    def infini(self) -> dict[str, Any]:
        """Times Infini-attention against the sum of its parts."""
        from delta_programs import INFINI

        row = self._recurrence({name: function for name, (function, _) in INFINI.items()})
        for which, found in row["passes"].items():
            ours, *parts = (each["ms"] for each in found["contenders"].values())
            found["ratio"] = ours / sum(parts)
            row["shown"].append(f"{which}: {found['ratio']:.2f} × the sum of its parts")
        return row

    def _recurrence(
        self,
        programs: dict[str, Callable[..., Any]],
        channels: bool = False,
        **sizes: int,
    ) -> dict[str, Any]:
        """Times programs of q, k, v, log decays and β, as many as they take.

        With ``sizes``, flash-linear-attention computes the same shapes where it is installed.
        """
        shape = {"batch": 1, "tokens": 32768, "heads": 8, "head_dim": 64} | sizes
        if self._quick:
            small = {"batch": 1, "tokens": 64, "heads": 1, "head_dim": 64}
            shape |= small if sizes else {"tokens": 4096}
        length, heads = shape["tokens"], shape["heads"]
        one = self._problem("equal", length, 1, head_dim=shape["head_dim"], batch=shape["batch"])
        one = replace(one, q_len=length, kv_len=length, heads=heads, kv_heads=heads)
        q, k, v, dout, _ = arrays_of(one).values()
        k = (k / jnp.linalg.norm(k, axis=3, keepdims=True)).astype(k.dtype)
        logs = jnp.full(q.shape if channels else q.shape[:3], jnp.log(0.99))
        beta = jax.nn.sigmoid(jax.random.normal(jax.random.key(9), q.shape[:3]))

        def contender(attend: Callable[..., Any]) -> Contender:
            def both(*inputs: Any) -> Any:
                out, pullback = jax.vjp(attend, *inputs)
                return out, *pullback(dout.astype(out.dtype))

            return Contender(both, [q, k, v, logs, beta], restored=None)

        contenders = {name: contender(each) for name, each in programs.items()}
        if not sizes:
            return self._race(contenders)
        given = shape | {"channels": channels}
        peer = Peer(_nothing, given, restored=None, is_optional=True)
        try:
            return self._race(contenders | {PEER: peer})
        finally:
            peer.close()


def _in_float32(function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    return function(*(x.astype(jnp.float32) for x in arrays))  # as systems need


def _nothing() -> None:
    """Stands for the function of a contender that computes in another process."""


def _result(answer: dict[str, Any]) -> Any:
    """Returns the result of another process, or raises its reason for having none."""
    if "result" not in answer:
        raise AbsentError(str(answer.get("absent", answer.get("error"))))
    return answer["result"]
