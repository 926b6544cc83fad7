"""Linear attention gives the results of the recurrence on any mesh and with any method."""

import re
from functools import partial
from itertools import pairwise

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from linear_cases import (
    BOUNDS,
    CASES,
    X,
    assert_documents_are_apart,
    assert_right,
    found,
    inputs,
    limit,
)
from linear_reference import recurrence
from long import not_on_standin, some

pytestmark = pytest.mark.wheel


@pytest.mark.parametrize("method", some(["in_turn", "ring", "all_gather"]))
@pytest.mark.parametrize("shape", CASES, ids=lambda shape: "-".join(map(str, shape)))
def test_it_is_the_recurrence(shape, method):
    arrays = inputs(*shape)
    assert_right(found(ring.line(shape[0]), arrays, method=method), arrays)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_types_of_16_bits_are_rounded_once(dtype):
    arrays = inputs(4, 70, 4, 2, 32, 16, 0.95, dtype)
    got = found(ring.line(4), arrays)
    assert got["o"].dtype == got["dk"].dtype == dtype
    assert got["state"].dtype == np.float32
    assert_right(got, arrays, dtype)


def test_strong_decay_over_long_chunks_keeps_its_digits():
    """The tokens of a chunk decay by e^−2000 in all, so sums of logs would round single decays."""
    *arrays, dout, dlast = inputs(2, 300, 2, 2, 16, 16, 1.0)
    arrays[3] = -np.abs(ring.normal(5, arrays[3].shape)[0]) * np.float32(30)
    arrays = (*arrays, dout, dlast)
    got = found(ring.line(2), arrays)
    assert all(np.isfinite(x).all() for x in got.values())
    assert_right(got, arrays)


def test_a_decay_of_heads_and_its_gradient():
    *arrays, dout, dlast = inputs(4, 90, 3, 3, 16, 16, 1.0)
    q, k, v, _, first = arrays
    decay = np.array([0.5, 0.9, 1.0], np.float32)
    logs = np.broadcast_to(np.log(decay.astype(np.float64)), q.shape[:3])
    attend = jax.shard_map(
        lambda q, k, v, decay: ba.linear_attention(q, k, v, axis_name="context", decay=decay),
        mesh=ring.line(4),
        in_specs=(X, X, X, P()),
        out_specs=X,
    )
    attend = jax.jit(attend)
    _, pullback = jax.jit(partial(jax.vjp, attend))(q, k, v, decay)
    terms = recurrence(q, k, v, logs, 0 * first, dout, 0 * dlast)["dlog_decay"] / decay
    # The terms have both signs, so the sum's error is measured by their absolute values.
    error = np.abs(pullback(dout)[3] - terms.sum((0, 1)))
    assert np.all(error <= limit(1e-6) * np.abs(terms).sum((0, 1)))
    without = jax.shard_map(
        partial(ba.linear_attention, axis_name="context"),
        mesh=ring.line(4),
        in_specs=(X,) * 3,
        out_specs=X,
    )
    ones = attend(q, k, v, np.ones_like(decay))
    assert np.array_equal(jax.jit(without)(q, k, v), ones)
    none = attend(q, k, v, np.zeros_like(decay))
    own = np.sum(np.float32(q) * k, -1, keepdims=True) * v
    assert np.linalg.norm(none - own) <= limit(1e-6) * np.linalg.norm(own)


