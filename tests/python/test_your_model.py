"""The page "Bring your own model": its program trains, restores and orders tokens as it says.

The tests run the code of the page. They compare the training program with dense attention on one
device, and the functions for MaxText and Levanter with the float64 reference.
"""

import json
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import ring
from bounds import check
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from long import some
from test_documents import DOCS, ROOT, blocks

pytestmark = pytest.mark.needs("float32", "products")

LOSS_LIMIT = 1e-5
"""Largest difference of a loss from that of dense attention on one device."""
MISTAKE = 0.1
"""How much a loss grows at least where a loader orders tokens wrongly."""
SHAPES = [(2, 64, 4, 16), (2, 64, 2, 16), (2, 64, 2, 16), (2, 64, 4, 16)]
"""Query, key, value and the cotangent of the result."""
DOCUMENTS = np.array([[0] * 20 + [1] * 30 + [2] * 14, [0] * 50 + [1] * 14], np.int32)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Returns the names of the page, after its program trained, saved and restored."""
    for name in ("flax.nnx", "grain", "optax", "orbax.checkpoint"):
        pytest.importorskip(name, reason="the wheel's environments have JAX and pytest alone")
    folder, names = tmp_path_factory.mktemp("your-model"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for block in blocks(DOCS / "your-model.md", "python"):
            exec(compile(block, "your-model.md", "exec"), names)
    return SimpleNamespace(**names, checkpoints=folder / "checkpoints")


def losses_of(page, attend, state, *batches):
    """Returns the losses of a state on batches, without training."""
    run = jax.jit(lambda state, batch: page.step(page.run.graph, attend, state, batch)[1])
    return [float(run(state, batch)) for batch in batches]


def dense(query, key, value):
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def test_losses_are_those_of_dense_attention(page):
    one = page.Training(page.line(1), page.windows)
    run, found = jax.jit(partial(page.step, one.graph, dense)), []
    for _ in page.first + page.rest:
        one.state, loss = run(one.state, one.batch())
        found.append(float(loss))
    assert np.allclose(found, page.first + page.rest, rtol=0, atol=LOSS_LIMIT)
    assert found[-1] < found[0] / 3


def test_a_restored_run_continues_bit_for_bit(page):
    """The page compares losses, this test compares the whole states after them."""
    states = [jax.tree.leaves(training.state) for training in (page.run, page.same)]
    assert len(states[0]) > 10
    for x, y in zip(*states, strict=True):
        assert x.sharding == y.sharding
        assert np.array_equal(x, y)


def test_a_run_on_other_devices_has_the_same_state_sharded_anew(page):
    for x, y in zip(*(jax.tree.leaves(t.state) for t in (page.run, page.fewer)), strict=True):
        assert (len(x.sharding.device_set), len(y.sharding.device_set)) == (8, 4)
        assert np.allclose(x, y, rtol=0, atol=1e-6)


CONTINUE = """
import json, sys
sys.path.insert(0, "tests/python")
from test_documents import DOCS, blocks
names = {}
for block in blocks(DOCS / "your-model.md", "python"):
    if "run, same" in block:
        break
    exec(compile(block, "your-model.md", "exec"), names)
run = names["Training"](names["line"](8), names["windows"])
with names["ocp"].CheckpointManager(sys.argv[1]) as manager:
    run.restore(manager)
print(json.dumps(run.train(4)))
"""


@pytest.mark.long
def test_another_process_continues_bit_for_bit(page):
    command = [sys.executable, "-c", CONTINUE, str(page.checkpoints)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == page.rest


def test_arrays_in_different_orders_give_a_wrong_loss(page):
    """Each mistake that the page names, next to the loader's own order and dense attention."""
    batch = next(page.loader(page.windows, 1))
    stored = {name: ba.to_layout(x, 8, "zigzag") for name, x in batch.items()}
    assert all(np.array_equal(x, stored[k]) for k, x in next(page.loader(page.windows, 8)).items())
    state = jax.device_get(page.run.state)
    (expected,) = losses_of(page, dense, state, batch)
    right, *wrong = losses_of(
        page, page.attention(page.line(8)), state, stored,
        {**stored, "targets": batch["targets"]},
        {**stored, "positions": batch["positions"]},
        batch,
    )  # fmt: skip
    assert abs(right - expected) <= LOSS_LIMIT
    assert min(wrong) >= expected + MISTAKE, (expected, wrong)


