"""The worker's half of session.py: items from stdin, one line of JSON each, answers to stdout."""

import json
import os
import subprocess
import traceback
from collections.abc import Callable
from importlib import metadata
from typing import Any, TextIO

from .library import AbsentError

SMI = "--query-gpu=name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit"


def answer(call: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the `result` of the call, or the reason without one: `absent` or `error`."""
    try:
        return {"result": call(**arguments)}
    except AbsentError as reason:
        return {"absent": str(reason)}
    except Exception as error:  # any error: the next item still runs
        where = traceback.format_exc(limit=-3)
        return {"error": f"{type(error).__name__}: {error}", "trace": where}


def serve(
    work: Any,
    items: TextIO,
    answers: TextIO,
    missing: Callable[[], str | None],
    context_is_lost: Callable[[], str | None],
) -> None:
    """Answers items until they end or the context is lost."""

    def tell(what: dict[str, Any]) -> None:
        print(json.dumps(what), file=answers, flush=True)

    tell({"missing": missing()})
    for line in items:
        item = json.loads(line)
        told = answer(getattr(work, item.pop("part")), item)
        lost = context_is_lost()
        if lost is not None:
            told = {"error": f"lost the GPU: {told.get('error', lost)}", "lost": True}
        tell(told)
        if lost is not None:
            return


def own_output() -> TextIO:
    """Reserves stdout for answers: all other output to stdout now goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def nvidia_smi() -> str:
    """Returns name, driver, clocks and power, or why they are unknown."""
    try:
        return _asked(SMI, "noheader")
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {error}"


def clock() -> dict[str, float] | None:
    """Returns MHz of the first GPU's multiprocessors and its power in W, or None if unknown."""
    try:
        told = _asked("--query-gpu=clocks.sm,power.draw", "noheader,nounits")
        mhz, watts = map(float, told.split("\n")[0].split(","))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return {"sm_mhz": mhz, "power_w": watts}


def _asked(question: str, form: str) -> str:
    """Returns what nvidia-smi answers."""
    command = ["nvidia-smi", question, f"--format=csv,{form}"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    return ran.stdout.strip()


def package(name: str) -> str | None:
    """Returns the version of an installed package, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
