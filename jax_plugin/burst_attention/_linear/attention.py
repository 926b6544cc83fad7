"""Linear attention over a sequence that is sharded across devices."""

from typing import Literal, Unpack, overload

import jax
from jaxtyping import Array, Float

from burst_attention import _mesh
from burst_attention._linear import checks, global_arrays, shards
from burst_attention._linear.checks import ReturnState
from burst_attention._linear.options import (
    DEFAULTS,
    LinearOptions,
    SequenceOptions,
    shows_options,
)
from burst_attention._signatures import check_names
from burst_attention._types import X


class Alone(LinearOptions, total=False):
    """Options of a call that returns out alone."""

    return_state: Literal[False]


class WithState(LinearOptions):
    """Options of a call that returns the state too."""

    return_state: Literal[True, "replicated"]


class Either(LinearOptions):
    """Options of a call whose flag type checkers do not know."""

    return_state: ReturnState


@overload
def linear_attention(query: X, key: X, value: X, **options: Unpack[Alone]) -> X: ...
@overload
def linear_attention(query: X, key: X, value: X, **options: Unpack[WithState]) -> tuple[X, X]: ...
@overload
def linear_attention(query: X, key: X, value: X, **options: Unpack[Either]) -> X | tuple[X, X]: ...


@shows_options
def linear_attention(
    query: Float[Array, "batch seq q_heads k_dim"],
    key: Float[Array, "batch seq k_heads k_dim"],
    value: Float[Array, "batch seq v_heads v_dim"],
    *,
    return_state: ReturnState = False,
    **options: Unpack[LinearOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Linear attention of a sequence that is sharded: of one device's tokens, or of all tokens.

    With S_0 = ``initial_state`` and λ the decay of a head, of each of its tokens, or of each token
    and row of S::

        S_t = λ_t ∘ S_(t−1) + k_t v_tᵀ;   out_t = scale · q_tᵀ S_t

    There is no normaliser. Inside ``jax.shard_map`` along ``axis_name``, arrays are this device's
    shards. Everywhere else they are global arrays: as in `dot_product_attention`, their types say
    mesh, spec and axis_name where mesh axes are Explicit, and Auto meshes need ``spec``.

    The result has as many heads as query or value, whichever has more. Query, key and value each
    have a divisor of that number: head h of the result uses head h // (heads / own heads) of each.
    So several query heads may share a key and a value, and several values may share a query and a
    key. On CPU devices no head is repeated in memory.

    All sums are float32. Each rank sends one state and its decays, ``batch · heads · k_dim ·
    (v_dim + 1)`` floats at most, whatever the length (LASP: Sun et al., Linear Attention Sequence
    Parallelism). Reverse-mode derivatives with respect to all arrays; forward mode and second
    derivatives are errors.

    On NVIDIA GPUs weights and states enter their products in the inputs' 16-bit type, as in softmax
    attention; in float16 they are scaled there, so a state may exceed 65,504. Kernels there compute
    with tiles of 64 tokens. Without ``segment_ids`` an input that
    is not finite spoils its whole tile there, whatever the decays are, and the state that the tile
    leaves.

    Args:
      query: ``[batch, seq, q_heads, k_dim]``: bfloat16, float16 or, on CPU devices, float32; k_dim
        a multiple of 8 up to 256.
      key: ``[batch, seq, k_heads, k_dim]``, of query's dtype. On GPUs XLA repeats the heads of key
        or value where their numbers differ, and in the backward pass the heads of query.
      value: ``[batch, seq, v_heads, v_dim]``; v_dim a multiple of 8 up to 256, which may differ
        from k_dim.
      return_state: whether to also return the state after the last token of the whole sequence, on
        every rank. The sequence can be continued from it. With segment_ids it is the state of the
        last token's segment: zero if that is padding. ``"replicated"``, inside ``shard_map``:
        ``check_vma`` knows that the state is the same on all ranks, so ``out_specs`` may leave the
        ring's axes out. With ``method="all_gather"`` this takes one more all-reduce of a state;
        with ``ring`` it takes nothing more. On global arrays both give one global array.
      **options: see `LinearOptions`.

    Returns:
      ``out``, ``[batch, seq, heads, v_dim]`` in query's dtype; with ``return_state``
      ``(out, state)``, the state float32.

    Raises:
      ValueError, TypeError, NotImplementedError: while tracing, with the way out.
    """
    check_names("linear_attention", options, LinearOptions)
    return attended("linear_attention", (query, key, value), return_state, DEFAULTS | dict(options))


def attended(
    caller: str, rows: tuple[object, object, object], return_state: object, given: dict[str, object]
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Returns the results of a recurrence, whose arguments it checks first.

    ``rows`` are query, key and value; ``given`` are the options.
    """
    given = dict.fromkeys(("log_decay", *SequenceOptions.__annotations__)) | given
    qkv, state = checks.arrays(*rows), checks.return_state(return_state)
    settings, inputs = checks.settings(caller, given, state), checks.inputs(qkv, given)
    mesh, spec, axis_name = (given[name] for name in ("mesh", "spec", "axis_name"))
    axes = _mesh.axes_inside(caller, axis_name)
    if axes is not None:
        checks.no_placement(caller, mesh=mesh, spec=spec)
        out, last = shards.attend(axes, settings, inputs)
    else:
        out, last = global_arrays.attend(mesh, spec, axis_name, settings, inputs)
    return out if last is None else (out, last)
