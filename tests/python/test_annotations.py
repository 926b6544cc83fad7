"""Annotations of the package: the suite checks every call of a private function against them."""

import importlib.util
from pathlib import Path

import burst_attention as ba
import jax
import jax.numpy as jnp
import pytest
from burst_attention._attention import blocks, heads, philox, sinks
from burst_attention._attention.options import Options
from burst_attention._linear import states
from jaxtyping import TypeCheckError

pytestmark = pytest.mark.needs("text")

HEADS = jnp.zeros(3)


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: sinks.join(jnp.zeros((1, 4, 2, 8)), jnp.zeros((1, 4, 2)), HEADS), "sinks"),
        (lambda: states.total(jnp.zeros((1, 4))), "logs"),
        (lambda: blocks.Rows(4).cut(jnp.zeros(4)), "x"),
        (lambda: philox.word((HEADS,) * 4, (HEADS,) * 2, HEADS), "counter"),
        (lambda: heads._repeated(jnp.zeros((1, 4, 2, 8)), 2.0), "times"),
        (lambda: Options(layout="diagonal"), "layout"),
    ],
)
def test_a_wrong_argument_of_a_private_function_is_an_error(call, what):
    with pytest.raises(TypeCheckError, match=f"parameter '{what}'"):
        call()


def test_a_wrong_result_is_an_error(monkeypatch):
    monkeypatch.setattr(jnp, "logaddexp", lambda lse, sinks: lse[0])
    with pytest.raises(TypeCheckError, match="return value of burst_attention._attention.sinks"):
        sinks.join(jnp.zeros((1, 4, 3, 8)), jnp.zeros((1, 4, 3)), HEADS)


def test_traced_arrays_are_checked():
    with pytest.raises(TypeCheckError, match="parameter 'logs'"):
        jax.jit(states.total)(jnp.zeros((1, 4)))


def test_every_module_is_checked():
    paths = list(Path(ba.__file__).parent.rglob("*.py"))
    assert len(paths) > 30
    for path in paths:
        parts = path.relative_to(Path(ba.__file__).parents[1]).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        loader = importlib.util.find_spec(name).loader
        assert type(loader).__name__ == "_JaxtypingLoader", name


def test_public_functions_speak_for_themselves():
    with pytest.raises(TypeError, match="^axis_size must be an int, got 4.0"):
        ba.to_layout(jnp.zeros((1, 8)), 4.0, "zigzag")
