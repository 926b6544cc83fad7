"""All rows of `ring_gpu.py`: what the package computes in a JAX program, against its peers."""

from typing import Any

import jax

from . import serve
from .attention_rows import AttentionRows
from .carry_rows import CarryRows
from .decode_rows import DecodeRows
from .problems import Rows
from .recurrent_rows import RecurrentRows

FAMILIES: tuple[type[Rows], ...] = (CarryRows, AttentionRows, DecodeRows, RecurrentRows)


class Work:
    """The rows, by kind; the part of a worker that serve.py asks."""

    def __init__(self, quick: bool):
        self._quick = quick

    def measure(self, kind: str, alone: bool = False, **about: Any) -> dict[str, Any]:
        """Returns a row: what was measured, and what is wrong with it.

        With ``alone``, peers and kernels of others that a row can do without take no part.
        """
        family = next(each for each in FAMILIES if hasattr(each, kind))
        before = serve.clock()
        row: dict[str, Any] = getattr(family(self._quick, alone), kind)(**about)
        found: dict[str, Any] = {"device": jax.local_devices()[0].device_kind}
        found |= {"devices": len(jax.local_devices()), "jax": jax.__version__}
        found |= {"nvidia-smi": serve.nvidia_smi(), "cudnn": _cudnn()}
        return found | {"clock": {"before": before, "after": serve.clock()}} | row


def _cudnn() -> str:
    """Returns the version of cuDNN that this library would use, or why it would not."""
    from burst_attention import _confirmed

    return _confirmed.cudnn()
