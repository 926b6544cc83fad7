"""`CachePool.prefill` and `attend` agree on all that both take."""

import jax
import numpy as np
import pytest
import ring
from case_list import pairwise
from jax.sharding import PartitionSpec as P
from long import spread
from test_pool import model, pool, put

pytestmark = pytest.mark.needs("products")

BATCH, KV_HEADS, CAPACITY, PREFIXES = 4, 2, 24, 2
VALUES = {
    "place": ["striped", "runs", "contiguous", "pages"],
    "tokens": [5, 1, 16],
    "dim": [16, 264],
    "is_latent": [False, True],
    "window": [None, 0, 3, (0, 0), (2, None), (None, 5), (-1, 0), np.int64(0)],
    "cap": [None, 0, 2.5],
    "scale": [None, 0.0, -0.7],
    "extra": ["none", "sinks", "slopes", "both"],
    "prefix": [False, True],
    "dtype": ["float32", "bfloat16"],
    "implementation": [None, "xla"],
}
CASES = list(pairwise(VALUES, lambda picked, values: 0))
DRAWS = 4
MOST = 2**31 - 1


def named(choice):
    """Returns the name of a case."""
    return "-".join(map(str, choice.values()))


def lengths_of(rng, tokens):
    """Returns lengths, and how many new tokens are in use, at all edges of both."""
    ends = [rng.choice([-3, 0, 1, tokens - 1, tokens, CAPACITY, MOST]), *rng.integers(0, 25, 3)]
    counts = [*rng.choice([-1, 0, 1, tokens, tokens + 9], 3), rng.integers(0, tokens + 1)]
    return np.array(ends), [None, np.array(counts, rng.choice(["int32", "int8", "int64"]))][
        rng.integers(2)
    ]


def placed(choice):
    """Returns a pool, and the sizes of its caches."""
    kind, is_paged = choice["place"], choice["place"] == "pages"
    layout = "contiguous" if kind == "contiguous" else "striped"
    interleave = {"runs": 2, "pages": 4}.get(kind)
    there = pool(2, layout=layout, interleave=interleave)
    sizes = {"pages": 15, "page": 4} if is_paged else {"batch": BATCH, "positions": CAPACITY}
    heads = {"kv_heads": KV_HEADS, "head_dim": choice["dim"], "dtype": choice["dtype"]}
    return there, sizes, heads | {"latents": choice["is_latent"]}


def filled(rng, cache):
    """Returns caches of random rows, some of which no query may see: they hold NaN."""
    return [x if x is None else put_like(x, rows(rng, x)) for x in cache]


def rows(rng, x):
    found = rng.standard_normal(x.shape)
    return found.astype(x.dtype)


def put_like(x, value):
    return jax.device_put(value, x.sharding)


def draw(rng, choice, there, sizes, heads):
    """Returns the arrays of a call, and its options."""
    count, dim = choice["tokens"], choice["dim"]
    dtype = jax.numpy.dtype(choice["dtype"])
    shapes = [(BATCH, count, n, dim) for n in (4, KV_HEADS, KV_HEADS)]
    tokens = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    lengths, counts = lengths_of(rng, count)
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


@pytest.mark.parametrize("choice", spread(CASES, 8), ids=named)
def test_prefill_and_attend_agree(choice):
    rng = np.random.default_rng(0)
    there, sizes, heads = placed(choice)
    bound = {"float32": 2e-5, "bfloat16": 3e-2}[choice["dtype"]]
    for _ in range(DRAWS):
        tokens, lengths, options = draw(rng, choice, there, sizes, heads)
        tokens = [x if x is None else put(model(1), P(), x)[0] for x in tokens]
        start = filled(rng, there.init(**sizes, **heads))
        found = []
        for method in ("attend", "prefill"):
            cache = [x if x is None else jax.numpy.copy(x) for x in start]
            results, cache = getattr(there, method)(cache, *tokens, lengths, **options)
            found.append([np.asarray(x, np.float64) for x in (*results, *cache) if x is not None])
        for x, y in zip(*found, strict=True):
            np.testing.assert_allclose(y, x, rtol=bound, atol=bound)
