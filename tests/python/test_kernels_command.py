"""``python -m burst_attention kernels`` prints which backend computes each operation."""

import json

import commands
import pytest

pytestmark = pytest.mark.needs("text")

PROBLEM = "--gpu sm_90 --world 4 --seq 4096 --heads 8 --kv-heads 2 --layout zigzag --causal"


@pytest.fixture
def kernels(monkeypatch, capsys):
    return commands.caller("kernels", monkeypatch, capsys)


def operations(found):
    """Returns the names of the operations of both passes, after a check of their backend."""
    for each in found["passes"]:
        for one in each["operations"]:
            assert (one["backend"], one["refusals"]) == ("tile", [])
            assert one["count"] >= 1
    return [{one["operation"] for one in each["operations"]} for each in found["passes"]]


def test_a_line_for_each_operation(kernels):
    output = kernels(PROBLEM)
    assert output.startswith("4,096 tokens over 4 ranks, 8 query and 2 key/value heads")
    assert "schedule ring on sm_90:" in output
    assert operations(json.loads(kernels(f"{PROBLEM} --json"))) == [
        {"forward"},
        {"delta", "key_grads", "query_grads", "cast"},
    ]


def test_sums_in_any_order_are_fused_where_a_kernel_is(kernels):
    any_order = f"{PROBLEM} --json --backward keys --backward-order any"
    assert operations(json.loads(kernels(any_order)))[1] == {"delta", "key_grads", "cast"}
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
