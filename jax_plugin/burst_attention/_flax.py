"""Attention as the attention layers of Flax call it. This module does not import Flax."""

import math
from collections.abc import Callable
from typing import Any, TypeAlias, Unpack

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from burst_attention import _checks
from burst_attention._attention.arguments import beyond_padding
from burst_attention._attention.global_arrays import dot_product_attention
from burst_attention._attention.options import AttentionOptions, check_options
from burst_attention._types import AnyMesh, Axes

Array4: TypeAlias = Float[Array, "_ _ _ _"]

OF_THE_LAYER = {
    "dropout_rate": "dropout_rate of the layer",
    "dropout_key": "rngs of the layer's call",
    "batch_axis": "spec",
    "head_axis": "spec",
}
"""Options that flax_attention_fn does not take, each with what says them instead."""
OWN_PRODUCTS = "the ring computes its own products; leave the layer's {}_cls out"
UNSUPPORTED = {
    "module": "sow_weights=True asks for the attention weights, a sequence × sequence array that a "
    "ring never has; leave it out",
    "input_positions": "they are for flax's own rotary embeddings; rotate queries and keys in a "
    "function around this one",
    "qk_attn_weights_einsum": OWN_PRODUCTS.format("qk_attn_weights_einsum"),
    "attn_weights_value_einsum": OWN_PRODUCTS.format("attn_weights_value_einsum"),
}
"""Arguments of Flax that a ring can't honour, each with the reason and the way out."""
INSTEAD_OF_MASKS = (
    "for a causal mask pass is_causal=True to flax_attention_fn and no mask, for padding a mask "
    "[batch, 1, 1, kv_len] or [batch, 1, q_len, 1], for packed documents segment_ids, and for a "
    "mask in which an interval of query positions sees each key visible=(start, stop)"
)


def flax_attention_fn(
    *,
    mesh: AnyMesh | None = None,
    spec: PartitionSpec | None = None,
    axis_name: str | Axes | None = None,
    **options: Unpack[AttentionOptions],
) -> Callable[..., jax.Array]:
    """Returns `dot_product_attention` in the form of ``attention_fn`` of Flax's attention layers.

    The function serves ``flax.nnx.MultiHeadAttention`` and
    ``flax.linen.MultiHeadDotProductAttention``. It takes query, key and value
    ``[batch..., length, heads, head_dim]`` and the layer's keyword arguments:

    - ``deterministic``, ``dropout_rate`` and ``dropout_rng`` become dropout_rate and dropout_key.
      Each batch entry and head drops weights of its own, whatever ``broadcast_dropout`` says.
    - ``mask`` hides padding: ``[batch..., 1, 1, kv_len]`` of keys, ``[batch..., 1, q_len, 1]`` of
      queries; 0 or False hides. The result of a hidden query, and of a query without keys, is 0;
      Flax gives the mean of all values.
    - ``is_causal`` adds to the option of the same name.
    - ``dtype`` is the type to compute with. All sums are float32, whatever ``precision`` and
      ``force_fp32_for_softmax`` say.

    Args:
      mesh: as in `dot_product_attention`.
      spec: as in `dot_product_attention`, for ``[batch, seq, heads, head_dim]``; batch stands for
        all leading dimensions together.
      axis_name: as in `dot_product_attention`.
      **options: the options of `dot_product_attention` except dropout_rate and dropout_key, which
        the layer gives. The order of the tokens is that of ``layout``.

    Returns:
      A function that returns ``[batch..., length, heads, head_dim]``. It refuses ``bias``, masks
      over queries and keys, and ``sow_weights=True``, which needs the attention weights.

    Raises:
      ValueError, TypeError, NotImplementedError: for wrong options; the function raises while
        tracing, with the way out.
    """
    for name, instead in OF_THE_LAYER.items():
        if name in options:
            raise TypeError(f"flax_attention_fn() takes no {name}: {instead} says it; leave it out")
    check_options("flax_attention_fn", options)

    # Linen passes the arguments that stand in this signature, and leaves out all others.
    def attend(
        query: object,
        key: object,
        value: object,
        bias: Any = None,
        mask: object = None,
        broadcast_dropout: bool = True,
        dropout_rng: Any = None,
        dropout_rate: Any = 0.0,
        deterministic: object = False,
        dtype: Any = None,
        precision: object = None,
        module: object = None,
        force_fp32_for_softmax: bool = False,
        qk_attn_weights_einsum: object = None,
        attn_weights_value_einsum: object = None,
        is_causal: object = False,
        input_positions: object = None,
    ) -> jax.Array:
        _refuse(
            module=module,
            input_positions=input_positions,
            qk_attn_weights_einsum=qk_attn_weights_einsum,
            attn_weights_value_einsum=attn_weights_value_einsum,
        )
        batch, qkv = _flattened(query, key, value, dtype)
        causal = _checks.flag("is_causal", is_causal) or options.get("is_causal", False)
        given: AttentionOptions = {**options, "is_causal": causal}
        rate = check_options("attention_fn", {"dropout_rate": dropout_rate}).dropout_rate
        if rate and not _checks.flag("deterministic", deterministic):
            given |= {"dropout_rate": dropout_rate, "dropout_key": dropout_rng}
        padding = None if mask is None else _padding(mask, batch)
        out = dot_product_attention(
            *qkv, bias, padding, mesh=mesh, spec=spec, axis_name=axis_name, **given
        )
        return out.reshape(*batch, *out.shape[1:])

    return attend


def _refuse(**arguments: object) -> None:
    """Raises for arguments of Flax that a ring can't honour."""
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{name} is not supported over a ring: {UNSUPPORTED[name]}")


def _flattened(
    query: object, key: object, value: object, dtype: Any
) -> tuple[tuple[int, ...], tuple[Array4, Array4, Array4]]:
    """Returns the leading dimensions, and the arrays with one batch dimension and one dtype."""
    named = {"query": query, "key": key, "value": value}
    arrays = [_checks.as_array(_checks.array_type(name, x)) for name, x in named.items()]
    batches = [x.shape[:-3] for x in arrays]
    if any(x.ndim < 3 for x in arrays) or len(set(batches)) > 1:
        raise ValueError(
            "query, key and value must be [batch..., length, heads, head_dim] with the same batch "
            f"dimensions, got shapes {', '.join(str(x.shape) for x in arrays)}"
        )
    common = jnp.result_type(*arrays) if dtype is None else dtype
    q, k, v = (x.astype(common).reshape(math.prod(batches[0]), *x.shape[-3:]) for x in arrays)
    return batches[0], (q, k, v)


def _padding(mask: object, batch: tuple[int, ...]) -> Bool[Array, "_ 1 _ _"]:
    """Returns a mask of padding with one batch dimension."""
    shown = _checks.as_array(_checks.array_type("mask", mask)).astype(bool)
    most = len(batch) + 3
    if shown.ndim > most:
        raise ValueError(f"mask must have at most {most} dimensions, got shape {shown.shape}")
    shape = (1,) * (most - shown.ndim) + shown.shape
    if shape[-3] != 1 or 1 not in shape[-2:]:
        raise NotImplementedError(
            f"mask must mark padding, got shape {shown.shape}: {beyond_padding(*shape[-2:])}; "
            f"{INSTEAD_OF_MASKS}"
        )
    if any(length not in (1, whole) for length, whole in zip(shape, batch, strict=False)):
        raise ValueError(f"mask must have batch dimensions {batch} or 1, got shape {shown.shape}")
    whole = jnp.broadcast_to(shown.reshape(shape), (*batch, *shape[-3:]))
    return whole.reshape(math.prod(batch), *shape[-3:])
