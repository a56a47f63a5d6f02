"""The pytest plugin beside a suite that has nothing to do with tcemu: it imports pytest alone, and adds one module."""

import os
import subprocess
import sys
import tomllib
from importlib import import_module

from support import pages

SUITE = """
import sys


def test_nothing_of_ours_is_loaded():
    loaded = {name.partition(".")[0] for name in sys.modules}
    assert loaded & {"jax", "jaxlib", "numpy", "ml_dtypes", "tcemu", "llvmlite", "triton", "torch"} == set()
    assert "tcemu_pytest" in loaded
"""
MODULES = """
import sys
before = set(sys.modules)
import pytest
between = set(sys.modules)
import tcemu_pytest
print(len(between - before) > 50, sorted(set(sys.modules) - between))
"""


def run(*words: str, **options) -> str:
    environment = os.environ | {"PYTHONPATH": str(pages.ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, encoding="utf-8", check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_unrelated_suite_loads_no_library(tmp_path):
    (tmp_path / "test_it.py").write_text(SUITE, encoding="utf-8")
    assert "1 passed" in run("-m", "pytest", "-p", "tcemu_pytest", "-p", "no:cacheprovider", "-q", str(tmp_path), cwd=tmp_path)
    assert run("-c", MODULES) == "True ['tcemu_pytest']\n"


def test_the_entry_point_is_the_plugin():
    entry = tomllib.loads((pages.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]["pytest11"]
    assert entry == {"tcemu_pytest": "tcemu_pytest"}
    assert {"gpu", "pytest_addoption", "pytest_generate_tests"} <= vars(import_module(entry["tcemu_pytest"])).keys()
