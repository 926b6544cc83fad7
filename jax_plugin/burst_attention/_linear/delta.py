"""The delta rule over a sequence that is sharded across devices, and of one more token."""

from typing import Literal, Unpack, overload

import jax
from jaxtyping import Array, Float

from burst_attention._attention.options import AnyArray
from burst_attention._linear import checks
from burst_attention._linear.attention import attended
from burst_attention._linear.checks import ReturnState
from burst_attention._linear.options import DEFAULTS, SequenceOptions, shows_sequence_options
from burst_attention._linear.step import stepped
from burst_attention._signatures import check_names
from burst_attention._types import X


class Alone(SequenceOptions, total=False):
    """Options of a call that returns out alone."""

    return_state: Literal[False]


class WithState(SequenceOptions):
    """Options of a call that returns the state too."""

    return_state: Literal[True, "replicated"]


class Either(SequenceOptions):
    """Options of a call whose flag type checkers do not know."""

    return_state: ReturnState


Logs = X | None


@overload
def delta_attention(
    query: X, key: X, value: X, beta: X, log_decay: Logs = None, **options: Unpack[Alone]
) -> X: ...
@overload
def delta_attention(
    query: X, key: X, value: X, beta: X, log_decay: Logs = None, **options: Unpack[WithState]
) -> tuple[X, X]: ...
@overload
def delta_attention(
    query: X, key: X, value: X, beta: X, log_decay: Logs = None, **options: Unpack[Either]
) -> X | tuple[X, X]: ...


@shows_sequence_options
def delta_attention(
    query: Float[Array, "batch seq q_heads k_dim"],
    key: Float[Array, "batch seq k_heads k_dim"],
    value: Float[Array, "batch seq v_heads v_dim"],
    beta: Float[AnyArray, "batch seq heads"],
    log_decay: Float[AnyArray, "batch seq heads"]
    | Float[AnyArray, "batch seq heads k_dim"]
    | None = None,
    *,
    return_state: ReturnState = False,
    **options: Unpack[SequenceOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """The delta rule over a sequence that is sharded: of one device's tokens, or of all tokens.

    With S_0 = ``initial_state`` and α = exp(``log_decay``)::

        S_t = (I − β_t k_t k_tᵀ) (α_t ∘ S_(t−1)) + β_t k_t v_tᵀ;   out_t = scale · q_tᵀ S_t

    A token writes only the part of its value that its key does not find in the state yet. Without
    ``log_decay`` this is DeltaNet (Yang et al. 2024); with a decay of each head and token, Gated
    DeltaNet; with decays of channels, Kimi Delta Attention. Such layers give keys of unit norm and
    β in (0, 1), or (0, 2) for negative eigenvalues. With larger β · kᵀk the state grows.

    Inside ``jax.shard_map`` along ``axis_name``, arrays are this device's shards. Everywhere else
    they are global arrays, as in `linear_attention`. Heads are shared as there.

    All sums are float32. A rank's tokens turn a state S into A S + M. Each rank sends A and M,
    ``batch · heads · k_dim · (k_dim + v_dim)`` floats, or with ``method="ring"`` one state,
    whatever the length. Reverse-mode derivatives with respect to all arrays; forward mode and
    second derivatives are errors.

    With float16 a state may exceed 65,504. On NVIDIA GPUs values keep all digits down to 2⁻²³ times
    the largest element of the state where their part of the sequence begins.

    Args:
      query: ``[batch, seq, q_heads, k_dim]``: bfloat16, float16 or, on CPU devices, float32; k_dim
        a multiple of 8 up to 256.
      key: ``[batch, seq, k_heads, k_dim]``, of query's dtype.
      value: ``[batch, seq, v_heads, v_dim]``; v_dim a multiple of 8 up to 256, which may differ
        from k_dim.
      beta: β of each token and head, floats ``[batch, seq, heads]``, cast to float32. A token with
        β = 0 writes nothing.
      log_decay: ln α of each token and head, floats ``[batch, seq, heads]``, or of each channel of
        the keys too, ``[batch, seq, heads, k_dim]``, cast to float32; default 0. A token with −∞,
        in all channels, sees no token before itself, not even infinities and NaN.
      return_state: whether to also return the state after the last token of the whole sequence, on
        every rank, as in `linear_attention`.
      **options: see `SequenceOptions`.

    Returns:
      ``out``, ``[batch, seq, heads, v_dim]`` in query's dtype; with ``return_state``
      ``(out, state)``, the state float32.

    Raises:
      ValueError, TypeError, NotImplementedError: while tracing, with the way out.
    """
    check_names("delta_attention", options, SequenceOptions)
    given = DEFAULTS | dict(options) | {"beta": checks.needed_beta(beta), "log_decay": log_decay}
    return attended("delta_attention", (query, key, value), return_state, given)


def delta_attention_step(
    query: Float[Array, "batch q_heads k_dim"],
    key: Float[Array, "batch k_heads k_dim"],
    value: Float[Array, "batch v_heads v_dim"],
    state: Float[Array, "batch heads k_dim v_dim"],
    beta: Float[AnyArray, "batch heads"],
    log_decay: Float[AnyArray, "batch heads"] | Float[AnyArray, "batch heads k_dim"] | None = None,
    *,
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The delta rule of one more token: ``(out, state)``::

        S = (I − β k kᵀ) (α ∘ S) + β k vᵀ;   out = scale · qᵀ S

    Plain JAX, on any device, differentiable in every way. The first state comes from
    `delta_attention` with ``return_state=True``, or is zeros.

    Args:
      query: ``[batch, q_heads, k_dim]``.
      key: ``[batch, k_heads, k_dim]``.
      value: ``[batch, v_heads, v_dim]``. Heads are shared as in `delta_attention`.
      state: floats ``[batch, heads, k_dim, v_dim]``, cast to float32.
      beta: β of this token, floats ``[batch, heads]``, cast to float32.
      log_decay: ln α of this token, floats ``[batch, heads]`` or ``[batch, heads, k_dim]``, cast to
        float32; default 0. −∞ leaves nothing of ``state``, not even NaN.
      scale: factor on query, a Python number; default 1.

    Returns:
      ``out``, ``[batch, heads, v_dim]`` in query's dtype, and the new state.

    Raises:
      ValueError, TypeError: while tracing, with the way out.
    """
    return stepped((query, key, value), state, (None, log_decay), checks.needed_beta(beta), scale)
