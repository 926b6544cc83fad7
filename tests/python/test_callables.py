"""What a user's function reads when a call is made is what the call computes with."""

import gc
import threading
import weakref
from functools import partial

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from bounds import close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_eager import COMPILES, events

pytestmark = pytest.mark.needs("products", "float32")

X = P(None, "context")
ROWS = (1, 16, 2, 8)
ZIGZAG = {"layout": "zigzag", "is_causal": True}


class Layer:
    """A module whose methods read its attributes."""

    def __init__(self, weight=1.0):
        self.weight = weight

    def expand(self, params, latent):
        return latent * jnp.sin(self.weight), latent * self.weight

    def features(self, x):
        return jax.nn.elu(x * self.weight) + 1


def array(seed=0):
    mesh = ring.line(2)
    return jax.device_put(ring.normal(seed, ROWS)[0], NamedSharding(mesh, X))


def latents(x, layer, **options):
    return ba.latent_attention(x, x, layer.expand, (), mesh=ring.line(2), spec=X, **options)


def expanded_first(x, layer, **options):
    return ba.dot_product_attention(x, *layer.expand((), x), mesh=ring.line(2), spec=X, **options)


def infini(x, layer):
    return ba.infini_attention(
        x, x, x, jnp.zeros(2), segment_size=8, mesh=ring.line(2), spec=X, feature_map=layer.features
    )[0]


def features_first(x, layer):
    turned = x * layer.weight
    out, _ = ba.infini_attention(
        turned,
        turned,
        x,
        jnp.zeros(2),
        segment_size=8,
        mesh=ring.line(2),
        spec=X,
        local_query=x,
        local_key=x,
    )
    return out


FAMILIES = {"latents": (latents, expanded_first), "infini": (infini, features_first)}
families = pytest.mark.parametrize(("call", "reference"), FAMILIES.values(), ids=FAMILIES)


def in_turn(call, layer, weights, x):
    """Returns the sum of the results with each of some weights, set in a loop."""
    total = 0
    for layer.weight in weights:
        total += (call(x, layer) ** 2).sum()
    return total


@families
def test_a_method_reads_the_attributes_of_its_call(call, reference):
    x, layer = array(), Layer()
    for layer.weight in (1.0, 2.0, np.float32(0.5), jnp.linspace(0.5, 1, 8)):
        close(call(x, layer), reference(x, layer), 3e-6)


@families
def test_each_call_of_one_program_reads_its_own(call, reference):
    """Also where JAX runs the rules of derivatives after the loop."""
    x, weights = array(), (1.0, 0.25)
    one = lambda call: lambda x: in_turn(call, Layer(), weights, x)  # noqa: E731
    want = jax.jit(jax.value_and_grad(one(reference)))(x)
    close(jax.jit(jax.value_and_grad(one(call)))(x), want, 3e-6)
    if call is latents:
        close(jax.value_and_grad(jax.jit(one(call)))(x), want, 3e-6)
        close(jax.value_and_grad(one(call))(x), want, 3e-6)


def test_halves_of_chunks_read_their_own():
    """Whole and half chunks are traced once each, and none after the call."""
    x, weights, shapes = array(), (1.0, 0.25), []

    class Counting(Layer):
        def expand(self, params, latent):
            shapes.append((latent.shape[1], self.weight))
            return super().expand(params, latent)

    def one(call, layer):
        return lambda x: in_turn(lambda *given: call(*given, **ZIGZAG), layer, weights, x)

    want = jax.jit(jax.value_and_grad(one(expanded_first, Layer())))(x)
    close(jax.jit(jax.value_and_grad(one(latents, Counting())))(x), want, 3e-6)
    assert shapes == [(8, 1.0), (4, 1.0), (8, 0.25), (4, 0.25)]


@families
def test_inside_shard_map_and_in_two_programs(call, reference):
    """A traced array that a function finds in one program does not reach another."""
    x, layer = array(), Layer()

    def run(x, weight):
        layer.weight = weight * 2
        return call(x, layer)

    first, second = jax.jit(run), jax.jit(lambda *given: run(*given) + 1)
    weight = jnp.linspace(0.5, 1, 8)
    want = reference(x, Layer(2 * weight))
    close(first(x, weight), want, 3e-6)
    close(second(x, weight) - 1, want, 3e-6)
    mesh = ring.line(2)

    def local(x, weight):
        layer.weight = weight * 2
        if call is latents:
            return ba.latent_attention(x, x, layer.expand, (), axis_name="context")
        gate = jnp.zeros(2)
        return ba.infini_attention(
            x, x, x, gate, segment_size=8, axis_name="context", feature_map=layer.features
        )[0]

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(X, P()), out_specs=X)
    for _ in range(2):
        close(jax.jit(lambda *given: mapped(*given))(x, weight), want, 3e-6)


