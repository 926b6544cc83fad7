"""Calls on a pool at their edges: copies on the model's devices, missing pages, short chunks."""

import numpy as np
import pytest
import ring
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from test_pool import model, pool, put, sent  # noqa: F401

pytestmark = pytest.mark.needs("products")


def test_copies_on_an_axis_of_the_model_do_not_cross(sent):  # noqa: F811
    """The model has as many devices as the pool, but half as many shards."""
    there, mesh = pool(4), Mesh(ring.devices(2, 2), ("data", "tensor"))
    tokens = put(mesh, P("tensor"), *ring.normal(0, *[(4, 1, 2, 8)] * 3))
    caches = there.init(batch=4, positions=8, kv_heads=2, head_dim=8, dtype=tokens[0].dtype)
    there.attend(caches, *tokens, np.full(4, 1))
    assert sum(sent) == 4 * tokens[0].nbytes


def test_a_chunk_on_missing_pages_has_the_results_of_new_tokens():
    """Some pages do not exist, and more tokens are said to be in use than there are."""
    there = pool(2)
    tokens = put(model(2), P(), *ring.normal(0, *[(2, 5, heads, 16) for heads in (4, 2, 2)]))
    held = ring.normal(1, *[(8, 4, 2, 16)] * 2)
    options = {"page_table": np.array([[2, 4, 0, 1], [-1, 3, 5, -7]]), "return_residual": True}
    options["query_lengths"] = np.array([9, 2])
    found, want = (
        call(tuple(put(there.mesh, P("context"), *held)), *tokens, np.array([30, 23]), **options)
        for call in (there.prefill, there.attend)
    )
    for x, y in zip((*found[0], *found[1]), (*want[0], *want[1]), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-5, atol=1e-6)
