"""The tree of tests: unique names, no imports between test files, shares of the full run, times per file; no file has a mark of a merge."""

import ast
import re
import subprocess
from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from file_times import read_report, saved_seconds
from house_table import count_checkout, read_checkout, render_table
from support import sampling
from support.sampling import count_shares, in_share, sample_cases

TESTS = Path(__file__).parents[1]
FILES = sorted(TESTS.glob("**/test_*.py"))
PACKAGES = {"support", "oracles", "ptx_kernels"}  # what tests import by name; a folder of tests is no package


def test_names_are_unique_and_folders_are_no_packages():
    """pytest imports a test file by its name alone. A folder named torch would hide that torch is missing."""
    assert [name for name, count in Counter(path.name for path in FILES).items() if count > 1] == []
    assert {path.parent.name for path in TESTS.glob("*/__init__.py")} == PACKAGES
    assert not {"torch", "triton", "jax", "flax"} & {path.parent.name for path in FILES}
    assert list(TESTS.glob("test_*.py")) == []


def test_folders_mirror_the_package():
    # independent implementations, the repository, other CPUs; in wings: proofs, faces of packages, a corpus, tcemu.testing with the plugin
    own = {
        "oracles",
        "project",
        "portability",
        "engine/proofs",
        "faces/pytorch",
        "kernels/triton_kernels",
        "kernels/cute_dsl",
        "kernels/xla_programs",
        "kernels/corpus",
        "faces/testing",
    }
    package = {path.parent.relative_to(TESTS.parent / "tcemu").as_posix() for path in (TESTS.parent / "tcemu").glob("**/__init__.py")}
    assert {path.parent.relative_to(TESTS).as_posix() for path in FILES} - own <= package


def test_no_file_has_a_mark_of_a_merge():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=TESTS.parent, capture_output=True, check=False)
    files = listed.stdout.decode().split("\0")[:-1] if listed.returncode == 0 else ["CHANGELOG.md", "README.md"]
    marks = re.compile(rb"^(<<<<<<< |>>>>>>> |=======$)", re.MULTILINE)
    assert [name for name in files if (TESTS.parent / name).is_file() and marks.search((TESTS.parent / name).read_bytes())] == []


def test_no_test_file_imports_another():
    pattern = re.compile(r"^\s*(?:from|import) (test_\w+)", re.MULTILINE)
    found = {path.name: pattern.findall(path.read_text()) for path in TESTS.glob("**/*.py")}
    itself = lambda name, modules: {f"{module}.py" for module in modules} <= {name}  # a program with devices of its own starts so
    assert {name: modules for name, modules in found.items() if not itself(name, modules)} == {}


PLANTED = {
    "test_floors.py",
    "test_test_tree.py",
    "test_reference_imports.py",
    "test_process.py",
    "test_notebooks.py",
}  # their imports are wrong on purpose


def missing_imports(source: str) -> list[str]:
    """Names that a program within a string of this source imports from tcemu, where there is no such name. Renaming tools miss them."""
    programs = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    imports = [match for text in programs for match in re.findall(r"^\s*from (tcemu[\w.]*) import ([\w, ]+)$", text, re.MULTILINE)]
    names = [(module, name.split(" as ")[0].strip()) for module, names in imports for name in names.split(",")]
    return [f"{module}.{name}" for module, name in names if not exists(module, name)]


def exists(module: str, name: str) -> bool:
    try:
        return hasattr(import_module(module), name) or find_spec(f"{module}.{name}") is not None
    except ModuleNotFoundError:  # the module, or the package that the name would be a module of
        return False


def test_programs_in_strings_import_what_exists():
    """A program that a child process runs fails where only `-m full` sees it."""
    files = [path for path in TESTS.glob("**/*.py") if path.name not in PLANTED and "torch" not in str(path.relative_to(TESTS))]
    assert {path.name: names for path in files if (names := missing_imports(path.read_text()))} == {}
    planted = 'A = """\nimport x\nfrom tcemu.base.files import lock_folder, locked\n"""\nB = "from tcemu import gemm, ptx"\n'
    assert missing_imports(planted) == ["tcemu.base.files.locked"]


