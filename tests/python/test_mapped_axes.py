"""``vmap`` over a dimension that the mesh shards equals the call on one batch.

JAX maps such a dimension in two ways: over the axes of ``spmd_axis_name`` on Auto meshes, and over
the Explicit axes that shard the arrays.
"""

import re
from functools import partial

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import platforms
import pytest
import ring
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

pytestmark = pytest.mark.oldest_jax

DTYPE = platforms.dtype("float32")
STAGES, RANKS, TOKENS, HEADS, DIM = 2, 4, 32, 4, 8
MAPPED, SHARED = ("x", "state", "ids"), ("key", "sinks", "slopes")
SPECS = {
    "x": P(None, "context"),
    "key": P(None, "context"),
    "sinks": P(),
    "slopes": P(),
    "state": P(),
    "ids": P(None, "context"),
}
"""The arrays of one stage and their sharding, in a batch of one."""


def inputs():
    random = np.random.default_rng(3)
    shape = (STAGES, 1, TOKENS, HEADS, DIM)
    return {
        "x": jnp.asarray(random.standard_normal(shape), DTYPE),
        "key": jnp.asarray(random.standard_normal(shape[1:]), DTYPE),
        "sinks": jnp.asarray(random.standard_normal(HEADS), "float32"),
        "slopes": jnp.asarray(random.random(HEADS), "float32"),
        "state": jnp.asarray(random.standard_normal((STAGES, 1, HEADS, DIM, DIM)), "float32"),
        "ids": jnp.asarray(np.sort(random.integers(0, 3, (STAGES, 1, TOKENS))), "int32"),
    }


def features(a, **more):
    return {"sinks": a["sinks"], "alibi_slopes": a["slopes"], "segment_ids": a["ids"]} | more


LAYOUT = {"is_causal": True, "layout": "zigzag"}
GLOBAL = {
    "attention": lambda a, **way: ba.dot_product_attention(
        a["x"],
        a["key"],
        a["key"],
        **features(a, dropout_rate=0.2, dropout_key=jax.random.key(1)),
        **LAYOUT,
        **way,
    ),
    "plain": lambda a, **way: ba.dot_product_attention(
        a["x"], a["x"], a["key"], implementation="xla", **features(a), **LAYOUT, **way
    ),
    "ulysses": lambda a, **way: ba.dot_product_attention(
        a["x"], a["x"], a["key"], schedule="ulysses", **features(a), **way
    ),
    "sequence": lambda a, **way: ba.dot_product_attention(
        a["key"], a["x"], a["x"], order="sequence", layout="striped", is_causal=True, **way
    ),
    "causal": lambda a, **way: ba.dot_product_attention(
        a["x"], a["x"], a["x"], is_causal=True, **way
    ),
    "linear": lambda a, **way: ba.linear_attention(
        a["x"], a["key"], a["x"], decay=jax.nn.sigmoid(a["sinks"]), initial_state=a["state"], **way
    ),
    "ring": lambda a, **way: ba.linear_attention(a["x"], a["key"], a["x"], method="ring", **way),
    "delta": lambda a, **way: ba.delta_attention(
        a["x"], a["key"] / 8, a["x"], jax.nn.sigmoid(a["x"][..., 0]), **way
    ),
    "infini": lambda a, **way: ba.infini_attention(
        a["x"], a["key"], a["key"], a["sinks"], segment_size=2, update="delta", **way
    )[0],
}
"""Calls on global arrays of one stage."""
LOCAL = {
    "attention": lambda a: ba.attention(
        a["x"], a["key"], a["x"], axis_name="context", **features(a), **LAYOUT
    ),
    "linear": lambda a: ba.linear_attention(
        a["x"], a["key"], a["x"], axis_name="context", initial_state=a["state"]
    ),
    "shift": lambda a: ba.shift(a["x"], -1, axis_name="context", segment_ids=a["ids"]),
    "decode": lambda a: lax.stop_gradient(decoded(a)),
}
"""Calls on the shards of one stage."""


