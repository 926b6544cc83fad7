"""In a scanned model with rematerialised layers, attention runs once with the same results."""

import json
import re
from collections import Counter

import burst_attention as ba
import jax
import jax.numpy as jnp
import pytest
import ring
from burst_attention import _ffi
from features import PAIR
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from long import some
from test_cuda_lowering import KNOWN, abstract_mesh, lowered
from test_cuda_lowering import calls as lowered_calls
from test_transforms import calls, close

pytestmark = [pytest.mark.needs("products"), pytest.mark.oldest_jax]

LAYERS, WIDTH, HEADS, SEQ, RANKS = 5, 64, 4, 64, 4
PLACES = {
    "ring": {},
    "sinks": {"sinks": True},
    "double ring": {"axis_name": PAIR},
    "balanced": {"schedule": "balanced"},
    "ulysses": {"schedule": "ulysses", "sinks": True},
    "hybrid": {"axis_name": PAIR, "schedule": "hybrid", "sinks": True},
}
EACH = pytest.mark.parametrize("place", PLACES)
KEPT = {"saved": ba.save_attention, "offloaded": ba.offload_attention}
PLACEMENT = re.compile(r'placement = "(\w+)"\}\} : \(tensor<(.*?)>\)')


def parameters(dtype="float32"):
    """Returns the parameters of all layers, stacked."""
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 2 * WIDTH)}
    shapes |= {"down": (2 * WIDTH, WIDTH), "sinks": (HEADS,)}
    arrays = ring.normal(1, *[(LAYERS, *shape) for shape in shapes.values()])
    found = {name: 0.1 * x for name, x in zip(shapes, arrays, strict=True)}
    return {name: x.astype("float32" if name == "sinks" else dtype) for name, x in found.items()}


def tokens(dtype="float32"):
    return ring.normal(0, (2, SEQ, WIDTH), dtype=dtype)[0]


def layer(x, weights, *, axis_name="context", sinks=False, **options):
    """Adds attention to x, and then a small network."""
    qkv = jnp.split(jnp.tanh(x) @ weights["qkv"], 3, axis=-1)
    q, k, v = (y.reshape(*y.shape[:2], HEADS, -1) for y in qkv)
    if sinks:
        options["sinks"] = weights["sinks"]
    out = ba.attention(q, k, v, axis_name=axis_name, is_causal=True, **options)
    x = x + out.reshape(x.shape) @ weights["out"]
    return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"], None


def model(place, wrap, mesh=None):
    """Returns the loss over four devices of a scan of layers, each wrapped in ``wrap``."""
    options = PLACES[place]
    axis = options.get("axis_name", "context")
    if mesh is None:
        devices = ring.devices(RANKS)
        mesh = (
            Mesh(devices, ("context",)) if axis == "context" else Mesh(devices.reshape(2, 2), PAIR)
        )

    def local(weights, x):
        step = wrap(lambda x, weights: layer(x, weights, **options))
        x, _ = jax.lax.scan(step, x, weights)
        return jax.lax.psum(jnp.sum(x.astype(jnp.float32) ** 2), axis)

    return jax.shard_map(local, mesh=mesh, in_specs=(P(), P(None, axis)), out_specs=P())


def checkpointed(policy):
    return lambda step: jax.checkpoint(step, policy=policy)


def compiled(loss):
    return jax.jit(jax.value_and_grad(loss, (0, 1))).lower(parameters(), tokens()).compile()


def test_layers_chosen_by_cond_run_attention_once():
    """Layers with and without a window in one scan: a call of each kind in each direction."""

    def local(x, has_window):
        def attend(window):
            return lambda x: ba.attention(x, x, x, axis_name="context", local_window_size=window)

        def step(x, has_window):
            return jax.lax.cond(has_window, attend((7, 0)), attend(None), x), None

        x, _ = jax.lax.scan(jax.checkpoint(step, policy=ba.save_attention), x, has_window)
        return jax.lax.psum(jnp.sum(x), "context")

    mesh = abstract_mesh(None, (RANKS,), ("context",))
    specs = (P(None, "context"), P())
    loss = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())
    x = jax.ShapeDtypeStruct((1, 1024, HEADS, 16), jnp.bfloat16)
    flags = jax.ShapeDtypeStruct((LAYERS,), bool)
    targets = [call.target for call in lowered_calls(lowered(jax.grad(loss), [x, flags]))]
    assert Counter(targets) == {_ffi.FORWARD: 2, _ffi.BACKWARD: 2}


