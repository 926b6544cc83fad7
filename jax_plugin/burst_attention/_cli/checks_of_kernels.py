"""The checks of ``python -m burst_attention check``, each in a child process."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec, SingleDeviceSharding

import burst_attention as ba
from burst_attention import _confirmed
from burst_attention._confirmed import Family
from burst_attention._linear import plain
from burst_attention._linear.states import Betas, Operands
from burst_attention._types import Arrays

LIMITS = {"bfloat16": 2e-2, "float16": 4e-3}
"""The largest error, relative in the norm, that a check allows: some five times the usual."""

SEQ = 200
"""Tokens: more than a tile of any kernel, and no multiple of one."""

LAUNCHED, DONE = "launched", "done"

OF_KERNELS = {
    f"CUDA_ERROR_{name}"
    for name in (
        # The driver refuses an image, or to launch it on this kind of GPU.
        *("INVALID_IMAGE", "NO_BINARY_FOR_GPU", "INVALID_PTX", "UNSUPPORTED_PTX_VERSION"),
        *("INVALID_SOURCE", "NOT_FOUND", "INVALID_VALUE", "LAUNCH_OUT_OF_RESOURCES"),
        *("INVALID_CLUSTER_SIZE", "NOT_SUPPORTED"),
        # A kernel computes something that ends it.
        *("ILLEGAL_ADDRESS", "ILLEGAL_INSTRUCTION", "MISALIGNED_ADDRESS", "INVALID_PC"),
        *("INVALID_ADDRESS_SPACE", "HARDWARE_STACK_ERROR", "ASSERT", "LAUNCH_FAILED"),
        # A kernel takes longer than the driver allows.
        "LAUNCH_TIMEOUT",
    )
}
"""Errors that will come again. All others, such as memory that is taken, may pass."""


class Case(NamedTuple):
    """A small problem of one family."""

    dtype: str
    head_dim: int
    options: Mapping[str, Any]


ATTENTION = (
    Case("bfloat16", 128, {"is_causal": True}),
    Case("float16", 64, {"is_causal": True, "backward_order": "any"}),
    Case("bfloat16", 64, {"segment_ids": np.repeat([[0, 1]], SEQ // 2, axis=1).astype(np.int32)}),
)
CUDNN = (
    Case("bfloat16", 128, {"is_causal": True}),
    Case("float16", 64, {}),
)
RECURRENT = (
    Case("bfloat16", 64, {"decays": "heads"}),
    Case("float16", 128, {"decays": "heads"}),
    Case("bfloat16", 128, {"decays": "channels"}),
)
DECODE = (
    Case("bfloat16", 128, {}),
    Case("float16", 64, {"logits_soft_cap": 20.0}),
    Case("bfloat16", 576, {"value_dim": 512}),
)


@dataclass(frozen=True)
class Gpu:
    """A GPU whose kernels are checked."""

    device: jax.Device
    tell: Callable[[str], None]
    """Is told `LAUNCHED` before the GPU has work, and `DONE` once it has computed."""

    def results(self, program: Callable[..., Arrays], operands: Iterable[np.ndarray]) -> Arrays:
        """Returns what a program returns for operands on the GPU."""
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
        place = SingleDeviceSharding(self.device)
        compiled = jax.jit(program, in_shardings=place).lower(*shapes).compile()
        self.tell(LAUNCHED)
        found: Arrays = jax.block_until_ready(compiled(*jax.device_put(list(operands), place)))
        self.tell(DONE)
        return found


def answer(question: Mapping[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
    """Returns the kinds of GPU, each with an index, or what was found about a family.

    That is ``wrong`` for kernels that refute the family, ``absent`` for a family that is not here,
    ``error`` for what kept it from being checked, or nothing for kernels that are right.
    """
    try:
        gpus = jax.local_devices(backend="cuda")
        if question["ask"] == "kinds":
            return {"kinds": {gpu.device_kind: gpus.index(gpu) for gpu in reversed(gpus)}}
        return FAMILIES[question["family"]](Gpu(gpus[question["gpu"]], tell))
    except Exception as error:  # whatever it is, the kernels did not compute
        words = f"{type(error).__name__}: {_first_line(error)}".removesuffix(": ")
        is_refusal = not OF_KERNELS.isdisjoint(re.findall(r"CUDA_ERROR_\w+", str(error)))
        return {"wrong" if is_refusal else "error": words}


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    return next(filter(None, lines), "")[:200]


def _compared(case: Case, found: Arrays, expected: Arrays, names: str) -> dict[str, Any]:
    """Returns the first error beyond its limit, or nothing."""
    limit = LIMITS[case.dtype]
    for name, got, wanted in zip(names.split(), found, expected, strict=True):
        error = _error(np.asarray(got, np.float64), np.asarray(wanted, np.float64))
        if not error <= limit:
            where = f"head_dim {case.head_dim}, {case.dtype}"
            return {"wrong": f"{name} is off by {error:.1e} at {where}, expected at most {limit}"}
    return {}


def _error(got: np.ndarray, wanted: np.ndarray) -> float:
    """Returns the relative error in the norm."""
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def _arrays(dtype: str, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in shapes]


def _first_error(
    cases: tuple[Case, ...], check: Callable[[Case], dict[str, Any]]
) -> dict[str, Any]:
    return next(filter(None, map(check, cases)), {})


def _attention(gpu: Gpu, cases: tuple[Case, ...] = ATTENTION, **also: Any) -> dict[str, Any]:
    def check(case: Case) -> dict[str, Any]:
        shapes = [(1, SEQ, heads, case.head_dim) for heads in (4, 2, 2, 4)]
        given = _arrays(case.dtype, *shapes)
        found = gpu.results(_attended(gpu.device, {**case.options, **also}), given)
        cpu = jax.local_devices(backend="cpu")[0]
        reference = _attended(cpu, {**case.options, "implementation": "xla"})
        expected = jax.jit(reference)(*(jax.device_put(x.astype(np.float32), cpu) for x in given))
        return _compared(case, found, expected, "out dq dk dv")

    return _first_error(cases, check)


def _cudnn(gpu: Gpu) -> dict[str, Any]:
    if not _confirmed.cudnn()[0].isdigit():
        return {"absent": _confirmed.cudnn()}
    return _attention(gpu, CUDNN, kernels="cudnn", backward_order="any")


def _attended(device: jax.Device, options: Mapping[str, Any]) -> Callable[..., Arrays]:
    """Returns a function that returns attention on one device and its gradients."""
    mesh, spec = Mesh(np.array([device]), ("context",)), PartitionSpec(None, "context")
    return _with_gradients(partial(ba.dot_product_attention, mesh=mesh, spec=spec, **options))


def _recurrent(gpu: Gpu, names: str) -> dict[str, Any]:
    """Checks linear attention, or the delta rule if ``names`` has the gradient of beta."""
    mesh, spec = Mesh(np.array([gpu.device]), ("context",)), PartitionSpec(None, "context")

    def kernels(
        q: jax.Array, k: jax.Array, v: jax.Array, logs: jax.Array, beta: Betas | None = None
    ) -> jax.Array:
        options: Any = {"log_decay": logs, "mesh": mesh, "spec": spec, "scale": q.shape[3] ** -0.5}
        out: jax.Array
        if beta is None:
            out = ba.linear_attention(q, k, v, **options)
        else:
            out = ba.delta_attention(q, k, v, beta, **options)
        return out

    def reference(
        q: jax.Array, k: jax.Array, v: jax.Array, logs: jax.Array, beta: Betas | None = None
    ) -> jax.Array:
        first = jnp.zeros((q.shape[0], *q.shape[2:], v.shape[3]), jnp.float32)
        return plain.forward(q.shape[3] ** -0.5, Operands(q, k, v, logs, first, beta))[0]

    def check(case: Case) -> dict[str, Any]:
        given = _tokens(case, has_beta="dbeta" in names)
        found = gpu.results(_with_gradients(kernels), given)
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            wide = (x.astype(np.float32) for x in given)
            expected = jax.jit(_with_gradients(reference))(*wide)
        return _compared(case, found, expected, names)

    return _first_error(RECURRENT, check)


def _tokens(case: Case, has_beta: bool) -> list[np.ndarray]:
    """Returns the operands of a recurrence, and the gradient of its output."""
    shape = (1, SEQ, 2, case.head_dim)
    q, k, v, dout = _arrays(case.dtype, shape, shape, shape, shape)
    # The delta rule's keys have unit norm, so its states do not grow.
    k = (k / np.linalg.norm(k.astype(np.float32), axis=-1, keepdims=True)).astype(k.dtype)
    generator = np.random.default_rng(1)
    decayed = shape if case.options["decays"] == "channels" else shape[:3]
    logs = -generator.uniform(0.001, 0.1, decayed).astype(np.float32)
    beta = generator.uniform(0.1, 1, shape[:3]).astype(np.float32)
    return [q, k, v, logs, *([beta] if has_beta else []), dout]


def _with_gradients(attend: Callable[..., jax.Array]) -> Callable[..., Arrays]:
    """Returns a function that returns attention and its gradients."""

    def results(*given: jax.Array) -> Arrays:
        *primal, dout = given
        out, pullback = jax.vjp(attend, *primal)
        return out, *pullback(dout)

    return results


def _decode(gpu: Gpu) -> dict[str, Any]:
    def check(case: Case) -> dict[str, Any]:
        # Latents are one head of keys, whose first columns are the values.
        heads = (4, 2, 2) if "value_dim" not in case.options else (16, 1)
        rows = (2, 512, 512)
        shapes = [(3, *shape, case.head_dim) for shape in zip(rows, heads, strict=False)]
        query, *caches = _arrays(case.dtype, *shapes)
        lengths = np.array([512, 300, 2], np.int32)

        def decode(
            implementation: str | None, query: jax.Array, key: jax.Array, *value: jax.Array
        ) -> Arrays:
            options: Any = {"implementation": implementation, **case.options}
            cache = (key, value[0] if value else None)
            return (ba.decode_attention(query, *cache, lengths, **options),)

        found = gpu.results(partial(decode, None), (query, *caches))
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            wide = (x.astype(np.float32) for x in (query, *caches))
            expected = jax.jit(partial(decode, "xla"))(*wide)
        return _compared(case, found, expected, "out")

    return _first_error(DECODE, check)


FAMILIES: dict[Family, Callable[[Gpu], dict[str, Any]]] = {
    "attention": _attention,
    "linear_attention": partial(_recurrent, names="out dq dk dv dlog_decay"),
    "delta_rule": partial(_recurrent, names="out dq dk dv dlog_decay dbeta"),
    "decode_attention": _decode,
    "cudnn": _cudnn,
}
