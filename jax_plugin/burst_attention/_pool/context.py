"""What a caller sets around a call of a pool, which must not reach the pool's programs."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import jax
import numpy as np
from jax.sharding import Mesh

from burst_attention._pool.ways import OUTSIDE

NO_MESH = Mesh(np.empty((), object), ())


@contextmanager
def without_contexts() -> Iterator[None]:
    """Runs programs of a pool as if there were no ``jax.set_mesh`` and no ``jax.disable_jit``.

    Both hold for every program of a thread. A mesh is one of the model's devices, so programs on
    other devices would be errors. Without ``jit`` no result would have the sharding that a program
    gives it.
    """
    with ExitStack() as contexts:
        if jax.config.jax_disable_jit:
            contexts.enter_context(jax.disable_jit(False))
        if not jax.sharding.get_abstract_mesh().empty:
            try:
                contexts.enter_context(jax.set_mesh(NO_MESH))
            except ValueError:
                raise TypeError(f"the methods of a CachePool can't be traced: {OUTSIDE}") from None
        yield
