"""What holds for all tests."""

import contextlib
import ctypes
import gc
import os
import shutil
import tempfile
from pathlib import Path

import jax
import pytest
from support.compiling import compile_in_short_time
from support.sampling import COLLECTED
from times import usual

from tcemu import compilation

PROGRAMS = {"jax_persistent_cache_min_compile_time_secs": 0.02, "jax_persistent_cache_min_entry_size_bytes": -1}


# These files test what XLA makes of the arithmetic, so they compile as users do. In the usual run all other files compile in short time, as
# support/compiling.py says. The bits are the same
OPTIMISED = (
    "arithmetic", "blocks", "compilation", "jaxpr", "mma", "process", "reference_golden",
)  # fmt: skip


RUN = pytest.StashKey[int]()  # how many tests this process has run
LOOKS, MOST_MAPS = 20, 30_000


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """A program that two files have, or two processes, is compiled once in a run: JAX keeps it in a folder, which goes when the run ends.

    The environment says so, that the workers of pytest-xdist have too, and the processes that tests start. What you have configured stays.
    """
    if hasattr(config, "workerinput"):
        return
    config.option.loadscopereorder = False  # of pytest-xdist, which has the file with the most tests first; below is a better order
    if jax.config.jax_compilation_cache_dir is None and not compilation._has_cuda():
        folder = tempfile.mkdtemp(prefix="tcemu-tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        for name, value in ({"jax_compilation_cache_dir": folder} | PROGRAMS).items():
            os.environ[name.upper()] = str(value)
            jax.config.update(name, value)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """All items, before `-m` and `-k` choose among them: the table of samples is held against them.

    Several processes take the longest files first, so that they end together.
    """
    config.stash[COLLECTED] = list(items)
    if hasattr(config, "workerinput"):
        seconds = usual()
        items.sort(key=lambda item: seconds.get(item.path.name, 0), reverse=True)


def pytest_collection_finish(session):
    """What is there now stays to the end. The garbage collector need not look at it each time, nor as often as it does of itself."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(autouse=True)
def programs_are_compiled_in_short_time(request):
    """But not in the files above, in `-m full` and `-m gpu`, and where the environment says which."""
    as_users = request.path.stem.removeprefix("test_") in OPTIMISED or any(map(request.node.get_closest_marker, ("full", "gpu")))
    compile_in_short_time(not as_users)


@pytest.fixture(autouse=True, scope="module")
def compiled_programs_are_dropped():
    """One module's programs are of little use to the next, and hundreds of them fill gigabytes, which only the C library can give back."""
    yield
    drop_programs()


def pytest_runtest_teardown(item):
    """Each program takes some of the 65,530 maps of memory that Linux lets a process have; without a free one jaxlib dies."""
    item.session.stash[RUN] = count = item.session.stash.get(RUN, 0) + 1
    with contextlib.suppress(OSError):  # not Linux
        if count % LOOKS == 0 and Path("/proc/self/maps").read_bytes().count(b"\n") > MOST_MAPS:
            drop_programs()


def drop_programs():
    jax.clear_caches()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)
