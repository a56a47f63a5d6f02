"""Text for terminals: wrapped lines and tables."""

from collections.abc import Sequence
from textwrap import wrap

WIDTH = 118


def wrapped(text: str, indent: str = "", width: int = WIDTH) -> list[str]:
    """Words in lines, all but the first indented; columns of spaces stay as they are."""
    return [line.rstrip() for line in wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)]


def columns(heads: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """A table as lines, right-aligned but for the columns `left`."""
    table = [heads, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(heads))]
    pad = lambda i, cell: cell.ljust(widths[i]) if i in left else cell.rjust(widths[i])  # noqa: E731
    return ["  ".join(pad(i, cell) for i, cell in enumerate(row)).rstrip() for row in table]
