"""Tables of the package: options, features and schedules, each declared once."""

import inspect
from dataclasses import fields

import burst_attention as ba
import pytest
from burst_attention import _ffi
from burst_attention._attention import heads
from burst_attention._attention.choice import library_name
from burst_attention._attention.features import FEATURES, OPERANDS, Features
from burst_attention._attention.options import SCHEDULES, AttentionOptions, Options
from burst_attention._decode.work import Operands

pytestmark = pytest.mark.needs("text")


def test_every_option_has_a_default_and_a_check_or_is_a_feature():
    names = {each.name for each in fields(Options)} | {row.argument for row in FEATURES}
    # The functions have the mask in their own signatures, as jax.nn has it.
    assert set(AttentionOptions.__annotations__) == names - {"mask"}
    for each in fields(Options):
        assert each.metadata["check"](each.name, each.default) == each.default


def test_attention_shows_every_option_with_its_documentation():
    shown = inspect.signature(ba.attention).parameters
    defaults = {each.name: each.default for each in fields(Options)}
    for name in AttentionOptions.__annotations__:
        assert shown[name].default == defaults.get(name)
        assert f"\n  {name}: " in ba.attention.__doc__
    assert "options" not in shown
    assert "AttentionOptions" not in ba.attention.__doc__


def test_an_unknown_option_is_named():
    words = r"^attention\(\) got an unexpected keyword argument 'causal'; it takes is_causal, scale"
    with pytest.raises(TypeError, match=words):
        ba.attention(1, 2, 3, axis_name="context", causal=True)


def test_the_table_of_features_has_their_order():
    assert Features._fields == tuple(row.name for row in FEATURES)


def test_operands_are_those_of_the_library():
    found = [
        {
            "name": row.name,
            "shape": [int(x) if x.isdecimal() else x for x in row.operand.split()],
            "dtype": row.dtype,
            "differentiable": row.differentiable,
        }
        for row in OPERANDS
    ]
    stated = [
        {
            "name": row["name"],
            "shape": row["shape"],
            "dtype": row["dtype"],
            "differentiable": row["gradient"] is not None,
        }
        for row in _ffi.interface()["feature_operands"]
    ]
    assert found == stated


def test_operands_of_decode_are_those_of_the_library():
    assert [*Operands._fields, "o", "lse"] == _ffi.interface()["decode"]["arrays"]["cpu"]


def test_schedules_are_those_of_the_library():
    """And the two that scatter heads, after which a ring of the library follows."""
    one = {library_name(name, ("context",)) for name in SCHEDULES if name != "hybrid"}
    two = {library_name(name, ("node", "gpu")) for name in SCHEDULES}
    known = {each["name"] for each in _ffi.interface()["schedules"]}
    assert one | two == known | set(heads.SCHEDULES)