@pytest.mark.needs("speed")
def test_documents_begin_anew_and_padding_leaves_nothing():
    q, k, v, logs, _, dout, _ = inputs(4, 30, 2, 1, 16, 16, 0.97)
    ids = np.repeat(np.array([[7, 7, 2, 2, 2, -1, 9, 7], [1, 1, 1, 1, 1, 1, 1, -5]]), 15, axis=1)
    ids = ids.astype(np.int32)
    for x in (q, k, v, dout):
        x[ids < 0] = np.nan

    def local(q, k, v, logs, ids):
        return ba.linear_attention(q, k, v, axis_name="context", log_decay=logs, segment_ids=ids)

    function = jax.shard_map(local, mesh=ring.line(4), in_specs=(X,) * 5, out_specs=X)
    out, pullback = jax.jit(lambda *x: jax.vjp(lambda *y: function(*y, ids), *x))(q, k, v, logs)
    grads = pullback(dout)
    for entry in range(2):
        borders = [0, *(np.flatnonzero(np.diff(ids[entry])) + 1), ids.shape[1]]
        for start, end in pairwise(borders):
            part = np.s_[entry : entry + 1, start:end]
            if ids[entry, start] < 0:
                assert not np.any(out[part])
                assert not any(np.any(x[part]) for x in grads[:3])
                continue
            zero = np.zeros((1, 2, 16, 16))
            want = recurrence(q[part], k[part], v[part], logs[part], zero, dout[part], zero)
            got = dict(zip(("dq", "dk", "dv", "dlog_decay"), (x[part] for x in grads), strict=True))
            got["o"] = out[part]
            for name, x in got.items():
                error = np.linalg.norm(x - want[name]) / np.linalg.norm(want[name])
                assert error <= limit(BOUNDS.get(name, 1e-5)), (name, error)


@pytest.mark.parametrize(
    "by", ["segment_ids", pytest.param("log_decay", marks=pytest.mark.needs("host"))]
)
@pytest.mark.parametrize("method", ["ring", *not_on_standin("all_gather", "in_turn")])
def test_what_is_not_finite_stays_in_its_document(method, by):
    assert_documents_are_apart(4, method, by)


@pytest.mark.long
def test_padding_leaves_nothing_whatever_its_decays_are():
    """After padding at the end the state is zero, and no gradient of a decay in it is NaN."""
    q, k, v, logs, *_ = inputs(2, 40, 2, 1, 16, 16, 0.9)
    ids = np.broadcast_to(np.repeat(np.array([0, -1], np.int32), [70, 10]), (2, 80))
    logs[:, 70:] = np.nan

    def local(q, k, v, logs, ids):
        out, state = ba.linear_attention(
            *(q, k, v),
            axis_name="context",
            log_decay=logs,
            segment_ids=ids,
            return_state=True,
        )
        return out, jax.lax.pmean(state, "context")

    function = jax.shard_map(local, mesh=ring.line(2), in_specs=(X,) * 5, out_specs=(X, P()))
    (_, state), pullback = jax.vjp(lambda *x: function(*x, ids), q, k, v, logs)
    assert not np.any(state)
    grads = pullback((np.ones_like(v).repeat(2, axis=2), np.ones_like(state)))
    assert all(np.isfinite(x).all() for x in grads)


def test_a_reset_in_a_step_lets_nothing_pass():
    q, k, v = ring.normal(0, *[(2, 2, 8)] * 3)
    logs = np.array([[-np.inf, -0.5], [-0.25, -np.inf]], np.float32)
    finite, state = (np.full((2, 2, 8, 8), x, np.float32) for x in (2, 3))
    state[np.isneginf(logs)] = np.nan

    def step(state, logs):
        return ba.linear_attention_step(q, k, v, state, log_decay=logs)

    results, pullback = jax.vjp(step, state, logs)
    want, _ = jax.vjp(step, np.where(np.isnan(state), finite, state), logs)
    assert all(np.array_equal(x, y) for x, y in zip(results, want, strict=True))
    dstate, dlogs = pullback(jax.tree.map(jnp.ones_like, results))
    assert np.isfinite(dstate).all()
    assert np.isfinite(dlogs).all()
    assert not np.any(dlogs[np.isneginf(logs)])


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("is_causal", [True, False])
def test_no_tokens_give_no_outputs_and_the_state_as_it_was(compiled, is_causal):
    (q,) = ring.normal(0, (2, 0, 2, 8))
    (first,) = ring.normal(1, (2, 2, 8, 8), dtype=np.float32)

    def local(x, first):
        out, state = ba.linear_attention(
            *(x, x, x),
            axis_name="context",
            initial_state=first,
            is_causal=is_causal,
            return_state=True,
        )
        return out, jax.lax.pmean(state, "context")

    function = jax.shard_map(local, mesh=ring.line(2), in_specs=(X, P()), out_specs=(X, P()))
    function = jax.jit(function) if compiled else function
    (out, state), pullback = jax.vjp(function, q, first)
    assert out.shape == (2, 0, 2, 8)
    assert np.array_equal(state, first)
    dq, dfirst = pullback((out, state))
    assert dq.shape == q.shape
    assert np.array_equal(dfirst, first)


