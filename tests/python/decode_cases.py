"""Sharded caches: their arrays, calls over a mesh, and bounds on the errors of results."""

from dataclasses import dataclass, field, replace

import burst_attention as ba
import case_list
import jax
import numpy as np
import pytest
import ring
from jax.sharding import PartitionSpec as P

IMPLEMENTATIONS = [None, "xla"]
CALL_FIRST = [None, pytest.param("xla", marks=pytest.mark.long)]
"""Implementations, plain JAX in long tests only."""
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
SINKS = np.array([0.5, -1, 2, -np.inf], np.float32)
SHARDED, WHOLE = P(None, "context"), P()
FLOAT32_LIMIT = 3e-6
"""The largest error in float32, as a part of the largest element."""
ROUNDING_LIMIT = 2
"""The error in 16 bits, as a multiple of the error of rounding the exact result."""


@dataclass
class Sharding:
    """How sequences lie on the ranks."""

    world: int = 1
    layout: str = "striped"
    interleave: int = 1
    page: int | None = None
    capacity: int = 64
    """Rows of a sequence on each rank."""

    @property
    def options(self):
        """The arguments of a call that say it."""
        run = None if self.page else self.interleave
        return {"layout": self.layout, "interleave": run, "axis_name": "context"}

    def dealt(self, x):
        """Returns ``x [batch, world · capacity, ...]`` as the caches of all ranks, side by side."""
        if self.layout == "contiguous":
            return x
        run = self.page or self.interleave
        runs = x.shape[1] // (self.world * run)
        cut = x.reshape(len(x), runs, self.world, run, *x.shape[2:])
        return np.ascontiguousarray(cut.swapaxes(1, 2)).reshape(x.shape)

    def gathered(self, x):
        """Inverts `dealt`."""
        if self.layout == "contiguous":
            return x
        run = self.page or self.interleave
        cut = x.reshape(len(x), self.world, -1, run, *x.shape[2:])
        return np.ascontiguousarray(cut.swapaxes(1, 2)).reshape(x.shape)

    def paged(self, lengths, *caches, seed=0):
        """Returns the caches of all ranks as pages in random order, and each rank's page table.

        Pages beyond a sequence's length are no pages: their entries are −1.
        """
        batch, columns = len(lengths), self.capacity // self.page
        random = np.random.default_rng(seed)
        total = batch * columns + 3
        positions = self.dealt(np.tile(np.arange(self.world * self.capacity), (batch, 1)))
        first = positions.reshape(batch, self.world, columns, self.page)[..., 0].swapaxes(0, 1)
        table = np.stack([random.permutation(total)[: batch * columns] for _ in range(self.world)])
        table = table.reshape(self.world, batch, columns)
        found = []
        for x in caches:
            shards = x.reshape(batch, self.world, columns, self.page, *x.shape[2:])
            pages = np.full((self.world, total, self.page, *x.shape[2:]), np.nan, x.dtype)
            for rank in range(self.world):
                pages[rank, table[rank]] = shards[:, rank]
            found.append(pages.reshape(-1, *pages.shape[2:]))
        table = np.where(first < np.asarray(lengths)[:, None], table, -1).astype(np.int32)
        return *found, table.reshape(-1, columns)


def shardings(name):
    """Returns shardings of the list of cases."""
    return {key: Sharding(**given) for key, given in case_list.of("decode", name).items()}


def features(given):
    """Returns features of the list of cases as arguments of `decode_reference.dense`."""
    arrays = {"slopes": SLOPES, "sinks": SINKS}
    arrays["counts"] = np.array(given.get("counts", ()), np.int32)
    return given | {name: x for name, x in arrays.items() if name in given}


SHARDINGS = shardings("shardings")
FEATURES = {name: features(given) for name, given in case_list.of("decode", "features").items()}


@dataclass
class Problem:
    """New tokens and whole sequences, with NaN beyond their lengths."""

    sharding: Sharding
    lengths: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    features: dict = field(default_factory=dict)
    """Arguments of `decode_reference.dense` besides the arrays."""
    values_in_keys: bool = False
    """Whether the values are the first columns of the keys, so that calls get None for them."""

    @property
    def caches(self):
        """The caches that a call gets: those of all ranks, side by side."""
        return [self.sharding.dealt(x) for x in (self.k, self.v)[: 1 if self.values_in_keys else 2]]

    @property
    def options(self):
        """The features as arguments of a call."""
        names = {"window": "local_window_size", "soft_cap": "logits_soft_cap"}
        names |= {"slopes": "alibi_slopes", "counts": "query_lengths"}
        found = {names.get(name, name): x for name, x in self.features.items()}
        return found | ({"value_dim": self.v.shape[3]} if self.values_in_keys else {})


def problem(sharding, lengths, tokens, heads=(4, 2), dims=(16, 16), dtype="float32", **features):
    """Returns a problem of normal arrays."""
    lengths = np.asarray(lengths, np.int32)
    batch, positions = len(lengths), sharding.world * sharding.capacity
    q, k, v = ring.normal(
        positions + tokens,
        (batch, tokens, heads[0], dims[0]),
        (batch, positions, heads[1], dims[0]),
        (batch, positions, heads[1], dims[1]),
        dtype=dtype,
    )
    for b, length in enumerate(lengths):
        k[b, max(length, 0) :] = v[b, max(length, 0) :] = np.nan
    return Problem(sharding, lengths, q, k, v, features)


def latents(*arguments, **options):
    """Returns a problem whose values are the first columns of its keys."""
    case = problem(*arguments, **options)
    return replace(case, v=case.k[..., : case.v.shape[3]].copy(), values_in_keys=True)


def decode(case, check_vma=True, **options):
    """Returns o and lse of a problem from `decode_attention` on a mesh."""
    sharding = case.sharding
    caches = case.caches
    specs, table = SHARDED, None
    if sharding.page:
        *caches, table = sharding.paged(case.lengths, *caches)
        specs = P("context")
    arrays = {n: x for n, x in case.options.items() if isinstance(x, np.ndarray)}
    static = {n: x for n, x in case.options.items() if n not in arrays}

    def local(q, k, v, table, lengths, arrays):
        return ba.decode_attention(
            *(q, k, v, lengths),
            page_table=table,
            return_residual=True,
            **arrays,
            **static,
            **sharding.options,
            **options,
        )

    run = jax.shard_map(
        local,
        mesh=ring.line(sharding.world),
        in_specs=(WHOLE, specs, specs, P("context"), WHOLE, WHOLE),
        out_specs=WHOLE,
        check_vma=check_vma,
    )
    k, v = caches[0], None if case.values_in_keys else caches[1]
    return jax.jit(run)(case.q, k, v, table, case.lengths, arrays)


def check(found, expected):
    """Checks o and lse against those in float64."""
    (o, lse), (exact, exact_lse) = (map(np.asarray, x) for x in (found, expected))
    assert o.shape == exact.shape
    error = o.astype(np.float64) - exact
    assert not np.isnan(error).any()
    if o.dtype == np.float32:
        assert np.abs(error).max(initial=0) <= FLOAT32_LIMIT * np.abs(exact).max(initial=0)
    else:
        rounding = exact.astype(o.dtype).astype(np.float64) - exact
        assert np.linalg.norm(error) <= ROUNDING_LIMIT * np.linalg.norm(rounding)
    blind = np.isneginf(exact_lse)
    assert lse.dtype == np.float32
    assert np.array_equal(np.isneginf(lse), blind)
    assert np.abs(lse[~blind] - exact_lse[~blind]).max(initial=0) <= 1e-5
