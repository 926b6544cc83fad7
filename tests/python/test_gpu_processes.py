"""Several processes over NCCL: how they share a GPU, which library serves, what is shown."""

import importlib.util
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import nccl_library
import platforms
import pytest

BENCHMARKS = platforms.ROOT / "benchmarks"


@pytest.fixture
def processes(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("gpu.processes")


def run(*arguments, **environment):
    """Returns the exit code of the program and the lines that it prints."""
    command = [sys.executable, "-P", "-m", "gpu.processes", *arguments]
    folders = [str(BENCHMARKS), str(BENCHMARKS.parent / "tests" / "python")]
    path = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": path} | environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=900,
        check=False,
    )
    return ran.returncode, ran.stdout.splitlines()


@pytest.mark.needs("host")
class TestVariables:
    """Of processes on a machine with one GPU or more."""

    @pytest.fixture
    def of_process(self, monkeypatch):
        monkeypatch.setattr(platforms, "_current", platforms.PLATFORMS["cuda"])
        monkeypatch.delenv(platforms.NCCL, raising=False)

        def variables(gpus, *arguments):
            monkeypatch.setattr(platforms, "visible_gpus", lambda: gpus)
            found = platforms.of_process(*arguments)
            assert found.pop("NCCL_DEBUG") == "INFO"
            assert found.pop("NCCL_DEBUG_FILE") == f"mail/nccl.{arguments[0]}"
            return found

        return variables

    def test_share_a_gpu_by_sockets(self, of_process):
        assert of_process(["5"], 1, 2, 1, "mail") == {
            "CUDA_VISIBLE_DEVICES": "5",
            "NCCL_HOSTID": "burst-attention-1",
            "NCCL_NET": "Socket",
        }

    @pytest.mark.parametrize(("count", "blocks"), [(2, "4"), (4, "2")])
    def test_share_a_gpu_directly(self, of_process, monkeypatch, count, blocks):
        monkeypatch.setenv(platforms.NCCL, "lib/libnccl.so.2")
        monkeypatch.setattr(nccl_library, "check", lambda file: (2, 30, 7))
        assert of_process(["0"], 1, count, 1, "mail") == {
            "CUDA_VISIBLE_DEVICES": "0",
            "NCCL_MULTI_RANK_GPU_ENABLE": "1",
            "NCCL_MAX_CTAS": blocks,
            "NCCL_ALGO": "Ring",
            "NCCL_NVLS_ENABLE": "0",
            "LD_PRELOAD": "lib/libnccl.so.2",
        }

    def test_have_gpus_of_their_own(self, of_process, monkeypatch):
        monkeypatch.setenv(platforms.NCCL, "unread")
        assert of_process(["4", "5", "6", "7"], 1, 2, 2, "mail") == {"CUDA_VISIBLE_DEVICES": "6,7"}


@pytest.mark.needs("host")
class TestLibrary:
    """What is no NCCL, or is too old, is refused with what was expected."""

    def refused(self, file, oldest=nccl_library.OLDEST):
        with pytest.raises(nccl_library.UnfitError) as error:
            nccl_library.check(str(file), oldest)
        words = str(error.value)
        assert words.startswith(f"expected a library of NCCL from {'.'.join(map(str, oldest))} on;")
        return words

    def test_a_file_that_is_missing(self, tmp_path):
        assert self.refused(tmp_path / "none").endswith(f"there is no file {tmp_path / 'none'}")

    def test_a_file_that_is_no_library(self, tmp_path):
        file = tmp_path / "libnccl.so.2"
        file.write_text("text")
        assert f"{file} can't say its version: OSError" in self.refused(file)

    def test_a_library_of_something_else(self):
        package = importlib.util.find_spec("burst_attention").submodule_search_locations[0]
        words = self.refused(f"{package}/libburst_attention_ffi.so")
        assert "undefined symbol: ncclGetVersion" in words

    @pytest.mark.parametrize(
        ("number", "version"), [(2804, "2.8.4"), (21805, "2.18.5"), (22907, "2.29.7")]
    )
    def test_an_older_nccl(self, monkeypatch, tmp_path, number, version):
        monkeypatch.setattr(nccl_library, "READ", f"print({number})")
        file = tmp_path / "libnccl.so.2"
        file.touch()
        assert self.refused(file).endswith(f"{file} is {version}")


@pytest.mark.needs("standin")
def test_a_library_that_is_new_enough_serves():
    assert nccl_library.check(str(platforms.STANDIN / "lib" / "libnccl.so.2")) == (2, 30, 7)


