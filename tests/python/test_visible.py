"""Masks as data agree with float64: intervals of keys, positions of rows, offsets of queries."""

import random
from dataclasses import replace

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from bounds import check
from features import SPECS, Problem
from jax.sharding import PartitionSpec as P
from long import some

pytestmark = pytest.mark.oldest_jax

OTHER_LAYOUTS = [
    pytest.param(layout, marks=pytest.mark.needs("speed")) for layout in ("contiguous", "striped")
]
PLAIN = (pytest.mark.needs("products"), pytest.mark.long)
IMPLEMENTATIONS = [None, pytest.param("xla", marks=PLAIN)]
WORLDS = [(1, 1, 1), (1, 2, 1), (1, 4, 2), (1, 8, 1)]
KINDS = ["causal", "random", "twice", "hidden"]
OTHERS = [
    {"window": (7, 3)},
    {"causal": True},
    {"segments": "padded"},
    {"soft_cap": 1.5},
    {"sinks": True},
    {"slopes": True},
    {"dropout": 0.3},
    {"value_dim": 64, "kv_len": 80},
    {"dtype": "bfloat16"},
]


def agree(one):
    arrays = one.arrays()
    found = one.found(arrays)
    check(found, one.expected(arrays), arrays["dout"], one.dtype)
    return found


def names(options):
    return "-".join(f"{name} {x}" for name, x in options.items())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("kind", KINDS)
def test_intervals(kind, layout, implementation):
    number = KINDS.index(kind) + ["contiguous", "zigzag", "striped"].index(layout)
    backward = ("keys", "queries")[number % 2]
    agree(
        Problem(
            mesh=WORLDS[number % len(WORLDS)],
            layout=layout,
            visible=kind,
            backward=backward,
            implementation=implementation,
        )
    )


@pytest.mark.parametrize("other", OTHERS, ids=names)
@pytest.mark.parametrize("positions", [False, True])
def test_intervals_beside_features(other, positions):
    number = OTHERS.index(other)
    kind, layout = KINDS[1 + number % 3], ("zigzag", "striped", "contiguous")[number % 3]
    backward = ("queries", "keys")[number % 2]
    agree(
        Problem(
            mesh=(2, 2, 2),
            layout=layout,
            visible=kind,
            positions=positions,
            backward=backward,
            **other,
        )
    )


def drawn(seed):
    """Returns a random problem with intervals, and perhaps with other features."""
    pick = random.Random(seed).choice
    length = pick([24, 48, 96])
    return Problem(
        mesh=pick(WORLDS),
        layout=pick(["contiguous", "zigzag", "striped"]),
        backward=pick(["keys", "queries"]),
        dtype=pick(["float32", "bfloat16", "float16"]),
        q_len=length,
        kv_len=pick([length, 64]),
        kv_heads=pick([2, 4]),
        value_dim=pick([32, 72]),
        visible=pick(KINDS),
        positions=pick([False, True]),
        causal=pick([False, True]),
        window=pick([None, (9, 4), (30, 0)]),
        segments=pick([None, "documents", "padded"]),
        soft_cap=pick([None, 2.0]),
        slopes=pick([False, True]),
        sinks=pick([False, True]),
        dropout=pick([0.0, 0.2]),
    )


@pytest.mark.parametrize("seed", some(range(40), 4))
def test_random_masks(seed):
    agree(drawn(seed))


@pytest.mark.needs("products")
@pytest.mark.parametrize("seed", some(range(40, 60)))
def test_random_masks_in_plain_jax(seed):
    agree(replace(drawn(seed), implementation="xla"))


BUILT = {
    "prefix_lm": (ba.masks.prefix_lm([5, 0, 9], [14, 10, 24]), {"window": (20, 6)}),
    "prefix_tree": (ba.masks.prefix_tree([-1, 0, 1, 1, 0], [10, 6, 9, 8, 15]), {"slopes": True}),
    "chunked": (ba.masks.chunked([30, 18], 8), {"sinks": True, "soft_cap": 2.0}),
    "spans": (ba.masks.spans(48, [(3, 12), (20, 41)]), {"dropout": 0.2}),
    "block_causal": (ba.masks.block_causal(48, 7), {"segments": "documents"}),
    "block_diffusion": (ba.masks.block_diffusion(24, 4), {"value_dim": 64, "kv_heads": 4}),
}


