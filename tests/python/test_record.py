"""The file of verdicts: whatever lies in its place is no record, and it is whole at any time."""

import json
import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from burst_attention import _confirmed, _record

pytestmark = pytest.mark.needs("text")

VERDICTS = {"attention": "wrong"}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """Returns the folder of the file in a cache of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / "cache" / "burst_attention"


def names(folder):
    return sorted(each.name for each in folder.iterdir())


def test_a_record_is_kept_for_its_gpu_driver_library_and_images(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _confirmed.read("NVIDIA H200") == {}
    _confirmed.write("NVIDIA B200", {"attention": "confirmed"})
    path = _confirmed.write("NVIDIA H200", VERDICTS)
    assert path.parent.parent == tmp_path
    assert _confirmed.read("NVIDIA H200") == VERDICTS
    assert _confirmed.read("NVIDIA B200") == {"attention": "confirmed"}
    for name in ("_driver", "_images"):
        with monkeypatch.context() as other:
            other.setattr(_confirmed, name, lambda: "another")
            assert _confirmed.read("NVIDIA H200") == {}
    path.write_text("{")
    assert _confirmed.read("NVIDIA H200") == {}
    assert names(path.parent) == ["checked.json"]


def test_the_record_of_another_user_does_not_count(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _confirmed.write("NVIDIA H200", VERDICTS)
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    assert _confirmed.read("NVIDIA H200") == {}


def test_without_a_folder_the_error_is_the_system_s(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(_record, "_folders", lambda: [tmp_path / "file" / "cache"])
    with pytest.raises(OSError, match="cache"):
        _confirmed.write("NVIDIA H200", VERDICTS)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]",
        "7",
        "NaN",
        "null",
        '"confirmed"',
        '{"KEY": 7}',
        '{"KEY": null}',
        '{"KEY": ["attention"]}',
        '{"KEY": {"attention": NaN}}',
        '{"KEY": {"attention": {"attention": "wrong"}}}',
        "[" * 100_000,
        '{"KEY":' * 100_000,
        "9" * 5_000,
        b"\xff\xfe",
    ],
    ids=lambda text: repr(text[:20]),
)
def test_a_file_of_another_shape_counts_as_none_and_is_replaced(cache, text):
    cache.mkdir(mode=0o700, parents=True)
    path = cache / "checked.json"
    if isinstance(text, str):
        text = text.replace("KEY", _confirmed._key("NVIDIA H200")).encode()
    path.write_bytes(text)
    assert _confirmed.read("NVIDIA H200") == {}
    assert _confirmed.write("NVIDIA H200", VERDICTS) == path
    assert _confirmed.read("NVIDIA H200") == VERDICTS
    assert names(cache) == ["checked.json"]


def test_a_record_of_another_shape_leaves_the_others(cache):
    path = _confirmed.write("NVIDIA B200", VERDICTS)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"another": [1]}))
    assert _confirmed.read("NVIDIA B200") == VERDICTS


def test_a_verdict_on_a_family_stays_until_there_is_another_one():
    _confirmed.write("NVIDIA H200", {"attention": "confirmed", "delta_rule": "wrong"})
    _confirmed.write("NVIDIA H200", {"delta_rule": "confirmed"})
    assert _confirmed.read("NVIDIA H200") == dict.fromkeys(("attention", "delta_rule"), "confirmed")


PLACES = {
    "folder": lambda path: path.mkdir(),
    "pipe": lambda path: os.mkfifo(path),
    "link to a pipe": lambda path: linked(path, os.mkfifo),
    "link to a record": lambda path: linked(path, lambda to: to.write_text(record())),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "others can write it": lambda path: (path.write_text(record()), path.chmod(0o666)),
}
"""What makes something that is no record in the place of the file."""


def record():
    """Returns a file's text that would refute attention."""
    return json.dumps({_confirmed._key("NVIDIA H200"): VERDICTS})


def linked(path, make):
    """Makes a link to what `make` makes."""
    target = path.parent.parent / "target"
    make(target)
    path.symlink_to(target)


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("is_temporary", [False, True], ids=["cache", "temporary"])
def test_what_is_no_file_of_the_user_counts_as_none_and_is_replaced(
    monkeypatch, tmp_path, cache, name, is_temporary
):
    """The read of a pipe would wait for ever."""
    if is_temporary:
        (tmp_path / "cache").write_text("")
        cache = tmp_path / f"burst_attention-{os.getuid()}"
    cache.mkdir(mode=0o700, parents=True)
    path = cache / "checked.json"
    PLACES[name](path)
    assert _confirmed.read("NVIDIA H200") == {}
    assert _confirmed.write("NVIDIA H200", {"attention": "confirmed"}) == path
    assert _confirmed.read("NVIDIA H200") == {"attention": "confirmed"}
    assert names(cache) == ["checked.json"]


