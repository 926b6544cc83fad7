"""Merges results over parts of the keys: over caches, sinks and ranks.

A row is one query in one head: the columns of out, then lse.

``split="fixed"`` promises that no bit of a row depends on other rows. XLA breaks this promise on
CPU devices. It computes most rows by vector instructions and the last rows by scalar instructions,
and it fuses other operations where shapes are others. The results differ in the last bits. So a
call of the library merges rows on CPU devices.

On GPUs one thread of XLA's code computes each number, and all threads run the same instructions.
`merge.merged` fixes the order of the additions. XLA still decides whether a product and an addition
are rounded once or twice. It decides for a whole program, so all rows of a call have the same
arithmetic, but another size of the batch is another program. (XLA's compiler for the H100, 4 and 8
ranks, batches of 1 to 256: each program has all products and additions in one fusion, so it can
round them alike. None has run.)
"""

from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from burst_attention import _ffi
from burst_attention._attention.options import Implementation
from burst_attention._decode.merge import Pair, merged
from burst_attention._mesh import vary_like
from burst_attention._types import Axes

Rows: TypeAlias = Float32[Array, "rows columns"]


def of_pair(pair: Pair) -> Rows:
    """Returns the rows of out and lse."""
    out, lse = pair
    return jnp.concatenate([out, lse[..., None]], -1).reshape(lse.size, out.shape[-1] + 1)


def of_sinks(sinks: Float32[Array, "batch heads"], rank: jax.Array, like: Pair) -> Rows:
    """Returns the rows of a part without values, whose lse are the sinks.

    Only rank 0 has the part. On other ranks its lse are −∞, so that sinks join each row once.
    """
    out, lse = like
    logits = jnp.where(rank == 0, sinks, -jnp.inf)[:, None]
    return of_pair((jnp.zeros_like(out), jnp.broadcast_to(logits, lse.shape)))


def pair(rows: Rows, shape: tuple[int, ...]) -> Pair:
    """Returns out and lse of rows, with lse of a shape."""
    return rows[:, :-1].reshape(*shape, rows.shape[1] - 1), rows[:, -1].reshape(shape)


def over_parts(implementation: Implementation | None, parts: Sequence[Rows]) -> Rows:
    """Returns the rows of attention over the keys of all parts on this rank."""
    return parts[0] if len(parts) == 1 else _merged(implementation, jnp.stack(parts))


def over_ranks(
    implementation: Implementation | None, axes: Axes, world_size: int, rows: Rows
) -> Rows:
    """Returns rows over the keys of all ranks, typed as the same on all of them.

    Each rank merges an equal share of the rows. An all-to-all brings it all ranks' parts of its
    share, and an all-gather brings every rank the merged rows.
    """
    count, columns = rows.shape
    share = -(-count // world_size)
    padded = jnp.pad(rows, [(0, share * world_size - count), (0, 0)])
    parts = lax.all_to_all(padded.reshape(world_size, share, columns), axes, 0, 0)
    own = _merged(implementation, parts)
    return lax.all_gather(own, axes, to="invarying").reshape(padded.shape)[:count]


def _merged(
    implementation: Implementation | None, parts: Float32[Array, "parts rows columns"]
) -> Rows:
    """Returns the rows over all parts, from the implementation that serves the platform."""
    if implementation == "xla":
        return _plain(parts)
    rows: Rows = lax.platform_dependent(parts, cpu=_cpu, default=_plain)
    return rows


def _plain(parts: Float32[Array, "parts rows columns"]) -> Rows:
    return of_pair(merged(parts[..., :-1], parts[..., -1]))


def _cpu(parts: Float32[Array, "parts rows columns"]) -> Rows:
    result = jax.ShapeDtypeStruct(parts.shape[1:], jnp.float32)
    return vary_like(parts, _ffi.call(_ffi.DECODE_MERGE, [result], (parts,), {})[0])
