"""Fails one call of the driver or of NCCL on one device of the stand-in. Reports what a user sees.

    failures.py one RING DEVICES STAGE PASS FAULT   runs one scenario and prints a line of JSON
    failures.py all [WORD ...]                      runs the scenarios whose names hold all words

RING is a schedule, `rings` for two rings side by side, `zigzag` for a layout of that name, or
`cudnn` for a ring of that library. STAGE
is `initialize`, where the fault meets the first run, or `again` or `execute`, where it meets the
second run. FAULT is a fault as STANDIN_FAIL takes it, without the device: that is the last one, and
in `zigzag` the first one, which packs rows. The environment must be that of the stand-in.
"""

import json
import os
import subprocess
import sys
import threading
import time

LIMIT = 30.0
"""Seconds after which a run counts as hung."""
XLA_LIMIT = 50.0
"""The same where XLA's host threads wait for each other. XLA ends the process after 40 seconds."""
RANK_TIMEOUT = 8.0
"""Seconds for which the library lets ranks wait for a rank that failed."""

CODES = {
    "cuStreamGetCtx": 1,
    "cuCtxPushCurrent": 1,
    "cuCtxPopCurrent": 1,
    "cuCtxGetDevice": 1,
    "cuDeviceGetAttribute": 1,
    "cuMemHostAlloc": 2,
    "cuStreamCreateWithPriority": 2,
    "cuEventCreate": 2,
    "cuModuleLoadData": 2,
    "cuModuleGetFunction": 1,
    "cuFuncLoad": 2,
    "cuStreamSynchronize": 719,
    "cuLaunchKernel": 719,
    "cuMemcpy2DAsync": 1,
    "cuEventRecord": 1,
    "cuStreamWaitEvent": 1,
    "execute": 700,
    "ncclCommUserRank": 2,
    "ncclCommCount": 2,
    "ncclCommGetAsyncError": 2,
    "ncclGroupStart": 2,
    "ncclSend": 2,
    "ncclRecv": 2,
    "ncclGroupEnd": 2,
}
"""The code with which each call fails."""

CONTEXT = ["cuStreamGetCtx", "cuCtxPushCurrent", "cuCtxPopCurrent"]
QUESTIONS = ["ncclCommUserRank", "ncclCommCount", "ncclCommGetAsyncError"]
MESSAGES = ["ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd"]
OBJECTS = [
    "cuMemHostAlloc",
    "cuCtxGetDevice",
    "cuDeviceGetAttribute",
    "cuStreamCreateWithPriority",
    "cuEventCreate",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuFuncLoad",
    "cuStreamSynchronize",
]
COMMANDS = ["cuLaunchKernel", "cuEventRecord", "cuStreamWaitEvent", "execute"]
OURS = ["cuCtxGetDevice", "cuDeviceGetAttribute", "cuFuncLoad", "cuStreamGetCtx", "cuLaunchKernel"]
"""Calls that only this library makes, also where XLA has kernels and exchanges of its own."""

STAGES = {
    "initialize": OBJECTS + CONTEXT + QUESTIONS + MESSAGES,
    "again": CONTEXT + QUESTIONS,
    "execute": COMMANDS + CONTEXT + QUESTIONS + MESSAGES,
}
"""The calls that fail in the first initialize stage, in a later one and in the execute stage."""


def scenarios():
    """Yields the arguments of all scenarios: ring, devices, stage, pass, fault."""
    for ring, devices, which in (
        ("ring", 2, "forward"),
        ("ring", 2, "backward"),
        ("ring", 4, "backward"),
        ("rings", 4, "forward"),
        ("ulysses", 2, "forward"),
    ):
        for stage, calls in STAGES.items():
            for call in calls:
                if ring == "ulysses" and call not in OURS:
                    continue
                yield ring, devices, stage, which, fault(call, stage, which)
                if call in MESSAGES:
                    yield ring, devices, stage, which, fault(call, stage, which, nth=0)
    yield "zigzag", 2, "execute", "backward", "call=cuMemcpy2DAsync code=1"


def nths(call, stage, which):
    """Returns the number of our call among those of its name on the device.

    XLA makes the first call of some names. The backward program makes two calls in each stage.
    """
    if stage == "initialize":
        return 2 if call in ("cuEventCreate", "ncclCommGetAsyncError") else 1
    before = 1 if which == "forward" else 2
    if call in CONTEXT + QUESTIONS:
        return 1 if stage == "again" else before + before
    return 1 if which == "forward" or call in ("cuLaunchKernel", "execute") else 4


def fault(call, stage, which, nth=None):
    """Returns the text of a fault that meets our calls only."""
    about = {"cuMemHostAlloc": "131072", "cuStreamCreateWithPriority": "-5"}.get(call)
    if call in ("cuLaunchKernel", "execute"):
        about = "attention_fwd" if which == "forward" else "attention_bwd"
    nth = nths(call, stage, which) if nth is None else nth
    words = f"call={call} code={CODES[call]} nth={nth}"
    return words if about is None else f"{words} about={about}"


