"""Which GPU kernels this machine has confirmed: the record of ``python -m burst_attention check``.

A record holds a verdict for each family of kernels. It is valid for one kind of GPU, driver, set of
images, and version of JAX and of this package. The first call on a GPU reads it:

==============  ====================================================================
confirmed       the kernels compute
refuted         plain JAX computes, with one warning
no verdict      the kernels compute, and one line on stderr says how to check them
==============  ====================================================================

cuDNN's kernels are another family. They compute where a call leaves the choice only if they are
confirmed, on all GPUs of all processes; otherwise this library's own kernels do.

In a program of several processes, each process reads the record of its own host and shares it.
A family that any of them refuted is refuted for all, so that all trace the same program.
"""

import contextlib
import functools
import hashlib
import json
import sys
import warnings
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Literal, TypeAlias, cast

import jax

from burst_attention import _environment, _ffi, _record
from burst_attention._library import LIBRARY
from burst_attention._version import __version__

Family: TypeAlias = Literal[
    "attention", "linear_attention", "delta_rule", "decode_attention", "cudnn"
]
"""Kernels that are confirmed together: a fallback replaces all of them."""
FAMILIES: tuple[Family, ...] = (
    "attention",
    "linear_attention",
    "delta_rule",
    "decode_attention",
)
"""The families of this library's own kernels."""

Verdicts: TypeAlias = dict[Family, str]
"""For each family that was checked ``confirmed``, or what was wrong."""
CONFIRMED = "confirmed"

VARIABLE = "BURST_ATTENTION_CHECK"
COMMAND = "python -m burst_attention check"
PACKAGE = str(Path(__file__).parent)
PATIENCE_MS = 20_000
"""How long a process waits for the verdicts of another. All processes of a program trace the same
functions, so they ask at about the same time."""


def refuted(family: Family, platform: str | None) -> str | None:
    """Returns what was wrong with a family's kernels on this process's GPUs, or None.

    ``platform`` is None where only lowering will tell it. Warns once of a family that plain JAX
    computes instead, and says once how to check GPUs that nobody has checked.
    """
    if platform not in ("cuda", None):
        return None
    refutations, unchecked, _ = _records()
    reason = refutations.get(family)
    if platform == "cuda" or jax.default_backend() == "gpu":
        if reason is not None:
            _warn(family, reason)
        elif unchecked:
            _hint(unchecked)
    return reason


def confirmed(family: Family, platform: str | None) -> bool:
    """Whether a family is confirmed on all GPUs of all processes of a program for GPUs."""
    if platform != "cuda" and (platform is not None or jax.default_backend() != "gpu"):
        return False
    return family in _records()[2]


@functools.cache
def _warn(family: Family, reason: str) -> None:
    warnings.warn(
        f"`{COMMAND}` found the GPU kernels of {family} wrong on this machine ({reason}), so plain "
        "JAX computes it, more slowly. Run the check again after a new driver or a new version; "
        f"{VARIABLE}=ignore takes the kernels all the same",
        skip_file_prefixes=(PACKAGE,),
    )


@functools.cache
def _hint(kinds: tuple[str, ...]) -> None:
    print(
        f"burst_attention: the GPU kernels were not checked on {' and '.join(kinds)}: run "
        f"`{COMMAND}`, which takes up to a minute; {VARIABLE}=ignore silences this line",
        file=sys.stderr,
    )


@functools.cache
def _records() -> tuple[dict[Family, str], tuple[str, ...], frozenset[Family]]:
    """Returns refuted families with their reasons, the kinds of GPU that were not checked, and the
    families that all processes have confirmed."""
    if _environment.choice(VARIABLE, "ignore"):
        return {}, (), frozenset()
    try:
        kinds = {gpu.device_kind for gpu in jax.local_devices(backend="cuda")}
    except RuntimeError:
        # The program is traced for GPUs of another machine, or for none.
        return {}, (), frozenset()
    records = {kind: read(kind) for kind in sorted(kinds)}
    unchecked = tuple(kind for kind, record in records.items() if not set(FAMILIES) <= set(record))
    refutations: dict[Family, str] = {}
    told, are_all = _of_all_processes(list(records.values()))
    for record in told:
        refutations |= {family: said for family, said in record.items() if said != CONFIRMED}
    agreed = {family for family in told[0] if all(x.get(family) == CONFIRMED for x in told)}
    return refutations, unchecked, frozenset(agreed if are_all else ())


def _of_all_processes(own: list[Verdicts]) -> tuple[list[Verdicts], bool]:
    """Returns verdicts, and whether they are those of all processes of the program."""
    if jax.process_count() == 1:
        return own, True
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None:
        return own, False
    key, found = "burst_attention/verdicts", []
    client.key_value_set(f"{key}/{jax.process_index()}", json.dumps(own))
    for process in range(jax.process_count()):
        try:
            found += json.loads(client.blocking_key_value_get(f"{key}/{process}", PATIENCE_MS))
        except jax.errors.JaxRuntimeError:
            # It computes without this package, or something of its own.
            print(
                f"burst_attention: process {process} has not told within {PATIENCE_MS // 1000} s "
                "which GPU kernels it has confirmed; its verdicts are left out",
                file=sys.stderr,
            )
            return own, False
    return found, True


def read(kind: str) -> Verdicts:
    """Returns the valid verdicts about the kernels on a kind of GPU."""
    return cast(Verdicts, _record.read().get(_key(kind), {}))


def write(kind: str, verdicts: Mapping[Family, str]) -> Path:
    """Adds verdicts to the record, keeps those about other families, and returns the file.

    Raises:
      OSError: if no folder for it can be written.
    """
    return _record.write(_key(kind), verdicts)


def _key(kind: str) -> str:
    """Returns all that a verdict depends on, in words."""
    return "; ".join(
        [
            kind,
            f"driver {_driver()}",
            f"images {_images()}",
            f"burst_attention {__version__}",
            f"jax {jax.__version__}",
            f"jaxlib {metadata.version('jaxlib')}",
            f"cuDNN {_cudnn_package()}",
        ]
    )


@functools.cache
def _driver() -> str:
    """Returns the version of the kernel's module, or else the CUDA version of the driver."""
    with contextlib.suppress(OSError):
        return Path("/proc/driver/nvidia/version").read_text().split("\n")[0]
    cuda = cast(dict[str, str], _ffi.describe()["cuda"])
    return cuda["driver"]


def _cudnn_package() -> str:
    """Returns the version of cuDNN's package. The library is loaded only with JAX's devices."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version("nvidia-cudnn-cu13")
    return "of no package"


def cudnn() -> str:
    """Returns the version of the cuDNN that is loaded, or why it can't be used."""
    return cast(dict[str, str], _ffi.describe()["cuda"])["cudnn"]


@functools.cache
def _images() -> str:
    """Returns a hash of the library and of all files of images."""
    files = [LIBRARY, *sorted((LIBRARY.parent / "images").glob("*.safetensors"))]
    whole = hashlib.sha256()
    for file in files:
        with contextlib.suppress(OSError):
            whole.update(file.read_bytes())
    return whole.hexdigest()[:16]
