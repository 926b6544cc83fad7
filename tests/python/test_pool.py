"""A pool of caches on other devices gives decoding on its own mesh, bit for bit."""

from functools import partial

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from burst_attention._pool import plan, programs, ways
from decode_cases import SINKS, SLOPES, Sharding, check, problem
from decode_reference import dense
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from long import some

pytestmark = [pytest.mark.needs("products"), pytest.mark.oldest_jax]

HEADS, DIM = 12, 8
"""Heads of queries and keys, which 1 to 4 devices divide."""


def some_of(cases, count):
    """Returns cases of several values, all but the first ``count`` of them marked as long."""
    return [*cases[:count], *(pytest.param(*x, marks=pytest.mark.long) for x in cases[count:])]


def model(count, axis_type=AxisType.Auto):
    """Returns a mesh of a model's devices."""
    return Mesh(ring.devices(count), ("tensor",), axis_types=(axis_type,))


def pool(count, **options):
    """Returns a pool of devices that no model of the tests has."""
    return ba.CachePool(list(ring.devices(8)[4 : 4 + count]), **options)


def put(mesh, spec, *arrays):
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]


def reference(found, is_paged=False, **static):
    """Returns a step on a pool's own mesh, which appends and attends inside `shard_map`."""
    cut = P("context") if is_paged else P(None, "context")
    place = found._place.options

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=found.mesh,
        in_specs=(cut, P(), P(), P(), P(None, "context")),
        out_specs=(P(), cut),
    )
    def step(caches, tokens, lengths, data, prefix):
        query, *new = tokens
        placed = {n: x for n, x in data.items() if n in ("page_table", "query_lengths")}
        caches = ba.append_to_cache(*caches, *new, lengths, **placed, **place)
        given = {**data, **static, **place}
        if prefix:
            return ba.shared_prefix_attention(query, *prefix, *caches, lengths, **given), caches
        return ba.decode_attention(query, *caches, lengths, **given), caches

    return step


def equal(found, expected):
    """Asserts that trees of arrays have the same bits."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.fixture
def sent(monkeypatch):
    """Returns the bytes of each array that crosses, between devices that share no memory."""
    found, send = [], ways.send

    def counting(arrays, shardings):
        # The devices of each shard on the other side hold one copy of it.
        arrived = send(arrays, shardings)
        found.extend(sum(shard.data.nbytes for shard in x.addressable_shards) for x in arrived)
        return arrived

    cached = (ways.way, ways.way_back, plan.plan)
    with monkeypatch.context() as patches:
        patches.setattr(ways, "_is_in_host", lambda sharding: False)
        patches.setattr(ways, "send", counting)
        for each in cached:
            each.cache_clear()
        yield found
    for each in cached:
        each.cache_clear()


@pytest.mark.parametrize("holders", some([4, 3, 2, 1], 2))
def test_bits_are_those_of_the_pools_mesh(holders):
    """For models of 1 to 4 devices, with whole tokens and with their heads sharded."""
    there = pool(holders)
    step, lengths = reference(there), [np.array(x, np.int32) for x in ([1, 0, 7], [2, 1, 8])]
    tokens = [ring.normal(i, *[(3, 1, HEADS, DIM)] * 3) for i in range(2)]
    init = partial(there.init, batch=3, positions=12, kv_heads=HEADS, head_dim=DIM)
    expected, caches = [], init(dtype=tokens[0][0].dtype)
    for new, size in zip(tokens, lengths, strict=True):
        out, caches = step(caches, new, size, {}, ())
        expected.append(out)
    for count in range(1, 5):
        for spec in (P(), P(None, None, "tensor")):
            found = init(dtype=tokens[0][0].dtype)
            for new, size, exact in zip(tokens, lengths, expected, strict=True):
                sharded = put(model(count), spec, *new)
                out, found = there.attend(found, *sharded, size)
                assert out.sharding == sharded[0].sharding
                equal(out, exact)
            equal(found, caches)


@pytest.mark.parametrize("spec", some([P(None, None, "tensor"), P("tensor"), P()]))
@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
def test_pages_and_options(types, spec):
    """Ragged tokens and lengths, every option; the model's axes Auto or Explicit."""
    sharding = Sharding(2, page=4, capacity=16)
    case = problem(
        sharding, [9, 0, 1, 30], 3, counts=np.array([3, 2, 1, 0]), window=20, soft_cap=3.0,
        sinks=SINKS, slopes=SLOPES,
    )  # fmt: skip
    there = pool(2)
    # All devices share a page table, and a step writes the tokens' own positions again.
    table = np.random.default_rng(0).permutation(16).astype(np.int32).reshape(4, 4)
    shapes = ([(2 * 16, 4, 2, 16)] * 2, [(4, 3, 2, 16)] * 2)
    caches, new = (ring.normal(i, *shape) for i, shape in enumerate(shapes))
    caches = put(there.mesh, P("context"), *caches)
    names = {"local_window_size": 20, "logits_soft_cap": 3.0, "return_residual": True}
    data = {"page_table": table, "query_lengths": case.features["counts"].astype(np.int32)}
    data |= {"sinks": SINKS, "alibi_slopes": SLOPES}
    step = reference(there, is_paged=True, **names)
    expected = step(tuple(caches), (case.q, *new), case.lengths, data, ())
    tokens = put(model(2, types), spec, case.q, *new)
    (out, lse), found = there.attend(tuple(caches), *tokens, case.lengths, **data, **names)
    assert (out.sharding, lse.sharding) == (tokens[0].sharding,) * 2
    equal(((out, lse), found), expected)


