"""Latent attention on global arrays equals that on shards, for meshes with each kind of axes."""

import burst_attention as ba
import jax
import numpy as np
import pytest
import ring
from bounds import close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_latent import expand, inputs, segments

pytestmark = [pytest.mark.needs("products", "float32"), pytest.mark.oldest_jax]

ROWS, HEADS = P("data", "context"), P(None, "tensor")
SPEC = P("data", "context", "tensor")


def spread(mesh, arrays):
    """Returns arrays on a mesh: rows over data and context, and heads over tensor."""
    query, latent, params, dout, dlse = arrays
    put = lambda spec, tree: jax.device_put(tree, NamedSharding(mesh, spec))  # noqa: E731
    return (
        (put(SPEC, query), put(ROWS, latent), put(HEADS, params)),
        (put(SPEC, dout), put(SPEC, dlse)),
    )


def run(mesh, arrays, /, **options):
    """Returns results and gradients of global arrays."""

    def function(query, latent, params):
        return ba.latent_attention(
            query, latent, expand, params, is_causal=True, return_residual=True, **options
        )

    return ring.gradients(function)(*spread(mesh, arrays))


def expected(mesh, arrays, ids=None, **options):
    """Returns results and gradients of shards."""

    def local(query, latent, params, ids):
        return ba.latent_attention(
            query,
            latent,
            expand,
            params,
            axis_name="context",
            is_causal=True,
            segment_ids=ids,
            return_residual=True,
            **options,
        )

    function = jax.shard_map(
        local, mesh=mesh, in_specs=(SPEC, ROWS, HEADS, ROWS), out_specs=(SPEC, SPEC)
    )
    return ring.gradients(lambda *given: function(*given, ids))(*spread(mesh, arrays))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("sizes", [(2, 2, 2), pytest.param((1, 4, 1), marks=pytest.mark.long)])
def test_global_arrays_give_the_results_of_shards(axis_type, sizes):
    """Types say all on Explicit axes, and on Auto axes the specs do."""
    arrays, ids = inputs(16), segments(16)
    wanted = expected(ring.mesh(*sizes), arrays, ids, layout="zigzag")
    mesh, said = ring.mesh(*sizes, axis_type=axis_type), {}
    if axis_type == AxisType.Auto:
        said = {"mesh": mesh, "spec": SPEC, "params_spec": {"key": HEADS, "value": HEADS}}
    found = run(mesh, arrays, layout="zigzag", segment_ids=ids, **said)
    for x, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(x, want)
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, want.sharding.spec), x.ndim)


def test_a_whole_sequence_is_one_rank_and_params_are_whole_without_specs():
    mesh, arrays = ring.mesh(2, 1, 1), inputs(16)
    found = run(mesh, arrays, mesh=mesh, spec=P("data"))
    close(found, expected(ring.line(1), arrays), 3e-6)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"spec": SPEC, "params_spec": {"key": HEADS}}, ValueError, "must be a tree like params"),
        ({"spec": SPEC, "params_spec": "tensor"}, TypeError, "params_spec must be a jax.sharding"),
        ({"spec": SPEC, "params_spec": P("context")}, ValueError, "params must be whole along all"),
        ({"spec": SPEC}, ValueError, "multiple"),
        ({}, ValueError, "spec is needed, since mesh axes"),
        ({"spec": P(None, "rows")}, ValueError, "spec must name axes of the mesh"),
    ],
    ids=str,
)
def test_mistakes_are_errors(options, kind, words):
    mesh = ring.mesh(1, 2, 4)
    with pytest.raises(kind, match=words):
        run(mesh, inputs(8), mesh=mesh, **options)


def test_shards_have_no_mesh():
    with pytest.raises(ValueError, match="params_spec belongs to global arrays"):
        expected(ring.mesh(1, 2, 2), inputs(8), params_spec=P())
