"""`Record`: the base of frozen dataclasses that users make, whose constructors check the fields."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Self

import numpy as np


def is_count(value: Any) -> bool:
    """Return whether a value is an int of 1 or more. Booleans are rejected."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_positive_integers(*, optional: bool = False, **values: Any) -> None:
    """Raise ValueError unless all values are integers of 1 or more; `optional` allows None."""
    for name, value in values.items():
        if not is_count(value) and not (optional and value is None):
            raise ValueError(f"{name}={value!r}: expected an integer of 1 or more{', or None' if optional else ''}")


def check_choice(name: str, value: Any, expected: Iterable[Any]) -> None:
    """Raise ValueError unless the value is one of the expected ones."""
    expected = tuple(expected)
    if isinstance(value, np.ndarray) or value not in expected:  # an array has no single answer
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(str, expected))}")


class Record:
    """Base class of frozen dataclasses that users make."""

    def check_fields(self, *, flags: str = "", counts: str = "", optional_counts: str = "", **choices: Iterable[Any]) -> None:
        """Check fields for a constructor.

        Args:
            flags: Names of booleans, with spaces between.
            counts: Names of integers of 1 or more. Those of NumPy become ints.
            optional_counts: Names of such integers that may be None.
            **choices: The values that a field may have, by its name.

        Raises:
            ValueError: A field has another value.
        """
        for name in f"{counts} {optional_counts}".split():
            if isinstance(value := getattr(self, name), np.integer):
                object.__setattr__(self, name, int(value))
        try:
            for name in flags.split():
                if not isinstance(value := getattr(self, name), bool):
                    raise ValueError(f"{name}={value!r}: expected True or False")
            check_positive_integers(**{name: getattr(self, name) for name in counts.split()})
            check_positive_integers(optional=True, **{name: getattr(self, name) for name in optional_counts.split()})
            for name, expected in choices.items():
                check_choice(name, getattr(self, name), expected)
        except ValueError as error:
            raise ValueError(f"{type(self).__name__}: {error}") from None

    def replace(self, **changes: Any) -> Self:
        """Return the value with some fields changed. Raises the constructor's errors."""
        return replace(self, **changes)  # type: ignore[type-var]
