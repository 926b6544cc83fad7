"""Files that hold the parameters of a model."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

Params = nnx.State[Any, Any]


def save_checkpoint(path: Path, params: Params) -> None:
    """Writes all parameters under their paths in the model."""
    leaves, _ = jax.tree.flatten_with_path(params)
    arrays: dict[str, Any] = {jax.tree_util.keystr(key): np.asarray(leaf) for key, leaf in leaves}
    np.savez(path, **arrays)


def load_checkpoint(path: Path, like: Params) -> Params:
    """Reads parameters into the structure, and onto the devices, of `like`."""
    with np.load(path) as arrays:
        return jax.tree.map_with_path(
            lambda key, leaf: jax.device_put(arrays[jax.tree_util.keystr(key)], leaf.sharding), like
        )
