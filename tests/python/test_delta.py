"""The delta rule gives the results of the recurrence on any mesh, with decays of any kind."""

import re
from functools import partial

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import platforms
import pytest
import ring
from burst_attention._linear import checks, states
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from linear_cases import (
    CASES,
    X,
    assert_documents_are_apart,
    assert_right,
    attend,
    delta_inputs,
    found,
    limit,
)
from linear_reference import recurrence
from long import not_on_standin, some

pytestmark = pytest.mark.oldest_jax

KINDS = {"heads": (False, 1), "channels": (True, 1), "negative eigenvalues": (False, 2)}
"""Whether there are decays of channels, and the largest β."""


@pytest.mark.parametrize("method", some(["in_turn", "all_gather", "ring"]))
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(
    "shape",
    [pytest.param(x, marks=pytest.mark.needs("speed") if x[1] > 65 else ()) for x in CASES],
    ids=lambda shape: "-".join(map(str, shape)),
)
def test_it_is_the_recurrence(shape, kind, method):
    arrays, beta = delta_inputs(*shape, *kind)
    assert_right(found(ring.line(shape[0]), arrays, beta=beta, method=method), arrays, beta=beta)


@pytest.mark.parametrize(
    "method", ["all_gather", "ring", pytest.param("in_turn", marks=pytest.mark.needs("speed"))]
)
def test_linear_attention_takes_decays_of_channels(method):
    arrays, _ = delta_inputs(4, 100, 4, 2, 24, 16, None, True, 1)
    assert_right(found(ring.line(4), arrays, method=method), arrays)


@pytest.mark.needs("host")
def test_a_channel_may_forget_all_while_others_do_not():
    arrays, beta = delta_inputs(2, 20, 2, 1, 8, 8, None, True, 1)
    arrays[3][:, 5, :, 3] = -np.inf
    assert_right(found(ring.line(2), arrays, beta=beta, method="ring"), arrays, beta=beta)


@pytest.mark.needs("host")
def test_a_transfer_passes_no_row_that_it_does_not_read():
    matrix, state = jnp.array([[1.0, 0], [2, 0]]), jnp.array([[1, 3], [jnp.nan, jnp.inf]])
    assert np.array_equal(states.apply(states.Matrix(matrix), state), [[1, 3], [2, 6]])


@pytest.mark.needs("host")
@pytest.mark.parametrize("channels", [False, True])
def test_plain_jax_computes_the_same(monkeypatch, channels):
    monkeypatch.setattr(checks, "platform", lambda *_: "xla")
    arrays, beta = delta_inputs(4, 70, 4, 2, 16, 8, None, channels, 1)
    assert_right(found(ring.line(4), arrays, beta=beta, scale=0.5), arrays, scale=0.5, beta=beta)
    assert_right(found(ring.line(2), arrays), arrays)


def test_types_of_16_bits_are_rounded_once():
    (q, k, v, *others, dout, dlast), beta = delta_inputs(4, 70, 4, 2, 32, 16, 0.95, False, 1)
    q, k, v, dout = (x.astype("bfloat16") for x in (q, k, v, dout))
    arrays = (q, k, v, *others, dout, dlast)
    got = found(ring.line(4), arrays, beta=beta)
    assert got["o"].dtype == got["dk"].dtype == "bfloat16"
    assert got["state"].dtype == got["dbeta"].dtype == np.float32
    assert_right(got, arrays, "bfloat16", beta=beta)


@pytest.mark.parametrize("channels", [False, True])
def test_decays_from_none_to_almost_all_keep_their_digits(channels):
    arrays, beta = delta_inputs(2, 300, 2, 2, 16, 16, 1.0, channels, 1)
    q, k, v, logs, *others = arrays
    (noise,) = ring.normal(5, logs.shape, dtype=np.float32)
    logs = -20 * np.abs(np.sin(noise)) ** 3
    arrays = (q, k, v, logs.astype(np.float32), *others)
    assert_right(found(ring.line(2), arrays, beta=beta), arrays, beta=beta)


def test_equal_keys_do_not_lose_digits():
    """Products of a chunk's equal keys are all 1, so an inverse by powers would cancel them."""
    (q, k, *others), beta = delta_inputs(2, 130, 2, 2, 16, 16, 1.0, False, 2)
    arrays = (q, np.broadcast_to(k[:, :1], k.shape).copy(), *others)
    assert_right(found(ring.line(2), arrays, beta=beta), arrays, beta=beta)


