"""Linear attention over a sequence that is sharded across devices."""

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32, Int32

from burst_attention import _checks, _mesh
from burst_attention._linear import checks, global_arrays, shards
from burst_attention._linear.checks import Method, ReturnState
from burst_attention._types import AnyMesh, Axes, Layout


def linear_attention(
    query: Float[Array, "batch seq q_heads k_dim"],
    key: Float[Array, "batch seq k_heads k_dim"],
    value: Float[Array, "batch seq v_heads v_dim"],
    *,
    axis_name: str | Axes | None = None,
    mesh: AnyMesh | None = None,
    spec: PartitionSpec | None = None,
    decay: Float32[Array, " heads"] | None = None,
    log_decay: Float32[Array, "batch seq heads"] | None = None,
    scale: float | None = None,
    is_causal: bool = True,
    segment_ids: Int32[Array, "batch seq"] | None = None,
    initial_state: Float32[Array, "batch heads k_dim v_dim"] | None = None,
    return_state: ReturnState = False,
    method: Method = "auto",
    layout: Layout = "contiguous",
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Linear attention of a sequence that is sharded: of one device's tokens, or of all tokens.

    With S_0 = ``initial_state`` and λ the decay of a head, or of each of its tokens::

        S_t = λ_t S_(t−1) + k_t v_tᵀ;   out_t = scale · q_tᵀ S_t

    There is no normaliser. Inside ``jax.shard_map`` along ``axis_name``, arrays are this device's
    shards. Everywhere else they are global arrays: as in `dot_product_attention`, their types say
    mesh, spec and axis_name where mesh axes are Explicit, and Auto meshes need ``spec``.

    The result has as many heads as query or value, whichever has more. Query, key and value each
    have a divisor of that number: head h of the result uses head h // (heads / own heads) of each.
    So several query heads may share a key and a value, and several values may share a query and a
    key. On CPU devices no head is repeated in memory.

    All sums are float32. Each rank sends one state, ``batch · heads · k_dim · v_dim`` floats,
    whatever the length (LASP: Sun et al., Linear Attention Sequence Parallelism). Reverse-mode
    derivatives with respect to all arrays; forward mode and second derivatives are errors.

    On NVIDIA GPUs weights and states enter their products in the inputs' 16-bit type, as in softmax
    attention. Kernels there compute with tiles of 64 tokens. Without ``segment_ids`` an input that
    is not finite spoils its whole tile there, whatever the decays are, and the state that the tile
    leaves.

    Args:
      query: ``[batch, seq, q_heads, k_dim]``: bfloat16, float16 or, on CPU devices, float32; k_dim
        a multiple of 8 up to 256.
      key: ``[batch, seq, k_heads, k_dim]``, of query's dtype. On GPUs XLA repeats the heads of key
        or value where their numbers differ, and in the backward pass the heads of query.
      value: ``[batch, seq, v_heads, v_dim]``; v_dim a multiple of 8 up to 256, which may differ
        from k_dim.
      axis_name: mesh axis along which the sequence is sharded, or a pair (outer, inner): rank =
        outer · inner size + inner. On global arrays the default is the axes that shard dimension 1.
      mesh: for global arrays; default: the mesh of the arrays, or of ``jax.set_mesh``.
      spec: for global arrays, the sharding of query, key and value, such as ``P("data", "context",
        "tensor", None)``. The result, decays and states are sharded in the same way by batch, seq
        and heads; decays, segment_ids and states may also come whole. An array whose heads are
        fewer than the shards of their axis stays whole in its heads.
      decay: λ, float32 ``[heads]``; default 1. Values that are known while tracing must be in
        [0, 1]. Traced values are not checked: above 1 the state grows, below 0 and for NaN the
        head's results are NaN.
      log_decay: ln λ of each token and head, float32 ``[batch, seq, heads]``. A token with −∞ sees
        no token before itself: nothing passes it, forward or backward, not even infinities and NaN.
        Values are not checked. With a value above 0 the state grows at each such token, until
        float32 overflows. NaN makes the outputs of its token and of later tokens NaN. Excludes
        ``decay``.
      scale: factor on query, a Python number; default 1. On CPU devices it multiplies in float32.
        On GPUs query is rounded to its type after it, which changes no bit if scale is a power of
        two.
      is_causal: whether tokens see only earlier tokens. With False every token sees the sum over
        all tokens, out_t = scale · q_tᵀ (S_0 + Σ k vᵀ); decays and segment_ids are then refused.
      segment_ids: int32 ``[batch, seq]``. Where they change, the state begins at zero again, and a
        value of one document that is not finite or overflows changes no result of another document.
        Tokens with a negative id are padding: they leave nothing in the state, and their out is 0.
      initial_state: float32 ``[batch, heads, k_dim, v_dim]``, the same on every rank; default 0.
        With segment_ids it is the state that the first token's segment begins with.
      return_state: whether to also return the state after the last token of the whole sequence, on
        every rank. The sequence can be continued from it. With segment_ids it is the state of the
        last token's segment: zero if that is padding. ``"replicated"``, inside ``shard_map``:
        ``check_vma`` knows that the state is the same on all ranks, so ``out_specs`` may leave the
        ring's axes out. With ``method="all_gather"`` this takes one more all-reduce of a state;
        with ``ring`` it takes nothing more. On global arrays both give one global array.
      method: how states travel. ``ring``: from rank to rank; ranks are serial in one small update.
        ``all_gather``: all in one exchange. ``auto``: ``all_gather`` where all ranks' states take
        up no more than 256 MiB, else ``ring``.
      layout: must be ``contiguous``: a state is passed on in the order of the sequence, and every
        rank has equal work.

    Returns:
      ``out``, ``[batch, seq, heads, v_dim]`` in query's dtype; with ``return_state``
      ``(out, state)``, the state float32.

    Raises:
      ValueError, TypeError, NotImplementedError: while tracing, with the way out.
    """
    qkv = checks.arrays(query, key, value)
    checks.layout(layout)
    in_order = _checks.flag("is_causal", is_causal)
    if not in_order:
        checks.without_order(decay=decay, log_decay=log_decay, segment_ids=segment_ids)
    settings = checks.Settings(
        scale=checks.scale(scale),
        is_causal=in_order,
        return_state=checks.return_state(return_state),
        method=_checks.choice("method", method, checks.METHODS),
    )
    (q, _, v), given = qkv, initial_state
    shape = (*q.shape[:2], checks.heads_of(q, v))
    inputs = checks.Inputs(
        *qkv,
        *checks.decays(decay, log_decay, shape, "[batch, seq, heads]"),
        checks.segments(segment_ids, shape[:2]),
        None if given is None else checks.state(given, q, v),
    )
    if _mesh.is_inside(axis_name):
        checks.no_placement(mesh=mesh, spec=spec)
        out, state = shards.attend(_mesh.ring_axes(axis_name), settings, inputs)
    else:
        out, state = global_arrays.attend(mesh, spec, axis_name, settings, inputs)
    return out if state is None else (out, state)
