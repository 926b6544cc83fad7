"""Calls of ``python -m burst_attention``, and of the examples, within the process of a test."""

import importlib
import sys

import pytest
from burst_attention import __main__ as command


def caller(name, monkeypatch, capsys):
    """Returns a function that runs a command with arguments in a string and gives its output."""

    def call(arguments, code=0):
        monkeypatch.setattr(sys, "argv", ["burst_attention", name, *arguments.split()])
        if code == 0:
            assert command.main() == 0
        else:
            with pytest.raises(SystemExit) as caught:
                command.main()
            assert caught.value.code == code
        printed = capsys.readouterr()
        return printed.err if code else printed.out

    return call


def refusal(program, arguments, monkeypatch, capsys):
    """Returns the error with which an example refuses arguments of its command line."""
    parse = importlib.import_module(program).parse
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    with pytest.raises(SystemExit) as caught:
        parse()
    assert caught.value.code == 2
    return capsys.readouterr().err