@pytest.mark.long
def test_a_sequence_can_be_continued():
    """Two halves, and single tokens, give the same outputs; gradients pass through the states."""
    q, k, v, logs, first, dout, dlast = arrays = inputs(2, 64, 4, 2, 16, 16, 0.9)
    mesh, whole = ring.line(2), found(ring.line(2), arrays)

    def half(q, k, v, logs, first):
        out, state = ba.linear_attention(
            q, k, v, axis_name="context", log_decay=logs, initial_state=first, return_state=True
        )
        return out, jax.lax.pmean(state, "context")

    function = jax.shard_map(half, mesh=mesh, in_specs=(X,) * 4 + (P(),), out_specs=(X, P()))

    def halves(q, k, v, logs, first):
        one, state = function(*(x[:, :64] for x in (q, k, v, logs)), first)
        two, state = function(*(x[:, 64:] for x in (q, k, v, logs)), state)
        return jnp.concatenate([one, two], axis=1), state

    results, pullback = jax.jit(partial(jax.vjp, halves))(q, k, v, logs, first)
    parts = dict(zip(whole, (*results, *pullback((dout, dlast))), strict=True))
    assert_right({name: np.asarray(x) for name, x in parts.items()}, arrays)

    state, outs = first, []
    step = jax.jit(ba.linear_attention_step)
    for t in range(q.shape[1]):
        out, state = step(q[:, t], k[:, t], v[:, t], state, log_decay=logs[:, t])
        outs.append(out)
    assert np.allclose(np.stack(outs, 1), whole["o"], limit(1e-4), limit(1e-4))
    assert np.allclose(state, whole["state"], limit(1e-5), limit(1e-5))


@pytest.mark.needs("products")
def test_without_order_every_token_sees_all():
    q, k, v, _, first, dout, _ = inputs(4, 32, 4, 2, 16, 8, 1.0)
    attend = partial(ba.linear_attention, axis_name="context", is_causal=False, return_state=True)
    function = jax.shard_map(
        lambda q, k, v, first: (lambda o, s: (o, jax.lax.pmean(s, "context")))(
            *attend(q, k, v, initial_state=first)
        ),
        mesh=ring.line(4),
        in_specs=(X, X, X, P()),
        out_specs=(X, P()),
    )
    out, state = function(q, k, v, first)
    keys, values = (np.repeat(x, 2, axis=2).astype(np.float64) for x in (k, v))
    total = first + np.einsum("bshk,bshv->bhkv", keys, values)
    assert np.allclose(state, total, atol=limit(1e-4))
    assert np.allclose(out, np.einsum("bshk,bhkv->bshv", q, total), limit(1e-4), limit(1e-4))


def test_a_pair_of_axes_is_one_line_of_ranks():
    arrays = inputs(8, 40, 2, 1, 16, 16, 0.98)
    mesh = Mesh(ring.devices(2, 4), ("node", "gpu"), axis_types=(AxisType.Auto,) * 2)
    for method in ("ring", "all_gather", "in_turn"):
        assert_right(found(mesh, arrays, axes=("node", "gpu"), method=method), arrays)


def moved(method, tokens):
    """Returns the numbers that each collective of a forward pass over eight ranks delivers."""
    q, k, v, logs, *_ = inputs(8, tokens, 4, 2, 16, 32, 0.9)
    function = jax.shard_map(
        lambda q, k, v, logs: ba.linear_attention(
            q, k, v, axis_name="context", log_decay=logs, method=method
        ),
        mesh=ring.line(8),
        in_specs=(X,) * 4,
        out_specs=X,
    )
    text = jax.jit(function).lower(q, k, v, logs).as_text()
    pattern = r'stablehlo\.(collective_permute|all_gather)"?.*?-> tensor<([\dx]+)xf32>'
    found = [
        (kind, np.prod([int(size) for size in dims.split("x")]))
        for kind, dims in re.findall(pattern, text, re.S)
    ]
    return sorted(found)


