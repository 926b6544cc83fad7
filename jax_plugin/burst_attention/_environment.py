"""One rule for reading the environment variables of the package, as the library reads its own."""

import os


def choice(variable: str, *values: str) -> str | None:
    """Returns the value of a variable, or None where it is unset or empty.

    Raises:
      ValueError: for another value.
    """
    value = os.environ.get(variable, "").strip()
    if value and value not in values:
        expected = " or ".join(map(repr, values))
        raise ValueError(f"{variable} must be {expected}, or unset for the default, got {value!r}")
    return value or None
