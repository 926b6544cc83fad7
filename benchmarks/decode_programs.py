"""Decoding programs to compare: ours, jax.nn's and torch's, on the same numbers."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import burst_attention as ba
import cases
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

SIZES = cases.sizes("decode")
DEVICES = SIZES["devices"]
HEADS, KV_HEADS, HEAD_DIM = (SIZES[name] for name in ("heads", "kv_heads", "head_dim"))
LATENTS = SIZES["latents"]
APPENDED_ROWS = 512
Program = Callable[[], Any]


@dataclass(frozen=True)
class Work:
    """What a step must read and compute, whatever program does it."""

    rows: int
    """Rows of keys, each read once."""
    pairs: int
    """Pairs of a query and a key, in each head."""
    dtype: str
    numbers: int = 2 * KV_HEADS * HEAD_DIM
    """Numbers of a row."""
    products: int = 2 * HEADS * HEAD_DIM
    """Multiplications for a pair, in all heads."""

    def roof_s(self, bytes_per_s: float, flops_per_s: float) -> float:
        """Returns the seconds of the slower of reading and computing."""
        read = self.rows * self.numbers * jnp.dtype(self.dtype).itemsize
        return max(read / bytes_per_s, 2 * self.pairs * self.products / flops_per_s)


def work_on_latents(length: int, dtype: str) -> Work:
    """Returns the work of one query over latents, which are read once."""
    heads, columns, values = (LATENTS[name] for name in ("heads", "head_dim", "value_dim"))
    return Work(length, length, dtype, columns, heads * (columns + values))


def normal(*shape: int, dtype: str) -> jax.Array:
    """Returns random numbers."""
    numbers = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    return jnp.asarray(numbers, dtype)


def cache(*rows: int, dtype: str) -> tuple[jax.Array, jax.Array]:
    """Returns keys and values of a cache."""
    keys = normal(*rows, KV_HEADS, HEAD_DIM, dtype=dtype)
    return keys, keys[::-1] * 0.5


def queries(batch: int, dtype: str) -> jax.Array:
    """Returns one query for each entry."""
    return normal(batch, 1, HEADS, HEAD_DIM, dtype=dtype)


def compiled(function: Callable[..., Any], *arrays: Any) -> Program:
    """Returns a compiled program with its inputs in place, which returns when its work is done."""
    run = jax.jit(function).lower(*arrays).compile()
    return lambda: jax.block_until_ready(run(*arrays))


def plain(length: int, dtype: str) -> dict[str, Program]:
    """Returns programs for one sequence in a contiguous cache, by contender."""
    query, (keys, values) = queries(1, dtype), cache(1, length, dtype=dtype)
    lengths = jnp.full(1, length, jnp.int32)

    def by_jax(query: Any, keys: Any, values: Any, lengths: Any) -> jax.Array:
        return jax.nn.dot_product_attention(query, keys, values, key_value_seq_lengths=lengths)

    arrays = (query, keys, values, lengths)
    programs = {"ours": compiled(ba.decode_attention, *arrays), "jax.nn": compiled(by_jax, *arrays)}
    if importlib.util.find_spec("torch"):
        programs["torch"] = by_torch(query, keys, values)
    return programs


def latents(length: int, dtype: str) -> dict[str, Program]:
    """Returns programs for one query over latents, whose first columns are the values.

    jax.nn takes values as wide as keys only: the latents themselves, whose result is then cut, or
    an array of their first columns with zeros behind.
    """
    heads, columns, values = (LATENTS[name] for name in ("heads", "head_dim", "value_dim"))
    query, rows = (
        normal(1, 1, heads, columns, dtype=dtype),
        normal(1, length, 1, columns, dtype=dtype),
    )
    lengths, padded = jnp.full(1, length, jnp.int32), rows.at[..., values:].set(0)

    def ours(query: Any, rows: Any, lengths: Any) -> Any:
        return ba.decode_attention(query, rows, None, lengths, value_dim=values)

    def by_jax(query: Any, keys: Any, held: Any, lengths: Any) -> jax.Array:
        out = jax.nn.dot_product_attention(query, keys, held, key_value_seq_lengths=lengths)
        return out[..., :values]

    def by_jax_cut(query: Any, rows: Any, lengths: Any) -> jax.Array:
        return by_jax(query, rows, rows, lengths)

    return {
        "ours": compiled(ours, query, rows, lengths),
        "jax.nn, result cut": compiled(by_jax_cut, query, rows, lengths),
        "jax.nn, values padded": compiled(by_jax, query, rows, padded, lengths),
    }


def by_torch(*arrays: jax.Array) -> Program:
    """Returns torch's program for one sequence."""
    import torch

    dtype = getattr(torch, str(arrays[0].dtype))
    # torch reads [batch, heads, length, dim] at any strides, so it can have our cache's order.
    q, k, v = (torch.from_numpy(np.array(x, np.float32)).to(dtype).transpose(1, 2) for x in arrays)
    attend = torch.nn.functional.scaled_dot_product_attention

    def run() -> Any:
        with torch.inference_mode():
            return attend(q, k, v, enable_gqa=True)

    return run


