"""shift gives each token its neighbour's value, against numpy on the whole sequence."""

import re
from functools import partial

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from burst_attention._layouts import LAYOUTS
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

pytestmark = pytest.mark.oldest_jax


def neighbours(x, offset, fill=0, ids=None):
    """Returns the neighbours' values in a whole sequence along axis 1, token by token."""
    out = np.full_like(x, fill)
    for b, p in np.ndindex(x.shape[:2]):
        q = p + offset
        if 0 <= q < x.shape[1] and (ids is None or (ids[b, p] == ids[b, q] and ids[b, p] >= 0)):
            out[b, p] = x[b, q]
    return out


def shifted(
    size, x, segment_ids=None, positions=None, *, mesh=None, axis_name="context", **options
):
    """Returns `shift` of a stored array, compiled."""

    def local(x, segment_ids, positions):
        arrays = {"segment_ids": segment_ids, "positions": positions}
        return ba.shift(x, axis_name=axis_name, **arrays, **options)

    spec, mesh = P(None, axis_name), mesh or ring.line(size)
    run = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
    return jax.jit(run)(x, segment_ids, positions)


def with_gradient(function, x, cotangent):
    """Returns a function's values, and the gradient of x for a cotangent."""

    @jax.jit
    def run(x, cotangent):
        out, pullback = jax.vjp(function, x)
        return out, pullback(cotangent)[0]

    return run(x, cotangent)


def check(size, layout, offset, length=None):
    """Checks values and gradients of floats in [batch, seq, 3]."""
    n = length or 6 * size
    x, cotangent = ring.normal(0, (2, n, 3), (2, n, 3))
    stored = ring.stored(layout, size, x, cotangent)
    function = partial(shifted, size, offset=offset, layout=layout)
    out, gradient = ring.restored(layout, size, *with_gradient(function, *stored))
    assert np.array_equal(out, neighbours(x, offset))
    assert np.array_equal(gradient, neighbours(cotangent, -offset))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("offset", [0, 1, -1, -3, 7, 23, 100])
def test_values_and_gradients(layout, offset):
    check(4, layout, offset)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("size", "offset"), [(1, -2), (2, 3), (3, 5), (8, -7)])
