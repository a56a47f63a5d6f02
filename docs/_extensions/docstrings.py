"""Docstrings as reStructuredText: Google sections become fields, and the fields of a class get the comments of its source.

Napoleon converts the sections (Args, Returns, Raises, Yields, Source, Gradients). Stars, bars and trailing underscores are text, not
markup, so they
are escaped first. In a docstring without sections, a line that begins with names of arguments ("a, b: ...") becomes a point of a list.
"""

import inspect
import re
from collections.abc import Iterator
from textwrap import dedent
from typing import Any

from sphinx.ext.napoleon import Config, GoogleDocstring

OPENS = re.compile(r"(Returns|Raises|Gradients|Yields|Source)\b|\*\*[A-Z]\w+:\*\*")
FIELD = re.compile(r"^    (\w+): [^#=\n]+?(?: = ([^#\n]+?))?  # (.+)$", re.MULTILINE)
FURTHER = re.compile(r"(?<=[;.] )\w+(?:, \w+)*(?=: )")
NAMES = re.compile(r"(\w+(?:, \w+)*)(?: \([^)]*\))?: ")
SECTION = re.compile(r"^\s*(Args|Returns|Raises|Yields|Attributes|Source|Gradients):\s*$", re.MULTILINE)
NAPOLEON = Config(napoleon_custom_sections=["Source", "Gradients"], napoleon_use_rtype=False)
CODE = re.compile(r"(`[^`]*`|\*\*[A-Z]\w+:\*\*)")


def setup(app: Any) -> dict[str, bool]:
    """What Sphinx calls."""
    app.connect("autodoc-process-docstring", process)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Replaces the lines of one docstring."""
    if what == "module":
        lines[:] = [escaped(line) for line in lines]
        return
    text = dedent("\n".join(lines))
    if SECTION.search(text):
        source = [escaped(line) for line in re.sub(r"^(Source|Gradients): (?=\S)", r"\1:\n    ", text, flags=re.MULTILINE).splitlines()]
        converted = GoogleDocstring(source, NAPOLEON, app, what, name, obj, options).lines()
    else:
        converted = list(marked(text.splitlines(), arguments(obj)))
    lines[:] = [*converted, *(fields(obj) if what == "class" else ())]


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