@pytest.mark.parametrize(
    "by", ["segment_ids", pytest.param("log_decay", marks=pytest.mark.needs("host"))]
)
@pytest.mark.parametrize("method", ["ring", *not_on_standin("all_gather", "in_turn")])
def test_what_is_not_finite_stays_in_its_document(method, by):
    beta = np.full((2, 240, 2), 0.5, np.float32)
    assert_documents_are_apart(4, method, by, beta)


@pytest.mark.parametrize(
    "beta", [np.full((2, 240, 2), 0.5, np.float32), *not_on_standin(None)], ids=["kda", "gla"]
)
def test_what_is_not_finite_stays_in_its_document_with_decays_of_channels(beta):
    assert_documents_are_apart(1, "in_turn", "segment_ids", beta, channels=True)


def layers(q, k, v, g, beta):
    """Returns outputs and the last state of a layer, token by token.

    The forms are those of flash-linear-attention's naive recurrences: q times k_dim^−½, S decays by
    e^g, then v − Sᵀ k is written with β if there is one, else v.
    """
    state, outs = np.zeros((q.shape[0], q.shape[2], q.shape[3], v.shape[3])), []
    for t in range(q.shape[1]):
        if g is not None:
            state = state * np.exp(g[:, t]).reshape(*g.shape[:1], g.shape[2], -1, 1)
        new = v[:, t]
        if beta is not None:
            new = (new - (state * k[:, t, ..., None]).sum(2)) * beta[:, t, :, None]
        state = state + k[:, t, ..., None] * new[:, :, None]
        outs.append((q[:, t, ..., None] * q.shape[3] ** -0.5 * state).sum(2))
    return np.stack(outs, 1), state


@pytest.mark.parametrize("layer", ["delta_rule", "gated_delta_rule", "kda", "gla"])
def test_known_layers(layer):
    (q, k, v, g, *_), beta = delta_inputs(2, 50, 2, 2, 16, 24, None, layer in ("kda", "gla"), 1)
    given = {"delta_rule": (None, beta), "gla": (g, None)}.get(layer, (g, beta))
    want = layers(*map(np.float64, (q, k, v)), *given)

    def local(q, k, v, g, beta):
        options = {"axis_name": "context", "scale": q.shape[3] ** -0.5, "return_state": True}
        if layer == "gla":
            out, state = ba.linear_attention(q, k, v, log_decay=g, **options)
        else:
            log_decay = None if layer == "delta_rule" else g
            out, state = ba.delta_attention(q, k, v, beta, log_decay, **options)
        return out, jax.lax.pmean(state, "context")

    function = jax.shard_map(local, mesh=ring.line(2), in_specs=(X,) * 5, out_specs=(X, P()))
    # Kernels that round between products may take twice the rounding of a result.
    bound = limit(2e-6) * (2 if platforms.current().rounds else 1)
    for got, right in zip(jax.jit(function)(q, k, v, g, beta), want, strict=True):
        assert np.linalg.norm(got - right) <= bound * np.linalg.norm(right)


@pytest.mark.parametrize("channels", [False, True])
def test_a_sequence_can_be_continued(channels):
    """A piece of global arrays, then single tokens, continue with the state of the piece before."""
    (q, k, v, logs, first, *_), beta = delta_inputs(4, 24, 4, 2, 16, 8, None, channels, 1)
    want = recurrence(q, k, v, logs, first, 0 * v.repeat(2, 2), 0 * first, beta=beta)
    mesh = jax.make_mesh((4,), ("context",), (AxisType.Explicit,), devices=ring.devices(4))
    place = jax.NamedSharding(mesh, X)
    piece = [jax.device_put(x[:, :64], place) for x in (q, k, v, beta, logs)]
    out, state = ba.delta_attention(*piece, initial_state=first, return_state=True)
    outs, state = [np.asarray(out)], np.asarray(state)
    step = jax.jit(ba.delta_attention_step)
    for t in range(64, q.shape[1]):
        out, state = step(*(x[:, t] for x in (q, k, v)), state, *(x[:, t] for x in (beta, logs)))
        outs.append(np.asarray(out)[:, None])
    for got, right in ((np.concatenate(outs, 1), want["o"]), (state, want["state"])):
        assert np.linalg.norm(got - right) <= limit(2e-6) * np.linalg.norm(right)


