"""Derivatives that do not exist are errors of the package, while tracing."""

import burst_attention as ba
import jax
import jax.numpy as jnp
import pytest
import ring
from jax.sharding import PartitionSpec as P

X = P(None, "context")
SHAPE = (1, 32, 4, 16)
TRANSPOSED = "results and gradients of burst_attention can't be transposed"
SECOND = "second derivatives of burst_attention are not implemented"
FORWARD_ONLY = "decode_attention has no gradient"


def place():
    return {"mesh": ring.line(2), "spec": X}


def softmax(schedule):
    return lambda x: ba.dot_product_attention(x, x, x, schedule=schedule, **place())


FAMILIES = {
    "ring": softmax("ring"),
    "all-gather": softmax("all_gather"),
    "ulysses": softmax("ulysses"),
    "plain JAX": lambda x: ba.dot_product_attention(x, x, x, implementation="xla", **place()),
    "linear": lambda x: ba.linear_attention(x, x, x, **place()),
    "delta": lambda x: ba.delta_attention(x, x, x, jnp.ones(SHAPE[:3]), **place()),
    "infini": lambda x: ba.infini_attention(x, x, x, jnp.zeros(4), segment_size=8, **place())[0],
    "latent": lambda x: ba.latent_attention(x, x, lambda _, c: (c, c), (), **place()),
    "decode": lambda x: ba.decode_attention(x[:, :1], x, x, jnp.array([9])),
}


@pytest.mark.needs("products", "float32")
@pytest.mark.parametrize("family", FAMILIES)
def test_transposes_and_second_derivatives_say_what_to_do(family):
    call = FAMILIES[family]
    x = jnp.ones(SHAPE)
    out = jax.eval_shape(call, x)

    def pullback(x):
        return lambda d: jax.vjp(call, x)[1](d)[0]

    forward_only = family == "decode"
    second = FORWARD_ONLY if forward_only else SECOND
    of_pullback = FORWARD_ONLY if forward_only else TRANSPOSED
    for words, function in (
        (TRANSPOSED, lambda x, d: jax.linear_transpose(call, x)(d)),
        (of_pullback, lambda x, d: jax.linear_transpose(pullback(x), d)(x)),
        (second, lambda x, d: jax.vjp(pullback(x), d)[1](x)),
        (second, lambda x, d: jax.hessian(lambda x: (call(x) ** 2).sum())(x)),
    ):
        with pytest.raises(NotImplementedError, match=words):
            jax.eval_shape(function, x, out)


def test_the_transpose_of_a_shift_names_jax_vjp():
    shift = jax.shard_map(
        lambda x: ba.shift(x, axis_name="context"), mesh=ring.line(2), in_specs=X, out_specs=X
    )
    x = jnp.ones(SHAPE)
    with pytest.raises(NotImplementedError, match=r"take jax\.vjp"):
        jax.eval_shape(lambda x: jax.linear_transpose(shift, x)(x), x)
    jax.eval_shape(lambda x: jax.vjp(shift, x)[1](x), x)
