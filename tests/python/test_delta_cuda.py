"""The delta rule on GPUs, without a GPU: the code around the kernels is right.

The kernels' formulas, written out, stand in for the kernels. The tests in
`kernels/interpreter/tests/kernels/delta_rule` show on an interpreter that the kernels compute them.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from burst_attention._linear import cuts, gpu, gpu_delta
from burst_attention._linear.states import Matrix, apply
from linear_cases import delta_limits
from linear_reference import recurrence
from long import some, spread
from test_linear_cuda import SLACK, TILE, exactly, in_parts, rounded, stand_in

product = partial(jnp.einsum, precision="highest")
NAMES = ("dq", "dk", "dv", "dlog_decay", "dbeta", "dfirst")


def in_tiles(x, rows):
    """Turns ``[batch, tokens, heads, dim]`` into tiles of parts, tile first."""
    x = in_parts(x, x.shape[2], rows)
    x = x.reshape(*x.shape[:3], -1, TILE, x.shape[4])
    return jnp.moveaxis(x, 3, 0)


def of_tiles(x, shape):
    """Turns the result of `in_tiles` back into an array of a shape."""
    x = jnp.moveaxis(x, 0, 3)
    x = x.reshape(*x.shape[:3], -1, x.shape[5]).swapaxes(2, 3)
    return x.reshape(shape.shape[0], -1, *x.shape[3:])[:, : shape.shape[1]].astype(shape.dtype)


def statistics(x, rows):
    """Returns statistics ``[batch, heads, padded tokens]`` as `in_tiles` returns rows."""
    return in_tiles(x.swapaxes(1, 2)[..., None], rows)


def between(sums):
    """Returns e^(sum of logs from one token to another) for all pairs of a tile, 0 if none."""
    row = jnp.arange(TILE)
    left = jnp.where(row[:, None] >= row, sums - sums.swapaxes(-1, -2), -jnp.inf)
    return jnp.exp2(left)


def delta_stand_in(name, label, parts, operands, shapes, narrow=exactly):
    """The formulas of `kernels/compiler/src/device/delta_rule.rs` and its neighbours."""
    rows, shape = parts.rows, shapes[0]
    k = in_tiles(operands[0], rows)
    if name == "inverse":
        _, sums, beta = operands
        sums, beta = statistics(sums, rows), statistics(beta, rows)
        pairs = product("nbphik,nbphjk->nbphij", k, k) * between(sums) * beta
        lower = jnp.tril(pairs, -1) + jnp.eye(TILE)
        return (of_tiles(narrow(jnp.linalg.inv(lower)), shape),)
    if name == "keys":
        return keys(parts, operands, shapes, narrow)
    _, inverse, sums, beta, *given = operands
    assert sums.shape[2] == beta.shape[2] == -(-operands[0].shape[1] // TILE) * TILE
    inverse, sums, beta = in_tiles(inverse, rows), statistics(sums, rows), statistics(beta, rows)
    count = 1 if name == "parts" else 2
    rows_given = [in_tiles(x, rows) for x in given[:count]]
    if len(given) > count:
        values, _ = walk(name, (k, inverse, sums, beta, *rows_given), given[count], narrow)
        return (of_tiles(values, shape),)
    k_dim, v_dim = k.shape[-1], rows_given[-1].shape[-1]
    identity = jnp.eye(k_dim, k_dim + v_dim)
    begin = jnp.broadcast_to(identity, (*sums.shape[1:4], *identity.shape))
    wide = [*rows_given[:-1], jnp.pad(rows_given[-1], [(0, 0)] * 5 + [(k_dim, 0)])]
    _, columns = walk(name, (k, inverse, sums, beta, *wide), begin, narrow)
    assert shapes[0].shape == columns[..., k_dim:].shape
    return columns[..., k_dim:], columns[..., :k_dim]


def walk(name, arrays, state, narrow):
    """Goes through the tiles of all parts: values of tokens, and the states at the end."""

    def ahead(state, tile):
        k, inverse, sums, beta, v = tile
        known = jnp.exp2(sums) * product("bphik,bphkv->bphiv", k, narrow(state))
        values = product("bphij,bphjv->bphiv", inverse, narrow(beta * (v - known)))
        total = sums[..., -1:, :]
        faded = narrow(jnp.exp2(total - sums) * values)
        return jnp.exp2(total) * state + product("bphik,bphiv->bphkv", k, faded), values

    def back(state, tile):
        k, inverse, sums, beta, q, dout = tile
        pairs = product("bphik,bphjk->bphij", q, k) * between(sums)
        total = sums[..., -1:, :]
        du = product("bphij,bphiv->bphjv", narrow(pairs), dout)
        du += jnp.exp2(total - sums) * product("bphik,bphkv->bphiv", k, narrow(state))
        values = product("bphij,bphiv->bphjv", inverse, narrow(du))
        lost = narrow(jnp.exp2(sums) * beta * values)
        added = product("bphik,bphiv->bphkv", q, narrow(jnp.exp2(sums) * dout))
        added -= product("bphik,bphiv->bphkv", k, lost)
        return jnp.exp2(total) * state + added, values

    is_back = name == "grad_parts"
    end, values = jax.lax.scan(back if is_back else ahead, state, arrays, reverse=is_back)
    return values, end


def keys(parts, operands, shapes, narrow):
    rows = parts.rows
    k, sums, q, u, dout, dv, turned = operands
    k, q, u, dout, dv = (in_tiles(x, rows) for x in (k, q, u, dout, dv))

    def back(state, tile):
        k, sums, q, u, dout, dv = tile
        total, weights = sums[..., -1:, :], between(sums)
        added = narrow(product("bphiv,bphjv->bphij", dout, u) * weights)
        taken = narrow(product("bphiv,bphjv->bphij", dv, u) * jnp.tril(weights, -1))
        dk = product("bphij,bphik->bphjk", added, q) - product("bphij,bphik->bphjk", taken, k)
        dk += jnp.exp2(total - sums) * product("bphiv,bphvk->bphik", u, narrow(state))
        fade = jnp.exp2(sums)
        gained = product("bphiv,bphik->bphvk", dout, narrow(fade * q))
        gained -= product("bphiv,bphik->bphvk", dv, narrow(fade * k))
        return jnp.exp2(total) * state + gained, (dk, (dk * k).sum(-1, keepdims=True))

    tiles = (k, statistics(sums, rows), q, u, dout, dv)
    _, (dk, dots) = jax.lax.scan(back, turned, tiles, reverse=True)
    of_rows = jax.ShapeDtypeStruct((shapes[1].shape[0], shapes[1].shape[2]), np.float32)
    dots = of_tiles(dots, of_rows)[..., 0].swapaxes(1, 2)
    # All of a row is in the first tile of columns.
    batch, all_dots, padded = shapes[1].shape
    heads = shapes[0].shape[2]
    dots = jnp.pad(dots, [(0, 0), (0, 0), (0, padded - dots.shape[2])])
    spread = jnp.zeros((batch, heads, all_dots // heads, padded)).at[:, :, 0].set(dots)
    return of_tiles(dk, shapes[0]), spread.reshape(shapes[1].shape)


host = pytest.mark.needs("host")


@pytest.fixture
def kernels(monkeypatch):
    """As if the devices were GPUs."""
    monkeypatch.setattr(gpu, "_call", stand_in)
    monkeypatch.setattr(gpu_delta, "_call", delta_stand_in)


def inputs(tokens, own_heads, k_dim, v_dim, dtype="float32", most=1.0):
    """Returns q, k, v, log decays, the first state, dout, the last state's gradient, and β."""
    heads = max(own_heads)
    dims = zip(own_heads, (k_dim, k_dim, v_dim), strict=True)
    shapes = [(2, tokens, count, dim) for count, dim in dims]
    state = (2, heads, k_dim, v_dim)
    q, k, v, dout = ring.normal(3, *shapes, (2, tokens, heads, v_dim), dtype=dtype)
    k = (k / np.linalg.norm(k.astype(np.float32), axis=3, keepdims=True)).astype(k.dtype)
    noise, rates, first, dlast = ring.normal(
        tokens, (2, tokens, heads), (2, tokens, heads), state, state, dtype=np.float32
    )
    logs = -np.exp(3 * noise - 3)
    return q, k, v, logs, first, dout, dlast, np.float32(most) / (1 + np.exp(-rates))