def moved(method, tokens):
    """Returns the numbers that each collective of a pass over eight ranks delivers."""
    arrays, beta = delta_inputs(8, tokens, 4, 2, 16, 32, 0.9, False, 1)
    q, k, v, logs, first, *_ = arrays

    def loss(q, k, v, logs, beta):
        out = ba.delta_attention(q, k, v, beta, logs, axis_name="context", method=method)
        return out.sum()[None]

    function = jax.shard_map(loss, mesh=ring.line(8), in_specs=(X,) * 5, out_specs=P("context"))
    text = jax.jit(jax.grad(lambda *x: function(*x).sum())).lower(q, k, v, logs, beta).as_text()
    pattern = r'stablehlo\.(collective_permute|all_gather)"?.*?-> tensor<([\dx]+)xf32>'
    found = [
        (kind, np.prod([int(size) for size in dims.split("x")]))
        for kind, dims in re.findall(pattern, text, re.S)
    ]
    return sorted(found)


@pytest.mark.parametrize("tokens", [8, 512])
def test_what_travels_does_not_grow_with_length(tokens):
    """Each rank sends one state each way, and for all_gather one matrix each way too."""
    state, matrix = 2 * 4 * 16 * 32, 2 * 4 * 16 * 16
    for method in ("ring", "in_turn"):
        assert moved(method, tokens) == [("collective_permute", state)] * 14
    gathered = sorted([("all_gather", 8 * matrix), ("all_gather", 8 * state)] * 2)
    assert moved("all_gather", tokens) == gathered


@pytest.mark.long
def test_transforms():
    arrays, beta = delta_inputs(4, 48, 2, 1, 16, 16, 0.9, False, 1)
    q, k, v, logs, *_ = arrays
    run = partial(ba.delta_attention, axis_name="context")
    alone = jax.shard_map(run, mesh=ring.line(4), in_specs=(X,) * 5, out_specs=X)
    mapped = P(None, None, "context")
    function = jax.shard_map(jax.vmap(run), mesh=ring.line(4), in_specs=mapped, out_specs=mapped)
    one, other = (q, k, v, beta, logs), tuple(x[::-1] for x in (q, k, v, beta, logs))
    both = jax.jit(function)(*map(np.stack, zip(one, other, strict=True)))
    assert np.array_equal(both[0], alone(*one))
    assert np.array_equal(both[1], alone(*other))
    with pytest.raises(NotImplementedError, match="second derivatives"):
        jax.grad(lambda x: jax.grad(lambda y: alone(y, *one[1:]).sum())(x).sum())(q)


@pytest.mark.needs("host")
def test_rematerialised_layers_that_keep_it_run_it_once():
    (q, k, v, logs, *_), beta = delta_inputs(4, 48, 2, 2, 16, 16, 0.9, False, 1)

    def gradients(policy, method):
        def local(x, k, v, beta, logs):
            attend = partial(ba.delta_attention, axis_name="context", method=method)
            layer = lambda x, _: (jnp.tanh(attend(x, k, v, beta, logs)), None)  # noqa: E731
            x, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), x, length=3)
            return jax.lax.psum(jnp.sum(x**2), "context")

        loss = jax.shard_map(local, mesh=ring.line(4), in_specs=(X,) * 5, out_specs=P())
        given = (q, k, v, beta, logs)
        program = jax.jit(jax.grad(loss, argnums=tuple(range(5)))).lower(*given).compile()
        calls = re.findall(r'custom_call_target="burst_attention_delta_(\w+)"', program.as_text())
        return sorted(calls), program(*given)

    (kept, one), (again, other) = (gradients(x, "ring") for x in (ba.save_attention, None))
    assert kept == ["backward", "forward", "grad_state", "state"]
    assert again == ["backward", "forward", "forward", "grad_state", "state", "state"]
    in_turn, another = gradients(ba.save_attention, "in_turn")
    # Both passes ask for workers with the state of no tokens, and XLA asks once.
    assert in_turn == ["backward"] * 4 + ["forward"] * 4 + ["state"]
    for x, y, z in zip(one, other, another, strict=True):
        assert np.allclose(x, y, limit(1e-5), limit(1e-5) * np.abs(y).max())
        assert np.allclose(z, y, limit(1e-5), limit(1e-5) * np.abs(y).max())


