"""One more token of linear attention, and of the delta rule."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from burst_attention._attention.options import AnyArray
from burst_attention._linear import checks
from burst_attention._linear.plain import EXACT, advance


def linear_attention_step(
    query: Float[Array, "batch q_heads k_dim"],
    key: Float[Array, "batch k_heads k_dim"],
    value: Float[Array, "batch v_heads v_dim"],
    state: Float[Array, "batch heads k_dim v_dim"],
    *,
    decay: Float[AnyArray, " heads"] | None = None,
    log_decay: Float[AnyArray, "batch heads"] | Float[AnyArray, "batch heads k_dim"] | None = None,
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
      log_decay: ln λ of this token, floats ``[batch, heads]`` or ``[batch, heads, k_dim]``, cast to
        float32; −∞ leaves nothing of ``state``, not even NaN. Excludes ``decay``.
      scale: factor on query, a Python number; default 1.

    Returns:
      ``out``, ``[batch, heads, v_dim]`` in query's dtype, and the new state.

    Raises:
      ValueError, TypeError: while tracing, with the way out.
    """
    return stepped((query, key, value), state, (decay, log_decay), None, scale)


def stepped(
    rows: tuple[object, object, object],
    state: object,
    decays: tuple[object, object],
    beta: object,
    scale: object,
) -> tuple[jax.Array, jax.Array]:
    """Returns the output of one more token and the state after it; checks all arguments first.

    ``rows`` are query, key and value, ``decays`` the decay of heads and the log decay of the token.
    """
    # Wrong arguments stay as they are, for the checks.
    tokens = [x[:, None] if isinstance(x, jax.Array | np.ndarray) else x for x in rows]
    arrays = q, _, v = checks.arrays(*tokens)
    shape = (q.shape[0], checks.heads_of(q, v))
    given = checks.decays(*decays, (*shape, q.shape[3]), ("batch", "heads", "k_dim"))
    betas = checks.betas(beta, shape, "[batch, heads]")
    factor, before = checks.scale(scale), checks.state("state", state, q, v)
    logs = checks.logs_of(*given, shape)
    single = (jnp.repeat(x[:, 0], shape[1] // x.shape[2], axis=1) for x in arrays)
    q, k, v = (x.astype(jnp.float32) for x in single)
    after = advance(before, k, v, logs, betas)
    out = jnp.einsum("bhk,bhkv->bhv", q * factor, after, precision=EXACT)
    return out.astype(arrays[0].dtype), after
