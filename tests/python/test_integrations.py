"""The functions for MaxText and Levanter, called as these trainers call them.

They are compared with the float64 reference, without the trainers, which `make test-trainers` runs.
"""

import subprocess
import sys
from enum import Enum
from functools import partial
from types import ModuleType, SimpleNamespace

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import ring
from bounds import check
from burst_attention.integrations import levanter, maxtext
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from long import some
from test_arguments import Parameter
from test_transforms import calls

pytestmark = [pytest.mark.needs("float32", "products"), pytest.mark.oldest_jax]

SHAPES = [(2, 64, 4, 16), (2, 64, 2, 16), (2, 64, 2, 16), (2, 64, 4, 16)]
"""Query, key, value and the cotangent of the result."""
DOCUMENTS = np.array([[0] * 20 + [1] * 30 + [2] * 14, [0] * 50 + [1] * 14], np.int32)


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
    """Returns what `maxtext.attention` reads of MaxText's AttentionOp, on data × context × tensor.

    Without an order the loader balances nothing.
    """
    config = SimpleNamespace(
        context_parallel_strategy=strategy,
        context_parallel_load_balance=order is not None,
        context_parallel_reorder_strategy=SimpleNamespace(value=order),
        context_sharding="context",
        moba=moba,
        packing=True,
        hardware="gpu",
    )
    axes = {"batch": "data", "heads": "tensor", "length": "context", "head_dim": None}
    if strategy == "usp":
        axes |= {"heads": None, "length": ("context", "tensor")}
    axes |= others.pop("axes", {})
    names = ("attn_logits_soft_cap", "sliding_window_size", "chunk_attn_window_size")
    return SimpleNamespace(
        config=config,
        attention_type=SimpleNamespace(value=kind),
        flash_axis_names_q=("batch", "heads", "length", "head_dim"),
        _logical_to_mesh_axes=lambda names: P(*(axes[name] for name in names)),
        **{"mesh": ring.mesh(2, 2, 2), "dropout_rate": 0.0, **dict.fromkeys(names), **others},
    )


def call_of_maxtext(op, query, key, value, **others):
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
        "pad_kv_total": 0,
        "compress_ratio": 0,
    }
    return maxtext.attention(op, query=query, key=key, value=value, **{**given, **others})


MAXTEXT = [
    ("ring", "auto", "global", "striped", {"attn_logits_soft_cap": 5.0}),
    ("all_gather", "dual_chunk_swap", "local_sliding", "zigzag", {"sliding_window_size": 9}),
    ("usp", None, "mla", "contiguous", {}),
    ("ulysses", None, "full", "contiguous", {}),
]


@pytest.mark.parametrize("call", some(MAXTEXT, 3), ids=lambda call: call[0])
def test_maxtext(call):
    """Packed documents in the order of MaxText's loader; the query is scaled before the call."""
    *options, layout, others = call
    op = attention_op(*options, **others)
    size = 4 if options[0] == "usp" else 2
    ids = jnp.asarray(ba.to_layout(DOCUMENTS, size, layout))
    spec = P("data", ("context", "tensor")) if size == 4 else ring.SPEC

    def attend(query, key, value):
        out, *rest = call_of_maxtext(op, query, key, value, decoder_segment_ids=ids)
        assert rest == [None, None]
        return out

    window = (8, 0) if options[2] == "local_sliding" else None
    compare(
        attend, op.mesh, spec, layout, size, scale=1.0, causal=options[2] != "full",
        window=window, segments=(DOCUMENTS,) * 2, soft_cap=others.get("attn_logits_soft_cap"),
    )  # fmt: skip


@pytest.mark.parametrize("order", [None, "dual_chunk_swap"])
def test_chunks_of_maxtext(order):
    """They count from the begin of the row, and in a balanced order from that of each document."""
    size, layout = (1, "contiguous") if order is None else (2, "zigzag")
    op = attention_op("all_gather", order, "chunk", chunk_attn_window_size=8)
    starts = np.array([[0, 20, 50], [0, 50, 50]])
    inside = np.arange(64) - np.take_along_axis(starts, DOCUMENTS, axis=1)
    chunks = (np.arange(64) if order is None else inside) // 8 + 100 * DOCUMENTS
    ids, inside = (jnp.asarray(ba.to_layout(x, 2, layout), jnp.int32) for x in (DOCUMENTS, inside))

    def attend(*qkv):
        given = {"decoder_segment_ids": ids, "segment_positions": inside}
        return call_of_maxtext(op, *qkv, **given)[0]

    compare(attend, op.mesh, ring.SPEC, layout, 2, scale=1.0, causal=True, segments=(chunks,) * 2)


def test_maxtext_without_a_context_axis():
    """Axes of size 1 are not in specs, and a batch may be smaller than its axes."""
    axes = {"batch": ("context", "data"), "heads": None, "length": None}
    op = attention_op(order=None, axes=axes, mesh=ring.mesh(8, 1, 1))
    sinks = Parameter(jnp.ones(4))

    def attend(*qkv):
        return call_of_maxtext(op, *qkv, sinks=sinks)[0]

    compare(attend, op.mesh, P(), "contiguous", 1, scale=1.0, causal=True, sinks=np.ones(4))


