"""A tour of the public interface: one list of calls at tiny sizes, each with its gradient.

The tests of JAX's modes run the whole list in each mode. The mesh has two by two devices.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tour_arrays import (
    AXES,
    CACHES,
    DIM,
    HEADS,
    LONG,
    ODD,
    PAGES,
    PREFIXES,
    QKV,
    ROWS,
    SEQ,
    TOKEN,
    TRAINED,
    arrays,
    specs_of,
)


@dataclass(frozen=True)
class Call:
    """A call of the public interface."""

    name: str
    function: Callable
    """A function of arrays by name."""
    specs: dict[str, P]
    """The names of the arrays, and how they are sharded."""
    has_gradient: bool = True

    def types(self, mesh, dtype):
        """Returns the types of the call's arrays on a mesh, with ``dtype`` for activations."""

        def of(name, x):
            is_activation = (
                x.ndim == 4
                and x.dtype == np.float32
                and name not in ("initial_state", "memory", "channels")
            )
            place = jax.NamedSharding(mesh, self.specs[name])
            return jax.ShapeDtypeStruct(
                x.shape, dtype if is_activation else x.dtype, sharding=place
            )

        given = {name: arrays()[name] for name in self.specs}
        return {name: jax.tree.map(partial(of, name), x) for name, x in given.items()}

    def placed(self, mesh):
        """Returns the call's arrays on a mesh."""
        places = {name: jax.NamedSharding(mesh, spec) for name, spec in self.specs.items()}
        return {name: jax.device_put(arrays()[name], place) for name, place in places.items()}

    def run(self, given):
        """Returns the results; with gradients also the gradients, and results are cotangents."""
        if not self.has_gradient:
            return self.function(**given)
        trained = {name: x for name, x in given.items() if name in TRAINED}
        others = {name: x for name, x in given.items() if name not in TRAINED}
        results, pullback = jax.vjp(lambda trained: self.function(**trained, **others), trained)
        return results, pullback(results)


def globally(name, function, *names, has_gradient=True):
    """Returns a call on global arrays."""
    return Call(name, function, specs_of(names), has_gradient)


def in_shards(name, local, specs, out_specs, has_gradient=True):
    """Returns a call of a function of shards."""

    def function(**given):
        run = jax.shard_map(lambda given: local(**given), in_specs=(specs,), out_specs=out_specs)
        return run(given)

    return Call(name, function, specs, has_gradient)


def attention(name, *names, axis_name="context", **options):
    """Returns a call of `attention` with some arrays and options."""
    rows = ROWS if axis_name == "context" else LONG
    options = {"return_residual": True, **options}
    local = partial(ba.attention, axis_name=axis_name, **options)
    out_specs = (rows, rows) if options["return_residual"] else rows
    return in_shards(name, local, specs_of((*QKV, *names), rows), out_specs)


def made(gate, latent):
    """Returns the keys and values of a chunk of latents."""
    key, value = latent
    return key * gate[None, None, : key.shape[2], None].astype(key.dtype), value


def of_latents(query, key, value, gate):
    """Returns attention over keys and values that are made of latents."""
    return ba.latent_attention(query, (key, value), made, gate, axis_name="context")


def linear(name, *names, **options):
    """Returns a call of `linear_attention` on shards."""
    local = partial(ba.linear_attention, axis_name="context", **options)
    out_specs = (ROWS, P("data")) if options.get("return_state") else ROWS
    return in_shards(f"linear {name}", local, specs_of((*QKV, *names)), out_specs)


def delta(name, *names, **options):
    """Returns a call of `delta_attention` on shards."""

    def local(channels=None, log_decay=None, **given):
        logs = log_decay if channels is None else channels
        return ba.delta_attention(axis_name="context", log_decay=logs, **given, **options)

    return in_shards(f"delta {name}", local, specs_of((*QKV, "beta", *names)), ROWS)


