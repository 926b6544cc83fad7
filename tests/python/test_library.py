"""The library reports its version and the timeline of its rings."""

import json
from pathlib import Path

import burst_attention as ba
import jax
import pytest
import ring
from burst_attention import _ffi

pytestmark = pytest.mark.needs("host")


def test_library_and_package_have_one_version():
    assert _ffi.library_version() == ba.__version__


def test_library_names_no_folder_of_its_builder():
    """Panics name source files, but neither cargo's folder nor this repository's."""
    content = _ffi.LIBRARY.read_bytes()
    assert b"src/host/" in content
    assert b"/registry/src/" not in content
    assert str(Path(__file__).parents[2]).encode() not in content


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
