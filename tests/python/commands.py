"""Calls of ``python -m burst_attention`` within the process of a test."""

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
