"""MaxText's own trainer on small models: the metrics of each step."""

import json
from itertools import pairwise
from pathlib import Path

import jax
import maxtext
import numpy as np
from maxtext.input_pipeline.synthetic_data_processing import SyntheticDataIterator
from maxtext.trainers.pre_train import train
from maxtext.utils import sharding

CONFIG = Path(maxtext.__file__).parent / "configs" / "base.yml"
SMALL = {
    "override_model_config": True,
    "steps": 10,
    "learning_rate": 1e-3,
    "max_target_length": 256,
    "vocab_size": 512,
    "base_emb_dim": 128,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 32,
    "base_mlp_dim": 256,
    "base_moe_mlp_dim": 64,
    "base_num_decoder_layers": 2,
    "dtype": "float32",
    "weight_dtype": "float32",
    "matmul_precision": "highest",
    "packing": False,
    "per_device_batch_size": 0.25,  # a batch of 2
    "ici_fsdp_parallelism": 1,
    "ici_context_parallelism": 8,
    "remat_policy": "none",
    "attention": "dot_product",
}
"""A model that trains for 10 steps in seconds, on a sequence over 8 devices."""
QUIET = {
    "run_name": "test",
    "dataset_type": "synthetic",
    "tokenizer_type": "tiktoken",
    "hardware": "cpu",
    "jax_cache_dir": "",
    "enable_checkpointing": False,
    "enable_goodput_recording": False,
    "monitor_goodput": False,
    "enable_tensorboard": False,
    "gcs_metrics": False,
    "log_config": False,
    "skip_jax_distributed_system": True,
}
"""No logs, no checkpoints, nothing from the network."""


def run(folder, **options):
    """Returns the metrics of each step of training with options of MaxText."""
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    files = {"metrics_file": metrics, "base_output_directory": folder}
    options = SMALL | QUIET | files | options
    train.main(["train", str(CONFIG), *(f"{name}={value}" for name, value in options.items())])
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert len(steps) == options["steps"]
    return {
        "loss": np.array([step["learning/loss"] for step in steps]),
        "gradients": np.array([step["learning/raw_grad_norm"] for step in steps]),
        "seconds": np.median([step["perf/step_time_seconds"] for step in steps[3:]]),
    }


def packed(self):
    """Returns a batch of new documents, in place of the one that MaxText repeats.

    Documents have a text to learn: tokens count up by 7. Each row has four documents and padding.
    """
    config = self.config
    self.step = getattr(self, "step", 0) + 1
    random, shape = np.random.default_rng(self.step), (config.global_batch_size_to_load,)
    length = config.max_target_length
    ids, positions = (np.zeros((*shape, length), np.int32) for _ in range(2))
    for row, place in zip(ids, positions, strict=True):
        cuts = np.sort(random.choice(np.arange(1, length - 20), 3, replace=False))
        ends = [0, *cuts, length - random.integers(1, 20)]
        for document, (begin, end) in enumerate(pairwise(ends)):
            row[begin:end], place[begin:end] = document + 1, np.arange(end - begin)
    tokens = random.integers(config.vocab_size, size=(*shape, 1)) + 7 * np.arange(length + 1)
    tokens = (tokens % config.vocab_size).astype(np.int32)
    batch = {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        **{f"{name}_segmentation": ids for name in ("inputs", "targets")},
        **{f"{name}_position": positions for name in ("inputs", "targets")},
    }
    return jax.device_put(batch, sharding.get_input_data_sharding(config, self.mesh))


def pack(monkeypatch):
    """Lets MaxText train on packed documents."""
    monkeypatch.setattr(SyntheticDataIterator, "__next__", packed)
