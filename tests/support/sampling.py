"""Which cases of a list every run has, and which only `pytest -m full`."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], usual: Collection[Any] | int, ids: Callable[[Any], str] | None = None) -> list[Any]:
    """The cases, for `parametrize`. usual: those that every run has, or one of so many."""
    every = lambda at, case: at % usual == 0 if isinstance(usual, int) else case in usual  # noqa: E731
    return [pytest.param(case, id=ids and ids(case), marks=[] if every(at, case) else [pytest.mark.full]) for at, case in enumerate(cases)]