@pytest.mark.parametrize("layout", ["zigzag", *OTHER_LAYOUTS])
@pytest.mark.parametrize("name", BUILT)
def test_built_masks(name, layout):
    mask, options = BUILT[name]
    start, stop = (np.repeat(x, 2, axis=0) for x in mask.arguments["visible"])
    changes = {"starts": start, "stops": stop}
    agree(Problem(layout=layout, mesh=(1, 8, 1), visible="built", changes=changes))
    agree(Problem(layout=layout, visible="built", changes=changes, **options))


@pytest.mark.parametrize(
    "other", [{"causal": True}, {"window": (9, 4)}, {"slopes": True}], ids=names
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_any_order_of_rows(other, implementation):
    agree(Problem(positions=True, implementation=implementation, **other))


OFFSETS = [
    {"offset": 32, "kv_len": 80, "causal": True},
    {"offset": -5, "causal": True},
    {"offset": 11, "window": (7, 3), "layout": "zigzag"},
    {"offset": -30, "window": (20, 4), "layout": "striped"},
    {"offset": 16, "kv_len": 64, "causal": True, "slopes": True, "dropout": 0.2},
    {"offset": 7, "visible": "random", "segments": "documents"},
    {"offset": 60, "causal": True},
]


@pytest.mark.parametrize("options", OFFSETS, ids=names)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_offsets(options, implementation):
    agree(Problem(implementation=implementation, **options))


END = [
    {"causal": True, "visible": "causal"},
    {"window": (7, 3), "slopes": True},
    {"causal": True, "dropout": 0.2},
]


@pytest.mark.parametrize("options", END, ids=names)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_positions_up_to_the_greatest(options, implementation):
    """Masks are right up to position 2³¹ − 1. With dropout it counts as 2³¹ − 2."""
    one = Problem(positions=True, implementation=implementation, mesh=(1, 2, 1), **options)
    arrays, last = one.arrays(), 2**31 - 1
    first = np.int32(last + 1 - one.q_len)
    high = {name: arrays[name] + first for name in ("q_positions", "kv_positions")}
    counted = {name: np.minimum(x, last - (one.dropout > 0)) for name, x in high.items()}
    if "visible" in options:
        high["starts"] = counted["starts"] = arrays["starts"] + (first - 1)
        counted["stops"] = np.full_like(arrays["stops"], last + 1, np.int64)
    check(one.found(arrays | high), one.expected(arrays | counted), arrays["dout"])


def called(one, arrays, **options):
    """Returns results and gradients of a call with further options."""

    def local(arrays):
        qkv = (arrays[name] for name in "qkv")
        return ba.attention(*qkv, axis_name="context", **options | one.options(arrays))

    specs = {name: SPECS[name] for name in arrays if name not in ("dout", "dlse")}
    out_specs = SPECS["dout"], SPECS["dlse"]
    mesh = ring.mesh(*one.mesh)
    function = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=out_specs)
    return one.run(function, mesh, arrays)


def test_an_offset_of_each_batch_entry():
    one = Problem(causal=True, slopes=True, kv_len=64)
    arrays, offsets = one.arrays(), np.array([3, -7], np.int32)
    found = called(one, arrays, query_offset=offsets)
    queries = np.arange(one.q_len) + offsets[:, None]
    keys = np.broadcast_to(np.arange(one.kv_len), (2, one.kv_len))
    positions = {"q_positions": queries, "kv_positions": keys}
    expected = replace(one, positions=True).expected(arrays | positions)
    check(found, expected, arrays["dout"])


def test_an_offset_beyond_all_positions_counts_as_the_greatest():
    one = Problem(causal=True, mesh=(1, 2, 1))
    arrays = one.arrays()
    found = called(one, arrays, query_offset=np.full(2, 2**31 - 5, np.int32))
    check(found, replace(one, causal=False).expected(arrays), arrays["dout"])


@pytest.mark.needs("host")
@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("others", [{}, {"segments": "documents"}, {"positions": True}], ids=names)
def test_keys_that_no_query_sees_may_be_anything(implementation, others):
    one = Problem(visible="hidden", implementation=implementation, **others)
    arrays, spoiled = one.arrays(), {}
    hidden = arrays["starts"] >= arrays["stops"]
    assert hidden.any()
    for name in "kv":
        spoiled[name] = np.where(hidden[..., None, None], np.float32(np.nan), arrays[name])
    check(one.found(arrays | spoiled), one.expected(arrays), arrays["dout"])


