"""The pytest plugin leaves alone a fixture of the name `gpu` that is not its own."""

import subprocess
import sys

import pytest
from support import pages

FOREIGN = """
import pytest


@pytest.fixture
def gpu():
    return "ours"


def test_it_runs_once(gpu):
    assert gpu == "ours"
"""


@pytest.mark.parametrize("place", ["module", "conftest"])
def test_a_test_with_a_foreign_fixture_runs_once(tmp_path, place):
    fixture, test = FOREIGN.split("def test_")
    files = {"conftest.py": fixture, "test_it.py": f"def test_{test}"} if place == "conftest" else {"test_it.py": FOREIGN}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    options = ["-p", "tcemu.pytest_plugin", "-p", "no:cacheprovider", "--tcemu-gpu", "A100", "--tcemu-gpu", "H100", "-q"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)], cwd=pages.ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
