"""``python -m burst_attention check``: are the GPU kernels right on this machine?

Each family of kernels computes small problems on each kind of GPU, in a process of its own with a
limit on its time, and plain JAX computes the same on a CPU device. The verdicts go into the user's
cache, where `_confirmed` reads them.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

from burst_attention import _confirmed
from burst_attention._cli import checks_of_kernels
from burst_attention._confirmed import CONFIRMED, Family, Verdicts

SECONDS = 60.0
"""For all kinds of GPU together. A family that takes half of it counts as hanging."""
WIDTH = 18


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of ``python -m burst_attention``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "check",
        help="check the GPU kernels on this machine, in up to a minute",
        description="Checks the GPU kernels on this machine against plain JAX, and keeps what it "
        "finds. Exit code 0: all are confirmed; 1: one is refuted; 2: there is nothing to check.",
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit; default: 60")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """Carries the command out."""
    if flags.child:
        print(json.dumps(checks_of_kernels.answer(json.loads(flags.child))))
        return 0
    end = time.monotonic() + flags.seconds
    found = _ask({"ask": "kinds"}, flags.seconds / 2)
    if "error" in found:
        print(f"there is nothing to check: {found['error']}")
        return 2
    refuted = False
    for kind, index in found["kinds"].items():
        verdicts: Verdicts = {}
        for family in checks_of_kernels.FAMILIES:
            left = min(end - time.monotonic(), flags.seconds / 2)
            verdict, is_there = _verdict(family, index, left) if left > 1 else (None, False)
            if verdict is not None and is_there:
                verdicts[family] = verdict
            print(f"{kind}: {family:{WIDTH}}{verdict or 'not checked: no time was left'}")
        refuted |= any(verdict != CONFIRMED for verdict in verdicts.values())
        _keep(kind, verdicts)
    return 1 if refuted else 0


def _verdict(family: Family, index: int, limit_s: float) -> tuple[str, bool]:
    """Returns ``confirmed``, or what was wrong with a family of kernels on a GPU.

    The second value says whether the family is there to be checked.
    """
    found = _ask({"ask": "family", "family": family, "gpu": index}, limit_s)
    if "absent" in found:
        return f"not here: {found['absent']}", False
    return str(found.get("error", CONFIRMED)), True


def _keep(kind: str, verdicts: Verdicts) -> None:
    try:
        print(f"kept in {_confirmed.write(kind, verdicts)}")
    except OSError as error:
        print(f"not kept, so programs will ask for this check again: {error}")


def _ask(question: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Returns the answer of a child process, or the ``error`` that kept it from answering."""
    command = [sys.executable, "-m", "burst_attention", "check", "--child", json.dumps(question)]
    # The reference runs on a CPU device. Children must not keep memory from other programs.
    platforms = os.environ.get("JAX_PLATFORMS", "cuda")
    settings = {
        "JAX_PLATFORMS": platforms if "cpu" in platforms else f"{platforms},cpu",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        _confirmed.VARIABLE: "ignore",
    }
    try:
        ran = subprocess.run(
            command,
            env=os.environ | settings,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {limit_s:.0f} s"}
    if ran.returncode == 0:
        answer: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
        return answer
    said = [line for line in ran.stderr.splitlines() if line.strip()]
    return {"error": f"exit code {ran.returncode}: {said[-1][:200] if said else 'it said nothing'}"}
