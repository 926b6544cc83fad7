"""Decoding over a sharded cache gives dense attention over each whole sequence."""

import burst_attention as ba
import case_list
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from burst_attention._decode import calls
from burst_attention._decode.work import Operands, Work
from decode_cases import (
    FEATURES,
    FLOAT32_LIMIT,
    IMPLEMENTATIONS,
    SHARDINGS,
    SINKS,
    SLOPES,
    Sharding,
    check,
    decode,
    problem,
)
from decode_reference import dense
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from long import some, spread, with_plain
from test_plain import mesh_of

pytestmark = [pytest.mark.needs("products"), pytest.mark.oldest_jax]

RAGGED = [37, 0, 1, 64, 9]
SHAPES = case_list.of("decode", "shapes")
"""Heads of queries and keys, dimensions of keys and values."""


def assert_right(case, **options):
    expected = dense(case.q, case.k, case.v, case.lengths, **case.features)
    check(decode(case, **options), expected)


@pytest.mark.parametrize(
    ("name", "implementation"), with_plain(SHARDINGS, "two, contiguous", "eight, pages")
)
def test_every_sharding_is_dense_attention(name, implementation):
    case = problem(SHARDINGS[name], RAGGED, 3, window=20, sinks=SINKS, slopes=SLOPES)
    assert_right(case, implementation=implementation)


@pytest.mark.parametrize(("name", "implementation"), with_plain(FEATURES, "all", "ragged queries"))
def test_features(name, implementation):
    case = problem(Sharding(4, page=4, capacity=16), RAGGED, 4, **FEATURES[name])
    assert_right(case, implementation=implementation)


def test_the_right_side_of_a_window_counts_as_0():
    """As with a causal mask in `attention`."""
    case = problem(Sharding(1), RAGGED, 3)
    found, expected = (decode(case, local_window_size=sides) for sides in ((5, 9), 5))
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("tokens", spread(range(1, 17), 5))
def test_new_tokens(tokens):
    assert_right(problem(Sharding(2, capacity=32), RAGGED, tokens))


def test_no_more_queries_are_in_use_than_there_are():
    case = problem(Sharding(2, capacity=32), RAGGED, 3)
    assert_right(case, query_lengths=np.full(len(RAGGED), 9))


@pytest.mark.parametrize(("shape", "implementation"), with_plain(SHAPES, SHAPES[3]), ids=str)
@pytest.mark.parametrize("dtype", some(["bfloat16", "float32", "float16"]))
def test_heads_and_types(shape, dtype, implementation):
    case = problem(Sharding(2, capacity=32), RAGGED, 2, *shape, dtype)
    assert_right(case, implementation=implementation)


def test_axes_of_nodes_and_of_batch_and_heads():
    """Two axes hold the sequence, and another axis the heads, each half with its own slopes."""
    mesh = Mesh(ring.devices(2, 2, 2), ("tensor", "node", "gpu"))
    case = problem(Sharding(4, capacity=16), RAGGED, 2, slopes=SLOPES)
    caches = [case.sharding.dealt(x) for x in (case.k, case.v)]

    def local(q, k, v, lengths, slopes):
        axes = ("node", "gpu")
        return ba.decode_attention(q, k, v, lengths, axis_name=axes, alibi_slopes=slopes)

    heads, cache = P(None, None, "tensor"), P(None, ("node", "gpu"), "tensor")
    specs = (heads, cache, cache, P(), P("tensor"))
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=heads))
    found = run(case.q, *caches, case.lengths, SLOPES)
    exact, _ = dense(case.q, case.k, case.v, case.lengths, slopes=SLOPES)
    assert np.abs(found - exact).max() <= FLOAT32_LIMIT * np.abs(exact).max()


def test_a_mesh_that_tracks_no_types_and_64_bits():
    """Neither `check_vma=False` nor JAX's types of 64 bits change a result."""
    case = problem(Sharding(2, page=8, capacity=32), RAGGED, 2, slopes=SLOPES)
    expected = decode(case)
    with jax.enable_x64(True):
        case.lengths = case.lengths.astype(np.int64)
        found = decode(case, check_vma=False)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype
        assert np.array_equal(x, y)


@pytest.mark.needs("float32")
def test_calls_may_be_mapped():
    case = problem(Sharding(1), RAGGED, 2)
    each = [x[:, None] for x in (case.q, case.k, case.v, case.lengths)]
    found = jax.jit(jax.vmap(ba.decode_attention))(*each)[:, 0]
    exact, _ = dense(case.q, case.k, case.v, case.lengths)
    assert np.abs(found - exact).max() <= FLOAT32_LIMIT * np.abs(exact).max()


def lowered(platform, dtype="bfloat16", dim=8, **options):
    """Returns the program of a step for the devices of a platform, which the mesh tells.

    With value_dim the values are columns of the keys.
    """
    mesh = mesh_of(platform)
    cache = P(None, "context")
    run = jax.shard_map(
        lambda q, k, v, n: ba.decode_attention(
            *(q, k, None if "value_dim" in options else v, n), axis_name="context", **options
        ),
        mesh=mesh,
        in_specs=(P(), cache, cache, P()),
        out_specs=P(),
    )
    shapes = [((2, 1, 4, dim), dtype), *[((2, 64, 2, dim), dtype)] * 2, ((2,), "int32")]
    traced = jax.jit(run).trace(*(jax.ShapeDtypeStruct(*x) for x in shapes))
    return traced.lower(lowering_platforms=(platform,)).as_text()


