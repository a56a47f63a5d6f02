"""The pytest plugin leaves alone a fixture of the name `gpu` that is not its own."""

import subprocess
import sys

from support import pages

FOREIGN = """
import pytest


@pytest.fixture
def gpu():
    return "ours"


def test_it_runs_once(gpu):
    assert gpu == "ours"
"""


def test_a_test_with_a_foreign_fixture_runs_once(tmp_path):
    """In the test's own file, and in a conftest.py."""
    fixture, test = FOREIGN.split("def test_")
    for name, text in {"test_module.py": FOREIGN, "folder/conftest.py": fixture, "folder/test_it.py": f"def test_{test}"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    options = ["-p", "tcemu_pytest", "-p", "no:cacheprovider", "--tcemu-gpu", "A100", "--tcemu-gpu", "H100", "-q"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)], cwd=pages.ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr
