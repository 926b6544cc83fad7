"""Attention of new tokens over a sharded cache."""

from typing import Unpack, overload

import jax
from jaxtyping import Array, Float

from burst_attention._decode import arguments, results
from burst_attention._decode.options import DecodeOptions, Integers, shows_options
from burst_attention._signatures import Alone, Either, WithLse
from burst_attention._types import X


class _Alone(DecodeOptions, Alone): ...


class _WithLse(DecodeOptions, WithLse): ...


class _Either(DecodeOptions, Either): ...


@overload
def decode_attention(
    query: X, key_cache: X, value_cache: X | None, lengths: Integers, **options: Unpack[_Alone]
) -> X: ...
@overload
def decode_attention(
    query: X, key_cache: X, value_cache: X | None, lengths: Integers, **options: Unpack[_WithLse]
) -> tuple[X, X]: ...
@overload
def decode_attention(
    query: X, key_cache: X, value_cache: X | None, lengths: Integers, **options: Unpack[_Either]
) -> X | tuple[X, X]: ...


@shows_options
def decode_attention(
    query: Float[Array, "batch T heads head_dim"],
    key_cache: Float[Array, "batch capacity kv_heads head_dim"],
    value_cache: Float[Array, "batch capacity kv_heads value_dim"] | None,
    lengths: Integers,
    *,
    return_residual: bool = False,
    **options: Unpack[DecodeOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of a few new tokens over a key/value cache that is sharded across devices.

    Query t of entry b stands at position p = lengths[b] − query_lengths[b] + t and sees the keys of
    its sequence up to its own position::

        s = scale · q kᵀ          with logits_soft_cap: cap · tanh(s / cap)
                                  with alibi_slopes: + slope · (key position − p)
                                  −inf where the window hides the key
        lse = ln Σ e^s;   out = e^(s − lse) v          with a sink z, e^z is part of that sum

    The cache holds the keys of the new tokens already: `append_to_cache` writes them. Each device
    computes with its own rows alone. Then one all-to-all and one all-gather of (out, lse) merge the
    ranks, so the call's messages do not grow with the sequence. Lengths, pages and all other arrays
    are data: another value needs no compilation. The idea of equal runs of keys over all sequences
    and heads, whose results are merged, is LeanAttention's (arXiv:2405.10480).

    Forward only: a gradient is an error. Queries beyond ``query_lengths``, before position 0 and of
    empty sequences have out 0 and lse −inf, with a sink its logit. What lies in a cache beyond
    ``lengths`` may be anything, even NaN.

    Args:
      query: ``[batch, T, heads, head_dim]``, T from 1 to 16 new tokens of each sequence, the same
        on all devices along ``axis_name``. bfloat16, float16 or float32; head_dim a multiple of 8
        up to 576.
      key_cache: ``[batch, capacity, kv_heads, head_dim]``, this device's rows, of query's dtype;
        kv_heads divides heads. With ``page_table``: ``[pages, page, kv_heads, head_dim]``.
      value_cache: as key_cache, with a value_dim of its own, a multiple of 8 up to 576. With
        None the values are the first ``value_dim`` columns of the keys, which are read once: so
        multi-head latent attention decodes over latents, with one key head.
      lengths: integers ``[batch]``, the tokens of each whole sequence, new ones included. 0 or less
        is an empty slot. A length beyond the capacity of all ranks is no error: the query stands at
        the position that its length says, and sees the keys that the caches have room for.
      return_residual: whether to also return lse.
      **options: see `DecodeOptions`.

    Returns:
      ``out``, ``[batch, T, heads, value_dim]`` in query's dtype; with ``return_residual=True``
      ``(out, lse)``, lse float32 ``[batch, T, heads]``, a natural logarithm. Both are the same on
      all devices along ``axis_name``, and typed so: ``out_specs=P()`` takes them.

    Raises:
      ValueError, TypeError, NotImplementedError: while tracing, with the way out.
    """
    arrays = (query, key_cache, value_cache, lengths)
    checked = arguments.check_call("decode_attention", arrays, options, return_residual)
    return results.attend(checked, (results.own_part(checked),))
