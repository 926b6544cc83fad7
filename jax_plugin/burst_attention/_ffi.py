"""The library: registers its custom calls with XLA and asks it questions."""

import atexit
import ctypes
import errno
import json
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias, TypedDict, cast

import jax
import numpy as np

from burst_attention._library import load
from burst_attention._types import Arrays, ArrayType

Attribute: TypeAlias = bool | str | np.generic | np.ndarray
Attributes: TypeAlias = dict[str, Attribute]

FORWARD = "burst_attention_forward"
BACKWARD = "burst_attention_backward"
LINEAR = {name: f"burst_attention_linear_{name}" for name in ("state", "forward", "backward")}
"""The calls of linear attention on CPU devices."""
MEETING = "burst_attention_linear_meeting"
"""The call on CPU devices in which the ranks of a recurrence wait for each other."""
DELTA = {
    name: f"burst_attention_delta_{name}" for name in ("state", "grad_state", "forward", "backward")
}
"""The calls of the delta rule on CPU devices."""
LINEAR_KERNELS = {name: f"burst_attention_linear_{name}" for name in ("parts", "attend", "pairs")}
"""The calls of linear attention on GPUs."""
DELTA_KERNELS = {
    name: f"burst_attention_delta_{name}" for name in ("inverse", "parts", "grad_parts", "keys")
}
"""The calls of the delta rule on GPUs, besides that of linear attention's outputs."""
DECODE = "burst_attention_decode"
"""The call of decoding on CPU devices."""
DECODE_MERGE = "burst_attention_decode_merge"
"""The call that merges results of decoding on CPU devices, over ranks and other parts of keys."""
DECODE_PAGES = "burst_attention_decode_pages"
"""The call of decoding on GPUs, of units instead of batch entries."""
NO_TRAITS, RECORDED = 0, 1
"""Traits of a call: with `RECORDED`, XLA may record its commands once and replay them."""
STAGES = {
    "cpu": {"instantiate": "instantiate", "execute": "execute"},
    "CUDA": {
        stage: f"cuda_{stage}" for stage in ("instantiate", "prepare", "initialize", "execute")
    },
}
"""For each platform, how the library's function of a stage ends."""


def _register(library: ctypes.CDLL) -> None:
    # At import, so that exported programs and cached executables find their custom calls too.
    targets = [(target, platform) for target in (FORWARD, BACKWARD) for platform in STAGES]
    targets.append((MEETING, "cpu"))
    stages = [(target, platform, tuple(STAGES[platform])) for target, platform in targets]
    of_cpus = (*LINEAR.values(), *DELTA.values(), DECODE, DECODE_MERGE)
    stages += [(target, "cpu", ("execute",)) for target in of_cpus]
    stages += [
        (target, "CUDA", ("initialize", "execute"))
        for target in (*LINEAR_KERNELS.values(), *DELTA_KERNELS.values(), DECODE_PAGES)
    ]
    for target, platform, names in stages:
        handlers = {
            name: jax.ffi.pycapsule(getattr(library, f"{target}_{STAGES[platform][name]}"))
            for name in names
        }
        traits = RECORDED if target == DECODE_PAGES else NO_TRAITS
        jax.ffi.register_ffi_target(target, handlers, platform=platform, traits=traits)


_library = load()
_register(_library)
# JAX, which was imported before, gives up the GPUs after this.
atexit.register(_library.burst_attention_stop_watch)


def library_version() -> str:
    """Returns the version of the loaded library."""
    return str(_library.burst_attention_version().decode())


def describe() -> dict[str, object]:
    """Returns facts about the library: instruction sets, threads, CUDA and versions."""
    return ask('{"ask": "describe"}')


class FeatureOperand(TypedDict):
    """An array that custom calls take for a feature."""

    name: str
    shape: list[str | int]
    dtype: str
    gradient: dict[str, list[str | int]] | None
    """For each platform the shape in which calls return the gradient; None without one."""
    flag: str | None
    """The feature without a number that asks for the array."""


class ScheduleName(TypedDict):
    """A family of schedules."""

    name: str
    doc: str


