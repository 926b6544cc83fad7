"""The float64 results of `make gpu-check` are right, and its bounds catch wrong results."""

import jax.numpy as jnp
import numpy as np
import pytest
from check import exact, numerics, ours, problem, ranks, shared, virtual
from long import some
from reference import dense

pytestmark = pytest.mark.needs("text")

SMALL = problem.Problem("", 2, 70, 4, 2, 32, "bfloat16", True, "striped", 2)


@pytest.mark.parametrize("is_causal", [True, False])
def test_float64_on_the_device_equals_the_reference_of_the_tests(is_causal):
    one = problem.replace(SMALL, is_causal=is_causal)
    given = one.inputs()
    wanted = dense(*given.values(), causal=is_causal)
    for name, found in exact.exact(one).results.items():
        np.testing.assert_allclose(found, getattr(wanted, name), rtol=1e-11, atol=1e-13)


FEATURES = {one.name: one for one in shared.features(1)}
WHOLE = {"lse", "dz", "dslopes"}
"""The results that are kept in float32."""


@pytest.mark.parametrize("name", some(FEATURES, 4))
def test_float64_with_features_equals_the_reference_of_the_tests(name):
    one = FEATURES[name]
    given = one.inputs()
    wanted = dense(
        *(given[operand] for operand in problem.OPERANDS),
        causal=one.is_causal,
        window=one.window,
        soft_cap=one.soft_cap,
        segments=one.segments and (given["q_segments"], given["kv_segments"]),
        slopes=given.get("alibi_slopes"),
        sinks=given.get("sinks"),
        dropout=(one.dropout, given["dropout_key"]) if one.dropout else None,
    )
    found = exact.exact(one)
    assert tuple(sorted(found.results)) == tuple(sorted(one.results))
    for name, x in found.results.items():
        per_head = wanted.per_head.get(name)
        true = per_head.value if per_head else getattr(wanted, name)
        np.testing.assert_allclose(x, true, rtol=1e-9, atol=1e-12)
        assert name == "lse" or np.isfinite(found.cost[name])


def rounded(results, bits):
    """Returns exact results rounded to ``bits`` bits."""
    kept = {}
    for name, x in results.items():
        mantissa, exponent = np.frexp(x)
        x = np.ldexp(np.round(mantissa * 2**bits) / 2**bits, exponent)
        kept[name] = x.astype(np.float32 if name in WHOLE else jnp.bfloat16)
    return kept


def test_judge_takes_rounded_results_and_no_worse():
    results = exact.exact(SMALL).results
    good = exact.judge(SMALL, rounded(results, 40))
    assert good["wrong"] == []
    assert all(0.2 < error < 0.8 for name, error in good["errors"].items() if name != "lse")
    worse = exact.judge(SMALL, rounded(results, 6))["wrong"]
    assert {text.split(":")[0] for text in worse} == {"o", "lse", "dq", "dk", "dv"}


@pytest.mark.parametrize("name", ["o", "lse", "dq", "dk", "dv"])
def test_judge_notices_one_wrong_row_and_nan_and_the_type(name):
    good = rounded(exact.exact(SMALL).results, 40)
    for spoil in (lambda x: x * 0, lambda x: x * np.nan):
        bad = dict(good)
        bad[name] = bad[name].copy()
        bad[name][0, 3] = spoil(bad[name][0, 3])
        assert [text.split(":")[0] for text in exact.judge(SMALL, bad)["wrong"]] == [name]
    other = good | {name: good[name].astype(np.float64)}
    assert "expected" in exact.judge(SMALL, other)["wrong"][0]


def test_problems_are_of_types_the_kernels_take_and_cover_layouts_and_modes():
    correctness, systematic = shared.correctness(), shared.systematic()
    assert {p.dtype for p in (*correctness, *systematic)} == {"bfloat16", "float16"}
    assert len({p.name for p in (*correctness, *systematic)}) == len(correctness) + len(systematic)
    found = {(p.world_size, p.layout, p.backward, p.is_causal) for p in systematic}
    assert len(found) == 3 * 3 * 2 * 2
    assert all(p.heads > p.kv_heads and p.batch == 2 for p in systematic)


def test_sums_in_any_order_are_on_the_virtual_ring():
    found = shared.in_any_order()
    assert len({p.name for p in found}) == len(found)
    assert {p.layout for p in found} == set(problem.LAYOUTS)
    assert {p.head_dim for p in found} == {64, 128}
    assert {p.is_causal for p in found} == {True, False}
    assert {p.segments for p in found} == {None, "documents"}
    assert all(p.backward_order == "any" and p.backward == "keys" for p in found)
    assert {p.name for p in found} <= set(numerics.Virtual().names(False))