def test_python_map_hides_the_state_of_a_loader(page, tmp_path):
    batches = map(dict, page.loader(page.windows, 8))
    with pytest.raises(AttributeError, match="'map' object has no attribute 'get_state'"):
        page.grain.checkpoint.CheckpointHandler().save(tmp_path, batches)


def test_a_run_without_the_state_of_its_loader_repeats_its_batches(page):
    with page.ocp.CheckpointManager(page.checkpoints) as manager:
        page.same.restore(manager)
    assert page.same.batches.get_state() == {"next_index": 4}
    page.same.batches = page.loader(page.windows, 8)
    (loss,) = page.same.train(1)
    assert abs(loss - page.rest[0]) > 100 * LOSS_LIMIT


def test_the_state_of_a_loader_fits_any_number_of_devices(page):
    eight, four = page.loader(page.windows, 8), page.loader(page.windows, 4)
    next(eight)
    four.set_state(eight.get_state())
    of_eight, of_four = next(eight), next(four)
    for name in ("tokens", "targets", "positions"):
        x, y = of_eight[name], of_four[name]
        assert not np.array_equal(x, y)
        assert np.array_equal(ba.from_layout(x, 8, "zigzag"), ba.from_layout(y, 4, "zigzag"))


def compare(attend, mesh, spec, *stored_as, scale=None, **features):
    """Compares values and gradients of attention over a mesh with the reference.

    ``stored_as`` is the layout of the arrays and its number of devices.
    """
    query, key, value, dout = ring.normal(0, *SHAPES)
    query *= query.shape[-1] ** -0.5
    stored = ring.put(mesh, *ring.stored(*stored_as, query, key, value, dout), spec=spec)
    out, gradients = ring.gradients(attend)(stored[:3], stored[3])
    values = ring.restored(*stored_as, out, *gradients)
    found = dict(zip(("o", "dq", "dk", "dv"), values, strict=True))
    dlse = np.zeros(query.shape[:3])
    check(found, reference.dense(query, key, value, dout, dlse, scale=scale, **features), dout)


def attention_op(strategy="ring", order="dual_chunk_swap", kind="global", moba=False, **others):
    """Returns what maxtext_attention reads of MaxText's AttentionOp, on data × context × tensor.

    Without an order the loader balances nothing.
    """
    config = SimpleNamespace(
        context_parallel_strategy=strategy,
        context_parallel_load_balance=order is not None,
        context_parallel_reorder_strategy=SimpleNamespace(value=order),
        moba=moba,
        packing=True,
        hardware="gpu",
    )
    axes = {"batch": "data", "heads": "tensor", "length": "context", "head_dim": None}
    if strategy == "usp":
        axes |= {"heads": None, "length": ("context", "tensor")}
    return SimpleNamespace(
        config=config,
        mesh=ring.mesh(2, 2, 2),
        attention_type=SimpleNamespace(value=kind),
        flash_axis_names_q=("batch", "heads", "length", "head_dim"),
        _logical_to_mesh_axes=lambda names: P(*(axes[name] for name in names)),
        **{"attn_logits_soft_cap": None, "sliding_window_size": 0, "dropout_rate": 0.0, **others},
    )


def call_of_maxtext(page, op, query, key, value, **others):
    """Calls the function with the arguments that AttentionOp.__call__ gives in training."""
    given = {
        "decoder_segment_ids": None,
        "segment_positions": jnp.zeros(query.shape[:2], jnp.int32),
        "lengths": None,
        "model_mode": "train",
        "use_ragged_attention": False,
        "previous_chunk": None,
        "bidirectional_mask": None,
        "sinks": None,
        "indexer_mask": None,
        "compressed_mask": None,
        "record_max_logits": False,
        "qk_product_einsum": jnp.einsum,
        "wv_product_einsum": jnp.einsum,
        "decoder_segment_ids_kv": None,
    }
    return page.maxtext_attention(op, query=query, key=key, value=value, **{**given, **others})


MAXTEXT = [
    ("ring", "auto", "global", "striped", {"attn_logits_soft_cap": 5.0}),
    ("all_gather", "dual_chunk_swap", "local_sliding", "zigzag", {"sliding_window_size": 9}),
    ("usp", None, "global", "contiguous", {}),
    ("ulysses", None, "full", "contiguous", {}),
]