def test_every_size_of_ring(layout, size, offset):
    check(size, layout, offset)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_token_in_a_chunk(layout):
    check(4, layout, 1, length=8 if layout == "zigzag" else 4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("offset", [1, -2])
def test_two_axes_of_the_mesh(layout, offset):
    axes = ("node", "gpu")
    (x,) = ring.normal(1, (1, 32))
    (stored,) = ring.stored(layout, 8, x)
    mesh = Mesh(ring.devices(2, 4), axes)
    found = shifted(8, stored, mesh=mesh, axis_name=axes, layout=layout, offset=offset)
    assert np.array_equal(ring.restored(layout, 8, found)[0], neighbours(x, offset))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("offset", [1, -3])
def test_nothing_crosses_segments(layout, offset):
    generator = np.random.default_rng(0)
    ids = np.sort(generator.integers(-1, 4, (2, 24)), axis=1)[:, ::-1].astype(np.int32)
    x = generator.integers(0, 1000, (2, 24, 2)).astype(np.int32)
    stored = ring.stored(layout, 4, x, ids)
    found = shifted(4, *stored, offset=offset, layout=layout, fill=-100)
    (found,) = ring.restored(layout, 4, found)
    assert np.array_equal(found, neighbours(x, offset, -100, ids))


@pytest.mark.parametrize("offset", [0, 1, -1, 4, -4])
def test_blocks_in_any_order(offset):
    generator = np.random.default_rng(2)
    size, block, n = 4, 4, 48
    order = np.array([generator.permutation(n // block) for _ in range(2)])
    positions = (order[:, :, None] * block + np.arange(block)).reshape(2, n).astype(np.int32)
    x, cotangent = ring.normal(0, (2, n, 3), (2, n, 3))
    ids = np.sort(generator.integers(-1, 4, (2, n)), axis=1).astype(np.int32)

    def take(y):
        return np.take_along_axis(y, positions.reshape(2, n, *[1] * (y.ndim - 2)), 1)

    for whole in (None, ids):
        given = None if whole is None else take(ids)
        options = {"segment_ids": given, "positions": positions, "offset": offset, "block": block}
        found = with_gradient(partial(shifted, size, **options), take(x), take(cotangent))
        out, gradient = found
        assert np.array_equal(out, take(neighbours(x, offset, ids=whole)))
        assert np.array_equal(gradient, take(neighbours(cotangent, -offset, ids=whole)))


def test_labels_of_balanced_documents_need_one_trace():
    """And the blocks of documents are given to ranks anew for every batch."""
    generator, traces = np.random.default_rng(3), []
    spec = P(None, "context")

    @jax.jit
    @jax.shard_map(mesh=ring.line(4), in_specs=spec, out_specs=spec)
    def labels(tokens, ids, mask):
        traces.append(tokens)
        options = {"segment_ids": ids, "positions": mask.query_positions, "block": 8}
        return ba.shift(tokens, axis_name="context", fill=-100, **options)

    for _ in range(20):
        balance = ba.balance_documents(generator.integers(1, 40, 6), 4, 8, seq_len=256)
        tokens = generator.integers(0, 99, (1, 256)).astype(np.int32)
        found = labels(balance.to_ranks(tokens), balance.segment_ids, balance.mask)
        ids = balance.from_ranks(balance.segment_ids)
        expected = neighbours(tokens, 1, -100, ids)
        assert np.array_equal(balance.from_ranks(np.asarray(found)), expected)
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("dtype", "layout"), [("bool", "zigzag"), ("uint16", "striped"), ("bfloat16", "contiguous")]
)
def test_types_are_kept(dtype, layout):
    x = np.arange(24).reshape(24, 1).astype(jnp.dtype(dtype))

    @jax.jit
    @jax.shard_map(mesh=ring.line(4), in_specs=P("context"), out_specs=P("context"))
    def run(x):
        out = ba.shift(x, 2, axis_name="context", layout=layout, axis=0, fill=dtype == "bool" or 1)
        assert out.dtype == x.dtype
        assert jax.typeof(out).manual_axis_type.varying == {"context"}
        return out

    out = run(ba.to_layout(x, 4, layout, axis=0))
    expected = np.concatenate([x[2:], np.ones((2, 1), x.dtype)])
    assert np.array_equal(ba.from_layout(np.asarray(out), 4, layout, axis=0), expected)


def test_nan_is_a_fill():
    found = shifted(4, np.ones((1, 8), np.float32), fill=float("nan"))
    assert np.isnan(found[0]).tolist() == [False] * 7 + [True]


def test_an_array_without_tokens():
    assert shifted(4, np.ones((1, 0, 2), np.float32)).shape == (1, 0, 2)


@pytest.mark.parametrize(
    ("layout", "offset", "messages"),
    [
        ("contiguous", 1, [(1, 1, 2)]),
        ("contiguous", -3, [(1, 3, 2)]),
        ("zigzag", 1, [(1, 1, 2)] * 2),
        ("zigzag", -2, [(1, 2, 2)] * 2),
        ("striped", 1, [(1, 8, 2)]),
        ("striped", 4, []),
    ],
)
def test_ranks_exchange_only_what_is_needed(layout, offset, messages):
    """The messages are read in the traced program."""
    function = partial(shifted, 4, layout=layout, offset=offset)
    program = str(jax.make_jaxpr(function)(np.ones((1, 32, 2), np.float32)))
    sent = re.findall(r":f32\[([\d,]+)\]\S* = ppermute", program)
    assert [tuple(map(int, shape.split(","))) for shape in sent] == messages
    assert "all_gather" not in program


IDS = np.zeros((1, 4), np.int32)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"offset": 1.0}, TypeError, "offset must be an int, got 1.0"),
        ({"layout": "spiral"}, ValueError, "layout must be one of"),
        ({"axis": 2}, ValueError, "axis must be one of the 2 dimensions of x, got 2"),
        ({"fill": 0.5}, TypeError, "fill, with integer x, must be an int, got 0.5"),
        ({"fill": 2**31}, ValueError, "fill must be from -2147483648 to 2147483647, since x is"),
        ({"fill": IDS}, TypeError, "fill, with integer x, must be an int, got array"),
        ({"segment_ids": IDS[:, :3]}, ValueError, r"segment_ids must have shape \(1, 4\), that of"),
        ({"segment_ids": IDS * 0.5}, TypeError, "segment_ids must have an integer type"),
        ({"positions": IDS[0]}, ValueError, r"positions must have shape \(1, 4\)"),
        ({"positions": IDS, "block": 3}, ValueError, "multiple of block, 3, got 4"),
        ({"positions": IDS, "block": 0}, ValueError, "block must be at least 1, got 0"),
        ({"positions": IDS, "block": 2, "offset": 3}, ValueError, "at most block, 2, with posi"),
        ({"positions": IDS, "block": 2, "layout": "zigzag"}, ValueError, "replace the layout"),
        ({"axis_name": "data"}, ValueError, "axis_name must be an axis of the surrounding"),
    ],
)
def test_wrong_arguments(options, error, words):
    def local(x):
        return ba.shift(x, **{"axis_name": "context", **options})

    spec, mesh = P(None, "context"), Mesh(ring.devices(4), ("context",))
    run = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
    with pytest.raises(error, match=words):
        run(np.zeros((1, 16), np.int32))


def test_arrays_of_tokens_are_cast():
    """Ids of any integer type, and positions too."""
    ids, at = np.array([[0, 0, 1, 1, 1, -3, -3, -3]], np.int8), np.arange(8, dtype=np.uint16)[None]
    run = jax.shard_map(
        lambda x, ids, at: ba.shift(
            x, axis_name="context", fill=-1, segment_ids=ids, positions=at, block=2
        ),
        mesh=Mesh(ring.devices(2), ("context",)),
        in_specs=(P(None, "context"),) * 3,
        out_specs=P(None, "context"),
    )
    assert run(np.arange(8)[None], ids, at).tolist() == [[1, -1, 3, 4, -1, -1, -1, -1]]


def test_it_needs_shard_map():
    with pytest.raises(ValueError, match=r"shift must be called inside jax.shard_map.*jax.numpy"):
        ba.shift(jnp.asarray(IDS), axis_name="context")
    with pytest.raises(TypeError, match="x must be an array, got str"):
        ba.shift("tokens", axis_name="context")
