"""What a release needs: the wheel's description and URLs, the changelog, the workflows, and a stranger's path from the wheel."""

import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from packaging.version import Version
from support import pages

import tcemu

ROOT = pages.ROOT
WORKFLOWS = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / ".github" / "workflows").glob("*.yml")}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ADDRESS = "https://example.org/somebody/tcemu"


@pytest.fixture(scope="module")
def metadata():
    """hatch_build.py: its names, without hatchling."""
    source = (ROOT / "hatch_build.py").read_text(encoding="utf-8")
    names = {"MetadataHookInterface": object}
    exec(
        compile(source.replace("from hatchling.metadata.plugin.interface import MetadataHookInterface", ""), "hatch_build.py", "exec"),
        names,
    )
    return SimpleNamespace(**names)


def test_the_description_of_the_wheel_has_no_dead_link(metadata):
    """Relative links of the README lead nowhere on an index: they become addresses, or words."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(metadata.RELATIVE_LINK.findall(readme)) > 20
    for address in ("", ADDRESS):
        text = metadata.portable_links(readme, address)
        assert metadata.RELATIVE_LINK.search(text) is None and [block.code for block in pages.blocks(text)] == [
            block.code for block in pages.blocks(readme)
        ]
        linked = [link.removeprefix(f"{ADDRESS}/").partition("/main/")[2].partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text)]
        assert len(linked) > 20 if address else linked == []
        assert all((ROOT / path).exists() for path in linked)
    kept = "[a](b.md) ```python\nkernel[grid](x)\n``` ![p](q.svg) [w](https://example.org/)"
    assert metadata.portable_links(kept, "") == "a ```python\nkernel[grid](x)\n```  [w](https://example.org/)"


def test_urls_are_those_of_the_repository_that_builds(metadata, monkeypatch):
    monkeypatch.setenv("TCEMU_REPOSITORY", f"{ADDRESS}/")
    urls = metadata.project_urls(metadata.repository_address())
    assert urls["Repository"] == ADDRESS and all(url.startswith(ADDRESS) for url in urls.values()) and len(urls) == 4
    monkeypatch.delenv("TCEMU_REPOSITORY")
    assert metadata.project_urls(metadata.repository_address()) == {}
    assert {"readme", "urls"} <= set(PROJECT["dynamic"])


def test_the_changelog_begins_with_this_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (\S+)$", text, re.MULTILINE)
    assert versions[0] == tcemu.__version__ and versions == sorted(versions, key=Version, reverse=True)
    assert "a changed result bit is a major change" in text


def test_the_tests_run_on_what_the_classifiers_name():
    matrix = WORKFLOWS["tests.yml"]
    pythons = re.findall(r'"(3\.\d+)"', re.search(r"^ +python: \[(.*)\]$", matrix, re.MULTILINE)[1])
    assert pythons == [name.rsplit(" ")[-1] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)]
    for system, classifier in {
        "ubuntu-latest": "Linux",
        "ubuntu-24.04-arm": "Linux",
        "macos-latest": "MacOS",
        "windows-latest": "Windows",
    }.items():
        assert system in matrix and any(name.endswith(classifier) for name in PROJECT["classifiers"])
    assert PROJECT["requires-python"] == f">={pythons[0]}"


def test_workflows_have_least_rights_and_name_no_registry():
    assert {"docs.yml", "tests.yml", "release.yml"} <= WORKFLOWS.keys()
    for name, text in WORKFLOWS.items():
        assert re.search(r"^permissions:\n  contents: read$", text, re.MULTILINE), name
        assert "password" not in text.replace("no password exists", "") and "://" not in text, name
    release = WORKFLOWS["release.yml"]
    assert release.count("id-token: write") == 1 and 'tags: ["v*"]' in release
    scripts = {path for text in WORKFLOWS.values() for path in re.findall(r"python ((?:tests|docs)/\S+\.py)", text)}
    assert scripts and [path for path in scripts if not (ROOT / path).exists()] == []


@pytest.mark.full
@pytest.mark.parametrize("options", [(), ("--empty",)], ids=["these dependencies", "an empty environment"])
def test_a_stranger_s_path_from_the_wheel(options):
    for package in ("build", "twine", "hatchling"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed (pip install -e '.[release]')")
    done = subprocess.run([sys.executable, ROOT / "tests" / "wheel_path.py", *options], capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "files unchanged" in done.stdout


def test_versions_for_a_bug_report(capsys):
    assert tcemu.show_versions() is None
    lines = capsys.readouterr().out.splitlines()
    found = {line[:18].strip(): line[19:] for line in lines}
    assert found["tcemu"] == tcemu.__version__ and {"python", "system", "jax", "llvmlite", "devices", "kernels for CPUs"} <= found.keys()
    assert not any(str(ROOT) in line for line in lines if not line.startswith(("JAX_", "XLA_", "TCEMU_")))