def found(arrays, *, split=None, has_documents=False):
    """Returns the results that `recurrence` names, of one device or of two that follow each other.

    ``split`` is the first token of the second device.
    """
    run = jax.jit(partial(results, split=split, has_documents=has_documents))
    return {name: np.asarray(x) for name, x in run(tuple(map(jnp.asarray, arrays))).items()}


def results(arrays, *, split=None, has_documents=False):
    """Returns what `found` returns, in a program."""
    q, k, v, logs, first, dout, dlast, beta = arrays
    ends = [0, q.shape[1]] if split is None else [0, split, q.shape[1]]
    spans = [slice(*ends[n : n + 2]) for n in range(len(ends) - 1)]
    k_dim = k.shape[3]
    own = [[x[:, span] for x in (q, k, v, logs, beta)] for span in spans]
    lefts = [gpu_delta.left(has_documents, *x[1:]) for x in own]
    starts = [first]
    for columns, _ in lefts:
        transfer, state = columns[..., :k_dim], columns[..., k_dim:]
        starts.append(apply(Matrix(transfer), starts[-1]) + state)
    ahead = [
        gpu_delta.forward(has_documents, (*x, start), again)
        for x, start, (_, again) in zip(own, starts, lefts, strict=False)
    ]
    d, backs = dlast, []
    for n in reversed(range(len(spans))):
        here = dout[:, spans[n]]
        left, again = gpu_delta.grad_left(has_documents, *own[n][:2], here, *own[n][3:])
        # One device begins from its first state, the other from the states of all parts.
        kept = ahead[n][2] if n else starts[0]
        backs.append(gpu_delta.backward(has_documents, (*own[n], kept, here, d), again))
        transfer = lefts[n][0][..., :k_dim].swapaxes(-1, -2)
        d = apply(Matrix(transfer), d) + left
    gradients = [
        jnp.concatenate(x[::-1], axis=1) for x in zip(*(y[:5] for y in backs), strict=True)
    ]
    values = (jnp.concatenate([x[0] for x in ahead], axis=1), ahead[-1][1], *gradients)
    return dict(zip(("o", "state", *NAMES[:5]), values, strict=True)) | {"dfirst": backs[-1][5]}


