"""Marks cases that `make test` leaves to `make test-full`, and cuts all cases into parts."""

import argparse
import re
import zlib
from typing import NamedTuple

import pytest


def some(values, count=1):
    """Returns a parameter's values, all but the first ``count`` of them marked as long."""
    mark = pytest.mark.long
    return [x if i < count else pytest.param(x, marks=mark) for i, x in enumerate(values)]


def with_plain(values, *few):
    """Returns pairs of a value and an implementation; plain JAX takes only a few in `make test`."""
    marks = [() if x in few else pytest.mark.long for x in values]
    plain = [pytest.param(x, "xla", marks=mark) for x, mark in zip(values, marks, strict=True)]
    return [*((x, None) for x in values), *plain]


def spread(values, step):
    """Returns a parameter's values, all but every ``step``-th of them marked as long."""
    return [pytest.param(x, marks=marks) for x, marks in marked(values, step)]


def marked(values, step):
    """Returns pairs of a value and its marks: long, but for every ``step``-th of them."""
    return [(x, [pytest.mark.long] if i % step else []) for i, x in enumerate(values)]


def not_on_standin(*values):
    """Returns values of a parameter that the stand-in leaves out: it takes too long for them."""
    return [pytest.param(x, marks=pytest.mark.needs("speed")) for x in values]


class Part(NamedTuple):
    """Part ``number`` of ``count`` parts of the cases; numbers begin at 1."""

    number: int
    count: int

    @classmethod
    def read(cls, text):
        """Returns the part that a text such as ``2/4`` names."""
        fields = re.fullmatch(r"(\d+)/(\d+)", text)
        part = cls(*map(int, fields.groups())) if fields else None
        if part is None or not 1 <= part.number <= part.count:
            raise argparse.ArgumentTypeError(
                f"expected K/N with 1 ≤ K ≤ N, such as 1/2 for the first of two parts, got {text!r}"
            )
        return part

    def has(self, name):
        """Whether the case of this name belongs to the part.

        Nothing but the case's own name decides. So the parts of one count share no case and have
        all cases together, and a new case moves no other one to another part.
        """
        return zlib.crc32(name.encode()) % self.count == self.number - 1