@pytest.mark.parametrize("place", some(PLACES))
def test_attention_is_there_once_in_each_direction(place):
    """The forward loop over layers has a call; the backward loop repeats it without a policy."""
    plain = compiled(model(place, lambda step: step))
    expected = plain(parameters(), tokens())
    assert calls(plain) == (1, 1)
    for policy, forward in ((ba.save_attention, 1), (ba.offload_attention, 1), (None, 2)):
        program = compiled(model(place, checkpointed(policy)))
        assert calls(program) == (forward, 1), policy
        close(program(parameters(), tokens()), expected)


@pytest.mark.parametrize("place", some(["ring", "ulysses", "hybrid"]))
@pytest.mark.parametrize("kept", [*KEPT, "recomputed"])
def test_attention_runs_once_for_each_layer(tmp_path, place, kept):
    """The rings' timeline counts the runs."""
    program = compiled(model(place, checkpointed(KEPT.get(kept))))
    with ba.trace(tmp_path / "trace.json"):
        jax.block_until_ready(program(parameters(), tokens()))
    events = json.loads((tmp_path / "trace.json").read_text())
    events = events if isinstance(events, list) else events["traceEvents"]
    firsts = (event["name"].split()[0] for event in events if " step 0 of " in event["name"])
    found = Counter(firsts)
    times = 1 if kept in KEPT else 2
    assert found == {"Forward": times * LAYERS * RANKS, "Backward": LAYERS * RANKS}


@pytest.mark.parametrize("policy", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("axis_type", some([AxisType.Explicit, AxisType.Auto]))
def test_global_arrays(policy, axis_type):
    """The scan and the checkpoint stand around `dot_product_attention`, outside of shard_map."""
    mesh = ring.line(RANKS, axis_type=axis_type)
    where = {} if axis_type == AxisType.Explicit else {"mesh": mesh, "spec": ring.SPEC}
    q, k, v, dout = ring.put(mesh, *ring.normal(0, *[(1, SEQ, HEADS, 32)] * 4))

    def loss(wrap, k, v):
        def step(x, scale):
            out = ba.dot_product_attention(x, scale * k, v, is_causal=True, **where)
            return x + out, None

        return jnp.sum(jax.lax.scan(wrap(step), q, jnp.linspace(0.5, 1.5, LAYERS))[0] * dout)

    grad = jax.jit(jax.grad(loss, (1, 2)), static_argnums=0)
    expected = grad(lambda step: step, k, v)
    program = grad.lower(checkpointed(policy), k, v).compile()
    assert calls(program) == (1, 1)
    close(program(k, v), expected)


@KNOWN
@pytest.mark.parametrize("place", some([place for place in PLACES if place != "balanced"], 2))
@pytest.mark.parametrize("kept", KEPT)
def test_programs_for_gpus_keep_out_and_lse(device, place, kept):
    """Under the offloading policy, out and lse go to the host in one loop and back in the other."""
    pair = "axis_name" in PLACES[place]
    mesh = abstract_mesh(device, *(((2, 2), PAIR) if pair else ((RANKS,), ("context",))))
    loss = model(place, checkpointed(KEPT[kept]), mesh)
    inputs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
        (parameters("bfloat16"), tokens("bfloat16")),
    )
    text = lowered(jax.grad(loss, (0, 1)), inputs)
    found = Counter(call.target for call in lowered_calls(text))
    assert found == {"burst_attention_forward": 1, "burst_attention_backward": 1}
    _, lse, *_ = lowered_calls(text)[0].results
    o = f"{lse.removesuffix('xf32')}x{WIDTH // HEADS}xf32"
    moved = PLACEMENT.findall(text)
    both = [(where, x) for where in ("pinned_host", "device") for x in (o, lse)]
    assert sorted(moved) == (sorted(both) if kept == "offloaded" else [])
