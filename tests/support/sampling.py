"""Which cases of a list every run has, and which only `pytest -m full`; and the table of that in tests/README.md."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"
COLLECTED = pytest.StashKey[list]()  # where conftest.py leaves all items of a session, before `-m` and `-k` choose among them
BEGIN, END = "<!-- samples: begin -->", "<!-- samples: end -->"


def sampled(cases: Iterable[Any], usual: Collection[Any] | int, ids: Callable[[Any], str] | None = None) -> list[Any]:
    """The cases, for `parametrize`. usual: those that every run has, or one of so many. ValueError where one of them is no case."""
    cases = list(cases)
    if not isinstance(usual, int) and (none := [case for case in usual if case not in cases]):
        raise ValueError(f"of the usual run, and no cases: {none}")
    every = lambda at, case: at % usual == 0 if isinstance(usual, int) else case in usual  # noqa: E731
    return [pytest.param(case, id=ids and ids(case), marks=[] if every(at, case) else [pytest.mark.full]) for at, case in enumerate(cases)]


class Share(NamedTuple):
    """How many cases of a test the usual run has, and how many there are."""

    usual: int
    every: int


Shares = Mapping[str, Share]  # "test_mma.py::test_recorded_words" -> its share


def shares(items: Iterable[pytest.Item]) -> dict[str, Share]:
    """The tests that the usual run does not have whole."""
    counts: dict[str, Share] = {}
    for item in items:
        name = f"{item.path.name}::{getattr(item, 'originalname', item.name)}"
        usual, every = counts.get(name, (0, 0))
        counts[name] = Share(usual + (item.get_closest_marker("full") is None), every + 1)
    return {name: share for name, share in sorted(counts.items()) if share.usual < share.every}


def table(counted: Shares) -> str:
    """The lines of the table in tests/README.md."""
    rows = [f"| `{name}` | {share.usual} | {share.every} |" for name, share in counted.items()]
    return "\n".join(["| test | cases of the usual run | all cases |", "|---|---|---|", *rows])


def read(text: str) -> dict[str, Share]:
    """The shares that a text says, from its lines as `table` writes them."""
    rows = re.findall(r"^\| `(\S+\.py::\w+)` \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    return {name: Share(int(usual), int(every)) for name, usual, every in rows}


def misfits(said: Shares, counted: Shares, files: Collection[str], by_name: Collection[str] = ()) -> list[str]:
    """Where a table does not fit what was counted in some files. by_name: files in which only the names must fit, not the numbers."""
    wrong = []
    for name in sorted({*said, *counted}):
        file = name.partition("::")[0]
        row, share = said.get(name), counted.get(name)
        alike = (row is None) == (share is None) if file in by_name else row == share
        if file in files and not alike:
            wrong.append(f"{name}: the table says {row and tuple(row)}, the tests have {share and tuple(share)}")
    return wrong
