"""Sizes that no machine has, in questions to the library: an answer or a clear error."""

import itertools
import json

import pytest
from burst_attention import _ffi

pytestmark = pytest.mark.needs("text")

SIZES = (0, -1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30)
SHAPE = {
    "batch": 1,
    "heads": 8,
    "kv_heads": 8,
    "head_dim": 64,
    "value_dim": 64,
    "dtype": "bfloat16",
    "layout": "contiguous",
    "backward": "keys",
    "world_size": 4,
    "q_len": 256,
    "kv_len": 256,
    "softmax_scale": 1.0,
}
WINDOW = {"window": {"left": None, "right": 0}}
MACHINE = {"name": None, "ranks_per_node": None}
OPTIONS = {
    "window_left": -(2**63),
    "window_right": 0,
    "logits_soft_cap": 0.0,
    "dropout_rate": 0.0,
    "feature_operands": "",
    "schedule": "ring",
    "inner_size": 0,
}
REQUESTS = {
    "choose": {**SHAPE, **WINDOW, "inner": 2, "machine": MACHINE, "refused": {}},
    "simulate": {
        **SHAPE,
        **WINDOW,
        "schedule": "double_ring",
        "machine": MACHINE,
        "timeline": False,
    },
    "workspace": {
        **SHAPE,
        "pass": "backward",
        "options": OPTIONS,
        "backward_order": "any",
        "kernels": "tile",
    },
}


def ask(question, request):
    """Returns the answer, which holds neither a panic nor a number that JSON can't hold."""
    text = json.dumps({"ask": question, **request}).encode()
    answer = json.loads(_ffi._library.burst_attention_ask(text))
    words = answer.get("error", "")
    assert "panic" not in words, request
    assert "null" not in json.dumps(answer.get("passes", [])), request
    return answer


@pytest.mark.parametrize("question", REQUESTS)
def test_hostile_sizes_get_an_answer_or_a_clear_error(question):
    request = REQUESTS[question]
    assert "error" not in ask(question, request), request
    names = [name for name, value in request.items() if isinstance(value, int)]
    for name, size in itertools.product(names, SIZES):
        answer = ask(question, {**request, name: size})
        if name not in ("inner", "timeline") and size >= 2**31:
            assert "error" in answer, (name, size)
    # 2^29 rows of a rank are many, but can be calculated with.
    ask(question, {**request, "q_len": 2**29, "kv_len": 2**29})
    nested_names = ("ranks_per_node", "inner_size", "window_left", "window_right", "left", "right")
    for nested, name in itertools.product(("machine", "options", "window"), nested_names):
        if name in request.get(nested, {}):
            for size in SIZES:
                ask(question, {**request, nested: {**request[nested], name: size}})


@pytest.mark.parametrize("question", REQUESTS)
def test_hostile_products_are_errors(question):
    """Each size fits its type, and the product of the sizes fits none."""
    request = REQUESTS[question]
    for name in ("q_len", "kv_len"):
        for batch in (2**20, 2**32, 2**40):
            answer = ask(question, {**request, name: 2**30, "batch": batch})
            assert "bytes of the shards as float32 must be at most" in answer["error"]
    heads = {"heads": 2**40, "kv_heads": 2**40, "batch": 2**40}
    assert "must be at most" in ask(question, {**request, **heads})["error"]


def test_hostile_kernel_launches_are_launches_or_errors():
    def launches(**sizes):
        compute = {"cast": {**request, **sizes}}
        return ask("kernel_launches", {"target": "sm_90", "compute": compute})

    array = {"address": 4096, "batch_stride": 20160}
    request = {
        "batch": 2,
        "rows": 70,
        "heads": 3,
        "head_dim": 96,
        "element": "bf16",
        "a": array,
        "out": {**array, "address": 8192},
    }
    assert "launches" in launches()
    for name, size in itertools.product(("batch", "rows", "heads", "head_dim"), SIZES):
        answer = launches(**{name: size})
        if size >= 2**31:
            assert "error" in answer, (name, size)


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (b"", "EOF while parsing a value"),
        (b"\xff", "expected value"),
        (b"[" * 10_000, "recursion limit"),
        (b"7", "invalid type: integer `7`"),
        (b"{}", "missing field `ask`"),
        (b'{"ask": "weather"}', "unknown variant `weather`, expected one of `describe`"),
        (b'{"ask": "describe", "all": 1}', "unknown field `all`"),
    ],
)
def test_a_malformed_question_gets_what_was_expected_and_what_came(question, words):
    error = json.loads(_ffi._library.burst_attention_ask(question))["error"]
    assert "the request can't be read: " in error
    assert words in error