def delta_step(token, new_key, new_value, initial_state, gate):
    """Returns the delta rule of one more token."""
    qkv = (jax.lax.squeeze(x, [1]) for x in (token, new_key, new_value))
    beta = jnp.broadcast_to(gate, initial_state.shape[:2])
    return ba.delta_attention_step(*qkv, initial_state, beta)


def decode(name, caller, held, *names, **options):
    """Returns a call that decodes one token of each sequence, whose caches are ``held``.

    The first of ``names`` is that of the lengths.
    """
    specs = specs_of(("token", *held, *names))
    batch = specs["token"]
    if "page_table" in names:
        batch = P()
        specs |= dict.fromkeys(("token", names[0]), batch)

    def local(token, **given):
        caches, lengths = [given.pop(name) for name in held], given.pop(names[0])
        where = {"axis_name": "context", "return_residual": True}
        return caller(token, *caches, lengths, **where, **given, **options)

    return in_shards(name, local, specs, (batch, batch), has_gradient=False)


def appended(key_cache, value_cache, new_key, new_value, lengths):
    """Returns caches with one more token."""
    new = (new_key, new_value, lengths)
    return ba.append_to_cache(key_cache, value_cache, *new, axis_name="context")


def step(token, new_key, new_value, initial_state, decay):
    """Returns linear attention of one more token."""
    qkv = (jax.lax.squeeze(x, [1]) for x in (token, new_key, new_value))
    return ba.linear_attention_step(*qkv, initial_state, decay=decay)


def in_sequence(layout, **options):
    """Returns `dot_product_attention` of sequences that the layout can't cut."""
    where = {"order": "sequence", "spec": ROWS, "axis_name": "context"}

    def function(odd_query, odd_key, odd_value):
        qkv = (odd_query, odd_key, odd_value)
        return ba.dot_product_attention(*qkv, layout=layout, **where, **options)

    return function


def there_and_back(query):
    """Returns an array in a layout, and in the order of the sequence again."""
    there = ba.to_layout(query, 2, "zigzag")
    return there, ba.from_layout(there, 2, "zigzag")


def by_ranks(query):
    """Returns an array in the order of balanced documents, and in that of the sequence again."""
    documents = ba.balance_documents([9, 5], 2, 4, seq_len=SEQ)
    assert isinstance(documents, ba.BalancedDocuments)
    there = documents.to_ranks(query)
    return there, documents.from_ranks(there)


def rematerialised(policy):
    """Returns attention whose results a policy of ``jax.checkpoint`` keeps."""

    def local(query, key, value):
        attend = jax.checkpoint(partial(ba.attention, axis_name="context"), policy=policy)
        return attend(query, key, value)

    return local


def shift(name, *names, **options):
    """Returns a call of `shift`."""

    def local(query, blocks=None, **given):
        return ba.shift(query, axis_name="context", positions=blocks, **given, **options)

    return in_shards(f"shift {name}", local, specs_of(("query", *names)), ROWS)


def padded(odd_query):
    """Returns an array padded for a layout."""
    return ba.pad_sequence(odd_query, 2, "zigzag")[0]


def by_flax(mask, **qkv):
    """Returns attention as a layer of Flax calls it."""
    return ba.flax_attention_fn(spec=ROWS)(**qkv, mask=mask)


