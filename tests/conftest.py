"""What holds for all tests."""

import contextlib
import ctypes
import gc

import jax
import pytest
from support.sampling import COLLECTED


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """All items, before `-m` and `-k` choose among them: the table of samples is held against them."""
    config.stash[COLLECTED] = list(items)


@pytest.fixture(autouse=True, scope="module")
def compiled_programs_are_dropped():
    """One module's programs are of little use to the next, and hundreds of them fill gigabytes, which only the C library can give back."""
    yield
    jax.clear_caches()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)
