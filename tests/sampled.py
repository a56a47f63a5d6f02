"""Renew the table of samples in tests/README.md: `python tests/sampled.py`.

It collects all tests, runs none, and counts for each test how many of its cases the usual run has. Where recorded words are the cases, it
counts those that ship in tests/golden, also if the whole recordings are at hand.
"""

import contextlib
import io
import sys
from pathlib import Path

import pytest
from support import golden, sampling


class Collected:
    """A pytest plugin that keeps what is collected."""

    def __init__(self) -> None:
        self.items: list[pytest.Item] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.items = list(items)


def main() -> int:
    golden.root = lambda: golden.SAMPLE
    collected, printed = Collected(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent)], plugins=[collected])
    if status != pytest.ExitCode.OK:
        print(printed.getvalue().partition("= ERRORS =")[2], file=sys.stderr)
        return int(status)
    before, found, rest = sampling.README.read_text().partition(sampling.BEGIN)
    assert found, f"{sampling.README} has no line {sampling.BEGIN}"
    after = rest.partition(sampling.END)[2]
    counted = sampling.shares(collected.items)
    sampling.README.write_text(f"{before}{sampling.BEGIN}\n{sampling.table(counted)}\n{sampling.END}{after}")
    print(f"{len(counted)} tests of which the usual run has a part")
    return 0


if __name__ == "__main__":
    sys.exit(main())