class DecodeInterface(TypedDict):
    """The arrays of decode, and the sizes by which decode on GPUs cuts queries and keys."""

    arrays: dict[str, list[str]]
    """The names of a call's arrays on each platform, in order: operands, of which slopes may be
    missing, and results."""
    few_rows: int
    """Rows of the smaller tiles of queries."""
    many_rows: int
    """Rows of the larger tiles of queries."""
    most_runs: int
    """The most equal runs into which any device cuts the keys of all units."""
    page_elements: int
    """What a page must have fewer elements than."""
    latent_columns: int
    """The most columns of keys whose first columns are the values."""
    latent_values: int
    """The most columns of such values."""


class Interface(TypedDict):
    """The values that a call may name, and the arrays that it may take, in their order."""

    feature_operands: list[FeatureOperand]
    schedules: list[ScheduleName]
    decode: DecodeInterface


def interface() -> Interface:
    """Returns the feature operands and the schedules of the library."""
    return cast(Interface, ask('{"ask": "interface"}'))


def bytes_sent() -> int:
    """Returns the bytes that all rings of this process have sent so far."""
    return int(_library.burst_attention_bytes_sent())


AnyPath: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]


def start_trace(path: AnyPath) -> None:
    """Opens a file and begins to record steps for it.

    Raises:
      OSError: if the file can't be opened.
      RuntimeError: if another file is being recorded.
      ValueError: for a path with a zero byte.
    """
    encoded = os.fsencode(path)
    if b"\0" in encoded:
        raise ValueError(f"path must not contain a zero byte, got {os.fspath(path)!r}")
    code = _library.burst_attention_trace(encoded)
    if code == errno.EALREADY:
        raise RuntimeError(
            "trace records one timeline at a time, and another block of it has not ended, perhaps "
            "in another thread: end that block first, since it records the steps of all threads"
        )
    _check_traced(code, path)


def stop_trace(path: AnyPath) -> None:
    """Ends the recording and writes the file, whose ``path`` an error names.

    Raises:
      OSError: if the file can't be written.
    """
    _check_traced(_library.burst_attention_trace(None), path)


def _check_traced(code: int, path: AnyPath) -> None:
    if code:
        reason = os.strerror(code) if code > 0 else "unknown error"
        what = f"the timeline can't be written: {reason}"
        raise OSError(code, what, os.fspath(path))


def call(
    target: str,
    results: Sequence[jax.ShapeDtypeStruct],
    operands: Arrays,
    attributes: Mapping[str, Attribute],
    *,
    label: str = "",
    aliases: dict[int, int] | None = None,
) -> Arrays:
    """Returns the results of a custom call, which JAX types as equal on all devices.

    Calls are pure, so XLA may merge equal calls and drop unused ones: all devices run one program,
    so a call that one device drops, all devices drop.

    The name of the call in XLA's programs and in profilers is ``target``, and ``label`` behind it.
    """
    bound = jax.ffi.ffi_call(target, results, has_side_effect=False, input_output_aliases=aliases)
    # XLA names an instruction by the last part of its scopes, which JAX ends with the primitive's
    # name, "ffi_call". XLA leaves out what follows an "@", so the instruction gets this name.
    with jax.named_scope("_".join(filter(None, (target, label))) + "@"):
        return tuple(bound(*operands, **attributes))


def shapes(q: ArrayType, k: ArrayType, v: ArrayType) -> dict[str, object]:
    """Returns sizes and dtype of a rank's arrays, under the names of the library's problem."""
    return {
        "batch": q.shape[0],
        "q_len": q.shape[1],
        "kv_len": k.shape[1],
        "heads": q.shape[2],
        "kv_heads": k.shape[2],
        "head_dim": q.shape[3],
        "value_dim": v.shape[3],
        "dtype": str(q.dtype),
    }


def workspace_bytes(**problem: object) -> int:
    """Returns the bytes of workspace that one call on a GPU needs.

    Raises:
      ValueError: for a problem that the kernels can't compute, with the library's reason.
    """
    return _workspace_bytes(json.dumps({"ask": "workspace", **problem}))


@lru_cache(maxsize=1024)
def _workspace_bytes(question: str) -> int:
    try:
        return cast(int, ask(question)["bytes"])
    except ValueError as error:
        raise ValueError(f"burst_attention on NVIDIA GPUs: {error}") from None


def ask(question: str) -> dict[str, object]:
    """Returns the library's answer to a question in JSON; ``ffi/src/json.rs`` lists the questions.

    Raises:
      ValueError: for a question without an answer, with the library's reason.
    """
    answer: dict[str, object] = json.loads(_library.burst_attention_ask(question.encode()))
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer
