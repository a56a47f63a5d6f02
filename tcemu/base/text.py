"""Text for terminals: wrapped lines, tables and readable signatures."""

import inspect
from collections.abc import Callable, Sequence
from textwrap import wrap

WIDTH = 118  # characters per line
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n\r"}


def escape_controls(text: str) -> str:
    """Replace characters that command a terminal by their escapes, such as those in a name that came from elsewhere.

    Args:
        text: Text to print.

    Returns:
        The text. Tabs and the ends of lines are kept.
    """
    return text.translate(CONTROLS)


def wrap_lines(text: str, indent: str = "", width: int = WIDTH) -> list[str]:
    """Wrap a text into lines. Runs of spaces inside a line are kept.

    Args:
        text: Text to wrap.
        indent: Prefix of every line but the first.
        width: Greatest length of a line, except that long words are not broken.
    """
    return [line.rstrip() for line in wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)]


def table_lines(heads: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Format a table as lines.

    Args:
        heads: Names of the columns.
        rows: One text per column.
        left: Indices of the left-aligned columns. The others are right-aligned.

    Returns:
        The lines, the first with the names of the columns.
    """
    table = [heads, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(heads))]
    pad = lambda i, cell: cell.ljust(widths[i]) if i in left else cell.rjust(widths[i])
    return ["  ".join(pad(i, cell) for i, cell in enumerate(row)).rstrip() for row in table]


# ---- signatures as `help()` shows them: one parameter per line if they are long, and annotations as written


SIGNATURE_WIDTH = 100  # greatest length of a signature on one line, in characters


class ReadableSignature(inspect.Signature):
    """A signature with a readable text."""

    def __str__(self) -> str:
        return self.format()

    def format(self, *, max_width: int | None = None, **_: object) -> str:
        """Format the signature.

        Args:
            max_width: Greatest length of one line, `SIGNATURE_WIDTH` by default. A longer signature has one parameter per line.
        """
        parts, star = [], False
        parameters = list(self.parameters.values())
        for number, parameter in enumerate(parameters):
            if parameter.kind is parameter.KEYWORD_ONLY and not star:
                parts.append("*")
            star = star or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
            parts.append(_parameter_text(parameter))
            after = parameters[number + 1].kind if number + 1 < len(parameters) else None
            if parameter.kind is parameter.POSITIONAL_ONLY and after is not parameter.POSITIONAL_ONLY:
                parts.append("/")
        result = "" if self.return_annotation is self.empty else f" -> {_annotation_text(self.return_annotation)}"
        line = f"({', '.join(parts)}){result}"
        if len(line) <= (SIGNATURE_WIDTH if max_width is None else max_width):
            return line
        return "(" + "".join(f"\n    {part}," for part in parts) + f"\n){result}"


def _parameter_text(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    kind = "" if parameter.annotation is parameter.empty else f": {_annotation_text(parameter.annotation)}"
    if parameter.default is parameter.empty:
        return f"{stars}{parameter.name}{kind}"
    return f"{parameter.name}{kind}{' = ' if kind else '='}{_default_text(parameter.default)}"


def _annotation_text(annotation: object) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _default_text(default: object) -> str:
    return getattr(default, "__name__", None) or repr(default)


def readable_signature(function: Callable) -> inspect.Signature:
    """Return the signature of a function with a readable text, for the function's `__signature__`."""
    signature = inspect.signature(function)
    return ReadableSignature(list(signature.parameters.values()), return_annotation=signature.return_annotation)