@pytest.mark.parametrize("tokens", [8, 512])
def test_what_travels_does_not_grow_with_length(tokens):
    """Each rank sends one state, and for all_gather the sums of its log decays too."""
    state, decays = 2 * 4 * 16 * 32, 2 * 4
    for method in ("ring", "in_turn"):
        assert moved(method, tokens) == [("collective_permute", state)] * 7
    assert moved("all_gather", tokens) == [("all_gather", 8 * decays), ("all_gather", 8 * state)]


@pytest.mark.long
def test_transforms():
    q, k, v, logs, *_ = inputs(4, 48, 2, 1, 16, 16, 0.9)
    function = jax.shard_map(
        lambda *x: jax.vmap(partial(ba.linear_attention, axis_name="context"))(*x),
        mesh=ring.line(4),
        in_specs=P(None, None, "context"),
        out_specs=P(None, None, "context"),
    )
    stacked = [np.stack([x, x[::-1]]) for x in (q, k, v)]
    whole = jax.jit(function)(*stacked)
    single = ring.line(4)
    alone = jax.shard_map(
        partial(ba.linear_attention, axis_name="context"),
        mesh=single,
        in_specs=(X,) * 3,
        out_specs=X,
    )
    assert np.array_equal(whole[0], alone(q, k, v))
    assert np.array_equal(whole[1], alone(q[::-1], k[::-1], v[::-1]))
    with pytest.raises(NotImplementedError, match="second derivatives"):
        jax.grad(lambda x: jax.grad(lambda y: alone(y, k, v).sum())(x).sum())(q)


@pytest.mark.needs("host")
def test_rematerialised_layers_that_keep_it_run_it_once():
    """The layers stand in a scan; without the policy, a program has one more forward pass."""
    q, k, v, logs, *_ = inputs(4, 48, 2, 2, 16, 16, 0.9)

    def gradients(policy):
        def local(x, k, v, logs):
            options = {"axis_name": "context", "log_decay": logs, "method": "ring"}
            attend = partial(ba.linear_attention, **options)
            layer = lambda x, _: (jnp.tanh(attend(x, k, v)), None)  # noqa: E731
            x, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), x, length=3)
            return jax.lax.psum(jnp.sum(x**2), "context")

        loss = jax.shard_map(local, mesh=ring.line(4), in_specs=(X,) * 4, out_specs=P())
        program = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(q, k, v, logs).compile()
        computing = "state|forward|backward"
        targets = rf'custom_call_target="burst_attention_linear_({computing})"'
        calls = re.findall(targets, program.as_text())
        return sorted(calls), program(q, k, v, logs)

    (kept, one), (again, other) = gradients(ba.save_attention), gradients(None)
    assert kept == ["backward", "forward", "state", "state"]
    assert again == ["backward", "forward", "forward", "state", "state", "state"]
    for x, y in zip(one, other, strict=True):
        assert np.allclose(x, y, limit(1e-5), limit(1e-5) * np.abs(y).max())


def refused(error, words, arrays=None, **options):
    q, k, v = arrays or ring.normal(0, *[(1, 16, 2, 8)] * 3)
    with pytest.raises(error, match=words):
        jax.shard_map(
            lambda q, k, v: ba.linear_attention(q, k, v, axis_name="context", **options),
            mesh=ring.line(2),
            in_specs=(X,) * 3,
            out_specs=X,
        )(q, k, v)


