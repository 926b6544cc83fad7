"""Rules for reading environment variables: those of the package, and one of XLA."""

import contextlib
import functools
import os
import shlex
from pathlib import Path

DETERMINISM = ("--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops")
"""XLA's flags that ask for the same bits in every run on GPUs."""


def choice(variable: str, *values: str) -> str | None:
    """Returns the value of a variable, or None where it is unset or empty.

    Raises:
      ValueError: for another value.
    """
    value = os.environ.get(variable, "").strip()
    if value and value not in values:
        expected = " or ".join(map(repr, values))
        raise ValueError(f"{variable} must be {expected}, or unset for the default, got {value!r}")
    return value or None


@functools.cache
def asks_for_determinism() -> bool:
    """Whether ``XLA_FLAGS`` has a flag of `DETERMINISM`, when this process first asks.

    XLA too reads the variable once in a process. It holds flags, or names a file that does.
    """
    text = os.environ.get("XLA_FLAGS", "").strip()
    if not text.startswith("--"):
        file, text = text, ""
        with contextlib.suppress(OSError):
            text = Path(file).read_text(encoding="utf-8", errors="replace")
    try:
        flags = shlex.split(text)
    except ValueError:  # a quotation without an end
        flags = text.split()
    asked = dict.fromkeys(DETERMINISM, False)
    for name, _, value in (flag.partition("=") for flag in flags):
        if name in asked:
            # Of a flag that is given twice, the last value holds.
            asked[name] = value.lower() not in ("false", "0")
    return any(asked.values())
