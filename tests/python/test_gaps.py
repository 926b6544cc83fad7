"""Padding within a sequence hides what it covers, and nothing beside it.

A thread of a GPU's kernel holds rows r and r + 8 of a tile. The gaps here begin at any row of a
tile, so one of the two rows often lies in a gap and the other one does not.
"""

from dataclasses import replace

import numpy as np
import platforms
import pytest
import virtual
from bounds import check
from features import Problem

pytestmark = pytest.mark.needs("gpu")

IS_LARGE = platforms.current().largest > 1e9
"""Whether the platform computes sequences of several tiles in each test."""
LENGTH = 528 if IS_LARGE else 80
GAPS = ((40, 8), (37, 11))
"""For each batch entry: a gap begins at each multiple of some rows, and how many rows it has."""
MORE = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (100, 0)},
    "soft cap": {"causal": True, "soft_cap": 5.0},
    "any order": {"causal": True, "order": "any"},
}


def less_often(name, head_dim, dtype):
    """Makes a case a long one on the stand-in, unless its kernels once were wrong."""
    often = IS_LARGE or (name, head_dim, dtype) == ("causal", 128, "bfloat16")
    marks = () if often else pytest.mark.long
    return pytest.param(name, head_dim, dtype, id=f"d{head_dim}-{dtype}-{name}", marks=marks)


CASES = [
    less_often(name, head_dim, dtype)
    for head_dim in (128, 64, 256)
    for dtype in ("bfloat16", "float16")
    for name in MORE
]


def gaps():
    """Returns segment ids of three documents with gaps; another length of gaps in each entry."""
    place = np.arange(LENGTH, dtype=np.int32)
    documents = place * 3 // LENGTH
    ids = np.stack([np.where(place % every < rows, -1, documents) for every, rows in GAPS])
    return {"q_segments": ids, "kv_segments": ids.copy()}


@pytest.mark.parametrize(("name", "head_dim", "dtype"), CASES)
def test_rows_beside_a_gap_are_right(name, head_dim, dtype):
    more = MORE[name] | {"dtype": dtype, "head_dim": head_dim, "value_dim": head_dim}
    sizes = {"q_len": LENGTH, "kv_len": LENGTH, "heads": 2, "kv_heads": 1}
    one = Problem(mesh=(1, 1, 1), segments="padded", changes=gaps(), **sizes, **more)
    arrays = one.arrays()
    expected = one.expected(arrays)
    for found in (one.found(arrays), virtual.found(replace(one, mesh=(1, 2, 1)), arrays)):
        check(found, expected, arrays["dout"], dtype)