def test_every_schedule_is_on_the_virtual_ring_and_over_processes_both_ways_round():
    found = shared.families()
    assert len({p.name for p in found}) == len(found)
    ways = {(p.schedule, p.backward) for p in found}
    names = ("double_ring", "balanced", "all_gather")
    assert ways == {(name, way) for name in names for way in ("keys", "queries")}
    assert all((p.schedule == "double_ring") == (0 < p.inner < p.world_size) for p in found)
    assert all(p.is_causal and p.layout == "contiguous" for p in found if p.schedule == "balanced")
    members = ranks.Members().names(False)
    assert all(f"{name}, {way} travel" in members for name, way in ways)
    virtually = numerics.Virtual().names(False)
    assert all(p.name in virtually for p in found)


def test_every_feature_is_alone_somewhere_and_on_a_ring_if_its_calls_have_it():
    found = shared.features()
    assert len({p.name for p in found}) == len(found)
    names = ("window", "segments", "soft_cap", "slopes", "sinks", "dropout", "value_dim")
    cross = [p for p in found if p.kv_seq != p.seq]
    assert {p.kv_seq < p.seq for p in cross} == {True, False}
    for name in names:
        having = [p for p in found if getattr(p, name)]
        alone = [p for p in having if not any(getattr(p, n) for n in names if n != name)]
        assert alone, name
        assert any(map(virtual.is_possible, having)) == (name not in ("sinks", "dropout"))
    assert {p.layout for p in found} == set(problem.LAYOUTS)
    assert {p.world_size for p in found} == {2, 4, 8}
    assert {p.dtype for p in found} == {"bfloat16", "float16"}
    assert all(p.seq % (2 * p.world_size) == p.kv_seq % (2 * p.world_size) == 0 for p in found)
    # Keys fill several tiles, and windows end within a tile.
    assert all(min(p.seq, p.kv_seq) > 700 for p in found)
    ranks_have = ranks.Members().names(False)
    for name in ("window", "segments", "soft_cap", "slopes", "sinks", "dropout"):
        assert any(name in member for member in ranks_have)


def without(name):
    """Returns the public function without one feature's argument."""

    def attention(*arrays, **options):
        import burst_attention as ba

        options = {n: x for n, x in options.items() if not n.startswith(name)}
        out, lse = ba.attention(*arrays, **options)
        return out, lse

    return attention


@pytest.mark.parametrize(
    ("feature", "argument"),
    [
        ("window 7/3", "local_window_size"),
        ("segments documents", "segment_ids"),
        ("segments padded, causal", "segment_ids"),
        ("soft_cap 1.5", "logits_soft_cap"),
        ("slopes", "alibi_slopes"),
        ("sinks", "sinks"),
        ("dropout 0.2", "dropout"),
    ],
)
def test_rank_that_leaves_out_a_feature_fails(monkeypatch, feature, argument):
    one = next(p for name, p in FEATURES.items() if name.startswith(feature + shared.RING))
    assert numerics._one(feature, one.on_one_rank())["wrong"] == []
    passes = ours.passes
    monkeypatch.setattr(ours, "passes", lambda p, mesh: passes(p, mesh, without(argument)))
    bad = numerics._one(feature, one.on_one_rank())
    assert {"o", "dq"} <= {text.split(":")[0] for text in bad["wrong"]}


@pytest.mark.parametrize("which", ["dz", "dslopes"])
def test_wrong_gradient_of_a_head_is_noticed(which):
    one = next(p for p in FEATURES.values() if {"dz", "dslopes"} <= set(p.results))
    good = rounded(exact.exact(one).results, 40)
    assert exact.judge(one, good)["wrong"] == []
    bad = good | {which: good[which] * np.float32([1, 0.9])}
    assert [text.split(":")[0] for text in exact.judge(one, bad)["wrong"]] == [which]


