"""The program of each of several processes: ``python several.py RANK PROCESSES PORT WORK ARGS``.

`start` starts all processes of a run, each with its devices. `Group` lets processes solve problems
of `several_cases`, one after the other.
"""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import platforms

HEARTBEAT_SECONDS = 5
"""The time after which the other processes take a silent one for dead."""
DEATH = "heartbeat|UNAVAILABLE|Connection closed|remote process exited"
"""What processes say after another one has died. Any word of gloo would not do, since gloo greets
its peers by name."""
LAST_WORDS = 300
"""Characters of a process's last output that an error repeats."""


class FailedError(Exception):
    """Processes ended, or did not end in time; the message says how."""


class Process(subprocess.Popen):
    """A process whose output goes to a file, so that it never waits for a reader."""

    def __init__(self, command, environment, mail):
        self.mail = mail
        self._kept = None
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - until `close`
        super().__init__(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def said(self):
        """Returns the output so far."""
        if self._kept is not None:
            return self._kept
        # The process writes at the file's own position, which this leaves alone.
        size = os.fstat(self._file.fileno()).st_size
        return os.pread(self._file.fileno(), size, 0).decode(errors="replace")

    def close(self):
        """Keeps the output so far, and closes the file."""
        self._kept = self.said()
        self._file.close()


def start(work, processes, devices, *arguments, environment=None):
    """Starts the processes of a run of ``work``, a function of this file; `outputs` ends them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    mail = Path(tempfile.mkdtemp(prefix="mail-"))
    command = [sys.executable, str(Path(__file__)), "{}", str(processes), str(port), work]
    return [
        Process(
            [part.format(rank) for part in command] + list(map(str, arguments)),
            os.environ | platforms.of_process(rank, processes, devices, mail) | (environment or {}),
            mail,
        )
        for rank in range(processes)
    ]


def outputs(started, timeout):
    """Returns each process's output once all processes have ended, and kills any that remain."""
    end = time.monotonic() + timeout
    try:
        # A process that ends waits for the others.
        for process in started:
            process.stdin.close()
        for process in started:
            process.wait(max(0, end - time.monotonic()))
    finally:
        kill(started)
    return [process.said() for process in started]


def kill(started):
    """Ends processes at once, and removes the folder of their messages."""
    for process in started:
        process.kill()
    for process in started:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        # A process that the driver holds can't be killed.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.close()
        shutil.rmtree(process.mail, ignore_errors=True)


class Group:
    """Processes that solve problems of `several_cases` one after the other, as they are told.

    After a problem that fails or does not end within its limit, new processes solve the next one,
    so it costs only itself.
    """

    def __init__(self, processes, devices, environment=None):
        self._shape, self._environment = (processes, devices), environment
        self._started = []
        self._folder = tempfile.TemporaryDirectory(prefix="several-")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        kill(self._started)
        self._folder.cleanup()

    def solve(self, name, limit_s):
        """Returns the results of a problem by name of each array."""
        end, folder = time.monotonic() + limit_s, Path(self._folder.name)
        if not self._started:
            self._started = start("solve", *self._shape, folder, environment=self._environment)
        try:
            for process in self._started:
                with contextlib.suppress(BrokenPipeError):  # the process has ended
                    print(name, file=process.stdin, flush=True)
            while len(list(folder.glob(f"{name}.done.*"))) < len(self._started):
                self._check(time.monotonic() < end, f"no end within {limit_s:.0f} s")
                time.sleep(0.02)
        except FailedError:
            kill(self._started)
            self._started = []
            raise
        return load(folder / f"{name}.npz")

    def carried(self):
        """Returns how NCCL carries messages, in its own words: version and kinds of links."""
        said = nccl_said(self._started)
        found = re.findall(r"NCCL version [\d.]+", said)[:1]
        return " ".join([*found, *sorted(set(re.findall(r" via ([A-Z0-9]+/[A-Za-z]+)", said)))])

    def end(self, limit_s):
        """Lets the processes end, which they must do without an error."""
        started, self._started = self._started, []
        printed = outputs(started, limit_s)
        for rank, process in enumerate(started):
            if process.returncode:
                words = " ".join(printed[rank].split())[-LAST_WORDS:]
                raise FailedError(f"process {rank} ended by {process.returncode}: {words}")

    def _check(self, in_time, words):
        """Raises an error with a process's last words if it has ended, or if the time is up."""
        dead = [rank for rank, x in enumerate(self._started) if x.poll() is not None]
        if in_time and not dead:
            return
        rank = dead[0] if dead else 0
        if dead:
            words = f"process {rank} ended by {self._started[rank].returncode}"
        said = " ".join(self._started[rank].said().split())[-LAST_WORDS:]
        warned = re.findall(r"NCCL WARN (.*)", nccl_said(self._started))[-1:]
        raise FailedError("; ".join([words, *warned, f"process {rank} last said: {said}"]))


def nccl_said(started):
    """Returns what NCCL wrote in processes on GPUs, one after the other."""
    files = [x for process in started[:1] for x in sorted(process.mail.glob("nccl.*"))]
    return "\n".join(file.read_text(errors="replace") for file in files)


def load(file):
    """Returns the arrays of a file of `solve`; numpy's files name no bfloat16."""
    import jax.numpy as jnp
    import numpy as np

    with np.load(file) as found:
        return {n: x.view(jnp.bfloat16) if x.dtype.kind == "V" else x for n, x in found.items()}


def solve(folder):
    """Solves the problems whose names come on stdin; the first process writes the results.

    Each process leaves a file for each problem that it has solved.
    """
    import traceback

    import jax
    import numpy as np
    from several_cases import cases

    known, rank = cases(jax.device_count()), jax.process_index()
    for name in map(str.strip, sys.stdin):
        try:
            found = known[name].found(known[name].arrays())
            complaints = platforms.complaints()
            assert not complaints, complaints
        except Exception:
            # JAX would wait for the other processes, which may wait for this one.
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        if rank == 0:
            np.savez(Path(folder) / f"{name}.npz", **found)
        (Path(folder) / f"{name}.done.{rank}").touch()


def assert_death_ends_all(processes, devices, limit_s, environment=None):
    """Asserts that all processes end with an error soon after the last one has died in a ring."""
    with tempfile.TemporaryDirectory() as folder:
        started = start("die", processes, devices, folder, environment=environment)
        try:
            started[-1].wait(limit_s)
        finally:
            gone = time.monotonic()
            printed = outputs(started, 60)
    assert time.monotonic() - gone < 60
    assert started[-1].returncode == 3, printed[-1]
    for process, said in zip(started[:-1], printed, strict=False):
        assert "ring ran" in said, said
        assert "ring ran again" not in said, said
        assert process.returncode != 0, said
        assert re.search(DEATH, said), said


def die(folder):
    """Runs a ring over all processes, then another one that the last process does not live to.

    The last process waits for a file of each process before it ends, since some process may still
    be in the first ring.
    """
    import jax
    from several_cases import cases

    ring = cases(jax.device_count())["ring, zigzag"]
    arrays = ring.arrays()
    ring.found(arrays)
    print("ring ran", flush=True)
    (Path(folder) / str(jax.process_index())).touch()
    if jax.process_index() == jax.process_count() - 1:
        while len(list(Path(folder).iterdir())) < jax.process_count():
            time.sleep(0.01)
        os._exit(3)
    ring.found(arrays)
    print("ring ran again", flush=True)


def verdicts(silent=""):
    """Prints the verdicts of all processes about kernels; each finds its own number wrong.

    A ``silent`` second process tells nothing.
    """
    import json

    import jax
    from burst_attention import _confirmed

    own = {"attention": f"wrong on {jax.process_index()}"}
    _confirmed.PATIENCE_MS = 3_000
    if silent and jax.process_index() == 1:
        time.sleep(6)
    else:
        print(json.dumps(_confirmed._of_all_processes([own])[0]), flush=True)


def pool(folder):
    """Prefills and decodes with caches on the second half of each process's devices.

    The first process writes the results. A pool of the first process alone is an error.
    """
    import burst_attention as ba
    import jax
    import numpy as np
    from several_cases import PoolProblem

    case = PoolProblem(jax.device_count())
    found = case.found(case.arrays())
    if jax.process_index() == 0:
        np.savez(Path(folder) / "pool.npz", **found)
    first = [x for x in jax.devices() if x.process_index == 0]
    try:
        case.found(case.arrays(), ba.CachePool(first[len(first) // 2 :]))
    except NotImplementedError as error:
        print(error, flush=True)


if __name__ == "__main__":
    rank, processes, port = map(int, sys.argv[1:4])
    import jax

    jax.distributed.initialize(
        f"localhost:{port}", processes, rank, heartbeat_timeout_seconds=HEARTBEAT_SECONDS
    )
    {"solve": solve, "die": die, "verdicts": verdicts, "pool": pool}[sys.argv[4]](*sys.argv[5:])
