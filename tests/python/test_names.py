"""The names under which profilers show the calls: call, pass and schedule."""

import re

import burst_attention as ba
import jax
import jax.numpy as jnp
import pytest
import ring
from burst_attention import _ffi
from jax.sharding import PartitionSpec as P
from test_cuda_lowering import abstract_mesh, with_gradient

pytestmark = pytest.mark.needs("text")

SHAPE = (1, 64, 4, 16)


def names(hlo):
    """Returns the names of the calls in HLO text, in order, without XLA's numbers."""
    found = re.findall(r"%?([\w.]+) = [^=]* custom-call\(.*?custom_call_target=\"burst_.*", hlo)
    return [re.sub(r"[.\d]+$", "", name) for name in found]


def scopes(hlo):
    """Returns the last scope of the calls in HLO text, in order."""
    return re.findall(r'custom_call_target="burst_.*?op_name="(?:[^"]*/)?([^"/]*)"', hlo)


def lowered(function, *arguments, platform="cpu"):
    """Returns the HLO text of a program as JAX gives it to XLA."""
    traced = jax.jit(function).trace(*arguments)
    return traced.lower(lowering_platforms=(platform,)).as_text("hlo", debug_info=True)


@pytest.fixture
def names_in_cache():
    """Keeps programs that differ in names apart, in the cache of compiled programs."""
    option = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, option)
    jax.config.update(option, True)
    yield
    jax.config.update(option, before)


def test_compiled_programs(names_in_cache):
    """Also in a loop over rematerialised layers."""
    attend = ring.sharded(ring.line(2), is_causal=True, layout="zigzag", schedule="ring")

    def loss(x):
        layer = jax.checkpoint(lambda x, _: (attend(x, x, x), None))
        return jax.lax.scan(layer, x, None, length=2)[0].sum()

    text = jax.jit(jax.grad(loss)).lower(jnp.ones(SHAPE)).compile().as_text()
    expected = {f"{_ffi.FORWARD}_ring", f"{_ffi.BACKWARD}_ring"}
    assert set(names(text)) == set(scopes(text)) == expected


@pytest.mark.parametrize(
    ("schedule", "axes", "shown"),
    [
        ("ring", "context", "ring"),
        ("ring", ("data", "context"), "double_ring"),
        ("balanced", "context", "balanced"),
        ("all_gather", "context", "all_gather"),
        ("ulysses", "context", "ulysses"),
        ("hybrid", ("data", "context"), "hybrid"),
    ],
)
def test_schedules(schedule, axes, shown):
    mesh = abstract_mesh(None, (2, 2), ("data", "context"))
    spec = P(None, axes)

    def local(q, k, v):
        return ba.attention(q, k, v, axis_name=axes, is_causal=True, schedule=schedule)

    attend = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
    x = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)
    text = lowered(with_gradient(attend), x, x, x, platform="cuda")
    expected = [f"{_ffi.FORWARD}_{shown}", f"{_ffi.BACKWARD}_{shown}"]
    assert names(text) == scopes(text) == expected


LINEAR = {
    "cpu": ["meeting", "state_forward", "forward", "state_backward", "backward"],
    "cuda": [
        "parts_forward",
        "attend_out",
        "parts_backward",
        "attend_dq",
        "attend_dk",
        "attend_dv",
    ],
}


@pytest.mark.parametrize("platform", LINEAR)
def test_linear_attention(platform):
    mesh = abstract_mesh(None, (2,), ("context",))
    spec = P(None, "context")

    def local(q, k, v):
        return ba.linear_attention(q, k, v, axis_name="context")

    attend = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
    x = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)
    text = lowered(with_gradient(attend), x, x, x, platform=platform)
    # Without a platform, the backward pass on GPUs computes some states again.
    expected = {f"burst_attention_linear_{name}" for name in LINEAR[platform]}
    assert set(names(text)) == set(scopes(text)) == expected


@pytest.mark.parametrize(("platform", "name"), [("cpu", _ffi.DECODE), ("cuda", _ffi.DECODE_PAGES)])
def test_decoding(platform, name):
    query, cache = (jax.ShapeDtypeStruct((1, n, 4, 16), jnp.bfloat16) for n in (1, 64))
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32)

    def decode(q, k, lengths):
        return ba.decode_attention(q, k, k, lengths)

    text = lowered(decode, query, cache, lengths, platform=platform)
    assert names(text) == scopes(text) == [name]


def test_plain_jax():
    attend = ring.sharded(ring.line(2), implementation="xla")
    text = lowered(with_gradient(attend), *[jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)] * 3)
    for name in (_ffi.FORWARD, _ffi.BACKWARD):
        assert f"{name}_plain/" in text
