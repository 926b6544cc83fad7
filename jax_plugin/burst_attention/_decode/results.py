"""Results of new tokens over all keys that they see, on all ranks."""

from functools import partial
from typing import NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from burst_attention._batching import over_batch
from burst_attention._decode import calls, rows
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


def own_part(checked: Checked) -> Part:
    """Returns the batch's own caches, of which each entry sees its sequence."""
    source = jnp.arange(checked.query.shape[0], dtype=jnp.int32)
    return Part(checked.work, checked.caches, source, checked.tokens)


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
    arrays = (tuple(map(operands, parts)), checked.sinks)
    is_traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arrays))
    out, lse = (_results if is_traced else _program)(call, *arrays)
    out = out.astype(query.dtype)
    return (out, lse) if checked.return_residual else out


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _results(
    call: Call, parts: tuple[Operands, ...], sinks: Float32[Array, " heads"] | None
) -> Pair:
    """Returns out and lse of all parts and ranks, with the sinks."""
    pairs = [calls.partial(*each) for each in zip(call.works, parts, strict=True)]
    if len(pairs) == 1 and sinks is None and not call.ranks.axes:
        return pairs[0]
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks, (pairs[0][1].shape[0], *sinks.shape))
    return over_batch(partial(_merged, call), pairs, sinks)


def _merged(call: Call, pairs: list[Pair], sinks: Float32[Array, "batch heads"] | None) -> Pair:
    """Returns out and lse over all parts and ranks, joined by the sinks."""
    found, implementation = [rows.of_pair(x) for x in pairs], call.works[0].implementation
    if sinks is not None:
        found.append(rows.of_sinks(sinks, call.ranks.rank(), pairs[0]))
    merged = rows.over_parts(implementation, found)
    if call.ranks.axes:
        merged = rows.over_ranks(implementation, *call.ranks, merged)
    return rows.pair(merged, pairs[0][1].shape)


def _refuse(call: Call, primals: object, tangents: object) -> NoReturn:
    raise NotImplementedError(
        f"{call.caller} has no gradient: it computes forward only. Where a gradient passes, put "
        "jax.lax.stop_gradient around its arguments; train with burst_attention.attention"
    )


_results.defjvp(_refuse)
# Outside jit, a call with equal options and types runs the program of the call before it.
_program = jax.jit(_results, static_argnums=0)
