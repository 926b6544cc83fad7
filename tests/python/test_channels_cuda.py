"""Decays of channels on GPUs, without a GPU: the code around the kernels is right.

The kernels' formulas, written out, stand in for the kernels. On an interpreter the tests in
`kernels/interpreter/tests/kernels/linear/channels` show that the kernels compute them.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from burst_attention._linear import checks, cuts, gpu
from linear_cases import assert_right, delta_inputs, found
from linear_reference import recurrence
from long import some
from test_delta_cuda import in_tiles, of_tiles, product
from test_linear_cuda import SLACK, exactly, rounded

TILE = gpu.TILE
LEVELS = (1, 2, 4, 8, 16, 32)
token = np.arange(TILE)


def quarter(m):
    """Returns the pairs that meet in a level: rows of odd blocks, columns of the blocks before."""
    later, ends = (token & m) != 0, token | (2 * m - 1)
    return later[:, None] & ~later & (ends[:, None] == ends)


def level_tiles(x, rows):
    """Returns `in_tiles` of arrays with levels, for each level."""
    return jnp.stack([in_tiles(x[:, :, level], rows) for level in range(6)], axis=1)


def pairs_stand_in(parts, operands, shapes):
    q, k, met = operands
    found = jnp.eye(TILE) * product(
        "nbphik,nbphjk->nbphij", *(in_tiles(x, parts.rows) for x in (q, k))
    )
    met = level_tiles(met, parts.rows)
    for level, m in enumerate(LEVELS):
        every = product("nbphik,nbphjk->nbphij", met[:, level], met[:, level])
        found += jnp.where(quarter(m), every, 0)
    return (of_tiles(found, shapes[0]),)


def stand_in(
    name, label, parts, operands, shapes, back=False, strict=False, decays=0, *, narrow=exactly
):
    """The formulas of `kernels/compiler/src/device/channels.rs` and `linear.rs`."""
    if name == "pairs":
        return pairs_stand_in(parts, operands, shapes)
    tiles = partial(in_tiles, rows=parts.rows)
    if name == "parts":
        k, v, sums = operands
        assert decays == gpu.KEYS
        k, v, total = tiles(k), tiles(v), tiles(sums)[:, ..., -1, :]

        def advance(state, tile):
            k, v, total = tile
            return carried(state, total[..., None]) + product("bphik,bphiv->bphkv", k, v), None

        zeros = 0 * product("bphik,bphiv->bphkv", k[0], v[0])
        return (jax.lax.scan(advance, zeros, (k, v, total), reverse=back)[0],)
    if decays == gpu.KEYS:
        return by_keys(tiles, operands, shapes, back, narrow)
    assert decays == gpu.VALUES
    return by_values(tiles, parts.rows, operands, shapes, back, strict, narrow)


def carried(state, total):
    return jnp.where(total <= cuts.LOWEST, 0, jnp.exp2(total) * state)


def by_keys(tiles, operands, shapes, back, narrow):
    q, k, v, sums, state, pairs = operands
    q, k, v, pairs, total = tiles(q), tiles(k), tiles(v), tiles(pairs), tiles(sums)[:, ..., -1, :]

    def step(state, tile):
        q, k, v, pairs, total = tile
        out = product("bphij,bphjv->bphiv", narrow(pairs), v)
        out += product("bphik,bphkv->bphiv", q, narrow(state))
        return carried(state, total[..., None]) + product("bphik,bphiv->bphkv", k, v), out

    _, out = jax.lax.scan(step, state, (q, k, v, pairs, total), reverse=back)
    return (of_tiles(out, shapes[0]),)


def by_values(tiles, rows, operands, shapes, back, strict, narrow):
    q, k, v, sums, state, other, met, fades = operands
    met, fades = level_tiles(met, rows), level_tiles(fades, rows)
    arrays = (*(tiles(x) for x in (q, k, v, sums, other)), met, fades)

    def step(state, tile):
        q, k, v, sums, other, met, fades = tile
        total = sums[..., -1:, :]
        pairs = narrow(product("bphik,bphjk->bphij", q, k))
        crossing = product("bphik,bphkv->bphiv", q, narrow(state))
        crossing *= jnp.exp2(total - sums if back else sums)
        out, dots = crossing, crossing * other
        if not strict:
            out += product("bphij,bphjv->bphiv", jnp.eye(TILE) * pairs, v)
        for level, m in enumerate(LEVELS):
            seen = quarter(m).T if back else quarter(m)
            part = product("bphij,bphjv->bphiv", jnp.where(seen, pairs, 0), met[level])
            out += part * fades[level]
            dots += part * met[level]
        left = narrow(v * jnp.exp2(sums if back else total - sums))
        return carried(state, total) + product("bphik,bphiv->bphkv", k, left), (out, dots)

    _, (out, dots) = jax.lax.scan(step, state, arrays, reverse=back)
    return of_tiles(out, shapes[0]), of_tiles(dots, shapes[1])


host = pytest.mark.needs("host")


@pytest.fixture
def kernels(monkeypatch):
    """As if the devices were GPUs."""
    monkeypatch.setattr(gpu, "_call", stand_in)
    monkeypatch.setattr(checks, "platform", lambda *_: "cuda")


@host
@pytest.mark.parametrize("method", ["ring", "all_gather"])
@pytest.mark.parametrize("heads", some([(2, 1), (2, 2)]), ids=str)
def test_kernels_and_what_surrounds_them_are_the_recurrence(kernels, monkeypatch, method, heads):
    """In parts of two tiles. Some channels forget a token at once, others never do."""
    monkeypatch.setattr(cuts, "part_rows", lambda batch, tokens, heads: 2 * TILE)
    arrays, _ = delta_inputs(2, 170, *heads, 16, 8, None, True, 1)
    assert_right(
        found(ring.line(2), arrays, method=method, scale=0.3), arrays, slack=SLACK, scale=0.3
    )


@host
def test_decays_down_to_nothing_keep_their_digits(kernels):
    """Log decays of −20 in all tokens, of −∞ in some, and channels without decays."""
    arrays, _ = delta_inputs(1, 200, 2, 2, 16, 8, None, True, 1)
    logs = arrays[3]
    logs[..., ::3] = -20
    logs[..., 1::3] = 0
    logs[:, ::45, :, 4] = -np.inf
    logs[:, 77] = -np.inf
    got = found(ring.line(1), arrays)
    assert all(np.isfinite(x).all() for x in got.values())
    with np.errstate(invalid="ignore"):
        assert_right(got, arrays, slack=SLACK)


@host
@pytest.mark.long
def test_rounding_to_16_bits_stays_small_in_all_gradients(kernels, monkeypatch):
    monkeypatch.setattr(gpu, "_call", partial(stand_in, narrow=rounded))
    (q, k, v, *others), _ = delta_inputs(1, 400, 2, 1, 16, 32, None, True, 1)
    q, k, v, others[2] = (x.astype(jnp.bfloat16) for x in (q, k, v, others[2]))
    arrays = (q, k, v, *others)
    got = found(ring.line(1), arrays)
    for name, exact in recurrence(*arrays).items():
        error = np.linalg.norm(got[name].astype(np.float64) - exact) / np.linalg.norm(exact)
        assert error <= 2.0**-7, (name, error)
