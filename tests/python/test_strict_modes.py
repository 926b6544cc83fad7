"""The public interface in JAX's strict modes: a tour of all calls, with their gradients."""

import ast
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
import tour
import tour_arrays
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from long import some
from test_cuda_lowering import GPU, abstract_mesh

pytestmark = [pytest.mark.needs("float32"), pytest.mark.oldest_jax]

MODES = {
    "ranks": partial(jax.numpy_rank_promotion, "raise"),
    "dtypes": partial(jax.numpy_dtype_promotion, "strict"),
    "x64": partial(jax.enable_x64, True),
    "leaks": jax.checking_leaks,
    "checks": partial(jax.enable_checks, True),
    "keys": partial(jax.debug_key_reuse, True),
    "nans": partial(jax.debug_nans, True),
    "infs": partial(jax.debug_infs, True),
    "transfers": partial(jax.transfer_guard, "disallow"),
    "no jit": partial(jax.disable_jit, True),
}
STRICT = ("ranks", "dtypes", "x64")
RUN = ("ranks", "dtypes", "keys", "nans", "infs", "transfers")
"""The modes that one run of the tour has together. Each of them raises errors of its own."""
OUTSIDE = (
    *("sinks", "dropout", "visible", "zigzag", "ulysses", "in sequence, zigzag", "flax"),
    *(
        "linear ring",
        "linear step",
        "delta ring",
        "infini",
        "decode",
        "append",
        "merge",
        "shift blocks",
    ),
    *("layouts", "documents", "padding", "ids", "places", "saved"),
)
"""The calls that run outside of programs too, where XLA compiles each operation by itself."""
MOVES = ("layouts", "documents", "padding", "ids", "host")
"""The calls that reorder and pad arrays, as data loaders do outside of programs."""


@contextmanager
def modes(*names):
    """Switches modes on."""
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(MODES[name]())
        yield


def device_mesh(axis_type):
    """Returns the mesh of the tour."""
    return Mesh(ring.devices(2, 2), tour.AXES, axis_types=(axis_type,) * 2)


def failures(run, calls):
    """Returns the first line of the error of each call that fails, by the call's name."""
    found = {}
    for call in calls:
        try:
            run(call)
        except Exception as error:
            found[call.name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found


def traced(names, mesh, calls, dtype="float32"):
    """Returns the failures while JAX traces calls on a mesh, in some modes."""
    types = {call.name: call.types(mesh, dtype) for call in calls}
    with jax.sharding.use_abstract_mesh(mesh), modes(*names):
        return failures(lambda call: jax.jit(lambda x: call.run(x)).trace(types[call.name]), calls)


def compiled(call, given):
    """Runs a call as a program."""
    return jax.jit(lambda given: call.run(given))(given)


def computed(names, axis_type, calls, run=compiled):
    """Returns the failures while calls run, in some modes."""
    mesh = device_mesh(axis_type)
    given = {call.name: call.placed(mesh) for call in calls}
    with jax.set_mesh(mesh), modes(*names):
        return failures(lambda call: jax.block_until_ready(run(call, given[call.name])), calls)


def named(names):
    """Returns some calls of the tour."""
    by_name = {call.name: call for call in tour.CALLS}
    return [by_name[name] for name in names]


def plain_shards(function):
    """Returns a function of shards as a function of a whole array."""
    mesh = device_mesh(AxisType.Auto)
    return jax.shard_map(function, mesh=mesh, in_specs=P("data"), out_specs=P("data"))


def collective_of_a_residual(x):
    """Derives a collective whose operand the gradient depends on."""
    function = plain_shards(lambda x: lax.all_to_all(jnp.sin(x), "data", 1, 1, tiled=True))
    jax.jit(jax.grad(lambda x: function(x).sum())).trace(x)


def offloading_outside_of_a_program(x):
    """Keeps a value of a shard in the host's memory, without a program."""
    names = {"names_which_can_be_saved": [], "names_which_can_be_offloaded": ["a"]}
    to = {"offload_src": "device", "offload_dst": "pinned_host"}
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(**names, **to)
    function = jax.checkpoint(lambda x: jnp.sin(checkpoint_name(jnp.sin(x), "a")), policy=policy)
    jax.grad(lambda x: plain_shards(function)(x).sum())(x)


@dataclass(frozen=True)
class Limit:
    """What JAX's own code can't do in a mode."""

    mode: str
    program: Callable
    """A program in plain JAX that fails in the mode, for the reason for which the calls fail."""
    error: type[Exception]
    words: str
    calls: tuple[str, ...]
    """The calls of the tour that fail."""


LIMITS = [
    # Of "infini global" JAX raises a TypeError: printing the leak, it fails on a zero tangent.
    Limit(
        *("leaks", collective_of_a_residual, Exception, "Leaked trace"),
        (
            *("ulysses", "hybrid", "in sequence, striped", "linear state", "linear unordered"),
            *("infini", "infini global"),
        ),
    ),
    Limit(
        *("transfers", lambda x: x * 2, jax.errors.JaxRuntimeError, "Disallowed host-to-device"),
        # Outside of programs. A number takes part in all arithmetic of the calls.
        tuple(call.name for call in tour.CALLS if call.name not in MOVES),
    ),
    Limit(
        *("infs", plain_shards(jnp.isneginf), RecursionError, "recursion depth"),
        # Outside of programs. The calls ask whether something is −∞.
        (
            *("sinks", "linear ring", "linear gathered", "linear global", "decode", "prefix"),
            *("delta ring", "delta gathered", "delta global"),
        ),
    ),
    Limit(
        *("nans", offloading_outside_of_a_program, ValueError, "device_put"),
        # Outside of programs, in every mode.
        ("offloaded",),
    ),
]


@pytest.mark.long
@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.mode)
def test_jax_itself_still_fails(limit):
    """Once JAX no longer fails, the entry of the table goes."""
    assert named(limit.calls)
    x = jax.device_put(jnp.ones((2, 4)), jax.NamedSharding(device_mesh(AxisType.Auto), P("data")))
    with modes(limit.mode), pytest.raises(limit.error, match=limit.words):
        limit.program(x)


