"""pad_sequence pads any sequence, and the padding is inert."""

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from bounds import check
from jax.sharding import PartitionSpec as P
from reference import dense


@pytest.mark.parametrize("module", [np, jnp])
@pytest.mark.parametrize(
    ("length", "size", "layout", "padded"),
    [(10, 4, "contiguous", 12), (10, 4, "zigzag", 16), (16, 4, "zigzag", 16), (1, 3, "striped", 3)],
)
def test_pads_at_the_end(module, length, size, layout, padded):
    x = module.arange(2 * length * 3).reshape(2, length, 3)
    found, ids = ba.pad_sequence(x, size, layout, value=7)
    assert isinstance(found, np.ndarray) == isinstance(ids, np.ndarray) == (module is np)
    assert (found.shape, found.dtype) == ((2, padded, 3), x.dtype)
    assert np.array_equal(found[:, :length], x)
    assert (found[:, length:] == 7).all()
    assert (ids.shape, ids.dtype) == ((2, padded), np.int32)
    assert (ids[:, :length] == 0).all()
    assert (ids[:, length:] == -1).all()
    ba.to_layout(found, size, layout)


def test_ids_have_the_dimensions_up_to_the_sequence():
    for axis, shape in ((0, (8,)), (1, (7, 8)), (-1, (7, 7, 8))):
        padded, ids = ba.pad_sequence(np.zeros((7, 7, 7)), 8, "striped", axis=axis)
        assert ids.shape == shape
        assert padded.shape[axis] == 8
    assert ba.pad_sequence(np.zeros((3, 0)), 2, "zigzag")[1].shape == (3, 0)


def test_pads_ids_of_packed_documents():
    ids = np.array([[5, 5, 6]], np.int32)
    padded, _ = ba.pad_sequence(ids, 2, "zigzag", value=-1)
    assert padded.tolist() == [[5, 5, 6, -1]]


def test_bad_arguments():
    x = np.zeros((1, 5))
    with pytest.raises(ValueError, match="layout must be one of"):
        ba.pad_sequence(x, 2, "zig")
    with pytest.raises(ValueError, match="axis must be one of the 2 dimensions of x, got 2"):
        ba.pad_sequence(x, 2, "zigzag", axis=2)
    with pytest.raises(ValueError, match="axis_size must be at least 1, got 0"):
        ba.pad_sequence(x, 0, "zigzag")
    with pytest.raises(TypeError, match="x must be a numpy or jax array, got list"):
        ba.pad_sequence([1], 2, "zigzag")


def test_padding_is_inert():
    """As its docstring says, the result is the attention of the tokens alone."""
    size, length, layout = 4, 21, "zigzag"
    shapes = [(2, length, 4, 32), (2, length, 2, 32), (2, length, 2, 32), (2, length, 4, 32)]
    arrays = ring.normal(0, *shapes)
    *qkv, dout = (ba.pad_sequence(x, size, layout, value=3)[0] for x in arrays)
    _, ids = ba.pad_sequence(arrays[0], size, layout)
    *qkv, dout, ids = ring.stored(layout, size, *qkv, dout, ids)

    def function(q, k, v):
        return ba.dot_product_attention(
            q, k, v, mesh=ring.line(size), spec=P(None, "context"), layout=layout, segment_ids=ids
        )

    out, grads = ring.gradients(function)(qkv, dout)
    out, *grads = ring.restored(layout, size, out, *grads)
    expected = dense(*arrays, np.zeros((2, length, 4)), causal=False)
    found = dict(zip(("o", "dq", "dk", "dv"), (out, *grads), strict=True))
    check({name: x[:, :length] for name, x in found.items()}, expected, arrays[3])
    for name, x in found.items():
        assert not x[:, length:].any(), name


def test_traced_arrays():
    padded, ids = jax.jit(lambda x: ba.pad_sequence(x, 4, "striped"))(np.ones((2, 5)))
    assert padded.sum() == 10
    assert ids.sum() == -6
