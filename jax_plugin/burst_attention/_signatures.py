"""Functions that share keyword arguments: a TypedDict has their names, types and documentation."""

import inspect
from collections.abc import Callable, Mapping
from types import get_original_bases
from typing import Literal, TypedDict, TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


class Alone(TypedDict, total=False):
    """Options of a call that returns out alone."""

    return_residual: Literal[False]


class WithLse(TypedDict):
    """Options of a call that returns lse too."""

    return_residual: Literal[True]


class Either(TypedDict):
    """Options of a call whose flag type checkers do not know."""

    return_residual: bool


def check_names(caller: str, given: Mapping[str, object], kind: type) -> None:
    """Raises for keyword arguments of ``caller`` that the TypedDict ``kind`` has not."""
    for name in given:
        if name not in kind.__annotations__:
            raise TypeError(
                f"{caller}() got an unexpected keyword argument {name!r}; it takes "
                f"{', '.join(kind.__annotations__)}"
            )


def shows(kind: type, defaults: Mapping[str, object]) -> Callable[[Function], Function]:
    """Returns a decorator of functions of ``**options``, which have the names of ``kind``.

    It puts every option into the function's signature and documentation. The default of an option
    that ``defaults`` does not have is None.
    """

    def decorated(function: Function) -> Function:
        signature = inspect.signature(function)
        parameters = [x for x in signature.parameters.values() if x.kind is not x.VAR_KEYWORD]
        for name, annotation in kind.__annotations__.items():
            parameters.append(
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=defaults.get(name),
                    annotation=annotation,
                )
            )
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        entries = "\n".join(x for x in map(_entries, (*get_original_bases(kind), kind)) if x)
        if function.__doc__ and entries:
            own = inspect.cleandoc(function.__doc__)
            function.__doc__ = own.replace(f"  **options: see `{kind.__name__}`.", entries)
        return function

    return decorated


def _entries(kind: object) -> str:
    """Returns the entries of a TypedDict's own documentation."""
    documented = getattr(kind, "__annotations__", {}) and inspect.cleandoc(kind.__doc__ or "")
    return documented.split("Args:\n")[1] if documented else ""
