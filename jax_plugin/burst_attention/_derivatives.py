"""What cannot be differentiated, and says so."""

from __future__ import annotations

from typing import NoReturn


def second(static: object, primals: object, tangents: object) -> NoReturn:
    """The derivative of a custom call that is part of a rule: somebody wants a second one."""
    raise NotImplementedError(
        "second derivatives of burst_attention are not implemented: its gradient is a custom call. "
        "For Hessian-vector products use a dense attention such as jax.nn.dot_product_attention"
    )
