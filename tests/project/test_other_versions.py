"""The rotation of Pythons and releases of JAX: its rows are within the bounds of pyproject.toml, and cover them."""

import re
import tomllib

import other_versions
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from support import pages

PROJECT = tomllib.loads((pages.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_oldest_environment_has_the_lower_bounds():
    bounds = other_versions.oldest_of_the_project()
    assert other_versions.OLDEST.keys() == bounds.keys()
    assert {package: Version(pin) for package, pin in other_versions.OLDEST.items()} == {p: Version(b) for p, b in bounds.items()}


def test_the_rows_cover_the_pythons_and_stay_within_the_bounds_of_jax():
    pythons = [name.rsplit(" ")[-1] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)]
    assert {version for version, _ in other_versions.ENVIRONMENTS} == set(pythons)
    bound = SpecifierSet(next(line for line in PROJECT["dependencies"] if line.startswith("jax>")).removeprefix("jax"))
    tried = [pins["jax"] for _, pins in other_versions.ENVIRONMENTS if pins]
    assert len(set(tried)) == len(tried) >= 6 and all(bound.contains(release) for release in tried)


def test_a_missing_python_is_said(monkeypatch, capsys):
    monkeypatch.setattr(other_versions, "find_python", lambda version: None)
    assert other_versions.main(["3"]) == 0
    assert capsys.readouterr().out == "Python 3.14 with the newest of everything: not tried, there is no Python 3.14 here\n"


def test_a_program_that_is_another_python_is_not_taken(tmp_path, monkeypatch):
    program = tmp_path / "python3.9"
    program.write_text("#!/bin/sh\necho 3.8\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert other_versions.find_python("3.9") is None
