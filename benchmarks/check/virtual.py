"""The virtual ring: all ranks of a ring on one GPU, one custom call for each pass.

It is no part of the package. The library has the calls, and this module registers them. Arrays hold
the ranks' shards one after the other, [world_size, batch, seq of a rank, heads, head_dim].
"""

import ctypes
import functools
import json
from typing import Any

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
from gpu.library import find_library

from . import plain
from .problem import OPERANDS, Problem

TARGETS = {name: f"burst_attention_virtual_{name}" for name in ("forward", "backward")}
STAGES = ("instantiate", "initialize", "execute")


def stacked(problem: Problem, x: Any) -> Any:
    """Returns the shards of an array [batch, seq, …] in the order of the sequence."""
    size = problem.world_size
    x = ba.to_layout(x, size, problem.layout)
    return x.reshape(x.shape[0], size, -1, *x.shape[2:]).swapaxes(0, 1)


def merged(shards: Any) -> Any:
    """Returns the shards joined along the sequence, [batch, seq, …]."""
    x = shards.swapaxes(0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def unstacked(problem: Problem, shards: Any) -> Any:
    """Inverts `stacked`."""
    return ba.from_layout(merged(shards), problem.world_size, problem.layout)


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the package's library."""
    return ctypes.CDLL(str(find_library(None)))


def workspace_bytes(problem: Problem, which: str) -> int:
    """Returns the workspace of all ranks together, as the library plans it."""
    function = library().burst_attention_ask
    function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_char_p
    request: dict[str, Any] = {
        "ask": "workspace",
        "pass": which,
        "batch": problem.batch,
        "q_len": problem.seq // problem.world_size,
        "kv_len": problem.kv_shape[1] // problem.world_size,
    }
    request |= {"heads": problem.heads, "kv_heads": problem.kv_heads}
    request |= {"head_dim": problem.head_dim, "value_dim": problem.v_shape[3]}
    request |= {"dtype": problem.dtype, "softmax_scale": problem.softmax_scale}
    request |= {"layout": problem.layout, "world_size": problem.world_size}
    request |= {"options": _options(problem)}
    request |= _sums(problem)
    answer = json.loads(function(json.dumps(request).encode()))
    if "error" in answer:
        raise RuntimeError(f"workspace of {request}: {answer['error']}")
    return problem.world_size * int(answer["bytes"])


def _sums(problem: Problem) -> dict[str, str]:
    return {"backward": problem.backward, "backward_order": problem.backward_order}


def _options(problem: Problem) -> dict[str, Any]:
    left, right = problem.window or (-1, -1)
    return {
        "window_left": left,
        "window_right": 0 if problem.is_causal else right,
        "logits_soft_cap": float(problem.soft_cap or 0.0),
        "dropout_rate": problem.dropout,
        "feature_operands": ",".join(_feature_operands(problem)),
        "schedule": problem.schedule,
        "inner_size": problem.inner,
    }


def _feature_operands(problem: Problem) -> list[str]:
    """Returns the library's names of the arrays that features take."""
    segments = ["query_segment_ids", "key_segment_ids"] if problem.segments else []
    return segments + (["alibi_slopes"] if problem.slopes else [])


def is_possible(problem: Problem) -> bool:
    """Whether the calls can compute the problem: they know no sinks, and get no dropout here."""
    return not (problem.sinks or problem.dropout)


def given(problem: Problem) -> list[Any]:
    """Returns the problem's stacked inputs, as `passes` takes them."""
    inputs, size = problem.inputs(), problem.world_size
    found = [stacked(problem, inputs[name]) for name in OPERANDS]
    if problem.segments:
        found += [stacked(problem, inputs[name]) for name in ("q_segments", "kv_segments")]
    if problem.slopes:
        shape = (size, problem.batch, problem.heads)
        found.append(np.ascontiguousarray(np.broadcast_to(inputs["alibi_slopes"], shape)))
    return found


class Calls:
    """The custom calls, on a GPU."""

    def __init__(self) -> None:
        _register()

    def forward(
        self, problem: Problem, q: Any, k: Any, v: Any, *extras: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Returns o and lse."""
        o = jax.ShapeDtypeStruct((*q.shape[:4], v.shape[4]), q.dtype)
        lse = jax.ShapeDtypeStruct(q.shape[:4], jnp.float32)
        o, lse, _ = self._call(problem, "forward", [o, lse], q, k, v, *extras)
        return o, lse

    def backward(self, problem: Problem, *operands: Any) -> tuple[jax.Array, ...]:
        """Returns dq, dk and dv from q, k, v, o, lse, dout, dlse and arrays of features."""
        results, in_place = list(operands[:3]), {}
        if problem.slopes:
            # The call adds their gradient to zeros, one for each query. Other parts check it.
            in_place = {len(operands): len(results)}
            operands = (*operands, jnp.zeros_like(operands[4]))
            results.append(operands[4])
        attributes = _sums(problem)
        found = self._call(problem, "backward", results, *operands, in_place=in_place, **attributes)
        return tuple(found[:3])

    def _call(
        self,
        problem: Problem,
        which: str,
        results: Any,
        *operands: Any,
        in_place: dict[int, int] | None = None,
        **attributes: str,
    ) -> Any:
        bytes_ = workspace_bytes(problem, which)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]
        shapes.append(jax.ShapeDtypeStruct((bytes_,), jnp.uint8))
        types = {int: np.int64, float: np.float32, bool: bool, str: str}
        options = {name: types[type(x)](x) for name, x in _options(problem).items()}
        call = jax.ffi.ffi_call(
            TARGETS[which], shapes, has_side_effect=False, input_output_aliases=in_place
        )
        return call(
            *operands,
            world_size=np.int64(problem.world_size),
            layout=problem.layout,
            softmax_scale=np.float32(problem.softmax_scale),
            axis_name="context",
            **options,
            **attributes,
        )


class StandIn:
    """Dense attention on the same arrays, for machines without a GPU."""

    def forward(
        self, problem: Problem, q: Any, k: Any, v: Any, *extras: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Returns o and lse."""
        self._ask(problem, "forward")
        o, lse = self._attend(problem, extras, *(merged(x) for x in (q, k, v)))
        return self._split(problem, o), self._split(problem, lse)

    def backward(self, problem: Problem, *operands: Any) -> tuple[jax.Array, ...]:
        """Returns dq, dk and dv."""
        self._ask(problem, "backward")
        q, k, v, _, _, dout, dlse = (merged(x) for x in operands[:7])
        _, pullback = jax.vjp(functools.partial(self._attend, problem, operands[7:]), q, k, v)
        return tuple(self._split(problem, x) for x in pullback((dout, dlse)))

    def _attend(
        self, problem: Problem, extras: Any, q: Any, k: Any, v: Any
    ) -> tuple[jax.Array, jax.Array]:
        of = {"q": q, "k": k, "v": v}
        if problem.segments:
            of |= {"q_segments": merged(extras[0]), "kv_segments": merged(extras[1])}
        if problem.slopes:
            of["alibi_slopes"] = extras[-1][0, 0]
        size = problem.world_size
        places = [
            jnp.asarray(ba.to_layout(np.arange(x.shape[1]), size, problem.layout, axis=0))
            for x in (q, k)
        ]
        return plain.dense(problem, of, *places)

    def _split(self, problem: Problem, x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], problem.world_size, -1, *x.shape[2:]).swapaxes(0, 1)

    def _ask(self, problem: Problem, which: str) -> None:
        # The library answers without a GPU too.
        assert workspace_bytes(problem, which) >= 0


def ring(rehearse: bool) -> Calls | StandIn:
    """Returns the calls, or their stand-in for a rehearsal."""
    return StandIn() if rehearse else Calls()


def passes(problem: Problem, ring: Calls | StandIn) -> Any:
    """Returns a compiled function from stacked q, k, v, dout, dlse, … to o, lse, dq, dk and dv."""

    @jax.jit
    def run(q: Any, k: Any, v: Any, dout: Any, dlse: Any, *extras: Any) -> tuple[jax.Array, ...]:
        o, lse = ring.forward(problem, q, k, v, *extras)
        return o, lse, *ring.backward(problem, q, k, v, o, lse, dout, dlse, *extras)

    return run


@functools.cache
def _register() -> None:
    for target in TARGETS.values():
        try:
            stages = {
                stage: jax.ffi.pycapsule(getattr(library(), f"{target}_{stage}"))
                for stage in STAGES
            }
        except AttributeError as error:
            raise RuntimeError(
                f"expected {library()._name} to have {target}, found none: it was built without "
                "the feature cuda, or is too old"
            ) from error
        jax.ffi.register_ffi_target(target, stages, platform="CUDA")
