"""The partial of one rank on a GPU: the units of queries that the library's kernels compute.

Kernels know no batch entries. A *unit* is a set of rows, queries of all heads of a group, that read
one source. Each row sees consecutive rows of the source, because positions grow with rows. Entries
that share a source go into one unit, up to 64 rows, so that its keys are read once for all of them.

`kernels/src/launch/decode.rs` says what the call computes of units.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from burst_attention import _checks, _ffi
from burst_attention._attention.implementation import SOFT_CAPS
from burst_attention._decode import plain
from burst_attention._decode.merge import Pair
from burst_attention._decode.work import Operands, Work
from burst_attention._mesh import vary_like
from burst_attention._types import Arrays, ArrayType

DECODE = _ffi.interface()["decode"]
"""The arrays of the call, and the sizes by which the kernels cut queries and keys."""

SLICES = 32
"""The most slices of a source with ``split="fixed"``."""

SLICE = 1024
"""The fewest keys of such a slice."""


class Tiles(NamedTuple):
    """How the kernels cut queries and keys; the library refuses other numbers."""

    keys: int
    """Keys of a tile, which lies within a page."""
    rows: int
    """The most rows of a tile of queries on any device."""
    slice: int
    """Tiles of a slice."""
    most_slices: int
    """With ``split="fixed"`` the most slices of a source; otherwise 0."""


class Units(NamedTuple):
    """The units of a call."""

    entries: Int32[Array, "units entries"]
    """The batch entries of each unit; the number of entries for none."""
    indices: Int32[Array, " batch"]
    """The index of each batch entry in the flattened ``entries``."""
    source: Int32[Array, " units"]


def lacks(
    query: ArrayType, values: ArrayType | int, scale: float, soft_cap: float | None
) -> str | None:
    """Returns what the kernels have no images or no range for, so that plain JAX computes it.

    Values may be the first columns of the keys, and then ``values`` is their number.
    """
    least, most = SOFT_CAPS["cuda"]
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return str(query.dtype)
    if isinstance(values, int):
        widest = {"head_dim": DECODE["latent_columns"], "value_dim": DECODE["latent_values"]}
        dims = {"head_dim": query.shape[3], "value_dim": values}
    else:
        widest = dict.fromkeys(("head_dim", "value_dim"), _checks.MAX_HEAD_DIM)
        dims = {"head_dim": query.shape[3], "value_dim": values.shape[3]}
    for name, dim in dims.items():
        if dim > widest[name]:
            return f"{name} {dim}"
    if scale <= 0:
        return f"scale {scale:g}"
    return f"logits_soft_cap {soft_cap:g}" if soft_cap and not least <= soft_cap <= most else None


def partial(work: Work, operands: Operands) -> Pair:
    """Returns o ``[batch, queries, heads, value_dim]`` and lse of this rank's keys, float32."""
    query, keys = operands[:2]
    if lacks(query, work.values_in_keys or operands.values, work.scale, work.soft_cap):
        return plain.partial(work, operands)
    capacity = operands.page_table.shape[1] * keys.shape[1]
    begins, ends = intervals(work, operands, capacity)
    operands = with_even_pages(operands)
    group = query.shape[2] // keys.shape[2]
    units = units_of(operands, entries_of_unit(work, operands))
    cut = tiles(work, operands, units.entries.shape[1] * query.shape[1] * group)
    begins, ends = (_of_rows(x, units, group) for x in (begins, ends))
    named = operands._asdict() | {
        "query": packed(query, units, group),
        "units": _table(cut, operands, units, begins, ends),
        "intervals": jnp.stack([begins, ends], axis=1),
    }
    if operands.slopes is not None:
        slopes = jnp.broadcast_to(operands.slopes, query.shape[:3])[..., None]
        named["slopes"] = packed(slopes, units, group)[..., 0]
        named["counted_positions"] = _of_rows(_positions(operands), units, group)
    given = [named.get(name) for name in DECODE["arrays"]["cuda"]]
    o, lse = _call(work, cut, tuple(x for x in given if x is not None))
    queries, heads = query.shape[1:3]
    pair = (
        unpacked(o, units, queries, heads),
        unpacked(lse[..., None], units, queries, heads)[..., 0],
    )
    return vary_like(operands, pair)


