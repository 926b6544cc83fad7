"""The options of linear attention and the delta rule: names, types, documentation and defaults."""

from typing import TypedDict

from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from burst_attention._attention.options import AnyArray
from burst_attention._linear.checks import Method
from burst_attention._signatures import shows
from burst_attention._types import AnyMesh, Axes, Layout


class SequenceOptions(TypedDict, total=False):
    """Keyword arguments of every recurrence over a sharded sequence.

    Args:
      axis_name: mesh axis along which the sequence is sharded, or a pair (outer, inner): rank =
        outer · inner size + inner. On global arrays the default is the axes that shard dimension 1.
      mesh: for global arrays; default: the mesh of the arrays, or of ``jax.set_mesh``.
      spec: for global arrays, the sharding of query, key and value, such as ``P("data", "context",
        "tensor", None)``. The result, beta, decays and states are sharded in the same way by batch,
        seq and heads; beta, decays, segment_ids and states may also come whole. An array whose
        heads are fewer than the shards of their axis stays whole in its heads.
      scale: factor on query, a Python number; default 1. On CPU devices it multiplies in float32.
        On GPUs query is rounded to its type after it, which changes no bit if scale is a power of
        two.
      segment_ids: integers ``[batch, seq]``, cast as in `attention`. Where they change, the state
        begins at zero again, and a value of one document that is not finite or overflows changes no
        result of another document. One exception: on GPUs, in `delta_attention` and with decays of
        channels, finite values whose products overflow spoil the tile of 64 tokens that they are
        in, and the states behind it.
        Tokens with a negative id are padding: they leave nothing in the state, and their out is 0.
      initial_state: floats ``[batch, heads, k_dim, v_dim]``, cast to float32, the same on every
        rank; default 0. With segment_ids it is the state that the first token's segment begins
        with.
      method: how states travel. ``ring``: from rank to rank; ranks are serial in one small update.
        ``all_gather``: all in one exchange. ``in_turn``: ranks compute one after the other, which
        takes the least work in all. ``auto``: ``in_turn`` on CPU devices of one process if the
        heads of a device use all its cores; else ``all_gather`` where all ranks' states, and what
        turns one into the next, take up no more than 256 MiB, else ``ring``.
      layout: must be ``contiguous``: a state is passed on in the order of the sequence, and every
        rank has equal work.
    """

    axis_name: str | Axes | None
    mesh: AnyMesh | None
    spec: PartitionSpec | None
    scale: float | None
    segment_ids: Int[AnyArray, "batch seq"] | None
    initial_state: Float[AnyArray, "batch heads k_dim v_dim"] | None
    method: Method
    layout: Layout


class LinearOptions(SequenceOptions, total=False):
    """Keyword arguments of `linear_attention`.

    Args:
      decay: λ, floats ``[heads]``, cast to float32; default 1. Values that are known while tracing
        must be in [0, 1]. Traced values are not checked: above 1 the state grows, below 0 and for
        NaN the head's results are NaN.
      log_decay: ln λ of each token and head, floats ``[batch, seq, heads]``, or of each channel of
        the keys too, ``[batch, seq, heads, k_dim]`` (gated linear attention), cast to float32. A
        token with −∞, in all channels, sees no token before itself: nothing passes it, forward or
        backward, not even infinities and NaN. Values are not checked. With a value above 0 the
        state grows at each such token, until float32 overflows. NaN makes the outputs of its token
        and of later tokens NaN. Excludes ``decay``.
      is_causal: whether tokens see only earlier tokens. With False every token sees the sum over
        all tokens, out_t = scale · q_tᵀ (S_0 + Σ k vᵀ); decays and segment_ids are then refused.
    """

    decay: Float[AnyArray, " heads"] | None
    log_decay: Float[AnyArray, "batch seq heads"] | Float[AnyArray, "batch seq heads k_dim"] | None
    is_causal: bool


DEFAULTS = {"is_causal": True, "method": "auto", "layout": "contiguous"}
"""The defaults of options. All other options are None by default."""
shows_options = shows(LinearOptions, DEFAULTS)
"""Puts every option into the signature and the documentation of a function of ``**options``."""
shows_sequence_options = shows(SequenceOptions, DEFAULTS)
"""Does the same for a function that takes the options of every recurrence."""
