"""Marks the cases of a test that `make test` leaves to `make test-full`."""

import pytest


def some(values, count=1):
    """Returns a parameter's values, all but the first ``count`` of them marked as long."""
    mark = pytest.mark.long
    return [x if i < count else pytest.param(x, marks=mark) for i, x in enumerate(values)]


def spread(values, step):
    """Returns a parameter's values, all but every ``step``-th of them marked as long."""
    mark = pytest.mark.long
    return [x if i % step == 0 else pytest.param(x, marks=mark) for i, x in enumerate(values)]