def intervals(
    work: Work, operands: Operands, capacity: int
) -> tuple[Int32[Array, "batch queries"], Int32[Array, "batch queries"]]:
    """Returns the first row of its source that each query sees, and the end; twice 0 for none."""
    geometry = work.geometry(capacity)
    positions = _positions(operands)
    known = (operands.source >= 0) & (operands.source < operands.page_table.shape[0])
    used = positions - operands.starts[:, None] < operands.query_lengths[:, None]
    used &= (positions >= 0) & known[:, None]
    stop = jnp.clip(jnp.minimum(operands.lengths[:, None], positions + 1), 0)
    ends = geometry.rows_before(stop, operands.rank)
    begins = jnp.zeros_like(ends)
    if work.window >= 0:
        begins = geometry.rows_before(jnp.clip(positions - work.window, 0), operands.rank)
    used &= begins < ends
    return jnp.where(used, begins, 0), jnp.where(used, ends, 0)


def _positions(operands: Operands) -> Int32[Array, "batch queries"]:
    """Returns the position of each query."""
    queries = jnp.arange(operands.query.shape[1], dtype=jnp.int32)
    return operands.starts[:, None] + queries[None]


def with_even_pages(operands: Operands) -> Operands:
    """Returns the operands with pages that kernels take, each a part of a page that was given.

    Several pages of a source must have a power of two of rows, and no page may be too large.
    """
    keys, values, table = operands.key_cache, operands.values, operands.page_table
    pages, page, heads, dim = keys.shape
    even = page & -page
    is_large = page * heads * max(dim, values.shape[3]) >= DECODE["page_elements"]
    if not is_large and (even == page or table.shape[1] == 1):
        return operands
    while is_large and even * heads * max(dim, values.shape[3]) >= DECODE["page_elements"]:
        even //= 2
    count = page // even
    exists = (table >= 0) & (table < pages)
    parts = table[..., None] * count + jnp.arange(count, dtype=jnp.int32)[None, None]
    parts = jnp.where(exists[..., None], parts, -1).reshape(table.shape[0], -1)
    caches = {
        name: x.reshape(pages * count, even, *x.shape[2:])
        for name, x in (("key_cache", keys), ("value_cache", operands.value_cache))
        if x is not None
    }
    return operands._replace(page_table=parts, **caches)


