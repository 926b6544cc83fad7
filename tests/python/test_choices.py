"""What computes a call on a GPU where the call leaves the choice: a table of options and GPUs."""

import json

import pytest
from burst_attention import _confirmed, _environment, _ffi
from burst_attention._attention import ring as rings
from burst_attention._attention.options import Options

pytestmark = pytest.mark.needs("text")

TWO = "two operations"
FIXED = "one operation in a fixed order"
ANY = "one operation in any order"
FEATURES = {row["flag"]: False for row in _ffi.interface()["feature_operands"] if row["flag"]}


@pytest.fixture
def chosen(monkeypatch):
    """Returns a function that says what computes a causal ring of eight in zigzag layout."""

    def choose(gpu, columns, rows, *, confirmed=False, flags=False, features=(), **options):
        monkeypatch.setattr(_confirmed, "confirmed", lambda family, platform: confirmed)
        monkeypatch.setattr(_environment, "asks_for_determinism", lambda: flags)
        given = Options(**options)
        world = 8
        arrays = FEATURES | dict.fromkeys(features, True)
        request = {
            "ask": "backends",
            "world_size": world,
            "batch": 1,
            "q_len": rows,
            "kv_len": rows,
            "heads": 32,
            "kv_heads": 8,
            "head_dim": columns,
            "value_dim": columns,
            "dtype": "bfloat16",
            "layout": "zigzag",
            "window": {"right": 0},
            "softmax_scale": 1.0,
            "features": arrays | {"soft_cap": None, "dropout": None},
            "schedule": "ring",
            "ranks_per_node": world,
            "backward": given.backward,
            "backward_order": rings.order_of_sums(given.backward_order),
            "kernels": rings._kernels(given, "cuda"),
            "target": gpu,
        }
        forward, backward = _ffi.ask(json.dumps(request))["passes"]
        return forward["operations"], backward["operations"]

    return choose


def backends(operations, *names):
    """Returns what computes operations of these names, in one word."""
    found = {one["backend"] for one in operations if one["operation"] in names}
    return " and ".join(sorted(found))


def way(operations):
    """Returns how gradients are computed: by two operations where no line says more."""
    found = [one["backend"] for one in operations if one["operation"] == "gradients"]
    return found[0] if found else TWO


