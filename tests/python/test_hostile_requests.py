"""Sizes that no machine has, through the library's JSON functions: an answer or a clear error."""

import ctypes
import itertools
import json

import pytest
from burst_attention import _ffi

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
}
WINDOW = {"window_left": None, "window_right": 0}
SHARD = {"q_len": 256, "kv_len": 256}
MACHINE = {"name": None, "ranks_per_node": None}
OPTIONS = {
    "window_left": -1,
    "window_right": 0,
    "logits_soft_cap": 0.0,
    "has_segments": False,
    "has_slopes": False,
    "dropout_rate": 0.0,
    "schedule": "ring",
    "inner_size": 0,
}
CALL = {**SHAPE, **SHARD, "pass": "backward", "softmax_scale": 1.0, "options": OPTIONS}
CALL |= {"backward_order": "any"}
REQUESTS = {
    "choose": {**SHAPE, **SHARD, **WINDOW, "inner": 2, "machine": MACHINE, "refused": {}},
    "simulate": {
        **SHAPE,
        **WINDOW,
        "seq": 1024,
        "schedule": "double_ring",
        "machine": MACHINE,
        "timeline": False,
    },
    "workspace": CALL,
}


def ask(function, request):
    """The answer, which is neither a panic nor anything that is no number."""
    text = getattr(_ffi._library, f"burst_attention_{function}")(json.dumps(request).encode())
    answer = json.loads(text)
    words = answer.get("error", "")
    assert "panic" not in words, request
    assert "null" not in json.dumps(answer.get("passes", [])), request
    return answer


@pytest.mark.parametrize("function", REQUESTS)
def test_hostile_sizes_get_an_answer_or_a_clear_error(function):
    request = REQUESTS[function]
    assert "error" not in ask(function, request), request
    names = [name for name, value in request.items() if isinstance(value, int)]
    names += [name for name in ("window_left", "window_right") if name in request]
    for name, size in itertools.product(names, SIZES):
        answer = ask(function, {**request, name: size})
        limits = name.startswith("window") or name in ("inner", "timeline")
        # 2^29 rows of a rank are many, but can be calculated with.
        if not limits and size >= 2**31 and (name, size) != ("seq", 2**31):
            assert "error" in answer, (name, size)
    for nested in ("machine", "options"):
        for name in ("ranks_per_node", "inner_size", "window_left", "window_right"):
            if name in request.get(nested, {}):
                for size in SIZES:
                    ask(function, {**request, nested: {**request[nested], name: size}})


@pytest.mark.parametrize("function", REQUESTS)
def test_hostile_products_are_errors(function):
    """Each size is one that a type holds; their product is none."""
    request = REQUESTS[function]
    lengths = [name for name in ("q_len", "kv_len", "seq") if name in request]
    for name in lengths:
        for batch in (2**20, 2**32, 2**40):
            answer = ask(function, {**request, name: 2**30, "batch": batch})
            assert "bytes of the shards as float32 must be at most" in answer["error"]
    heads = {"heads": 2**40, "kv_heads": 2**40, "batch": 2**40}
    assert "must be at most" in ask(function, {**request, **heads})["error"]


def test_hostile_kernel_launches_are_launches_or_errors():
    launches = _ffi._library.burst_attention_kernel_launches
    launches.argtypes, launches.restype = [ctypes.c_char_p] * 2, ctypes.c_char_p
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
    assert "launches" in json.loads(launches(b"sm_90", json.dumps({"finish": request}).encode()))
    for name, size in itertools.product(("batch", "rows", "heads", "head_dim"), SIZES):
        hostile = {"finish": {**request, name: size}}
        answer = json.loads(launches(b"sm_90", json.dumps(hostile).encode()))
        assert "panic" not in answer.get("error", ""), hostile
        if size >= 2**31:
            assert "error" in answer, hostile