@pytest.mark.parametrize(("is_paged", "dim"), [(False, 24), (True, 24), (True, 264)])
def test_latents_have_one_array(is_paged, dim):
    """A step and a chunk of a prompt give the bits of caches that hold the values too."""
    there, sizes = pool(2), [np.array(x, np.int32) for x in ([20, 17], [21, 18])]
    shape = {"pages": 6, "page": 4} if is_paged else {"batch": 2, "positions": 24}
    data = {"page_table": np.array([[4, 0, 2, 6, 7, 8], [1, 5, 3, 9, 10, 11]])} if is_paged else {}
    init = partial(there.init, kv_heads=1, head_dim=dim, dtype=np.float32, **shape)
    found, expected = init(latents=True), init(value_dim=16)
    assert found[1] is None
    steps = [
        ring.normal(i, (2, n, 4, dim), (2, n, 1, dim), dtype=np.float32)
        for i, n in ((0, 20), (1, 1))
    ]
    step = reference(there, is_paged, value_dim=16)
    for (query, key), size in zip(steps, sizes, strict=True):
        q, k, v = put(model(2), P(), query, key, key[..., :16])
        if q.shape[1] == 1:
            same_cache = jnp.copy(found[0]), None
            same, _ = step(same_cache, (query, key, None), size, data, ())
            out, found = there.attend(found, q, k, None, size, value_dim=16, **data)
            equal(out, same)
            want, expected = there.attend(expected, q, k, v, size, **data)
            np.testing.assert_allclose(np.asarray(out), np.asarray(want), rtol=1e-5, atol=1e-6)
        else:
            out, found = there.prefill(found, q, k, None, size, value_dim=16, **data)
            want, expected = there.prefill(expected, q, k, v, size, **data)
            equal(out, want)
        equal(found[0], expected[0])


def test_few_key_heads_are_whole_beside_sharded_queries(sent):
    there, mesh = pool(4), model(4)
    given = ring.normal(0, (2, 1, 4, 8), *[(2, 1, 2, 8)] * 2)
    specs, lengths = (P(None, None, "tensor"), P(), P()), np.array([3, 1])
    init = partial(there.init, batch=2, positions=4, kv_heads=2, head_dim=8, dtype=given[0].dtype)
    tokens = [put(mesh, spec, x)[0] for x, spec in zip(given, specs, strict=True)]
    found = there.attend(init(), *tokens, lengths)
    equal(found, reference(there)(init(), given, lengths, {}, ()))
    assert sum(sent) == sum(x.nbytes for x in (given[0], *given))


