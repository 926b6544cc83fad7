"""Attention over latents that travel equals attention over keys that are expanded first."""

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from bounds import check, close
from jax.sharding import PartitionSpec as P
from long import some
from reference import dense

pytestmark = [pytest.mark.needs("products", "float32"), pytest.mark.oldest_jax]

X = P(None, "context")
HEADS, NOPE, ROPE, VALUE_DIM, COLUMNS = 4, 24, 8, 16, 20
MASKS = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (9, 4)},
    "causal-window": {"is_causal": True, "local_window_size": (21, 0)},
    "soft-cap": {"is_causal": True, "logits_soft_cap": 1.5},
    "segments": {"is_causal": True, "segments": True},
}


def expand(params, latent):
    key = jnp.einsum("bsc,chd->bshd", latent["columns"], params["key"])
    rope = jnp.broadcast_to(latent["rope"][:, :, None], (*key.shape[:3], ROPE))
    value = jnp.einsum("bsc,chd->bshd", latent["columns"], params["value"])
    return jnp.concatenate([key, rope.astype(key.dtype)], -1), value


def inputs(tokens, dtype=np.float32):
    """Returns query, latent, params and the cotangents of out and lse."""
    shapes = [
        (2, tokens, HEADS, NOPE + ROPE),
        (2, tokens, COLUMNS),
        (2, tokens, ROPE),
        (COLUMNS, HEADS, NOPE),
        (COLUMNS, HEADS, VALUE_DIM),
        (2, tokens, HEADS, VALUE_DIM),
        (2, tokens, HEADS),
    ]
    query, columns, rope, key, value, dout, dlse = (
        x.astype(np.float32) for x in ring.normal(0, *shapes, dtype=np.float32)
    )
    query, columns, rope, key, value, dout = (
        x.astype(dtype) for x in (query, columns, rope, key / 4, value / 4, dout)
    )
    latent, params = {"columns": columns, "rope": rope}, {"key": key, "value": value}
    return query, latent, params, dout, dlse


