"""The ten minutes with a GPU, on the stand-in: all stages pass, and each planted fault shows up."""

import json
import os
import subprocess
import sys
import zipfile

import platforms
import pytest

BENCHMARKS = platforms.ROOT / "benchmarks"
STAGES = ("facts", "runs", "right", "fast", "believe")
ON_STANDIN = [pytest.mark.needs("standin"), pytest.mark.long]


def run(out, minutes=6, **environment):
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"))


class TestOnTheStandin:
    pytestmark = ON_STANDIN

    def test_all_stages_pass(self, whole):
        code, found, page = whole
        assert code == 0, page
        assert {one["stage"] for one in found.values()} == set(STAGES)
        assert found["images"]["words"].endswith("images of sm_90 load")
        assert found["families"]["words"].count(" confirmed") == 3
        assert "passed" in found["test_correct"]["words"]
        assert found["rings"]["passed"] is True
        # There is no torch here, so the kernels alone are not timed and rates stay predicted.
        assert found["kernels"]["passed"] is None
        assert found["rates"]["words"].startswith("nothing was measured; ")

    def test_the_page_names_device_driver_and_date(self, whole):
        _, found, page = whole
        head = page.split("\n")[0]
        assert found["facts"]["found"]["device"] in head
        assert "+00:00" in head
        for stage in STAGES:
            assert f"\n## {stage}\n" in page

    def test_faults_are_named_in_their_stage_and_cost_only_their_item(self, tmp_path):
        # The process of the item `images` alone loads a hundredth image.
        refused = "call=cuModuleLoadData code=209 nth=100"
        fails = "call=cuLaunchKernel code=719 about=decode"
        code, found, page = run(tmp_path, STANDIN_FAIL=f"{refused}; {fails}")
        assert code == 1
        assert {name for name, one in found.items() if one["passed"] is False} == {
            "images",
            "families",
        }
        assert len(found["images"]["found"]["refused"]) == 1
        assert "cuModuleLoadData: error 209" in page
        assert "decode_attention  JaxRuntimeError" in found["families"]["words"]
        assert found["families"]["words"].count(" confirmed") == 2
        assert found["test_correct"]["passed"] is True

    def test_kernels_that_hang_end_at_their_limit_and_the_page_is_whole(self, tmp_path):
        code, found, page = run(tmp_path, minutes=1.5, STANDIN_JITTER_US="30000000")
        assert code == 1
        assert found["images"]["passed"] is True
        assert found["families"]["passed"] is False
        assert "no end within " in page or "no answer within " in page
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