def entries_of_unit(work: Work, operands: Operands) -> int:
    """Returns the most entries of a unit: several where entries may share sources.

    With ``split="fixed"`` it is one, since the rows of a unit decide which tiles take masks.
    """
    batch, queries, heads, _ = operands.query.shape
    if work.split == "fixed" or not work.shares_sources:
        return 1
    return max(
        1, min(batch, DECODE["many_rows"] // (queries * heads // operands.key_cache.shape[2]))
    )


def units_of(operands: Operands, size: int) -> Units:
    """Returns units of up to ``size`` entries of one source each."""
    batch, sources = operands.query.shape[0], operands.page_table.shape[0]
    index = jnp.arange(batch, dtype=jnp.int32)
    known = (operands.source >= 0) & (operands.source < sources)
    source = jnp.where(known, operands.source, sources)
    if size == 1:
        return Units(index[:, None], index, jnp.minimum(source, sources - 1))
    count = batch // size + min(sources + 1, batch)
    order = jnp.argsort(source).astype(jnp.int32)
    ordered = source[order]
    within = index - jnp.searchsorted(ordered, ordered).astype(jnp.int32)
    unit = jnp.cumsum(within % size == 0, dtype=jnp.int32) - 1
    indices = unit * size + within % size
    entries = jnp.full(count * size, batch, jnp.int32).at[indices].set(order)
    source = jnp.zeros(count, jnp.int32).at[unit].set(jnp.minimum(ordered, sources - 1))
    return Units(entries.reshape(count, size), index.at[order].set(indices), source)


def tiles(work: Work, operands: Operands, rows: int) -> Tiles:
    """Returns how the kernels cut units of ``rows`` rows."""
    page, columns = operands.key_cache.shape[1], operands.page_table.shape[1]
    widest = max(operands.query.shape[3], operands.values.shape[3])
    # Latents of any width take wide tiles.
    is_wide = widest > 128 or work.values_in_keys > 0
    keys = 32 if is_wide and not work.values_in_keys else 64
    is_short = columns > 1 and page < keys and not is_wide
    step, keys = (4, 16) if is_short else (1, keys)
    few = is_short or rows <= DECODE["few_rows"]
    most = columns * -(-page // keys)
    tile_rows = DECODE["few_rows" if few and not is_wide else "many_rows"]
    if work.split == "balanced":
        return Tiles(keys, tile_rows, step, 0)
    size = -(-max(-(-most // SLICES), SLICE // keys) // step) * step
    return Tiles(keys, tile_rows, size, -(-most // size))


def weights_in_memory(work: Work, cut: Tiles, operands: Arrays) -> int:
    """Returns the bytes of weights that go through memory, with those of their tiles; 0 if none do.

    Over latents that takes fewer products than a kernel that keeps weights for some columns of the
    values alone. It is done where weights take no more memory than the latents.
    """
    if not work.values_in_keys:
        return 0
    query, keys, table = operands[:3]
    units, heads, rows, _ = query.shape
    tiles = table.shape[1] * -(-keys.shape[1] // cut.keys)
    weights = units * heads * rows * tiles * cut.keys
    if weights > keys.size or weights >= DECODE["page_elements"]:
        return 0
    padded = -(-rows // cut.rows) * cut.rows
    return weights * query.dtype.itemsize + 8 * units * heads * tiles * padded


def packed(
    x: Float[Array, "batch queries heads dim"], units: Units, group: int
) -> Float[Array, "units kv_heads rows dim"]:
    """Returns the rows of units, 0 for rows of no entry."""
    _, queries, heads, dim = x.shape
    count, size = units.entries.shape
    if size > 1:
        x = x.at[units.entries.reshape(-1)].get(mode="fill", fill_value=0)
    x = x.reshape(count, size * queries, heads // group, group, dim)
    return jnp.swapaxes(x, 1, 2).reshape(count, heads // group, -1, dim)


def unpacked(
    x: Float32[Array, "units kv_heads rows dim"], units: Units, queries: int, heads: int
) -> Float32[Array, "batch queries heads dim"]:
    """Returns the queries of entries, given the rows of units."""
    count, kv_heads, _, dim = x.shape
    x = x.reshape(count, kv_heads, -1, heads // kv_heads, dim)
    x = jnp.swapaxes(x, 1, 2).reshape(-1, queries, heads, dim)
    return x if units.entries.shape[1] == 1 else x[units.indices]


def _of_rows(
    x: Int32[Array, "batch queries"], units: Units, group: int
) -> Int32[Array, "units rows"]:
    """Returns a number of each query as a number of each row."""
    x = x.at[units.entries].get(mode="fill", fill_value=0)
    return jnp.repeat(x.reshape(x.shape[0], -1), group, axis=1)


def _table(
    cut: Tiles,
    operands: Operands,
    units: Units,
    begins: Int32[Array, "units rows"],
    ends: Int32[Array, "units rows"],
) -> Int32[Array, "units 4"]:
    """Returns the slices of each unit and of all units before it, its tiles, and its source."""
    page = operands.key_cache.shape[1]

    def tile(row: Int32[Array, " units"]) -> Int32[Array, " units"]:
        return row // page * -(-page // cut.keys) + row % page // cut.keys

    sees = begins < ends
    capacity = page * operands.page_table.shape[1]
    first = tile(jnp.where(sees, begins, capacity - 1).min(1))
    last = jnp.where(sees, ends, 0).max(1)
    end = jnp.where(last > 0, tile(jnp.maximum(last, 1) - 1) + 1, 0)
    first = jnp.where(last > 0, first, 0)
    slices = -(-end // cut.slice) - first // cut.slice
    return jnp.stack([jnp.cumsum(slices, dtype=jnp.int32), first, end, units.source], axis=1)


def _call(
    work: Work, cut: Tiles, operands: Arrays
) -> tuple[Float32[Array, "units kv_heads rows value_dim"], Float32[Array, "units kv_heads rows"]]:
    (count, heads, rows, _) = operands[0].shape
    value_dim = work.values_in_keys or operands[2].shape[3]
    pairs = count * heads * -(-rows // cut.rows)
    slots = pairs * cut.most_slices if cut.most_slices else DECODE["most_runs"] + pairs
    weights = weights_in_memory(work, cut, operands)
    results = [
        jax.ShapeDtypeStruct((count, heads, rows, value_dim), jnp.float32),
        jax.ShapeDtypeStruct((count, heads, rows), jnp.float32),
        jax.ShapeDtypeStruct((slots * cut.rows * (value_dim + 2) * 4 + weights,), jnp.uint8),
    ]
    attributes: _ffi.Attributes = {
        "scale": np.float32(work.scale),
        "soft_cap": np.float32(work.soft_cap),
        "interleave": np.int64(work.interleave),
        "world_size": np.int64(work.world_size),
        "slice_tiles": np.int64(cut.slice),
        "most_slices": np.int64(cut.most_slices),
        "tile_keys": np.int64(cut.keys),
        "values_in_keys": np.int64(work.values_in_keys > 0),
        "weights_in_memory": np.int64(weights > 0),
    }
    target = _ffi.DECODE_PAGES
    o, lse, _ = _ffi.call(target, results, operands, attributes)
    return o, lse