def segments(tokens):
    """Returns ids of documents with padding at the end."""
    ids = np.repeat(np.arange(2 * tokens // 10 + 1), 10)[: 2 * tokens].reshape(2, tokens)
    ids[:, -5:] = -1
    return ids


def sharded(mesh, ids=None, layout="contiguous", **options):
    def local(query, latent, params, ids):
        return ba.latent_attention(
            query,
            latent,
            expand,
            params,
            axis_name="context",
            segment_ids=ids,
            layout=layout,
            return_residual=True,
            **options,
        )

    function = jax.shard_map(local, mesh=mesh, in_specs=(X, X, P(), X), out_specs=(X, X))
    return lambda *x: function(*x, ids)


def found(size, layout, arrays, ids=None, **options):
    """Returns results and gradients by name, in the order of the sequence."""
    query, latent, params, dout, dlse = arrays
    stored = lambda tree: jax.tree.map(lambda x: ba.to_layout(x, size, layout), tree)  # noqa: E731
    restored = lambda x: np.asarray(ba.from_layout(np.asarray(x), size, layout))  # noqa: E731
    ids = None if ids is None else ba.to_layout(ids, size, layout)
    function = sharded(ring.line(size), ids, layout, **options)
    given = (stored(query), stored(latent), params)
    (o, lse), (dq, dlatent, dparams) = ring.gradients(function)(given, stored((dout, dlse)))
    dlatent = {name: restored(x) for name, x in dlatent.items()}
    return {"o": restored(o), "lse": restored(lse), "dq": restored(dq)}, dlatent | dparams


def expected(arrays, ids=None, **options):
    """Returns the float64 reference, and gradients of latents and params by name."""
    query, latent, params, dout, dlse = arrays
    wide = lambda x: np.asarray(x, np.float64)  # noqa: E731
    c, wk, wv = wide(latent["columns"]), wide(params["key"]), wide(params["value"])
    rope = np.broadcast_to(wide(latent["rope"])[:, :, None], (*query.shape[:3], ROPE))
    key = np.concatenate([np.einsum("bsc,chd->bshd", c, wk), rope], -1)
    value = np.einsum("bsc,chd->bshd", c, wv)
    # The expansion rounds to query's type.
    key, value = (wide(x.astype(query.dtype)) for x in (key, value))
    left, right = options.get("local_window_size", (None, None))
    features = {"soft_cap": options.get("logits_soft_cap"), "window": None}
    if left is not None:
        features["window"] = (left, right)
    if ids is not None:
        features["segments"] = (ids, ids)
    out = dense(query, key, value, dout, dlse, causal=options.get("is_causal", False), **features)
    dk, dv = out.dk[..., :NOPE], out.dv
    gradients = {
        "columns": np.einsum("bshd,chd->bsc", dk, wk) + np.einsum("bshd,chd->bsc", dv, wv),
        "rope": out.dk[..., NOPE:].sum(2),
        "key": np.einsum("bsc,bshd->chd", c, dk),
        "value": np.einsum("bsc,bshd->chd", c, dv),
    }
    return out, gradients


def near(found, expected, bound):
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        wrong = np.linalg.norm(np.float64(found[name]) - want) / np.linalg.norm(want)
        assert wrong <= bound, f"{name}: error {wrong:.2e}, allowed {bound:.2e}"


def agree(size, layout, mask, dtype=np.float32, bound=3e-6, tokens=48, **options):
    options = MASKS[mask] | options
    ids = segments(tokens) if options.pop("segments", False) else None
    arrays = inputs(tokens, dtype)
    want, want_gradients = expected(arrays, ids, **options)
    got, got_gradients = found(size, layout, arrays, ids, **options)
    check(got, want, arrays[3], jnp.dtype(dtype).name)
    near(got_gradients, want_gradients, bound)


CASES = [
    (4, "contiguous", "causal"),
    (2, "zigzag", "segments"),
    (4, "striped", "window"),
    (1, "contiguous", "soft-cap"),
    (4, "contiguous", "causal-window"),
    (8, "contiguous", "window"),
    (8, "zigzag", "window"),
    (4, "zigzag", "causal"),
    (4, "striped", "causal"),
]
LAYOUTS = [(1, "contiguous"), (2, "zigzag"), (4, "contiguous"), (4, "striped"), (4, "zigzag")]
OTHERS = [(*x, mask) for x in LAYOUTS for mask in MASKS if (*x, mask) not in CASES]


@pytest.mark.parametrize("one", some([*CASES, *OTHERS], len(CASES)), ids=str)
def test_it_equals_expansion_before_attention(one):
    agree(*one)


def test_a_window_may_end_at_the_edge_of_a_chunk():
    """Of the farthest chunk on each side, one query sees one key."""
    agree(4, "contiguous", "full", local_window_size=(13, 1))


def test_out_of_16_bits_is_rounded_once():
    """The results of chunks, of more than 256 keys each, are merged before they are rounded."""
    query, latent, params, *_ = arrays = inputs(528, jnp.bfloat16)
    exact = expected(arrays)[0].o
    out, _ = sharded(ring.line(2))(query, latent, params)
    rounding = np.linalg.norm(exact.astype(jnp.bfloat16).astype(np.float64) - exact)
    assert np.linalg.norm(np.float64(out) - exact) <= 1.1 * rounding


@pytest.mark.parametrize("tokens", [96, 288])
def test_results_and_gradients_in_16_bits(tokens):
    """Of more than 256 keys the backward pass gets out in 16 bits."""
    agree(2, "contiguous", "causal", jnp.bfloat16, bound=8e-3, tokens=tokens)


@pytest.mark.long
@pytest.mark.parametrize("mask", MASKS)
def test_plain_jax_computes_the_tiles(mask):
    agree(4, "zigzag", mask, implementation="xla")


def equations(jaxpr, times=1):
    """Yields all equations of a program, each with the number of times that it runs."""
    for equation in jaxpr.eqns:
        yield equation, times
        inner = times * equation.params.get("length", 1)
        for each in jax.tree.leaves(list(equation.params.values())):
            each = getattr(each, "jaxpr", each)
            if hasattr(each, "eqns"):
                yield from equations(each, inner)


def sent(function, *arguments):
    """Returns the bytes that each rank sends, and the shapes of the arrays it sends."""
    found, shapes = 0, set()
    for equation, times in equations(jax.make_jaxpr(function)(*arguments).jaxpr):
        assert equation.primitive.name not in ("all_gather", "all_to_all", "reduce_scatter")
        if equation.primitive.name == "ppermute":
            for x in equation.invars:
                found += times * x.aval.size * x.aval.dtype.itemsize
                shapes.add(x.aval.shape)
    return found, shapes


@pytest.mark.parametrize("size", [1, 2, 4])
def test_latents_alone_travel(size):
    query, latent, params, dout, dlse = inputs(48, jnp.bfloat16)
    function = sharded(ring.line(size), is_causal=True)
    rows = 2 * 48 // size
    forward, shapes = sent(function, query, latent, params)
    assert forward == (size - 1) * rows * (COLUMNS + ROPE) * 2
    given = ((query, latent, params), (dout, dlse))
    both, gradient_shapes = sent(ring.gradients(function), *given)
    hops = size if size > 1 else 0
    assert both == 2 * forward + hops * rows * (COLUMNS + ROPE) * 4
    travelling = {x.shape[1:] for x in latent.values()}
    assert {x[2:] for x in shapes | gradient_shapes} <= {x[1:] for x in travelling}


@pytest.mark.parametrize(
    ("layout", "window", "ways"),
    [
        ("contiguous", (0, 0), ()),
        ("contiguous", (1, 0), (1,)),
        ("contiguous", (12, 0), (1,)),
        ("contiguous", (13, 0), (2,)),
        ("contiguous", (95, 0), (7,)),
        ("contiguous", (12, 13), (1, 2)),
        ("contiguous", (0, 13), (2,)),
        ("contiguous", (40, 40), (7,)),
        ("zigzag", (6, 0), (1, 1)),
        ("zigzag", (3, 7), (2, 2)),
        ("striped", (1, 1), (7,)),
    ],
    ids=str,
)
def test_a_window_ends_the_ring(layout, window, ways):
    """Latents travel as far as a query sees them, and their gradients come home at once."""
    query, latent, params, dout, dlse = inputs(96)
    function = sharded(ring.line(8), layout=layout, local_window_size=window)
    bytes_of_chunk, hops = 2 * 12 * (COLUMNS + ROPE) * 4, sum(ways)
    assert sent(function, query, latent, params)[0] == hops * bytes_of_chunk
    both, _ = sent(ring.gradients(function), (query, latent, params), (dout, dlse))
    assert both == (2 * hops + hops + len(ways)) * bytes_of_chunk


def test_memory_does_not_hold_the_whole_expansion():
    """More ranks with shards of one length need no more memory on each."""
    needed = []
    for size in (3, 8):
        query, latent, params, dout, dlse = inputs(64 * size)
        run = ring.gradients(sharded(ring.line(size), layout="zigzag", is_causal=True))
        compiled = run.lower((query, latent, params), (dout, dlse)).compile()
        needed.append(compiled.memory_analysis().temp_size_in_bytes)
    assert needed[1] <= 1.1 * needed[0]


@pytest.mark.parametrize(
    ("layout", "chunks"),
    # A rank sees the first half of chunks of lower ranks, and whole chunks of higher ones.
    [("contiguous", 1 + 2 + 3 + 4), ("zigzag", 4 * 4 - (1 + 2 + 3) / 2)],
)
def test_tokens_that_nobody_sees_are_not_expanded(layout, chunks):
    tokens = []

    def counted(params, latent):
        rows = latent["rope"].shape[1]
        jax.debug.callback(lambda: tokens.append(rows))
        return expand(params, latent)

    def local(query, latent, params):
        return ba.latent_attention(
            query, latent, counted, params, axis_name="context", is_causal=True, layout=layout
        )

    query, latent, params, *_ = inputs(48)
    function = jax.shard_map(local, mesh=ring.line(4), in_specs=(X, X, P()), out_specs=X)
    jax.block_until_ready(jax.jit(function)(query, latent, params))
    jax.effects_barrier()
    assert sum(tokens) == 12 * chunks


def test_integers_travel_with_latents():
    """Positions in the latents serve rotary embeddings in the expansion; they have no gradient."""

    def turned(params, latent):
        key, value = expand(params, latent)
        return key * jnp.cos(latent["position"][..., None, None] / 7), value

    def run(function):
        def local(query, latent, params):
            return function(query, latent, params)

        mapped = jax.shard_map(local, mesh=ring.line(4), in_specs=(X, X, P()), out_specs=X)
        loss = lambda *x: (mapped(*x) ** 2).sum()  # noqa: E731
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2), allow_int=True))

    def first(query, latent, params):
        return ba.attention(query, *turned(params, latent), axis_name="context")

    def travelling(query, latent, params):
        return ba.latent_attention(query, latent, turned, params, axis_name="context")

    query, latent, params, *_ = inputs(48)
    latent["position"] = np.broadcast_to(np.arange(48, dtype=np.int32), (2, 48))
    found, wanted = (run(x)(query, latent, params) for x in (travelling, first))
    for x in (found, wanted):
        assert x[1].pop("position").dtype == jax.dtypes.float0
    close(found, wanted, 3e-6)