def test_row_that_sees_nothing_must_say_so():
    one = next(p for p in FEATURES.values() if p.segments == "padded")
    good = rounded(exact.exact(one).results, 40)
    assert np.isneginf(good["lse"]).any()
    assert exact.judge(one, good)["wrong"] == []
    bad = good | {"lse": np.where(np.isneginf(good["lse"]), np.float32(0), good["lse"])}
    assert [text.split(":")[0] for text in exact.judge(one, bad)["wrong"]] == ["lse"]


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("window 7/3", {"window": (7, 4)}),
        ("segments padded, causal", {"segments": None}),
        ("slopes", {"slopes": False}),
        ("value_dim 64", {"is_causal": True}),
        ("kv_len 80, causal", {"is_causal": False}),
    ],
)
def test_virtual_ring_that_computes_another_problem_fails(name, instead):
    """The stand-in for the ring gets the same arrays and computes another problem."""
    one = next(p for n, p in FEATURES.items() if n.startswith(name + shared.RING))

    class Faulty(virtual.StandIn):
        def _attend(self, given, *rest):
            return super()._attend(problem.replace(given, **instead), *rest)

    assert numerics._virtual(name, one, virtual.StandIn())["wrong"] == []
    wrong = numerics._virtual(name, one, Faulty())["wrong"]
    assert {"o", "lse", "dq"} <= {text.split(":")[0] for text in wrong}


@pytest.mark.parametrize("layout", problem.LAYOUTS)
def test_shards_are_those_of_the_layout(layout):
    import burst_attention as ba

    one = problem.replace(SMALL, layout=layout, seq=72, world_size=4)
    x = one.inputs()["q"]
    shards = virtual.stacked(one, x)
    for rank in range(4):
        positions = ba.layout_positions(72, 4, layout, rank=rank)
        np.testing.assert_array_equal(shards[rank], x[:, positions])
    np.testing.assert_array_equal(virtual.unstacked(one, shards), x)


def test_virtual_ring_is_called_as_the_library_wants_it(monkeypatch):
    monkeypatch.setattr(virtual, "_register", lambda: None)
    monkeypatch.setattr(virtual, "workspace_bytes", lambda _, which: {"forward": 77}.get(which, 99))
    one = problem.replace(SMALL, backward="queries")
    given = [virtual.stacked(one, x) for x in one.inputs().values()]
    traced = virtual.passes(one, virtual.Calls()).trace(*given)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    forward, backward = (line for line in text.splitlines() if "stablehlo.custom_call" in line)
    assert "@burst_attention_virtual_forward" in forward
    assert "@burst_attention_virtual_backward" in backward
    for line, bytes_ in ((forward, 77), (backward, 99)):
        for attribute in (
            "world_size = 2 : i64",
            'layout = "striped"',
            "window_left = -1 : i64",
            "window_right = 0 : i64",
            "logits_soft_cap = 0.000000e+00 : f32",
            'feature_operands = ""',
            "softmax_scale = 0.17677",
            'axis_name = "context"',
            f"tensor<{bytes_}xui8>",
        ):
            assert attribute in line
    assert 'backward = "queries"' in backward
    assert "tensor<2x2x35x4xf32>" in forward


def test_call_with_features_gets_slopes_and_the_window(monkeypatch):
    monkeypatch.setattr(virtual, "_register", lambda: None)
    monkeypatch.setattr(virtual, "workspace_bytes", lambda *_: 7)
    features = {"slopes": True, "soft_cap": 2.0, "window": (9, 4), "is_causal": False}
    one = problem.replace(SMALL, kv_seq=30, value_dim=64, **features)
    given = virtual.given(one)
    assert [x.shape for x in given[5:]] == [(2, 2, 4)]
    traced = virtual.passes(one, virtual.Calls()).trace(*given)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    forward, backward = (line for line in text.splitlines() if "stablehlo.custom_call" in line)
    for line in (forward, backward):
        for part in (
            "window_left = 9 : i64",
            "window_right = 4 : i64",
            "logits_soft_cap = 2.000000e+00 : f32",
            'feature_operands = "alibi_slopes"',
            "tensor<2x2x4xf32>",
            "tensor<2x2x15x2x64xbf16>",
        ):
            assert part in line
    assert "-> (tensor<2x2x35x4x64xbf16>, tensor<2x2x35x4xf32>, tensor<7xui8>)" in forward
    # The last operand holds zeros, to which each query's part of the slopes' gradient is added.
    assert "tensor<2x2x4xf32>, tensor<2x2x35x4xf32>) ->" in backward
    assert "tensor<2x2x35x4xf32>, tensor<7xui8>)" in backward.split("->")[1]


def test_library_has_the_virtual_ring_and_knows_its_workspace():
    needed = {which: virtual.workspace_bytes(SMALL, which) for which in ("forward", "backward")}
    assert 0 < needed["forward"] < needed["backward"]
    with pytest.raises(RuntimeError, match="workspace of"):
        virtual.workspace_bytes(problem.replace(SMALL, head_dim=33), "forward")
    listed = (*shared.features(), *shared.families(), *shared.in_any_order())
    for one in filter(virtual.is_possible, listed):
        assert virtual.workspace_bytes(one, "backward") > 0
    virtual.Calls()  # finds and registers every stage
