"""Recurrences over a mesh: their inputs, their results by name, and the bounds on their errors."""

import burst_attention as ba
import case_list
import jax
import numpy as np
import platforms
import ring
from jax.sharding import PartitionSpec as P
from linear_reference import recurrence

X = P(None, "context")
BOUNDS = {"o": 2e-6, "state": 2e-6}
"""Largest relative errors in float32; the largest error of gradients is 1e-5."""
GPU_UNITS = {"state": 0.5, "dfirst": 0.5, "dlog_decay": 2}
"""Largest relative errors on GPUs, in units of the type; those of other results are 1 unit."""
ROUNDED = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
CASES = case_list.of("linear", "shapes")
CASES = [x for x in CASES if 2 * x[2] * (x[0] * x[1]) ** 2 <= platforms.current().largest]


def inputs(world, tokens, heads, kv_heads, k_dim, v_dim, decay, dtype="float32"):
    """Returns q, k, v, log_decay, first and the cotangents dout and dlast.

    With ``decay`` None, every token has another decay.
    """
    rows, state = (2, world * tokens), (2, heads, k_dim, v_dim)
    shapes = [(*rows, heads, k_dim), (*rows, kv_heads, k_dim), (*rows, kv_heads, v_dim)]
    q, k, v, dout = ring.normal(world, *shapes, (*rows, heads, v_dim), dtype=dtype)
    noise, first, dlast = ring.normal(tokens, (*rows, heads), state, state, dtype=np.float32)
    # The decays range from ones that leave nothing after a few tokens to very weak ones.
    logs = -np.exp(3 * noise - 2) if decay is None else np.full_like(noise, np.log(decay))
    return q, k, v, logs, first, dout, dlast


def grouped(world, tokens, own_heads, k_dim, v_dim, dtype="float32"):
    """Returns what `inputs` returns, with a number of heads for each of q, k and v."""
    heads = max(own_heads)
    *_, logs, first, dout, dlast = inputs(world, tokens, heads, heads, k_dim, v_dim, None, dtype)
    shapes = [
        (2, world * tokens, count, dim)
        for count, dim in zip(own_heads, (k_dim, k_dim, v_dim), strict=True)
    ]
    return *ring.normal(1, *shapes, dtype=dtype), logs, first, dout, dlast


def delta_inputs(world, tokens, heads, kv_heads, k_dim, v_dim, decay, channels, most):
    """Returns what `inputs` returns, and β up to ``most``; keys have unit norm.

    With ``channels`` there is a decay of each channel.
    """
    q, k, v, logs, *others = inputs(world, tokens, heads, kv_heads, k_dim, v_dim, decay)
    k /= np.linalg.norm(k, axis=3, keepdims=True)
    (noise,) = ring.normal(3, logs.shape, dtype=np.float32)
    beta = np.float32(most) / (1 + np.exp(-2 * noise))
    if channels:
        (noise,) = ring.normal(4, (*logs.shape, k_dim), dtype=np.float32)
        # Some channels forget a token at once, others never do.
        logs = np.maximum(logs[..., None] * np.exp(2 * noise), np.float32(-20))
    return (q, k, v, logs, *others), beta


def limit(of_float32):
    """Returns a bound on the relative error of a result: one of float32, or a unit on GPUs."""
    return ROUNDED["bfloat16"] if platforms.current().rounds else of_float32


def attend(q, k, v, logs, first, beta=None, **options):
    """Returns the results of linear attention, or with ``beta`` of the delta rule."""
    options |= {"initial_state": first, "return_state": True}
    if beta is None:
        return ba.linear_attention(q, k, v, log_decay=logs, **options)
    return ba.delta_attention(q, k, v, beta, logs, **options)


