"""Settings of all tests: compiled programs are kept for one run, slow files come first, and `-m full` can be run in shares.

pytest -m full --share 3/30 --stop-after 240     one share of thirty; no test begins after 240 seconds
"""

import contextlib
import ctypes
import gc
import os
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import jax
import pytest
from file_times import saved_seconds
from support import sampling
from support.compiling import compile_in_short_time

from tcemu.base import compilation
from tcemu.base.execution import execution
from tcemu.base.jax_internals import reset_compilation_cache

PROGRAMS = {"jax_persistent_cache_min_compile_time_secs": 0.02, "jax_persistent_cache_min_entry_size_bytes": -1}


# These files test what XLA makes of the arithmetic, so they compile as users do. In the usual run all other files compile faster, with the
# same bits: see support/compiling.py
OPTIMISED = (
    "arithmetic", "output_blocks", "compilation", "jaxpr", "mma", "process", "reference_golden",
)  # fmt: skip


# Their tests hold JAX's operations to the recorded words and to the references. All other files compute as users do, by kernels where
# llvmlite is installed; tests/engine/backends compares each kernel with JAX's operations
PORTABLE = ("arithmetic", "architectures", "instructions", "oracles")  # folders
BY_KERNELS = ("tcgen05_arrays", "tcgen05_block")  # files there that test where operands lie, not the products

TESTS_RUN = pytest.StashKey[int]()  # how many tests this process has run
CHECK_INTERVAL, MAX_MAPS = 20, 30_000  # tests between two looks at the memory maps; maps at which programs are dropped
STARTED = time.monotonic()


def pytest_addoption(parser):
    parser.addoption("--share", metavar="I/N", help="of the chosen tests only the share I of N, the same ones each time")
    parser.addoption("--on-gpu", metavar="FILE", help="run each PTX kernel of the tests on the GPU too: see support/gpu_kernels.py")
    parser.addoption("--stop-after", metavar="SECONDS", type=float, help="skip the tests that would begin later")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Keeps compiled programs in a folder that is deleted when the run ends, so that two files or two processes share them.

    The setting is in the environment, for the workers of pytest-xdist and the processes that tests start. Your own setting is respected.
    """
    if sys.platform == "win32" and not sys.flags.utf8_mode:
        raise pytest.UsageError("these tests read files in UTF-8, which is not Windows' own encoding: set PYTHONUTF8=1")
    one_case = any("[" in word for word in config.args)
    gc.disable()  # until everything is collected: little of that becomes garbage
    sampling.USUAL_ALONE = config.getoption("markexpr") == "not full" and not one_case
    if path := config.getoption("on_gpu"):
        from support.gpu_kernels import compare_launches

        compare_launches(path)
    if hasattr(config, "workerinput"):
        return
    config.option.loadscopereorder = False  # pytest-xdist would take the file with the most tests first; a better order is below
    if jax.config.jax_compilation_cache_dir is None and not compilation._has_cuda():
        folder = tempfile.mkdtemp(prefix="tcemu-tests-")
        settings = {"jax_compilation_cache_dir": folder} | PROGRAMS
        config.add_cleanup(partial(_delete_programs, folder, {name: getattr(jax.config, name) for name in settings}))
        for name, value in settings.items():
            os.environ[name.upper()] = str(value)
            jax.config.update(name, value)


def _delete_programs(folder: str, before: dict):
    """Delete the folder, and restore JAX's settings: a process may run tests again."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, value in before.items():
        os.environ.pop(name.upper(), None)
        jax.config.update(name, value)
    reset_compilation_cache()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Several processes take the slowest files first, so that they end together. `--share` leaves a share of the chosen tests."""
    if hasattr(config, "workerinput"):
        seconds = saved_seconds()
        items.sort(key=lambda item: seconds.get(item.path.name, 0), reverse=True)
    if share := config.getoption("share"):
        kept = [item for item in items if sampling.in_share(item.nodeid, share)]
        config.hook.pytest_deselected(items=[item for item in items if not sampling.in_share(item.nodeid, share)])
        items[:] = kept


def pytest_runtest_setup(item):
    limit = item.config.getoption("stop_after")
    if limit is not None and time.monotonic() - STARTED > limit:
        pytest.skip(f"not begun within {limit:g} s (--stop-after)")


def pytest_collection_finish(session):
    """Everything collected so far lives until the end, so the garbage collector ignores it and runs less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


@pytest.fixture(autouse=True)
def programs_are_compiled_in_short_time(request):
    """The files in OPTIMISED, `-m full` and `-m gpu` are excepted, and so is a setting of the environment."""
    as_users = request.path.stem.removeprefix("test_") in OPTIMISED or any(map(request.node.get_closest_marker, ("full", "gpu")))
    compile_in_short_time(not as_users)


@pytest.fixture(autouse=True)
def computed_without_kernels(request):
    """The files in the folders PORTABLE, in the test's own thread."""
    portable = request.path.parent.name in PORTABLE and request.path.stem.removeprefix("test_") not in BY_KERNELS
    with execution("portable") if portable else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True)
def kernels_for_cpus_run_on_a_cpu(request):
    """Also where JAX has a GPU."""
    with jax.default_device(jax.devices("cpu")[0]) if request.path.stem.startswith("test_llvm") else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True, scope="module")
def compiled_programs_are_dropped():
    """One module's programs are of little use to the next; hundreds of them fill gigabytes, which only the C library can release."""
    yield
    drop_programs()


def pytest_runtest_teardown(item):
    """Each program takes some of the 65,530 memory maps that Linux allows a process; without a free one jaxlib crashes."""
    item.session.stash[TESTS_RUN] = count = item.session.stash.get(TESTS_RUN, 0) + 1
    with contextlib.suppress(OSError):  # not Linux
        if count % CHECK_INTERVAL == 0 and Path("/proc/self/maps").read_bytes().count(b"\n") > MAX_MAPS:
            drop_programs()


def drop_programs():
    jax.clear_caches()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError, TypeError):  # glibc alone has it; Windows has no library None
        ctypes.CDLL(None).malloc_trim(0)
