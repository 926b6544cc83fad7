"""Windows, segments, soft cap, slopes, sinks, dropout, widths and lengths agree with float64."""

from dataclasses import replace

import case_list
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from bounds import check
from features import SPECS, Problem, segment_ids

pytestmark = pytest.mark.wheel

MORE = 4
"""The number by which a rank's keys exceed its queries."""


def pytest_generate_tests(metafunc):
    if "choice" in metafunc.fixturenames:
        choices = case_list.feature_choices(exhaustive=metafunc.config.getoption("--exhaustive"))
        metafunc.parametrize("choice", choices, ids=name)


def name(choice):
    """Returns the test's name: the differences from plain attention, and the mesh."""
    mesh = "x".join(map(str, choice["mesh"]))
    words = [mesh, choice["layout"], choice["backward"], choice["dtype"]]
    words += [f"n{choice['tokens_per_rank']}", f"g{choice['group_size']}"]
    words += [f"dv{choice['value_dim']}", choice["kv_len"]]
    for key in ("causal", "window", "segments", "soft_cap", "slopes", "sinks", "dropout"):
        if choice[key]:
            words.append(key if choice[key] is True else f"{key}{choice[key]}".replace(" ", ""))
    return "-".join(words)


def problem(choice, **more):
    taken = ("layout", "backward", "dtype", "value_dim", "causal", "soft_cap")
    features = ("segments", "slopes", "sinks", "dropout")
    data, context, tensor = mesh = tuple(choice["mesh"])
    tokens, kv_heads = choice["tokens_per_rank"], tensor * (2 if choice["group_size"] == 1 else 1)
    keys = {"same": tokens, "fewer": 2 * (tokens // 4), "more": tokens + MORE}[choice["kv_len"]]
    return Problem(
        mesh=mesh,
        batch=2 * data,
        q_len=context * tokens,
        kv_len=context * keys,
        heads=kv_heads * choice["group_size"],
        kv_heads=kv_heads,
        window=choice["window"] and tuple(choice["window"]),
        **{name: choice[name] for name in taken + features},
        **more,
    )


def agree(one, check_vma=True):
    arrays = one.arrays()
    check(one.found(arrays, check_vma), one.expected(arrays), arrays["dout"], one.dtype)


def test_pairs_of_features(choice):
    agree(problem(choice))


ALONE = case_list.features_alone()
PLACES = [
    {"mesh": (1, 8, 1), "layout": "zigzag", "backward": "keys"},
    {"mesh": (1, 4, 2), "layout": "striped", "backward": "queries", "dtype": "bfloat16"},
    {"mesh": (2, 2, 2), "layout": "contiguous", "backward": "queries", "dtype": "float16"},
]


@pytest.mark.parametrize(
    "number", range(len(ALONE)), ids=lambda i: case_list.feature_name(ALONE[i])
)
def test_feature_alone(number):
    kv_heads = {"kv_heads": 4} if number % 2 else {}
    agree(Problem(**PLACES[number % len(PLACES)], **kv_heads, **ALONE[number]))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_packed_documents_are_each_alone(layout):
    """Each document has the values and gradients of a call for it alone, by the reference."""
    lengths = (11, 3, 20, 14)
    one = Problem(layout=layout, causal=True, segments="packed", window=(9, 0), batch=1)
    ids = np.repeat(np.arange(4, dtype=np.int32), lengths)[None]
    arrays = one.arrays() | {"q_segments": ids, "kv_segments": ids}
    found = one.found(arrays)
    for end, length in zip(np.cumsum(lengths), lengths, strict=True):
        rows = slice(end - length, end)
        alone = {name: x[:, rows] for name, x in arrays.items()}
        expected = replace(one, segments=None).expected(alone)
        check({name: x[:, rows] for name, x in found.items()}, expected, alone["dout"])


@pytest.mark.parametrize("options", case_list.features_together(), ids=case_list.feature_name)
def test_sequences_of_several_tiles(options):
    agree(Problem(**options))


@pytest.mark.parametrize("dims", [(96, 96), (256, 8)])
def test_widths(dims):
    head_dim, value_dim = dims
    agree(Problem(mesh=(1, 2, 1), head_dim=head_dim, value_dim=value_dim, causal=True))


def test_gradients_without_tracked_axes():
    """With check_vma=False, shard_map itself sums gradients over ranks."""
    one = Problem(slopes=True, sinks=True, segments="documents", dropout=0.3, mesh=(2, 2, 2))
    agree(one, check_vma=False)


def test_vmap_over_some_inputs():
    """Only segments, slopes and the random key are mapped."""
    one = Problem(mesh=(1, 2, 1), slopes=True, segments="documents", dropout=0.3)
    arrays = one.arrays()
    dout, dlse = arrays.pop("dout"), arrays.pop("dlse")
    mapped = {
        "alibi_slopes": np.stack([arrays["alibi_slopes"], -arrays["alibi_slopes"]]),
        "dropout_key": np.stack([arrays["dropout_key"], arrays["dropout_key"] + 1]),
        "q_segments": np.stack([arrays["q_segments"], arrays["q_segments"] * 0]),
        "kv_segments": np.stack([arrays["kv_segments"], arrays["kv_segments"] * 0]),
    }
    specs = {name: SPECS[name] for name in arrays}
    function = jax.shard_map(
        one.local,
        mesh=ring.mesh(*one.mesh),
        in_specs=(specs,),
        out_specs=(SPECS["dout"], SPECS["dlse"]),
    )

    def loss(inputs, others):
        o, lse = function({**arrays, **inputs, **others})
        return jnp.sum(o * dout) + jnp.sum(lse * dlse)

    @jax.jit
    def run(inputs, others):
        return jax.vmap(jax.grad(loss), in_axes=({"k": None, "alibi_slopes": 0}, 0))(inputs, others)

    inputs = {"k": arrays["k"], "alibi_slopes": mapped.pop("alibi_slopes")}
    grads = run(inputs, mapped)
    for i in range(2):
        own = {name: x[i] for name, x in mapped.items()}
        own["alibi_slopes"] = inputs["alibi_slopes"][i]
        expected = one.expected({**arrays, **own, "dout": dout, "dlse": dlse})
        found = {"dk": grads["k"][i], "dslopes": grads["alibi_slopes"][i]}
        check(found, expected, dout)


def test_one_array_of_ids_is_that_of_both():
    ids = segment_ids("documents", 2, 48, 48)
    assert (ids["q_segments"] == ids["kv_segments"]).all()
    assert len(set(ids["q_segments"][0])) == 3
