"""Which cases of a list every run has, and which only `pytest -m full`; and the shares in which `-m full` is run a part at a time."""

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple
from zlib import crc32

import pytest

USUAL_ALONE = False  # the cases of `-m full` are not even collected, which would take longer than many a test; set by conftest.py


def sample_cases(cases: Iterable[Any], usual: Collection[Any] | int, ids: Callable[[Any], str] | None = None) -> list[Any]:
    """The cases for `parametrize`, those outside the usual run marked `full`.

    Args:
        cases: All cases.
        usual: The cases of the usual run; or a number n, for one case of every n.
        ids: The name of a case.

    Returns:
        The cases; under USUAL_ALONE those of the usual run, or one that is left out, since pytest skips a test without cases.

    Raises:
        ValueError: `usual` names something that is no case.
    """
    cases = list(cases)
    if not isinstance(usual, int) and (unknown := [case for case in usual if case not in cases]):
        raise ValueError(f"not among the cases: {unknown}")
    every = lambda index, case: index % usual == 0 if isinstance(usual, int) else case in usual
    every_case = [
        pytest.param(case, id=ids and ids(case), marks=[] if every(index, case) else [pytest.mark.full]) for index, case in enumerate(cases)
    ]
    return [case for case in every_case if not case.marks] or every_case[:1] if USUAL_ALONE else every_case


class Share(NamedTuple):
    """How many cases of a test the usual run has."""

    usual: int
    total: int


def count_shares(items: Iterable[pytest.Item]) -> dict[str, Share]:
    """The tests that the usual run does not have whole, by "test_mma.py::test_recorded_words"."""
    counts: dict[str, Share] = {}
    for item in items:
        name = f"{item.path.name}::{getattr(item, 'originalname', item.name)}"
        usual, total = counts.get(name, (0, 0))
        counts[name] = Share(usual + (item.get_closest_marker("full") is None), total + 1)
    return {name: share for name, share in sorted(counts.items()) if share.usual < share.total}


def in_share(name: str, share: str) -> bool:
    """Whether a test belongs to a share such as "3/30". Every name belongs to one of the 30; the rest of the suite does not matter.

    Raises:
        ValueError: the share is not I/N with 0 <= I < N.
    """
    index, _, count = share.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ValueError(f"--share {share}: expected I/N with I from 0 to N - 1, such as 3/30")
    return crc32(name.encode()) % int(count) == int(index)
