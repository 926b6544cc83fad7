"""MaxText with the attention of this package.

Two lines before MaxText's trainer runs::

    from burst_attention.integrations import maxtext
    maxtext.install()

The page "Bring your own model" lists the options and the versions that are tested.
"""

import importlib
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

from burst_attention._attention.global_arrays import dot_product_attention
from burst_attention._checkpoint import LSE_NAME, OUT_NAME
from burst_attention._checks import at_least_1, listed
from burst_attention._layouts import layout_positions, to_layout
from burst_attention._mesh import axes_size, names_of
from burst_attention._types import AnyMesh, Axes, Layout

__all__ = ["attention", "install"]

TESTED = "0.2.5"
KINDS = ("global", "mla", "full", "local_sliding", "chunk")
"""The attention types that `attention` computes."""
LAYOUTS: dict[str, Layout] = {"dual_chunk_swap": "zigzag", "striped": "striped"}
"""For each of MaxText's orders of tokens its name here."""
REORDERED = {
    "inputs",
    "targets",
    "inputs_position",
    "targets_position",
    "inputs_segmentation",
    "targets_segmentation",
    "corruption_mask",
    "targets_loss_mask",
}
"""The arrays of a batch that have tokens."""


def install() -> None:
    """Makes MaxText, in this process, train with the attention of this package.

    Replaces three functions of MaxText; a second call changes nothing:

    - ``AttentionOp.apply_attention`` by `attention` in training. Other modes keep MaxText's own.
    - ``max_utils.reorder_causal_load_balanced`` by a function over `to_layout`, which serves both
      orders, any number of devices and any hardware, without Transformer Engine.
    - ``NNXDecoder.get_remat_policy``: its policies treat output and lse of `attention` as results
      that MaxText calls ``context``.

    Raises:
      ImportError: where MaxText is not installed, or does not have one of these functions.
    """
    _replace("layers.attention_op", "AttentionOp.apply_attention", _in_training)
    _replace("utils.max_utils", "reorder_causal_load_balanced", lambda _: reordered)
    _replace("layers.nnx_decoders", "NNXDecoder.get_remat_policy", _with_names)


def _replace(module: str, path: str, replacement: Callable[[Any], Any]) -> None:
    """Puts ``replacement(original)`` in the place of a function of MaxText, once."""
    owner: Any = importlib.import_module(f"maxtext.{module}")
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent, None)
    original = getattr(owner, name, None)
    if original is None:
        version = importlib.import_module("maxtext").__version__
        raise ImportError(
            f"expected {path} in maxtext.{module}, but MaxText {version} does not have it; install "
            f"maxtext=={TESTED}, or set AttentionOp.apply_attention to maxtext.attention of "
            "burst_attention.integrations"
        )
    if not hasattr(original, "replaced"):
        new = replacement(original)
        new.replaced = original
        setattr(owner, name, new)