def link_folder(folder):
    (folder.parent / "of another user").mkdir(mode=0o700)
    folder.symlink_to("of another user")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (link_folder, "Not a directory|Too many levels"),
        (lambda folder: (folder.mkdir(), folder.chmod(0o777)), "that no other user can write"),
        (os.mkfifo, "File exists"),
    ],
    ids=["link", "others can write it", "pipe"],
)
def test_a_folder_that_another_user_can_write_is_refused_with_the_reason(
    monkeypatch, tmp_path, make, words
):
    folder = tmp_path / "folder"
    make(folder)
    if folder.is_dir():
        (folder / "checked.json").write_text(record())
        (folder / "checked.json").chmod(0o600)
    monkeypatch.setattr(_record, "_folders", lambda: [folder])
    assert _confirmed.read("NVIDIA H200") == {}
    with pytest.raises(OSError, match=f"({words}).*{folder}"):
        _confirmed.write("NVIDIA H200", VERDICTS)


def test_without_a_folder_for_temporary_files_there_is_the_cache_or_a_reason(monkeypatch, cache):
    def missing():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", missing)
    assert _confirmed.read("NVIDIA H200") == {}
    assert _confirmed.write("NVIDIA H200", VERDICTS).parent == cache
    assert _confirmed.read("NVIDIA H200") == VERDICTS
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", classmethod(lambda _: (_ for _ in ()).throw(RuntimeError)))
    assert _confirmed.read("NVIDIA H200") == {}
    with pytest.raises(OSError, match="no home, and no folder for temporary files"):
        _confirmed.write("NVIDIA H200", VERDICTS)


def test_the_newer_of_two_files_counts(monkeypatch, tmp_path, cache):
    """A cache that can be written no more must not hide what a later check has found."""
    path = _confirmed.write("NVIDIA H200", VERDICTS)
    os.utime(path, (1, 1))
    folders = _record._folders()
    with monkeypatch.context() as full:
        full.setattr(_record, "_folders", lambda: folders[1:])
        _confirmed.write("NVIDIA H200", {"attention": "confirmed"})
    assert _confirmed.read("NVIDIA H200") == {"attention": "confirmed"}


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_write_that_fails_leaves_the_file_as_it_was(monkeypatch, cache, call):
    _confirmed.write("NVIDIA H200", VERDICTS)

    def fails(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_record, "_folders", lambda: [cache])
    with monkeypatch.context() as full:
        full.setattr(os, call, fails)
        with pytest.raises(OSError, match="No space left"):
            _confirmed.write("NVIDIA H200", {"attention": "confirmed"})
    assert _confirmed.read("NVIDIA H200") == VERDICTS
    assert names(cache) == ["checked.json"]


def test_a_writer_that_died_leaves_nothing_to_the_next_one(cache):
    cache.mkdir(mode=0o700, parents=True)
    (cache / "checked.json.new").write_text("{" * 10_000)
    (cache / "checked.json.new").chmod(0o600)
    _confirmed.write("NVIDIA H200", VERDICTS)
    assert _confirmed.read("NVIDIA H200") == VERDICTS
    assert names(cache) == ["checked.json"]


def test_a_writer_that_stands_still_is_an_error_and_not_a_wait(monkeypatch, cache):
    monkeypatch.setattr(_record, "PATIENCE_S", 0.1)
    monkeypatch.setattr(_record, "_folders", lambda: [cache])
    cache.mkdir(mode=0o700, parents=True)
    with (
        _record._opened(cache) as folder,
        open(_record._claimed(folder), "w"),
        pytest.raises(TimeoutError, match="another process has written for 0 s"),
    ):
        _confirmed.write("NVIDIA H200", VERDICTS)
    _confirmed.write("NVIDIA H200", VERDICTS)


def test_writers_at_the_same_time_lose_no_verdict(cache):
    begin, kinds = threading.Barrier(8), [f"GPU {number}" for number in range(40)]

    def write(first):
        begin.wait()
        for kind in kinds[first::8]:
            _confirmed.write(kind, {"attention": f"wrong on {kind}"})

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(8)))
    for kind in kinds:
        assert _confirmed.read(kind) == {"attention": f"wrong on {kind}"}
    assert names(cache) == ["checked.json"]
