"""Decays of channels in the delta rule on GPUs, without a GPU: what surrounds the kernels is right.

The kernels' formulas, written out, stand in for the kernels, as in `test_delta_cuda` and
`test_channels_cuda`. On an interpreter the tests in `kernels/interpreter/tests/kernels/delta_rule`
show that the kernels compute them.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
import test_channels_cuda as channels_cuda
import test_delta_cuda as delta_cuda
from burst_attention._linear import checks, cuts, gpu, gpu_delta
from linear_cases import assert_right, delta_inputs, found
from linear_reference import recurrence
from long import some, spread
from test_channels_cuda import LEVELS, carried, level_tiles, quarter
from test_delta_cuda import SPOILS, TILE, in_tiles, of_tiles, product, statistics
from test_linear_cuda import SLACK, exactly, rounded


def delta_stand_in(name, label, parts, operands, shapes, narrow=exactly):
    """The formulas of `kernels/compiler/src/device/delta_rule.rs` and its neighbours."""
    tiles = partial(in_tiles, rows=parts.rows)
    if name == "inverse":
        _, _, beta, pairs = operands
        lower = jnp.tril(tiles(pairs) * statistics(beta, parts.rows), -1) + jnp.eye(TILE)
        return (of_tiles(narrow(jnp.linalg.inv(lower)), shapes[0]),)
    if name == "keys":
        return keys(tiles, parts.rows, operands, shapes, narrow)
    k, inverse, sums, beta, *given = operands
    is_back = name == "grad_parts"
    rows, brought = (2, 2) if is_back else (1, 1)
    *values, last = [tiles(x) for x in given[:rows]]
    before, brought = given[rows:-brought], [tiles(x) for x in given[-brought:]]
    total = tiles(sums)[:, ..., -1, :]
    solved = (tiles(k), tiles(inverse), total, statistics(beta, parts.rows), *brought, *values)
    if before:
        found, _ = walk(is_back, (*solved, last), before[0], narrow)
        return (of_tiles(found, shapes[0]),)
    k_dim, v_dim = k.shape[-1], last.shape[-1]
    identity = jnp.eye(k_dim, k_dim + v_dim)
    # Under shard_map the identity varies along the same axes as the tokens.
    begin = identity + 0 * total[0, ..., :1, None]
    wide = jnp.pad(last, [(0, 0)] * 5 + [(k_dim, 0)])
    _, columns = walk(is_back, (*solved, wide), begin, narrow)
    return columns[..., k_dim:], columns[..., :k_dim]


def walk(is_back, arrays, state, narrow):
    """Goes through the tiles of all parts: values of tokens, and the states at the end."""

    def ahead(state, tile):
        k, inverse, total, beta, kh, v = tile
        known = product("bphik,bphkv->bphiv", k, narrow(state))
        values = product("bphij,bphjv->bphiv", inverse, narrow(beta * (v - known)))
        added = product("bphik,bphiv->bphkv", kh, narrow(values))
        return carried(state, total[..., None]) + added, values

    def back(state, tile):
        k, inverse, total, beta, kh, pairs, q, dout = tile
        du = product("bphij,bphjv->bphiv", narrow(pairs), dout)
        du += product("bphik,bphkv->bphiv", kh, narrow(state))
        values = product("bphij,bphiv->bphjv", inverse, narrow(du))
        added = product("bphik,bphiv->bphkv", q, dout)
        added -= product("bphik,bphiv->bphkv", k, narrow(beta * values))
        return carried(state, total[..., None]) + added, values

    end, values = jax.lax.scan(back if is_back else ahead, state, arrays, reverse=is_back)
    return values, end


def keys(tiles, rows, operands, shapes, narrow):
    *operands, turned, met, keys_met, fades = operands
    levels = [level_tiles(x, rows) for x in (met, keys_met, fades)]

    def back(state, tile):
        k, sums, q, u, dout, dv, met, keys_met, fades = tile
        total = sums[..., -1:, :]
        kept = narrow(product("bphiv,bphjv->bphij", u, dout))
        taken = narrow(product("bphiv,bphjv->bphij", u, -dv))
        crossing = jnp.exp2(total - sums) * product("bphiv,bphvk->bphik", u, narrow(state))
        dk, dots = crossing, crossing * k
        dk += product("bphij,bphjk->bphik", jnp.eye(TILE) * kept, q)
        for weights, rows_met in ((kept, met), (taken, keys_met)):
            for level, m in enumerate(LEVELS):
                seen = jnp.where(quarter(m).T, weights, 0)
                part = product("bphij,bphjk->bphik", seen, rows_met[level])
                dk += part * fades[level]
                dots += part * rows_met[level]
        fade = jnp.exp2(sums)
        gained = product("bphiv,bphik->bphvk", dout, narrow(fade * q))
        gained -= product("bphiv,bphik->bphvk", dv, narrow(fade * k))
        return carried(state, total) + gained, (dk, dots)

    arrays = (*map(tiles, operands), *levels)
    _, (dk, dots) = jax.lax.scan(back, turned, arrays, reverse=True)
    return of_tiles(dk, shapes[0]), of_tiles(dots, shapes[1])


host = pytest.mark.needs("host")


@pytest.fixture
def kernels(monkeypatch):
    """As if the devices were GPUs, in parts of two tiles."""
    monkeypatch.setattr(gpu, "_call", channels_cuda.stand_in)
    monkeypatch.setattr(gpu_delta, "_call", delta_stand_in)
    monkeypatch.setattr(checks, "platform", lambda *_: "cuda")
    monkeypatch.setattr(cuts, "part_rows", lambda batch, tokens, heads: 2 * TILE)


@host
@pytest.mark.parametrize(
    "one", some([("all_gather", (2, 1), 2), ("ring", (2, 2), 1), ("in_turn", (2, 1), 1)]), ids=str
)
def test_kernels_and_what_surrounds_them_are_the_recurrence(kernels, one):
    """Some channels forget a token at once, others never do."""
    method, heads, most = one
    arrays, beta = delta_inputs(2, 170, *heads, 16, 8, None, True, most)
    got = found(ring.line(2), arrays, beta=beta, method=method, scale=0.3)
    assert_right(got, arrays, slack=SLACK, scale=0.3, beta=beta)


@host
def test_decays_down_to_nothing_keep_their_digits(kernels):
    """Log decays of −20 in all tokens, of −∞ in some, and channels without decays."""
    arrays, beta = delta_inputs(1, 200, 2, 2, 16, 8, None, True, 1)
    logs = arrays[3]
    logs[..., ::3] = -20
    logs[..., 1::3] = 0
    logs[:, ::45, :, 4] = -np.inf
    logs[:, 77] = -np.inf
    got = found(ring.line(1), arrays, beta=beta)
    assert all(np.isfinite(x).all() for x in got.values())
    with np.errstate(invalid="ignore"):
        assert_right(got, arrays, slack=SLACK, beta=beta)


@host
@pytest.mark.long
def test_rounding_to_16_bits_stays_small_in_all_gradients(kernels, monkeypatch):
    """Gradients of decays and rates too, although they are sums of differences."""
    monkeypatch.setattr(gpu, "_call", partial(channels_cuda.stand_in, narrow=rounded))
    monkeypatch.setattr(gpu_delta, "_call", partial(delta_stand_in, narrow=rounded))
    (q, k, v, *others), beta = delta_inputs(1, 400, 2, 1, 16, 32, None, True, 1)
    q, k, v, others[2] = (x.astype(jnp.bfloat16) for x in (q, k, v, others[2]))
    arrays = (q, k, v, *others)
    got = found(ring.line(1), arrays, beta=beta)
    for name, exact in recurrence(*arrays, beta=beta).items():
        error = np.linalg.norm(got[name].astype(np.float64) - exact) / np.linalg.norm(exact)
        assert error <= 2.0**-7, (name, error)


def inputs(tokens, heads, k_dim, v_dim, dtype="float32"):
    """Returns what `test_delta_cuda.inputs` returns, with log decays of channels."""
    q, k, v, logs, *others = delta_cuda.inputs(tokens, heads, k_dim, v_dim, dtype)
    (noise,) = ring.normal(4, (*logs.shape, k_dim), dtype=np.float32)
    return q, k, v, np.maximum(logs[..., None] * np.exp(noise), np.float32(-20)), *others


@host
@pytest.mark.parametrize("name", spread(SPOILS, 4))
def test_what_is_not_finite_stays_in_its_document(kernels, name):
    """In parts of two tiles, so that documents begin inside of parts and go through several."""
    arrays, begins = inputs(200, (1, 1, 1), 8, 8), [0, 40, 100, 150, 200]
    arrays[3][:, begins[1:-1]] = -np.inf
    want = delta_cuda.found(arrays, has_documents=True)
    delta_cuda.assert_right(want, arrays)
    document = {"first": 0, "dlast": 3}.get(name, 1)
    spoilt = [np.array(x) for x in arrays]
    where = spoilt[SPOILS.index(name)]
    where[(0,) if name in ("first", "dlast") else (0, 70)] = np.nan
    got = delta_cuda.found(tuple(spoilt), has_documents=True)
    is_apart = np.ones((2, 200), bool)
    is_apart[0, begins[document] : begins[document + 1]] = False
    for key in ("o", *delta_cuda.NAMES[:5]):
        # A spoilt log decay counts as 0, which changes the rounding of sums behind it.
        np.testing.assert_allclose(got[key][is_apart], want[key][is_apart], atol=1e-3, err_msg=key)
    assert not all(np.isfinite(x).all() for x in got.values())


@pytest.mark.needs("standin")
@pytest.mark.parametrize(("dtype", "own_heads"), [("bfloat16", (2, 1, 2)), ("float16", (1, 1, 1))])
def test_the_kernels_themselves_are_the_recurrence(monkeypatch, dtype, own_heads):
    """Under XLA's runtime, on the interpreter, in parts of two tiles."""
    monkeypatch.setattr(cuts, "part_rows", lambda batch, tokens, heads: 2 * TILE)
    arrays = inputs(170, own_heads, 16, 24, dtype)
    got = delta_cuda.found(arrays, split=150)
    *operands, beta = arrays
    unit = {"bfloat16": 2.0**-7, "float16": 2.0**-10}[dtype]
    for name, exact in recurrence(*operands, beta=beta).items():
        error = np.linalg.norm(got[name].astype(np.float64) - exact) / np.linalg.norm(exact)
        assert error <= unit, (name, error)


@host
@pytest.mark.long
def test_states_beyond_float16_keep_their_digits(kernels):
    delta_cuda.assert_large_states_are_right(inputs(130, (2, 1, 2), 16, 8, "float16"))
