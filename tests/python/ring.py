"""The meshes, inputs and compiled runs that the tests share."""

import burst_attention as ba
import jax
import numpy as np
import platforms
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "context", "tensor")
SPEC = P(*AXES, None)


def devices(*sizes):
    """Returns the first devices in the shape of a mesh; skips the test where GPUs are too few."""
    count, found = int(np.prod(sizes)), jax.devices()
    if len(found) < count and platforms.current().name == "cuda":
        import pytest

        reason = f"needs {count} GPUs, and this machine has {len(found)}"
        pytest.skip(reason, allow_module_level=True)
    return np.array(found[:count]).reshape(sizes)


def mesh(*sizes, axis_type=AxisType.Auto):
    """Returns a mesh of the first devices, data × context × tensor."""
    return Mesh(devices(*sizes), AXES, axis_types=(axis_type,) * 3)


def line(size, axis_type=AxisType.Auto):
    """Returns a mesh of ``size`` devices, all on the context axis."""
    return mesh(1, size, 1, axis_type=axis_type)


def normal(seed, *shapes, dtype="float32"):
    """Returns standard normal numpy arrays, rounded to ``dtype``.

    Arrays of heads, which have at least four dimensions, have the type that stands for the named
    type on the platform; ``np.float32`` itself stays float32.
    """
    generator = np.random.default_rng(seed)

    def rounded(x):
        return x.astype(jax.numpy.dtype(platforms.dtype(dtype) if x.ndim >= 4 else dtype))

    return [rounded(generator.standard_normal(shape, dtype=np.float32)) for shape in shapes]


def put(mesh, *arrays, spec=SPEC):
    """Puts arrays on the mesh. An array of fewer dimensions takes the first entries of ``spec``."""
    return [jax.device_put(x, NamedSharding(mesh, P(*spec[: x.ndim]))) for x in arrays]


def sharded(mesh, check_vma=True, spec=SPEC, **options):
    """Returns `attention` as a function of global arrays."""
    if platforms.has_cudnn():
        options = {"backward_order": platforms.order()} | options
    out_specs = (spec, P(*spec[:3])) if options.get("return_residual") else spec

    def local(q, k, v):
        return ba.attention(q, k, v, axis_name="context", **options)

    return jax.shard_map(
        local, mesh=mesh, in_specs=(spec,) * 3, out_specs=out_specs, check_vma=check_vma
    )


def gradients(function):
    """Returns a compiled function that gives ``function``'s results and gradients."""

    @jax.jit
    def run(inputs, cotangents):
        results, pullback = jax.vjp(function, *inputs)
        return results, pullback(cotangents)

    return run


def stored(case_layout, size, *arrays):
    """Returns arrays in the order of a layout."""
    return [ba.to_layout(x, size, case_layout) for x in arrays]


def on_host(x):
    """Returns a whole array in numpy, with the shards of other processes."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return process_allgather(x, tiled=True)
    return np.asarray(x)


def restored(case_layout, size, *arrays):
    """Returns arrays on the host, in the order of the sequence."""
    return [ba.from_layout(on_host(x), size, case_layout) for x in arrays]
