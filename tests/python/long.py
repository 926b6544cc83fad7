"""Marks cases that `make test` leaves to `make test-full`, and chooses some cases of each test."""

import math
import random
from collections import defaultdict

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


def sample(items, step):
    """Returns one of ``step`` cases of each test, in the order of ``items``.

    A test has one case at least. Which ones depends on the test's name and on its number of cases.
    """
    cases = defaultdict(list)
    for item in items:
        cases[item.nodeid.split("[")[0]].append(item)
    chosen = {
        item
        for name, given in cases.items()
        for item in random.Random(name).sample(given, math.ceil(len(given) / step))
    }
    return [item for item in items if item in chosen]
