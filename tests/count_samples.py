"""Print how many cases of each test the usual run has, and how many there are: `python tests/count_samples.py [FOLDER ...]`.

Collects the tests and runs none. A test that is not listed runs whole in every run; one with 0 cases of the usual run waits for
`pytest -m full`. Where recorded words are the cases, those that ship in tests/golden are counted, also if the whole recordings are at hand.
"""

import contextlib
import io
import sys
from pathlib import Path

import pytest
from support import golden, sampling


class Collector:
    """A pytest plugin that keeps the collected tests."""

    def __init__(self) -> None:
        self.items: list[pytest.Item] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.items = list(items)


def main(folders: list[str]) -> int:
    golden.root = lambda: golden.SAMPLE
    collector, output = Collector(), io.StringIO()
    paths = folders or [str(Path(__file__).parent)]
    with contextlib.redirect_stdout(output):
        status = pytest.main(["--collect-only", "-q", "-m", "full or not full", "-p", "no:cacheprovider", *paths], plugins=[collector])
    if status != pytest.ExitCode.OK:
        print(output.getvalue().partition("= ERRORS =")[2], file=sys.stderr)
        return int(status)
    shares = sampling.count_shares(collector.items)
    for name, share in shares.items():
        print(f"{share.usual:6} of {share.total:6}  {name}")
    print(f"{len(shares)} tests of which the usual run has a part")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
