"""MaxText trains with this attention as with its own, in each of its configurations.

Each test trains a small model for 10 steps with both, and prints their seconds per step.
"""

import numpy as np
import pytest
import training
from burst_attention.integrations import maxtext
from maxtext.layers import attention_op, nnx_decoders
from maxtext.utils import max_utils

LOSS, GRADIENTS = 5e-7, 2e-6
"""How far a loss and a norm of gradients may be from those of MaxText's own attention, relative."""

FAULT = 1e-4
"""How far losses are at least where a layout or a window is wrong."""

MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "base_moe_mlp_dim": 256,
    "megablox": False,
    "sparse_matmul": False,
}
MLA = {
    "q_lora_rank": 0,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "first_num_dense_layers": 1,
    "shared_experts": 1,
    "base_num_kv_heads": 4,
}
LLAMA_4 = MOE | {
    "model_name": "llama4-17b-16e",
    "num_experts_per_tok": 1,
    "chunk_attn_window_size": 64,
    "base_num_decoder_layers": 4,
}
GEMMA_3 = {"model_name": "gemma3-4b", "sliding_window_size": 64, "base_num_decoder_layers": 6}
EXPERTS = MOE | {"ici_context_parallelism": 4, "ici_expert_parallelism": 2}
TENSOR = {"ici_context_parallelism": 4, "ici_tensor_parallelism": 2}
FSDP = {"ici_context_parallelism": 1, "ici_fsdp_parallelism": 8}
PACKED = {"packing": True}
GPUS = {"hardware": "gpu"}
"""What opens MaxText's options for GPUs, on CPU devices."""
NOT_ITS_OWN = ("hardware", "shard_mode", "context_parallel_strategy", "context_parallel_reorder")
"""Options with which MaxText's own attention does not run on CPU devices over a context axis."""

CASES = {
    "llama": {"model_name": "llama3-8b"},
    "2048 tokens": {"max_target_length": 2048},
    "contiguous": {"context_parallel_load_balance": False},
    "tensor": TENSOR,
    "fsdp": {"ici_context_parallelism": 4, "ici_fsdp_parallelism": 2},
    "fsdp and tensor": TENSOR | {"ici_context_parallelism": 2, "ici_fsdp_parallelism": 2},
    "no context axis": FSDP | {"per_device_batch_size": 1},
    "fsdp beyond the batch": FSDP,
    "mistral": {"model_name": "mistral-7b"},
    "gemma 2": {"model_name": "gemma2-2b", "sliding_window_size": 64},
    "gemma 3": GEMMA_3,
    "gpt_oss": MOE | {"model_name": "gpt-oss-20b", "sliding_window_size": 64},
    "qwen 2": {"model_name": "qwen2.5-1.5b"},
    "qwen 3": {"model_name": "qwen3-0.6b"},
    "qwen 3, experts": EXPERTS | {"model_name": "qwen3-30b-a3b"},
    "olmo 3": {"model_name": "olmo3-7b", "sliding_window_size": 64, "base_num_decoder_layers": 4},
    "mixtral": EXPERTS | {"model_name": "mixtral-8x7b"},
    "deepseek 2": MOE | MLA | {"model_name": "deepseek2-16b"},
    "deepseek 3": MOE | MLA | {"model_name": "deepseek3-671b", "q_lora_rank": 32},
    "llama 4": LLAMA_4,
    "remat full": {"remat_policy": "full"},
    "remat with context": {"remat_policy": "minimal_with_context"},
    "remat custom": {"remat_policy": "custom", "context": "device"},
    "no scan": {"scan_layers": False},
    "gradient accumulation": {"gradient_accumulation_steps": 2},
    "explicit": {"shard_mode": "explicit"},
    "explicit, tensor": TENSOR | {"shard_mode": "explicit"},
    "packed": PACKED,
    "packed, contiguous": PACKED | {"context_parallel_load_balance": False},
    "packed gemma 3": PACKED | GEMMA_3,
    "packed llama 4": PACKED | LLAMA_4,
    "ring": GPUS | {"context_parallel_strategy": "ring"},
    "packed ring, striped": GPUS | PACKED | {"context_parallel_strategy": "ring"},
    "all_gather, striped": GPUS | {"context_parallel_reorder_strategy": "striped"},
    "pipeline": {
        "ici_pipeline_parallelism": 2,
        "ici_context_parallelism": 4,
        "num_pipeline_microbatches": 2,
    },
}
"""Options of MaxText. Without a model, its default: llama 2."""
SHORT = ("llama", "gpt_oss", "packed ring, striped")
"""The cases that `make test-full` runs."""


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Returns a function that trains with options, and with this attention if asked for.

    MaxText is its own again when the test ends.
    """
    calls, original = [], maxtext.dot_product_attention

    def counted(*args, **options):
        calls.append(options)
        return original(*args, **options)

    def run(options, ours):
        if options.get("packing"):
            training.pack(monkeypatch)
        if ours:
            maxtext.install()
        found = training.run(tmp_path, **options)
        assert bool(calls) == ours
        return found

    for owner, name in (
        (attention_op.AttentionOp, "apply_attention"),
        (max_utils, "reorder_causal_load_balanced"),
        (nnx_decoders.NNXDecoder, "get_remat_policy"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(maxtext, "dot_product_attention", counted)
    return run


def far(found, expected, name):
    """Returns how far metrics are from others at most, relative."""
    return np.max(np.abs(found[name] - expected[name]) / expected[name])


def cases():
    return [
        pytest.param(options, id=name, marks=[pytest.mark.short] if name in SHORT else [])
        for name, options in CASES.items()
    ]


@pytest.mark.parametrize("options", cases())
def test_training_is_that_of_its_own_attention(train, options):
    own = {name: x for name, x in options.items() if not name.startswith(NOT_ITS_OWN)}
    expected, found = train(own, ours=False), train(options, ours=True)
    seconds = [f"{x['seconds']:.3f}" for x in (expected, found)]
    loss, gradients = (far(found, expected, name) for name in ("loss", "gradients"))
    print(f"off by {loss:.1e}, gradients {gradients:.1e}; s a step:", *seconds)
    assert expected["loss"][-1] < expected["loss"][0] - 0.3
    assert loss <= LOSS
    assert gradients <= GRADIENTS


def test_bfloat16_is_as_far_from_float32_as_its_own(train):
    half = {"dtype": "bfloat16"}
    exact, own = train({}, ours=False), train(half, ours=False)
    found = train(half, ours=True)
    for name in ("loss", "gradients"):
        assert far(found, exact, name) <= 1.5 * far(own, exact, name)


@pytest.mark.parametrize(
    ("function", "wrong", "options"),
    [
        pytest.param(
            "layout_of", lambda *_: "contiguous", {}, id="layout", marks=pytest.mark.short
        ),
        pytest.param(
            "_window", lambda op: (op.sliding_window_size, 0), CASES["gemma 2"], id="window"
        ),
    ],
)
def test_a_fault_changes_the_losses(train, monkeypatch, function, wrong, options):
    expected = train(options, ours=False)
    monkeypatch.setattr(maxtext, function, wrong)
    off = far(train(options, ours=True), expected, "loss")
    print(f"off by {off:.1e}")
    assert off >= FAULT
