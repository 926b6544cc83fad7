"""The error for derivatives of custom calls."""

from typing import NoReturn


def refuse_second(static: object, primals: object, tangents: object) -> NoReturn:
    """Raises for the derivative of a custom call inside a rule, which is a second derivative."""
    raise NotImplementedError(
        "second derivatives of burst_attention are not implemented: its gradient is a custom call. "
        "For Hessian-vector products use a dense attention such as jax.nn.dot_product_attention"
    )