def test_bad_input():
    heads, rows = np.ones(2, np.float32), np.zeros((1, 8, 2), np.float32)
    refused(ValueError, "must not both be given", decay=heads, log_decay=rows)
    refused(
        ValueError,
        r"decay must have shape \(2,\), \[heads\], one for .*, got shape \(3,\)",
        decay=np.ones(3, np.float32),
    )
    refused(TypeError, "^decay must have a float type, .* got int32", decay=heads.astype(np.int32))
    refused(
        TypeError, r"decay must be an array, got 0.5 \(float\); .*\[heads\].*: \(2,\)", decay=0.5
    )
    for wrong in (np.nan, -0.5, 1.5, np.inf):
        decay = np.array([1, wrong], np.float32)
        for given in (decay, jnp.asarray(decay)):
            words = f"decay must be from 0 to 1 in every head, got {wrong} in head 1.*log_decay"
            refused(ValueError, words, decay=given)
    refused(
        ValueError, r"log_decay must have shape .* \[batch, seq, heads\]", log_decay=rows[:, :4]
    )
    refused(ValueError, "decay must be None with is_causal=False", decay=heads, is_causal=False)
    refused(NotImplementedError, "layout must be 'contiguous'.*from_layout", layout="zigzag")
    refused(
        ValueError, "method must be one of 'auto', 'ring', 'all_gather' or 'in_turn'", method="tree"
    )
    refused(
        TypeError,
        "segment_ids must have an integer type, .* got float64",
        segment_ids=np.zeros((1, 8)),
    )
    refused(
        ValueError, "^initial_state must have sh", initial_state=np.zeros((1, 2, 8, 9), np.float32)
    )
    shapes = [(1, 16, 2, 8), (1, 8, 2, 8), (1, 8, 2, 8)]
    refused(
        ValueError,
        "query, key and value must have one length, .* got 8, 4, 4",
        ring.normal(0, *shapes),
    )
    q, k, v = ring.normal(0, *[(1, 2, 8)] * 3)
    state = np.zeros((1, 2, 8, 8), np.float32)
    with pytest.raises(ValueError, match="^state must have shape"):
        ba.linear_attention_step(q, k, v, state[:, :1])
    with pytest.raises(ValueError, match="must not both be given"):
        ba.linear_attention_step(q, k, v, state, decay=heads, log_decay=rows[:, 0])
    with pytest.raises(ValueError, match="decay must be from 0 to 1"):
        ba.linear_attention_step(q, k, v, state, decay=-heads)
    words = r"log_decay must be an array, got -0.5 \(float\); .*\[batch, heads\].*: \(1, 2\)"
    with pytest.raises(TypeError, match=words):
        ba.linear_attention_step(q, k, v, state, log_decay=-0.5)
    words = r"log_decay must have shape \(1, 2\), \[batch, heads\], .* got shape \(2,\)"
    with pytest.raises(ValueError, match=words):
        ba.linear_attention_step(q, k, v, state, log_decay=heads)
    tokens = ring.normal(0, *[(1, 16, 2, 8)] * 3)
    with pytest.raises(ValueError, match="^linear_attention needs a mesh"):
        ba.linear_attention(*tokens, axis_name="context")


@pytest.mark.parametrize("size", [1, 2])
def test_traced_decays_out_of_range_are_not_taken_for_0(size):
    """Decays that are NaN or negative give NaN; with decays above 1 the state grows."""
    q, k, v, logs, *_ = inputs(size, 40, 4, 2, 16, 16, 1.0)
    decay = np.array([np.nan, -0.5, 1.01, 0.9], np.float32)
    attend = jax.shard_map(
        lambda q, k, v, decay: ba.linear_attention(q, k, v, axis_name="context", decay=decay),
        mesh=ring.line(size),
        in_specs=(X, X, X, P()),
        out_specs=X,
    )
    out = np.asarray(jax.jit(attend)(q, k, v, decay))
    assert np.isnan(out[:, :, :2]).all()
    logs += np.log(decay[2:].astype(np.float64)).repeat(2)[[0, 0, 0, 2]]
    zero, exact = np.zeros((2, 4, 16, 16)), logs.astype(np.float64)
    want = recurrence(q, k, v, exact, zero, 0 * out, zero)["o"][:, :, 2:]
    assert np.linalg.norm(out[:, :, 2:] - want) <= limit(2e-6) * np.linalg.norm(want)
    step = jax.jit(ba.linear_attention_step)
    one, _ = step(q[:, 0], k[:, 0], v[:, 0], np.ones_like(zero, np.float32), decay=decay)
    assert np.isnan(one[:, :2]).all()
    assert np.isfinite(one[:, 2:]).all()