def one(ring, devices, stage, which, fault):
    """Runs a scenario in this process, one run after the other, and prints what each run raised."""
    import ctypes

    import burst_attention as ba
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    stand_in = ctypes.CDLL(os.environ["STANDIN"] + "/lib/libstandin.so")
    shape = (2, devices // 2) if ring == "rings" else (1, devices)
    mesh = Mesh(np.array(jax.devices()).reshape(shape), ("data", "context"))
    spec = PartitionSpec("data", "context")
    size, heads = shape[1], 2 * shape[1]

    def put(dtype, *dims):
        return jax.device_put(np.ones(dims, dtype), NamedSharding(mesh, spec))

    def attend(q):
        options = {"schedule": "ulysses" if ring == "ulysses" else "ring"}
        if ring == "cudnn":
            options |= {"kernels": "cudnn", "backward_order": "any", "backward": "keys"}
        if ring == "zigzag":
            options |= {"layout": "zigzag", "backward": "queries", "local_window_size": (200, 0)}
        out = ba.attention(
            q, q, q, axis_name="context", is_causal=True, return_residual=ring != "cudnn", **options
        )
        # cuDNN computes no gradient of lse.
        return (out, out[..., 0].astype(np.float32)) if ring == "cudnn" else out

    def shard(function):
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec))

    q = put(jnp.bfloat16, shape[0], 128 * size, heads, 64)
    dlse = put(np.float32, shape[0], 128 * size, heads)
    if which == "forward":
        program, operands = shard(attend), (q,)
    else:
        program = shard(lambda q, dout, dlse: jax.vjp(attend, q)[1]((dout, dlse)))
        operands = (q, q, dlse)
    compiled = program.lower(*operands).compile()
    if stage != "initialize":
        jax.block_until_ready(compiled(*operands))
    device = 0 if ring == "zigzag" else devices - 1
    stand_in.standin_fail(f"{fault} device={device}".encode())
    for run in ("run", "next run"):
        print(f"{run} begins", flush=True)
        try:
            jax.block_until_ready(compiled(*operands))
            print(f"{run} ends", flush=True)
        except Exception as error:
            print(f"{run} raises {' '.join(str(error).split())}", flush=True)
        # The fault may stay; the next run shows whether a single failure leaves anything behind.
        stand_in.standin_fail(b"")
    os._exit(0)


def report(ring, devices, stage, which, fault):
    """Runs a scenario in a child process. Returns what a user sees."""
    words = [sys.executable, __file__, "one", ring, str(devices), stage, which, fault]
    environment = os.environ | {
        "STANDIN_DEVICES": str(devices),
        "BURST_ATTENTION_RANK_TIMEOUT_S": str(RANK_TIMEOUT),
    }
    child = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    began, said, told, complaints = [], {}, [], []

    def read_out():
        for line in child.stdout:
            for run in ("next run", "run"):
                if line.startswith(run + " "):
                    if line.endswith("begins\n"):
                        began.append(time.monotonic())
                    else:
                        seconds = time.monotonic() - began[-1]
                        said[run] = (round(seconds, 1), line.removeprefix(run).strip())
                    break

    def read_err():
        for line in child.stderr:
            if line.startswith("burst_attention:"):
                told.append((time.monotonic(), line.strip()))
            elif line.startswith("stand-in:") and "still waits" not in line:
                complaints.append(line.strip())

    readers = [threading.Thread(target=read, daemon=True) for read in (read_out, read_err)]
    for reader in readers:
        reader.start()
    start, limit = time.monotonic(), XLA_LIMIT if ring == "ulysses" else LIMIT
    while child.poll() is None and time.monotonic() - (began[-1] if began else start + 60) < limit:
        time.sleep(0.05)
    is_hung = child.poll() is None
    child.kill()
    child.wait()
    for reader in readers:
        reader.join(5)
    child.stdout.close()
    child.stderr.close()
    first = told[0][0] - began[0] if told and began else None
    return {
        "scenario": [ring, devices, stage, which, fault],
        "told": [line for _, line in told],
        "seconds": None if first is None else round(first, 1),
        "run": said.get("run"),
        "next": said.get("next run"),
        "hung": is_hung,
        "complaints": complaints,
        "code": child.returncode,
    }


def main():
    """Reads the arguments."""
    command, *rest = sys.argv[1:]
    if command == "one":
        ring, devices, stage, which, fault = rest
        one(ring, int(devices), stage, which, fault)
    for scenario in scenarios():
        if all(word in map(str, scenario) or word in scenario[-1] for word in rest):
            print(json.dumps(report(*scenario)), flush=True)


if __name__ == "__main__":
    main()