@pytest.mark.needs("host")
def test_devices_that_share_their_cores_compute_in_turn(monkeypatch):
    """Not so if one device has too few heads for all cores, or there are other processes."""

    def exchanges(heads):
        (q, k, v, logs, *_), beta = delta_inputs(4, 8, heads, heads, 8, 8, 0.9, False, 1)
        attend = partial(ba.delta_attention, axis_name="context")
        function = jax.shard_map(attend, mesh=ring.line(4), in_specs=(X,) * 5, out_specs=X)
        text = str(jax.make_jaxpr(function)(q, k, v, beta, logs))
        return text.count("all_gather["), text.count("ppermute[")

    # There are two sequences.
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(4))
    assert exchanges(2) == (0, 3)
    assert exchanges(1) == (2, 0)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert exchanges(2) == (2, 0)


def test_a_pair_of_axes_is_one_line_of_ranks():
    arrays, beta = delta_inputs(8, 20, 2, 1, 16, 16, 0.98, False, 1)
    mesh = Mesh(ring.devices(2, 4), ("node", "gpu"), axis_types=(AxisType.Auto,) * 2)
    for method in ("ring", "all_gather", "in_turn"):
        got = found(mesh, arrays, axes=("node", "gpu"), beta=beta, method=method)
        assert_right(got, arrays, beta=beta)


@pytest.mark.long
@pytest.mark.needs("speed")
def test_errors_do_not_grow_with_the_length():
    def error(tokens):
        (q, k, v, logs, first, *_), beta = delta_inputs(1, tokens, 2, 2, 16, 16, 0.999, False, 1)
        run = jax.jit(
            jax.shard_map(
                lambda *x: attend(*x, axis_name="context"),
                mesh=ring.line(1),
                in_specs=(X,) * 4 + (P(), X),
                out_specs=(X, P()),
                check_vma=False,
            )
        )
        want = recurrence(q, k, v, logs, first, 0 * v, 0 * first, beta=beta)
        got, state = run(q, k, v, logs, first, beta)
        ends = got[:, -512:] - want["o"][:, -512:]
        off = np.linalg.norm(ends) / np.linalg.norm(want["o"][:, -512:])
        return off, np.linalg.norm(state - want["state"]) / np.linalg.norm(want["state"])

    for short, long in zip(error(1024), error(65_536), strict=True):
        assert long <= 1.5 * short + 1e-7


def refused(error, words, *others, **options):
    q, k, v = ring.normal(0, *[(1, 16, 2, 8)] * 3)
    function = lambda *x: ba.delta_attention(*x, *others, axis_name="context", **options)  # noqa: E731
    with pytest.raises(error, match=words):
        jax.shard_map(function, mesh=ring.line(2), in_specs=(X,) * 3, out_specs=X)(q, k, v)


def test_bad_input():
    beta = np.ones((1, 8, 2), np.float32)
    refused(TypeError, "beta must be an array, got None; .*call +linear_attention", None)
    refused(TypeError, r"beta must be an array, got 0.5 \(float\)", 0.5)
    refused(ValueError, r"beta must have shape \(1, 8, 2\), \[batch, seq, heads\]", beta[:, :4])
    words = r"log_decay must have shape \(1, 8, 2, 8\), \[batch, seq, heads, k_dim\], as the "
    refused(ValueError, words + r"result's, or \[batch, seq, heads\]", beta, beta[..., None])
    refused(
        NotImplementedError,
        "layout must be 'contiguous' for delta_attention",
        beta,
        layout="zigzag",
    )
    refused(TypeError, "unexpected keyword argument 'decay'", beta, decay=beta[0, 0])
    refused(
        ValueError, "mesh belongs to global arrays, but delta_attention", beta, mesh=ring.line(2)
    )
    q, k, v = ring.normal(0, *[(1, 2, 8)] * 3)
    state = np.zeros((1, 2, 8, 8), np.float32)
    with pytest.raises(ValueError, match=r"beta must have shape \(1, 2\), \[batch, heads\]"):
        ba.delta_attention_step(q, k, v, state, beta)
    with pytest.raises(TypeError, match="beta must be an array, got None"):
        ba.delta_attention_step(q, k, v, state, None)
    with pytest.raises(ValueError, match="^delta_attention needs a mesh"):
        tokens = ring.normal(0, *[(1, 16, 2, 8)] * 3)
        ba.delta_attention(*tokens, np.ones((1, 16, 2), np.float32), axis_name="context")


def test_a_token_with_beta_0_writes_nothing():
    arrays, beta = delta_inputs(2, 40, 2, 2, 16, 16, 0.9, False, 1)
    got = found(ring.line(2), arrays, beta=0 * beta)
    assert not np.any(got["dv"])
    assert_right(got, arrays, beta=0 * beta)