def assert_right(got, arrays, bounds=lambda name: SLACK * (2e-6 if name in "o state" else 1e-5)):
    *operands, beta = arrays
    for name, exact in recurrence(*operands, beta=beta).items():
        error = np.abs(got[name].astype(np.float64) - exact).max() / np.abs(exact).max()
        assert error <= bounds(name), (name, error)


@host
@pytest.mark.parametrize(
    "one",
    some([(300, (2, 2, 2), None, 1), (70, (4, 2, 2), 1, 2), (700, (2, 1, 4), 333, 1)], 2),
    ids=str,
)
def test_kernels_and_what_surrounds_them_are_the_recurrence(kernels, one):
    tokens, own_heads, split, most = one
    arrays = inputs(tokens, own_heads, 16, 72, most=most)
    # Products with a small β, and with none, are not divided by it.
    arrays[-1][0, ::7], arrays[-1][1, ::7] = 0, 1e-3
    assert_right(found(arrays, split=split), arrays)


# Tokens, the decay, or none for decays of all sizes, the largest β, and the limit of dlog_decay.
ROUNDED_CASES = [(400, None, 1, 2), (800, 0.6, 2, 2), (300, 0.99, 2, 3)]


@host
@pytest.mark.parametrize("one", some(ROUNDED_CASES), ids=str)
def test_rounding_to_16_bits_costs_little(kernels, monkeypatch, one):
    """In gradients of decays and rates too, although they are sums of differences."""
    tokens, decay, most, of_decays = one
    monkeypatch.setattr(gpu, "_call", partial(stand_in, narrow=rounded))
    monkeypatch.setattr(gpu_delta, "_call", partial(delta_stand_in, narrow=rounded))
    *arrays, beta = inputs(tokens, (2, 1, 2), 16, 32, "bfloat16", most)
    if decay:
        arrays[3] = np.full_like(arrays[3], np.log(decay))
    got, want = found((*arrays, beta)), recurrence(*arrays, beta=beta)
    limits = delta_limits(want, arrays, "bfloat16", beta=beta, of_decays=of_decays)
    for name, exact in want.items():
        error = np.linalg.norm(got[name].astype(np.float64) - exact)
        assert error <= limits[name], (name, error / limits[name])


def half(x):
    """Rounds to float16, as kernels round the operands of products."""
    return x.astype(jnp.float16).astype(jnp.float32)


def assert_large_states_are_right(inputs):
    """Asserts right results with float16 rows and states of 10^5, wherever float16 holds them."""
    *arrays, beta = inputs
    arrays[4], arrays[6] = (np.float32(1e5) * arrays[n] for n in (4, 6))
    got = found((*arrays, beta))
    for name, exact in recurrence(*arrays, beta=beta).items():
        is_held = np.abs(exact) < (np.inf if got[name].dtype == np.float32 else 65504)
        error = np.linalg.norm((got[name].astype(np.float64) - exact)[is_held])
        limit = {"dlog_decay": 2.0**-8}.get(name, 2.0**-10) * np.linalg.norm(exact)
        assert is_held.mean() > 0.2
        assert error <= limit, (name, error / limit)


