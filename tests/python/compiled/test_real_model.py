"""A step of the real model, compiled for 64 GB200s, takes the memory that the page says."""

from collections import Counter
from pathlib import Path

import burst_attention as ba
import hlo
import jax
import jax.numpy as jnp
import packed_windows
import pytest
import real_model
import topology
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from packed_windows import AXES, STACKED, optax, parameter_specs

PAGE = Path(real_model.__file__).parents[1] / "docs" / "real-model.md"
COMPILER = {
    "xla_gpu_autotune_level": 0,  # there is no GPU on which to measure kernels
    # XLA's own kernel for all-reduce does not compile for 64 GPUs in one NVLink domain.
    "xla_gpu_experimental_use_collective_kernels": "",
}


@pytest.fixture(scope="module")
def compiled():
    mesh = topology.mesh("GB200", (("data", real_model.DATA), ("context", real_model.CONTEXT)))

    def placed(x, spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    graph, params = packed_windows.abstract(real_model.SHAPE)
    optimizer = optax.adamw(1e-3)
    trees = params, jax.eval_shape(optimizer.init, params)
    arguments = [jax.tree.map(placed, x, parameter_specs(x, mesh, STACKED)) for x in trees]
    rows = jax.ShapeDtypeStruct((real_model.DATA, real_model.LENGTH), jnp.int32)
    rows = placed(rows, P(*AXES))
    batch = packed_windows.Batch(rows, rows, ba.masks.Mask(*[rows] * 5))
    loss = packed_windows.ring_loss(graph, mesh, block=128)
    step = jax.jit(packed_windows.train_step(loss, optimizer), donate_argnums=(0, 1))
    return step.lower(*arguments, batch).compile(compiler_options=COMPILER)


def test_the_page_says_the_memory_of_a_device(compiled):
    memory, page = compiled.memory_analysis(), PAGE.read_text()
    peak = memory.peak_memory_in_bytes
    for name, size in (
        ("parameters, state of AdamW, tokens", memory.argument_size_in_bytes),
        ("activations, gradients, workspaces", peak - memory.argument_size_in_bytes),
        ("peak", peak),
    ):
        row = f"| {name} | {size / 2**30:.1f} GiB |"
        print(row)
        assert row in page
    assert peak <= 0.8 * topology.KINDS["GB200"].memory


def test_attention_runs_once_in_each_pass(compiled):
    """The loop has a call for each layer of a period. XLA splits the first turn off backwards."""
    found = Counter(call.target for call in hlo.Program(compiled.as_text()).calls())
    period = real_model.SHAPE.period
    assert found["burst_attention_forward"] == period
    assert found["burst_attention_backward"] in (period, 2 * period)
