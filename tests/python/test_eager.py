"""Calls outside ``jit``: from the second call on they trace and compile nothing."""

import gc
import weakref
from collections import Counter

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import platforms
import pytest
import ring
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

pytestmark = pytest.mark.oldest_jax

DTYPE = platforms.dtype("float32")
SPEC = P(None, "context")
COMPILES = "/jax/core/compile/backend_compile_duration"
TRACES = "/jax/core/compile/jaxpr_trace_duration"


def placed(kind):
    """Returns a mesh of eight devices and an array of 64 tokens on it."""
    mesh = jax.make_mesh((8,), ("context",), (kind,), devices=ring.devices(8))
    x = np.random.default_rng(0).standard_normal((1, 64, 8, 16)).astype("float32")
    return mesh, jax.device_put(jnp.asarray(x, DTYPE), NamedSharding(mesh, SPEC))


def attention(x, **way):
    return ba.dot_product_attention(x, x, x, is_causal=True, layout="zigzag", **way)


def in_sequence(x, **way):
    return attention(x[:, :60], order="sequence", axis_name="context", **way)


def with_features(x, **way):
    ids = np.arange(64, dtype=np.int32)[None] // 20
    return attention(x, segment_ids=ids, sinks=np.ones(8, np.float32), **way)


def linear(x, **way):
    return ba.linear_attention(x, x, x, **way)


def decode(x, **way):
    x = jnp.asarray(np.asarray(x))
    return ba.decode_attention(x[:, :1], x, x, jnp.array([30]), sinks=np.ones(8, np.float32))


def events(function):
    """Returns how often each event of JAX that has a duration happens in a call."""
    found = Counter()

    def count(event, duration, **_):
        found[event] += 1

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        jax.block_until_ready(function())
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    return found


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (attention, AUTO),
        (attention, EXPLICIT),
        (in_sequence, AUTO),
        (with_features, EXPLICIT),
        (linear, EXPLICIT),
        (decode, AUTO),
    ],
)
def test_later_calls_compile_nothing(call, kind):
    mesh, x = placed(kind)
    way = {} if kind == EXPLICIT else {"mesh": mesh, "spec": SPEC}
    assert events(lambda: call(x, **way))[TRACES]
    other = jax.block_until_ready(x * 2)
    again = events(lambda: call(other, **way))
    assert not again[COMPILES], again
    assert not again[TRACES], again


@pytest.mark.parametrize("call", [attention, linear])
def test_later_gradients_compile_nothing(call):
    mesh, x = placed(AUTO)
    gradient = jax.grad(lambda x: call(x, mesh=mesh, spec=SPEC).astype("float32").sum())
    for _ in range(2):
        jax.block_until_ready(gradient(x))
    assert not events(lambda: gradient(x))[COMPILES]


def test_no_call_keeps_arrays_alive():
    mesh, x = placed(AUTO)
    key = x * 2
    sinks = jnp.ones(8)
    options = {"mesh": mesh, "spec": SPEC, "sinks": sinks}
    out = ba.dot_product_attention(x, key, key, **options)
    dead = [weakref.ref(each) for each in (key, sinks, out)]
    del key, sinks, options, out
    gc.collect()
    assert [ref() for ref in dead] == [None] * 3
