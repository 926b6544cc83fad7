"""The reference agrees with jax.nn, finite differences and Philox's published numbers."""

from functools import partial

import jax
import numpy as np
import pytest
import ring
from philox import kept, philox, threshold
from reference import Features, dense

pytestmark = pytest.mark.needs("text")

ALL = 0xFFFFFFFF
VECTORS = [
    # counter, key and result, from Random123's kat_vectors for philox4x32 with 10 rounds
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([ALL] * 4, [ALL] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), VECTORS)
def test_philox_gives_its_published_numbers(counter, key, result):
    assert philox(counter, key).tolist() == result


def test_mask_takes_the_word_of_the_position():
    words, found = (1, 2), kept(0.4, (1, 2), 5, 6, [7, 70], np.arange(3, 14))
    for row, query in enumerate((7, 70)):
        for column, position in enumerate(range(3, 14)):
            number = philox([position // 4, query, 6, 5], words)[position % 4]
            assert found[row, column] == (number >= threshold(0.4))
    assert (threshold(0.0), threshold(0.5)) == (0, 1 << 31)
    assert threshold(np.nextafter(np.float32(1), np.float32(0))) == (1 << 32) - (1 << 8)


def inputs(q_len=11, kv_len=11, heads=4, value_dim=8):
    shapes = [(2, q_len, heads, 8), (2, kv_len, 2, 8), (2, kv_len, 2, value_dim)]
    shapes += [(2, q_len, heads, value_dim), (2, q_len, heads)]
    return [x.astype(np.float64) for x in ring.normal(q_len + kv_len, *shapes)]


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ({"scale": 0.7}, (5, 6)),
        ({"is_causal": True}, (7, 12)),
        ({"is_causal": True}, (12, 7)),
        ({"local_window_size": 3}, (11, 11)),
        ({"local_window_size": (2, 4)}, (9, 12)),
        ({"local_window_size": (4, 3), "is_causal": True}, (11, 11)),
    ],
)
def test_masks_are_those_of_jax_nn(options, lengths):
    """This holds for rows that see a key; jax.nn gives blind rows the mean of all values."""
    q, k, v, dout, dlse = inputs(*lengths)
    window = options.get("local_window_size")
    mine = {"causal": options.get("is_causal", False), "scale": options.get("scale")}
    mine["window"] = (window, window) if isinstance(window, int) else window
    found = dense(q, k, v, dout, dlse, **mine)
    theirs = partial(jax.nn.dot_product_attention, **options, return_residual=True)
    with jax.enable_x64(True):
        out, lse = jax.jit(theirs)(q, k, v)
    seeing = np.isfinite(found.lse)
    np.testing.assert_allclose(found.o[seeing], np.asarray(out)[seeing], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found.lse[seeing], np.asarray(lse)[seeing], rtol=1e-6, atol=1e-6)
    assert seeing.any()
    assert not found.o[~seeing].any()


SEGMENTS = np.array([[3, 3, 3, -1, 5, 5, 5, 5, 9, 3, -2], [0, 0, 1, 1, 1, 1, -1, -1, -1, -1, -1]])
FEATURES = {
    "nothing": {},
    "window": {"window": (3, 2)},
    "segments": {"segments": (SEGMENTS, np.roll(SEGMENTS, 1, axis=1))},
    "soft cap": {"soft_cap": 0.8},
    "slopes": {"slopes": np.array([0.5, -0.25, 0.1, 0.0])},
    "sinks": {"sinks": np.array([1.0, -0.5, 0.3, 2.0])},
    "dropout": {"dropout": (0.3, (11, 12))},
}


def chosen(name):
    features = FEATURES.values() if name == "all" else [FEATURES[name]]
    return {key: value for found in features for key, value in found.items()}


@pytest.mark.parametrize("name", [*FEATURES, "all"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_values_are_those_of_weights_in_one_array(name, causal):
    q, k, v, dout, dlse = inputs(value_dim=16)
    found = dense(q, k, v, dout, dlse, causal=causal, **chosen(name))
    o, lse = plain(q, k, v, causal=causal, **chosen(name))
    np.testing.assert_allclose(found.o, o, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(found.lse, lse, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", [*FEATURES, "all"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_gradients_are_those_of_finite_differences(name, causal):
    """The function is the sum of results times cotangents, along a direction of each input."""
    options = chosen(name)
    q, k, v, dout, dlse = inputs(value_dim=16)
    given = {"dq": q, "dk": k, "dv": v, "dslopes": options.pop("slopes", None)}
    given["dz"] = options.pop("sinks", None)

    def run(x):
        return dense(
            x["dq"], x["dk"], x["dv"], dout, dlse,
            causal=causal, slopes=x["dslopes"], sinks=x["dz"], **options,
        )  # fmt: skip

    def loss(x):
        found = run(x)
        return (found.o * dout).sum() + np.where(np.isfinite(found.lse), found.lse * dlse, 0).sum()

    found = run(given)
    for key, x in given.items():
        if x is None:
            continue
        direction = np.random.default_rng(1).standard_normal(x.shape)
        up, down = (loss(given | {key: x + step * direction}) for step in (1e-5, -1e-5))
        per_head = found.per_head.get(key)
        gradient = per_head.value if per_head else getattr(found, key)
        np.testing.assert_allclose((gradient * direction).sum(), (up - down) / 2e-5, rtol=1e-7)


def plain(q, k, v, **given):
    """Returns o and lse of all queries and keys, from one array of weights."""
    features = Features(**given)
    group, (q_len, kv_len) = q.shape[2] // k.shape[2], (q.shape[1], k.shape[1])
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    s = np.einsum("bqhd,bkhd->bqhk", q, k) * q.shape[3] ** -0.5
    if features.soft_cap:
        s = features.soft_cap * np.tanh(s / features.soft_cap)
    rows, columns = np.arange(q_len)[:, None], np.arange(kv_len)
    if features.slopes is not None:
        s += features.slopes[:, None] * (columns - rows)[:, None]
    e = np.exp(s) * _allowed(features, rows, columns)[..., None, :]
    total = e.sum(-1) + (0 if features.sinks is None else np.exp(features.sinks))
    with np.errstate(divide="ignore"):
        lse = np.log(total)
    p = e / np.where(total == 0, 1, total)[..., None]
    if features.dropout:
        rate, words = features.dropout
        for b, h in np.ndindex(q.shape[0], q.shape[2]):
            mask = kept(rate, words, b, h, range(q_len), range(kv_len))
            p[b, :, h] *= mask / (1 - np.float64(np.float32(rate)))
    return np.einsum("bqhk,bkhd->bqhd", p, v), lse


def _allowed(features, rows, columns):
    allowed = columns <= rows if features.causal else columns >= 0
    if features.window:
        allowed = allowed & (columns >= rows - features.window[0])
        allowed = allowed & (columns <= rows + features.window[1])
    if features.segments is not None:
        ids, of_keys = features.segments[0][:, :, None], features.segments[1][:, None]
        allowed = allowed & (ids == of_keys) & (ids >= 0)
    return np.broadcast_to(allowed, (2, len(rows), len(columns)))
