"""The checks of ``python -m burst_attention check``, each in a child process."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

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


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the kinds of GPU, each with an index, or the ``error`` of a family's kernels."""
    try:
        gpus = jax.local_devices(backend="cuda")
        if question["ask"] == "kinds":
            return {"kinds": {gpu.device_kind: gpus.index(gpu) for gpu in reversed(gpus)}}
        return FAMILIES[question["family"]](gpus[question["gpu"]])
    except Exception as error:  # whatever it is, the kernels did not compute
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}


def _compared(case: Case, found: Arrays, expected: Arrays, names: str) -> dict[str, Any]:
    """Returns the first error beyond its limit, or nothing."""
    limit = LIMITS[case.dtype]
    for name, got, wanted in zip(names.split(), found, expected, strict=True):
        error = _error(np.asarray(got, np.float64), np.asarray(wanted, np.float64))
        if not error <= limit:
            where = f"head_dim {case.head_dim}, {case.dtype}"
            return {"error": f"{name} is off by {error:.1e} at {where}, expected at most {limit}"}
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


def _attention(gpu: jax.Device, cases: tuple[Case, ...] = ATTENTION, **also: Any) -> dict[str, Any]:
    def check(case: Case) -> dict[str, Any]:
        shapes = [(1, SEQ, heads, case.head_dim) for heads in (4, 2, 2, 4)]
        given = _arrays(case.dtype, *shapes)
        found = _attended(gpu, {**case.options, **also}, given)
        wide = [x.astype(np.float32) for x in given]
        cpu = jax.local_devices(backend="cpu")[0]
        expected = _attended(cpu, {**case.options, "implementation": "xla"}, wide)
        return _compared(case, found, expected, "out dq dk dv")

    return _first_error(cases, check)


def _cudnn(gpu: jax.Device) -> dict[str, Any]:
    if not _confirmed.cudnn()[0].isdigit():
        return {"absent": _confirmed.cudnn()}
    return _attention(gpu, CUDNN, kernels="cudnn", backward_order="any")


def _attended(device: jax.Device, options: Mapping[str, Any], given: list[np.ndarray]) -> Arrays:
    """Returns attention on one device and its gradients."""
    mesh, spec = Mesh(np.array([device]), ("context",)), PartitionSpec(None, "context")
    attend = partial(ba.dot_product_attention, mesh=mesh, spec=spec, **options)

    @jax.jit
    def results(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Arrays:
        out, pullback = jax.vjp(attend, q, k, v)
        return out, *pullback(dout)

    found: Arrays = results(*(jax.device_put(x, device) for x in given))
    return found


def _recurrent(gpu: jax.Device, names: str) -> dict[str, Any]:
    """Checks linear attention, or the delta rule if ``names`` has the gradient of beta."""
    mesh, spec = Mesh(np.array([gpu]), ("context",)), PartitionSpec(None, "context")

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
        found = _with_gradients(kernels, [jax.device_put(x, gpu) for x in given])
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            expected = _with_gradients(reference, [x.astype(np.float32) for x in given])
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


@partial(jax.jit, static_argnums=0)
def _with_gradients(attend: Callable[..., jax.Array], given: list[jax.Array]) -> Arrays:
    *primal, dout = given
    out, pullback = jax.vjp(attend, *primal)
    return out, *pullback(dout)


def _decode(gpu: jax.Device) -> dict[str, Any]:
    def check(case: Case) -> dict[str, Any]:
        # Latents are one head of keys, whose first columns are the values.
        heads = (4, 2, 2) if "value_dim" not in case.options else (16, 1)
        rows = (2, 512, 512)
        shapes = [(3, *shape, case.head_dim) for shape in zip(rows, heads, strict=False)]
        query, *caches = _arrays(case.dtype, *shapes)
        lengths = np.array([512, 300, 2], np.int32)

        def decode(
            implementation: str | None, query: jax.Array, key: jax.Array, *value: jax.Array
        ) -> jax.Array:
            options: Any = {"implementation": implementation, **case.options}
            out: jax.Array
            out = ba.decode_attention(query, key, value[0] if value else None, lengths, **options)
            return out

        given = [jax.device_put(x, gpu) for x in (query, *caches)]
        found = jax.jit(partial(decode, None))(*given)
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            wide = (x.astype(np.float32) for x in (query, *caches))
            expected = jax.jit(partial(decode, "xla"))(*wide)
        return _compared(case, (found,), (expected,), "out")

    return _first_error(DECODE, check)


FAMILIES: dict[Family, Callable[[jax.Device], dict[str, Any]]] = {
    "attention": _attention,
    "linear_attention": partial(_recurrent, names="out dq dk dv dlog_decay"),
    "delta_rule": partial(_recurrent, names="out dq dk dv dlog_decay dbeta"),
    "decode_attention": _decode,
    "cudnn": _cudnn,
}
