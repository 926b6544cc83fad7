"""On CPU devices each sequence's bits alone are its bits in any batch, slot and page."""

from dataclasses import dataclass, replace

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from decode_cases import SHARDED, WHOLE, Sharding, problem
from jax.sharding import PartitionSpec as P

pytestmark = pytest.mark.needs("host")

ENTRIES, PREFIXES = 8, np.array([120, 0, 75], np.int32)
SINKS = np.array([0.5, -1, 2, -np.inf, 0, 0.25, np.inf, 1], np.float32)


@dataclass(frozen=True)
class Case:
    """A call, whose sequences the tests put into batches."""

    sharding: Sharding
    tokens: int = 1
    heads: tuple[int, int] = (8, 2)
    dims: tuple[int, int] = (64, 64)
    dtype: str = "float32"
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    has_slopes: bool = False
    has_prefixes: bool = False
    split: str = "fixed"

    def features(self):
        heads = self.heads[0]
        sinks = {"sinks": SINKS[:heads]} if self.has_sinks else {}
        slopes = {"slopes": 0.5 ** np.arange(heads, dtype=np.float32)} if self.has_slopes else {}
        return {"window": self.window, "soft_cap": self.soft_cap} | sinks | slopes

    def of(self, sharding, lengths, tokens):
        """Returns new tokens and caches of normal numbers."""
        sizes = (self.heads, self.dims, self.dtype)
        return problem(sharding, lengths, tokens, *sizes, **self.features())

    def prefixes(self):
        """Returns the prefixes, in unpaged caches that are cut as the caches are."""
        run, world = self.sharding.page or self.sharding.interleave, self.sharding.world
        sharding = replace(self.sharding, page=None, interleave=run, capacity=128 // world)
        return self.of(sharding, PREFIXES, 1)


def program(case, own):
    """Returns a compiled step, in whose program other operations follow on the results."""
    prefix = case.prefixes()
    shared = [prefix.sharding.dealt(x) for x in (prefix.k, prefix.v)] if case.has_prefixes else []

    def step(q, k, v, table, lengths, of, shared):
        options = {"page_table": table, "split": case.split, "return_residual": True}
        options |= own.options | case.sharding.options
        if shared:
            found = ba.shared_prefix_attention(
                *(q, *shared, k, v, lengths), prefix_of=of, prefix_lengths=PREFIXES, **options
            )
        else:
            found = ba.decode_attention(q, k, v, lengths, **options)
        return found, jnp.exp(found[0] + found[1][..., None]).sum(-1)

    cache = P("context") if case.sharding.page else SHARDED
    specs = (WHOLE, cache, cache, P("context"), WHOLE, WHOLE, SHARDED)
    mesh = ring.line(case.sharding.world)
    step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=WHOLE)
    run = jax.jit(step)

    def of_entries(entries, of):
        """Returns out and lse of a batch of some entries, in pages of their own."""
        q, k, v, lengths = (x[entries] for x in (own.q, own.k, own.v, own.lengths))
        caches, table = [case.sharding.dealt(x) for x in (k, v)], None
        if case.sharding.page:
            *caches, table = case.sharding.paged(lengths, *caches, seed=len(entries))
        found, _ = run(q, *caches, table, lengths, of[entries], shared)
        return [np.asarray(x).view(f"u{x.dtype.itemsize}") for x in found]

    return of_entries


def check(case, batches, seed=0):
    """Compares the bits of entries in batches of several sizes with those of each entry alone."""
    random = np.random.default_rng(seed)
    most = case.sharding.world * case.sharding.capacity
    lengths = np.concatenate([[0, 1], random.integers(2, most + 1, ENTRIES - 2)])
    of = random.integers(-1, len(PREFIXES), ENTRIES).astype(np.int32)
    run = program(case, case.of(case.sharding, lengths, case.tokens))
    alone = [run(np.array([entry]), of) for entry in range(ENTRIES)]
    for size in batches:
        entries = random.integers(0, ENTRIES, size)
        for found, expected in zip(run(entries, of), zip(*alone, strict=True), strict=True):
            assert np.array_equal(found, np.concatenate([expected[entry] for entry in entries]))


PAGES = Case(
    *(Sharding(2, page=16, capacity=64), 3),
    has_sinks=True,
    has_slopes=True,
    has_prefixes=True,
    split="balanced",
)
CASES = {"ranks": (Case(Sharding(4, capacity=64)), [3, 8]), "prefixes in pages": (PAGES, [5])}


@pytest.mark.parametrize(("kind", "batches"), CASES.values(), ids=CASES)
def test_the_bits_of_a_sequence_are_its_own(kind, batches):
    check(kind, batches)


def drawn(seed):
    """Returns a random case."""
    random = np.random.default_rng(seed)

    def one_of(*values):
        return values[random.integers(len(values))]

    world, page = one_of(1, 2, 4, 8), one_of(None, 8, 16)
    return Case(
        Sharding(world, one_of("striped", "contiguous"), page=page, capacity=256 // world),
        tokens=one_of(1, 3),
        heads=one_of((8, 2), (8, 8), (4, 1), (6, 3)),
        dims=one_of((64, 64), (40, 24), (16, 128)),
        dtype=one_of("float32", "bfloat16", "float16"),
        window=one_of(None, 50),
        soft_cap=one_of(None, 3.0),
        has_sinks=one_of(False, True),
        has_slopes=one_of(False, True),
        has_prefixes=one_of(False, True),
        split=one_of("fixed", "balanced"),
    )


@pytest.mark.long
@pytest.mark.parametrize("seed", range(16))
def test_the_bits_of_a_sequence_are_its_own_in_random_cases(seed):
    check(drawn(seed), [2, 5, 8, 13], seed)