@pytest.mark.parametrize(
    ("gpu", "columns", "rows", "options", "forward", "gradients"),
    [
        # Without cuDNN, one fused kernel where it is faster than two.
        ("sm_90", 64, 8192, {}, "tile", ("tile", ANY)),
        ("sm_90", 64, 8192, {"backward_order": "any"}, "tile", ("tile", ANY)),
        ("sm_90", 64, 8192, {"backward_order": "fixed"}, "tile", ("tile", TWO)),
        ("sm_90", 64, 8192, {"flags": True}, "tile", ("tile", TWO)),
        ("sm_90", 64, 8192, {"flags": True, "backward_order": "any"}, "tile", ("tile", ANY)),
        ("sm_90", 128, 2048, {}, "tile", ("tile", TWO)),
        ("sm_90", 128, 8192, {}, "tile", ("tile", TWO)),
        ("sm_90", 128, 8192, {"backward_order": "any"}, "tile", ("tile", TWO)),
        ("sm_90", 256, 8192, {}, "tile", ("tile", TWO)),
        ("sm_80", 64, 8192, {}, "tile", ("tile", TWO)),
        ("sm_100", 128, 8192, {}, "tile", ("tile", TWO)),
        ("sm_120", 128, 8192, {}, "tile", ("tile", TWO)),
        # Nothing is predicted of a fused kernel there, and the caller allows any order.
        ("sm_100", 128, 8192, {"backward_order": "any"}, "tile", ("tile", ANY)),
        # With cuDNN.
        ("sm_90", 64, 8192, {"confirmed": True}, "tile", ("cudnn and tile", ANY)),
        ("sm_90", 64, 32768, {"confirmed": True}, "tile", ("cudnn", ANY)),
        ("sm_90", 64, 8192, {"confirmed": True, "backward": "queries"}, "tile", ("tile", TWO)),
        # Sums of what cuDNN computes take what it gains in tiles between others.
        ("sm_90", 128, 2048, {"confirmed": True}, "cudnn and tile", ("cudnn", ANY)),
        ("sm_90", 128, 4096, {"confirmed": True}, "cudnn", ("cudnn", ANY)),
        ("sm_90", 128, 32768, {"confirmed": True}, "cudnn", ("cudnn", ANY)),
        ("sm_90", 256, 8192, {"confirmed": True}, "cudnn and tile", ("cudnn", ANY)),
        ("sm_80", 128, 8192, {"confirmed": True}, "tile", ("tile", TWO)),
        ("sm_120", 128, 8192, {"confirmed": True}, "tile", ("tile", TWO)),
        ("sm_100", 128, 8192, {"confirmed": True}, "cudnn", ("cudnn", ANY)),
        ("sm_103", 128, 8192, {"confirmed": True}, "cudnn", ("cudnn", ANY)),
        ("sm_100", 128, 8192, {"confirmed": True, "flags": True}, "cudnn", ("cudnn", FIXED)),
        ("sm_100", 256, 8192, {"confirmed": True}, "cudnn", ("tile", TWO)),
        # What the caller says holds, whatever is predicted.
        ("sm_90", 128, 8192, {"confirmed": True, "kernels": "tile"}, "tile", ("tile", TWO)),
        ("sm_90", 64, 8192, {"kernels": "cudnn"}, "cudnn", ("cudnn", ANY)),
        ("sm_90", 128, 512, {"kernels": "cudnn"}, "cudnn", ("cudnn", ANY)),
        ("sm_90", 128, 8192, {"confirmed": True, "features": ["segments"]}, "tile", ("tile", TWO)),
        ("sm_90", 128, 8192, {"kernels": "cudnn", "features": ["segments"]}, "tile", ("tile", TWO)),
        # Sums of dq travel.
        ("sm_90", 64, 8192, {"backward": "queries"}, "tile", ("tile", TWO)),
        ("sm_90", 128, 8192, {"backward": "queries", "confirmed": True}, "cudnn", ("tile", TWO)),
    ],
    ids=str,
)
def test_what_computes(chosen, gpu, columns, rows, options, forward, gradients):
    forward_pass, backward_pass = chosen(gpu, columns, rows, **options)
    assert backends(forward_pass, "forward") == forward
    found = backends(backward_pass, "key_grads", "query_grads"), way(backward_pass)
    assert found == gradients


@pytest.mark.parametrize("columns", [64, 128, 256])
@pytest.mark.parametrize("gpu", ["sm_80", "sm_90", "sm_100", "sm_103", "sm_120"])
@pytest.mark.parametrize("options", [{"flags": True}, {"backward_order": "fixed"}], ids=str)
def test_who_asks_for_the_same_bits_gets_a_fixed_order(chosen, gpu, columns, options):
    for kernels in ("auto", "cudnn"):
        operations = chosen(gpu, columns, 8192, confirmed=True, kernels=kernels, **options)[1]
        assert way(operations) in (TWO, FIXED)


def test_times_stand_beside_the_choice_and_what_was_slower(chosen):
    forward, backward = chosen("sm_90", 128, 8192, confirmed=True)
    assert {one["backend"] for one in forward} == {"cudnn"}
    for one in [*forward, *backward]:
        for other in one["refusals"]:
            if other["reason"] == "slower":
                assert other["cost"]["seconds"] > one["cost"]["seconds"] > 0
                assert other["cost"]["source"] in ("measured", "published", "predicted")
    assert [one["backend"] for x in forward for one in x["refusals"]] == ["tile"]
    (gradients,) = [one for one in backward if one["operation"] == "gradients"]
    (two,) = gradients["refusals"]
    assert (two["backend"], two["reason"]) == (TWO, "slower")
    # A rank's forward pass and gradients, as the arithmetic of the measured rings has them.
    tiles = sum(one["count"] * one["cost"]["seconds"] for one in forward) / 8
    assert 1e3 * tiles == pytest.approx(7.66, rel=0.05)
    assert 1e3 * gradients["cost"]["seconds"] == pytest.approx(22.9, rel=0.05)


def test_what_nothing_is_known_of_has_no_time(chosen):
    forward, backward = chosen("sm_80", 128, 1024)
    assert all(one["cost"] is None for one in [*forward, *backward])