@pytest.mark.parametrize("weights", ["list", "array"])
def test_closures_over_lists_and_pytrees_with_values(weights):
    x = array()
    held = [1.0] if weights == "list" else [jnp.ones(8)]
    expand = lambda params, latent: (latent, held[0] * latent)  # noqa: E731
    call = lambda: ba.latent_attention(x, x, expand, (), mesh=ring.line(2), spec=X)  # noqa: E731
    first = call()
    held[0] = held[0] * 3
    close(call(), 3 * np.asarray(first), 3e-6)


def test_a_module_of_nnx():
    nnx = pytest.importorskip("flax.nnx")

    class Module(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.ones(8))

        def expand(self, params, latent):
            return latent, latent * self.weight[...]

    x, module = array(), Module()
    first = latents(x, module)
    module.weight[...] = jnp.full(8, 2.0)
    close(latents(x, module), 2 * np.asarray(first), 3e-6)
    assert not events(lambda: latents(x, module))[COMPILES]


@families
def test_calls_outside_jit_compile_where_the_program_changed(call, reference):
    """Captured arrays are operands; numbers of Python are part of the program."""
    x, layer = array(), Layer(jnp.linspace(0.5, 1, 8))
    jax.block_until_ready(call(x, layer))
    for layer.weight in (jnp.linspace(0.25, 1, 8), jnp.ones(8)):
        assert not events(lambda: call(x, layer))[COMPILES]
    close(call(x, layer), reference(x, layer), 3e-6)
    layer.weight = 0.375
    if call is latents:
        assert events(lambda: call(x, layer))[COMPILES] == 1
    assert not events(lambda: call(x, Layer(0.375)))[COMPILES]


@pytest.mark.parametrize("transform", ["grad", "vmap"])
@families
def test_transformed_calls_outside_jit_compile_nothing_anew(call, reference, transform):
    layer = Layer(jnp.linspace(0.5, 1, 8))
    if transform == "grad":
        x, of = array(), lambda call: jax.grad(lambda x: (call(x, layer) ** 2).sum())
    else:
        x, of = jnp.stack([array(), array(1)]), lambda call: jax.vmap(lambda x: call(x, layer))
    jax.block_until_ready(of(call)(x))
    layer.weight = jnp.linspace(0.25, 1, 8)
    close(of(call)(x), of(reference)(x), 3e-6)
    if call is latents:
        assert not events(lambda: of(call)(x))[COMPILES]


def test_gradients_on_explicit_axes_compile_nothing_anew():
    mesh = ring.line(2, axis_type=AxisType.Explicit)
    with jax.set_mesh(mesh):
        x, layer = jax.device_put(ring.normal(0, ROWS)[0], NamedSharding(mesh, X)), Layer(0.5)
        call = lambda x: ba.latent_attention(x, x, layer.expand, ())  # noqa: E731
        gradient = jax.grad(lambda x: (call(x) ** 2).sum())
        first = np.asarray(gradient(x))
        assert not events(lambda: gradient(x))[COMPILES]
        layer.weight = 0.25
        assert np.abs(gradient(x) - first).max() > 0


def test_a_backward_rule_that_changed_is_another_program():
    """The text of the forward pass is the same. So are those of callbacks and stopped gradients."""
    x, factor = array(), [1.0]

    @jax.custom_vjp
    def scaled(x):
        return x

    scaled.defvjp(lambda x: (x, None), lambda _, dx: (dx * factor[0],))

    def gradient(expand):
        call = lambda c: ba.latent_attention(x, c, expand, (), mesh=ring.line(2), spec=X)  # noqa: E731
        return np.asarray(jax.grad(lambda c: call(c).sum())(x))

    through = lambda params, c: (scaled(c), scaled(c))  # noqa: E731
    first = gradient(through)
    factor[0] = 3.0
    close(gradient(through), 3 * first, 3e-6)
    close(gradient(lambda _, c: (c, c)), first, 3e-6)
    assert not gradient(lambda _, c: (jax.lax.stop_gradient(c),) * 2).any()


def test_a_callback_is_that_of_its_call():
    x, name, seen = array(), ["first"], []

    def expand(params, latent):
        jax.debug.callback(partial(seen.append, name[0]))
        return latent, latent

    def call():
        ba.latent_attention(x, x, expand, (), mesh=ring.line(2), spec=X).block_until_ready()
        jax.effects_barrier()

    call()
    seen.clear()
    name[0] = "second"
    call()
    assert set(seen) == {"second"}


def test_no_call_keeps_what_its_function_holds():
    x, layer = array(), Layer(jnp.linspace(0.5, 1, 8))
    jax.block_until_ready((latents(x, layer), infini(x, layer)))
    jax.block_until_ready(jax.vjp(partial(latents, layer=layer), x)[0])
    dead = [weakref.ref(layer), weakref.ref(layer.weight)]
    del layer
    gc.collect()
    assert [ref() for ref in dead] == [None] * 2


