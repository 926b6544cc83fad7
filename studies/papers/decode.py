"""The time of decoding: bytes over bandwidth, and waves of blocks over multiprocessors.

A multiprocessor reads at most its share of the bandwidth, so blocks of unequal length, or fewer
blocks than multiprocessors, leave bandwidth unused.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from burst_attention._cli.offload_time import ELEMENT, Decoder, Device

LAUNCH = 5e-6
"""Seconds of a kernel besides its reading."""


@dataclass(frozen=True)
class Gpu(Device):
    """A GPU as its specification has it."""

    multiprocessors: int = 0


A100 = Gpu("A100 80 GB", 2.039e12, 312e12, 80e9, 15e3, multiprocessors=108)
H200 = Gpu("H200", 4.8e12, 989e12, 141e9, multiprocessors=132)
A40 = Gpu("A40", 696e9, 150e12, 48e9, multiprocessors=84)
RTX_4090 = Gpu("RTX 4090", 1.008e12, 165e12, 24e9, 1.6e3, multiprocessors=128)


@dataclass(frozen=True)
class Cache:
    """Keys and values of requests, of one layer; every head has its own keys."""

    lengths: tuple[int, ...]
    heads: int
    head_dim: int
    tile: int = 256
    """Keys that a block reads together."""

    @property
    def tiles(self) -> list[int]:
        """Returns how many tiles each head of each request has."""
        return [-(-length // self.tile) for length in self.lengths for _ in range(self.heads)]

    def tile_seconds(self, gpu: Gpu) -> float:
        """Returns the seconds in which a multiprocessor reads a tile."""
        read = self.tile * 2 * self.head_dim * ELEMENT
        return read * gpu.multiprocessors / gpu.bandwidth


def makespan(blocks: Sequence[int], workers: int) -> int:
    """Returns when the last block ends, if each worker takes the next block as it becomes free."""
    if len(set(blocks)) <= 1:
        return -(-len(blocks) // workers) * max(blocks, default=0)
    free = [0] * min(workers, len(blocks))
    for block in blocks:
        heapq.heapreplace(free, free[0] + block)
    return max(free)


def one_block(cache: Cache, gpu: Gpu) -> float:
    """Returns the seconds if one block reads each head of each request."""
    return LAUNCH + makespan(cache.tiles, gpu.multiprocessors) * cache.tile_seconds(gpu)


def fixed_splits(cache: Cache, gpu: Gpu) -> float:
    """Returns the seconds if each head is cut into as many parts, which another kernel merges.

    A part has as many tiles in every head, so short requests leave parts empty.
    """
    tiles = cache.tiles
    splits = split_count(len(tiles), max(tiles), gpu.multiprocessors)
    part = -(-max(tiles) // splits)
    blocks = [
        min(part, max(count - first, 0)) for count in tiles for first in range(0, max(tiles), part)
    ]
    launches = LAUNCH * (2 if splits > 1 else 1)
    return launches + makespan(blocks, gpu.multiprocessors) * cache.tile_seconds(gpu)


def split_count(heads: int, tiles: int, multiprocessors: int) -> int:
    """Returns FlashAttention-2's number of parts of a head.

    There are no parts if heads fill 80% of the multiprocessors. Otherwise it is the least number,
    up to 128, whose waves are filled at least 85% as well as the best number's.
    """
    if heads >= 0.8 * multiprocessors:
        return 1
    counts = [
        count
        for count in range(1, min(128, multiprocessors, tiles) + 1)
        if count == 1 or -(-tiles // count) != -(-tiles // (count - 1))
    ]
    waves = [heads * count / multiprocessors for count in counts]
    filled = [wave / math.ceil(wave) for wave in waves]
    return next(
        count for count, share in zip(counts, filled, strict=True) if share >= 0.85 * max(filled)
    )


def equal_runs(cache: Cache, gpu: Gpu) -> float:
    """Returns the seconds if every multiprocessor reads an equal run of all tiles in one line."""
    run = -(-sum(cache.tiles) // gpu.multiprocessors)
    return LAUNCH + run * cache.tile_seconds(gpu)


def prefix(
    gpu: Gpu, requests: int, shared: int, own: int, heads: int, head_dim: int
) -> list[float]:
    """Returns the seconds with a prefix that is read for each request, and once for all of them.

    Read once, the prefix takes the longer of reading and of ``4 · requests · shared · heads ·
    head_dim`` FLOPs. It has a kernel, the rest another one, and a third merges them.
    """
    row = 2 * heads * head_dim * ELEMENT / gpu.bandwidth
    products = 4 * requests * shared * heads * head_dim / gpu.peak
    apart = LAUNCH + requests * (shared + own) * row
    once = 3 * LAUNCH + max(shared * row, products) + requests * own * row
    return [apart, once]


LLAMA_65B = Decoder(layers=80, heads=64, head_dim=128, parameters=65.2e9)


def sharded_cache(
    gpu: Gpu,
    link: tuple[float, float],
    ranks: int,
    batch: int,
    context: int,
    heads: tuple[int, int],
) -> tuple[float, float]:
    """Returns the seconds of a layer's attention with heads, and with the cache, over ranks.

    ``link`` is the latency and the bandwidth, ``heads`` those of queries and of keys, 128 columns
    each. More ranks than key/value heads read the same keys. With the cache over ranks, each sends
    float32 results of all query heads to the ranks that merge them, and the merged results to all.
    """
    (queries, keys), width = heads, 128
    row = batch * context * 2 * width * ELEMENT / gpu.bandwidth
    by_heads = LAUNCH + max(keys / ranks, 1) * row
    others = (ranks - 1) / ranks
    exchanged = batch * queries * others * (4 * (width + 1) + ELEMENT * width)
    by_cache = 2 * LAUNCH + keys / ranks * row + 2 * link[0] + exchanged / link[1]
    return by_heads, by_cache
