"""Options that mean something at 0 do so in every call, and False is no number."""

from functools import partial

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

pytestmark = pytest.mark.needs("products")

TOKENS = 8
Q, K, V = ring.normal(0, *[(2, TOKENS, 2, 8)] * 3, dtype=np.float32)
ZEROS = (0, np.int64(0), (0, 0), (0, None), [0, np.int32(0)])
GATE = np.zeros(2, np.float32)
LENGTHS = np.array([TOKENS, 3])
LAST = (np.arange(2), LENGTHS - 1)


def over_two(call, *arrays, **options):
    place = {"mesh": Mesh(ring.devices(2), ("context",)), "spec": P(None, "context")}
    return call(*arrays, **place, **options)


attend = partial(over_two, ba.dot_product_attention, Q, K, V, is_causal=True)
decode = partial(ba.decode_attention, Q[:, :1], K, V, LENGTHS)
behind = partial(
    *(ba.shared_prefix_attention, Q[:, :1], K[:1], V[:1], K, V, LENGTHS),
    prefix_of=np.array([0, -1]),
    prefix_lengths=np.array([4]),
)
latent = partial(
    *(over_two, ba.latent_attention, Q, np.concatenate([K, V], -1)),
    *(lambda _, x: tuple(jnp.split(x, 2, -1)), ()),
    is_causal=True,
)
CALLS = {"attend": attend, "decode": decode, "behind": behind, "latent": latent}


@pytest.mark.parametrize(("name", "call"), CALLS.items(), ids=CALLS)
def test_a_window_of_0_shows_a_query_its_own_position(name, call):
    expected = V if name in ("attend", "latent") else V[LAST][:, None]
    for window in ZEROS:
        np.testing.assert_allclose(call(local_window_size=window), expected, rtol=1e-6)
    for wrong in (False, (False, 0)):
        with pytest.raises(TypeError, match="local_window_size must be an int or"):
            call(local_window_size=wrong)


@pytest.mark.parametrize("zero", [0, 0.0, np.float32(0), -0.0])
def test_a_scale_of_0_gives_the_mean(zero):
    counts = np.arange(1, TOKENS + 1)[:, None, None]
    np.testing.assert_allclose(attend(scale=zero), V.cumsum(1) / counts, rtol=1e-5, atol=1e-6)
    means = [V[b, :n].mean(0, keepdims=True) for b, n in enumerate(LENGTHS)]
    np.testing.assert_allclose(decode(scale=zero), means, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "option",
    [
        {"logits_soft_cap": 0},
        {"query_offset": 0},
        {"query_offset": np.zeros(2, int)},
        {"dropout_rate": 0, "dropout_key": None},
    ],
    ids=str,
)
def test_zeros_that_change_nothing(option):
    np.testing.assert_allclose(attend(**option), attend(), rtol=1e-6, atol=1e-6)
    if "logits_soft_cap" in option:
        np.testing.assert_array_equal(decode(**option), decode())


@pytest.mark.parametrize("name", ["query_seq_lengths", "key_value_seq_lengths"])
def test_lengths_of_0_hide_all(name):
    assert not np.asarray(attend(**{name: np.zeros(2, int)})).any()


def test_lengths_of_0_are_empty_slots():
    empty = np.zeros(2, int)
    assert not np.asarray(ba.decode_attention(Q[:, :1], K, V, empty)).any()
    assert not np.asarray(decode(query_lengths=empty)).any()
    same = behind(), behind(prefix_lengths=np.zeros(1, int), prefix_of=empty)
    np.testing.assert_allclose(same[1], decode(), rtol=1e-6)
    assert np.abs(np.asarray(same[0]) - same[1]).max() > 1e-3


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: over_two(ba.infini_attention, Q, K, V, GATE, segment_size=0), "segment_si"),
        (lambda: decode(interleave=0), "interleave"),
        (lambda: ba.to_layout(Q, 0, "zigzag"), "axis_size"),
        (lambda: ba.balance_documents([4], 2, 0), "block"),
        (lambda: ba.CachePool(jax.devices(), interleave=0), "interleave"),
    ],
)
def test_sizes_of_0_are_errors(call, name):
    with pytest.raises(ValueError, match=f"{name}.* must be at least 1, got 0"):
        call()


def test_an_offset_of_0_shifts_nothing():
    spec = P(None, "context")
    run = jax.shard_map(
        lambda x: ba.shift(x, 0, axis_name="context", fill=0),
        mesh=Mesh(ring.devices(2), ("context",)),
        in_specs=spec,
        out_specs=spec,
    )
    np.testing.assert_array_equal(run(Q), Q)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda size: ba.to_layout(Q, size, "zigzag"), "axis_size must be within int32"),
        (lambda size: ba.pad_sequence(Q, size, "striped"), "axis_size must be within int32"),
        (
            lambda size: ba.segment_ids_from_cu_seqlens(jnp.array([0, 3]), size),
            "total_length must be within int32",
        ),
        (lambda size: ba.balance_documents([size], 2, 2), "(lengths|longest row)"),
    ],
)
@pytest.mark.parametrize("size", [2**31, 2**63, 2**70])
def test_sizes_beyond_int32_are_errors(call, message, size):
    with pytest.raises(ValueError, match=message):
        call(size)