@pytest.mark.needs("host")
def test_nan_reaches_the_queries_that_see_it_and_no_others():
    one = Problem(visible="random", layout="zigzag", kv_len=64)
    arrays = one.arrays()
    value = arrays["v"].copy()
    value[:, 7] = np.nan
    found, clean = one.found(arrays | {"v": value}), one.found(arrays)
    start, stop = arrays["starts"][:, 7], arrays["stops"][:, 7]
    rows = np.arange(one.q_len)
    sees = (start[:, None] <= rows) & (rows < stop[:, None])
    assert sees.any()
    assert not sees.all()
    assert (np.isnan(found["o"]).all((2, 3)) == sees).all()
    np.testing.assert_allclose(found["o"][~sees], clean["o"][~sees], atol=1e-6)
    assert (np.isnan(found["dq"]).all((2, 3)) == sees).all()


@pytest.mark.parametrize("offset", [np.int64(3), np.array(3)], ids=["scalar", "array"])
def test_an_offset_may_be_any_integer(offset):
    one = Problem(causal=True, mesh=(1, 2, 1))
    arrays = one.arrays()
    found = called(one, arrays, query_offset=offset)
    check(found, replace(one, offset=3).expected(arrays), arrays["dout"])


@pytest.mark.parametrize("window", [(9, 0), (0, 0)])
def test_an_empty_interval_is_empty(window):
    """Where start exceeds stop, nothing sees the key, and a window does not change that."""
    one = Problem(visible="random", window=window)
    arrays = one.arrays()
    swapped = {
        "starts": np.full_like(arrays["starts"], 9),
        "stops": np.full_like(arrays["stops"], 3),
    }
    found = one.found(arrays | swapped)
    assert (found["o"] == 0).all()
    assert np.isneginf(found["lse"]).all()
    assert all((found[name] == 0).all() for name in ("dq", "dk", "dv"))


@pytest.mark.needs("speed")
def test_masks_are_data():
    """Programs that differ in their masks alone are compiled once."""
    count, sharding = 0, jax.NamedSharding(ring.line(4), P(None, "context"))

    @jax.jit
    def loss(x, mask):
        nonlocal count
        count += 1
        return ba.dot_product_attention(
            x, x, x, mesh=ring.line(4), spec=ring.SPEC, **mask.arguments
        ).sum()

    x = jnp.ones((1, 512, 2, 16), jnp.bfloat16)
    results = set()
    for seed in range(20):
        lengths = np.random.default_rng(seed).multinomial(500, np.ones(5) / 5)
        mask = ba.balance_documents(lengths.tolist(), 4, block=32, seq_len=512).mask
        results.add(float(jax.grad(loss)(x, jax.device_put(mask, sharding)).sum()))
    assert count == 1


BAD = [
    ({"visible": np.zeros((2, 12), np.int32)}, TypeError, "pair of arrays"),
    ({"visible": (np.zeros((2, 12), np.int32),) * 3}, TypeError, "pair of arrays"),
    ({"visible": (np.zeros((2, 12), np.float32),) * 2}, TypeError, "start of visible .* integer"),
    ({"visible": (np.zeros((2, 11), np.int32),) * 2}, ValueError, r"shape \(2, 12\).*\(2, 11\)"),
    ({"visible": (np.zeros((2, 12, 3), np.int32),) * 2}, ValueError, r"\(2, 12, 2\) for two"),
    (
        {"query_positions": np.zeros((2, 12))},
        TypeError,
        "query_positions must have an integer type",
    ),
    ({"key_positions": np.zeros((2, 13), np.int32)}, ValueError, r"key_positions .* \(2, 12\)"),
    ({"key_positions": np.full((2, 12), 2**31)}, ValueError, "key_positions must be within int32"),
    ({"query_offset": 2**31}, ValueError, "query_offset must be within int32"),
    ({"query_offset": 1.5}, TypeError, r"query_offset must be an int, or int32 \[batch\], got 1.5"),
    ({"query_offset": np.zeros(3, np.int32)}, ValueError, r"query_offset .* shape \(2,\)"),
    (
        {"query_offset": 3, "query_positions": np.zeros((2, 12), np.int32)},
        ValueError,
        "query_offset and query_positions must not both be given",
    ),
]


@pytest.mark.parametrize(("options", "error", "match"), BAD)
def test_bad_masks_are_errors_while_tracing(options, error, match):
    x = jnp.ones((2, 12, 2, 16))
    with pytest.raises(error, match=match):
        jax.eval_shape(
            lambda x: ba.dot_product_attention(
                x, x, x, mesh=ring.line(4), spec=ring.SPEC, **options
            ),
            x,
        )
