"""Impossible arguments of masks and features give a helpful error while tracing."""

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import platforms
import pytest
import ring
from jax import lax
from jax.sharding import PartitionSpec as P
from test_bad_input import call, qkv, refused
from test_cuda_lowering import GPU, abstract_mesh, lowered, shapes

ON_GPUS = platforms.current().rounds
CAPS = "on NVIDIA GPUs from 0.001 to 1000" if ON_GPUS else "from 1e-30 to 1e[+]30"


@pytest.mark.parametrize(
    ("kind", "words", "bad"),
    [
        (ValueError, r"not be negative, got \(-2, 0\).* None or -1 in a pair", (-2, 0)),
        (ValueError, "not be negative, got -1: it counts positions", -1),
        (ValueError, r"one number or \(left, right\), got 3 numbers", (1, 2, 3)),
        (TypeError, r"an int or \(left, right\), .* got 2.5 \(float\)", 2.5),
        (TypeError, r"an int or .* got True \(bool\)", True),
        (TypeError, r"an int or .* got \(4, 'all'\)", (4, "all")),
    ],
)
def test_windows(kind, words, bad):
    refused(kind, f"local_window_size must .*{words}", local_window_size=bad)


def test_window_must_be_static():
    q, k, v = qkv()
    with pytest.raises(TypeError, match=r"compiled into the program, got a traced array"):
        jax.jit(lambda n: call(q, k, v, local_window_size=n))(3)


def ids(*shape, dtype=np.int32):
    return np.zeros(shape, dtype)


def zeros(*shape):
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("kind", "words", "bad"),
    [
        (TypeError, "must be an array, got int", 0),
        (TypeError, "must have an integer type, .* int32, got bool", ids(1, 4, dtype=bool)),
        (TypeError, "of key must have .* got float32", (ids(1, 4), ids(1, 4, dtype="float32"))),
        (TypeError, "of key must be an array, got NoneType", (ids(1, 4), None)),
        (ValueError, r"must have shape \(1, 4\), one id .* got shape \(4,\); add .* batch", ids(4)),
        (ValueError, r"of query must .* \(1, 4\).* got shape \(1, 8\)", (ids(1, 8), ids(1, 4))),
        (ValueError, "must be one array or a pair .* got 3 arrays", (ids(1, 4),) * 3),
    ],
)
def test_segments(kind, words, bad):
    refused(kind, f"segment_ids {words}", segment_ids=bad)


def test_one_array_for_two_lengths():
    (q, *_), (_, k, v) = qkv(), qkv(seq=12)
    words = r"must be a pair .*differ in length, got one array for 4 and 6 tokens"
    refused(ValueError, words, q, k, v, segment_ids=ids(1, 4))


@pytest.mark.parametrize(
    ("kind", "words", "bad"),
    [
        (TypeError, "be an array, got str", "zeros"),
        (TypeError, "have a float type, .* to float32, got int64", np.zeros(4, np.int64)),
        (ValueError, r"one slope for each head .* got shape \(2,\)(?!;)", zeros(2)),
        (ValueError, r"got shape \(8,\); where heads .* device takes the slopes", zeros(8)),
    ],
)
def test_slopes(kind, words, bad):
    refused(kind, f"alibi_slopes must .*{words}", alibi_slopes=bad)


@pytest.mark.parametrize(
    ("words", "bad"),
    [
        (f"{CAPS}, or None for no cap, got 1e-40", 1e-40),
        ("got -3", -3.0),
        ("got nan", float("nan")),
        ("got inf", float("inf")),
        ("got 1e[+]39", 1e39),
        pytest.param("got a number of type int beyond", 10**400, id="int"),
    ],
)
def test_soft_caps(words, bad):
    refused(ValueError, f"logits_soft_cap must be .*{words}", logits_soft_cap=bad)


def test_soft_cap_must_be_static():
    q, k, v = qkv()
    with pytest.raises(TypeError, match="logits_soft_cap must be a Python number.*traced array"):
        jax.jit(lambda cap: call(q, k, v, logits_soft_cap=cap))(3.0)


def test_dropout():
    key = jax.random.key(0)
    for rate in (1.0, -0.1, float("nan"), 1 - 1e-12):
        words = "dropout_rate must be at least 0 and below 1"
        refused(ValueError, words, dropout_rate=rate, dropout_key=key)
    refused(TypeError, "dropout_rate must be a Python number.*compiled", dropout_rate=jnp.ones(()))
    refused(ValueError, "dropout_rate=0.1 needs dropout_key, .* every step", dropout_rate=0.1)
    for bad in (np.zeros(2, np.int32), np.zeros(3, np.uint32), jnp.zeros(())):
        words = r"a key of jax.random, or its data uint32 of shape \(2,\), got "
        refused(TypeError, words, dropout_rate=0.1, dropout_key=bad)
    keys = jax.random.split(key, 3)
    refused(ValueError, r"one key, got .* shape \(3,\)", dropout_rate=0.1, dropout_key=keys)
    refused(TypeError, "dropout_key must be an array, got int", dropout_rate=0.1, dropout_key=3)


def test_without_dropout_the_key_is_not_used():
    q, k, v = qkv()
    found = call(q, k, v, dropout_rate=0.0, dropout_key=jax.random.key(0))
    assert np.array_equal(found, call(q, k, v))


def test_key_must_be_that_of_the_ring():
    def local(q, k, v):
        key = jax.random.fold_in(jax.random.key(0), lax.axis_index("context"))
        return ba.attention(q, k, v, axis_name="context", dropout_rate=0.5, dropout_key=key)

    spec = P(None, "context")
    function = jax.shard_map(local, mesh=ring.line(2), in_specs=spec, out_specs=spec)
    with pytest.raises(ValueError, match="dropout_key must be the same on all devices of a ring"):
        jax.jit(function)(*qkv())


@pytest.mark.parametrize("name", ["batch_axis", "head_axis"])
def test_axes(name):
    refused(TypeError, f"{name} must be the name .* got 3", **{name: 3})
    refused(TypeError, f"{name} must be the name .* or a tuple of names", **{name: ("data", 3)})
    refused(ValueError, f"{name} must not name the axis that shards", **{name: "context"})
    refused(ValueError, f"{name} must name axes of .*'data', .* got 'ring'", **{name: ("ring",)})
    q, k, v = qkv()
    with pytest.raises(TypeError, match=f"{name} is known from spec .*; leave it out"):
        ba.dot_product_attention(q, k, v, mesh=ring.line(2), spec=ring.SPEC, **{name: "data"})


def on_gpu(**options):
    lowered(ring.sharded(abstract_mesh(GPU), **options), shapes())


def test_what_gpus_can_not():
    with pytest.raises(ValueError, match="on NVIDIA GPUs from 0.001 to 1000, .* got 1e-05"):
        on_gpu(logits_soft_cap=1e-5)
