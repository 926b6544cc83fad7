"""Linear attention on GPUs, without a GPU: the code around the kernels and the programs are right.

The kernels' formulas, written out, stand in for the kernels. The tests in
`kernels/interpreter/tests/kernels/linear` show on an interpreter that the kernels compute them.
"""

from functools import partial

import burst_attention as ba
import case_list
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from burst_attention import _ffi
from burst_attention._linear import checks, cuts, gpu, sums
from jax.sharding import PartitionSpec as P
from linear_cases import X, assert_documents_are_apart, assert_right, found, grouped, inputs
from linear_reference import recurrence
from long import some
from test_cuda_lowering import GPU, KNOWN, abstract_mesh, calls, lowered

pytestmark = pytest.mark.needs("host")

TILE = gpu.TILE
CASES = case_list.of("linear", "kernel_shapes")
SLACK = 8
"""The errors of float32 stand-ins, as a multiple of the bounds on CPU devices, 2e-6 and 1e-5. Sums
of a tile's log decays are single floats here, since kernels of 16-bit types need no more."""


def in_parts(x, heads, rows):
    """Turns ``[batch, tokens, some heads, dim]`` into ``[batch, parts, heads, rows, dim]``."""
    batch, tokens, some, dim = x.shape
    x = jnp.pad(x, [(0, 0), (0, -tokens % rows), (0, 0), (0, 0)])
    x = jnp.repeat(x, heads // some, axis=2).reshape(batch, -1, rows, heads, dim)
    return x.swapaxes(2, 3).astype(jnp.float32)


def left_between(sums, rows, back):
    """Returns products of decays within each part.

    They lie between two tokens, from the part's start to a token, and from a token to the part's
    end; with ``back``, the last two are exchanged.
    """
    batch, heads, padded = sums.shape
    tiles = sums.reshape(batch, heads, -1, TILE)
    logs = jnp.diff(tiles, axis=3, prepend=0).reshape(batch, heads, padded)
    logs = jnp.pad(logs, [(0, 0), (0, 0), (0, -padded % rows)]).reshape(batch, heads, -1, rows)
    logs = logs.swapaxes(1, 2)
    row = jnp.arange(rows)
    # Row j sums the logs of tokens j + 1 and later.
    between = jnp.where(row > row[:, None], logs[..., None, :], 0).cumsum(-1)
    seen = jnp.where(row >= row[:, None], jnp.exp2(between), 0)
    first, last = jnp.exp2(logs.cumsum(-1)), seen[..., -1]
    return (seen, last, first) if back else (seen.swapaxes(-1, -2), first, last)


def exactly(x):
    return x


def rounded(x):
    """Rounds to bfloat16, as kernels round the operands of products."""
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def weighed(weights, x):
    """Multiplies as kernels do: a weight of 0 gives 0 even for NaN, and subnormal weights are 0."""
    return jnp.where(jnp.abs(weights) < 2.0**-126, 0, weights * x)


def stand_in(name, label, parts, operands, shapes, back, strict=False, decays=0, narrow=exactly):
    """The formulas of `kernels/compiler/src/device/linear.rs`, with decays of heads."""
    assert decays == gpu.HEADS
    rows = parts.rows
    *queries, k, v, sums = operands[: 3 if name == "parts" else 4]
    heads, count = sums.shape[1], parts.totals.shape[2]
    weights, received, leaves = left_between(sums, rows, back)
    tokens, shape = k.shape[1], shapes[0].shape
    k, v = in_parts(k, heads, rows), in_parts(v, heads, rows)
    assert rows % TILE == 0
    assert sums.shape[2] == -(-tokens // TILE) * TILE
    if name == "parts":
        faded = narrow(leaves[..., None] * v)
        state = jnp.einsum("bphik,bphiv->bphkv", k, faded, precision="highest")
        assert state.shape == shape
        return (state,)
    states = narrow(operands[4])
    assert states.shape == (sums.shape[0], count, heads, k.shape[-1], v.shape[-1])
    q = in_parts(queries[0], heads, rows)
    pairs = jnp.einsum("bphik,bphjk->bphij", q, k, precision="highest")
    own = jnp.eye(rows) if strict else 0
    pairs = narrow(weighed(weights - own, pairs))
    out = jnp.einsum("bphij,bphjv->bphiv", pairs, v, precision="highest")
    crossing = jnp.einsum("bphik,bphkv->bphiv", q, states, precision="highest")
    out += weighed(received[..., None], crossing)
    whole = out.swapaxes(2, 3).reshape(shape[0], -1, *shape[2:])[:, :tokens]
    assert whole.shape == shape
    if len(operands) == 5:
        return (whole.astype(shapes[0].dtype),)
    # Products by row, of each tile of columns on its own.
    columns = gpu.COLUMNS
    products = jnp.repeat(operands[5], heads // operands[5].shape[2], axis=2) * whole
    products = jnp.pad(products, [(0, 0), (0, -tokens % TILE), (0, 0), (0, -shape[3] % columns)])
    dots = products.reshape(*products.shape[:3], -1, columns).sum(-1)
    dots = dots.transpose(0, 2, 3, 1).reshape(shapes[1].shape)
    return whole.astype(shapes[0].dtype), dots


@pytest.fixture
def kernels(monkeypatch):
    """As if the devices were GPUs."""
    monkeypatch.setattr(gpu, "_call", stand_in)
    monkeypatch.setattr(checks, "platform", lambda *_: "cuda")


@pytest.mark.parametrize("shape", some(CASES), ids=lambda shape: "-".join(map(str, shape)))
def test_kernels_and_what_surrounds_them_are_the_recurrence(kernels, shape):
    arrays, method = inputs(*shape), ("ring", "all_gather")[CASES.index(shape) % 2]
    assert_right(found(ring.line(shape[0]), arrays, method=method), arrays, slack=SLACK)


@pytest.mark.parametrize("own_heads", some([(3, 2, 6), (2, 2, 4)]), ids=str)
def test_heads_that_kernels_do_not_share_are_repeated(kernels, own_heads):
    arrays = grouped(2, 70, own_heads, 16, 8)
    assert_right(found(ring.line(2), arrays, scale=0.3), arrays, slack=SLACK, scale=0.3)


@pytest.mark.parametrize(
    ("world", "method"),
    [*(pytest.param(n, "ring", marks=pytest.mark.long) for n in (1, 2)), (2, "all_gather")],
)
def test_what_is_not_finite_stays_in_its_document(kernels, monkeypatch, world, method):
    """In parts of one tile, so that documents begin inside of parts and go through several."""
    monkeypatch.setattr(cuts, "part_rows", lambda batch, tokens, heads: TILE)
    assert_documents_are_apart(world, method, "segment_ids")


def test_resets_and_strong_decays(kernels):
    """Resets every 1 to 90 tokens, and decays down to e^−30 a token, keep results right."""
    *arrays, dout, dlast = inputs(2, 600, 2, 1, 16, 16, None)
    random = np.random.default_rng(0)
    begins = np.cumsum(random.integers(1, 90, 100))
    arrays[3][:, begins[begins < 1200]] = -np.inf
    arrays[3][:, 500:700] *= np.float32(30)
    arrays = (*arrays, dout, dlast)
    got = found(ring.line(2), arrays)
    assert all(np.isfinite(x).all() for x in got.values())
    assert not got["dlog_decay"][np.isneginf(arrays[3])].any()
    with np.errstate(invalid="ignore"):
        assert_right(got, arrays, slack=SLACK)


@pytest.mark.parametrize(
    "decay", [0.02, *(pytest.param(x, marks=pytest.mark.long) for x in (0.99, 1.0, None))]
)
def test_rounding_to_16_bits_stays_small_in_all_gradients(kernels, monkeypatch, decay):
    """Gradients of decays too, although they are sums of differences."""
    monkeypatch.setattr(gpu, "_call", partial(stand_in, narrow=rounded))
    arrays = inputs(1, 400, 2, 1, 16, 32, decay, "bfloat16")
    got, want = found(ring.line(1), arrays), recurrence(*arrays)
    for name, exact in want.items():
        error = np.linalg.norm(got[name].astype(np.float64) - exact) / np.linalg.norm(exact)
        assert error <= 2.0**-7, (name, error)


def test_a_state_beyond_float16_leaves_finite_gradients(kernels):
    q, k, v, logs, first, dout, dlast = inputs(1, 100, 2, 2, 16, 16, 0.5, "float16")
    arrays = (q, k, v, logs, first, dout, dlast * np.float32(1e5))
    got, want = found(ring.line(1), arrays), recurrence(*arrays)
    error = np.linalg.norm(got["dlog_decay"] - want["dlog_decay"])
    assert error <= 2.0**-8 * np.linalg.norm(want["dlog_decay"])


def test_a_wrong_part_is_noticed(kernels, monkeypatch):
    right = gpu.between
    monkeypatch.setattr(
        gpu, "between", lambda totals, left, back: right(totals[..., ::-1], left, back)
    )
    *arrays, dout, dlast = inputs(1, 600, 2, 1, 16, 16, None)
    arrays = (*arrays[:3], arrays[3] * np.float32(1e-3), arrays[4], dout, dlast)
    with pytest.raises(AssertionError, match="'o'|'state'"):
        assert_right(found(ring.line(1), arrays), arrays, slack=SLACK)


def test_parts_keep_a_gpu_busy_and_are_tiles():
    for batch, tokens, heads in [(1, 131072, 8), (1, 1, 1), (4, 4096, 64), (1, 1 << 20, 1)]:
        rows = cuts.part_rows(batch, tokens, heads)
        parts = -(-tokens // rows)
        assert rows % TILE == 0
        assert parts * batch * heads >= min(cuts.BLOCKS, tokens // 512) * 0.9
        assert parts * batch * heads <= cuts.BLOCKS + batch * heads


def program(device, dtype="bfloat16", tokens=4096):
    """Returns the program of both passes over four GPUs."""
    mesh = abstract_mesh(device, (4,), ("context",))
    shapes = [jax.ShapeDtypeStruct((2, tokens, heads, 64), dtype) for heads in (4, 2, 2)]
    logs = jax.ShapeDtypeStruct((2, tokens, 4), jnp.float32)

    def local(q, k, v, logs):
        return ba.linear_attention(q, k, v, axis_name="context", log_decay=logs)

    function = jax.shard_map(local, mesh=mesh, in_specs=(X,) * 4, out_specs=X)

    def run(q, k, v, logs, dout):
        out, pullback = jax.vjp(function, q, k, v, logs)
        return out, pullback(dout)

    return lowered(run, (*shapes, logs, shapes[0]))


def test_a_program_calls_each_kernel_as_often_as_it_must():
    found = calls(program(GPU))
    targets = [call.target.removeprefix("burst_attention_linear_") for call in found]
    assert targets == ["parts", "attend", "parts", "attend", "attend", "attend"]
    assert [call.attributes["reverse"] for call in found[:4]] == ["false", "false", "true", "false"]
    q, kv, parts = "2x1024x4x64xbf16", "2x1024x2x64xbf16", "2x4x4x64x64xf32"
    assert found[0].operands == [kv, kv, "2x4x1024xf32"]
    assert found[0].results == [parts]
    assert found[1].operands == [q, kv, kv, "2x4x1024xf32", parts]
    assert found[1].results == [q]
    # This call gives dq and its products with q.
    assert found[3].operands == [q, kv, kv, "2x4x1024xf32", parts, q]
    assert found[3].results == [q, "2x4x1024xf32"]
    assert {call.attributes["part_rows"].split(" ")[0] for call in found} == {"256"}


@pytest.mark.parametrize("rows", [1, 16, 1344])
def test_sums_from_behind_stop_where_a_row_passes_nothing(rows):
    """NaN goes no further than numbers. 1344 rows make blocks of blocks, the last not whole."""
    random = np.random.default_rng(rows)
    terms = random.standard_normal((2, 3, rows)).astype(np.float32)
    passes = random.random(terms.shape) < 0.9
    terms[0, 1, rows // 2] = np.nan
    behind = np.ones((2, 3), np.float32)
    want, following = np.empty_like(terms), behind
    for row in reversed(range(rows)):
        following = terms[..., row] + np.where(passes[..., row], following, 0)
        want[..., row] = following
    got = sums.from_behind(*map(jnp.asarray, (terms, passes, behind)))
    np.testing.assert_allclose(got, want, atol=1e-4)


@KNOWN
def test_what_travels_on_gpus_does_not_grow_with_length(device):
    def gathered(text):
        return sorted(
            line.split("->")[1] for line in text.splitlines() if '"stablehlo.all_gather"' in line
        )

    short, long = (gathered(program(device, tokens=tokens)) for tokens in (1024, 8192))
    assert short == long
    assert len(short) == 4


def test_where_the_platform_is_unknown_a_program_runs_on_cpu():
    """The results have the bits of a program for CPU devices."""
    mesh = abstract_mesh(None, (2,), ("context",))
    arrays = inputs(2, 70, 2, 1, 16, 16, 0.9)
    attend = jax.shard_map(
        lambda q, k, v, logs: ba.linear_attention(q, k, v, axis_name="context", log_decay=logs),
        mesh=mesh,
        in_specs=(X,) * 4,
        out_specs=X,
    )

    def run(q, k, v, logs, dout):
        out, pullback = jax.vjp(attend, q, k, v, logs)
        return out, pullback(dout)

    operands = (*arrays[:4], arrays[5])
    sharding = jax.sharding.NamedSharding(mesh, P(None, "context"))
    names = (_ffi.MEETING, *_ffi.LINEAR.values(), *_ffi.LINEAR_KERNELS.values())
    exported = jax.export.export(
        jax.jit(run, in_shardings=sharding, out_shardings=sharding),
        platforms=("cpu", "cuda"),
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(name) for name in names],
    )(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands))
    here = ring.line(2)
    placed = [jax.device_put(x, jax.sharding.NamedSharding(here, sharding.spec)) for x in operands]
    out, grads = jax.jit(exported.call)(*placed)
    zero = np.zeros_like(arrays[6])
    want = found(here, (*arrays[:4], 0 * arrays[4], arrays[5], zero))
    assert np.array_equal(out, want["o"])
    for name, got in zip(("dq", "dk", "dv", "dlog_decay"), grads, strict=True):
        assert np.array_equal(got, want[name]), name


def test_float32_on_gpus_is_refused():
    with pytest.raises(NotImplementedError, match="bfloat16 or float16, got float32"):
        program(GPU, "float32")
