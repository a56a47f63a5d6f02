"""Every Python block and every `tcemu` line of the README is run, and what follows it as text is what it prints."""

import re
import shlex
from pathlib import Path

import pytest

from tcemu.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
DEMO = "tcemu demo"  # its text is held by test_demo.py


def comparable(text: str) -> str:
    """The text without what differs between runs and machines: times, and plain float32, whose sums are XLA's own affair."""
    lines = [line for line in text.strip().splitlines() if not line.startswith(("plain float32", "D from plain float32"))]
    return re.sub(r"\b\d+(\.\d+)? (m?s)\b", r"# \2", re.sub(r" +", " ", "\n".join(line.rstrip() for line in lines)))


def follower(index: int) -> str:
    """The text block after this one, or nothing."""
    return BLOCKS[index + 1][1] if BLOCKS[index + 1][0] == "text" else ""


def test_what_the_readme_runs_prints_what_it_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    ran = []
    for index, (language, text) in enumerate(BLOCKS):
        commands = [line for line in text.splitlines() if language == "sh" and line.startswith("tcemu ")]
        if language == "python":
            exec(compile(text, "README.md", "exec"), names)
        for line in commands:
            assert main(shlex.split(line)[1:]) == 0
        if language == "python" or commands:
            ran.append(language)
            assert comparable(capsys.readouterr().out) == comparable(follower(index)), text
    assert ran.count("python") == README.count("```python") >= 4
    assert ran.count("sh") == len(re.findall(r"^```sh\ntcemu ", README, re.MULTILINE)) >= 2


def test_every_shell_line_is_of_a_kind_that_is_run():
    """By this file, by the CI script, or (the demo) by test_demo.py."""
    lines = [line for language, text in BLOCKS if language == "sh" for line in text.splitlines()]
    assert [line for line in lines if not line.startswith("tcemu ")] == [
        "python3 -m venv .venv && .venv/bin/pip install . && .venv/bin/tcemu demo",
        "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/pytest -n 2 --dist loadfile",
        ".venv/bin/pip install -e '.[dev]' && .venv/bin/ruff check && .venv/bin/ruff format --check && "
        ".venv/bin/pyright --pythonpath .venv/bin/python",
    ]


def test_files_that_the_readme_names_are_there():
    named = {name for name in re.findall(r"`([\w.]+/[\w./]+)`", README) if not name.startswith(("..", ".venv"))}
    assert {"tests/golden", "notebooks/main_job.ipynb", ".ci/run"} <= named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize(
    ("text", "other", "same"), [("9.1 s  x", "12 s x", True), ("9.1 ms", "9.1 s", False), ("0.1 ulps", "0.2 ulps", False)]
)
def test_only_times_are_forgiven(text, other, same):
    assert (comparable(text) == comparable(other)) == same
