"""The library loads or says why not, and reports its version and the timeline of its work."""

import json
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import burst_attention as ba
import jax
import numpy as np
import pytest
import ring
from burst_attention import _ffi, _jax, _library
from decode_cases import Sharding, decode, latents, problem

pytestmark = [pytest.mark.needs("host"), pytest.mark.wheel]


def test_library_and_package_have_one_version():
    assert _ffi.library_version() == ba.__version__


@pytest.mark.needs("shipped")
def test_library_names_no_folder_of_its_builder():
    """Panics name source files, but neither cargo's folder nor this repository's."""
    content = _library.LIBRARY.read_bytes()
    assert b"src/host/" in content
    assert b"/registry/src/" not in content
    assert str(Path(__file__).parents[2]).encode() not in content


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4696808\n"
FILES = {
    "pointer": (POINTER, "must be a library, got the text by which Git LFS .* run `git lfs pull`"),
    "processor": (
        None,
        r"must be a library for \w+, .* got one for riscv64; install the wheel for",
    ),
    "text": (b"", "must be the library of .*, got a file that does not load: .*; install the pack"),
    "absent": (None, "is missing: it is part of the wheel; in a source tree, run `make build`"),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_library_that_does_not_load_is_an_error_that_helps(tmp_path, monkeypatch, kind):
    (content, words), path = FILES[kind], tmp_path / "library.so"
    if kind == "processor":
        content = bytearray(_library.LIBRARY.read_bytes())
        content[18:20] = b"\xf3\0"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(_library, "LIBRARY", path)
    with pytest.raises(ImportError, match=f"{path} {words}"):
        _library.load()


def test_a_package_in_an_archive_is_an_error_that_helps(tmp_path, monkeypatch):
    archive = tmp_path / "package.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr(f"burst_attention/{_library.LIBRARY.name}", "")
    path = archive / "burst_attention" / _library.LIBRARY.name
    monkeypatch.setattr(_library, "LIBRARY", path)
    with pytest.raises(ImportError, match="must lie in a folder, .* got .*; install the wheel"):
        _library.load()


COPIES = """
import importlib.util, sys

def load(path):
    spec = importlib.util.spec_from_file_location("library", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load()

load(sys.argv[1])
load(sys.argv[1])
load(sys.argv[2])
"""


def test_a_second_copy_in_a_process_is_an_error_that_helps(tmp_path):
    """The same copy may be imported twice."""
    for path in (_library.__file__, _library.LIBRARY):
        shutil.copy(path, tmp_path)
    paths = [_library.__file__, str(tmp_path / "_library.py")]
    child = subprocess.run(
        [sys.executable, "-c", COPIES, *paths], capture_output=True, text=True, check=False
    )
    last = child.stderr.splitlines()[-1]
    assert last.startswith("ImportError: a process must have one copy of burst_attention"), last
    assert f"got {tmp_path / _library.LIBRARY.name} after {_library.LIBRARY.resolve()}; res" in last


def test_a_jax_that_is_too_old_is_an_error_that_helps(monkeypatch):
    words = rf"needs JAX {_jax.OLDEST} or later, got {jax.__version__}, which has no jax.ffi; run"
    with monkeypatch.context() as patch, pytest.raises(ImportError, match=words):
        patch.delattr(jax, "ffi")
        _jax.check()
    monkeypatch.setattr(jax, "__version__", "0.11.1")
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 1))
    with pytest.raises(ImportError, match="got 0.11.1; run `pip install --upgrade jax jaxlib`"):
        _jax.check()


