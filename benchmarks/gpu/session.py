"""Gives items to a worker process, with a limit on time; replaces one that hangs or dies."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

BENCHMARKS = Path(__file__).parents[1]
FOLDERS = (BENCHMARKS, BENCHMARKS.parent / "tests" / "python")
"""Folders whose modules workers import: the benchmarks' and the tests'."""
START_S = 120.0
TAIL = 400
"""Characters of a lost worker's last output."""


class LostError(Exception):
    """The worker ended or did not answer."""


class UnusableError(Exception):
    """Nothing can run here; the message says what was expected and found."""


def module(name: str) -> list[str]:
    """The command that runs a module of `FOLDERS`, whatever the current folder holds."""
    return [sys.executable, "-P", "-m", name]


class Worker:
    """One process and its output on stderr."""

    def __init__(self, command: list[str], environment: dict[str, str] | None = None):
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - until `end`
        folders = [*map(str, FOLDERS), os.environ.get("PYTHONPATH")]
        settings = {
            "PYTHONPATH": os.pathsep.join(filter(None, folders)),
            # jax must leave torch its memory.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=os.environ | settings | (environment or {}),
        )
        self._unread = b""

    def ask(self, item: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Returns the answer to an item."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(item).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise LostError(self._ended()) from error
        return self.hear(limit_s)

    def hear(self, limit_s: float) -> dict[str, Any]:
        """Returns the next answer."""
        assert self._process.stdout is not None
        end = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise LostError(f"no answer within {limit_s:.0f} s{self._tail()}")
                read = os.read(self._process.stdout.fileno(), 1 << 16)
                if not read:
                    raise LostError(self._ended())
                self._unread += read
        line, self._unread = self._unread.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        """Ends the process; the next `hear` raises `LostError`."""
        self._process.kill()

    def end(self) -> None:
        """Kills the process if it still runs, and releases its pipes."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # an unwritten item
                    pipe.close()
        self._said.close()
        # The GPU's driver may hold the process for ever.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)

    def _ended(self) -> str:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return f"the worker closed its output{self._tail()}"
        how = signal.Signals(-code).name if code < 0 else f"code {code}"
        return f"the worker ended by {how}{self._tail()}"

    def _tail(self) -> str:
        said = _last(self._said)
        return f"; it last said: {said}" if said else ""


class Session:
    """Keeps a worker, and makes a new one when it is lost."""

    def __init__(
        self,
        library: str | None,
        command: list[str] | None = None,
        environment: dict[str, str] | None = None,
    ):
        self._environment = environment
        self._command = command or [*module("gpu.worker"), *([library] if library else [])]
        self._worker: Worker | None = None
        self.losses = 0

    def start(self, limit_s: float = START_S) -> None:
        """Starts a worker if there is none; raises `UnusableError` or `LostError`."""
        if self._worker is not None:
            return
        self._worker = Worker(self._command, self._environment)
        try:
            missing = self._worker.hear(limit_s)["missing"]
        except LostError:
            self.close()
            raise
        if missing is not None:
            self.close()
            raise UnusableError(missing)

    def ask(self, item: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Returns `result`, `absent` or `error`; with `lost` if the item ended the worker."""
        try:
            self.start(limit_s + START_S / 4)
            assert self._worker is not None
            answer = self._worker.ask(item, limit_s)
        except (LostError, UnusableError) as error:
            answer = {"error": str(error), "lost": True}
        if answer.get("lost"):
            self.losses += 1
            self.close()
        return answer

    def close(self) -> None:
        """Ends the worker."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None


class Budget:
    """Seconds for all parts. Each part may run until a share of them is spent."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self._seconds, self._clock, self._began = seconds, clock, clock()

    def left(self, share: float = 1.0) -> float:
        """Returns the seconds until this share of the whole is spent; negative afterwards."""
        return self._began + share * self._seconds - self._clock()

    @property
    def spent(self) -> float:
        """Returns the seconds so far."""
        return self._clock() - self._began


def _last(file: TextIO) -> str:
    file.seek(0)
    return " | ".join(file.read().split("\n"))[-TAIL:].strip(" |")