def decoded(a):
    a = lax.stop_gradient(a)
    query = a["state"][:, None, :, 0].astype(DTYPE)
    lengths = jnp.array([TOKENS - 3])
    options = {"axis_name": "context", "sinks": a["sinks"]}
    out = ba.decode_attention(query, a["key"], a["x"], lengths, **options)
    # The result is the same on all ranks; each gives one part of a result that is sharded.
    return jnp.broadcast_to(out, (1, TOKENS // RANKS, *out.shape[2:]))


def mesh(kind):
    if kind is None:
        devices, types = ring.devices(RANKS), (AxisType.Auto,)
        return jax.make_mesh((RANKS,), ("context",), types, devices=devices)
    return Mesh(ring.devices(STAGES, RANKS), ("stage", "context"), (kind,) * 2)


def placed(arrays, kind):
    on = mesh(kind)

    def put(name, x):
        stage = ("stage",) if kind and name in MAPPED else ()
        return jax.device_put(x, NamedSharding(on, P(*stage, *SPECS[name])))

    return {name: put(name, x) for name, x in arrays.items()}


def on_global_arrays(name):
    def one(a, kind):
        way = {} if kind == AxisType.Explicit else {"mesh": mesh(kind), "spec": P(None, "context")}
        return GLOBAL[name](a, **way)

    return one


def on_shards(name):
    def one(a, kind):
        # An Explicit axis that a vmap maps may also be left out of the shard_map.
        only = {"axis_names": {"context"}} if kind == AxisType.Explicit else {}
        specs = {"in_specs": (SPECS,), "out_specs": P(None, "context")}
        return jax.shard_map(LOCAL[name], mesh=mesh(kind), **specs, **only)(a)

    return one


def layers(a, kind):
    """Two rematerialised layers in a scan."""

    def layer(x, _):
        return x + on_global_arrays("causal")(a | {"x": x}, kind), None

    layer = jax.checkpoint(layer, policy=ba.save_attention)
    return lax.scan(layer, a["x"], None, length=2)[0]


def differentiated(function):
    """Returns a program: the result, and the gradients of its sum of squares."""

    def loss(floats, ids):
        out = function(floats | {"ids": ids})
        return (out.astype(jnp.float32) ** 2).sum(), out

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def mapped(one, kind):
    """Returns result and gradients of all stages by ``vmap``, and the compiled program."""
    axes = ({name: 0 if name in MAPPED else None for name in SPECS},)
    spmd = {"spmd_axis_name": "stage"} if kind == AxisType.Auto else {}
    floats = placed(inputs(), kind)
    ids = floats.pop("ids")
    function = differentiated(jax.vmap(partial(one, kind=kind), in_axes=axes, **spmd))
    program = function.lower(floats, ids).compile()
    (_, out), gradients = program(floats, ids)
    return np.asarray(out), gradients, program.as_text()


def stage_after_stage(one):
    """Returns the results of all stages and the gradients, without a ``vmap``."""
    function, whole, found = differentiated(partial(one, kind=None)), inputs(), []
    for stage in range(STAGES):
        floats = placed(whole | {name: whole[name][stage] for name in MAPPED}, None)
        ids = floats.pop("ids")
        (_, out), gradients = function(floats, ids)
        found.append((out, gradients))
    outs, gradients = zip(*found, strict=True)
    stacked = jax.tree.map(lambda *x: np.stack(x), *gradients)
    return np.stack(outs), {n: x if n in MAPPED else x.sum(0) for n, x in stacked.items()}


LONG = [
    pytest.param(on_global_arrays(name), id=name)
    for name in ("ulysses", "sequence", "plain", "ring", "delta", "infini")
]
LONG += [
    pytest.param(on_shards(name), id=f"shards {name}") for name in ("linear", "shift", "decode")
]


@pytest.mark.parametrize(
    "one",
    [pytest.param(on_global_arrays(name), id=name) for name in ("attention", "linear")]
    + [pytest.param(on_shards("attention"), id="shards attention"), layers]
    + [pytest.param(*each.values, id=each.id, marks=pytest.mark.long) for each in LONG],
)
def test_mapped_stages_equal_stage_after_stage(one):
    expected, gradients = stage_after_stage(one)
    for kind in (AxisType.Auto, AxisType.Explicit):
        found, found_gradients, text = mapped(one, kind)
        np.testing.assert_array_equal(found, expected)
        for name, x in gradients.items():
            # Gradients of shared arrays are added in another order.
            difference = np.abs(np.float64(found_gradients[name]) - np.float64(x)).max()
            bound = 0 if name in MAPPED else 2e-2 if DTYPE == "bfloat16" else 2e-6
            assert difference <= bound * np.abs(np.float64(x)).max(), (kind, name)
        assert not re.search(rf"all-gather[^ ]* = \w+\[{STAGES},1,", text), kind


def test_vmap_of_a_gradient_sums_nothing():
    """The gradient of a key that all stages share is one for each stage, if taken inside."""
    a = placed(inputs(), AxisType.Auto)
    way = {"mesh": mesh(AxisType.Auto), "spec": P(None, "context")}

    def gradient(x, key):
        return jax.grad(lambda key: ba.dot_product_attention(x, key, key, **way).sum())(key)

    mapped = jax.vmap(gradient, in_axes=(0, None), spmd_axis_name="stage")
    found = jax.jit(mapped)(a["x"], a["key"])
    one = jax.jit(partial(gradient, key=a["key"]))
    for x, each in zip(inputs()["x"], found, strict=True):
        np.testing.assert_array_equal(one(x), each)


def test_an_explicit_axis_that_cuts_the_batch_must_be_manual():
    on = mesh(AxisType.Explicit)
    x = jax.device_put(inputs()["x"][:, 0], NamedSharding(on, P("stage", "context")))
    local = partial(ba.attention, axis_name="context")
    function = jax.shard_map(
        lambda x: local(x, x, x),
        mesh=on,
        in_specs=P(None, "context"),
        out_specs=P(None, "context"),
        axis_names={"context"},
    )
    with pytest.raises(ValueError, match="every mesh axis must be manual .* 'stage' is not"):
        jax.jit(function)(x)


def test_replicas_along_an_explicit_axis_compute_alike():
    """Each replica along an axis that the ``shard_map`` leaves out has a ring of its own."""
    on = mesh(AxisType.Explicit)
    x = jax.device_put(inputs()["x"][0], NamedSharding(on, P(None, "context")))
    local = partial(ba.attention, axis_name="context")
    specs = {"in_specs": P(None, "context"), "out_specs": P(None, "context")}
    found = [
        jax.jit(jax.shard_map(lambda x: local(x, x, x), mesh=on, axis_names=axes, **specs))(x)
        for axes in ({"context"}, {"stage", "context"})
    ]
    np.testing.assert_array_equal(*found)


@pytest.mark.needs("float32")
def test_nested_vmaps():
    """JAX fails a ``vmap`` inside that of ``spmd_axis_name``; once it does not, the error goes."""
    on, spec = mesh(AxisType.Auto), P(None, "context")
    way = {"mesh": on, "spec": spec}
    x = jnp.stack([inputs()["x"]] * 3)

    def outside(function):
        return jax.jit(jax.vmap(jax.vmap(function), spmd_axis_name="stage")).trace(x.swapaxes(0, 1))

    plain = jax.shard_map(lambda x: x * 2, mesh=on, in_specs=spec, out_specs=spec)
    with pytest.raises(Exception, match="varying"):
        outside(jax.jit(plain))
    for call in (ba.dot_product_attention, ba.linear_attention):
        layer = partial(lambda x, call: call(x, x, x, **way), call=call)
        with pytest.raises(NotImplementedError, match=r"exchange the two, jax.vmap\(jax.vmap"):
            outside(layer)
        found = jax.jit(jax.vmap(jax.vmap(layer, spmd_axis_name="stage")))(x)
        np.testing.assert_array_equal(found[2, 1], jax.jit(layer)(x[0, 1]))
