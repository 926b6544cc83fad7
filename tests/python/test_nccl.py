"""Importing the package sets the environment variable that gives NCCL's work one order."""

import os
import warnings
from types import SimpleNamespace

import pytest
from burst_attention import _nccl

pytestmark = pytest.mark.needs("text")


@pytest.fixture
def unset(monkeypatch):
    monkeypatch.delenv(_nccl.VARIABLE, raising=False)


def test_is_set_where_the_user_has_not(unset):
    _nccl.order_launches()
    assert os.environ[_nccl.VARIABLE] == "1"
    assert _nccl.launch_order() == "1"


def test_the_users_1_is_fine(monkeypatch):
    monkeypatch.setenv(_nccl.VARIABLE, "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _nccl.order_launches()


@pytest.mark.parametrize("value", ["0", "", "yes"])
def test_other_values_warn_and_stay(monkeypatch, value):
    monkeypatch.setenv(_nccl.VARIABLE, value)
    words = f"{_nccl.VARIABLE} must be 1 on NVIDIA GPUs, got {value!r}: .* wait for each other"
    with pytest.warns(UserWarning, match=words):
        _nccl.order_launches()
    assert os.environ[_nccl.VARIABLE] == value


def test_amds_library_is_left_alone(monkeypatch, unset):
    plugins = [SimpleNamespace(name="xla_rocm7")]
    monkeypatch.setattr(_nccl.metadata, "entry_points", lambda group: plugins)
    _nccl.order_launches()
    assert _nccl.launch_order() == "not set"
