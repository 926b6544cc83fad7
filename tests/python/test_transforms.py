"""JAX's transformations of a call change no results and add no ring."""

from functools import partial

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import platforms
import pytest
import ring
from bounds import check, close
from jax.sharding import PartitionSpec as P
from reference import dense

pytestmark = pytest.mark.oldest_jax

SHAPE = (2, 32, 2, 32)


def inputs(*leading, seed=0, shapes=(SHAPE,) * 4):
    return ring.normal(seed, *[(*leading, *shape) for shape in shapes])


def calls(compiled):
    """Returns the numbers of forward and backward custom calls in a compiled program."""
    text = compiled.as_text()
    return tuple(
        text.count(f'custom_call_target="burst_attention_{name}"')
        for name in ("forward", "backward")
    )


def test_jit_and_eager_agree():
    function = ring.sharded(ring.line(4), is_causal=True)
    q, k, v, _ = inputs()
    assert np.array_equal(function(q, k, v), jax.jit(function)(q, k, v))


@pytest.mark.parametrize("check_vma", [True, False])
def test_grad_of_a_loss_on_lse(check_vma):
    """Losses on lse alone, and on lse and the output, have right gradients."""
    q, k, v, dout = inputs()
    dlse = ring.normal(9, SHAPE[:3])[0]
    function = ring.sharded(
        ring.mesh(2, 4, 1), check_vma=check_vma, is_causal=True, return_residual=True
    )

    @jax.jit
    @jax.value_and_grad
    def loss_of_lse(qkv):
        return jnp.sum(function(*qkv)[1] * dlse)

    @jax.jit
    @jax.value_and_grad
    def loss_of_both(qkv):
        out, lse = function(*qkv)
        return jnp.sum(out * dout, dtype=jnp.float32) + jnp.sum(lse * dlse)

    for run, weight in ((loss_of_lse, 0.0), (loss_of_both, 1.0)):
        value, grads = run((q, k, v))
        expected = dense(q, k, v, weight * dout, dlse, causal=True)
        true = (expected.lse * dlse).sum() + weight * (expected.o * dout).sum()
        limit = 1e-4
        if platforms.current().rounds:
            limit += weight * float(jnp.finfo(dout.dtype).eps) * np.abs(expected.o * dout).sum()
        assert abs(value - true) <= limit
        check(dict(zip(("dq", "dk", "dv"), grads, strict=True)), expected, weight * dout)


def test_grad_inside_shard_map():
    q, k, v, dout = inputs()

    def local(q, k, v, dout):
        def loss(q, k, v):
            return jnp.sum(ba.attention(q, k, v, axis_name="context") * dout)

        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    mesh = ring.line(4)
    outside = ring.gradients(ring.sharded(mesh))((q, k, v), dout)[1]
    for check_vma in (True, False):
        inside = jax.shard_map(
            local, mesh=mesh, in_specs=ring.SPEC, out_specs=ring.SPEC, check_vma=check_vma
        )
        close(jax.jit(inside)(q, k, v, dout), outside, limit=0)


@pytest.mark.parametrize("mapped", [(0, 0, 0), (0, None, None), (None, 1, 1), (1, 0, None)])
def test_vmap_inside_shard_map(mapped):
    """vmap maps all operands, the query, or key and value, along several axes."""
    seeds = range(3)
    stacks = [
        np.stack([inputs(seed=3 * i + s)[0] for s in seeds], axis=axis or 0)
        for i, axis in enumerate(mapped)
    ]
    operands = [x if axis is not None else x[0] for x, axis in zip(stacks, mapped, strict=True)]
    dout = ring.normal(20, (len(seeds), *SHAPE))[0]
    mesh = ring.line(4)

    def local(*operands):
        def one(q, k, v):
            return ba.attention(q, k, v, axis_name="context", is_causal=True)

        return jax.vmap(one, in_axes=mapped)(*operands)

    # The sequence is dimension 1 of a plain operand and dimension 2 of a stacked one.
    specs = tuple(P(*[None] * (x.ndim - 3), "context") for x in operands)
    function = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(None, None, "context"))
    out, grads = ring.gradients(function)(operands, dout)
    one = ring.gradients(ring.sharded(mesh, is_causal=True))
    expected_out, expected = [], []
    for index in range(len(seeds)):
        qkv = [
            x if axis is None else np.take(x, index, axis)
            for x, axis in zip(operands, mapped, strict=True)
        ]
        o, g = one(qkv, dout[index])
        expected_out.append(o)
        expected.append(g)
    close(out, np.stack(expected_out))
    for i, axis in enumerate(mapped):
        parts = np.stack([np.float64(g[i]) for g in expected], axis=axis or 0)
        close(grads[i], parts if axis is not None else parts.sum(0))


@pytest.mark.long
def test_nested_vmap_of_shard_map():
    q, k, v, _ = inputs(3, 2)
    function = ring.sharded(ring.line(2), return_residual=True)
    out, lse = jax.jit(jax.vmap(jax.vmap(function), in_axes=(1, None, None)))(
        q.swapaxes(0, 1), k[0], v[0]
    )
    for i in range(3):
        for j in range(2):
            close((out[i, j], lse[i, j]), function(q[i, j], k[0, j], v[0, j]))