@pytest.mark.needs("host")
class TestItems:
    """Of the program, without processes."""

    def test_an_item_that_fails_costs_only_itself(self, processes, capsys):
        items = processes.Items(60)

        def fail(limit_s):
            raise ValueError(f"limit\n{limit_s}")

        assert [items.run("a", fail), items.run("b", str)] == [False, True]
        assert items.verdicts == {"a": False, "b": True}
        first, second = capsys.readouterr().out.splitlines()
        assert first.startswith("a: FAILED, ValueError: limit 59.9")
        assert second == "b: passed, 0.0 s"

    def test_without_time_an_item_is_left_out(self, processes, capsys):
        items = processes.Items(processes.ENOUGH_S - 1)
        assert items.run("a", time.sleep) is False
        assert items.verdicts == {"a": None}
        assert capsys.readouterr().out == "a: left out, the time was up, 0.0 s\n"

    @pytest.mark.parametrize("works", [0, 1, 3, 4])
    def test_settings_are_tried_in_turn_until_one_works(self, processes, monkeypatch, works):
        tried = []

        def run_all(items, count, settings, *_):
            tried.append(settings)
            items.run("probe", str if settings in processes.SETTINGS[works:] else divmod)
            return "P2P/IPC" if items.verdicts["probe"] else None

        monkeypatch.setattr(processes, "run_all", run_all)
        items = processes.Items(60)
        found = processes.run_way(items, 2, "direct", False)
        assert tried == list(processes.SETTINGS[: works + 1])
        words = "P2P/IPC NCCL_P2P_DISABLE=1 NCCL_CUMEM_HOST_ENABLE=0"
        expected = {0: "P2P/IPC", 1: "P2P/IPC NCCL_CUMEM_ENABLE=0", 3: words}
        assert found == expected.get(works, "no settings of NCCL worked")

    def test_four_processes_run_only_after_two_have_passed(self, processes, tmp_path):
        stages = importlib.import_module("gpu.stages")
        passed = {"2 processes, sockets": {"passed": True}, "2 processes, direct": {}}
        found = {"facts": {"devices": 1}} | passed
        budget = importlib.import_module("gpu.session").Budget(540)
        asked = stages.Asked(tmp_path, "cuda", False, budget, lambda name: found.get(name, {}))
        (items,) = (x for x in stages.STAGES["runs"].items if x.__name__ == "_processes")
        chosen = list(items(asked))
        assert [item.name for item in chosen] == [*passed, "4 processes, sockets"]
        # The second way takes what the first one leaves.
        assert chosen[0].limit_s < chosen[1].limit_s / 1.5

    def test_hosts_with_several_gpus_share_none(self, processes):
        assert processes.ways(1)[:2] == [(2, "sockets"), (2, "direct")]
        assert processes.ways(3) == [(2, "apart")]
        assert processes.ways(8) == [(2, "apart"), (4, "apart")]


@pytest.mark.needs("host")
class TestUnusable:
    """What is missing is said in the place of the items."""

    def test_gpu(self, processes):
        words = "expected an NVIDIA GPU that JAX can use, found cpu"
        with pytest.raises(processes.UnusableError, match=words):
            processes.installed()

    def test_nccl(self, processes, monkeypatch):
        gpu = SimpleNamespace(platform="gpu")
        monkeypatch.setattr(jax, "devices", lambda: [gpu])
        with pytest.raises(processes.UnusableError, match=r"expected the package nvidia-nccl-cu13"):
            processes.installed()

    def test_nccl_that_lets_ranks_share(self, processes, monkeypatch, tmp_path):
        monkeypatch.setattr(processes, "installed", lambda: str(tmp_path / "none"))
        monkeypatch.delenv(platforms.NCCL, raising=False)
        words = r"expected a library of NCCL from 2.30 on; .* `make gpu-bundle NCCL=FILE` takes"
        with pytest.raises(processes.UnusableError, match=words):
            processes.prepare("direct")
        processes.prepare("sockets")


@pytest.mark.needs("standin")
def test_a_fault_is_named_and_costs_only_its_item():
    """Kernels of decoding fail in each process; then new processes go on."""
    fault = "call=cuLaunchKernel code=719 about=decode"
    standin = ("--platform", "standin", "--only", "decoding")
    code, lines = run("2", "direct", *standin, STANDIN_FAIL=fault)
    assert code == 1
    verdicts = dict(line.rsplit(", ", 1)[0].split(": ", 1) for line in lines[:-1])
    failed = {name for name, words in verdicts.items() if words.startswith("FAILED")}
    assert failed == {"decoding", "decoding, pages"}
    assert "cuLaunchKernel" in verdicts["decoding"]
    assert verdicts["a rank that dies"] == "passed"
    assert lines[-1] == "4 of 6 items passed"
