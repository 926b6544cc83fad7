"""``python -m burst_attention kernels`` prints which backend computes each operation."""

import json
import re

import commands
import pytest
from burst_attention import _environment

pytestmark = pytest.mark.needs("text")

PROBLEM = "--gpu sm_90 --world 4 --seq 4096 --heads 8 --kv-heads 2 --layout zigzag --causal"


@pytest.fixture
def kernels(monkeypatch, capsys):
    return commands.caller("kernels", monkeypatch, capsys)


def operations(found):
    """Returns the names of the operations of both passes, after a check of their backend."""
    for each in found["passes"]:
        for one in each["operations"]:
            assert one["count"] >= 1
            if one["operation"] != "gradients":
                assert (one["backend"], one["refusals"]) == ("tile", [])
    return [{one["operation"] for one in each["operations"]} for each in found["passes"]]


def test_a_line_for_each_operation(kernels):
    output = kernels(f"{PROBLEM} --kernels tile")
    assert output.startswith("4,096 tokens over 4 ranks, 8 query and 2 key/value heads")
    assert "schedule ring on sm_90:" in output
    assert re.search(r"forward +tile, [0-9.]+ ms predicted from measured rates\n", output)
    assert re.search(r"gradients +two operations, .* order: measured slower at 128 columns", output)
    assert operations(json.loads(kernels(f"{PROBLEM} --json --kernels tile"))) == [
        {"forward"},
        {"gradients", "delta", "key_grads", "query_grads", "cast"},
    ]


def test_options_of_the_caller_are_those_of_a_call(kernels, monkeypatch):
    assert "one operation" in kernels(f"{PROBLEM} --kernels tile")
    monkeypatch.setattr(_environment, "asks_for_determinism", lambda: True)
    assert "one operation" not in kernels(f"{PROBLEM} --kernels tile")


def test_sums_in_any_order_are_fused_where_a_kernel_is(kernels):
    any_order = f"{PROBLEM} --json --kernels tile --backward keys --backward-order any"
    fused = {"gradients", "delta", "key_grads", "cast"}
    assert operations(json.loads(kernels(f"{any_order} --seq 65536 --head-dim 64")))[1] == fused
    features = f"{any_order} --with slopes --soft-cap 30 --head-dim 256"
    assert "query_grads" in operations(json.loads(kernels(features)))[1]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--dtype float32", "cast query, key and value to bfloat16 or float16"),
        ("--gpu sm_75", "sm_75"),
        ("--schedule ulysses", 'got "ulysses"'),
        ("--seq 100", "sequence length must be a multiple of 8 (two chunks for each rank)"),
        ("--dropout 2", "dropout rate must be at least 0 and below 1, got 2"),
        ("--with ghosts", "invalid choice: 'ghosts'"),
    ],
)
def test_a_call_without_kernels_says_why(kernels, arguments, expected):
    assert expected in kernels(f"{PROBLEM} {arguments}", code=2)