def layer_loss(mesh, policy):
    function = ring.sharded(mesh, is_causal=True)

    def layer(x, weight):
        return x + function(*(x * factors for factors in weight))

    wrapped = layer if policy == "none" else jax.checkpoint(layer, policy=policy)

    def loss(weights, x):
        for weight in weights:
            x = wrapped(x, weight)
        return jnp.sum(x**2)

    def scanned(weights, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (wrapped(x, w), None), x, weights)[0] ** 2)

    return loss, scanned


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scan"])
def test_checkpoint_runs_the_ring_once_under_the_policy(scan):
    """Without the policy the forward ring runs twice; a scan has the calls of one layer."""
    x = inputs()[0]
    weights = (0.1 * ring.normal(1, (2, 3, 1, SHAPE[3]))[0]).astype(x.dtype)
    layers = 1 if scan else len(weights)
    grads = {}
    for policy, forward in ((ba.save_attention, 1), (None, 2), ("none", 1)):
        loss = layer_loss(ring.line(4), policy)[scan]
        compiled = jax.jit(jax.grad(loss)).lower(weights, x).compile()
        assert calls(compiled) == (forward * layers, layers), policy
        grads[policy] = compiled(weights, x)
    close(grads[ba.save_attention], grads[None])
    close(grads["none"], grads[None])


def test_checkpoint_inside_shard_map():
    q, k, v, _ = inputs()

    def run(policy):
        def local(q, k, v):
            @partial(jax.checkpoint, policy=policy)
            def loss(q, k, v):
                return jnp.sum(ba.attention(q, k, v, axis_name="context") ** 2)

            return jax.lax.psum(loss(q, k, v), ("data", "context"))

        mesh, spec = ring.mesh(2, 2, 1), P("data", "context")
        function = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=P())
        compiled = jax.jit(jax.value_and_grad(function)).lower(q, k, v).compile()
        return calls(compiled), compiled(q, k, v)

    kept, recomputed = run(ba.save_attention), run(None)
    assert kept[0] == (1, 1)
    assert recomputed[0] == (2, 1)
    close(kept[1], recomputed[1], limit=0)


def test_compiled_program_gathers_nothing():
    """On data × context × tensor, both passes leave q, k and v where they are."""
    mesh = ring.mesh(2, 2, 2)
    *qkv, dout = ring.put(mesh, *inputs())
    run = ring.gradients(ring.sharded(mesh, is_causal=True))
    text = run.lower(qkv, dout).compile().as_text()
    for collective in ("all-gather", "all-to-all", "all-reduce", "collective-permute"):
        assert collective not in text


def test_equal_calls_are_merged_and_unused_ones_dropped():
    """The call is declared pure, so XLA may do both."""
    function = ring.sharded(ring.line(2))

    @jax.jit
    def run(q, k, v):
        function(q, k, q)
        return function(q, k, v) + function(q, k, v)

    assert calls(run.lower(*inputs()[:3]).compile()) == (1, 0)


def test_replicated_key_and_value_get_summed_gradients():
    """All data shards share key and value, so gradients are sums over shards."""
    q, _, _, dout = inputs()
    k, v = ring.normal(5, (1, *SHAPE[1:]), (1, *SHAPE[1:]))
    mesh = ring.mesh(2, 2, 1)
    shared = P(None, "context")

    def local(q, k, v):
        return ba.attention(q, k, v, axis_name="context", is_causal=True)

    function = jax.shard_map(
        local, mesh=mesh, in_specs=(ring.SPEC, shared, shared), out_specs=ring.SPEC
    )
    _, grads = ring.gradients(function)((q, k, v), dout)
    both = [np.concatenate([x, x]) for x in (k, v)]
    expected = dense(q, *both, dout, np.zeros(SHAPE[:3]), causal=True)
    names = "dq", "dk", "dv"
    apart = ring.gradients(ring.sharded(mesh, is_causal=True))((q, *both), dout)[1]
    check(dict(zip(names, apart, strict=True)), expected, dout)
    if not platforms.current().rounds:
        apart = [getattr(expected, name) for name in names]
    close(grads[0], apart[0])
    for found, each in zip(grads[1:], apart[1:], strict=True):
        close(found, np.float64(each).sum(0, keepdims=True))


def test_results_vary_over_the_inputs_axes_and_the_ring_only():
    def local(q, k, v):
        out, lse = ba.attention(q, k, v, axis_name="context", return_residual=True)
        for x in (out, lse):
            assert jax.typeof(x).manual_axis_type.varying == {"data", "context"}
        return out

    spec = P("data", "context")
    mesh = ring.mesh(2, 2, 2)
    in_specs = (spec, P(None, "context"), P(None, "context"))
    q, k, v, _ = inputs()
    jax.jit(jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=spec))(q, k[:1], v[:1])


def test_in_cond_and_while_that_all_devices_take():
    q, k, v, _ = inputs()
    function = ring.sharded(ring.line(4))

    @jax.jit
    def run(q, k, v, times):
        step = jax.lax.fori_loop(0, times, lambda _, x: function(x, k, v), q)
        return jax.lax.cond(times > 1, lambda: function(step, k, v), lambda: step)

    expected = q
    for _ in range(3):
        expected = function(expected, k, v)
    assert np.array_equal(run(q, k, v, 2), expected)