def on_host():
    """Calls what computes on the host alone."""
    shard = jax.ShapeDtypeStruct((1, SEQ, HEADS, DIM), jnp.float32)
    choice = ba.choose_schedule(shard, shard, shard, axis_sizes=2, links=ba.Links())
    assert isinstance(choice, ba.ScheduleChoice)
    assert all(isinstance(x, ba.ScheduleCandidate) for x in choice.candidates)
    flops = ba.attention_flops(shard, shard, shard, is_causal=True)
    assert isinstance(flops, ba.AttentionFlops)
    assert ba.__version__
    tokens, _ = ba.pad_sequence(np.arange(SEQ - 1)[None], 2, "striped")
    order = ba.layout_positions(SEQ, 2, "striped")
    assert np.array_equal(ba.to_layout(tokens, 2, "striped"), tokens[:, order])
    assert len(ba.segment_ids_from_cu_seqlens(np.array([0, 3]), 4)) == 4
    for mask in (
        ba.masks.prefix_lm(2, 4),
        ba.masks.prefix_tree([-1, 0, 0], [2, 1, 2]),
        ba.masks.chunked(5, 2),
        ba.masks.spans(5, [(1, 3)]),
        ba.masks.block_diffusion(4, 2),
    ):
        assert ba.masks.dense(**mask.arguments).any()
    with tempfile.TemporaryDirectory() as folder, ba.trace(f"{folder}/steps.json"):
        pass
    return ()


def places(segment_ids):
    """Returns the positions of this device's tokens."""
    return ba.local_positions(segment_ids.shape[1], axis_name="context", layout="zigzag")


FEATURES = {
    "causal": ((), {"is_causal": True}),
    "window": ((), {"local_window_size": (3, 1)}),
    "segments": (("segment_ids",), {"return_residual": False}),
    "sinks": (("sinks",), {}),
    "slopes": (("alibi_slopes",), {"is_causal": True}),
    "soft cap": ((), {"logits_soft_cap": 5.0}),
    "dropout": (("dropout_key",), {"dropout_rate": 0.5, "batch_axis": "data"}),
    "visible": (("visible",), {"return_residual": False}),
    "positions": (("query_positions", "key_positions", "alibi_slopes"), {"is_causal": True}),
    "offset": (("query_offset",), {"is_causal": True}),
    "lengths": (
        ("query_seq_lengths", "key_value_seq_lengths"),
        {"return_residual": False},
    ),
    "mask": (("mask",), {}),
    "residual": ((), {"residual_dtype": "float32"}),
}
"""The arrays and options of each feature. Where a query sees no key, its lse is left out."""


def pooled(given, devices):
    """Decodes with the caches on other devices: a prompt of pages, then two batches in turn.

    No call of the tour can hold this, since it can't be traced. The model has two devices.
    """
    mesh, pool = Mesh(devices[:2], ("tensor",)), ba.CachePool(list(devices[2:]))
    tokens = [jax.device_put(x, jax.NamedSharding(mesh, P(None, None, "tensor"))) for x in given]
    table, options = np.arange(8, dtype=np.int32).reshape(2, 4), {"local_window_size": 3}
    data = {"page_table": table, "sinks": np.ones(4), "alibi_slopes": np.ones(4)}

    def step(length):
        sizes = {"kv_heads": 2, "head_dim": given[0].shape[3], "dtype": given[0].dtype}
        caches = pool.init(**sizes, pages=8, page=4)
        prompt = [x[:, :length] for x in tokens]
        _, caches = pool.prefill(caches, *prompt, np.full(2, length), **data, **options)
        token = [x[:, length : length + 1] for x in tokens]
        lengths = np.full(2, length + 1)
        pending, caches = pool.send(caches, *token, lengths, **data, **options)
        yield
        return pending.receive()

    return ba.alternate(step, (4, 5))


LONG_CALLS = [
    attention(f"plain JAX, {name}", *names, implementation="xla", **options)
    for name, (names, options) in FEATURES.items()
]
"""Calls for the long tests: XLA takes seconds for each of them."""

