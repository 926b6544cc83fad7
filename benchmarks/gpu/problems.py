"""What the rows of `ring_gpu.py` share: their problems, and attention on one device."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import AxisType

from .race import Contender, race

RANKS = 8
TOKENS = 32768
"""Tokens of a layer's batch, unless one sequence is longer."""
ROOMY = 60e9
"""Bytes of a device that holds 32 heads of 64K tokens twice, with gradients."""


class Rows:
    """Rows of one family; the methods are named like the kinds of rows."""

    def __init__(self, quick: bool, alone: bool = False):
        self._quick = quick
        self._alone = alone
        """Whether rows leave out what they can do without: a peer may have ended the process."""

    def _problem(self, heads: str, tokens: int, ranks: int | None = None, **more: Any) -> Any:
        """Returns a problem, with ``tokens`` on each rank, as the tests have problems.

        Without ``ranks`` a ring has a rank for each GPU, or eight ranks on one GPU.
        """
        from features import Problem  # type: ignore[import-not-found]

        limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)
        many, few = (2, 1) if self._quick else (32, 8) if limit >= ROOMY else (8, 2)
        gpus = len(jax.local_devices())
        ranks = ranks or (gpus if gpus > 1 else RANKS)
        length = 128 if self._quick else ranks * tokens
        sizes = {"q_len": length, "kv_len": length, "heads": many}
        sizes["kv_heads"] = few if heads == "grouped" else many
        sizes["head_dim"] = sizes["value_dim"] = more.pop("head_dim", 128)
        given = {"batch": 1, "dtype": "bfloat16", "causal": True, "layout": "zigzag"}
        return Problem(mesh=(1, ranks, 1), **(given | sizes | more))

    def _layer_problem(self, heads: str, tokens: int, **more: Any) -> Any:
        """Returns a problem of one rank, with as many sequences as make `TOKENS`."""
        batch = 1 if self._quick else max(1, TOKENS // tokens)
        return self._problem(heads, tokens, ranks=1, batch=batch, **more)

    def _race(
        self,
        contenders: dict[str, Contender],
        pairs: float = 0.0,
        bars: dict[str, float] | None = None,
        peer: str | None = None,
    ) -> dict[str, Any]:
        if self._alone:
            contenders = {n: each for n, each in contenders.items() if not each.is_optional}
        return race(contenders, pairs, bars, self._quick, peer)


def attention_of(
    arrays: dict[str, Any], attend: Callable[..., jax.Array] | None = None, **options: Any
) -> Contender:
    """Returns results and gradients of attention on one device: ours, or that of a peer."""
    if attend is None:
        import burst_attention as ba

        devices, kinds = jax.local_devices()[:1], (AxisType.Auto,)
        mesh = jax.make_mesh((1,), ("context",), kinds, devices=devices)
        spec = jax.P(None, "context")
        attend = partial(ba.dot_product_attention, mesh=mesh, spec=spec)

    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        o, pullback = jax.vjp(partial(attend, **options), q, k, v)
        return o, *pullback(dout)

    return Contender(both, [arrays[name] for name in ("q", "k", "v", "dout")])