def test_the_order_of_maxtext():
    """The first is the example of MaxText's reorder_sequence, for two ranks."""
    orders = Enum("Order", {"A": "dual_chunk_swap", "B": "striped"})
    batch = {"inputs": jnp.arange(8)[None], "images": jnp.arange(8)}
    found = [maxtext.reordered(batch, 2, order, "gpu") for order in orders]
    assert [x["inputs"].tolist() for x in found] == [
        [[0, 1, 6, 7, 2, 3, 4, 5]],
        [[0, 2, 4, 6, 1, 3, 5, 7]],
    ]
    assert [x["images"].tolist() for x in found] == [list(range(8))] * 2

    def layout(*options):
        return maxtext.layout_of(attention_op(*options), ("context",))

    assert layout() == "zigzag"
    assert layout("all_gather", "auto") == "zigzag"
    assert layout("ring", "auto") == "striped"
    assert layout("ring", None) == "contiguous"


def test_policies_of_maxtext_keep_the_results_of_attention():
    class Decoder:
        policy = staticmethod(jax.checkpoint_policies.save_only_these_names("context"))

        def get_remat_policy(self):
            return self.policy

    Decoder.get_remat_policy = maxtext._with_names(Decoder.get_remat_policy)
    op, decoder = attention_op(order=None), Decoder()

    def runs(policy):
        """Returns how many loops over layers call the forward pass."""

        def layer(x, _):
            return jnp.tanh(call_of_maxtext(op, *[jnp.sin(x)] * 3)[0]), None

        def loss(x):
            return jax.lax.scan(jax.checkpoint(layer, policy=policy), x, length=2)[0].sum()

        x = jax.ShapeDtypeStruct(SHAPES[0], jnp.float32)
        return calls(jax.jit(jax.grad(loss)).lower(x).compile())[0]

    assert runs(decoder.get_remat_policy()) == 1
    assert runs(decoder.policy) == 2
    decoder.policy = None
    assert decoder.get_remat_policy() is None


def test_what_maxtext_gets_refused():
    query, key, value = (jnp.zeros(shape) for shape in SHAPES[:3])

    def refused(words, op=attention_op, **others):
        with pytest.raises(NotImplementedError, match=words):
            call_of_maxtext(op(), query, key, value, **others)

    refused("got 'prefill' and 'global'", model_mode="prefill")
    refused("got 'train' and 'compressed'", partial(attention_op, kind="compressed"))
    refused("expected no dropout_rate", partial(attention_op, dropout_rate=0.1))
    hidden = jnp.zeros((2, 64), bool)
    refused("no lengths, bidirectional_mask; turn", lengths=hidden[0], bidirectional_mask=hidden)
    refused("expected no record_max_logits", record_max_logits=True)
    refused("expected no pad_kv_total", pad_kv_total=4)
    refused("expected no moba", partial(attention_op, moba=True))
    refused("for 2 devices, but 4 shard the sequence", partial(attention_op, strategy="usp"))
    for kind, name in (
        ("local_sliding", "sliding_window_size"),
        ("chunk", "chunk_attn_window_size"),
    ):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            call_of_maxtext(attention_op(kind=kind), query, key, value)


def test_installation(monkeypatch):
    def module(name, **names):
        found = ModuleType(f"maxtext.{name}")
        vars(found).update(names)
        monkeypatch.setitem(sys.modules, found.__name__, found)
        return found

    class AttentionOp:
        def apply_attention(self, *, model_mode, **others):
            return model_mode

    class NNXDecoder:
        def get_remat_policy(self):
            return None

    monkeypatch.setitem(sys.modules, "maxtext", ModuleType("maxtext"))
    sys.modules["maxtext"].__version__ = "0.3"
    for name in ("layers", "utils"):
        module(name)
    module("layers.attention_op", AttentionOp=AttentionOp)
    utils = module("utils.max_utils", reorder_causal_load_balanced=print)
    decoders = module("layers.nnx_decoders", NNXDecoder=NNXDecoder)
    maxtext.install()
    first = AttentionOp.apply_attention, NNXDecoder.get_remat_policy
    maxtext.install()
    assert first == (AttentionOp.apply_attention, NNXDecoder.get_remat_policy)
    assert utils.reorder_causal_load_balanced is maxtext.reordered
    assert AttentionOp().apply_attention(model_mode="prefill") == "prefill"
    del decoders.NNXDecoder
    with pytest.raises(
        ImportError, match="NNXDecoder.get_remat_policy in .*, but MaxText 0.3 does"
    ):
        maxtext.install()


def test_integrations_import_no_trainer():
    code = """
import sys
import burst_attention
assert not [name for name in sys.modules if "integrations" in name]
from burst_attention.integrations import levanter, maxtext
print([name for name in sys.modules if name.split(".")[0] in ("flax", "levanter", "maxtext")])
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def grug_mask(is_causal=True, sliding_window=None, segment_ids=None, fa4_bounds=None):
    """Returns what `levanter.attention` reads of levanter.grug's AttentionMask."""
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
def test_levanter(name):
    """Arrays stand in the order of the sequence, on a mesh of Explicit axes."""
    mask, features = LEVANTER[name]
    mesh = ring.mesh(2, 4, 1, axis_type=AxisType.Explicit)
    with jax.set_mesh(mesh):
        compare(
            lambda *qkv: levanter.attention(*qkv, mask), mesh, P("data", "context"),
            "contiguous", 4, **{"causal": True, **features},
        )  # fmt: skip


def test_what_levanter_gets_refused():
    x = jnp.zeros(SHAPES[1])
    bounds = (jnp.zeros((2, 64), jnp.int32), jnp.ones((2, 64), bool))
    for mask in (jnp.ones((2, 64, 64), bool), grug_mask(fa4_bounds=bounds)):
        with pytest.raises(NotImplementedError, match="expected an AttentionMask"):
            levanter.attention(x, x, x, mask)
    with pytest.raises(ValueError, match="sliding_window must be at least 1, got 0"):
        levanter.attention(x, x, x, grug_mask(sliding_window=0))
