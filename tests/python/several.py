"""The program of each of several processes: ``python several.py RANK PROCESSES PORT WORK ARGS``.

`start` starts all processes of a run, each with its devices.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import platforms

HEARTBEAT_SECONDS = 5
"""The time after which the other processes take a silent one for dead."""


def start(work, processes, devices, *arguments):
    """Starts the processes of a run of ``work``, a function of this file; `outputs` ends them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    mail = Path(tempfile.mkdtemp(prefix="mail-"))
    command = [sys.executable, str(Path(__file__)), "{}", str(processes), str(port), work]
    return [
        subprocess.Popen(
            [part.format(rank) for part in command] + list(map(str, arguments)),
            env=os.environ | platforms.of_process(rank, devices, mail),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(processes)
    ]


def outputs(started, timeout):
    """Returns each process's output once all processes have ended, and kills any that remain."""
    try:
        return [process.communicate(timeout=timeout)[0] for process in started]
    finally:
        for process in started:
            process.kill()


def solve(folder):
    """Solves every problem of the list; the first process writes the results."""
    import jax
    import numpy as np
    from several_cases import cases

    for number, case in enumerate(cases(jax.device_count())):
        found = case.found(case.arrays())
        if jax.process_index() == 0:
            np.savez(Path(folder) / f"{number}.npz", **found)


def die(folder):
    """Runs a ring over all processes, then another one that the last process does not live to.

    The last process waits for a file of each process before it ends, since some process may still
    be in the first ring.
    """
    import jax
    from several_cases import cases

    ring = cases(jax.device_count())[0]
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