def paged(lengths: list[int], page: int, dtype: str) -> Program:
    """Returns our program for sequences of some lengths, with pages in random order."""
    counts = [-(-length // page) for length in lengths]
    order = np.random.default_rng(1).permutation(sum(counts)).astype(np.int32)
    table = np.full((len(lengths), max(counts)), -1, np.int32)
    for row, pages in zip(table, np.split(order, np.cumsum(counts)[:-1]), strict=True):
        row[: len(pages)] = pages
    keys, values = cache(sum(counts), page, dtype=dtype)

    def attend(query: Any, keys: Any, values: Any, lengths: Any, table: Any) -> jax.Array:
        return ba.decode_attention(query, keys, values, lengths, page_table=table)

    query = queries(len(lengths), dtype)
    return compiled(attend, query, keys, values, jnp.asarray(lengths, jnp.int32), table)


def sharded(length: int, dtype: str, steps: int = 1) -> Program:
    """Returns our program for one sequence whose cache is sharded over all devices.

    With several steps they run in one compiled loop.
    """
    mesh = jax.make_mesh((DEVICES,), ("context",))
    shards, whole = P(None, "context"), P()

    def attend(query: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        lengths = jnp.full(1, length, jnp.int32)

        def step(_: Any, query: jax.Array) -> jax.Array:
            return ba.decode_attention(query, keys, values, lengths, axis_name="context")

        return lax.fori_loop(0, steps, step, query)

    run = jax.shard_map(attend, mesh=mesh, in_specs=(whole, shards, shards), out_specs=whole)
    place = NamedSharding(mesh, shards)
    keys, values = (jax.device_put(x, place) for x in cache(1, length, dtype=dtype))
    return compiled(
        run, jax.device_put(queries(1, dtype), NamedSharding(mesh, whole)), keys, values
    )


def prefixed(requests: int, prefix: int, context: int, dtype: str) -> dict[str, Program]:
    """Returns programs for requests that share a prefix: ours, and plain decoding of each."""
    query, shared = queries(requests, dtype), cache(1, prefix, dtype=dtype)
    own = cache(requests, context, dtype=dtype)
    lengths = jnp.full(requests, context, jnp.int32)

    def together(
        query: jax.Array,
        shared: tuple[jax.Array, jax.Array],
        own: tuple[jax.Array, jax.Array],
        lengths: jax.Array,
    ) -> jax.Array:
        readers, rows = jnp.zeros(requests, jnp.int32), jnp.full(1, prefix, jnp.int32)
        return ba.shared_prefix_attention(
            query, *shared, *own, lengths, prefix_of=readers, prefix_lengths=rows
        )

    apart = cache(requests, prefix + context, dtype=dtype)
    return {
        "shared prefix": compiled(together, query, shared, own, lengths),
        "separate": compiled(ba.decode_attention, query, *apart, lengths + prefix),
    }


def appended(capacity: int, steps: int, dtype: str) -> Program:
    """Returns a loop that appends a token to a cache in each step, and starts anew after some rows.

    The cache is donated, so no call copies it. Caches of every capacity write the same rows.
    """
    key, value = cache(1, 1, dtype=dtype)
    held = [cache(1, capacity, dtype=dtype)]

    def append(keys: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        def step(token: Any, caches: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            lengths = jnp.full(1, token % APPENDED_ROWS + 1, jnp.int32)
            return ba.append_to_cache(*caches, key, value, lengths)

        return lax.fori_loop(0, steps, step, (keys, values))

    run = jax.jit(append, donate_argnums=(0, 1)).lower(*held[0]).compile()

    def program() -> None:
        held[0] = jax.block_until_ready(run(*held[0]))

    return program
