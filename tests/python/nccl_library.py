"""Whether a file is a library of NCCL that lets several ranks share a GPU.

``python nccl_library.py FILE`` prints its version, or what was expected, with exit code 1.
"""

import subprocess
import sys
from functools import cache
from pathlib import Path

OLDEST = (2, 30)
"""The first version that lets several ranks of a host share a GPU."""
READ = """
import ctypes, sys
number = ctypes.c_int()
assert ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(number)) == 0
print(number.value)
"""
"""Prints the version of a library, as NCCL counts: 23007 is 2.30.7. It runs in a process of its
own, since a library stays loaded."""


class UnfitError(Exception):
    """The file is no NCCL, or one that is too old; the message says what was expected."""


@cache
def check(file, oldest=OLDEST):
    """Returns the version of a library of NCCL."""
    expected = f"expected a library of NCCL from {'.'.join(map(str, oldest))} on"
    if not Path(file).is_file():
        raise UnfitError(f"{expected}; there is no file {file}")
    command = [sys.executable, "-c", READ, str(Path(file).resolve())]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        words = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
        raise UnfitError(f"{expected}; {file} can't say its version: {words}")
    # Before 2.9 the minor version had one digit: 2804 is 2.8.4.
    minor_digits = 100 if int(ran.stdout) >= 10_000 else 10
    version = (int(ran.stdout) // (100 * minor_digits),)
    version += divmod(int(ran.stdout) % (100 * minor_digits), 100)
    if version < oldest:
        raise UnfitError(f"{expected}; {file} is {'.'.join(map(str, version))}")
    return version


def main():
    """Prints the version of a file."""
    try:
        print("NCCL", ".".join(map(str, check(*sys.argv[1:]))))
    except UnfitError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