def found(mesh, arrays, axes="context", beta=None, **options):
    """Returns the results that `recurrence` names."""
    *primals, dout, dlast = arrays
    primals += [] if beta is None else [beta]
    shards = P(None, axes)

    def local(*primals):
        out, state = attend(*primals, axis_name=axes, **options)
        return out, jax.lax.pmean(state, axes)

    specs = (*(shards,) * 4, P(), shards)[: len(primals)]
    function = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(shards, P()))

    @jax.jit
    def run(primals, cotangents):
        results, pullback = jax.vjp(function, *primals)
        return results, pullback(cotangents)

    results, gradients = run(tuple(primals), (dout, dlast))
    names = ("o", "state", "dq", "dk", "dv", "dlog_decay", "dfirst", "dbeta")
    return dict(zip(names, map(ring.on_host, results + gradients), strict=False))


def rounding_costs(want, arrays, dtype, scale=1.0, beta=None):
    """Returns how far rounding to 16 bits moves results in the norm, by name.

    Inputs and results are moved as if ``dtype`` had rounded them.
    """
    random = np.random.default_rng(0)

    def moved(x):
        x = np.asarray(x, np.float64)
        half_a_unit = np.ldexp(ROUNDED[dtype], np.frexp(x)[1] - 1)
        return x + half_a_unit * random.uniform(-1, 1, x.shape)

    q, k, v, logs, first, dout, dlast = arrays
    arrays = (*map(moved, (q, k, v)), logs, first, moved(dout), dlast)
    return {
        name: np.linalg.norm((moved(x) if name in ("o", "dq", "dk", "dv") else x) - want[name])
        for name, x in recurrence(*arrays, scale, beta).items()
    }


def delta_limits(want, arrays, dtype, scale=1.0, beta=None, of_decays=3):
    """Returns the largest errors of the delta rule on GPUs in the norm, by name.

    Each token corrects what those before it wrote, which makes errors larger, so limits are
    multiples of what rounding costs: 2, and ``of_decays`` for gradients of decays. These are
    differences of sums, whose errors add up while states hardly fade.
    """
    costs = rounding_costs(want, arrays, dtype, scale, beta)
    return {
        name: max((of_decays if name == "dlog_decay" else 2) * cost, 1e-5 * np.linalg.norm(x))
        for (name, x), cost in zip(want.items(), costs.values(), strict=True)
    }


def assert_right(got, arrays, dtype="float32", slack=1, scale=1.0, beta=None):
    """Asserts that the results agree with the recurrence; ``slack`` multiplies float32's bounds."""
    dtype, exact = platforms.dtype(dtype), recurrence(*arrays, scale, beta)
    corrects = platforms.current().rounds and beta is not None
    limits = delta_limits(exact, arrays, dtype, scale, beta) if corrects else {}
    for name, want in exact.items():
        size = np.linalg.norm(want)
        error = np.linalg.norm(got[name].astype(np.float64) - want)
        bound = slack * BOUNDS.get(name, 1e-5)
        if dtype != "float32" and name in ("o", "dq", "dk", "dv"):
            bound = ROUNDED[dtype]
        if platforms.current().rounds:
            bound = ROUNDED[dtype] * GPU_UNITS.get(name, 1)
        bound = limits.get(name, bound * size)
        assert error <= bound or size == error == 0, (name, error / size, bound / size)


DOCUMENTS = np.repeat(np.array([0, 1, 2, -1, 3, 4], np.int32), [20, 70, 50, 10, 50, 40])
"""Ids of 240 tokens. Documents lie within a chunk or tile, cross into the next one, and cross ranks
of 60 tokens."""
SPOILT = slice(20, 90)
"""The tokens of the spoilt document."""


def _set(name, tokens, value):
    def spoil(arrays):
        arrays[name][:, tokens] = value

    return spoil


def _overflow(arrays):
    for name in ("k", "v", "q", "dout"):
        arrays[name][:, 40:44] = 1e25


