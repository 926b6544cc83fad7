"""What each of several processes runs: ``python several.py RANK PROCESSES DEVICES PORT WORK ARGS``.

`start` begins all processes of a run, each with its devices.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

HEARTBEAT_SECONDS = 5
"""How long a process may be silent before the others take it for dead."""


def start(work, processes, devices, *arguments):
    """The processes of a run of ``work``, a function of this file; see `outputs`."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        # The last of equal flags counts; the others decide bits of what XLA computes.
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, str(Path(__file__)), "{}", str(processes), str(port), work]
    return [
        subprocess.Popen(
            [part.format(rank) for part in command] + list(map(str, arguments)),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(processes)
    ]


def outputs(started, timeout):
    """What each printed, once all have ended; none outlives this."""
    try:
        return [process.communicate(timeout=timeout)[0] for process in started]
    finally:
        for process in started:
            process.kill()


def solve(folder):
    """Every problem of the list; the first process writes what was found."""
    import jax
    import numpy as np
    from several_cases import CASES

    for number, case in enumerate(CASES):
        found = case.found(case.arrays())
        if jax.process_index() == 0:
            np.savez(Path(folder) / f"{number}.npz", **found)


def die(folder):
    """All take part in one ring; then the last process is gone before the next one."""
    import jax
    from several_cases import CASES

    arrays = CASES[0].arrays()
    CASES[0].found(arrays)
    print("ring ran", flush=True)
    if jax.process_index() == jax.process_count() - 1:
        os._exit(3)
    CASES[0].found(arrays)
    print("ring ran again", flush=True)


if __name__ == "__main__":
    rank, processes, port = map(int, sys.argv[1:4])
    import jax

    jax.distributed.initialize(
        f"localhost:{port}", processes, rank, heartbeat_timeout_seconds=HEARTBEAT_SECONDS
    )
    {"solve": solve, "die": die}[sys.argv[4]](*sys.argv[5:])