def _in_training(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def apply_attention(self: Any, *, model_mode: str, **named: Any) -> Any:
        function = attention if model_mode == "train" else original
        return function(self, model_mode=model_mode, **named)

    return apply_attention


@partial(jax.jit, static_argnums=(1, 2, 3))
def reordered(
    batch: Mapping[str, jax.Array], cp_size: int, reorder_strategy: Any, hardware: str = ""
) -> dict[str, jax.Array]:
    """Returns a batch of MaxText with its tokens in the order for ``cp_size`` devices."""
    layout = LAYOUTS[reorder_strategy.value]
    return {
        name: to_layout(x, cp_size, layout) if name in REORDERED else x for name, x in batch.items()
    }


def _with_names(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def get_remat_policy(self: Any) -> Any:
        policy = original(self)
        if policy is None:
            return None

        def renamed(primitive: Any, *types: Any, **params: Any) -> Any:
            if params.get("name") in (OUT_NAME, LSE_NAME):
                params["name"] = "context"
            return policy(primitive, *types, **params)

        return renamed

    return get_remat_policy


def attention(
    self: Any,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    decoder_segment_ids: jax.Array | None,
    segment_positions: jax.Array | None,
    lengths: jax.Array | None,
    model_mode: str,
    use_ragged_attention: bool = False,
    *,
    sinks: Any = None,
    qk_product_einsum: object = None,
    wv_product_einsum: object = None,
    **others: object,
) -> tuple[jax.Array, None, None]:
    """Stands for MaxText's ``AttentionOp.apply_attention`` while it trains.

    Args:
      self: MaxText's AttentionOp: its mesh, configuration and attention type.
      query: ``[batch, seq, heads, head_dim]``, already scaled.
      key: ``[batch, seq, kv_heads, head_dim]``.
      value: ``[batch, seq, kv_heads, value_dim]``.
      decoder_segment_ids: ``[batch, seq]``, a number for each document.
      segment_positions: ``[batch, seq]``, the position of each token in its document.
      lengths: must be None.
      model_mode: must be ``"train"``.
      use_ragged_attention: has no effect in training.
      sinks: a logit for each query head.
      qk_product_einsum: not used.
      wv_product_einsum: not used.
      **others: MaxText's arguments of options that must be off.

    Returns:
      ``(out, None, None)``, as MaxText's kernels do that return no partial sums.

    Raises:
      NotImplementedError, ValueError: while tracing, for what is not computed, with the way out.
    """
    kind = self.attention_type.value
    if model_mode != "train" or kind not in KINDS:
        raise NotImplementedError(
            f"expected model_mode 'train' and attention_type {listed(KINDS)}, got {model_mode!r} "
            f"and {kind!r}; keep MaxText's own function for other modes and layers"
        )
    rate = self.dropout_rate
    given = {"lengths": lengths, "dropout_rate": rate, "moba": self.config.moba, **others}
    # Options that are off arrive as None, False or 0.
    if names := [name for name, x in given.items() if not (x is None or _is_zero(x))]:
        raise NotImplementedError(f"expected no {', '.join(names)}; turn its option off in MaxText")
    batch, heads, length, head_dim = map(
        names_of, self._logical_to_mesh_axes(self.flash_axis_names_q)
    )
    layout = layout_of(self, length)
    out = dot_product_attention(
        query,
        key,
        value,
        mesh=self.mesh,
        spec=P(_dividing(batch, query.shape[0], self.mesh), length, heads, head_dim),
        is_causal=kind != "full",
        local_window_size=_window(self) if kind == "local_sliding" else None,
        visible=_chunks(self, key, segment_positions, length, layout) if kind == "chunk" else None,
        segment_ids=decoder_segment_ids,
        logits_soft_cap=self.attn_logits_soft_cap,
        sinks=sinks,
        scale=1.0,
        layout=layout,
        schedule=_schedule(self.config),
    )
    return out, None, None


def _is_zero(value: object) -> bool:
    return isinstance(value, bool | int | float) and not value


def layout_of(op: Any, axes: Axes) -> Layout:
    """Returns the layout in which MaxText's loader gives the tokens that ``axes`` shard."""
    config, mesh = op.config, op.mesh
    if not config.context_parallel_load_balance:
        return "contiguous"
    ordered, sharded = mesh.shape.get(config.context_sharding, 1), axes_size(mesh, axes)
    if ordered != sharded:
        raise NotImplementedError(
            f"MaxText's loader ordered the tokens for {ordered} devices, but {sharded} shard the "
            "sequence here (strategy 'usp', or evaluation under other axis rules); set "
            "context_parallel_load_balance=false"
        )
    order = config.context_parallel_reorder_strategy.value
    if order == "auto":
        on_gpus = config.hardware in ("gpu", "gpu_multiprocess")
        ring = config.context_parallel_strategy == "ring"
        order = "striped" if config.packing and ring and on_gpus else "dual_chunk_swap"
    return LAYOUTS[order]


def _schedule(config: Any) -> Any:
    strategy = config.context_parallel_strategy
    return "hybrid" if strategy == "usp" else strategy


def _dividing(axes: Axes, count: int, mesh: AnyMesh) -> Axes:
    """Returns the leading axes whose devices divide a batch. All other axes repeat the batch.

    MaxText lets a batch be smaller than its axes.
    """
    found: Axes = ()
    for name in axes:
        if count % axes_size(mesh, (*found, name)):
            break
        found = (*found, name)
    return found


def _window(op: Any) -> tuple[int, int]:
    """Returns the window of a layer; MaxText counts the query's own position."""
    return at_least_1("sliding_window_size", op.sliding_window_size or 0) - 1, 0


def _chunks(
    op: Any, key: jax.Array, positions: jax.Array | None, axes: Axes, layout: Layout
) -> tuple[jax.Array, jax.Array]:
    """Returns for each key the begin and the end of the queries in its chunk that follow it.

    Chunks count from the begin of the row; where tokens are reordered, from that of each document,
    as in MaxText's own mask.
    """
    size = at_least_1("chunk_attn_window_size", op.chunk_attn_window_size or 0)
    begin = layout_positions(key.shape[1], axes_size(op.mesh, axes), layout).astype(np.int32)
    inside = begin if positions is None or layout == "contiguous" else positions
    end = begin + size - inside % size
    return jnp.broadcast_to(begin, key.shape[:2]), jnp.broadcast_to(end, key.shape[:2])