def test_plain_jax_decodes_where_the_library_does_not():
    assert "burst_attention_decode" in lowered("cpu")
    for platform in ("tpu", "cuda", "rocm"):
        assert "burst_attention_decode" not in lowered(platform, implementation="xla")
    assert "burst_attention_decode" not in lowered("cpu", implementation="xla")
    assert "burst_attention_decode" not in lowered("tpu")
    assert "burst_attention_decode_pages" in lowered("cuda")


@pytest.mark.parametrize(
    ("platform", "dtype", "options", "words"),
    [
        ("cuda", "float32", {}, "decoding with float32 on NVIDIA GPUs, so plain JAX computes it"),
        ("cuda", "float16", {"scale": -0.5}, "decoding with scale -0.5 on NVIDIA GPUs"),
        ("cuda", "bfloat16", {"logits_soft_cap": 1e-4}, "with logits_soft_cap 0.0001 on NVIDIA"),
        ("cuda", "bfloat16", {"dim": 264}, "decoding with head_dim 264 on NVIDIA GPUs"),
        ("cuda", "float16", {"dim": 576, "value_dim": 520}, "with value_dim 520 on NVIDIA"),
        ("rocm", "bfloat16", {}, "decoding on GPUs that are not NVIDIA's, so plain JAX"),
    ],
)
def test_plain_jax_on_gpus_gives_a_warning(platform, dtype, options, words):
    with pytest.warns(UserWarning, match=words):
        assert "burst_attention_decode" not in lowered(platform, dtype, **options)


def test_a_step_has_two_messages():
    """One all-to-all and one all-gather, whatever the options."""
    text = lowered("cpu", sinks=SINKS, return_residual=False)
    assert text.count("stablehlo.all_to_all") == text.count("stablehlo.all_gather") == 1
    assert "collective_permute" not in text
    assert "all_reduce" not in text


def test_without_an_axis_a_device_has_whole_sequences():
    case = problem(Sharding(1), RAGGED, 2)
    found = jax.jit(ba.decode_attention)(case.q, case.k, case.v, case.lengths)
    assert np.array_equal(found, decode(case)[0])


@pytest.mark.needs("float32")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("world", [1, 4, 16])
def test_errors_do_not_grow_with_ranks(world, implementation):
    """The parts of 16 ranks, computed by one device, merge to a result as good as that of one."""
    sharding = Sharding(world, capacity=1024 // world)
    case = problem(sharding, [1024, 777], 1, dims=(64, 64))
    keys, values = (np.split(sharding.dealt(x), world, axis=1) for x in (case.k, case.v))
    work = Work(64**-0.5, 0.0, -1, 1, world, "fixed", implementation)
    entries = jnp.arange(2, dtype=jnp.int32)
    counts = jnp.ones(2, jnp.int32)

    @jax.jit
    def part(k, v, rank):
        lengths = jnp.asarray(case.lengths)
        arrays = (entries[:, None], entries, lengths, lengths - 1, counts, rank, None)
        return calls.partial(work, Operands(jnp.asarray(case.q), k, v, *arrays))

    parts = [
        part(k, v, jnp.int32(rank)) for rank, (k, v) in enumerate(zip(keys, values, strict=True))
    ]
    check(ba.merge_attention(*parts), dense(case.q, case.k, case.v, case.lengths))


@pytest.mark.needs("float32")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_lengths_and_pages_out_of_range_are_defined(implementation):
    """Keys beyond the capacity and on pages that do not exist are hidden. Positions stay."""
    sharding = Sharding(1, page=16)
    case = problem(sharding, [64, 64, 64], 1, slopes=SLOPES)
    k, v, table = sharding.paged(case.lengths, case.k, case.v)
    table[0, 1], table[1, 2] = len(k), -7
    lengths = np.array([64, 70, -5], np.int32)
    found, lse = jax.jit(
        lambda *x: ba.decode_attention(
            *x,
            page_table=table,
            alibi_slopes=SLOPES,
            return_residual=True,
            implementation=implementation,
        )
    )(case.q, k, v, lengths)
    for entry, hidden, place in ((0, slice(16, 32), 63), (1, slice(32, 48), 69)):
        keep = np.delete(np.arange(64), hidden)
        for head in range(4):
            k_rows, v_rows = (
                x[entry, keep, head // 2].astype(np.float64) for x in (case.k, case.v)
            )
            s = k_rows @ case.q[entry, 0, head] / 4 + SLOPES[head] * (keep - place)
            exact = np.exp(s - np.logaddexp.reduce(s)) @ v_rows
            assert np.abs(found[entry, 0, head] - exact).max() <= 3e-6
    assert not found[2].any()
    assert np.isneginf(lse[2]).all()


def test_a_gradient_is_an_error_that_says_so():
    case = problem(Sharding(1), [9], 1)
    with pytest.raises(NotImplementedError, match="^decode_attention has no gradient: it computes"):
        jax.grad(lambda q: ba.decode_attention(q, case.k, case.v, case.lengths).sum())(case.q)
    stopped = jax.grad(
        lambda q: ba.decode_attention(jax.lax.stop_gradient(q), case.k, case.v, case.lengths).sum()
    )(case.q)
    assert not stopped.any()


def test_no_entry_and_no_row_give_nothing():
    q, cache = np.ones((0, 2, 4, 8), np.float32), np.ones((0, 16, 2, 8), np.float32)
    assert ba.decode_attention(q, cache, cache, np.zeros(0, np.int32)).shape == q.shape
    case = problem(Sharding(2), [], 2, sinks=SINKS)
    assert decode(case)[0].shape == case.q.shape
    q, cache = np.ones((2, 1, 4, 8), np.float32), np.ones((2, 0, 2, 8), np.float32)
    out, lse = ba.decode_attention(q, cache, cache, np.array([1, 0]), return_residual=True)
    assert not out.any()
    assert np.isneginf(lse).all()
