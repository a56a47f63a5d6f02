"""What some tests need of the operating system. Where it is missing they are skipped, with the reason."""

import os
import sys
from types import ModuleType

import pytest

posix = pytest.mark.skipif(os.name != "posix", reason="Windows has no FIFOs, no /dev/full, and other rules for links and names of files")
sends_signals = pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no signals to another process")


def resource_limits() -> ModuleType:
    """Return the standard library's `resource`, or skip the test."""
    return pytest.importorskip("resource", reason="Windows has no limits of a process: the module `resource` is missing")


def skip_file(reason: str | None) -> None:
    """Skip the test file that calls this, as one test; without a reason, go on."""
    __tracebackhide__ = True  # the report names the file
    if reason:
        pytest.skip(reason, allow_module_level=True)