LATE = "NaN decay before a document of its tile"
"""On GPUs sums of log decays go on over the ends of documents in a tile, so other results round."""
SPOILS = {
    "NaN in k": _set("k", 50, np.nan),
    "infinity in v": _set("v", slice(30, 35), np.inf),
    "NaN in q": _set("q", 61, np.nan),
    "NaN in dout": _set("dout", 88, np.nan),
    "NaN decay": _set("logs", 25, np.nan),
    LATE: _set("logs", 70, np.nan),
    "k vᵀ overflows": _overflow,
}


def assert_documents_are_apart(world, method, by, beta=None, channels=False):
    """Asserts that NaN and infinity in one document change no bit of another document's results.

    `LATE` may change how they are rounded.

    Documents are ended ``by`` segment_ids, or by log decays of −∞. With ``beta`` the recurrence is
    that of the delta rule. With ``channels`` there is a decay of each channel.
    """
    names = ("q", "k", "v", "logs", "first", "dout", "dlast")
    clean = dict(zip(names, inputs(world, 240 // world, 2, 1, 16, 16, None), strict=True))
    clean["logs"][0] *= np.float32(0.01)
    if beta is not None:
        clean["k"] /= np.linalg.norm(clean["k"], axis=3, keepdims=True)
    if channels:
        clean["logs"] = clean["logs"][..., None] * np.linspace(0, 1, 16, dtype=np.float32)
    ids = np.broadcast_to(DOCUMENTS, (2, 240))
    if by == "log_decay":
        clean["logs"][:, 1:][:, np.diff(DOCUMENTS) != 0] = -np.inf

    def local(q, k, v, logs, first, ids, *beta):
        segments = ids if by == "segment_ids" else None
        options = {"axis_name": "context", "segment_ids": segments, "method": method}
        out, state = attend(q, k, v, logs, first, *beta, **options)
        return out, jax.lax.pmean(state, "context")

    betas = () if beta is None else (beta,)
    specs = ((X,) * 4 + (P(), X, X))[: 6 + len(betas)]
    function = jax.shard_map(local, mesh=ring.line(world), in_specs=specs, out_specs=(X, P()))

    @jax.jit
    def run(q, k, v, logs, first, dout, dlast):
        results, pullback = jax.vjp(lambda *x: function(*x, ids, *betas), q, k, v, logs, first)
        return results, pullback((dout, dlast))

    def results(arrays):
        (out, state), grads = run(*(arrays[name] for name in names))
        rows = dict(zip(("o", "dq", "dk", "dv", "dlogs"), (out, *grads[:4]), strict=True))
        return {name: np.asarray(x) for name, x in rows.items()}, np.asarray(state), grads[4]

    def equal(x, y, name):
        if name == LATE:
            return np.linalg.norm(x - y) <= 1e-4 * np.linalg.norm(y)
        return np.array_equal(x, y)

    others = np.ones(240, bool)
    others[SPOILT] = False
    want, state, dfirst = results(clean)
    assert all(np.isfinite(x).all() for x in want.values())
    for name, spoil in SPOILS.items():
        if spoil is _overflow and (channels or beta is not None) and platforms.current().rounds:
            # These kernels compute products of all tokens of a tile.
            continue
        arrays = {key: x.copy() for key, x in clean.items()}
        spoil(arrays)
        got, got_state, got_dfirst = results(arrays)
        for key, x in got.items():
            assert equal(x[:, others], want[key][:, others], name), (name, key)
            assert name == "NaN in dout" or not np.isfinite(got["o"][:, SPOILT]).all(), name
        assert not np.isfinite(got["dlogs"][:, SPOILT]).all(), name
        assert equal(got_state, state, name), name
        assert equal(got_dfirst, dfirst, name), name
    got, got_state, _ = results({**clean, "first": np.full_like(clean["first"], np.nan)})
    # In the second entry, decays leave nothing of the first state after some tokens.
    assert np.isnan(got["o"][0, : SPOILT.start]).all()
    for key, x in got.items():
        assert np.array_equal(x[:, SPOILT.start :], want[key][:, SPOILT.start :]), key
    assert np.array_equal(got_state, state)