@pytest.mark.parametrize("call", some(MAXTEXT, 3), ids=lambda call: call[0])
def test_the_function_for_maxtext(page, call):
    """Packed documents in the order of MaxText's loader; the query is scaled before the call."""
    *options, layout, others = call
    op = attention_op(*options, **others)
    size = 4 if options[0] == "usp" else 2
    ids = ba.to_layout(DOCUMENTS, size, layout)
    spec = P("data", ("context", "tensor")) if size == 4 else ring.SPEC

    def attend(query, key, value):
        out, most, total = call_of_maxtext(page, op, query, key, value, decoder_segment_ids=ids)
        assert most is None
        assert total is None
        return out

    window = (8, 0) if options[2] == "local_sliding" else None
    compare(
        attend, op.mesh, spec, layout, size, scale=1.0, causal=options[2] != "full",
        window=window, segments=(DOCUMENTS,) * 2, soft_cap=others.get("attn_logits_soft_cap"),
    )  # fmt: skip


def test_the_order_of_maxtext(page):
    """The first is the example of MaxText's reorder_sequence, for two ranks."""
    found = page.maxtext_layout(attention_op().config)
    assert ba.to_layout(np.arange(8)[None], 2, found).tolist() == [[0, 1, 6, 7, 2, 3, 4, 5]]
    assert page.maxtext_layout(attention_op("all_gather", "auto").config) == "zigzag"
    assert page.maxtext_layout(attention_op("ring", "auto").config) == "striped"
    assert page.maxtext_layout(attention_op("ring", None).config) == "contiguous"


def test_what_the_function_for_maxtext_refuses(page):
    query, key, value = (jnp.zeros(shape) for shape in SHAPES[:3])

    def refused(words, op=attention_op, **others):
        with pytest.raises(NotImplementedError, match=words):
            call_of_maxtext(page, op(), query, key, value, **others)

    refused("got 'prefill' and global", model_mode="prefill")
    refused("got 'train' and chunk", partial(attention_op, kind="chunk"))
    refused("expected no dropout_rate", partial(attention_op, dropout_rate=0.1))
    hidden = jnp.zeros((2, 64), bool)
    refused("no lengths, bidirectional_mask; turn", lengths=hidden[0], bidirectional_mask=hidden)
    refused("expected no record_max_logits", record_max_logits=True)
    refused("expected no moba", partial(attention_op, moba=True))
    with pytest.raises(ValueError, match="sliding_window_size must be at least 1, got 0"):
        call_of_maxtext(page, attention_op(kind="local_sliding"), query, key, value)
    refused("for the ring's axis alone", partial(attention_op, strategy="usp"))


def grug_mask(is_causal=True, sliding_window=None, segment_ids=None, fa4_bounds=None):
    """Returns what levanter_attention reads of levanter.grug's AttentionMask."""
    return SimpleNamespace(
        is_causal=is_causal,
        sliding_window=sliding_window,
        segment_ids=segment_ids,
        fa4_bounds=fa4_bounds,
    )


PADDED = np.where(np.arange(64) < 60, DOCUMENTS, -1)
LEVANTER = {
    "packed": (grug_mask(segment_ids=(PADDED, PADDED)), {"segments": (PADDED, PADDED)}),
    "window": (grug_mask(sliding_window=9), {"window": (8, 0)}),
    "one row of ids, to the right": (
        grug_mask(False, 9, (DOCUMENTS[0], DOCUMENTS[0])),
        {
            "causal": False,
            "window": (8, reference.EVERYTHING),
            "segments": (DOCUMENTS[[0, 0]],) * 2,
        },
    ),
    "no mask": (None, {"causal": False}),
}


@pytest.mark.parametrize("name", some(list(LEVANTER), 2))
def test_the_function_for_levanter(page, name):
    """Arrays stand in the order of the sequence, on a mesh of Explicit axes."""
    mask, features = LEVANTER[name]
    mesh = ring.mesh(2, 4, 1, axis_type=AxisType.Explicit)
    with jax.set_mesh(mesh):
        compare(
            lambda *qkv: page.levanter_attention(*qkv, mask), mesh, P("data", "context"),
            "contiguous", 4, **{"causal": True, **features},
        )  # fmt: skip


def test_what_the_function_for_levanter_refuses(page):
    x = jnp.zeros(SHAPES[1])
    bounds = (jnp.zeros((2, 64), jnp.int32), jnp.ones((2, 64), bool))
    for mask in (jnp.ones((2, 64, 64), bool), grug_mask(fa4_bounds=bounds)):
        with pytest.raises(NotImplementedError, match="expected an AttentionMask"):
            page.levanter_attention(x, x, x, mask)
    with pytest.raises(ValueError, match="sliding_window must be at least 1, got 0"):
        page.levanter_attention(x, x, x, grug_mask(sliding_window=0))