CALLS = [
    *(attention(name, *names, **options) for name, (names, options) in FEATURES.items()),
    attention(
        *("plain JAX", "segment_ids", "sinks", "dropout_key"),
        is_causal=True,
        local_window_size=(7, 0),
        logits_soft_cap=5.0,
        dropout_rate=0.5,
        implementation="xla",
    ),
    attention(
        *("plain JAX, data", "visible", "query_positions", "key_positions", "alibi_slopes"),
        implementation="xla",
        return_residual=False,
    ),
    attention("zigzag", layout="zigzag", is_causal=True, backward="queries"),
    attention("balanced", schedule="balanced", is_causal=True),
    attention("all_gather", schedule="all_gather", layout="striped"),
    attention("ulysses", "segment_ids", schedule="ulysses", return_residual=False),
    attention("auto", schedule="auto", links=ba.Links(inner_gbps=1000.0)),
    attention("double ring", schedule="ring", axis_name=AXES),
    attention("hybrid", schedule="hybrid", axis_name=AXES, layout="striped"),
    in_shards("saved", rematerialised(ba.save_attention), specs_of(QKV), ROWS),
    in_shards("offloaded", rematerialised(ba.offload_attention), specs_of(QKV), ROWS),
    globally("global", partial(ba.dot_product_attention, spec=ROWS), *QKV, "sinks"),
    globally("in sequence", in_sequence("contiguous"), *ODD),
    globally("in sequence, zigzag", in_sequence("zigzag", is_causal=True), *ODD),
    globally("in sequence, striped", in_sequence("striped", return_residual=True), *ODD),
    globally("flax", by_flax, *QKV, "mask"),
    linear("ring", "log_decay", "segment_ids", method="ring"),
    linear("gathered", "decay", "initial_state", method="all_gather"),
    linear("state", method="ring", return_state="replicated"),
    linear("unordered", is_causal=False),
    globally("linear global", partial(ba.linear_attention, spec=ROWS), *QKV),
    globally("linear step", step, *TOKEN, "initial_state", "decay"),
    delta("ring", "log_decay", "segment_ids", method="ring"),
    delta("gathered", "channels", "initial_state", method="all_gather"),
    globally("delta global", partial(ba.delta_attention, spec=ROWS), *QKV, "beta"),
    globally("delta step", delta_step, *TOKEN, "initial_state", "gate"),
    in_shards(
        "infini",
        partial(ba.infini_attention, axis_name="context", segment_size=4, update="delta"),
        specs_of((*QKV, "gate", "memory")),
        (ROWS, (P("data"), P("data"))),
    ),
    globally(
        "infini global", partial(ba.infini_attention, spec=ROWS, segment_size=8), *QKV, "gate"
    ),
    in_shards("latents", of_latents, specs_of((*QKV, "gate")), ROWS),
    decode("decode", ba.decode_attention, CACHES, "lengths", "sinks", "alibi_slopes"),
    decode(
        *("decode plain", ba.decode_attention, CACHES, "lengths", "sinks", "alibi_slopes"),
        implementation="xla",
        local_window_size=4,
        logits_soft_cap=5.0,
    ),
    decode("decode pages", ba.decode_attention, PAGES, "lengths", "page_table"),
    decode(
        *("prefix", ba.shared_prefix_attention, (*PREFIXES, *CACHES)),
        *("own_lengths", "prefix_of", "prefix_lengths"),
    ),
    in_shards("append", appended, specs_of((*CACHES, *TOKEN[1:], "lengths")), (ROWS, ROWS)),
    globally("merge", lambda out, lse: ba.merge_attention((out, lse), (out, lse)), "out", "lse"),
    shift("contiguous", "segment_ids"),
    shift("zigzag", offset=-3, layout="zigzag"),
    shift("striped", offset=3, layout="striped"),
    shift("blocks", "blocks", block=4),
    globally("layouts", there_and_back, "query"),
    globally("documents", by_ranks, "query"),
    globally("padding", padded, "odd_query"),
    globally(
        "ids",
        partial(ba.segment_ids_from_cu_seqlens, total_length=SEQ),
        "cu_seqlens",
        has_gradient=False,
    ),
    in_shards("places", places, specs_of(["segment_ids"]), P("context"), has_gradient=False),
    globally("host", on_host, has_gradient=False),
]
"""The tour."""
