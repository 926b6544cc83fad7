"""Annotations of the package: the suite checks every call of a private function against them."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import burst_attention as ba
import jax
import jax.numpy as jnp
import pytest
from burst_attention._attention import blocks, heads, philox, sinks
from burst_attention._attention.options import Options
from burst_attention._linear import states
from jaxtyping import TypeCheckError

pytestmark = [pytest.mark.needs("text"), pytest.mark.oldest_jax]

HEADS, ROOT = jnp.zeros(3), Path(__file__).parents[2]


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
    package = Path(ba.__file__).resolve().parent
    paths = list(package.rglob("*.py"))
    assert len(paths) > 30
    for path in paths:
        parts = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        loader = importlib.util.find_spec(name).loader
        assert type(loader).__name__ == "_JaxtypingLoader", name


def test_public_functions_speak_for_themselves():
    with pytest.raises(TypeError, match="^axis_size must be an int, got 4.0"):
        ba.to_layout(jnp.zeros((1, 8)), 4.0, "zigzag")


CALLS = """
from typing import Literal, assert_type
import burst_attention as ba
import jax

Both = tuple[jax.Array, jax.Array]

def lse(x: jax.Array, n: jax.Array, some: bool) -> None:
    assert_type(ba.attention(x, x, x, axis_name="c"), jax.Array)
    assert_type(ba.attention(x, x, x, axis_name="c", return_residual=True), Both)
    assert_type(ba.dot_product_attention(x, x, x), jax.Array)
    assert_type(ba.dot_product_attention(x, x, x, return_residual=some), jax.Array | Both)
    assert_type(ba.decode_attention(x, x, x, n), jax.Array)
    assert_type(ba.decode_attention(x, x, x, n, return_residual=True), Both)

def state(x: jax.Array, some: bool, kind: Literal[True, "replicated"]) -> None:
    assert_type(ba.linear_attention(x, x, x, axis_name="c"), jax.Array)
    assert_type(ba.linear_attention(x, x, x, return_state=False, scale=2.0), jax.Array)
    assert_type(ba.linear_attention(x, x, x, return_state=True), Both)
    assert_type(ba.linear_attention(x, x, x, return_state="replicated"), Both)
    assert_type(ba.linear_attention(x, x, x, return_state=kind), Both)
    assert_type(ba.linear_attention(x, x, x, return_state=some), jax.Array | Both)
    assert_type(ba.linear_attention_step(x, x, x, x), Both)
"""


@pytest.mark.long
def test_type_checkers_know_what_a_call_returns(tmp_path):
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(CALLS)
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(program)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
