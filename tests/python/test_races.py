"""Rows of `ring_gpu.py` without a GPU: contenders that are absent are named, and peers answer."""

import json
from dataclasses import replace

import jax.numpy as jnp
import platforms
import pytest
import ring_gpu
from features import Problem
from gpu import agenda, choices, race, recurrent_rows, stages
from gpu.library import AbsentError

pytestmark = pytest.mark.needs("text")

ANYTHING = """
from unittest.mock import MagicMock
{name} = MagicMock(return_value=(MagicMock(), None))
def __getattr__(name):
    return MagicMock()
"""
"""A module that has every name; a call of one of them returns a pair."""


def contender(factor=1.0, **more):
    def both(x):
        return factor * x, x + 1

    return race.Contender(both, [jnp.arange(1.0, 5.0)], **more)


def broken(x):
    raise RuntimeError("no plan for this shape")


def test_a_contender_that_cannot_compute_is_named_and_the_others_race():
    forward, both = race.FLOP
    others = {
        "served forward only": contender(missing={both: "no order"}),
        "broken": race.Contender(broken, [jnp.ones(4)], is_optional=True),
        "once": contender(passes=(both,)),
    }
    row = race.race({"ours": contender(), **others}, quick=True)
    found = row["passes"]
    assert list(found[forward]["contenders"]) == ["ours", "served forward only"]
    assert list(found[both]["contenders"]) == ["ours", "once"]
    assert found[both]["absent"]["served forward only"] == "no order"
    assert "RuntimeError: no plan for this shape" in found[forward]["absent"]["broken"]
    assert f"{both}: no served forward only: no order" in row["shown"]
    assert row["wrong"] == []


def test_without_peers_a_row_has_times_and_no_ratio():
    peer = contender(missing=dict.fromkeys(race.FLOP, "not here"))
    row = race.race({"ours": contender(), "peer": peer}, quick=True)
    for found in row["passes"].values():
        assert found["contenders"]["ours"]["ms"] > 0
        assert "ratio" not in found
    with pytest.raises(AbsentError, match="not here"):
        race.race({"ours": peer}, quick=True)


def test_the_first_contender_must_not_fail():
    with pytest.raises(RuntimeError, match="no plan"):
        race.race({"ours": race.Contender(broken, [jnp.ones(4)])}, quick=True)


def test_ratios_are_to_the_peer_and_differences_are_named():
    row = race.race(
        {"ours": contender(), "wrong": contender(2.0), "peer": contender()}, quick=True, peer="peer"
    )
    assert {found["peer"] for found in row["passes"].values()} == {"peer"}
    assert [line.split(" by ")[0] for line in row["wrong"]] == [
        f"{which} differs from wrong" for which in race.FLOP
    ]


def test_a_result_that_a_contender_lacks_is_not_compared():
    lacks = race.Contender(lambda x: (x, None), [jnp.arange(1.0, 5.0)])
    row = race.race({"ours": contender(), "lacks": lacks}, quick=True)
    assert [found["differs"]["lacks"] for found in row["passes"].values()] == [[0.0], [0.0]]
    assert row["wrong"] == []


def test_the_peer_of_the_delta_rule_answers_from_its_own_process(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text(ANYTHING.format(name="unused"))
    for module, name in (("kda", "chunk_kda"), ("gated_delta_rule", "chunk_gated_delta_rule")):
        folder = tmp_path / "fla" / "ops" / module
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(ANYTHING.format(name=name))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    shape = {"batch": 1, "tokens": 64, "heads": 2, "head_dim": 16}
    for channels in (False, True):
        given = shape | {"channels": channels}
        peer = recurrent_rows.Peer(recurrent_rows._nothing, given, restored=None)
        found = race.race({"ours": contender(restored=None), "peer": peer}, quick=True)
        peer.close()
        for each in found["passes"].values():
            assert each["absent"] == {}
            assert each["contenders"]["peer"]["ms"] > 0


def test_a_peer_that_is_not_installed_is_absent():
    peer = recurrent_rows.Peer(recurrent_rows._nothing, {}, restored=None)
    with pytest.raises(AbsentError, match=r"expected (torch and flash|an NVIDIA GPU)"):
        peer.ready("forward")


def test_rows_ask_who_computes_before_they_time_in_its_name():
    forward, both = race.FLOP
    one = Problem(mesh=(1, 1, 1), dtype="bfloat16", causal=True, head_dim=128, value_dim=128)
    odd = replace(one, head_dim=96, value_dim=96)
    assert choices.refused_by_cudnn(one, "any", "sm_90") == {}
    assert set(choices.refused_by_cudnn(odd, "any", "sm_90")) == {forward, both}
    assert "96" in choices.refused_by_cudnn(odd, "any", "sm_90")[forward]
    assert set(choices.refused_by_cudnn(one, "any", "sm_120")) == {forward, both}
    narrow = replace(one, head_dim=64, value_dim=64)
    assert [choices.is_fused(each, "sm_90") for each in (narrow, one)] == [True, False]
    # A CPU device computes nothing by cuDNN.
    assert set(choices.missing_of_cudnn(one, "any")) == {forward, both}


def test_names_of_rows_are_those_of_the_files_of_results():
    names = [agenda.name_of(*row) for row in agenda.AGENDA]
    assert len(set(names)) == len(names)
    for file in (platforms.ROOT / "benchmarks" / "results").glob("*-ring.json"):
        assert set(json.loads(file.read_text())["rows"]) <= set(names)
    few = agenda.chosen(["layer", "ring", "host"], each=2)
    assert [kind for kind, _ in few] == ["ring", "ring", "layer", "layer", "host"]


def test_what_no_gpu_has_answered_comes_first():
    class Asked:
        quick, platform, out = False, "cuda", "out"

        def found(self, item):
            return {}

        def left(self, stage):
            return 100.0

    def names(stage):
        return [item.name for items in stages.STAGES[stage].items for item in items(Asked())]

    assert list(stages.STAGES) == ["facts", "runs", "fast", "right"]
    assert names("runs")[:3] == ["images", "padding", "families"]
    assert names("fast") == ["programs", "kernels"]
    assert [kind for kind, _ in agenda.AGENDA[:3]] == ["carry", "ring", "ring"]


class Answers:
    """A session whose process is lost until a row leaves its peers out."""

    def __init__(self):
        self.asked = []

    def close(self):
        """Ends nothing."""

    def ask(self, item, limit_s):
        self.asked.append((item["kind"], item["alone"]))
        lost = {"error": "the worker ended by SIGSEGV", "lost": True}
        return {"result": {"shown": ["1 ms"], "wrong": []}} if item["alone"] else lost


def test_a_row_whose_peers_end_its_process_runs_once_more_without_them(tmp_path, capsys):
    session = Answers()
    rows = [("layer", {}), ("host", {})]
    budget = ring_gpu.Budget(100.0, lambda: 0.0)
    assert not ring_gpu.bench(session, rows, budget, tmp_path)
    assert session.asked == [("layer", False), ("layer", True), ("host", False)]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1:] for line in lines[:2]] == [
        ["1", "ms"], ["FAILED:", "the", "worker", "ended", "by", "SIGSEGV"]
    ]  # fmt: skip
    (file,) = tmp_path.glob("*-ring.json")
    assert set(json.loads(file.read_text())["failed"]) == {"layer", "host"}
