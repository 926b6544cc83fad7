"""Public calls give the results of one device on every mesh, or say what they need."""

import jax
import jax.numpy as jnp
import pytest
from bounds import close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from mesh_calls import CALLS
from mesh_cases import Case, chosen, inputs, product

pytestmark = pytest.mark.needs("float32", "products")

CHOSEN = {str(case) for case in chosen(CALLS)}
"""The cases in which every pair of factors occurs."""


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(entry, id=str(entry), marks=() if str(entry) in CHOSEN else pytest.mark.rare)
        for entry in product(CALLS)
    ],
)
def test_a_call_on_a_mesh_gives_the_results_of_one_device(entry):
    if words := entry.refusal():
        with pytest.raises(ValueError, match=words):
            entry.run()
    else:
        close(entry.run(), entry.expected(), 3e-6)


@pytest.mark.parametrize("name", ["linear", "delta", "infini", "latents"])
def test_shards_need_axis_name(name):
    """The calls serve global arrays too, where types may say it."""
    call = next(call for call in CALLS if call.name == name)
    case = Case(call, "one device", "Explicit", "sharded", "no")
    local = jax.shard_map(
        lambda a: call.function(case, a), mesh=case.on(), in_specs=P(), out_specs=P()
    )
    with pytest.raises(ValueError, match="_attention needs axis_name inside jax.shard_map"):
        jax.eval_shape(local, inputs(case))


def test_jax_does_not_sum_over_axes_of_one_device_in_an_explicit_vmap():
    """Cases leave out what plain JAX refuses; once it does not, they can come in."""
    mesh = jax.make_mesh((1, 2), ("data", "stage"), (AxisType.Explicit,) * 2)
    x = jax.device_put(jnp.ones((2, 2)), NamedSharding(mesh, P("stage")))
    scaled = jax.shard_map(
        lambda x, data: x * data, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")
    )
    data = jax.device_put(jnp.ones(2), NamedSharding(mesh, P("data")))

    def loss(x):
        return jax.vmap(scaled, (0, None))(x, data).sum()

    with pytest.raises(jax.errors.JaxRuntimeError, match="Cross-partition allreduce must be in"):
        jax.jit(jax.grad(loss))(x)
