"""Rings of any length on one GPU agree with dense float64: virtual rings, and rings of one rank."""

from dataclasses import replace

import case_list
import numpy as np
import platforms
import pytest
import virtual
from bounds import check
from features import Problem
from reference import error

pytestmark = pytest.mark.needs("gpu")

IS_LARGE = platforms.current().largest > 1e9
"""Whether the platform computes sequences of several tiles in each test."""
TOKENS = 198 if IS_LARGE else 6
"""Tokens of a rank, which fit no tile."""
LONGER = 33 if IS_LARGE else 1
"""The factor on lengths and windows of the cases of one feature each."""
LAYOUTS = ("contiguous", "zigzag", "striped")
FAMILIES = [
    {"inner": 2, "mesh": (1, 4, 1), "layout": "zigzag", "causal": True},
    {"inner": 4, "mesh": (1, 8, 1)},
    {"schedule": "balanced", "mesh": (1, 5, 1), "causal": True},
    {"schedule": "balanced", "mesh": (1, 8, 1), "causal": True},
    {"schedule": "all_gather", "mesh": (1, 4, 1), "layout": "striped", "causal": True},
    {"schedule": "all_gather", "mesh": (1, 8, 1), "layout": "zigzag"},
]
PLACES = [
    {"mesh": (1, 8, 1), "layout": "zigzag", "backward": "keys"},
    {"mesh": (1, 4, 1), "layout": "striped", "backward": "queries", "dtype": "float16"},
    {"mesh": (1, 2, 1), "layout": "contiguous", "backward": "queries"},
]


def less_often(test):
    """Makes a test a long one on the stand-in, whose rings of devices run the same work."""
    return test if IS_LARGE else pytest.mark.long(test)


def agree(one, run=virtual.found, **options):
    """Checks a problem's results, and on GPUs that a second run gives the same bits."""
    arrays = one.arrays()
    got = run(one, arrays, **options)
    check(got, one.expected(arrays), arrays["dout"], one.dtype)
    if IS_LARGE:
        again = run(one, arrays, **options)
        repeatable = got if options.get("order", "fixed") == "fixed" else ("o", "lse")
        assert all(np.array_equal(got[name], again[name]) for name in repeatable)


def agree_alone(one):
    """Checks a problem on one rank, through the public function."""
    agree(replace(one, mesh=(1, 1, 1), inner=0, schedule="auto"), Problem.found)


def problem_of(case):
    """Returns a case of `case_list` whose ranks share one GPU, with batch and heads undivided."""
    taken = ("batch", "heads", "kv_heads", "head_dim", "dtype", "causal", "layout")
    return Problem(
        mesh=(1, case.mesh[1], 1),
        q_len=case.seq,
        kv_len=case.seq,
        value_dim=case.head_dim,
        backward=case.variants[0][0],
        **{name: getattr(case, name) for name in taken},
    )


def ranks(mesh, dtype="bfloat16", **more):
    """Returns a problem of grouped heads and two batch entries."""
    length = mesh[1] * TOKENS
    wide = {"heads": 8, "head_dim": 128, "value_dim": 128} if IS_LARGE else {}
    return Problem(mesh=mesh, q_len=length, kv_len=length, dtype=dtype, **(wide | more))


@less_often
def test_case(case):
    agree(problem_of(case))


@less_often
def test_case_on_one_rank(case):
    agree_alone(problem_of(case))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("backward", ["keys", "queries"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_ring(world, layout, backward, causal):
    narrow = {"head_dim": 64, "value_dim": 64} if world == 4 else {}
    more = {"layout": layout, "backward": backward, "causal": causal} | narrow
    agree(ranks((1, world, 1), "float16" if world == 8 else "bfloat16", **more))


@pytest.mark.parametrize("backward", ["keys", "queries"])
@pytest.mark.parametrize(
    "family", FAMILIES, ids=lambda x: f"{x.get('schedule', 'double ring')} of {x['mesh'][1]}"
)
def test_schedule(family, backward):
    agree(ranks(**family, backward=backward))


@pytest.mark.parametrize("segments", [None, "documents"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [2, 4])
def test_sums_in_any_order(world, layout, causal, segments):
    more = {"layout": layout, "causal": causal, "segments": segments}
    agree(ranks((1, world, 1), backward="keys", **more), order="any")


@pytest.mark.parametrize(("dim", "same"), [(64, "any"), (128, "fixed")])
def test_sums_in_the_order_that_is_predicted_faster(dim, same):
    """On an H100, which the stand-in is, one kernel is faster at 64 columns, and two at 128."""
    one = ranks((1, 2, 1), backward="keys", causal=True, head_dim=dim, value_dim=dim)
    arrays = one.arrays()
    agree(one, order="auto")
    expected = virtual.found(one, arrays, order=same)
    for name, x in virtual.found(one, arrays, order="auto").items():
        np.testing.assert_array_equal(x, expected[name])


def long_features():
    """Returns the cases of one feature each, several times as long on GPUs, and combinations."""
    base = {"q_len": 48, "kv_len": 48} | ({"head_dim": 128, "value_dim": 128} if IS_LARGE else {})
    found = []
    for number, choice in enumerate(case_list.features_alone()):
        given = base | PLACES[number % len(PLACES)] | choice
        given |= {name: LONGER * given[name] for name in ("q_len", "kv_len")}
        if "window" in choice:
            given["window"] = tuple(LONGER * side for side in choice["window"])
        found.append(Problem(**given))
    return found + [Problem(**choice) for choice in case_list.features_together()]


FEATURES = dict(
    zip(
        map(case_list.feature_name, case_list.features_alone() + case_list.features_together()),
        long_features(),
        strict=True,
    )
)


@less_often
@pytest.mark.parametrize("name", [x for x, one in FEATURES.items() if virtual.is_possible(one)])
def test_feature(name):
    agree(FEATURES[name])


@less_often
@pytest.mark.parametrize("name", FEATURES)
def test_feature_on_one_rank(name):
    agree_alone(FEATURES[name])


@pytest.mark.needs("speed")
@pytest.mark.parametrize("world", [2, 4, 8])
def test_error_does_not_grow_with_the_ring(world):
    """Accumulators stay in float32, so the number of steps does not matter."""
    shape = {"q_len": 2048, "kv_len": 2048, "head_dim": 128, "value_dim": 128, "batch": 1}
    one = Problem(causal=True, layout="zigzag", mesh=(1, world, 1), **shape)
    arrays, alone = one.arrays(), replace(one, mesh=(1, 1, 1))
    expected = one.expected(arrays)
    got, of_one = virtual.found(one, arrays), alone.found(arrays)
    for name in ("o", "dq", "dk", "dv"):
        grown = error(name, got[name], expected)[0] / error(name, of_one[name], expected)[0]
        assert grown <= 1.2, name
