"""The schedules besides the ring agree with float64: double rings, balanced and all_gather."""

from dataclasses import replace
from itertools import product

import burst_attention as ba
import case_list
import jax
import numpy as np
import pytest
import ring
from bounds import check
from features import PAIR, Problem
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from long import marked, spread

pytestmark = [pytest.mark.cudnn, pytest.mark.oldest_jax]

VALUES = {
    "ranks": [(2, 0), (3, 0), (4, 0), (6, 0), (8, 0), (4, 1), (4, 4), (6, 3), (8, 2), (8, 4)],
    "schedule": ["ring", "balanced", "all_gather"],
    "layout": ["contiguous", "zigzag", "striped"],
    "mask": ["full", "causal", "window", "segments"],
    "backward": ["keys", "queries"],
    "dtype": ["float32", "bfloat16"],
}
"""Values of each property. ``ranks`` are (ranks, ranks of an inner ring), with 0 for one axis."""
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (11, 3)},
    "segments": {"segments": "padded", "causal": True},
}
ALONE = [choice for choice in case_list.features_alone() if "mesh" not in choice]
SCHEDULES = {"double ring": {"inner": 2}, "hybrid": {"inner": 2, "schedule": "hybrid"}} | {
    name: {"schedule": name} for name in ("balanced", "all_gather", "ulysses")
}


CHOICES = list(case_list.pairwise(VALUES, lambda *_: 0))
CHOICES += [
    dict(CHOICES[0], ranks=ranks, schedule="ring", layout=layout, backward=backward)
    for ranks in ((8, 4), (8, 2), (6, 3))
    for layout in VALUES["layout"]
    for backward in VALUES["backward"]
]


def agree(one):
    arrays = one.arrays()
    check(one.found(arrays), one.expected(arrays), arrays["dout"], one.dtype)


def problem_of(choice, **more):
    world, inner = choice["ranks"]
    lengths = {"q_len": 12 * world, "kv_len": 12 * world, "inner": inner}
    rest = {name: choice[name] for name in ("schedule", "layout", "backward", "dtype")}
    return Problem(mesh=(1, world, 1), **lengths, **rest, **MASKS[choice["mask"]], **more)


@pytest.mark.parametrize("choice", spread(CHOICES, 2), ids=lambda c: "-".join(map(str, c.values())))
def test_every_schedule_is_right(choice):
    agree(problem_of(choice))


@pytest.mark.parametrize(
    ("choice", "schedule"),
    [
        pytest.param(*each, id=f"{case_list.feature_name(each[0])}-{each[1]}", marks=marks)
        for each, marks in marked(product(ALONE, SCHEDULES), 2)
    ],
)
def test_every_feature_with_every_schedule(choice, schedule):
    agree(Problem(mesh=(2, 4, 1), **SCHEDULES[schedule], **choice))


@pytest.mark.needs("products")
def test_double_rings_on_global_arrays_and_positions():
    """The call takes both axes from the arrays, and positions count over both."""
    mesh = Mesh(ring.devices(4, 2), PAIR, axis_types=(AxisType.Explicit,) * 2)
    q, k, v = ring.normal(3, *[(1, 64, 2, 32)] * 3)
    stored = ring.stored("zigzag", 8, q, k, v)
    spec = NamedSharding(mesh, P(None, PAIR))
    out = ba.dot_product_attention(
        *(jax.device_put(x, spec) for x in stored), is_causal=True, layout="zigzag"
    )
    (out,) = ring.restored("zigzag", 8, out)
    assert np.allclose(out, jax.nn.dot_product_attention(q, k, v, is_causal=True), atol=1e-5)
    positions = jax.shard_map(
        lambda: ba.local_positions(8, axis_name=PAIR, layout="zigzag"),
        mesh=mesh,
        in_specs=(),
        out_specs=P(PAIR),
    )()
    assert np.array_equal(positions, ba.layout_positions(64, 8, "zigzag").reshape(-1))


def test_a_double_ring_equals_the_ring_over_as_many_devices_bit_for_bit_where_one_axis_is_1():
    one = Problem(mesh=(1, 4, 1), causal=True, schedule="ring")
    arrays = one.arrays()
    expected = one.found(arrays)
    for inner in (1, 4):
        found = replace(one, inner=inner).found(arrays)
        assert all(np.array_equal(found[name], expected[name]) for name in expected)