def test_the_tour_has_every_name_of_the_interface():
    trees = [ast.parse(Path(module.__file__).read_text()) for module in (tour, tour_arrays)]
    nodes = (node for tree in trees for node in ast.walk(tree))
    names = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
    assert names >= {f"ba.{name}" for name in ba.__all__}
    assert names >= {f"ba.masks.{name}" for name in ba.masks.__all__}


def test_programs():
    """One run has all modes that let programs as they are."""
    assert computed(RUN, AxisType.Auto, tour.CALLS) == {}


def test_programs_for_gpus():
    """Around kernels of GPUs there are other operations of JAX."""
    # Kernels of GPUs do not keep out in float32.
    calls = [call for call in tour.CALLS if call.name != "residual"]
    mesh = abstract_mesh(GPU, (2, 2), tour.AXES, AxisType.Explicit)
    assert traced(STRICT, mesh, calls, "bfloat16") == {}


def test_reordering_outside_of_programs_makes_no_implicit_transfers():
    def run(call, given):
        return call.function(**given)

    assert computed(("transfers",), AxisType.Explicit, named(MOVES), run) == {}


def test_plain_decoding_outside_of_programs_is_finite():
    """Only a query without keys has an infinite lse; the softmax begins with −∞ for all."""
    q, cache = ring.normal(0, (2, 1, 4, 8), (2, 16, 2, 8))
    decode = partial(ba.decode_attention, q, cache, cache, implementation="xla")
    with modes("infs"):
        decode(jnp.array([3, 5]), return_residual=True)
        with pytest.raises(FloatingPointError):
            decode(jnp.array([3, 0]), return_residual=True)


@pytest.mark.parametrize("dim", [16, 264])
@pytest.mark.parametrize("names", some([STRICT, RUN]))
def test_pools(names, dim):
    """Pools run their programs themselves. Slices of the arrays move integers to a device."""
    devices = ring.devices(4)
    given = ring.normal(0, *[(2, 6, heads, dim) for heads in (4, 2, 2)])
    expected = tour.pooled(given, devices)
    with modes(*(name for name in names if name != "transfers")):
        found = tour.pooled(given, devices)
    for x, y in zip(found, expected, strict=True):
        assert bool((x == y).all())


def test_a_pool_makes_no_implicit_transfers():
    devices = ring.devices(4)
    given = ring.normal(0, *[(2, 1, heads, 16) for heads in (4, 2, 2)])
    mesh, pool = Mesh(devices[:1], ("tensor",)), ba.CachePool(list(devices[2:]))
    tokens = ring.put(mesh, *given, spec=P(None, None, None, None))
    with modes("transfers"):
        sizes = {"kv_heads": 2, "head_dim": 16, "dtype": given[0].dtype}
        caches = pool.init(batch=2, positions=8, **sizes)
        out, caches = pool.attend(caches, *tokens, np.array([3, 1]))
        jax.block_until_ready(pool.prefill(caches, *tokens, np.array([4, 2])))


@pytest.mark.long
def test_programs_with_64_bits():
    assert computed(STRICT, AxisType.Explicit, tour.CALLS) == {}


@pytest.mark.long
def test_plain_features():
    mesh = device_mesh(AxisType.Explicit).abstract_mesh
    assert traced(STRICT, mesh, tour.LONG_CALLS) == {}


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "first", "every"), [("checks", 0, 1), *(("leaks", i, 4) for i in range(4))]
)
def test_checks_of_traces(mode, first, every):
    """If a call keeps a traced array, JAX may look for the reason until the test's time is over."""
    mesh = device_mesh(AxisType.Explicit).abstract_mesh
    limited = {name for limit in LIMITS if limit.mode == mode for name in limit.calls}
    # Where JAX can't check the gradient, it checks the results alone.
    calls = [
        replace(call, has_gradient=call.has_gradient and call.name not in limited)
        for call in tour.CALLS[first::every]
    ]
    assert traced([mode], mesh, calls) == {}


@pytest.mark.long
@pytest.mark.parametrize("mode", ["nans", "no jit"])
def test_outside_of_programs(mode):
    def run(call, given):
        return call.run(given)

    assert computed([mode], AxisType.Explicit, named(OUTSIDE), run) == {}
