"""Linear attention of one more token."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from burst_attention._attention.options import AnyArray
from burst_attention._linear import checks


def linear_attention_step(
    query: Float[Array, "batch q_heads k_dim"],
    key: Float[Array, "batch k_heads k_dim"],
    value: Float[Array, "batch v_heads v_dim"],
    state: Float[Array, "batch heads k_dim v_dim"],
    *,
    decay: Float[AnyArray, " heads"] | None = None,
    log_decay: Float[AnyArray, "batch heads"] | None = None,
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Linear attention of one more token: ``(out, state)``::

        S = λ S + k vᵀ;   out = scale · qᵀ S

    Plain JAX, on any device, differentiable in every way. The first state comes from
    `linear_attention` with ``return_state=True``, or is zeros.

    Args:
      query: ``[batch, q_heads, k_dim]``.
      key: ``[batch, k_heads, k_dim]``.
      value: ``[batch, v_heads, v_dim]``. Heads are shared as in `linear_attention`.
      state: floats ``[batch, heads, k_dim, v_dim]``, cast to float32.
      decay: λ, floats ``[heads]``, cast to float32; default 1, checked as in `linear_attention`.
      log_decay: ln λ of this token, floats ``[batch, heads]``, cast to float32; −∞ leaves
        nothing of ``state``, not even NaN. Excludes ``decay``.
      scale: factor on query, a Python number; default 1.

    Returns:
      ``out``, ``[batch, heads, v_dim]`` in query's dtype, and the new state.

    Raises:
      ValueError, TypeError: while tracing, with the way out.
    """
    token = [x[:, None] if hasattr(x, "ndim") else x for x in (query, key, value)]
    arrays = q, _, v = checks.arrays(*token)
    shape = (q.shape[0], checks.heads_of(q, v))
    given = checks.decays(decay, log_decay, shape, "[batch, heads]")
    factor, state = checks.scale(scale), checks.state("state", state, q, v)
    logs = checks.logs_of(*given, shape)
    single = (jnp.repeat(x[:, 0], shape[1] // x.shape[2], axis=1) for x in arrays)
    q, k, v = (x.astype(jnp.float32) for x in single)
    # A reset lets nothing pass, also in derivatives, not even NaN.
    passes = ~jnp.isneginf(logs)
    logs, before = jnp.where(passes, logs, 0), jnp.where(passes[..., None, None], state, 0)
    faded = jnp.where(passes[..., None, None], jnp.exp(logs)[..., None, None] * before, 0)
    after = faded + k[..., :, None] * v[..., None, :]
    out = jnp.einsum("bhk,bhkv->bhv", q * factor, after, precision="highest")
    return out.astype(arrays[0].dtype), after
