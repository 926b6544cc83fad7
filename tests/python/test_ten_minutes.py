"""The ten minutes with a GPU, on the stand-in: all stages pass, and each planted fault shows up."""

import importlib
import json
import os
import subprocess
import sys
import zipfile

import platforms
import pytest

BENCHMARKS = platforms.ROOT / "benchmarks"
STAGES = ("facts", "runs", "right", "fast", "believe")


def run(out, minutes=16, **environment):
    """Returns the exit code of a quick run, its results by name, and its page."""
    command = [sys.executable, BENCHMARKS / "ten_minutes.py", "--quick", "--platform", "standin"]
    ran = subprocess.run(
        [*map(str, command), "--minutes", str(minutes), "--out", str(out)],
        env=os.environ | {"STANDIN_DEVICES": "1", "XDG_CACHE_HOME": str(out)} | environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    found = json.loads((out / "results.json").read_text())["results"]
    return ran.returncode, {one["name"]: one for one in found}, (out / "page.md").read_text()


class TestOnTheStandin:
    pytestmark = pytest.mark.needs("standin")

    def test_all_stages_pass_and_the_page_shows_them(self, tmp_path):
        code, found, page = run(tmp_path)
        assert code == 0, page
        assert {one["stage"] for one in found.values()} == set(STAGES)
        assert found["images"]["words"].endswith("images of sm_90 load")
        assert found["families"]["words"].count(" confirmed") == 5
        assert "passed" in found["test_correct"]["words"]
        assert found["rings on one GPU"]["words"].startswith("1 passed")
        assert found["padding"]["words"].startswith("1 passed")
        assert found["2 processes, sockets"]["words"].startswith("3 of 3 items passed")
        for kind in ("carry", "ring", "layer", "packed", "delta", "host"):
            assert f"\n{kind}" in found["programs"]["words"]
        assert "no flash-linear-attention: expected torch" in found["programs"]["words"]
        # There is no torch here, so the kernels alone are not timed.
        assert found["kernels"]["passed"] is None
        assert (
            found["predictions"]["words"]
            == "a quick run measures nothing; all figures stay predicted"
        )
        head = page.split("\n")[0]
        assert found["facts"]["found"]["device"] in head
        assert "+00:00" in head
        for stage in STAGES:
            assert f"\n## {stage}\n" in page

    @pytest.mark.long
    def test_faults_are_named_in_their_stage_and_cost_only_their_item(self, tmp_path):
        # The process of the item `images` alone loads a hundredth image.
        refused = "call=cuModuleLoadData code=209 nth=100"
        fails = "call=cuLaunchKernel code=719 about=decode"
        plans = "call=cudnnBackendExecute code=3000"
        code, found, page = run(tmp_path, STANDIN_FAIL=f"{refused}; {fails}; {plans}")
        assert code == 1
        assert {name for name, one in found.items() if one["passed"] is False} == {
            "images",
            "families",
        }
        assert len(found["images"]["found"]["refused"]) == 1
        assert "cuModuleLoadData: error 209" in page
        assert "decode_attention  JaxRuntimeError" in found["families"]["words"]
        assert found["families"]["words"].count(" confirmed") == 3
        # Each row that cuDNN takes part in goes on without it.
        assert "no ring by cuDNN: it can't: " in found["programs"]["words"]
        assert found["programs"]["passed"] is True
        assert found["padding"]["passed"] is True
        assert found["test_correct"]["passed"] is True

    @pytest.mark.long
    def test_kernels_that_hang_end_at_their_limit_and_the_page_is_whole(self, tmp_path):
        code, found, page = run(tmp_path, minutes=1.5, STANDIN_JITTER_US="30000000")
        assert code == 1
        assert found["images"]["passed"] is True
        assert found["rates"]["passed"] is False
        assert found["families"]["passed"] is False
        assert "no end within " in page or "no answer within " in page
        assert {one["stage"] for one in found.values()} == set(STAGES)

    @pytest.mark.long
    def test_a_slow_device_leaves_out_what_the_time_does_not_allow(self, tmp_path):
        code, found, page = run(tmp_path, minutes=1.5, STANDIN_JITTER_US="100000")
        assert found["facts"]["passed"] is True
        assert found["images"]["passed"] is True
        late = [name for name, one in found.items() if "no end within" in one["words"]]
        late += [n for n, one in found.items() if one["words"] == "left out: the time was up"]
        assert late, page
        assert {one["stage"] for one in found.values()} == set(STAGES)


@pytest.mark.needs("host")
def test_without_a_gpu_it_says_so_and_stops(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "ten_minutes.py"), "--out", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    (line, _) = ran.stdout.splitlines()
    assert line.endswith("expected an NVIDIA GPU that JAX can use, found cpu")


@pytest.mark.needs("host")
def test_a_bundle_unpacks_its_wheels_beside_the_results(tmp_path):
    """The folder of the bundle may be read-only; the program gets the packages of the wheels."""
    bundle = tmp_path / "bundle"
    (bundle / "wheels").mkdir(parents=True)
    (bundle / "benchmarks").mkdir()
    (bundle / "run").write_text((BENCHMARKS / "run_bundle.py").read_text())
    with zipfile.ZipFile(bundle / "wheels" / "one-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("only_in_the_bundle.py", "WORD = 'unpacked'\n")
    program = "import sys, only_in_the_bundle as one\nprint(one.WORD, *sys.argv[1:])\n"
    (bundle / "benchmarks" / "ten_minutes.py").write_text(program)
    for folder in (bundle, bundle / "wheels", bundle / "benchmarks"):
        folder.chmod(0o500)
    out = tmp_path / "out"
    command = [sys.executable, str(bundle / "run"), "--minutes", "3", "--out", str(out)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for folder in (bundle, bundle / "wheels", bundle / "benchmarks"):
        folder.chmod(0o700)
    assert printed.split() == ["unpacked", "--minutes", "3", "--out", str(out)]
    assert sorted(path.name for path in bundle.iterdir()) == ["benchmarks", "run", "wheels"]


def results(**more):
    """Returns results as kernels.py writes them: forward takes 100 cycles for 128² pairs.

    A block takes 5,000 cycles around them, at 1.5 GHz on 100 multiprocessors.
    """
    given = {"dim": 128, "heads": 32, "kv_heads": 32, "causal": False, "pass": "forward"}

    def row(seq):
        blocks = 16384 * 32 / 128
        ms = blocks * (seq / 128 * 100 + 5000) / 100 / 1.5e6
        forward = {"contenders": {"ours": {"ms": ms, "tflops": 563.0 * 1.1}}, "kernels": {}}
        return forward | {
            "shape": f"D128 full {seq // 1024}K 32:32",
            "seq": seq,
            "batch": 16384 // seq,
        }

    environment = {"device": "NVIDIA H200", "multiprocessors": 100}
    found = {
        "environment": environment,
        "peak_smi": "NVIDIA H200, 580, 1500 MHz, 1980 MHz, 3201 MHz",
    }
    return found | {"speed": [given | row(seq * 1024) for seq in (2, 4, 8, 16)]} | more


@pytest.mark.needs("host")
class TestBelieve:
    """The last stage, on results that a computation made."""

    def test_a_prediction_that_is_off_by_more_than_its_error_is_named(self, believe, tmp_path):
        (tmp_path / "a.json").write_text(json.dumps(results()))
        rows = {
            "packed": {"passes": {"forward": {"share": 1.3}, "forward + backward": {"share": 2.0}}},
            "host": {"us_a_step": {"forward": 12.0}},
            "carry": {"passes": {"forward": {"us_a_block": {"in": 2.1, "out": 0.9, "both": 3.0}}}},
        }
        ring = {"device": "NVIDIA H200", "rows": rows}
        (tmp_path / "b.json").write_text(json.dumps(ring))
        found = {name: (passed, words) for name, passed, words in believe.verdicts(tmp_path)}
        expected = "predicted 563 TFLOP/s, measured 619, 1.10 ×"
        assert found["forward_d128_full_8k"] == (True, expected)
        assert {name: passed for name, (passed, _) in found.items()} == {
            "forward_d128_full_8k": True,
            "packed, forward": True,
            "packed, forward + backward": False,
            "host, forward": True,
            "sums in": True,
            "sums out": False,
        }

    def test_the_constants_are_those_of_the_computation(self, believe, tmp_path):
        (tmp_path / "a.json").write_text(json.dumps(results()))
        found = dict(believe.constants(tmp_path))
        assert found["clock under load"].startswith("1.5 GHz")
        assert found["forward d128"].startswith("100 cycles for 128² pairs, 5000 around 128 rows")

    def test_other_gpus_have_no_predictions(self, believe, tmp_path):
        other = results(environment={"device": "NVIDIA B200", "multiprocessors": 148})
        (tmp_path / "a.json").write_text(json.dumps(other))
        ((name, passed, words),) = believe.verdicts(tmp_path)
        assert (name, passed) == ("predictions", None)
        assert words == "nothing was measured; 14 rates stay predicted"

    def test_a_slow_device_is_named(self, believe):
        fast = {"device": "NVIDIA H200", "copy_gb_s": 4300.0, "product_tflop_s": 780.0}
        assert believe.slow(fast) == []
        (words,) = believe.slow(fast | {"copy_gb_s": 1200.0})
        assert words.startswith("copies reach 0.25 of what NVIDIA states, expected 0.75")
        assert believe.slow({"device": "another", "copy_gb_s": 1.0}) == []


@pytest.fixture
def believe(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("gpu.believe")
