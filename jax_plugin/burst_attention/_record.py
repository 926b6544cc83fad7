"""The file of verdicts about GPU kernels, which ``python -m burst_attention check`` writes.

It lies in the user's cache or in the folder for temporary files, where any user can make anything.
So a folder counts only if it is the user's own and no other user can write it, and a file in it
only if it is a regular file of the same kind. Both are opened without following links and without
waiting.
"""

import contextlib
import errno
import fcntl
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

Records: TypeAlias = dict[str, dict[str, str]]
"""For each key the verdicts on families of kernels."""

NAME = "checked.json"
NEW_NAME = "checked.json.new"
"""The file before it is whole. Who writes it has locked it."""
PATIENCE_S = 5.0
"""How long a process waits for others that write."""
OPENING = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def read() -> Records:
    """Returns the records of all keys, the newer file's where two folders have one.

    What can't be read counts as none. `write` replaces it.
    """
    files = []
    for path in _folders():
        with contextlib.suppress(OSError, ValueError, RecursionError), _opened(path) as folder:
            files.append(_file(folder))
    records: Records = {}
    for _, newer in sorted(files, key=lambda file: file[0]):
        records |= newer
    return records


def write(key: str, verdicts: Mapping[Any, str]) -> Path:
    """Adds verdicts to the record of a key and returns the file.

    Raises:
      OSError: if no folder for it can be written.
    """
    error: OSError | None = None
    for path in _folders():
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _opened(path) as folder:
                _add(folder, key, verdicts)
            return path / NAME
        except OSError as refused:
            error = error or OSError(refused.errno, refused.strerror, str(path))
    raise error or FileNotFoundError(errno.ENOENT, "no home, and no folder for temporary files")


def _folders() -> list[Path]:
    """Returns the folders for the file: the user's cache, then one for users who have none."""
    folders = []
    with contextlib.suppress(RuntimeError):  # no home
        cache = os.environ.get("XDG_CACHE_HOME")
        folders.append((Path(cache) if cache else Path.home() / ".cache") / "burst_attention")
    with contextlib.suppress(OSError):  # no folder for temporary files
        folders.append(Path(tempfile.gettempdir()) / f"burst_attention-{os.getuid()}")
    return folders


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Opens a folder of the user.

    Raises:
      OSError: if there is none, or another user can write it.
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | OPENING)
    try:
        _check_own(folder, stat.S_ISDIR, "a folder")
        yield folder
    finally:
        os.close(folder)


def _check_own(opened: int, is_kind: Callable[[int], bool], kind: str) -> None:
    """Raises `OSError` for what is not of this kind, or not the user's alone to write."""
    status = os.fstat(opened)
    if not is_kind(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise OSError(errno.EPERM, f"expected {kind} of this user that no other user can write")


def _file(folder: int) -> tuple[int, Records]:
    """Returns when the file in a folder was written, and its records.

    Raises:
      OSError, ValueError, RecursionError: if there is no such file.
    """
    opened = os.open(NAME, os.O_RDONLY | OPENING, dir_fd=folder)
    with open(opened, encoding="utf-8") as file:
        _check_own(opened, stat.S_ISREG, "a file")
        found: Any = json.load(file)
        records = found if isinstance(found, dict) else {}
        written = os.fstat(opened).st_mtime_ns
    return written, {key: record for key, record in records.items() if _is_record(record)}


def _is_record(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(verdict, str) for verdict in value.values())


def _add(folder: int, key: str, verdicts: Mapping[Any, str]) -> None:
    """Adds verdicts to the file in a folder. Whoever reads it has the old file or the new one."""
    with open(_claimed(folder), "w", encoding="utf-8") as new:
        try:
            records = read()
            records[key] = records.get(key, {}) | dict(verdicts)
            new.truncate(0)
            json.dump(records, new, indent=1)
            new.flush()
            os.fsync(new.fileno())
            with contextlib.suppress(OSError):  # unless it is an empty folder
                os.rmdir(NAME, dir_fd=folder)
            os.rename(NEW_NAME, NAME, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(NEW_NAME, dir_fd=folder)
            raise


def _claimed(folder: int) -> int:
    """Opens the new file in a folder, once no other process writes it, and locks it.

    A process that dies leaves a file without a lock, which the next one takes.

    Raises:
      OSError: if another process writes for long, or the file is not the user's own.
    """
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        new = os.open(NEW_NAME, os.O_WRONLY | os.O_CREAT | OPENING, 0o600, dir_fd=folder)
        try:
            _check_own(new, stat.S_ISREG, "a file")
            fcntl.flock(new, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The process that had the lock has renamed the file, unless it failed or died.
            there = os.stat(NEW_NAME, dir_fd=folder, follow_symlinks=False)
            if os.path.samestat(os.fstat(new), there):
                return new
        except (BlockingIOError, FileNotFoundError):
            time.sleep(0.01)
        except BaseException:
            os.close(new)
            raise
        os.close(new)
    raise OSError(errno.ETIMEDOUT, f"another process has written for {PATIENCE_S:.0f} s")
