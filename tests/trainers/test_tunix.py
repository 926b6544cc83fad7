"""Tunix's models need no adapter: a block of theirs calls this attention like any function.

One step of supervised training, and one of GRPO's loss, equal those with the models' own blocks.
"""

from functools import partial

import burst_attention as ba
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tunix.models.gemma3 import model as gemma3
from tunix.models.qwen3 import model as qwen3
from tunix.rl import algo_core, common
from tunix.rl.grpo.grpo_learner import GRPOConfig
from tunix.sft import peft_trainer, utils

LIMIT = 2e-6
"""Largest norm of the error of all gradients, or changes of parameters, relative to their norm."""
MESH = jax.make_mesh((2, 4, 1), ("fsdp", "sp", "tp"), (jax.sharding.AxisType.Auto,) * 3)
PROMPT, LENGTH, PAD, END = 64, 128, 0, 1


def attend(block, q, k, v, mask, **options):
    """Returns attention over the axis "sp"; a key that a mask hides from itself is padding."""
    keys = jnp.diagonal(mask, axis1=1, axis2=2)[:, None, None]
    spec = jax.P(*block.shd_config.act_btnh)
    return ba.dot_product_attention(
        q, k, v, mask=keys, mesh=MESH, spec=spec, is_causal=True, **options
    )


def qwen3_block(self, x, segment_pos, cache, attn_mask, segment_ids=None):
    rope = partial(qwen3.apply_rope, positions=segment_pos, head_dim=self.head_dim)
    q, k = rope(self.q_norm(self.q_proj(x))), rope(self.k_norm(self.k_proj(x)))
    return None, self.o_proj(attend(self, q, k, self.v_proj(x), attn_mask))


def gemma3_block(self, x, segment_pos, cache, attn_mask):
    rope = partial(
        gemma3.apply_rope, positions=segment_pos, head_dim=self.head_dim,
        base_frequency=self.rope_base_frequency, scale_factor=self.rope_scale_factor,
    )  # fmt: skip
    k, v = self.kv_einsum(x)
    q, k = rope(self._query_norm(self.q_einsum(x))), rope(self._key_norm(k))
    is_local = self.attn_type == gemma3.AttentionType.LOCAL_SLIDING
    window = (self.sliding_window_size - 1, 0) if is_local else None
    scale = float(self.query_pre_attn_scalar)
    out = attend(self, q, k, v, attn_mask, scale=scale, local_window_size=window)
    return None, self.attn_vec_einsum(out)


SIZES = {
    "embed_dim": 64, "hidden_dim": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
}  # fmt: skip


def qwen3_model():
    config = qwen3.ModelConfig(
        num_layers=2, vocab_size=256, rope_theta=10_000, norm_eps=1e-6, **SIZES,
        shd_config=qwen3.ShardingConfig.get_default_sharding(enable_sp=True),
    )  # fmt: skip
    return qwen3.Qwen3(config, rngs=nnx.Rngs(0))


def gemma3_model():
    config = gemma3.ModelConfig(
        num_layers=6, num_embed=256, sliding_window_size=32, param_dtype=jnp.float32, **SIZES,
        shd_config=gemma3.ShardingConfig.get_default_sharding(),
    )  # fmt: skip
    return gemma3.Gemma3(config, rngs=nnx.Rngs(0))


MODELS = {
    "qwen 3": (qwen3_model, qwen3.Attention, qwen3_block),
    "gemma 3": (gemma3_model, gemma3.Attention, gemma3_block),
}


def texts(seed, before=0):
    """Returns tokens of texts: prompts with up to ``before`` padding, completions with padding."""
    random = np.random.default_rng(seed)
    tokens = random.integers(2, 256, size=(4, LENGTH)).astype(np.int32)
    tokens[:, :PROMPT][np.arange(PROMPT) < random.integers(before + 1, size=(4, 1))] = PAD
    tokens[:, PROMPT:][np.arange(LENGTH - PROMPT) > random.integers(30, 60, (4, 1))] = PAD
    return tokens


def changes_of_training(model):
    """Returns how two steps of Tunix's supervised trainer change the parameters of a model."""

    def inputs(batch):
        mask = batch.input_tokens != PAD
        return {
            "input_tokens": batch.input_tokens,
            "input_mask": mask,
            "positions": utils.build_positions_from_mask(mask),
            "attention_mask": utils.make_causal_attn_mask(mask),
        }

    config = peft_trainer.TrainingConfig(eval_every_n_steps=100, max_steps=2)
    before = jax.tree.map(np.asarray, nnx.state(model, nnx.Param))
    trainer = peft_trainer.PeftTrainer(model, optax.sgd(1e-1), config)
    batches = [peft_trainer.TrainingInput(x, x != PAD) for x in map(texts, (0, 1))]
    trainer.with_gen_model_input_fn(inputs).train(batches)
    return jax.tree.map(np.subtract, nnx.state(model, nnx.Param), before)


def gradients_of_grpo(model):
    """Returns GRPO's loss and its gradients."""
    tokens, random = texts(2, before=30), np.random.default_rng(3)
    logps = random.normal(size=(2, 4, LENGTH - PROMPT)).astype(np.float32) - 5
    prompt, completion = tokens[:, :PROMPT], tokens[:, PROMPT:]
    example = common.TrainExample(
        prompt_ids=prompt, prompt_mask=prompt != PAD,
        completion_ids=completion, completion_mask=completion != PAD,
        advantages=random.normal(size=4).astype(np.float32),
        ref_per_token_logps=logps[0], old_per_token_logps=logps[1],
    )  # fmt: skip

    config = GRPOConfig()
    config.temperature = 1.0  # as Tunix's learner sets it

    @nnx.jit
    def run(model, example):
        def loss(model):
            return algo_core.grpo_loss_fn(model, example, config, PAD, END)[0]

        return nnx.value_and_grad(loss)(model)

    return run(model, example)


def norm(tree):
    return np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(tree)))


@pytest.mark.parametrize("step", [changes_of_training, gradients_of_grpo])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_that_of_its_own_attention(monkeypatch, name, step):
    model, attention, block = MODELS[name]
    with MESH:
        own = step(model())
        called = []

        def counted(self, *args, **options):
            called.append(options)
            return block(self, *args, **options)

        monkeypatch.setattr(attention, "block", counted)
        jax.clear_caches()  # compiled functions of Tunix know the model, not its blocks
        found = step(model())
    assert called
    off = norm(jax.tree.map(np.subtract, found, own)) / norm(own)
    print(f"off by {off:.1e}")
    assert off <= LIMIT