@pytest.mark.parametrize("is_latent", [False, True])
def test_prefixes(is_latent):
    there, (query, key, value) = pool(2), ring.normal(0, (4, 1, 4, 16), *[(4, 1, 2, 16)] * 2)
    prefix, caches = (
        tuple(put(there.mesh, P(None, "context"), *ring.normal(i, *[(n, 8, 2, 16)] * 2)))
        for i, n in enumerate((2, 4))
    )
    given = {}
    if is_latent:
        prefix, caches, value, given = (prefix[0], None), (caches[0], None), None, {"value_dim": 8}
    data = {"prefix_of": np.array([0, 0, 1, -1]), "prefix_lengths": np.array([7, 5])}
    lengths, step = np.array([3, 1, 0, 8]), reference(there, **given)
    expected = step(caches, (query, key, value), lengths, data, prefix)
    tokens = [x if x is None else put(model(3), P(), x)[0] for x in (query, key, value)]
    equal(there.attend(caches, *tokens, lengths, prefix=prefix, **data, **given), expected)


@pytest.mark.parametrize(
    ("layout", "page", "is_latent", "dim", "given"),
    some_of(
        [
            ("striped", None, False, 16, {"sinks": SINKS, "local_window_size": 9}),
            ("contiguous", None, True, 16, {"value_dim": 8}),
            ("striped", 4, False, 16, {"alibi_slopes": SLOPES}),
            ("striped", 4, True, 264, {"value_dim": 8, "sinks": SINKS, "local_window_size": 9}),
        ],
        2,
    ),
)
def test_a_prompt_behind_a_prefix_is_a_prompt_that_begins_with_it(
    layout, page, is_latent, dim, given
):
    there = pool(2, layout=layout, interleave=page)
    sizes, counts = np.array([7, 12]), np.array([6, 3, 5, 4])
    source = np.array([1, 0, -1, 1])
    before = np.append(sizes, 0)[source]
    new = ring.normal(0, *[(2, 12, heads, dim) for heads in (4, 2, 2)])
    chunk = ring.normal(1, *[(4, 6, heads, dim) for heads in (4, 2, 2)])
    if is_latent:
        new[2] = chunk[2] = None
    init = partial(there.init, kv_heads=2, head_dim=dim, dtype=chunk[0].dtype, latents=is_latent)

    def fill(cache, tokens, lengths, **options):
        tokens = [x if x is None else put(model(2), P(), x)[0] for x in tokens]
        return there.prefill(cache, *tokens, lengths, **given, **options)

    # The prefixes in caches of their own, and in front of each sequence.
    _, prefix = fill(init(batch=2, positions=16), new, sizes, query_lengths=sizes)
    copies = [x if x is None else x[source] for x in new]
    _, whole = fill(init(batch=4, positions=24), copies, before, query_lengths=before)
    want, _ = fill(whole, chunk, before + counts, query_lengths=counts, return_residual=True)
    shape = {"pages": 5, "page": page} if page else {"batch": 4, "positions": 8}
    table = {"page_table": np.array([[3], [0], [4], [1]])} if page else {}
    data = {"prefix": prefix, "prefix_of": source, "prefix_lengths": sizes, **table}
    found, _ = fill(
        init(**shape), chunk, counts, query_lengths=counts, return_residual=True, **data
    )
    for x, y in zip(found, want, strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("layout", "page", "spec", "window", "dim"),
    some_of(
        [
            ("striped", 4, P("tensor"), 6, 16),
            ("contiguous", None, P(), None, 16),
            ("striped", 4, P(None, "tensor"), 6, 264),
            ("striped", None, P(None, "tensor"), None, 16),
            ("striped", 4, P("tensor"), None, 16),
            ("contiguous", None, P(), 6, 16),
            ("contiguous", None, P(), 6, 264),
            ("striped", None, P(None, "tensor"), 6, 16),
        ],
        3,
    ),
)
def test_a_prompt_in_chunks_is_attention_over_all_tokens(layout, page, spec, window, dim):
    """Chunks of 20 and 6 tokens, the last one not full in each sequence; then one token.

    Heads of 264 columns are wider than a ring takes.
    """
    there, ends = pool(2, layout=layout), np.array([[20, 20], [26, 22], [27, 23]], np.int32)
    counts = np.diff(ends, axis=0, prepend=0)
    sharding = Sharding(2, layout, page=page, capacity=16)
    case = problem(sharding, ends[-1], 27, dims=(dim, dim), window=window)
    query = ring.normal(1, (2, 27, 4, dim))[0]
    shape = {"pages": 8, "page": page} if page else {"batch": 2, "positions": 32}
    caches = there.init(kv_heads=2, head_dim=dim, dtype=query.dtype, **shape)
    data = {"page_table": np.array([[4, 0, 2, 7], [1, 5, 3, 6]])} if page else {}
    outs = [[], []]
    options = {**data, "local_window_size": window, "return_residual": True}
    for end, count in zip(ends, counts, strict=True):
        size, first = max(count), end - count
        new = [
            np.stack([np.resize(x[b, n : n + c], (size, *x.shape[2:])) for b, (n, c) in bounds])
            for x in (query, case.k, case.v)
            for bounds in [list(enumerate(zip(first, count, strict=True)))]
        ]
        call = there.attend if size == 1 else there.prefill
        results, caches = call(
            caches,
            *put(model(2), spec if size > 1 else P(), *new),
            end,
            query_lengths=count,
            **options,
        )
        for b, c in enumerate(count):
            outs[b].append([np.asarray(x)[b, :c] for x in results])
            assert not np.asarray(results[0])[b, c:].any()
    for b, length in enumerate(ends[-1]):
        found = [np.concatenate(x)[None] for x in zip(*outs[b], strict=True)]
        exact = dense(
            query[b : b + 1, :length], case.k[b : b + 1], case.v[b : b + 1], ends[-1][b : b + 1],
            **({} if window is None else {"window": window}),
        )  # fmt: skip
        check(found, exact)