def test_threads_read_their_own():
    x, own, results = array(), threading.local(), {}
    call = partial(ba.latent_attention, x, x, mesh=ring.line(2), spec=X)
    expand = lambda params, latent: (latent, latent * own.weight)  # noqa: E731

    def run(weight):
        own.weight = np.full(8, weight, np.float32)
        results[weight] = np.asarray(call(expand, ()))

    threads = [threading.Thread(target=run, args=(0.25 * i,)) for i in range(1, 7)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for weight, result in results.items():
        close(result, results[1.0] * weight, 3e-6)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_expand_does_not_take_differentiated_arrays_from_its_surroundings(transform):
    x, weight = array(), jnp.linspace(0.5, 1, 8)
    loss = transform(lambda weight: latents(x, Layer(weight)).sum())
    with pytest.raises(NotImplementedError, match="give this array to latent_attention in params"):
        jax.grad(loss)(weight)
    stopped = transform(lambda w: latents(x, Layer(jax.lax.stop_gradient(w))).sum())
    assert not np.asarray(jax.grad(stopped)(weight)).any()


def test_expand_does_not_take_arrays_of_explicit_axes_from_its_surroundings():
    mesh = ring.line(2, axis_type=AxisType.Explicit)
    x = jax.device_put(ring.normal(0, ROWS)[0], NamedSharding(mesh, X))
    weight = jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, P()))
    with pytest.raises(NotImplementedError, match="give this array in params"):
        ba.latent_attention(x, x, Layer(weight).expand, ())


def test_arrays_that_a_feature_map_finds_get_gradients():
    x, weight = array(), jnp.linspace(0.5, 1, 8)
    of = lambda call: jax.grad(lambda w: (call(x, Layer(w)) ** 2).sum())(weight)  # noqa: E731
    close(of(infini), of(features_first), 1e-5)


def test_a_feature_map_keeps_shapes():
    class Wide(Layer):
        def features(self, x):
            return jnp.concatenate([x, x], -1)

    with pytest.raises(ValueError, match=r"feature_map\(query\) must have shape"):
        infini(array(), Wide())


@pytest.mark.parametrize("reduced", [("data", "context"), ("context",)], ids=" ".join)
def test_params_typed_reduced(reduced):
    """Their gradients are typed as parts that nobody has summed yet."""
    mesh = ring.mesh(2, 2, 1, axis_type=AxisType.Explicit)
    x = jax.device_put(ring.normal(0, (2, 16, 2, 8))[0], NamedSharding(mesh, P("data", "context")))
    weight = np.linspace(0.5, 1, 8, dtype=np.float32)

    def run(spec):
        def loss(w):
            return (ba.latent_attention(x, x, lambda w, c: (c * w, c * w), w) ** 2).sum()

        placed = jax.device_put(weight, NamedSharding(mesh, spec))
        value, gradient = jax.jit(jax.value_and_grad(loss))(placed)
        return value, jax.reshard(gradient, NamedSharding(mesh, P()))

    close(run(P(reduced=set(reduced))), run(P()), 3e-6)


@pytest.mark.parametrize("kind", ["captured", "constant", "relu", "scan"])
def test_a_pipeline_maps_all_that_expand_computes(kind):
    """A vmap over axes of spmd_axis_name shows its axes in the types of arrays in the ring."""
    mesh = jax.make_mesh(
        (2, 2), ("stage", "context"), (AxisType.Auto,) * 2, devices=ring.devices(4)
    )
    x = jax.device_put(
        ring.normal(0, (2, *ROWS))[0], NamedSharding(mesh, P("stage", None, "context"))
    )
    weight = jnp.linspace(0.5, 1, 8)
    expand = {
        "captured": lambda c: c * weight,
        "constant": lambda c: jnp.concatenate([c[..., :4] * 2, jnp.zeros_like(c[..., 4:])], -1),
        "relu": jax.nn.relu,
        "scan": lambda c: jax.lax.scan(lambda c, _: (c * 1.5, None), c, None, length=2)[0],
    }[kind]

    def gradient(call):
        mapped = jax.vmap(lambda x: (call(x) ** 2).sum(), spmd_axis_name="stage")
        return jax.jit(jax.value_and_grad(lambda x: mapped(x).sum()))(x)

    place = {"mesh": mesh, "spec": X}
    got = gradient(lambda x: ba.latent_attention(x, x, lambda _, c: (expand(c), c), (), **place))
    want = gradient(lambda x: ba.dot_product_attention(x, expand(x), x, **place))
    close(got, want, 3e-6)
