"""The documents list what there is: every file of the package, every test file, every helper, and what the usual run samples."""

import re
import subprocess
from pathlib import Path

import pytest
from support import golden, sampling
from support.sampling import Share, misfits
from times import renewed, seconds

TESTS = Path(__file__).parent
README = sampling.README.read_text()
TABLE = {"test_a.py::test_one": Share(1, 3), "test_a.py::test_two": Share(0, 1), "test_b.py::test_three": Share(2, 4)}


def files_of(chapter: str) -> set[str]:
    """The files that the points of a list name. A name without folder lies in the folder that the point named last."""
    files = set()
    for point in re.findall(r"^- .*(?:\n  .*)*", chapter, re.MULTILINE):
        folder = ""
        for name in re.findall(r"`([\w/]+(?:\.py|/))`", point):
            folder, name = (name[: name.rindex("/") + 1], name[name.rindex("/") + 1 :]) if "/" in name else (folder, name)
            files |= {folder + name} if name else set()
    return files


def test_every_file_of_the_package_has_its_place_in_the_architecture():
    chapter = (TESTS.parent / "ARCHITECTURE.md").read_text().partition("\n## The floors\n")[2].partition("\n## ")[0]
    package = TESTS.parent / "tcemu"
    whole = ("commands", "data")  # folders of which one line speaks
    files = {path.relative_to(package) for path in package.rglob("*.py") if path.name != "__init__.py"}
    named = {name for name in files_of(chapter) if not name.startswith(whole)}
    assert named == {path.as_posix() for path in files if path.parts[0] not in whole}


def test_a_name_without_folder_lies_in_the_last_one():
    text = "- `a/b.py`: `Model`, `c.py`\n- `d.py` and\n  `e/`: `f.py`\n"
    assert files_of(text) == {"a/b.py", "a/c.py", "d.py", "e/f.py"}


def first_cells(heading: str) -> list[str]:
    """The file names that stand first in the rows of a chapter's table."""
    chapter = README.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(\w+\.py)` \|", chapter, re.MULTILINE)


def test_every_test_file_has_its_row():
    assert first_cells("What each file proves") == sorted(path.name for path in TESTS.glob("test_*.py"))


def test_every_helper_has_its_row():
    assert first_cells("Helpers") == sorted(path.name for path in (TESTS / "support").glob("*.py") if path.name != "__init__.py")


def test_no_file_has_a_mark_of_a_merge():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=TESTS.parent, capture_output=True, check=False)
    files = listed.stdout.decode().split("\0")[:-1] if listed.returncode == 0 else ["CHANGELOG.md", "README.md"]
    marks = re.compile(rb"^(<<<<<<< |>>>>>>> |=======$)", re.MULTILINE)
    assert [name for name in files if (TESTS.parent / name).is_file() and marks.search((TESTS.parent / name).read_bytes())] == []


def test_no_test_file_imports_another():
    pattern = re.compile(r"^\s*(?:from|import) (test_\w+)", re.MULTILINE)
    found = {path.name: pattern.findall(path.read_text()) for path in TESTS.glob("**/*.py")}
    itself = lambda name, modules: {f"{module}.py" for module in modules} <= {name}  # noqa: E731  a program with devices of its own starts so
    assert {name: modules for name, modules in found.items() if not itself(name, modules)} == {}


# ---- what the usual run samples


def test_the_table_of_samples_fits_the_tests(request):
    """For the files that this session has collected whole. If it fails: python tests/sampled.py."""
    config = request.config
    if config.getoption("lf", False):
        pytest.skip("--lf collects parts of files")
    items = config.stash[sampling.COLLECTED]
    partly = {Path(words.partition("::")[0]).name for words in config.args if "::" in words}
    recordings = {"golden", "recorded", "replay"}
    more = golden.root() != golden.SAMPLE  # the table counts the cases that ship
    by_name = {item.path.name for item in items if more and recordings & vars(item.module).keys()}
    files = {item.path.name for item in items} - partly
    assert misfits(sampling.read(README), sampling.shares(items), files, by_name) == []


def test_the_table_is_read_as_it_is_written():
    assert sampling.read(sampling.table(TABLE)) == TABLE


@pytest.mark.parametrize(
    ("said", "counted", "wrong"),
    [
        (TABLE, TABLE, 0),
        (TABLE, TABLE | {"test_a.py::test_one": Share(2, 3)}, 1),  # another share
        (TABLE, TABLE | {"test_a.py::test_new": Share(0, 5)}, 1),  # a test that the table lacks
        (TABLE | {"test_a.py::test_gone": Share(0, 5)}, TABLE, 1),  # one that is gone, or runs whole now
        (TABLE, TABLE | {"test_c.py::test_one": Share(0, 5)}, 0),  # in a file that was not collected
        (TABLE, TABLE | {"test_b.py::test_three": Share(4, 9)}, 0),  # more recordings are at hand
        (TABLE, TABLE | {"test_b.py::test_new": Share(4, 9)}, 1),  # but a test is new
    ],
)
def test_a_table_that_does_not_fit_is_seen(said, counted, wrong):
    assert len(misfits(said, counted, {"test_a.py", "test_b.py"}, {"test_b.py"})) == wrong


# ---- how long files take


def test_times_of_a_report_go_into_their_column():
    case = '<testcase classname="tests.test_{}" time="{}">{}</testcase>'
    cases = case.format("a", 1.25, "") + case.format("a", 2.5, "") + case.format("b", 9, "<skipped/>")
    times = seconds(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert times == {"test_a.py": 3.75}
    text = "| `test_a.py` | x | y | - | 7 |\n| `test_b.py` | x | y | 5 | - |\n"
    assert renewed(text, times, "usual") == "| `test_a.py` | x | y | 4 | 7 |\n| `test_b.py` | x | y | 5 | - |\n"
    assert renewed(text, times, "full") == "| `test_a.py` | x | y | - | 4 |\n| `test_b.py` | x | y | 5 | - |\n"
