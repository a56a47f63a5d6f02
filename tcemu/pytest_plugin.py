"""The pytest plugin within the package, for `-p tcemu.pytest_plugin`. It is `tcemu_pytest`, so that pytest itself imports no tcemu."""

from tcemu_pytest import gpu, pytest_addoption, pytest_generate_tests

__all__ = ["gpu", "pytest_addoption", "pytest_generate_tests"]