@pytest.mark.needs("text")
def test_package_and_metadata_name_one_oldest_jax():
    with (Path(__file__).parents[2] / "jax_plugin" / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    assert f"jax>={_jax.OLDEST}" in project["dependencies"]
    assert project["optional-dependencies"] == {"cuda13": [f"jax[cuda13]>={_jax.OLDEST}"]}


def test_timeline_names_every_step_of_every_rank(tmp_path):
    function = ring.gradients(ring.sharded(ring.line(4), backward="queries"))
    q, k, v, dout = ring.put(ring.line(4), *ring.normal(0, *[(1, 32, 2, 16)] * 4))
    path = tmp_path / "steps.json"
    with ba.trace(path):
        jax.block_until_ready(function((q, k, v), dout))
    events = json.loads(path.read_text())["traceEvents"]
    names = {(event["tid"], event["name"]) for event in events}
    for rank in range(4):
        for step in range(4):
            assert (rank, f"Forward Keys step {step} of 4") in names
            assert (rank, f"Backward Queries step {step} of 4") in names
    assert all(event["dur"] >= 0 and event["ph"] == "X" for event in events)


def decode_events(path):
    """Returns the events of a timeline that has nothing but decode, without the process's name."""
    *events, process = json.loads(path.read_text())["traceEvents"]
    assert process["args"] == {"name": "Decode"}
    assert {event["pid"] for event in events} == {process["pid"]}
    return events


@pytest.mark.parametrize(("case_of", "columns"), [(problem, 16 + 8), (latents, 16)])
def test_timeline_has_an_event_of_each_rank_that_decodes(tmp_path, case_of, columns):
    """The sequence of length 7 has two positions on the first three ranks, and one on the last."""
    case = case_of(Sharding(4, capacity=16), [60, 7], 1, (4, 2), (16, 8))
    with ba.trace(tmp_path / "steps.json"):
        jax.block_until_ready(decode(case))
    events = sorted(decode_events(tmp_path / "steps.json"), key=lambda event: event["tid"])
    for rank, (event, rows) in enumerate(zip(events, (17, 17, 17, 16), strict=True)):
        assert event["name"] == f"Decode 2 sequences, {rows} positions"
        assert event["tid"] == rank
        assert event["args"] == {
            "pairs": rows * 4,
            "sequences": 2,
            "heads": 4,
            "rows": rows,
            "bytes": rows * 2 * columns * 4,
            "rank": rank,
        }


def test_timeline_has_an_event_of_each_layer_and_batch_on_a_pool(tmp_path):
    """Two batches take turns, and the pool's two devices have half of each sequence."""
    devices = list(ring.devices(8))
    there, layers, path = ba.CachePool(devices[4:6]), 3, tmp_path / "steps.json"

    def step(batch):
        tokens = [
            jax.device_put(x, devices[0]) for x in ring.normal(batch, *[(batch, 1, 2, 8)] * 3)
        ]
        for _ in range(layers):
            caches = there.init(batch=batch, positions=8, kv_heads=2, head_dim=8, dtype="float32")
            pending, _ = there.send(caches, *tokens, np.full(batch, 6))
            yield
            tokens[0] = pending.receive()
        return tokens[0]

    with ba.trace(path):
        jax.block_until_ready(ba.alternate(step, (1, 2)))
    found = Counter((event["tid"], event["name"]) for event in decode_events(path))
    names = ["Decode 1 sequence, 3 positions", "Decode 2 sequences, 6 positions"]
    assert found == dict.fromkeys([(device, name) for device in (4, 5) for name in names], layers)


def test_nothing_is_recorded_after_the_block(tmp_path):
    function = jax.jit(ring.sharded(ring.line(2)))
    inputs = ring.put(ring.line(2), *ring.normal(0, *[(1, 4, 1, 8)] * 3))
    path = tmp_path / "steps.json"
    with ba.trace(path):
        pass
    jax.block_until_ready(function(*inputs))
    assert json.loads(path.read_text())["traceEvents"] == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [("no/dir", FileNotFoundError), (".", IsADirectoryError), ("file/x", NotADirectoryError)],
)
def test_timeline_that_cannot_be_written_is_an_error_before_the_work(tmp_path, name, kind):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(kind, match=rf"timeline can't be written: \w+.*{name}"),
        ba.trace(str(tmp_path / name)),
    ):
        pytest.fail("the block must not begin")


def test_timeline_takes_the_paths_that_open_takes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = ["text", b"bytes", b"\xff", "\udcfe", tmp_path / "object"]
    for path in paths:
        with ba.trace(path):
            pass
        with open(path) as file:
            assert json.load(file) == {"traceEvents": []}
    assert len(list(tmp_path.iterdir())) == len(paths)
    with ba.trace("here"):
        monkeypatch.chdir("/")
    assert (tmp_path / "here").read_text()


def test_a_timeline_within_another_is_an_error_and_the_other_goes_on(tmp_path):
    """The second block is in this thread, in another one, and names the first block's file."""
    function = jax.jit(ring.sharded(ring.line(2)))
    inputs = ring.put(ring.line(2), *ring.normal(0, *[(1, 4, 1, 8)] * 3))
    outer, inner = tmp_path / "outer.json", tmp_path / "inner.json"

    def begin(path):
        with pytest.raises(RuntimeError, match="one timeline at a time"), ba.trace(path):
            pytest.fail("the block must not begin")

    with ba.trace(outer):
        begin(inner)
        begin(outer)
        with ThreadPoolExecutor() as threads:
            threads.submit(begin, inner).result()
        jax.block_until_ready(function(*inputs))
    assert not inner.exists()
    assert len(json.loads(outer.read_text())["traceEvents"]) == 4
    with ba.trace(inner):
        pass
    assert json.loads(inner.read_text())["traceEvents"] == []


def test_timeline_refuses_what_is_no_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path, kind, words in [
        ("a\0b", ValueError, r"path must not contain a zero byte, got 'a\\x00b'"),
        (b"a\0b", ValueError, "must not contain a zero byte"),
        ("\ud800", UnicodeEncodeError, "surrogates not allowed"),
        (3, TypeError, "expected str, bytes or os.PathLike object, not int"),
        ("", FileNotFoundError, "No such file"),
    ]:
        with pytest.raises(kind, match=words), ba.trace(path):
            pytest.fail("the block must not begin")
    assert not list(tmp_path.iterdir())
