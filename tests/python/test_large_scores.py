"""Gradients stay right where float32 rounds scores by more than 1."""

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import platforms
import pytest
import ring
from features import Problem
from jax.sharding import PartitionSpec as P

LEAD = 30
"""The lead of a row's largest score that gives one key all weight in float32."""


def magnified(q, k, size):
    """Returns the queries times a factor that makes the largest score ``size``."""
    scores = np.einsum("bqhd,bkhd->bhqk", *(np.asarray(x, np.float64) for x in (q, k)))
    return (q * np.float32(size * q.shape[-1] ** 0.5 / np.abs(scores).max())).astype(q.dtype)


def leading(q, k, size):
    """Returns whether each row's largest score leads by `LEAD`, ``[batch, seq, heads, 1]``.

    The lead must outlast the rounding of the scores.
    """
    scores = np.einsum("bqhd,bkhd->bqhk", *(np.asarray(x, np.float64) for x in (q, k)))
    second, first = np.sort(scores * q.shape[-1] ** -0.5, axis=-1)[..., -2:].transpose(3, 0, 1, 2)
    return (first - second > max(LEAD, 1e-6 * size))[..., None]


def exact_dv(q, k, dout):
    """Returns dv in float64 if each row's largest score has all weight."""
    scores = np.einsum("bqhd,bkhd->bhqk", *(np.asarray(x, np.float64) for x in (q, k)))
    weights = scores == scores.max(-1, keepdims=True)
    return np.einsum("bhqk,bqhd->bkhd", weights.astype(np.float64), dout)


@pytest.mark.parametrize("size", [1e4, 1e5, 1e7, 1e9])
@pytest.mark.parametrize(("layout", "backward"), [("zigzag", "keys"), ("striped", "queries")])
@pytest.mark.needs("float32", "products")
def test_one_key_with_all_weight_is_as_exact_as_in_plain_jax(size, layout, backward):
    q, k, v, dout = ring.normal(1, *[(1, 128, 2, 40)] * 4)
    q = magnified(q, k, size)
    rows = leading(q, k, size)
    assert rows.mean() > 0.9
    dout = dout * rows

    def function(q, k, v):
        return ba.dot_product_attention(
            q, k, v, mesh=ring.line(4), spec=ring.SPEC, layout=layout, backward=backward
        )

    arrays = ring.stored(layout, 4, q, k, v, dout)
    *_, dv = ring.restored(layout, 4, *ring.gradients(function)(arrays[:3], arrays[3])[1])
    plain = ring.gradients(jax.nn.dot_product_attention)((q, k, v), dout)[1][2]
    right = exact_dv(q, k, dout)
    ours, theirs = (np.linalg.norm(np.asarray(x, np.float64) - right) for x in (dv, plain))
    assert ours <= 10 * theirs + 1e-12 * np.linalg.norm(right)


LARGEST_CAP = 1e3 if platforms.current().rounds else 1e9
FEATURES = {
    "plain": {"causal": True},
    "everything": {
        "window": (30, 9),
        "segments": "padded",
        "slopes": True,
        "sinks": True,
        "dropout": 0.2,
        "layout": "zigzag",
    },
    "capped": {"soft_cap": LARGEST_CAP, "schedule": "balanced", "causal": True},
    "16 bits": {"dtype": "bfloat16", "layout": "striped", "slopes": True, "backward": "queries"},
}


@pytest.mark.parametrize("features", FEATURES)
def test_no_weight_exceeds_one(features):
    """No element of dv exceeds the sum of its column of dout, and all results are finite."""
    one = Problem(**FEATURES[features])
    arrays = one.arrays()
    for size in (1e5, 1e8):
        factor = np.float32(size / np.abs(np.asarray(arrays["q"], np.float32)).max())
        found = one.found(arrays | {"q": (arrays["q"] * factor).astype(arrays["q"].dtype)})
        for name, x in found.items():
            assert name == "lse" or np.isfinite(np.asarray(x, np.float32)).all(), (name, size)
        of_groups = np.abs(np.asarray(arrays["dout"], np.float64)).sum(1)
        most = of_groups.reshape(2, 2, -1, of_groups.shape[-1]).sum(2)[:, None] / (1 - one.dropout)
        slack = 1e-5 if found["dv"].dtype == np.float32 else 2.0**-8
        assert (np.abs(np.asarray(found["dv"], np.float64)) <= most * (1 + slack)).all(), size


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.needs("float32")
def test_scores_that_overflow(sign):
    """Scores of −∞ are hidden, so their row sees nothing; scores of +∞ make their row NaN."""
    q, k, v, dout = ring.normal(2, *[(1, 16, 2, 8)] * 4)
    q[:, 3:5], k = 1e25, np.full_like(k, sign * 1e25)

    def function(q, k, v):
        return ba.dot_product_attention(
            q, k, v, mesh=ring.line(2), spec=P(None, "context"), return_residual=True
        )

    (out, lse), grads = ring.gradients(function)((q, k, v), (dout, jnp.zeros((1, 16, 2))))
    assert np.isfinite(np.delete(out, [3, 4], axis=1)).all()
    if sign < 0:
        assert not out[:, 3:5].any()
        assert np.isneginf(lse[:, 3:5]).all()
        assert not grads[0][:, 3:5].any()
        assert all(np.isfinite(x).all() for x in grads)
    else:
        assert np.isnan(out[:, 3:5]).all()
        assert np.isnan(lse[:, 3:5]).all()
