"""Attention over latents that travel: keys and values are expanded where they are needed."""

from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import PyTreeDef
from jaxtyping import Array, Float, Int, PyTree, Shaped

from burst_attention import _checks, _mesh
from burst_attention._attention.features import check_features
from burst_attention._attention.options import AnyArray, Implementation, Kernels, check_options
from burst_attention._latent import global_arrays, shards
from burst_attention._latent.expansion import Expand, Leaves
from burst_attention._latent.shards import CALLER, Settings
from burst_attention._latent.tiles import Chunk, Inputs
from burst_attention._linear.checks import no_placement
from burst_attention._types import AnyMesh, Axes, Layout


def latent_attention(
    query: Float[Array, "batch seq heads head_dim"],
    latent: PyTree[Shaped[Array, "batch seq ..."]],
    expand: Expand,
    params: PyTree[Shaped[Array, "..."]],
    *,
    axis_name: str | Axes | None = None,
    mesh: AnyMesh | None = None,
    spec: PartitionSpec | None = None,
    params_spec: PyTree[PartitionSpec] | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    segment_ids: Int[AnyArray, "batch seq"] | None = None,
    logits_soft_cap: float | None = None,
    layout: Layout = "contiguous",
    kernels: Kernels = "auto",
    residual_dtype: Literal["float32"] | None = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention over keys and values that are expanded from latents, of a sharded sequence.

    Inside ``jax.shard_map`` along ``axis_name``, arrays are this device's shards. Everywhere else
    they are global arrays: as in `dot_product_attention`, their types say mesh, spec and axis_name
    where mesh axes are Explicit, and Auto meshes need ``spec``. The result is that of::

        key, value = expand(params, latent)
        out = ba.attention(query, key, value, axis_name=axis_name, ...)

    But the latents go round the ring, and each device expands the chunks that arrive, one at a
    time. So the ring sends the bytes of latents, and no device holds the keys and values of more
    than one chunk. Multi-head latent attention has 576 numbers for a token, from which it expands
    tens of thousands (docs/latents.md). The price is that every device expands every chunk that one
    of its queries sees, and again in the backward pass: for shards of a few thousand tokens and
    more it is small.

    The gradients of a chunk of latents follow the chunk, in float32. Sums over chunks are float32
    for the gradients of query and params too. Reverse-mode derivatives with respect to the floats
    of query, latent and params, and with respect to both results; second derivatives and forward
    mode are errors. A chunk that no query of this device sees is not expanded.

    Args:
      query: ``[batch, seq, heads, head_dim]``. bfloat16, float16 or float32; head_dim up to 256.
      latent: an array, or a tree of arrays, each ``[batch, seq, ...]`` with the tokens of query, of
        any type. All of them travel. What the expansion needs of a token belongs here, such as its
        position, or a part of its key to which rotary embeddings are applied already.
      expand: a function ``expand(params, latent) -> (key, value)`` of JAX, with key ``[batch, seq,
        kv_heads, head_dim]`` and value ``[batch, seq, kv_heads, value_dim]`` in query's dtype. It
        gets a chunk of latents at a time, or half of one, and treats tokens one by one. It must not
        exchange data along ``axis_name``, since devices expand different chunks. The call runs it
        once for each shape of a chunk. Where JAX differentiates arrays that it finds in its
        surroundings, the call is an error.
      params: a tree of arrays that ``expand`` gets, such as the projections; the same on all
        devices of a ring. Where ``check_vma=False`` and ``jax.grad`` stand inside the
        ``shard_map``, each device gets only its own part of their gradient: sum it with
        ``lax.psum``.
      axis_name: mesh axis along which the sequence is sharded, or a pair (outer, inner). Needed
        inside ``shard_map``; for global arrays the axes that shard dimension 1 are the default.
      mesh: for global arrays; default: the mesh of the arrays, or of ``jax.set_mesh``.
      spec: for global arrays, the sharding of query, such as ``P("data", "context", "tensor")``.
        Latents and segment_ids are sharded like its first two dimensions.
      params_spec: for global arrays, the sharding of params: a ``PartitionSpec``, or a tree of them
        like params. Default: the arrays' types on Explicit axes; whole on Auto axes. Where query's
        heads are sharded, ``expand`` must return a device's key/value heads from its part of
        params.
      is_causal: as in `attention`.
      scale: factor on q·k, default head_dim ** -0.5.
      local_window_size: as in `attention`.
      segment_ids: integers ``[batch, seq]`` in the order of ``layout``. They travel too.
      logits_soft_cap: as in `attention`.
      layout: ``contiguous``, ``zigzag`` or ``striped``. ``zigzag`` balances causal work.
      kernels: as in `attention`.
      residual_dtype: as in `attention`.
      implementation: as in `attention`.
      return_residual: whether to also return lse.

    Returns:
      ``out``, ``[batch, seq, heads, value_dim]`` in query's dtype; with ``return_residual=True``
      ``(out, lse)``, lse float32 ``[batch, seq, heads]``.

    Raises:
      ValueError, TypeError, NotImplementedError: while tracing, with the way out.
    """
    options = check_options(
        CALLER,
        {
            "is_causal": is_causal,
            "scale": scale,
            "local_window_size": local_window_size,
            "logits_soft_cap": logits_soft_cap,
            "layout": layout,
            "kernels": kernels,
            "residual_dtype": residual_dtype,
            "implementation": implementation,
        },
    )
    with_lse = _checks.flag("return_residual", return_residual)
    if not callable(expand):
        raise TypeError(
            "expand must be a function expand(params, latent) -> (key, value), got "
            f"{_checks.describe(expand)}"
        )
    inputs, trees = _inputs(query, latent, params, segment_ids)

    def of_leaves(*leaves: Leaves) -> object:
        return expand(*map(jax.tree.unflatten, trees, leaves))

    axes = _mesh.axes_inside(CALLER, axis_name)
    if axes is not None:
        no_placement(CALLER, mesh=mesh, spec=spec, params_spec=params_spec)
        expansion, captured = shards.trace(axes, of_leaves, options, inputs)
        inputs = inputs._replace(captured=captured)
        out, lse = shards.attend(axes, Settings(expansion, options, with_lse), inputs)
    else:
        place = global_arrays.Place(mesh, spec, axis_name, params_spec, trees[0])
        out, lse = global_arrays.attend(place, of_leaves, options, with_lse, inputs)
    return (out, lse) if with_lse else out


def _inputs(
    query: object, latent: Any, params: Any, segment_ids: object
) -> tuple[Inputs, tuple[PyTreeDef, PyTreeDef]]:
    """Returns the arrays of a call, checked, and the trees of params and of latents."""
    q = _checks.as_array(_checks.activation("query", query, "[batch, seq, heads, head_dim]"))
    if q.size == 0:
        raise ValueError(f"query must have batch entries, tokens and heads, got shape {q.shape}")
    (latent, latent_tree), (params, params_tree) = map(jax.tree.flatten, (latent, params))
    latent, params = (
        [_checks.as_array(_checks.array_type(name, x)) for x in leaves]
        for name, leaves in (("an array of latent", latent), ("an array of params", params))
    )
    rows = q.shape[:2]
    found = [x.shape for x in latent]
    if not found or any(shape[:2] != rows for shape in found):
        raise ValueError(
            f"latent must consist of arrays [batch, seq, ...] that begin with {rows} as query "
            f"does, got {_checks.shown(found)}"
        )
    if isinstance(segment_ids, tuple | list):
        raise TypeError(
            "segment_ids must be one array [batch, seq]: queries and keys are the same tokens, got "
            f"a {type(segment_ids).__name__}"
        )
    ids = check_features({"segment_ids": segment_ids}, q, q, 0.0)
    inputs = Inputs(q, Chunk(latent, ids.key_segment_ids), params, ids.query_segment_ids)
    return inputs, (params_tree, latent_tree)
