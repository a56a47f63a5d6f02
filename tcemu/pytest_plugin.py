"""The pytest plugin: the fixture `gpu` runs a test's Triton kernels by the emulation of a GPU.

The GPU comes from `@pytest.mark.parametrize("gpu", ["A100", "H100"], indirect=True)`, else from the option `--tcemu-gpu`, else from
`tcemu_gpu` in pytest's settings. Several GPUs run the test once for each. The assertions are in `tcemu.testing`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

SETTING = "tcemu_gpu"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option and the setting."""
    help_text = "GPU that the fixture `gpu` emulates, as H100; repeat it to run each test on several"
    parser.getgroup("tcemu").addoption("--tcemu-gpu", metavar="GPU", action="append", default=[], help=help_text)
    parser.addini(SETTING, "GPUs that the fixture `gpu` emulates, as H100", type="args", default=[])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test once for each GPU of the option or the setting, unless it names its own."""
    chosen = metafunc.config.getoption("tcemu_gpu") or metafunc.config.getini(SETTING)
    if "gpu" not in metafunc.fixturenames or not chosen or not _is_own_fixture(metafunc):
        return
    for mark in metafunc.definition.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        if "gpu" in ([name.strip() for name in names.split(",")] if isinstance(names, str) else names):
            return
    metafunc.parametrize("gpu", chosen, indirect=True)


def _is_own_fixture(metafunc: pytest.Metafunc) -> bool:
    """Return whether the test's fixture `gpu` is this plugin's, and not one of that name in a conftest.py or a test's module."""
    definitions = metafunc.definition._fixtureinfo.name2fixturedefs.get("gpu", ())  # pytest has no public name for it
    return bool(definitions) and definitions[-1].func.__module__ == __name__


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Run the test's Triton kernels by `tcemu.triton.emulated`.

    Yields:
        The launches so far; `target` is the GPU.
    """
    name = getattr(request, "param", None)
    if name is None:
        pytest.fail(
            f"the fixture `gpu` needs a GPU to emulate: --tcemu-gpu H100, {SETTING} = H100 in pytest's settings, or "
            '@pytest.mark.parametrize("gpu", ["H100"], indirect=True)',
            pytrace=False,
        )
    from tcemu.kernels.triton.emulation import emulated

    with emulated(name) as report:
        yield report