@host
def test_states_beyond_float16_keep_their_digits(kernels, monkeypatch):
    """And gradients of states; each part has its own unit."""
    monkeypatch.setattr(gpu, "_call", partial(stand_in, narrow=half))
    monkeypatch.setattr(gpu_delta, "_call", partial(delta_stand_in, narrow=half))
    monkeypatch.setattr(cuts, "part_rows", lambda batch, tokens, heads: TILE)
    assert_large_states_are_right(inputs(130, (2, 1, 2), 16, 24, "float16"))


SPOILS = ("q", "k", "v", "log_decay", "first", "dout", "dlast", "beta")


@host
@pytest.mark.parametrize("name", spread(SPOILS, 4))
def test_what_is_not_finite_stays_in_its_document(kernels, monkeypatch, name):
    """In parts of one tile, so that documents begin inside of parts and go through several."""
    monkeypatch.setattr(cuts, "part_rows", lambda batch, tokens, heads: TILE)
    arrays = inputs(200, (1, 1, 1), 8, 8)
    begins = [0, 40, 100, 150, 200]
    arrays[3][:, begins[1:-1]] = -np.inf
    want = found(arrays, has_documents=True)
    # The document that a spoilt array belongs to: the first and last states have no token.
    document = {"first": 0, "dlast": 3}.get(name, 1)
    spoilt = [np.array(x) for x in arrays]
    where = spoilt[SPOILS.index(name)]
    where[(0,) if name in ("first", "dlast") else (0, 70)] = np.nan
    got = found(tuple(spoilt), has_documents=True)
    spreads = False
    for key in ("o", *NAMES[:5]):
        is_apart = np.ones((2, 200), bool)
        is_apart[0, begins[document] : begins[document + 1]] = False
        # A spoilt log decay counts as 0, which changes the rounding of sums behind it.
        np.testing.assert_allclose(got[key][is_apart], want[key][is_apart], atol=1e-3, err_msg=key)
        spreads |= not np.isfinite(got[key]).all()
    assert spreads
    # These belong to the last document and the first one.
    for key, at in (("state", 3), ("dfirst", 0)):
        rows = slice(document == at, None)
        np.testing.assert_allclose(got[key][rows], want[key][rows], atol=1e-3, err_msg=key)


@host
@pytest.mark.parametrize("back", [False, True])
def test_parts_that_pass_nothing_stop_infinities(back):
    """A kernel may leave infinities, and the part behind it may begin a document."""
    parts, k_dim, v_dim = 5, 2, 3
    states, transfers = ring.normal(
        1, (1, parts, 1, k_dim, v_dim), (1, parts, 1, k_dim, k_dim), dtype=np.float32
    )
    order = range(parts)[:: -1 if back else 1]
    states[:, order[1]], transfers[:, order[2]] = np.inf, 0
    got = gpu_delta._between(jnp.asarray(states), jnp.asarray(transfers), back=back)
    want = np.eye(k_dim, k_dim + v_dim, dtype=np.float32)
    for at, part in enumerate(order):
        passed = 0 if at == 2 else transfers[0, part, 0] @ want
        want = passed + np.pad(states[0, part, 0], [(0, 0), (k_dim, 0)])
        if at != 1:
            np.testing.assert_allclose(got[0, at + 1, 0], want, rtol=1e-5)
    assert not np.isfinite(got[0, 2]).all()


@pytest.mark.needs("standin")
@pytest.mark.parametrize(
    ("dtype", "own_heads", "has_documents"),
    [("bfloat16", (2, 1, 2), False), ("float16", (1, 1, 1), True)],
)
def test_the_kernels_themselves_are_the_recurrence(monkeypatch, dtype, own_heads, has_documents):
    """Under XLA's runtime, on the interpreter, in parts of two tiles."""
    monkeypatch.setattr(cuts, "part_rows", lambda batch, tokens, heads: 2 * TILE)
    arrays = inputs(170, own_heads, 16, 24, dtype)
    arrays[3][:, 100 if has_documents else ()] = -np.inf
    got = found(arrays, split=None if has_documents else 150, has_documents=has_documents)
    *operands, beta = arrays
    unit = {"bfloat16": 2.0**-7, "float16": 2.0**-10}[dtype]
    for name, exact in recurrence(*operands, beta=beta).items():
        error = np.linalg.norm(got[name].astype(np.float64) - exact) / np.linalg.norm(exact)
        assert error <= unit, (name, error)


@pytest.mark.needs("standin")
def test_the_kernels_themselves_keep_large_states(monkeypatch):
    monkeypatch.setattr(cuts, "part_rows", lambda batch, tokens, heads: TILE)
    assert_large_states_are_right(inputs(100, (1, 1, 1), 16, 24, "float16"))
