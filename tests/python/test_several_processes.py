"""Rings over the CPU devices of several processes: the numbers of one process, bit for bit."""

import re
import time
from collections import Counter
from functools import partial

import burst_attention as ba
import case_list
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ring
import several
from features import Problem
from jax.sharding import PartitionSpec as P
from several_cases import CASES
from test_families import ALONE, CHOICES, SCHEDULES, agree, problem_of

SECONDS = 240
SUMMED = ("dz", "dslopes")
"""What XLA adds up over all ranks; its order differs between one process and several."""
WAYS = CHOICES[::4]
"""Some of the choices that rings of one process are tested with."""


@pytest.fixture(scope="module")
def of_one_process():
    return [case.found(case.arrays()) for case in CASES]


@pytest.mark.parametrize(
    ("processes", "devices"), [(2, 4), pytest.param(4, 2, marks=pytest.mark.long)]
)
def test_several_processes_equal_one(tmp_path, of_one_process, processes, devices):
    started = several.start("solve", processes, devices, tmp_path)
    printed = several.outputs(started, SECONDS)
    assert [process.returncode for process in started] == [0] * processes, "\n".join(printed)
    for number, expected in enumerate(of_one_process):
        found = np.load(tmp_path / f"{number}.npz")
        for name, x in expected.items():
            got = found[name].view(x.dtype)
            if name in SUMMED:
                assert np.allclose(got, x, rtol=0, atol=1e-6 * np.abs(x).max()), name
            else:
                assert np.array_equal(got, x), (CASES[number], name)


@pytest.mark.long
def test_a_process_that_dies_ends_the_others_with_an_error(tmp_path):
    started = several.start("die", 2, 4, tmp_path)
    started[1].wait(timeout=SECONDS)
    gone = time.monotonic()
    printed = several.outputs(started, 60)
    assert time.monotonic() - gone < 60
    assert started[1].returncode == 3, printed[1]
    assert "ring ran" in printed[0]
    assert "ring ran again" not in printed[0]
    assert started[0].returncode != 0
    # Not merely any word of gloo's, which greets its peers by name.
    words = "heartbeat|UNAVAILABLE|Connection closed"
    assert re.search(words, printed[0]), printed[0]


@pytest.fixture
def apart(monkeypatch):
    """One process that takes the way of several."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)


def calls(function, *arguments):
    """How often the custom calls of each kind are in a program."""
    text = jax.jit(function).lower(*arguments).as_text()
    return Counter(re.findall(r"@(burst_attention_\w+)\(", text))


@pytest.mark.parametrize("choice", WAYS, ids=lambda c: "-".join(map(str, c.values())))
def test_a_program_walks_every_schedule(apart, choice):
    agree(problem_of(choice))


@pytest.mark.parametrize("choice", ALONE, ids=case_list.feature_name)
def test_so_it_does_with_every_feature(apart, choice):
    agree(Problem(mesh=(2, 4, 1), **SCHEDULES["double ring"], **choice))


def test_calls_are_one_for_each_stretch(apart):
    """A full ring of four gets three chunks; backward their gradients as well, from step 2 on."""
    mesh, (q, k, v) = ring.line(4), ring.normal(0, *[(1, 32, 2, 16)] * 3)
    function = ring.sharded(mesh)
    names = {"burst_attention_forward_stretch": 4}
    assert calls(function, q, k, v) == names
    gradient = jax.grad(lambda *inputs: function(*inputs).sum(), argnums=(0, 1, 2))
    assert calls(gradient, q, k, v) == names | {"burst_attention_backward_stretch": 7}


def test_transforms(monkeypatch):
    """vmap, scan and checkpoint give the bits of a ring within the process."""
    mesh, (q, k, v) = ring.line(4), ring.normal(1, *[(3, 1, 32, 2, 16)] * 3)

    @partial(jax.checkpoint, policy=ba.save_attention)
    def layer(x, keys):
        attend = partial(ba.attention, axis_name="context", layout="zigzag", is_causal=True)
        return jax.vmap(attend)(x, *keys), None

    def loss(q, k, v):
        keys = tuple(jnp.stack([x, x[::-1]]) for x in (k, v))
        return jnp.sum(jnp.sin(jax.lax.scan(layer, q, keys)[0]), keepdims=True)

    def gradients():
        shards = jax.shard_map(
            lambda *x: jax.grad(lambda *x: loss(*x).sum(), argnums=(0, 1, 2))(*x),
            mesh=mesh,
            in_specs=P(None, None, "context"),
            out_specs=P(None, None, "context"),
            check_vma=False,
        )
        return jax.jit(shards)(q, k, v)

    expected = gradients()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for got, want in zip(gradients(), expected, strict=True):
        assert np.array_equal(got, want)
