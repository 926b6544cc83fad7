"""Results of new tokens over all keys that they see, on all ranks."""

from functools import partial
from typing import NamedTuple, NoReturn

import jax
from jaxtyping import Array, Float32, Int32

from burst_attention._attention import sinks as sink_logits
from burst_attention._decode import calls, merge
from burst_attention._decode.arguments import Caches, Checked, Ranks, Sequences
from burst_attention._decode.merge import Pair
from burst_attention._decode.work import Operands, Work
from burst_attention._mesh import vary_together


class Part(NamedTuple):
    """Caches, and what each batch entry sees of them."""

    work: Work
    caches: Caches
    source: Int32[Array, " batch"]
    tokens: Sequences


class Call(NamedTuple):
    """Everything static about a call."""

    caller: str
    ranks: Ranks
    works: tuple[Work, ...]


def attend(checked: Checked, parts: tuple[Part, ...]) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Returns out in query's dtype over all parts, and lse if it is asked for."""
    ranks, query = checked.ranks, checked.query

    def operands(part: Part) -> Operands:
        k, v, table, _ = part.caches
        arrays = (query, k, v, table, part.source, *part.tokens, ranks.rank(), checked.slopes)
        return vary_together(ranks.axes, Operands(*arrays)) if ranks.axes else Operands(*arrays)

    call = Call(checked.caller, ranks, tuple(part.work for part in parts))
    out, lse = _results(call, tuple(map(operands, parts)), checked.sinks)
    out = out.astype(query.dtype)
    return (out, lse) if checked.return_residual else out


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _results(
    call: Call, parts: tuple[Operands, ...], sinks: Float32[Array, " heads"] | None
) -> Pair:
    """Returns out and lse of all parts and ranks, with the sinks."""
    pairs = [calls.partial(*each) for each in zip(call.works, parts, strict=True)]
    pair = pairs[0] if len(pairs) == 1 else merge.merge_attention(*pairs)
    if call.ranks.axes:
        pair = merge.over_ranks(*call.ranks, pair)
    return pair if sinks is None else sink_logits.join(*pair, sinks)


def _refuse(call: Call, primals: object, tangents: object) -> NoReturn:
    raise NotImplementedError(
        f"{call.caller} has no gradient: it computes forward only. Where a gradient passes, put "
        "jax.lax.stop_gradient around its arguments; train with burst_attention.attention"
    )


_results.defjvp(_refuse)
