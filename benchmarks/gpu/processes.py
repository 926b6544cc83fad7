"""Runs the problems of several processes over NCCL: `python -m gpu.processes 2 direct`.

The problems, their references and their bounds are those of the tests (several_cases.py). Processes
go from problem to problem; after one that fails or does not end in time, new processes go on. Ways:

  sockets  the processes share a GPU, and each seems to be on a host of its own; any NCCL
  direct   the processes share a GPU, and messages go through its memory; NCCL from 2.30 on: the
           library that BURST_ATTENTION_TEST_NCCL names, or that of the bundle, or the installed one
  apart    each process has a GPU of its own

If processes do not reach each other directly, other settings of NCCL are tried in turn. The last
line says which worked. Exit code 0: all passed; 1: something failed; 2: nothing could run here.
"""

import argparse
import ctypes
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

IN_BUNDLE = Path(__file__).parents[2] / "nccl" / "libnccl.so.2"
WAYS = ("sockets", "direct", "apart")
LIMIT_S = 60.0
"""The longest time of an item, the start of its processes included."""
ENOUGH_S = 5.0
"""An item begins if so much time is left."""
SETTINGS: tuple[dict[str, str], ...] = (
    {},
    {"NCCL_CUMEM_ENABLE": "0"},
    {"NCCL_P2P_DISABLE": "1"},
    {"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_HOST_ENABLE": "0"},
)
"""What is tried in turn until processes reach each other directly: the GPU's memory by descriptors
of files, the same by CUDA's own handles, then the host's memory by either."""
PROBES = 2
"""The first problems, which tell whether a setting works: XLA's own messages, and a ring."""


class UnusableError(Exception):
    """Nothing can run here; the message says what was expected and found."""


def ways(devices: int) -> list[tuple[int, str]]:
    """Returns numbers of processes, each with its way, for a host with a number of GPUs."""
    if devices == 1:
        return [(2, "sockets"), (2, "direct"), (4, "sockets"), (4, "direct")]
    return [(count, "apart") for count in (2, 4) if count <= devices]


class Items:
    """Runs items until the time is up, and keeps their verdicts."""

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds
        self.verdicts: dict[str, bool | None] = {}

    def run(self, name: str, call: Callable[[float], object]) -> bool:
        """Runs ``call`` with a limit in seconds and prints a line; returns whether it passed."""
        began = time.monotonic()
        left, verdict, words = self._end - began, None, "left out, the time was up"
        if left >= ENOUGH_S:
            try:
                call(min(LIMIT_S, left))
                verdict, words = True, "passed"
            except Exception as error:  # processes that failed, or a wrong result
                verdict = False
                words = f"FAILED, {type(error).__name__}: {' '.join(str(error).split())}"
        self.verdicts[name] = verdict
        print(f"{name}: {words}, {time.monotonic() - began:.1f} s", flush=True)
        return verdict is True


def run_all(
    items: Items, processes: int, settings: dict[str, str], is_quick: bool, only: str
) -> str | None:
    """Runs all items; returns how messages went, or None if the first problems failed.

    After the first problems it runs those whose names have the words of ``only``.
    """
    import several  # type: ignore[import-not-found]
    from several_cases import assert_right, cases  # type: ignore[import-not-found]

    problems = cases(processes)
    with several.Group(processes, 1, settings) as group:

        def solve(name: str) -> bool:
            def right(limit_s: float) -> None:
                assert_right(problems[name], group.solve(name, limit_s))

            return items.run(name, right)

        names = list(problems)
        if not all(map(solve, names[:PROBES])):
            return None
        carried: str = group.carried()
        for name in names[PROBES:]:
            if not is_quick and only in name:
                solve(name)
        items.run("end of the processes", group.end)

    def death(limit_s: float) -> None:
        several.assert_death_ends_all(processes, 1, limit_s, settings)

    if not is_quick:
        items.run("a rank that dies", death)
    return carried


def run_way(items: Items, processes: int, way: str, is_quick: bool, only: str = "") -> str:
    """Runs all items with the first settings that work; returns how messages went.

    If none works, the failures are those of the last settings.
    """
    for settings in SETTINGS if way == "direct" else SETTINGS[:1]:
        items.verdicts.clear()
        words = " ".join(f"{name}={value}" for name, value in settings.items())
        if words:
            print(f"with {words}:", flush=True)
        carried = run_all(items, processes, settings, is_quick, only)
        if carried is not None:
            return " ".join(filter(None, [carried, words]))
    return "no settings of NCCL worked" if way == "direct" else ""


class Place(ctypes.Structure):
    """Where a function lies: `Dl_info` of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def installed() -> str:
    """Returns the file of the NCCL that JAX has loaded."""
    import jax

    try:
        devices = jax.devices()
    except RuntimeError as error:
        raise UnusableError(f"expected an NVIDIA GPU that JAX can use: {error}") from error
    if devices[0].platform != "gpu":
        found = devices[0].device_kind
        raise UnusableError(f"expected an NVIDIA GPU that JAX can use, found {found}")
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        package = "the package nvidia-nccl-cu13, which comes with jax[cuda13]"
        raise UnusableError(f"expected {package}: {error}") from error
    place = Place()
    function = ctypes.cast(library.ncclGetVersion, ctypes.c_void_p)
    assert ctypes.CDLL(None).dladdr(function, ctypes.byref(place))
    return os.fsdecode(place.file)


def prepare(way: str) -> None:
    """Sets the variable that lets processes share a GPU directly, or removes it."""
    import nccl_library  # type: ignore[import-not-found]
    import platforms  # type: ignore[import-not-found]

    library, given = installed(), os.environ.pop(platforms.NCCL, None)
    if way == "direct":
        library = given or (str(IN_BUNDLE) if IN_BUNDLE.exists() else library)
        try:
            nccl_library.check(library)
        except nccl_library.UnfitError as error:
            raise UnusableError(f"{error}; `make gpu-bundle NCCL=FILE` takes one along") from error
        os.environ[platforms.NCCL] = library


def main() -> int:
    """Runs the items of a way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("processes", type=int, choices=(2, 4))
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--seconds", type=float, default=600.0, help="for all items")
    parser.add_argument("--quick", action="store_true", help="the first items alone")
    parser.add_argument("--only", default="", help="other items whose names have these words")
    parser.add_argument("--platform", default="cuda", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    import platforms

    platforms.choose(flags.platform, checked=False)
    items = Items(flags.seconds)
    try:
        prepare(flags.way)
    except UnusableError as error:
        print(error)
        return 2
    carried = run_way(items, flags.processes, flags.way, flags.quick, flags.only)
    verdicts = list(items.verdicts.values())
    told = [f"{verdicts.count(True)} of {len(verdicts)} items passed", carried]
    print(", ".join(filter(None, told)))
    if False in verdicts:
        return 1
    return 0 if True in verdicts else 2


if __name__ == "__main__":
    sys.exit(main())
