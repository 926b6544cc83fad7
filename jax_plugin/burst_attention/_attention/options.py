"""The options of attention: name, type, documentation, default and check of each.

An option that is no array has one line in `AttentionOptions`, what a caller may give, and one in
`Options`, its default and its check. An array has a line in `AttentionOptions` and a row in the
table of `features`.
"""

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Literal, TypeAlias, TypedDict, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, PRNGKeyArray, UInt32

from burst_attention import _checks
from burst_attention._attention.links import Links, check_links
from burst_attention._checks import MAX_FLOAT32, beyond_float32, describe, static_number
from burst_attention._signatures import check_names, shows
from burst_attention._types import LAYOUTS, Axes, Layout

Value = TypeVar("Value")
Check: TypeAlias = Callable[[str, object], Value]
"""Returns the value of an option in the form that `Options` has, or raises."""

Schedule: TypeAlias = Literal["auto", "ring", "balanced", "all_gather", "ulysses", "hybrid"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
Backward: TypeAlias = Literal["auto", "keys", "queries"]
BACKWARDS: tuple[Backward, ...] = get_args(Backward)
BackwardOrder: TypeAlias = Literal["auto", "fixed", "any"]
BACKWARD_ORDERS: tuple[BackwardOrder, ...] = get_args(BackwardOrder)
Kernels: TypeAlias = Literal["auto", "tile", "cudnn"]
KERNELS: tuple[Kernels, ...] = get_args(Kernels)
Implementation: TypeAlias = Literal["xla"]

AnyArray: TypeAlias = jax.Array | np.ndarray
Mask: TypeAlias = Bool[AnyArray, "..."] | None
Window: TypeAlias = tuple[int, int]
"""How many positions before and after its own a query sees, or `NO_LIMIT`."""
NO_LIMIT = int(np.iinfo(np.int64).min)
"""A side of a window without a limit, as the custom calls have it."""
OPEN = -1
"""A side of a window without a limit, as callers write it."""


class AttentionOptions(TypedDict, total=False):
    """Keyword arguments that `attention` and `dot_product_attention` share.

    Args:
      is_causal: whether a query sees only keys at its own global position and before it.
      scale: factor on q·k, a Python number; default head_dim ** -0.5.
      query_seq_lengths: integers ``[batch]``: queries whose position is at least this number are
        padding. Positions are those of the layout, with ``query_offset``, or ``query_positions``.
        Padding sees no key: its out is 0, as in ``jax.nn``, and its lse is −inf, where ``jax.nn``
        counts masked keys.
      key_value_seq_lengths: integers ``[batch]``: keys whose position is at least this number are
        padding. Positions are those of the layout, or ``key_positions``. A query that sees no key
        has out 0, where ``jax.nn`` returns the mean of all values.
      local_window_size: (left, right): a query sees ``left`` positions before its own and ``right``
        positions after it. None or −1 leaves a side open. One number stands for both sides. With
        is_causal, right may be any number and counts as 0.
      segment_ids: integers ``[batch, seq]`` in the order of ``layout``, or a pair (ids of query,
        ids of key). A query sees only keys of its own segment, for packed documents. A negative id
        matches no id, not even itself: it marks padding, see `pad_sequence`. Of ids beyond int32
        the lowest 31 bits count. `segment_ids_from_cu_seqlens` makes ids of cumulative lengths.
      visible: (start, stop), integers ``[batch, kv_len]`` each, in the order of ``layout``: a query
        at position p sees key j only if start[j] ≤ p < stop[j], and if ``is_causal``, window and
        segments allow it too. With ``[batch, kv_len, 2]`` each key has two intervals, and either
        of them suffices. An empty interval, start ≥ stop, hides the key. Intervals beyond int32 are
        clipped, and a stop of 2³¹ − 1 is no limit. The intervals are data, so another mask needs no
        compilation. `masks` makes them. They travel with their keys, 8 or 16 bytes for each.
        FlashMask (arXiv:2410.01359) has the same masks.
      query_positions: integers ``[batch, q_len]``, the position of each query in the sequence, for
        ``is_causal``, window, ``visible``, slopes and dropout. Default: the layout's, plus
        ``query_offset``. With positions of queries or keys any order of tokens is a layout; every
        chunk then travels to every rank. The least position is −2³¹ + 1 and the greatest 2³¹ − 1,
        beside dropout 2³¹ − 2. Positions beyond them, as far as int32 goes, count as the nearest.
      key_positions: integers ``[batch, kv_len]``, the position of each key; default: the layout's.
      query_offset: how many positions the first query stands after the first key. 0, the default,
        aligns the beginnings, as in ``jax.nn``; a Python int kv_len − q_len aligns the ends. An
        array, integers ``[batch]``, makes positions data.
      logits_soft_cap: bounds scores smoothly: s becomes cap · tanh(s / cap), before the mask. A
        Python number from 1e-30 to 1e30, on GPUs from 0.001 to 1000. None or 0 is no cap.
      sinks: floats ``[heads]``, cast to float32, one logit for each query head. It
        joins the softmax of every row but has no value. Differentiable. Where the heads are
        sharded, a device takes the sinks of its own heads. A sink of −inf has no effect. A sink of
        +inf takes all weight, so out is 0 and lse +inf.
      alibi_slopes: floats ``[heads]``, cast to float32. Scores get the slope of their
        head times the distance (key position − query position), so a positive slope favours near
        keys of the past. Differentiable. Where the heads are sharded, a device takes the slopes of
        its own heads.
      dropout_rate: probability, a Python number, with which each weight is dropped after the
        softmax. The weights that stay are divided by 1 − dropout_rate. Dropout does not change lse.
      dropout_key: a key of ``jax.random``, or its data, uint32 ``[2]``; the same on all devices of
        a ring. Of longer data the first and the last word count. Only the key and the weight's
        position in the whole array decide whether the weight is dropped. So every mesh, layout and
        schedule drops the same weights, and under ``vmap`` all instances that share a key do.
      batch_axis: mesh axes that shard the batch, the major one first. Only dropout needs them:
        without them it drops the same weights in the shards of all devices.
      head_axis: mesh axes that shard the heads, the major one first. Only dropout needs them, as it
        needs batch_axis.
      layout: which global positions a device holds: ``contiguous``, ``zigzag`` (balances causal
        work) or ``striped``; see `to_layout`.
      schedule: how chunks of key and value travel. ``ring``: from rank to rank. Over a pair of axes
        it is a double ring: chunks of another node cross a slow link once, while the chunks before
        them go round their inner ring. ``balanced``: a ring in which ranks that would be idle under
        a causal mask in the contiguous layout compute for busy ranks. ``all_gather``: each chunk
        comes straight from its owner, two at a time. ``ulysses``: no chunk travels; all-to-all
        exchanges scatter the heads, so each rank has the whole sequence of its own heads.
        ``hybrid``: over a pair of axes, heads are scattered over the ranks of the inner axis, and
        rings go along the outer axis; in the striped layout, shards change ranks first. ``ulysses``
        and ``hybrid`` need a number of query heads that the ranks divide. They repeat key and value
        heads as often as that takes; in 16 bits they round the gradients of repeated heads before
        they add them up. ``auto``: the schedule that is predicted to take least time, see
        `choose_schedule`.
      backward: which arrays travel in the backward ring: ``keys``, ``queries``, or ``auto`` for
        the choice that sends fewer bytes. Where cuDNN would compute gradients, it is the choice
        that is predicted to take less time, on H200s unless ``links`` are given.
      backward_order: the order in which kernels of GPUs add to a gradient. ``fixed``: one order, so
        every run gives the same bits. ``any``: any order, so gradients may differ from run to run
        in the last bits. One kernel may then compute all gradients, the library's own or cuDNN's;
        it does where it is predicted faster, and where nothing is predicted. It needs queries at
        home (``backward="keys"``). The library's own has segments as its only feature, heads of up
        to 128 columns, and a Hopper GPU or one of its successors in data centers. ``auto``:
        ``fixed`` if the environment variable ``XLA_FLAGS`` has ``--xla_gpu_deterministic_ops`` or
        ``--xla_gpu_exclude_nondeterministic_ops`` when a process traces its first call, or else
        whichever order is predicted faster, and ``fixed`` where nothing is predicted. Options of
        ``jax.jit(compiler_options=…)`` can't be seen while tracing: beside them take ``fixed``.
        On CPU devices every run gives the same bits, whatever the order.
      kernels: which kernels of GPUs compute. ``tile``: this library's own. ``cudnn``: cuDNN's where
        they serve a tile, and this library's own elsewhere. cuDNN serves full and causal masks and
        windows without other features, and 64, 128 or 256 columns, on H100, H200 and data-center
        Blackwell; gradients only without ``return_residual``, and on Hopper with
        ``backward_order="fixed"`` from cuDNN 9.25 on. A tile's results and gradients then have 16
        bits, and their sums over a ring are float32 all the same. ``auto``: what the environment
        variable ``BURST_ATTENTION_KERNELS`` says, or else, for each tile, those that are predicted
        faster, where ``python -m burst_attention check`` has confirmed cuDNN on all GPUs of the
        program, or else ``tile``.
      residual_dtype: ``"float32"``, on CPU devices or with ``implementation="xla"``, keeps out in
        float32 for the backward pass. This takes two more bytes for each value than out in 16 bits.
        By default out is kept in query's dtype, but in float32 for up to 256 keys and for windows
        of up to 64 positions. The gradients of query and key are sums of
        e^(s − lse) · (dout vᵀ − rowsum(dout ∘ out)). Where values have a large common part, the
        rounding of out to 16 bits does not average out in these sums: with bfloat16 inputs uniform
        in [0, 1) and 1,024 tokens of 64 columns, query's gradient is off by 17% of its norm, as in
        every attention that keeps out in 16 bits. With ``"float32"`` it is off by 0.17%.
      links: what the mesh is made of, for the predictions of ``schedule="auto"`` and
        ``backward="auto"``; default: H200s on GPUs. On CPU devices the schedule is ``ring`` unless
        links are given.
      implementation: ``"xla"`` computes in plain JAX, on any platform. A ring of ``lax.ppermute``
        gives the same results; it serves every ``schedule`` but ``ulysses`` and ``hybrid``, which
        scatter heads here too. Keys travel in both passes. By default the library's calls compute
        on CPU devices and NVIDIA GPUs. Plain JAX computes what the library does not serve: float32
        on GPUs, with a warning, other platforms, and rings over the CPU devices of several
        processes.
    """

    is_causal: bool
    scale: float | None
    query_seq_lengths: Int[AnyArray, " batch"] | None
    key_value_seq_lengths: Int[AnyArray, " batch"] | None
    local_window_size: int | tuple[int | None, int | None] | None
    segment_ids: (
        Int[AnyArray, "batch q_len"]
        | tuple[Int[AnyArray, "batch q_len"], Int[AnyArray, "batch kv_len"]]
        | None
    )
    visible: tuple[Int[AnyArray, "batch kv_len *two"], Int[AnyArray, "batch kv_len *two"]] | None
    query_positions: Int[AnyArray, "batch q_len"] | None
    key_positions: Int[AnyArray, "batch kv_len"] | None
    query_offset: int | Int[AnyArray, " batch"]
    logits_soft_cap: float | None
    sinks: Float[AnyArray, " heads"] | None
    alibi_slopes: Float[AnyArray, " heads"] | None
    dropout_rate: float
    dropout_key: PRNGKeyArray | UInt32[np.ndarray, "2"] | None
    batch_axis: str | Axes | None
    head_axis: str | Axes | None
    layout: Layout
    schedule: Schedule
    backward: Backward
    backward_order: BackwardOrder
    kernels: Kernels
    residual_dtype: Literal["float32"] | None
    links: Links | None
    implementation: Implementation | None


def _option(default: Value, check: Check[Value]) -> Value:
    """Returns the field of an option, with its default and the check of other values."""
    return field(default=default, metadata={"check": check})


def _optional(check: Check[Value]) -> Check[Value | None]:
    """Returns a check that lets None pass."""
    return lambda name, value: None if value is None else check(name, value)


def _scale(name: str, value: object) -> float:
    scale = static_number(name, value, "; multiply query by a traced factor instead")
    if not math.isfinite(scale):
        raise ValueError(f"{name} must be finite, got {scale}")
    if abs(scale) > MAX_FLOAT32:
        raise beyond_float32(name, f"{scale:g}")
    return scale


def _window(name: str, value: object) -> Window:
    is_pair = isinstance(value, tuple | list)
    sides = tuple(value) if isinstance(value, tuple | list) else (value, value)
    if len(sides) != 2:
        raise ValueError(f"{name} must be one number or (left, right), got {len(sides)} numbers")
    left, right = (OPEN if is_pair and x is None else _checks.index(x) for x in sides)
    if left is None or right is None:
        raise TypeError(
            f"{name} must be an int or (left, right), Python numbers, since they are "
            f"compiled into the program, got {describe(value)}"
        )
    if min(left, right) < (OPEN if is_pair else 0):
        raise ValueError(
            f"{name} must not be negative, got {value!r}: it counts positions before and "
            "after the query's own, which is always seen; None or -1 in a pair (left, right) "
            "leaves a side without a limit"
        )
    return NO_LIMIT if left == OPEN else left, NO_LIMIT if right == OPEN else right


def _offset(name: str, value: object) -> int:
    """Returns an offset of all positions of queries; 0 for offsets in an array."""
    offset = _checks.index(value)
    if offset is None and isinstance(value, numbers.Number | str | None):
        raise TypeError(f"{name} must be an int, or int32 [batch], got {describe(value)}")
    if offset is not None and abs(offset) >= 1 << 31:
        raise ValueError(f"{name} must be within int32, got {offset}")
    return offset or 0


def _soft_cap(name: str, value: object) -> float | None:
    """Returns the cap, None for 0: none, as other packages write it."""
    return static_number(name, value) or None


def _dropout_rate(name: str, value: object) -> float:
    """Returns the probability in float32, as the custom calls get it."""
    rate = static_number(name, value, "; for none pass 0.0")
    kept = float(np.float32(rate))
    if not 0 <= kept < 1 or math.isnan(kept):
        raise ValueError(f"{name} must be at least 0 and below 1, got {rate:g}")
    return kept


def _axis_names(name: str, value: object) -> Axes:
    names = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(names, tuple | list) or not all(isinstance(x, str) for x in names):
        raise TypeError(
            f"{name} must be the name of a mesh axis or a tuple of names, got {describe(value)}"
        )
    return tuple(names)


def _residual_dtype(name: str, value: object) -> Literal["float32"]:
    expected = f"{name} must be 'float32' or None, the dtype of query, got"
    if not isinstance(value, str | type | np.dtype):
        raise TypeError(f"{expected} {describe(value)}")
    if value not in ("float32", np.float32, jnp.float32):
        raise ValueError(f"{expected} {value!r}")
    return "float32"


def _implementation(name: str, value: object) -> Implementation:
    if not isinstance(value, str) or value != "xla":
        raise ValueError(
            f"{name} must be None or 'xla', got {_checks.shown(value)}; None takes the library's "
            "calls where they serve, and plain JAX elsewhere"
        )
    return "xla"


@dataclass(frozen=True)
class Options:
    """The options of a call that are no arrays, checked and in one form."""

    is_causal: bool = _option(False, _checks.flag)
    scale: float | None = _option(None, _optional(_scale))
    local_window_size: Window | None = _option(None, _optional(_window))
    logits_soft_cap: float | None = _option(None, _optional(_soft_cap))
    dropout_rate: float = _option(0.0, _dropout_rate)
    batch_axis: Axes = _option((), _axis_names)
    head_axis: Axes = _option((), _axis_names)
    layout: Layout = _option("contiguous", partial(_checks.choice, allowed=LAYOUTS))
    schedule: Schedule = _option("auto", partial(_checks.choice, allowed=SCHEDULES))
    backward: Backward = _option("auto", partial(_checks.choice, allowed=BACKWARDS))
    backward_order: BackwardOrder = _option(
        "auto", partial(_checks.choice, allowed=BACKWARD_ORDERS)
    )
    kernels: Kernels = _option("auto", partial(_checks.choice, allowed=KERNELS))
    query_offset: int = _option(0, _offset)
    residual_dtype: Literal["float32"] | None = _option(None, _optional(_residual_dtype))
    links: Links | None = _option(None, check_links)
    implementation: Implementation | None = _option(None, _optional(_implementation))

    def softmax_scale(self, head_dim: int) -> float:
        """Returns the factor on q·k."""
        return float(head_dim**-0.5) if self.scale is None else self.scale

    @property
    def sides(self) -> Window:
        """How many positions before and after its own a query sees."""
        left, right = self.local_window_size or (NO_LIMIT, NO_LIMIT)
        return left, 0 if self.is_causal else right

    def window(self, positions: int) -> Window:
        """Returns how far a query sees from its position in the layout, if positions are no data.

        A side that reaches all positions is `NO_LIMIT`: the calls compare fewer positions then.
        """
        left, right = self.sides
        left = left if left == NO_LIMIT else left - self.query_offset
        right = right if right == NO_LIMIT else right + self.query_offset
        return NO_LIMIT if left >= positions else left, NO_LIMIT if right >= positions else right


def check_options(caller: str, given: Mapping[str, object]) -> Options:
    """Returns the options among the keyword arguments of a function, each checked."""
    check_names(caller, given, AttentionOptions)
    checks = {each.name: each.metadata["check"] for each in fields(Options)}
    return Options(**{name: checks[name](name, given[name]) for name in checks if name in given})


shows_options = shows(AttentionOptions, {each.name: each.default for each in fields(Options)})
"""Puts every option into the signature and the documentation of a function of ``**options``."""
