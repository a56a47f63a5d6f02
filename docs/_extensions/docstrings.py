"""Docstrings as reStructuredText: Google sections become fields, and the fields of a class get the comments of its source.

Napoleon converts the sections (Args, Returns, Raises, Yields, Source, Gradients, Example). Stars, bars and trailing underscores are text,
not markup, so they are escaped first, except in the lines of an example. In a docstring without sections, a line that begins with names of
arguments ("a, b: ...") becomes a point of a list.
"""

import inspect
import re
from collections.abc import Iterator
from functools import reduce
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from typing import Any

from sphinx.ext.napoleon import Config, GoogleDocstring

from tcemu.base.text import readable_signature

ROOT = Path(__file__).resolve().parents[2]

OPENS = re.compile(r"(Returns|Raises|Gradients|Yields|Source)\b|\*\*[A-Z]\w+:\*\*")
FIELD = re.compile(r"^    (\w+): [^#=\n]+?(?: = ([^#\n]+?))?  # (.+)$", re.MULTILINE)
FURTHER = re.compile(r"(?<=[;.] )\w+(?:, \w+)*(?=: )")
NAMES = re.compile(r"(\w+(?:, \w+)*)(?: \([^)]*\))?: ")
SECTION = re.compile(r"^\s*(Args|Returns|Raises|Yields|Attributes|Source|Gradients|Example):\s*$", re.MULTILINE)
NAPOLEON = Config(napoleon_custom_sections=["Source", "Gradients"], napoleon_use_rtype=False)
CODE = re.compile(r"(`[^`]*`|\*\*[A-Z]\w+:\*\*)")


def setup(app: Any) -> dict[str, bool]:
    """What Sphinx calls."""
    app.connect("autodoc-process-docstring", process)
    app.connect("autodoc-process-signature", typed_signature)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Replaces the lines of one docstring."""
    if what == "module":
        lines[:] = [escaped(line) for line in lines]
        return
    text = dedent("\n".join(lines))
    if SECTION.search(text):
        sections = re.sub(r"^(Source|Gradients): (?=\S)", r"\1:\n    ", text, flags=re.MULTILINE).splitlines()
        source = [line if line.lstrip().startswith((">>> ", "... ")) else escaped(line) for line in sections]
        converted = GoogleDocstring(source, NAPOLEON, app, what, name, obj, options).lines()
    else:
        converted = list(marked(text.splitlines(), arguments(obj)))
    lines[:] = [*converted, *(fields(obj) if what == "class" else ())]


def typed_signature(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str, str | None] | None:
    """Returns a function's parameters and its result with the names of types as they are written, not as what they stand for."""
    if not inspect.isfunction(obj):
        return None
    shown = readable_signature(obj)
    if what == "method":
        shown = shown.replace(parameters=[one for one in shown.parameters.values() if one.name != "self"])
    result = shown.return_annotation
    text = shown.replace(return_annotation=shown.empty).format(max_width=10**6)
    return text, None if result is shown.empty else (result if isinstance(result, str) else inspect.formatannotation(result))


def source_address(repository: str, module: str, name: str) -> str | None:
    """Returns where a public name is defined in a repository, as the address of its lines; None for what has no source."""
    try:
        obj = reduce(getattr, name.split("."), import_module(module))
        obj = inspect.unwrap(obj.fget if isinstance(obj, property) else obj)
        lines, first = inspect.getsourcelines(obj)
        path = Path(inspect.getsourcefile(obj) or "").resolve().relative_to(ROOT)
    except (AttributeError, ImportError, OSError, TypeError, ValueError):
        return None
    return f"{repository}/blob/main/{path.as_posix()}#L{first}-L{first + len(lines) - 1}"


def arguments(obj: Any) -> set[str]:
    """The names of the arguments of a function or a class."""
    try:
        return set(inspect.signature(obj).parameters)
    except (TypeError, ValueError):
        return set()


def fields(of: type) -> Iterator[str]:
    """The fields of a class, with the comments that its source has beside them."""
    if not (hasattr(of, "__dataclass_fields__") or hasattr(of, "_fields")):
        return
    found = FIELD.findall(inspect.getsource(of).partition("    def ")[0])
    for name, default, said in found:
        yield f"- **{name}**{f' (`{default}`)' if default else ''}: {escaped(said)}"
    yield ""


def skip(app: Any, what: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    """The fields of a named tuple say of themselves only which number they have."""
    return True if (inspect.getdoc(obj) or "").startswith("Alias for field number") else None


def marked(lines: list[str], names: set[str]) -> Iterator[str]:
    """The lines as paragraphs, each argument in a point of a list."""
    in_point = False
    for line in map(str.strip, lines):
        found = NAMES.match(line)
        if found and set(found[1].split(", ")) <= names:
            if not in_point:
                yield ""
            head, text = line.split(": ", 1)
            labels = re.sub(r"\w+", r"**\g<0>**", found[1]) + escaped(head[len(found[1]) :])
            yield f"- {labels}: {named(escaped(text), names)}"
            in_point = True
        elif not line or OPENS.match(line):
            yield ""
            in_point = False
            if line:
                yield escaped(line)
        else:
            yield f"  {named(escaped(line), names)}" if in_point else escaped(line)
    yield ""


def named(line: str, names: set[str]) -> str:
    """The line with the names of further arguments marked too: "...; b: [..., K, N]. left, right: ..."."""
    return FURTHER.sub(lambda found: re.sub(r"\w+", r"**\g<0>**", found[0]) if set(found[0].split(", ")) <= names else found[0], line)


def escaped(line: str) -> str:
    """The line without markup but single backticks, which are code, and headings as "**Source:**"."""
    parts = CODE.split(line)
    parts[::2] = [re.sub(r"(?<=\w)_(?!\w)", r"\\_", re.sub(r"[*|@\\]", r"\\\g<0>", part)) for part in parts[::2]]
    return "".join(parts)
