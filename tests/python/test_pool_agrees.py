"""`CachePool.prefill` and `attend` agree on all that both take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from burst_attention._decode.geometry import Geometry
from case_list import pairwise
from jax.sharding import PartitionSpec as P
from long import spread
from test_pool import model, pool, put

pytestmark = pytest.mark.needs("products")

BATCH, KV_HEADS, CAPACITY, PREFIXES, RANKS = 4, 2, 24, 2, 2
RUNS = {"striped": 1, "runs": 2, "contiguous": 12, "pages": 4}
"""Consecutive positions on a device."""
VALUES = {
    "place": ["striped", "runs", "contiguous", "pages"],
    "tokens": [16, 1, 5],
    "dim": [16, 264],
    "is_latent": [False, True],
    "window": [0, None, 3, (0, 0), (2, None), (None, 5), (-1, 0), np.int64(0)],
    "cap": [2.5, 0, None],
    "scale": [None, 0.0, -0.7],
    "extra": ["both", "sinks", "slopes", "none"],
    "prefix": [True, False],
    "dtype": ["float32", "bfloat16"],
    "implementation": [None, "xla"],
}
CASES = list(pairwise(VALUES, lambda picked, values: 0))
DRAWS = 4


def named(choice):
    """Returns the name of a case."""
    return "-".join(map(str, choice.values()))


def lengths_of(rng, tokens, has_slopes):
    """Returns lengths, and how many new tokens are in use, at all edges of both."""
    # Slopes multiply distances in float32, which can't tell those beyond 2²⁴ apart.
    most = CAPACITY + 5 if has_slopes else 2**31 - 1
    ends = [rng.choice([-3, 0, 1, tokens - 1, tokens, CAPACITY, most]), *rng.integers(0, 25, 3)]
    counts = [*rng.choice([-1, 0, 1, tokens, tokens + 9], 3), rng.integers(0, tokens + 1)]
    return np.array(ends), np.array(counts, rng.choice(["int32", "int8", "int64"]))


def placed(choice):
    """Returns a pool, and the sizes of its caches."""
    kind, is_paged = choice["place"], choice["place"] == "pages"
    layout = "contiguous" if kind == "contiguous" else "striped"
    there = pool(RANKS, layout=layout, interleave=None if kind == "contiguous" else RUNS[kind])
    sizes = {"pages": 15, "page": 4} if is_paged else {"batch": BATCH, "positions": CAPACITY}
    heads = {"kv_heads": KV_HEADS, "head_dim": choice["dim"], "dtype": choice["dtype"]}
    return there, sizes, heads | {"latents": choice["is_latent"]}


def filled(rng, cache, lengths=None, run=1):
    """Returns caches of random rows. With lengths, rows that no query may see are NaN."""

    def rows(x):
        values = rng.standard_normal(x.shape).astype(x.dtype)
        if lengths is not None:
            place = Geometry(run, RANKS, CAPACITY // RANKS)
            within, ranks = jnp.arange(CAPACITY // RANKS), jnp.arange(RANKS)
            positions = np.concatenate([place.positions(within, rank) for rank in ranks])
            values[positions >= lengths[:, None]] = np.nan
        return jax.device_put(values, x.sharding)

    return [x if x is None else rows(x) for x in cache]


def draw(rng, choice, there, sizes, heads):
    """Returns the arrays of a call, and its options."""
    count, dim = choice["tokens"], choice["dim"]
    dtype = jax.numpy.dtype(choice["dtype"])
    shapes = [(BATCH, count, n, dim) for n in (4, KV_HEADS, KV_HEADS)]
    tokens = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    lengths, counts = lengths_of(rng, count, choice["extra"] in ("slopes", "both"))
    counts = counts if rng.integers(2) else None
    options = {"local_window_size": choice["window"], "logits_soft_cap": choice["cap"]}
    options |= {"scale": choice["scale"], "implementation": choice["implementation"]}
    options |= {"query_lengths": counts, "return_residual": True}
    for name, extra in (("sinks", "sinks"), ("alibi_slopes", "slopes")):
        if choice["extra"] in (extra, "both"):
            options[name] = rng.standard_normal(4).astype(np.float32)
    if choice["is_latent"]:
        tokens[2], options["value_dim"] = None, 8
    if "pages" in sizes:
        table = rng.permutation(15)[:12].reshape(4, 3)
        odd = rng.choice([-1, 15, 2**32, -(2**40)], table.shape)
        options["page_table"] = np.where(rng.random(table.shape) < 0.2, odd, table)
    if choice["prefix"]:
        options["prefix"] = filled(rng, there.init(batch=PREFIXES, positions=8, **heads))
        options["prefix_of"] = rng.choice([-1, 0, 1, 2, 2**32], BATCH)
        options["prefix_lengths"] = rng.choice([-2, 0, 1, 5, 8, 11], PREFIXES)
    return tokens, lengths, options


@pytest.mark.parametrize("choice", spread(CASES, 16), ids=named)
def test_prefill_and_attend_agree(choice):
    rng = np.random.default_rng(0)
    there, sizes, heads = placed(choice)
    bound = {"float32": 2e-5, "bfloat16": 3e-2}[choice["dtype"]]
    for _ in range(DRAWS):
        tokens, lengths, options = draw(rng, choice, there, sizes, heads)
        tokens = [x if x is None else put(model(1), P(), x)[0] for x in tokens]
        start = there.init(**sizes, **heads)
        is_paged, run = "pages" in sizes, RUNS[choice["place"]]
        start = filled(rng, start, None if is_paged else lengths, run)
        found = []
        for method in ("attend", "prefill"):
            cache = [x if x is None else jnp.copy(x) for x in start]
            results, cache = getattr(there, method)(cache, *tokens, lengths, **options)
            found.append([np.asarray(x, np.float64) for x in (*results, *cache) if x is not None])
        for x, y in zip(*found, strict=True):
            np.testing.assert_allclose(y, x, rtol=bound, atol=bound)
