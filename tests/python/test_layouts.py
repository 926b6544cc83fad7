"""Layouts reorder arrays and back, keep shardings, and have derivatives."""

from functools import partial

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

LAYOUTS = ("contiguous", "zigzag", "striped")


def test_positions_of_two_devices():
    assert ba.layout_positions(8, 2, "contiguous").tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert ba.layout_positions(8, 2, "zigzag").tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert ba.layout_positions(8, 2, "striped").tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert ba.layout_positions(8, 2, "zigzag", rank=1).tolist() == [2, 3, 4, 5]
    assert ba.layout_positions(0, 3, "striped").tolist() == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_every_rank_holds_its_part(layout, size):
    whole = ba.layout_positions(6 * size, size, layout)
    assert sorted(whole) == list(range(6 * size))
    ranks = [ba.layout_positions(6 * size, size, layout, rank) for rank in range(size)]
    assert np.array_equal(np.concatenate(ranks), whole)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_local_positions_are_those_of_the_host(layout):
    def local():
        positions = ba.local_positions(6, axis_name="context", layout=layout)
        assert positions.dtype == jnp.int32
        assert jax.typeof(positions).manual_axis_type.varying == {"context"}
        return positions

    found = jax.shard_map(local, mesh=ring.line(8), in_specs=(), out_specs=P("context"))()
    assert np.array_equal(found, ba.layout_positions(48, 8, layout))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_round_trip(layout, axis):
    shape = [3, 3, 3]
    shape[axis] = 16
    x = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
    for array in (x, jnp.asarray(x)):
        there = ba.to_layout(array, 4, layout, axis)
        assert type(there) is type(array)
        assert there.dtype == x.dtype
        assert np.array_equal(there, np.take(x, ba.layout_positions(16, 4, layout), axis))
        assert np.array_equal(ba.from_layout(there, 4, layout, axis), x)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_sharding_is_kept(axis_type, layout):
    mesh = ring.mesh(2, 4, 1, axis_type=axis_type)
    (x,) = ring.put(mesh, *ring.normal(0, (2, 16, 3)), spec=P("data", "context"))
    found = ba.to_layout(x, 4, layout)
    assert found.sharding.is_equivalent_to(x.sharding, x.ndim)
    assert np.array_equal(ba.from_layout(found, 4, layout), x)
    if axis_type == AxisType.Explicit:
        traced = jax.jit(lambda x: ba.to_layout(x, 4, layout))(x)
        assert traced.sharding.is_equivalent_to(x.sharding, x.ndim)
        assert np.array_equal(traced, found)
    pullback = jax.jit(lambda x, dx: jax.vjp(lambda x: ba.to_layout(x, 4, layout), x)[1](dx)[0])
    assert np.array_equal(pullback(x, found), x)


def test_an_uncommitted_array_goes_where_a_mesh_needs_it():
    """This holds eagerly, as in Flax's `Module.init`, and for arrays that a program closes over."""
    (x,) = ring.normal(0, (1, 16, 2, 8))
    x = jnp.asarray(x)

    def attend(q, k):
        q, k = (ba.to_layout(y, 4, "zigzag") for y in (q, k))
        spec = P(None, "context")
        out = ba.dot_product_attention(q, k, k, mesh=ring.line(4), spec=spec, layout="zigzag")
        return ba.from_layout(out, 4, "zigzag")

    assert not ba.to_layout(x, 4, "zigzag").committed
    eager = attend(x, x)
    assert np.array_equal(jax.jit(lambda k: attend(x, k))(x), eager)
    here = jax.device_put(x, jax.devices()[1])
    assert ba.to_layout(here, 4, "zigzag").devices() == here.devices()


def test_causal_work_of_zigzag_is_equal_on_all_ranks():
    """Causality allows the same number of pairs of query and key on each rank."""
    for size in (2, 5, 8):
        shards = ba.layout_positions(8 * size, size, "zigzag").reshape(size, -1)
        assert len({(shard + 1).sum() for shard in shards}) == 1


def test_arguments_that_do_not_fit_are_refused():
    x = np.zeros((1, 12))
    words = "multiple of 8 tokens for layout 'zigzag' on 4 devices, got 12; .*pad_sequence pads"
    with pytest.raises(ValueError, match=words):
        ba.to_layout(x, 4, "zigzag")
    with pytest.raises(ValueError, match="multiple of 5 tokens"):
        ba.from_layout(x, 5, "striped")
    with pytest.raises(ValueError, match=r"layout must be one of .*'zigzag'.* got 'zig-zag'"):
        ba.to_layout(x, 4, "zig-zag")
    with pytest.raises(ValueError, match="axis must be one of the 2 dimensions of x, got 2"):
        ba.to_layout(x, 4, "striped", axis=2)
    with pytest.raises(ValueError, match="axis_size must be at least 1, got 0"):
        ba.layout_positions(12, 0, "striped")
    with pytest.raises(ValueError, match="rank must be from 0 to 3, got 4"):
        ba.layout_positions(12, 4, "striped", rank=4)
    with pytest.raises(TypeError, match="x must be a numpy or jax array, got list"):
        ba.to_layout([1, 2], 2, "striped", axis=0)
    with pytest.raises(ValueError, match=r"local_positions must be called inside jax.shard_map"):
        ba.local_positions(4, axis_name="context")
    for length, kind, words in [
        (3, ValueError, "even in layout 'zigzag'"),
        (-2, ValueError, "seq_len_local must not be negative, got -2"),
        (2.0, TypeError, r"seq_len_local must be an int, got 2.0 \(float\)"),
    ]:
        local = partial(ba.local_positions, length, axis_name="context", layout="zigzag")
        with pytest.raises(kind, match=words):
            jax.shard_map(local, mesh=ring.line(2), in_specs=(), out_specs=P("context"))()


def test_numbers_are_integers_of_any_type():
    x = np.zeros((1, 16))
    for call in (ba.to_layout, ba.from_layout, ba.pad_sequence):
        with pytest.raises(TypeError, match=r"^axis_size must be an int, got 4.0 \(float\)"):
            call(x, 4.0, "zigzag")
        with pytest.raises(TypeError, match="^axis must be an int, got 1.0"):
            call(x, 4, "zigzag", 1.0)
    with pytest.raises(TypeError, match="^seq_len must be an int, got 16.0"):
        ba.layout_positions(16.0, 4, "zigzag")
    with pytest.raises(TypeError, match="^rank must be an int, got '1'"):
        ba.layout_positions(16, 4, "zigzag", "1")
    # An int8 cannot hold twice 100.
    found = ba.layout_positions(np.int64(400), np.int8(100), "zigzag", np.uint8(1))
    assert np.array_equal(found, ba.layout_positions(400, 100, "zigzag", 1))


def test_bytes_in_the_other_order_are_kept():
    x = np.arange(16, dtype=">i4")[None]
    assert np.array_equal(ba.to_layout(x, 4, "zigzag")[0], ba.layout_positions(16, 4, "zigzag"))


def test_host_placement_matches_the_devices():
    """A data loader's rows for a rank are the rank's rows of the reordered global array."""
    mesh = ring.line(4)
    tokens = np.arange(32)[None]
    placed = jax.device_put(
        ba.to_layout(tokens, 4, "zigzag"), NamedSharding(mesh, P(None, "context"))
    )
    for shard in placed.addressable_shards:
        rank = shard.index[1].start // 8
        assert np.array_equal(shard.data[0], ba.layout_positions(32, 4, "zigzag", rank))
