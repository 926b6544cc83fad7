"""What a check of GPU kernels found decides which implementation computes; plain JAX is right."""

import json
from contextlib import nullcontext
from functools import partial

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import platforms
import pytest
import ring
import several
from burst_attention import _confirmed
from burst_attention._linear import checks, plain
from burst_attention._linear.states import Operands
from jax.sharding import PartitionSpec as P
from linear_cases import assert_right, found, inputs
from test_cuda_lowering import KNOWN, abstract_mesh, calls, lowered, shapes, with_gradient

pytestmark = pytest.mark.needs("host")


@pytest.fixture(autouse=True)
def forget():
    """Forgets what earlier tests were told."""
    told = (_confirmed._records, _confirmed._warn, _confirmed._hint)
    for one in told:
        one.cache_clear()
    yield
    for one in told:
        one.cache_clear()


@pytest.fixture
def refute(monkeypatch):
    """Returns a function that lets a record refute families."""

    def record(*families):
        reasons = dict.fromkeys(families, "out is off by 1e-01")
        monkeypatch.setattr(_confirmed, "_records", lambda: (reasons, (), frozenset()))

    record.cache_clear = lambda: None
    return record


def targets(function, arguments):
    return [call.target for call in calls(lowered(function, arguments))]


@KNOWN
def test_plain_jax_replaces_attention_that_was_refuted(refute, device, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def found():
        return targets(with_gradient(ring.sharded(abstract_mesh(device))), shapes())

    refute("linear_attention", "decode_attention")
    assert len(found()) == 2
    refute("attention")
    words = "found the GPU kernels of attention wrong on this machine .out is off by 1e-01., so"
    with pytest.warns(UserWarning, match=words) as caught:
        assert [found(), found()] == [[], []]
    assert len(caught) == 1


@KNOWN
@pytest.mark.parametrize("family", ["linear_attention", "delta_rule"])
def test_plain_jax_replaces_a_recurrence_that_was_refuted(refute, device, family):
    mesh = abstract_mesh(device, (4,), ("context",))
    rows = [jax.ShapeDtypeStruct((2, 512, 4, 64), "bfloat16")] * 3
    betas = [jax.ShapeDtypeStruct((2, 512, 4), "float32")] * (family == "delta_rule")

    def attend():
        spec = P(None, "context")
        function = ba.delta_attention if betas else ba.linear_attention
        return jax.shard_map(
            partial(function, axis_name="context"),
            mesh=mesh,
            in_specs=(spec,) * len(rows + betas),
            out_specs=spec,
        )

    refute("attention", *{"linear_attention", "delta_rule"} - {family})
    assert targets(attend(), rows + betas) != []
    refute(family)
    with pytest.warns(UserWarning, match=family) if device else nullcontext():
        assert targets(attend(), rows + betas) == []


def test_plain_jax_replaces_decoding_that_was_refuted(refute):
    def arguments():
        cache = jax.ShapeDtypeStruct((2, 512, 2, 64), "bfloat16")
        query = jax.ShapeDtypeStruct((2, 1, 4, 64), "bfloat16")
        return query, cache, cache, jax.ShapeDtypeStruct((2,), "int32")

    refute("attention")
    assert targets(lambda *x: ba.decode_attention(*x), arguments()) != []
    refute("decode_attention")
    assert targets(lambda *x: ba.decode_attention(*x), arguments()) == []


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("tokens", [1, 70, 130])
def test_plain_linear_attention_is_right(monkeypatch, world, tokens):
    monkeypatch.setattr(checks, "platform", lambda *_: "xla")
    given = inputs(world, tokens, 4, 2, 16, 24, None)
    assert_right(found(ring.line(world), given), given)


def test_plain_linear_attention_passes_nothing_over_a_decay_of_zero():
    q = np.full((1, 4, 1, 2), 1.0, np.float32)
    v = np.array([np.inf, 1, 2, 3], np.float32)[None, :, None, None]
    logs = np.array([0, 0, -np.inf, 0], np.float32)[None, :, None]
    operands = map(jnp.asarray, (q, q, v, logs, np.zeros((1, 1, 2, 1), np.float32)))
    out, state = plain.forward(1.0, Operands(*operands, beta=None))
    assert np.isfinite(np.asarray(out)[0, 2:]).all()
    assert np.array_equal(np.asarray(state)[0, 0, :, 0], [5, 5])


class Gpu:
    """A device of this process."""

    device_kind = "NVIDIA H200"


def test_the_first_call_on_a_gpu_that_nobody_checked_says_so_once(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("BURST_ATTENTION_CHECK", raising=False)
    monkeypatch.setattr(jax, "local_devices", lambda backend: [Gpu(), Gpu()])
    assert _confirmed.refuted("attention", "cpu") is None
    assert capsys.readouterr().err == ""
    for _ in range(2):
        assert _confirmed.refuted("attention", "cuda") is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "burst_attention: the GPU kernels were not checked on NVIDIA H200: run `python -m "
        "burst_attention check`, which takes up to a minute; BURST_ATTENTION_CHECK=ignore silences "
        "this line"
    )


def test_whoever_ignores_the_check_takes_the_kernels(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("BURST_ATTENTION_CHECK", "ignore")
    monkeypatch.setattr(jax, "local_devices", lambda backend: [Gpu()])
    _confirmed.write("NVIDIA H200", {"attention": "wrong"})
    assert _confirmed.refuted("attention", "cuda") is None
    assert capsys.readouterr().err == ""
    _confirmed._records.cache_clear()
    monkeypatch.delenv("BURST_ATTENTION_CHECK")
    with pytest.warns(UserWarning, match="wrong"):
        assert _confirmed.refuted("attention", "cuda") == "wrong"


@pytest.mark.parametrize("value", ["ignored", "IGNORE", "0"])
def test_another_value_of_the_variable_is_an_error(monkeypatch, value):
    monkeypatch.setenv("BURST_ATTENTION_CHECK", value)
    words = f"BURST_ATTENTION_CHECK must be 'ignore', or unset for the default, got '{value}'"
    with pytest.raises(ValueError, match=words):
        _confirmed.refuted("attention", "cuda")
    monkeypatch.setenv("BURST_ATTENTION_CHECK", " ")
    monkeypatch.setattr(jax, "local_devices", lambda backend: [Gpu()])
    assert _confirmed.refuted("attention", "cuda") is None


@pytest.mark.long
@pytest.mark.skipif(platforms.current().name != "cpu", reason="processes share no GPU here")
def test_all_processes_take_the_verdicts_of_all():
    outputs = several.outputs(several.start("verdicts", 2, 1), 120)
    told = [json.loads(output.splitlines()[-1]) for output in outputs]
    assert told[0] == told[1] == [{"attention": "wrong on 0"}, {"attention": "wrong on 1"}]
    first, _ = several.outputs(several.start("verdicts", 2, 1, "silent"), 120)
    assert "process 1 has not told within 3 s which GPU kernels it has confirmed" in first
    assert json.loads(first.splitlines()[-1]) == [{"attention": "wrong on 0"}]


def test_jax_has_the_store_that_processes_share():
    """The module is private, so a new JAX may move it."""
    from jax._src import distributed

    assert hasattr(distributed.global_state, "client")