def test_a_thousand_steps_trace_once_and_write_in_place(monkeypatch):
    traced, append = [], programs.append_to_cache
    monkeypatch.setattr(
        programs, "append_to_cache", lambda *x, **y: traced.append(1) or append(*x, **y)
    )
    there, mesh = pool(2, interleave=2), model(1)
    tokens = put(mesh, P(), *ring.normal(0, *[(2, 1, 1, 8)] * 3))
    caches = there.init(batch=2, positions=1000, kv_heads=1, head_dim=8, dtype=tokens[0].dtype)
    places = [x.data.unsafe_buffer_pointer() for x in caches[0].addressable_shards]
    for length in range(1, 1001):
        old = caches
        _, caches = there.attend(caches, *tokens, np.array([length, length // 2]))
    assert len(traced) == 1
    assert all(x.is_deleted() for x in old)
    assert places == [x.data.unsafe_buffer_pointer() for x in caches[0].addressable_shards]
    assert np.array_equal(np.asarray(caches[0])[0], np.broadcast_to(tokens[1][0], (1000, 1, 8)))


@pytest.mark.parametrize(
    ("count", "holders", "spec"),
    some_of(
        [
            (4, 4, P(None, None, "tensor")),
            (4, 2, P("tensor")),
            (1, 4, P()),
            (4, 4, P()),
            (2, 3, P(None, None, "tensor")),
        ],
        3,
    ),
)
def test_query_key_value_and_out_cross_once(sent, count, holders, spec):
    there, (heads, kv_heads, dim, value_dim) = pool(holders), (8, 4, 16, 24)
    shapes = [(4, 2, heads, dim), (4, 2, kv_heads, dim), (4, 2, kv_heads, value_dim)]
    tokens = put(model(count), spec, *ring.normal(0, *shapes))
    caches = there.init(
        batch=4, positions=8, kv_heads=kv_heads, head_dim=dim, value_dim=value_dim,
        dtype=tokens[0].dtype,
    )  # fmt: skip
    there.attend(caches, *tokens, np.full(4, 2))
    numbers = (heads + kv_heads) * dim + (heads + kv_heads) * value_dim
    assert sum(sent) == 4 * 2 * numbers * tokens[0].dtype.itemsize


def test_nothing_passes_through_the_host(monkeypatch):
    """Neither whole nor sharded arrays, whether both sides have equally many devices or not."""
    there = pool(2)
    init = partial(there.init, batch=4, positions=8, kv_heads=4, head_dim=8)
    given = ring.normal(0, *[(4, 1, 4, 8)] * 3)
    cases = [put(model(count), spec, *given) for count in (1, 2, 4) for spec in (P(), P("tensor"))]
    kept = [init(dtype=given[0].dtype) for _ in cases]
    lengths = there.put(np.ones(4, np.int32))

    def refuse(_):
        raise AssertionError("read by the host")

    monkeypatch.setattr(type(lengths), "_value", property(refuse))
    with pytest.raises(AssertionError, match="read by the host"):
        np.asarray(cases[3][0])
    for tokens, caches in zip(cases, kept, strict=True):
        there.attend(caches, *tokens, lengths)
        there.prefill(init(dtype=given[0].dtype), *tokens, lengths)


def test_batches_in_turn():
    """Each batch goes on to its next yield; results come in the order of the batches."""
    order = []

    def step(batch):
        for layer in range(batch):
            order.append((batch, layer))
            yield
        return -batch

    assert ba.alternate(step, (2, 0, 3)) == [-2, 0, -3]
    assert order == [(2, 0), (3, 0), (2, 1), (3, 1), (3, 2)]
    with pytest.raises(TypeError, match="step must be a generator function, which yields between"):
        ba.alternate(lambda batch: batch, [1])


def test_two_batches_over_one_pool_are_each_alone():
    there, mesh = pool(3), model(2)
    first = [put(mesh, P(), *ring.normal(i, *[(1, 1, 2, 8)] * 3)) for i in range(2)]
    double = jax.jit(lambda x: 2 * x)

    def step(tokens):
        caches, out = (
            there.init(batch=1, positions=6, kv_heads=2, head_dim=8, dtype=tokens[0].dtype),
            0,
        )
        for length in range(1, 4):
            pending, caches = there.send(caches, *tokens, np.array([length]))
            yield
            out = double(pending.receive())
        return out

    found = ba.alternate(step, first)
    equal(found, [ba.alternate(step, [each])[0] for each in first])


def test_meshes():
    """A pool may be a mesh of two axes, whose ranks count as in `decode_attention`."""
    devices = ring.devices(8)[4:].reshape(2, 2)
    there = ba.CachePool(Mesh(devices, ("node", "gpu")), layout="contiguous")
    line = pool(4, layout="contiguous")
    tokens = put(model(1), P(), *ring.normal(0, *[(2, 1, 2, 8)] * 3))
    results = []
    for each in (there, line):
        caches = each.init(batch=2, positions=5, kv_heads=2, head_dim=8, dtype=tokens[0].dtype)
        assert caches[0].shape == (2, 8, 2, 8)
        for length in (4, 5, 6):
            out, caches = each.attend(caches, *tokens, jnp.array([length, 1]))
        results.append((out, caches))
    equal(*results)
    assert repr(there).endswith("axis_name=('node', 'gpu'), layout='contiguous', interleave=None)")
