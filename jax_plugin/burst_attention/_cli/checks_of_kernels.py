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
from burst_attention._linear.states import Operands
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
LINEAR = (Case("bfloat16", 64, {}), Case("float16", 128, {}))
DECODE = (Case("bfloat16", 128, {}), Case("float16", 64, {"logits_soft_cap": 20.0}))


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


def _linear(gpu: jax.Device) -> dict[str, Any]:
    def check(case: Case) -> dict[str, Any]:
        shape = (1, SEQ, 2, case.head_dim)
        given = _arrays(case.dtype, shape, shape, shape, shape)
        decay = np.array([0.9, 0.99], np.float32)
        mesh, spec = Mesh(np.array([gpu]), ("context",)), PartitionSpec(None, "context")
        scale = case.head_dim**-0.5
        attend = partial(ba.linear_attention, mesh=mesh, spec=spec, decay=decay, scale=scale)
        found = _with_gradients(attend, [jax.device_put(x, gpu) for x in given])
        logs = jnp.broadcast_to(jnp.log(decay), (1, SEQ, 2))
        first = jnp.zeros((1, 2, case.head_dim, case.head_dim), jnp.float32)

        def reference(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return plain.forward(scale, Operands(q, k, v, logs, first, None))[0]

        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            expected = _with_gradients(reference, [x.astype(np.float32) for x in given])
        return _compared(case, found, expected, "out dq dk dv")

    return _first_error(LINEAR, check)


@partial(jax.jit, static_argnums=0)
def _with_gradients(attend: Callable[..., jax.Array], given: list[jax.Array]) -> Arrays:
    *qkv, dout = given
    out, pullback = jax.vjp(attend, *qkv)
    return out, *pullback(dout)


def _decode(gpu: jax.Device) -> dict[str, Any]:
    def check(case: Case) -> dict[str, Any]:
        q, k, v = _arrays(
            case.dtype,
            (3, 2, 4, case.head_dim),
            (3, 512, 2, case.head_dim),
            (3, 512, 2, case.head_dim),
        )
        lengths = np.array([512, 300, 2], np.int32)
        decode = jax.jit(partial(ba.decode_attention, **case.options))
        found = decode(*(jax.device_put(x, gpu) for x in (q, k, v, lengths)))
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            wide = (x.astype(np.float32) for x in (q, k, v))
            reference = partial(ba.decode_attention, implementation="xla", **case.options)
            expected = jax.jit(reference)(*wide, lengths)
        return _compared(case, (found,), (expected,), "out")

    return _first_error(DECODE, check)


FAMILIES: dict[Family, Callable[[jax.Device], dict[str, Any]]] = {
    "attention": _attention,
    "linear_attention": _linear,
    "decode_attention": _decode,
    "cudnn": _cudnn,
}