def wrong_pair(params, latent):
    return latent["columns"]


def one_token(params, latent):
    return tuple(x[:, :1] for x in expand(params, latent))


BAD = {
    "expand is no function": ({"expand": 3}, TypeError, "expand must be a function"),
    "expand returns one array": ({"expand": wrong_pair}, TypeError, "must return a pair"),
    "expand drops tokens": ({"expand": one_token}, ValueError, "a key for each of the 12 tokens"),
    "params of numbers": ({"params": {"key": 1.0}}, TypeError, "an array of params"),
    "latents of other tokens": (
        {"latent": np.zeros((2, 8, 4), np.float32)},
        ValueError,
        "latent must consist of arrays",
    ),
    "no latents": ({"latent": {}}, ValueError, "latent must consist of arrays"),
    "a pair of ids": ({"segment_ids": (1, 2)}, TypeError, "segment_ids must be one array"),
    "ids of other tokens": (
        {"segment_ids": np.zeros((2, 5), np.int32)},
        ValueError,
        "segment_ids must have shape",
    ),
    "an unknown layout": ({"layout": "blocked"}, ValueError, "layout must be one of"),
    "wide heads": (
        {"query": np.zeros((2, 12, 4, 320), np.float32)},
        ValueError,
        "query and key must have one head_dim",
    ),
    "an unknown axis": ({"axis_name": "rows"}, ValueError, "axis_name must be an axis"),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes_are_errors_while_tracing(name):
    change, kind, words = BAD[name]
    query, latent, params, *_ = inputs(12)
    given = {"query": query, "latent": latent, "expand": expand, "params": params}
    given = {**given, "axis_name": "context", **change}

    def local(x):
        return ba.latent_attention(**given)

    function = jax.shard_map(local, mesh=ring.line(2), in_specs=P(), out_specs=X)
    with pytest.raises(kind, match=words):
        jax.eval_shape(function, query)


def test_without_a_mesh_it_says_what_to_do():
    query, latent, params, *_ = inputs(12)
    with pytest.raises(ValueError, match="latent_attention needs a mesh"):
        ba.latent_attention(query, latent, expand, params, axis_name="context")
