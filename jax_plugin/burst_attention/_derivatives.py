"""Errors for derivatives of custom calls that do not exist."""

from typing import NoReturn, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Results = TypeVar("Results")
"""Arrays, in any tree."""
INSTEAD = "use a dense attention such as jax.nn.dot_product_attention"


def refuse_second(static: object, primals: object, tangents: object) -> NoReturn:
    """Raises for the derivative of a custom call inside a rule, which is a second derivative."""
    raise NotImplementedError(
        "second derivatives of burst_attention are not implemented: its gradient is a custom call. "
        f"For Hessian-vector products {INSTEAD}"
    )


def without_transpose(results: Results) -> Results:
    """Returns results of a call whose transpose is an error. Their derivatives do not change."""
    return jax.tree.map(_RESULT.bind, results)


def _refuse_transpose(cotangent: object, x: object) -> NoReturn:
    raise NotImplementedError(
        "results and gradients of burst_attention can't be transposed, since custom calls compute "
        "them. Instead of jax.linear_transpose of a call take jax.vjp, whose pullback gives the "
        f"gradients. For transposes of the pullback {INSTEAD}"
    )


# No function of JAX says what the transpose of another one raises.
_RESULT = Primitive("burst_attention_result")
_RESULT.def_impl(lambda x: x)
_RESULT.def_abstract_eval(lambda x: x)
ad.primitive_jvps[_RESULT] = lambda primals, tangents: (_RESULT.bind(*primals), *tangents)
ad.primitive_transposes[_RESULT] = _refuse_transpose
batching.defvectorized(_RESULT)
mlir.register_lowering(_RESULT, lambda context, x: [x])
