"""The directive `package-files`: every module of the package with the first line of its docstring, by folder."""

import ast
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

PACKAGE = Path(__file__).resolve().parents[2] / "tcemu"


def setup(app: Any) -> dict[str, bool]:
    """Registers the directive with Sphinx."""
    app.add_directive("package-files", PackageFiles)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def summaries() -> dict[str, list[tuple[str, str]]]:
    """For each folder the names of its modules with the first lines of their docstrings."""
    folders: dict[str, list[tuple[str, str]]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        if text or path.name != "__init__.py":
            folder = path.parent.relative_to(PACKAGE.parent).as_posix()
            folders.setdefault(folder, []).append((path.name, " ".join(text.partition("\n\n")[0].split())))
    return folders


class PackageFiles(SphinxDirective):
    """A section with a table for each folder."""

    def run(self) -> list[nodes.Node]:
        return [self.section(folder, files) for folder, files in summaries().items()]

    def section(self, folder: str, files: list[tuple[str, str]]) -> nodes.section:
        """The section of one folder."""
        section = nodes.section(ids=[nodes.make_id(folder)], names=[folder])
        section += nodes.title("", "", nodes.literal("", f"{folder}/"))
        rows = [
            nodes.row(
                "",
                nodes.entry("", nodes.paragraph("", "", nodes.literal("", name))),
                nodes.entry("", nodes.paragraph("", "", *self.parse_inline(text.replace("*", r"\*").replace("|", r"\|"))[0])),
            )
            for name, text in files
        ]
        group = nodes.tgroup("", *(nodes.colspec(colwidth=width) for width in (1, 4)), cols=2)
        group += nodes.tbody("", *rows)
        section += nodes.container("", nodes.table("", group), classes=["table-wrapper"])
        self.state.document.note_implicit_target(section, section)
        return section
