"""Which cases of a test `make test` leaves to `make test-full`."""

import pytest


def some(values, count=1):
    """Values of a test's parameter, of which those behind the first ``count`` are for long runs."""
    mark = pytest.mark.long
    return [x if i < count else pytest.param(x, marks=mark) for i, x in enumerate(values)]


def spread(values, step):
    """Values of a test's parameter, of which each but every ``step``-th is for long runs."""
    mark = pytest.mark.long
    return [x if i % step == 0 else pytest.param(x, marks=mark) for i, x in enumerate(values)]