# ---- samples and shares


def test_a_sample_marks_the_rest_or_leaves_it_out(monkeypatch):
    monkeypatch.setattr(sampling, "USUAL_ALONE", False)
    every = sample_cases("abcdef", 3)
    assert [(case.values[0], bool(case.marks)) for case in every] == [(c, c not in "ad") for c in "abcdef"]
    assert [bool(case.marks) for case in sample_cases("abc", ["b"])] == [True, False, True]
    with pytest.raises(ValueError, match="'x'"):
        sample_cases("abc", ["x"])
    monkeypatch.setattr(sampling, "USUAL_ALONE", True)
    assert [case.values[0] for case in sample_cases("abcdef", 3)] == ["a", "d"]
    assert [(case.values[0], bool(case.marks)) for case in sample_cases("ab", [])] == [("a", True)]


def test_the_shares_of_the_full_run_are_all_of_it():
    names = [f"tests/engine/isa/test_a.py::test_b[{number}]" for number in range(1000)]
    counts = [sum(in_share(name, f"{index}/7") for name in names) for index in range(7)]
    assert sum(counts) == 1000 and min(counts) > 100
    for wrong in ("7/7", "-1/7", "1", "a/b"):
        with pytest.raises(ValueError, match="--share"):
            in_share(names[0], wrong)


def test_samples_are_counted():
    item = lambda name, full: SimpleNamespace(
        path=Path("tests/test_a.py"), name=f"{name}[x]", originalname=name, get_closest_marker=lambda mark: full or None
    )
    assert count_shares([item("test_b", False), item("test_b", True), item("test_c", False)]) == {"test_a.py::test_b": (1, 2)}


# ---- times


def test_times_of_a_report_are_summed_by_file():
    case = '<testcase classname="tests.isa.test_{}" time="{}">{}</testcase>'
    cases = case.format("a", 1.25, "") + case.format("a", 2.5, "") + case.format("b", 9, "<skipped/>")
    assert read_report(f"<testsuites><testsuite>{cases}</testsuite></testsuites>") == {"test_a.py": 3.75}


def test_saved_times_are_of_files_that_exist():
    assert set(saved_seconds()) <= {path.name for path in FILES}


# ---- the table of the house


def test_a_checkout_is_counted():
    files = {
        "tcemu/__init__.py": "if TYPE_CHECKING:\n    from tcemu.a import f, g\n    from tcemu import b\n",
        "tcemu/a.py": '"""What is here."""\ndef _sides_of():\n    """Return x.\n\n    Args:\n        x: It.\n    """\n'
        "    assert x is not None\n",
        "tcemu/p/a.py": "from tcemu.a import f\nclass asked:\n    def run(self): ...\n",
        "tests/test_a.py": "x\ny\n",
        "docs/a.md": "one two three",
        "README.md": "one two",
    }
    rows = count_checkout(files)
    counts = {
        "package: files": 3, "package: lines": 14, "package: modules with one importer or none": 2,
        "package: file names used more than once": 1, "tests: files": 1, "tests: lines": 2, "public names at the root": 3,
        "functions and classes": 3, "names that end in a preposition": 1, "names that are a bare participle": 1,
        "functions named run, of, one, by, at, call or step": 1, "assert ... is not None": 1, "docstrings": 2,
        "docstrings with Args, Returns or Raises": 1, "docstrings that begin with What, Of, Whether, ...": 1, "of these": "What 1",
        "words of README.md": 2, "docs: pages": 1, "docs: words": 3,
    }  # fmt: skip
    assert {measure: rows[measure] for measure in counts} == counts
    table = render_table({"a": rows, "b": {**rows, "docs: words": 1234}})
    assert "| docs: words | 3 | 1,234 |" in table.splitlines()


@pytest.mark.full
def test_this_checkout_can_be_counted():
    rows = count_checkout({path: text for path, text in read_checkout(str(TESTS.parent)).items() if not path.startswith("tests/golden")})
    assert int(rows["public names at the root"]) > 40 and int(rows["names that end in a preposition"]) < 10
    with pytest.raises(SystemExit, match="neither a folder nor a commit"):
        read_checkout("no-such-commit")
