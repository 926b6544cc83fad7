"""A check of the version of JAX, which `burst_attention` imports before all that needs it."""

import jax

OLDEST = "0.11.2"
"""The oldest JAX that the package supports."""


def check() -> None:
    """Raises for a JAX that is too old for the package."""
    oldest = tuple(map(int, OLDEST.split(".")))
    if jax.__version_info__ < oldest or not hasattr(jax, "ffi"):
        lacks = "" if hasattr(jax, "ffi") else ", which has no jax.ffi"
        raise ImportError(
            f"burst_attention needs JAX {OLDEST} or later, got {jax.__version__}{lacks}; run "
            "`pip install --upgrade jax jaxlib`"
        )


check()
