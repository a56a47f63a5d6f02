"""Tests of Triton's interpreter are skipped where Triton is older than 3.8, whose interpreter `tcemu.triton.interpreted` needs."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items):
    try:
        installed = version("triton")
    except PackageNotFoundError:
        return
    if tuple(map(int, installed.split(".")[:2])) < (3, 8):
        reason = pytest.mark.skip(reason=f"Triton {installed}'s interpreter is refused: see tcemu.triton.interpreted")
        for item in items:
            if item.path.parent == FOLDER and "interpret" in item.nodeid:
                item.add_marker(reason)
