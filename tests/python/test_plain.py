"""The ring in plain JAX passes the tests of the library, and runs where the library can't."""

import warnings
from functools import partial

import burst_attention as ba
import case_list
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
from features import Problem
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from long import some, spread
from test_correct import agree as agree_plainly
from test_families import ALONE, CHOICES, SCHEDULES, agree, problem_of
from test_features import name, problem

pytestmark = [pytest.mark.needs("products"), pytest.mark.oldest_jax]

XLA = {"implementation": "xla"}
CASES = case_list.correctness_cases()
FEATURES = case_list.feature_choices()


@pytest.mark.parametrize("one", spread(CASES, 25), ids=lambda case: case.name)
def test_ring_equals_dense(one):
    agree_plainly(one, **XLA)


@pytest.mark.parametrize("choice", spread(FEATURES, 25), ids=name)
def test_pairs_of_features(choice):
    agree(problem(choice, **XLA))


@pytest.mark.parametrize("choice", spread(ALONE, 4), ids=case_list.feature_name)
def test_each_feature_on_two_axes(choice):
    agree(Problem(mesh=(2, 4, 1), **SCHEDULES["double ring"], **choice, **XLA))


@pytest.mark.parametrize(
    "choice", spread(CHOICES, 25), ids=lambda choice: "-".join(map(str, choice.values()))
)
def test_every_schedule_is_this_ring(choice):
    agree(problem_of(choice, **XLA))


@pytest.mark.long
def test_blocks_that_the_shard_does_not_fill():
    """1,040 queries make three blocks of 347 rows, and 521 keys make two of 261."""
    lengths = {"mesh": (1, 2, 1), "q_len": 2080, "kv_len": 1042, "heads": 2}
    masked = {"window": (700, 90), "slopes": True, "segments": "padded", "dropout": 0.6}
    agree(Problem(**lengths, **masked, **XLA))


def attend(**options):
    """Returns `attention` of global arrays over four devices."""
    mesh = options.pop("mesh", None) or ring.line(4)
    return ring.sharded(mesh, is_causal=True, **options)


def test_transforms_agree_with_the_library():
    mesh, (q, k, v) = ring.line(4), ring.normal(1, *[(3, 1, 32, 2, 16)] * 3)

    def gradients(implementation):
        @partial(jax.checkpoint, policy=ba.save_attention)
        def layer(x, keys):
            options = {"layout": "zigzag", "is_causal": True, "implementation": implementation}
            return jax.vmap(partial(ba.attention, axis_name="context", **options))(x, *keys), None

        def loss(q, k, v):
            keys = tuple(jnp.stack([x, x[::-1]]) for x in (k, v))
            return jnp.sum(jnp.sin(jax.lax.scan(layer, q, keys)[0]))

        shards = jax.shard_map(
            jax.grad(loss, argnums=(0, 1, 2)),
            mesh=mesh,
            in_specs=P(None, None, "context"),
            out_specs=P(None, None, "context"),
            check_vma=False,
        )
        return jax.jit(shards)(q, k, v)

    for got, expected in zip(gradients("xla"), gradients(None), strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6)


LAYERS = {
    "one": lambda attend: lambda *qkv: attend(*qkv).sum(),
    "in a loop": lambda attend: (
        lambda q, k, v: lax.scan(lambda q, _: (attend(q, k, v), None), q, None, length=2)[0].sum()
    ),
}
"""Losses of one layer, and of two in a loop."""


@pytest.mark.parametrize("layers", some(["in a loop", "one"]))
def test_memory_grows_with_the_shard(layers):
    """Twice the tokens take twice the memory; what exists for all pairs would take four times."""

    def temporary(tokens):
        shapes = [jax.ShapeDtypeStruct((1, 2 * tokens, 2, 64), "float32")] * 3
        loss = LAYERS[layers](attend(mesh=ring.line(2), **XLA))
        gradient = jax.grad(loss, argnums=(0, 1, 2))
        return jax.jit(gradient).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    assert temporary(8192) < 2.1 * temporary(4096)


DEVICES = {
    "cpu": ("cpu", "cpu"),
    "cuda": ("gpu", "NVIDIA H200"),
    "rocm": ("gpu", "AMD Instinct MI300X"),
    "tpu": ("tpu", "TPU v5e"),
}


def mesh_of(platform):
    """Returns a mesh of four devices without hardware; for None, the mesh tells no platform."""
    device = None
    if platform:
        known, kind = DEVICES[platform]
        device = AbstractDevice(device_kind=kind, num_cores=None, platform=known)
    return AbstractMesh(
        (1, 4, 1), ring.AXES, axis_types=(AxisType.Auto,) * 3, abstract_device=device
    )


def lowered(platform, known, dtype, **options):
    """Returns the program of both passes for a platform; the mesh tells it if ``known``."""
    function = attend(mesh=mesh_of(platform if known else None), **options)
    shapes = [jax.ShapeDtypeStruct((1, 512, 2, 64), dtype)] * 3
    gradient = jax.grad(lambda *x: function(*x).astype(jnp.float32).sum(), argnums=(0, 1, 2))
    return jax.jit(gradient).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()


def is_plain(text):
    """Whether a program has its own collectives and no call of the library."""
    assert ("burst_attention_forward" in text) != ("collective_permute" in text)
    return "collective_permute" in text


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("platform", DEVICES)
def test_plain_jax_computes_what_the_library_does_not(platform, dtype, known):
    expected = platform in ("rocm", "tpu") or (platform, dtype) == ("cuda", "float32")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert is_plain(lowered(platform, known, dtype)) == expected


@pytest.mark.parametrize("platform", DEVICES)
def test_plain_jax_on_request(platform):
    assert is_plain(lowered(platform, True, "bfloat16", **XLA))
    assert is_plain(lowered(platform, False, "bfloat16", **XLA))


@pytest.mark.parametrize(
    ("platform", "words"),
    [("cuda", "no kernels for float32.*bfloat16 and float16"), ("rocm", "not NVIDIA's")],
)
def test_a_fallback_on_gpus_is_told_once_for_each_place(platform, words):
    with pytest.warns(UserWarning, match=words) as told:
        lowered(platform, True, "float32")
    assert len(told) == 1
    lowered(platform, True, "float32", **XLA)
    lowered("tpu", True, "float32")


def test_rings_over_several_processes_are_plain(monkeypatch):
    assert not is_plain(lowered("cpu", True, "float32"))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert is_plain(lowered("cpu", True, "float32"))
    assert is_plain(lowered("cpu", False, "float32"))


def test_what_kernels_can_not_is_plain_where_the_platform_is_unknown():
    for options in ({"logits_soft_cap": 1e4}, {"residual_dtype": "float32"}):
        assert is_plain(lowered("cuda", False, "bfloat16", **options))
        assert is_plain(lowered("cuda", True, "bfloat16", **options, **XLA))


def test_exported_programs_for_all_platforms():
    shapes = [jax.ShapeDtypeStruct((1, 64, 2, 16), "bfloat16")] * 3
    platforms = ("cpu", "cuda", "rocm", "tpu")
    exported = jax.export.export(jax.jit(attend(**XLA)), platforms=platforms)(*shapes)
    assert exported.platforms == platforms
    inputs = ring.normal(2, *[x.shape for x in shapes], dtype="bfloat16")
    inputs = ring.put(ring.line(4), *inputs)
    again = jax.export.deserialize(exported.serialize())
    assert np.array_equal(again.call(*inputs), jax.jit(attend(**XLA))(*inputs))


@pytest.mark.parametrize("given", ["plain", "cuda", True, 0])
def test_other_implementations(given):
    with pytest.raises(ValueError, match="implementation must be None or 'xla', got"):
        lowered("cpu", True, "float32", implementation=given)
