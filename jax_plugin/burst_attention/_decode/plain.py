"""The partial of one rank in plain JAX: the readable definition of what the library's calls do."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from burst_attention import _ffi
from burst_attention._decode.merge import Pair
from burst_attention._decode.work import Operands, Work
from burst_attention._mesh import vary_like

ROWS = 512
"""Rows of a chunk of keys. Chunks begin at multiples of it, whatever other entries need."""


class Entry(NamedTuple):
    """The operands of one batch entry."""

    query: Float[Array, "queries heads head_dim"]
    source: Int32[Array, ""]
    length: Int32[Array, ""]
    start: Int32[Array, ""]
    queries_in_use: Int32[Array, ""]


class Softmax(NamedTuple):
    """The running softmax of an entry's queries: out = acc / total, lse = top + ln total."""

    acc: Float32[Array, "kv_heads group queries value_dim"]
    top: Float32[Array, "kv_heads group queries"]
    total: Float32[Array, "kv_heads group queries"]


@jax.named_scope(f"{_ffi.DECODE}_plain")
def partial(work: Work, operands: Operands) -> Pair:
    """Returns o and lse of every query over this rank's keys; see `Operands`.

    Entries read only the chunks of rows in which they see a key.
    """
    query, *_, source, lengths, starts, counts, _, _ = operands
    entries = Entry(query, source, lengths, starts, counts)

    def each(entry: Entry) -> Pair:
        return _of_entry(work, operands, entry)

    # The loop computes each entry by the same program, so no bit depends on other entries.
    pair: Pair = lax.map(each, entries) if work.split == "fixed" else jax.vmap(each)(entries)
    return pair


def _of_entry(work: Work, operands: Operands, entry: Entry) -> Pair:
    """Returns o and lse of one entry."""
    rank, (_, page, kv_heads, _) = operands.rank, operands.key_cache.shape
    queries, heads, _ = entry.query.shape
    of_queries = entry.start + jnp.arange(queries, dtype=jnp.int32)
    in_use = (jnp.arange(queries, dtype=jnp.int32) < entry.queries_in_use) & (of_queries >= 0)
    sources, columns = operands.page_table.shape
    in_use &= (entry.source >= 0) & (entry.source < sources)
    geometry = work.geometry(columns * page)
    first = jnp.maximum(entry.start, 0)
    begin = jnp.int32(0)
    if work.window >= 0:
        begin = geometry.rows_before(jnp.maximum(first - work.window, 0), rank)
    last = jnp.max(jnp.where(in_use, of_queries, -1))
    stop = geometry.rows_before(jnp.clip(jnp.minimum(entry.length, last + 1), 0), rank)
    shape = (kv_heads, heads // kv_heads, queries)
    zeros, blind = jnp.zeros(shape, jnp.float32), jnp.full(shape, -jnp.inf, jnp.float32)
    softmax = Softmax(jnp.zeros((*shape, work.value_dim(operands)), jnp.float32), blind, zeros)
    rows = min(ROWS, geometry.capacity)

    def fold(chunk: Int32[Array, ""], softmax: Softmax) -> Softmax:
        own = chunk * rows + jnp.arange(rows, dtype=jnp.int32)
        positions = geometry.positions(own, rank)[None]
        visible = in_use[:, None] & (positions <= of_queries[:, None])
        visible &= ((own < stop) & (own >= begin))[None]
        if work.window >= 0:
            visible &= of_queries[:, None] - positions <= work.window
        k, v, visible = _gathered(work, operands, entry.source, own, visible)
        distances = (positions - of_queries[:, None]).astype(jnp.float32)
        return _folded(softmax, _scores(work, operands.slopes, entry, k, distances, visible), v)

    # A while loop's state must vary over the axes over which its results will.
    bounds, softmax = vary_like(operands, ((begin // rows, -(-stop // rows)), softmax))
    acc, top, total = lax.fori_loop(*bounds, fold, softmax)
    sees = total != 0
    total = jnp.where(sees, total, 1)
    lse = jnp.where(sees, top + jnp.log(total), -jnp.inf)
    o = jnp.moveaxis(acc / total[..., None], 2, 0).reshape(queries, heads, -1)
    return o, jnp.moveaxis(lse, 2, 0).reshape(queries, heads)


def _gathered(
    work: Work,
    operands: Operands,
    source: Int32[Array, ""],
    rows: Int32[Array, " rows"],
    visible: Bool[Array, "queries rows"],
) -> tuple[
    Float[Array, "rows kv_heads head_dim"],
    Float[Array, "rows kv_heads value_dim"],
    Bool[Array, "queries rows"],
]:
    """Returns keys and values of a source's rows, and which of them exist and are visible.

    Values that no query sees are 0, since a weight of 0 does not stop NaN.
    """
    keys, table = operands.key_cache, operands.page_table
    pages, page = keys.shape[:2]
    ids = table.at[source, rows // page].get(mode="clip")
    visible = visible & ((ids >= 0) & (ids < pages))[None]
    seen = visible.any(0)
    index = (jnp.where(seen, ids, 0), rows % page)
    k = keys.at[index].get(mode="promise_in_bounds")
    if operands.value_cache is None:
        v = k[..., : work.values_in_keys]
    else:
        v = operands.value_cache.at[index].get(mode="promise_in_bounds")
    return k, jnp.where(seen[:, None, None], v, 0), visible


def _scores(
    work: Work,
    slopes: Float32[Array, " heads"] | None,
    entry: Entry,
    k: Float[Array, "rows kv_heads head_dim"],
    distances: Float32[Array, "queries rows"],
    visible: Bool[Array, "queries rows"],
) -> Float32[Array, "kv_heads group queries rows"]:
    """Returns cap(scale · q kᵀ) + slope · (key position − query position), −∞ where hidden."""
    queries, _, head_dim = entry.query.shape
    grouped = entry.query.reshape(queries, k.shape[1], -1, head_dim)
    s = jnp.einsum(
        "qkgd,rkd->kgqr", grouped, k, precision="highest", preferred_element_type=jnp.float32
    )
    s *= np.float32(work.scale)
    if work.soft_cap:
        s = np.float32(work.soft_cap) * jnp.tanh(s / np.float32(work.soft_cap))
    if slopes is not None:
        s += slopes.reshape(k.shape[1], -1, 1, 1) * distances[None, None]
    return jnp.where(visible[None, None], s, -jnp.inf)


def _folded(
    softmax: Softmax,
    s: Float32[Array, "kv_heads group queries rows"],
    v: Float[Array, "rows kv_heads value_dim"],
) -> Softmax:
    """Returns the running softmax with the rows of a chunk."""
    top = jnp.maximum(softmax.top, s.max(-1))
    base = jnp.where(jnp.isneginf(top), 0, top)
    weights, kept = jnp.exp(s - base[..., None]), jnp.exp(softmax.top - base)
    added = jnp.einsum("kgqr,rkd->kgqd", weights, v.astype(jnp.float32), precision="highest")
    return Softmax(
        softmax.acc * kept[..., None] + added, top, softmax.total * kept + weights.sum(-1)
    )
