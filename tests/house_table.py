"""Count what a reader of a checkout meets: files, lines, words of documents, public names, names of functions, first words of docstrings.

    python tests/house_table.py                     this checkout
    python tests/house_table.py BEFORE [AFTER]      two of them side by side; each is a folder or a commit
    python tests/house_table.py 88b79f6 HEAD        before and after the package was rebuilt on 2026-11-23

A commit is read from git. Nothing is imported, so a checkout of any age can be counted.
"""

import ast
import io
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PREPOSITIONS = {
    "after", "as", "at", "before", "between", "by", "for", "from", "in", "into", "of", "on", "over", "than", "to", "under", "with",
}  # fmt: skip
PARTICIPLES = {
    "asked", "drawn", "fitted", "given", "held", "kept", "known", "moved", "named", "placed", "said", "seen", "taken", "told",
    "wanted",
}  # fmt: skip
FRAGMENTS = {  # first words to avoid
    "For", "How", "In", "Its", "No", "None", "Of", "Only", "That", "Those", "What", "Where", "Whether", "Which", "Who", "Whose",
}  # fmt: skip
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "tests/README.md")


def read_checkout(checkout: str) -> dict[str, str]:
    """The text of the Python and Markdown files of a folder or a commit, by path."""
    if Path(checkout).is_dir():
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=checkout, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
        paths = [path for path in listed if path.endswith((".py", ".md")) and (Path(checkout) / path).is_file()]
        return {path: (Path(checkout) / path).read_text() for path in paths}
    packed = subprocess.run(["git", "archive", checkout], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode:
        raise SystemExit(f"{checkout} is neither a folder nor a commit of {ROOT}: {packed.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        members = [member for member in archive if member.isfile() and member.name.endswith((".py", ".md"))]
        return {member.name: io.TextIOWrapper(stream, "utf-8").read() for member in members if (stream := archive.extractfile(member))}


def count_importers(trees: Mapping[str, ast.Module]) -> Counter[str]:
    """How many modules of the package import each module."""
    modules = {path.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): path for path in trees}
    importers: Counter[str] = Counter(dict.fromkeys(modules, 0))
    for module, path in modules.items():
        named = set()
        for node in ast.walk(trees[path]):
            if isinstance(node, ast.ImportFrom) and node.module:
                members = (f"{node.module}.{alias.name}" for alias in node.names)
                named |= {member if member in modules else node.module for member in members}
            elif isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
        importers.update((named & modules.keys()) - {module})
    return importers


def count_public_names(tree: ast.Module) -> int:
    """The names and modules at the root: those that the root module imports for type checkers."""
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return sum(len(node.names) for block in blocks for node in ast.walk(block) if isinstance(node, ast.ImportFrom))


def list_first_words(words: Counter[str], chosen: Iterable[str]) -> str:
    """The chosen words that occur, the most frequent first, with their counts."""
    return ", ".join(f"{word} {words[word]}" for word in sorted(chosen, key=lambda word: (-words[word], word)) if words[word])


def count_checkout(files: Mapping[str, str]) -> dict[str, int | str]:
    """The rows of the table for one checkout: the name of each measure and its value."""
    trees = {path: ast.parse(text) for path, text in files.items() if path.startswith("tcemu/") and path.endswith(".py")}
    tests = [path for path in files if path.startswith("tests/") and path.endswith(".py")]
    pages = [path for path in files if path.startswith("docs/") and path.endswith(".md")]
    lines = lambda paths: sum(len(files[path].splitlines()) for path in paths)
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    names = [node.name.strip("_") for node in [*functions, *(node for node in nodes if isinstance(node, ast.ClassDef))]]
    documented = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module)]
    docstrings = [text for node in documented if (text := ast.get_docstring(node))]
    first = Counter(next(iter(re.findall(r"\w+", text)), "") for text in docstrings)
    file_names = Counter(path.rsplit("/", 1)[-1] for path in trees)
    importers = count_importers(trees)
    rows: dict[str, int | str] = {
        "package: files": len(trees),
        "package: lines": lines(trees),
        "package: modules with one importer or none": sum(count <= 1 for count in importers.values()),
        "package: file names used more than once": sum(count > 1 for name, count in file_names.items() if name != "__init__.py"),
        "tests: files": len(tests),
        "tests: lines": lines(tests),
        "public names at the root": count_public_names(trees["tcemu/__init__.py"]),
        "functions and classes": len(names),
        "names that end in a preposition": sum(name.split("_")[-1] in PREPOSITIONS for name in names),
        "names that are a bare participle": sum(name in PARTICIPLES for name in names),
        "functions named run, of, one, by, at, call or step": sum(
            node.name.strip("_") in {"run", "of", "one", "by", "at", "call", "step"} for node in functions
        ),
        "assert ... is not None": sum(isinstance(node, ast.Assert) and "is not None" in ast.unparse(node.test) for node in nodes),
        "docstrings": len(docstrings),
        "docstrings with Args, Returns or Raises": sum(bool(re.search(r"^\s*(Args|Returns|Raises):$", text, re.M)) for text in docstrings),
        "docstrings that begin with What, Of, Whether, ...": sum(first[word] for word in FRAGMENTS),
        "of these": list_first_words(first, FRAGMENTS),
        "most frequent first words": ", ".join(f"{word} {count}" for word, count in first.most_common(8)),
    }
    rows |= {f"words of {page}": len(files[page].split()) for page in PAGES if page in files}
    return rows | {"docs: pages": len(pages), "docs: words": sum(len(files[path].split()) for path in pages)}


def render_table(columns: Mapping[str, Mapping[str, int | str]]) -> str:
    """The rows of one or several checkouts as a Markdown table, a column for each checkout."""
    measures = list(dict.fromkeys(measure for rows in columns.values() for measure in rows))
    shown = lambda value: f"{value:,}" if isinstance(value, int) else value
    lines = [["", *columns], ["---"] * (len(columns) + 1)]
    lines += [[measure, *(shown(rows.get(measure, "")) for rows in columns.values())] for measure in measures]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(words: list[str]) -> int:
    if len(words) > 2 or any(word.startswith("-") for word in words):
        print(__doc__, file=sys.stderr)
        return 0 if words in (["-h"], ["--help"]) else 2
    checkouts = [words[0], words[1] if len(words) > 1 else str(ROOT)] if words else [str(ROOT)]
    labels = {checkout: "this checkout" if checkout == str(ROOT) else checkout for checkout in checkouts}
    print(render_table({labels[checkout]: count_checkout(read_checkout(checkout)) for checkout in checkouts}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
