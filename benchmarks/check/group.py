"""Several processes that share one GPU or have one each, and start, answer and end together."""

import os
import socket
import subprocess
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from gpu.session import START_S, LostError, Worker

GRACE_S = 5.0
"""Seconds for the rest of the processes after a failure, which they may wait for for ever."""
EACH = "a GPU each"
METHODS: dict[str, dict[str, str]] = {
    EACH: {},
    "NCCL_HOSTID": {"NCCL_HOSTID": "burst-attention-{rank}", "NCCL_NET": "Socket"},
    "NCCL_MULTI_RANK_GPU_ENABLE": {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"},
}
"""Settings of NCCL for each method. Ranks with a GPU each need none. To share a GPU, each rank
pretends to be on a host of its own and talks over sockets. From NCCL 2.30 on, ranks may share a
GPU, with few blocks each."""


class Group:
    """Processes with an environment each. `lost` is true when one is lost; `close` ends all."""

    def __init__(self, command: list[str], environments: list[dict[str, str]]):
        self._workers: list[Worker] = []
        self.lost = False
        try:
            for environment in environments:
                self._workers.append(Worker(command, environment))
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Waits for all processes, or raises `LostError`."""
        end = time.monotonic() + START_S
        for rank, worker in enumerate(self._workers):
            missing = worker.hear(max(1.0, end - time.monotonic()))["missing"]
            if missing is not None:
                raise LostError(f"rank {rank}: {missing}")

    def ask(self, items: list[dict[str, Any]], limit_s: float) -> list[dict[str, Any]]:
        """Returns the answer of each process; after a failure, kills processes that hang."""
        with ThreadPoolExecutor(len(items)) as pool:
            asked = [
                pool.submit(_ask, worker, item, limit_s)
                for worker, item in zip(self._workers, items, strict=True)
            ]
            self._follow(asked)
            answers = [future.result() for future in asked]
        self.lost |= any(answer.get("lost", False) for answer in answers)
        return answers

    def close(self) -> None:
        """Ends the processes."""
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.end()
        self._workers = []

    def _follow(self, asked: list[Future[dict[str, Any]]]) -> None:
        pending = set(asked)
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            if any("result" not in future.result() for future in done):
                _, stuck = wait(pending, GRACE_S)
                for future in stuck:
                    self._workers[asked.index(future)].kill()
                return


def _ask(worker: Worker, item: dict[str, Any], limit_s: float) -> dict[str, Any]:
    try:
        return worker.ask(item, limit_s)
    except LostError as error:
        return {"error": str(error), "lost": True}


def failures(answers: list[dict[str, Any]]) -> str:
    """Returns the errors of the failed ranks, with lost processes at the end."""
    said = [
        (bool(answer.get("lost")), f"rank {rank}: {answer.get('error', answer.get('absent'))}")
        for rank, answer in enumerate(answers)
        if "result" not in answer
    ]
    return "; ".join(text for _, text in sorted(said))


def environments(method: str, count: int, extra: dict[str, str]) -> list[dict[str, str]]:
    """Returns the environment of each process; the caller's settings of NCCL's network stay."""
    common = first_gpu() | {"NCCL_DEBUG": "WARN"}
    if method != EACH:
        common |= {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.8 / count:.2f}"}
    kept = {n: os.environ[n] for n in ("NCCL_NET", "NCCL_DEBUG") if n in os.environ}
    ranks = [{n: x.format(rank=r) for n, x in METHODS[method].items()} for r in range(count)]
    if method == EACH:
        ranks = [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus()[:count]]
    return [common | rank | kept | extra for rank in ranks]


def gpus() -> list[str]:
    """Returns the usable GPUs, as CUDA_VISIBLE_DEVICES names them; always the first one."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        found = [name for name in named.split(",") if name]
    else:
        found = [str(number) for number in range(_installed())]
    return found or ["0"]


def _installed() -> int:
    try:
        asked = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20.0)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in asked.stdout.splitlines())


def first_gpu() -> dict[str, str]:
    """Returns the setting that restricts a process to one GPU."""
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}


def form(
    command: list[str], method: str, count: int, extra: dict[str, str], limit_s: float
) -> Group:
    """Returns processes that have found each other; raises `LostError`."""
    group = Group(command, environments(method, count, extra))
    try:
        group.start()
        address = f"127.0.0.1:{_free_port()}"
        joins = [
            {"part": "join", "address": address, "count": count, "rank": rank}
            for rank in range(count)
        ]
        answers = group.ask(joins, limit_s)
        if failures(answers):
            raise LostError(failures(answers))
    except BaseException:
        group.close()
        raise
    return group


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
