"""Parts of the keys merge to attention over all keys, also in derivatives."""

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring

pytestmark = pytest.mark.needs("products")


def attended(s, v):
    """Returns out and lse of scores, ``[rows, keys]``."""
    lse = jax.nn.logsumexp(s, axis=-1)
    base = jnp.where(jnp.isneginf(lse), 0, lse)
    # GPUs multiply float32 in fewer bits by default.
    return jnp.matmul(jnp.exp(s - base[:, None]), v, precision="highest"), lse


def test_parts_merge_to_the_whole_with_gradients():
    s, v, dout, dlse = ring.normal(0, (6, 30), (30, 5), (6, 5), (6,))

    def whole(s, v):
        return attended(s, v)

    def in_parts(s, v):
        cuts = ((0, 1), (1, 11), (11, 30))
        return ba.merge_attention(*(attended(s[:, i:j], v[i:j]) for i, j in cuts))

    found, expected = (
        jax.tree.leaves(ring.gradients(x)((s, v), (dout, dlse))) for x in (in_parts, whole)
    )
    for x, y in zip(found, expected, strict=True):
        assert np.abs(x - y).max() <= 2e-6 * np.abs(y).max()


def test_parts_that_see_nothing_add_nothing():
    out, lse = ring.normal(0, (3, 4), (3,))
    blind = (np.zeros_like(out), np.full_like(lse, -np.inf))
    found = ba.merge_attention(blind, (out, lse), blind)
    assert np.abs(found[0] - out).max() <= 1e-7
    assert np.array_equal(found[1], lse)
    nothing = ba.merge_attention(blind, blind)
    assert not nothing[0].any()
    assert np.isneginf(nothing[1]).all()
    of_sum = jax.grad(lambda *x: sum(map(jnp.sum, ba.merge_attention(x, x))), (0, 1))
    gradients = jax.jit(of_sum)(*blind)
    assert all(np.isfinite(x).all() for x in gradients)


def test_out_of_a_part_that_sees_nothing_may_be_nan():
    out, lse = ring.normal(0, (3, 4), (3,))
    logs = np.array([-np.inf, 0, -np.inf], np.float32)
    spoiled = np.where(np.isneginf(logs)[:, None], np.float32(np.nan), np.ones_like(out)), logs

    def both(*part):
        return ba.merge_attention(part, (out, lse))

    clean = np.ones_like(out), logs
    for found, expected in zip(both(*spoiled), both(*clean), strict=True):
        np.testing.assert_array_equal(found, expected)
    gradients = [jax.vjp(both, *part)[1]((out, lse)) for part in (spoiled, clean)]
    for found, expected in zip(*gradients, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_an_infinite_part_takes_all_weight():
    out, lse = ring.normal(0, (3, 4), (3,))
    found = ba.merge_attention((out, lse), (0 * out, np.full_like(lse, np.inf)))
    assert not found[0].any()
    assert np.isposinf(found[1]).all()


def test_results_are_float32_of_any_type_and_number():
    out, lse = ring.normal(0, (2, 3, 4), (2, 3))
    found = ba.merge_attention((out.astype(np.float16), lse))
    assert found[0].dtype == found[1].dtype == np.float32
    assert np.array_equal(found[0], out.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ((), ValueError, "^merge_attention needs at least one pair"),
        ((np.ones((2, 3)),), TypeError, r"^part 0 must be a pair \(out, lse\), got ndarray"),
        (((np.ones((2, 3)), 1.0),), TypeError, "^lse of part 0 must be an array, got float"),
        (((np.ones((2, 3)), np.ones(3)),), ValueError, r"got out \(2, 3\) and lse \(3,\)"),
        (((np.ones((2, 3), int), np.ones(2)),), TypeError, "^out of part 0 must have a float type"),
        (
            ((np.ones((2, 3)), np.ones(2)), (np.ones((1, 3)), np.ones(1))),
            ValueError,
            r"^the outs of all parts must have one shape, got \(2, 3\) and, in part 1, \(1, 3\)",
        ),
    ],
)
def test_bad_parts_are_errors(parts, error, message):
    with pytest.raises(error, match=message):
        ba.merge_attention(*parts)
