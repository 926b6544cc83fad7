"""``python -m burst_attention check``: are the GPU kernels right on this machine?

Each family of kernels computes small problems on each kind of GPU, in a process of its own with a
limit on its time, and plain JAX computes the same on a CPU device. The verdicts go into the user's
cache, where `_confirmed` reads them. Wrong numbers, kernels that hang or fault and images that the
driver refuses refute a family. After any other failure the family is not checked, and an earlier
verdict stays.
"""

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import time
from typing import Any, BinaryIO, cast

from burst_attention import _confirmed
from burst_attention._cli import checks_of_kernels
from burst_attention._cli.checks_of_kernels import LAUNCHED
from burst_attention._confirmed import CONFIRMED, Verdicts

SECONDS = 60.0
"""For all kinds of GPU together. A family takes at most half of it."""
HANG_S = 5.0
"""How long a child waits for the GPU, once all is compiled, before kernels count as hanging."""
DAY = 86_400
WIDTH = 18
OUTCOMES = {"confirmed": CONFIRMED, "wrong": "", "absent": "not here: ", "error": "not checked: "}
"""What the command prints of each outcome before its reason."""


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of ``python -m burst_attention``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "check",
        help="check the GPU kernels on this machine, in up to a minute",
        description="Checks the GPU kernels on this machine against plain JAX, and keeps what it "
        "finds. Exit code 0: all are confirmed; 1: some are refuted; 2: some could not be checked.",
    )
    parser.add_argument("--seconds", type=_seconds, default=SECONDS, help="limit; default: 60")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def _seconds(text: str) -> float:
    """Returns a time of at least 1 s and at most a day."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if 1 <= seconds <= DAY:
        return seconds
    raise argparse.ArgumentTypeError(f"expected seconds from 1 to {DAY}, got {text!r}")


def run(flags: argparse.Namespace) -> int:
    """Carries the command out."""
    if flags.child:
        question, told = flags.child
        _answer(json.loads(question), int(told))
        return 0
    end = time.monotonic() + flags.seconds
    found = _ask({"ask": "kinds"}, flags.seconds / 2)
    if "kinds" not in found:
        print(f"there is nothing to check: {next(iter(found.values()))}")
        return 2
    outcomes = set()
    for kind, index in found["kinds"].items():
        verdicts: Verdicts = {}
        for family in checks_of_kernels.FAMILIES:
            left = min(end - time.monotonic(), flags.seconds / 2)
            question = {"ask": "family", "family": family, "gpu": index}
            said = _ask(question, left) if left > 1 else {"error": "no time was left"}
            outcome, words = next(iter(said.items()), ("confirmed", ""))
            outcomes.add(outcome)
            print(f"{kind}: {family:{WIDTH}}{OUTCOMES[outcome]}{words}", flush=True)
            if outcome in ("confirmed", "wrong"):
                verdicts[family] = words or CONFIRMED
        if verdicts:
            _keep(kind, verdicts)
    return 1 if "wrong" in outcomes else 2 if "error" in outcomes else 0


def _keep(kind: str, verdicts: Verdicts) -> None:
    try:
        print(f"kept in {_confirmed.write(kind, verdicts)}")
    except OSError as error:
        print(f"not kept, so programs will ask for this check again: {error}")


def _answer(question: dict[str, Any], told: int) -> None:
    """Answers the parent, as lines of JSON in a file that it has opened."""

    def tell(what: object) -> None:
        os.write(told, f"{json.dumps(what)}\n".encode())

    # Processes that outlive the child don't get the file.
    os.set_inheritable(told, False)
    tell(
        {"answer": checks_of_kernels.answer(question, lambda mark: tell({mark: time.monotonic()}))}
    )


def _ask(question: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Returns the answer of a child process, or the ``error`` that kept it from answering.

    A child that has waited for the GPU alone for `HANG_S` says that kernels hang. A busy machine
    can keep it from starting or compiling in time, but not a GPU from such small problems.
    """
    # The reference runs on a CPU device. Children must not keep memory from other programs.
    platforms = os.environ.get("JAX_PLATFORMS") or "cuda"
    settings = {
        "JAX_PLATFORMS": platforms if "cpu" in platforms else f"{platforms},cpu",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        _confirmed.VARIABLE: "ignore",
    }
    # Files in memory take what a child writes at any time, and have an end when it is gone.
    with _memory("told") as told, _memory("errors") as errors:
        name = str(told.fileno())
        command = [sys.executable, "-m", "burst_attention", "check"]
        child = subprocess.Popen(
            [*command, "--child", json.dumps(question), name],
            env=os.environ | settings,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=[told.fileno()],
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(limit_s)
        finally:
            has_ended, end = child.returncode is not None, time.monotonic()
            child.kill()
            child.wait()
        last: dict[str, Any] = json.loads((_lines(told) or ["{}"])[-1])
        if "answer" in last:
            return cast(dict[str, Any], last["answer"])
        if has_ended:
            said = _lines(errors) or ["it said nothing"]
            return {"error": f"exit code {child.returncode}: {said[-1][:200]}"}
        waited = end - last.get(LAUNCHED, end)
        words = f"no answer within {limit_s:.0f} s, of which it waited {waited:.0f} s for the GPU"
        return {"wrong" if waited >= HANG_S else "error": words}


def _memory(name: str) -> BinaryIO:
    """Returns a file in memory."""
    return open(os.memfd_create(name), "r+b", buffering=0)


def _lines(file: BinaryIO) -> list[str]:
    """Returns the lines with words in a file."""
    file.seek(0)
    text = file.read().decode(errors="replace")
    return [line for line in text.splitlines() if line.strip()]
