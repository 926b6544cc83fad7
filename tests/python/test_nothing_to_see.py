"""Rows, tiles and ranks that see no key, and extreme scores, give no NaN."""

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import platforms
import pytest
import ring
from bounds import check
from burst_attention._attention import calls
from burst_attention._attention.features import Features
from features import Problem
from jax.sharding import PartitionSpec as P


def results(one, **changes):
    arrays = one.arrays() | changes
    found = one.found(arrays)
    finite = {name: x for name, x in found.items() if name != "lse"}
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in finite.values())
    return arrays, found


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_queries_of_a_rank_that_see_nothing(layout, sinks):
    """With more queries than keys, the windows of late queries reach no key."""
    one = Problem(layout=layout, q_len=64, kv_len=16, window=(4, 4), sinks=sinks, slopes=True)
    arrays, found = results(one)
    blind = slice(20, None)
    assert not found["o"][:, blind].any()
    assert not found["dq"][:, blind].any()
    nothing = arrays["sinks"] if sinks else np.full(4, -np.inf, np.float32)
    assert np.array_equal(found["lse"][:, blind], np.broadcast_to(nothing, (2, 44, 4)))
    check(found, one.expected(arrays), arrays["dout"])


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("backward", ["keys", "queries"])
def test_nothing_but_padding(backward, sinks):
    """All tokens but the first one of an entry are padding, and padding does not see itself."""
    one = Problem(segments="padded", sinks=sinks, backward=backward, layout="zigzag", dropout=0.2)
    ids = np.full((2, 48), -1, np.int32)
    ids[1, 0] = 5
    arrays, found = results(one, q_segments=ids, kv_segments=ids)
    seeing = ids >= 0
    for name in ("o", "dq", "dk", "dv"):
        assert not found[name][~seeing].any(), name
    if not sinks:
        assert np.isneginf(found["lse"][~seeing]).all()
    check(found, one.expected(arrays), arrays["dout"])


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("backward", ["keys", "queries"])
def test_nan_in_cotangents_of_padding(backward, sinks):
    """Results of padding depend on no input, except that lse is the sink."""
    one = Problem(segments="padded", sinks=sinks, slopes=True, layout="zigzag", backward=backward)
    arrays = one.arrays()
    padding = arrays["q_segments"] < 0
    spoiled = ("dout",) if sinks else ("dout", "dlse")
    for name in spoiled:
        arrays[name][padding] = 0
    expected, dout = one.expected(arrays), arrays["dout"].copy()
    for name in spoiled:
        arrays[name][padding] = np.nan
    _, found = results(one, **{name: arrays[name] for name in spoiled})
    check(found, expected, dout)


def test_nan_in_cotangents_of_rows_that_no_window_lets_see():
    one = Problem(layout="zigzag", q_len=64, kv_len=16, window=(4, 4), sinks=True, slopes=True)
    arrays, blind = one.arrays(), slice(20, None)
    arrays["dout"][:, blind] = 0
    expected, dout = one.expected(arrays), arrays["dout"].copy()
    arrays["dout"][:, blind] = np.nan
    _, found = results(one, dout=arrays["dout"])
    check(found, expected, dout)


def test_kernels_of_gpus_get_no_cotangent_of_padding():
    """They multiply what they mask by 0."""
    features = Features(query_segment_ids=jnp.array([[0, -1, 3, -7]], jnp.int32))
    for shape in ((1, 4, 2), (1, 4, 2, 8)):
        got = calls._without_padding(features, jnp.full(shape, jnp.nan).at[:, ::2].set(1))
        assert np.array_equal(got[:, 1::2], np.zeros_like(got[:, 1::2]))
        assert (got[:, ::2] == 1).all()


def test_segments_that_a_rank_has_not():
    """A rank's queries are of another document than its keys, so whole chunks match nothing."""
    one = Problem(segments="absent", causal=False, window=(40, 40))
    of_queries = np.repeat(np.arange(4, dtype=np.int32), 12)[None].repeat(2, 0)
    arrays, found = results(one, q_segments=of_queries, kv_segments=np.roll(of_queries, 12, axis=1))
    check(found, one.expected(arrays), arrays["dout"])


@pytest.mark.parametrize("dtype", platforms.dtypes("float32", "bfloat16"))
@pytest.mark.parametrize("sinks", [False, True])
def test_scores_of_ten_thousand(dtype, sinks):
    """Weights are 0 or 1, or shared where rounding makes scores equal."""
    one = Problem(
        dtype=dtype, causal=True, segments="documents", sinks=sinks, slopes=True, window=(30, 0)
    )
    arrays = one.arrays()
    factor = 1e4 / np.abs(np.asarray(arrays["q"], np.float32)).max()
    arrays, found = results(one, q=(arrays["q"].astype(np.float32) * factor).astype(dtype))
    expected = one.expected(arrays)
    assert np.abs(expected.lse).max() > 5e3
    np.testing.assert_allclose(found["lse"], expected.lse, rtol=1e-5, atol=1e-2)
    wrong = np.asarray(found["o"], np.float64) - expected.o
    assert np.linalg.norm(wrong) <= 1e-2 * np.linalg.norm(expected.o)


def test_infinite_sinks():
    """A sink of −inf has no effect. A sink of +inf gives o = 0, lse = +inf and dz = Σ dlse."""
    one = Problem(sinks=True, segments="padded")
    sinks = np.array([-np.inf, np.inf, 0.5, np.inf], np.float32)
    arrays, found = results(one, sinks=sinks)
    expected = one.expected(arrays | {"sinks": np.where(np.isinf(sinks), -np.inf, sinks)})
    full = np.isposinf(sinks)
    atol = 2e-2 if platforms.current().rounds else 1e-5
    for name in ("o", "dq"):
        assert not found[name][:, :, full].any()
        rest = getattr(expected, name)[:, :, ~full]
        np.testing.assert_allclose(found[name][:, :, ~full], rest, rtol=1e-4, atol=atol)
    assert np.isposinf(found["lse"][:, :, full]).all()
    assert found["dz"][0] == 0
    np.testing.assert_allclose(found["dz"][full], arrays["dlse"].sum((0, 1))[full], rtol=1e-5)


@pytest.mark.parametrize("sinks", [None, np.array([0.5, -1.0], np.float32)])
def test_no_key_at_all(sinks):
    """Cross attention to no keys treats every row as one that sees nothing."""
    q, k, v, dout, dlse = ring.normal(
        0, (1, 8, 2, 8), (1, 0, 1, 8), (1, 0, 1, 16), (1, 8, 2, 16), (1, 8, 2)
    )

    def run(q, k, v, sinks):
        return ba.dot_product_attention(
            q, k, v, mesh=ring.line(2), spec=P(None, "context"), sinks=sinks, return_residual=True
        )

    (o, lse), pullback = jax.vjp(run, q, k, v, sinks)
    dq, dk, dv, dz = pullback((jnp.asarray(dout), jnp.asarray(dlse)))
    assert (o.shape, dk.shape, dv.shape) == (dout.shape, k.shape, v.shape)
    assert not o.any()
    assert not dq.any()
    nothing = -np.inf if sinks is None else sinks
    assert np.array_equal(lse, np.broadcast_to(nothing, lse.shape))
    if sinks is not None:
        np.testing.assert_allclose(dz, dlse.sum((0, 1)), rtol=1e-6)
