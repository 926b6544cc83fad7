"""Global arrays of masks and features are sharded with q, k and v, and have right gradients."""

import burst_attention as ba
import jax
import numpy as np
import pytest
import ring
from bounds import check
from features import Problem
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

pytestmark = [pytest.mark.cudnn, pytest.mark.oldest_jax]

ALL = Problem(
    mesh=(2, 2, 2),
    causal=True,
    window=(20, 0),
    segments="documents",
    slopes=True,
    sinks=True,
    soft_cap=3.0,
    dropout=0.2,
    value_dim=16,
    layout="zigzag",
)


def attend(one, **where):
    """Returns `dot_product_attention` as a function of a problem's arrays."""

    def function(arrays):
        qkv = (arrays[name] for name in "qkv")
        return one.pair(ba.dot_product_attention(*qkv, **where, **one.options(arrays)))

    return function


def agree(one, function, mesh, arrays):
    found = one.run(function, mesh, arrays)
    check(found, one.expected(arrays), arrays["dout"])


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_everything_at_once(axis_type):
    mesh = ring.mesh(*ALL.mesh, axis_type=axis_type)
    where = {"mesh": mesh, "spec": ring.SPEC} if axis_type == AxisType.Auto else {}
    agree(ALL, attend(ALL, **where), mesh, ALL.arrays())


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_what_is_whole_on_every_device(axis_type):
    """Segments and random key are host arrays; slopes, sinks and a key/value head stay whole."""
    one = Problem(
        mesh=(2, 2, 2), kv_heads=1, segments="documents", slopes=True, sinks=True, dropout=0.2
    )
    mesh = ring.mesh(*one.mesh, axis_type=axis_type)
    where = {"mesh": mesh, "spec": ring.SPEC} if axis_type == AxisType.Auto else {}
    arrays = one.arrays()
    shared = {name: arrays[name] for name in ("q_segments", "kv_segments", "dropout_key")}
    placed = {name: x for name, x in arrays.items() if name not in shared}
    specs = {"k": P("data", "context"), "v": P("data", "context")}
    specs |= dict.fromkeys(("sinks", "alibi_slopes"), P())
    placed = {
        name: jax.device_put(x, NamedSharding(mesh, specs.get(name, P(*ring.AXES[: x.ndim]))))
        for name, x in placed.items()
    }
    cotangents = placed.pop("dout"), placed.pop("dlse")

    @jax.jit
    def run(inputs, cotangents):
        function = attend(one, **where)
        results, pullback = jax.vjp(lambda inputs: function({**inputs, **shared}), inputs)
        return results, pullback(cotangents)[0]

    (o, lse), grads = run(placed, cotangents)
    found = {name: np.asarray(x) for name, x in one.named(o, lse, grads).items()}
    check(found, one.expected(arrays), arrays["dout"])
    if axis_type == AxisType.Explicit:
        for name, x in grads.items():
            assert x.sharding.is_equivalent_to(placed[name].sharding, x.ndim), name


def test_explicit_arrays_on_other_axes_are_refused():
    mesh = ring.mesh(2, 2, 2, axis_type=AxisType.Explicit)
    one = Problem(segments="documents", slopes=True)
    arrays = one.arrays()
    qkv = ring.put(mesh, *(arrays[name] for name in "qkv"))
    ids = jax.device_put(arrays["q_segments"], NamedSharding(mesh, P("context")))
    words = r"segment_ids must be sharded like the first two dimensions of query, .*'data'.* got"
    with pytest.raises(ValueError, match=words):
        ba.dot_product_attention(*qkv, segment_ids=ids)
    slopes = jax.device_put(arrays["alibi_slopes"], NamedSharding(mesh, P("data")))
    words = r"alibi_slopes must be sharded like the heads of query, .*'tensor'.* got .*reshard"
    with pytest.raises(ValueError, match=words):
        ba.dot_product_attention(*qkv, alibi_slopes=slopes)


def test_cross_attention():
    one = Problem(mesh=(2, 4, 1), q_len=16, kv_len=64, segments="documents", layout="striped")
    mesh = ring.mesh(*one.mesh)
    agree(one, attend(one, mesh=mesh, spec=ring.SPEC), mesh, one.arrays())


def test_lengths_that_no_ring_can_cut():
    one = Problem(q_len=16, kv_len=18)
    q, k, v = (one.arrays()[name] for name in "qkv")
    words = "seq of key must be a multiple of 4, .* got 18; burst_attention.pad_sequence pads any"
    with pytest.raises(ValueError, match=words):
        ba.dot_product_attention(q, k, v, mesh=ring.line(4), spec=P(None, "context"))
