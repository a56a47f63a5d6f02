"""Blocks of code in Markdown: what each runs, and the text that stands below it as what it prints."""

import contextlib
import io
import re
import shlex
from codeop import compile_command
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from tcemu.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
FENCE = re.compile(r"^(?:<!-- parsed only: (?P<why>[^\n]+) -->\n)?```(?P<language>\w+)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = "tcemu "


class Block(NamedTuple):
    """One block. shown: where the text that follows it begins and ends in the page; None if none does."""

    language: str
    code: str
    why_not: str  # it is only parsed, for that reason
    shown: tuple[int, int] | None

    @property
    def commands(self) -> list[str]:
        """The lines of tcemu's own command line."""
        return [line for line in self.code.splitlines() if self.language == "sh" and line.startswith(COMMAND)]

    @property
    def others(self) -> list[str]:
        """Lines of a shell that are not tcemu's."""
        return [line for line in self.code.splitlines() if self.language == "sh" and not line.startswith(COMMAND)]

    @property
    def runs(self) -> bool:
        """Whether it is run and printed: the demo is held by test_demo.py, and its times differ."""
        return not self.why_not and (self.language == "python" or self.commands not in ([], ["tcemu demo"]))


def blocks(text: str) -> list[Block]:
    """The blocks of a page but the texts, in order."""
    found = list(FENCE.finditer(text))
    followed = zip_longest(found, found[1:])
    return [
        Block(one["language"], one["code"], one["why"] or "", next_.span("code") if next_ and next_["language"] == "text" else None)
        for one, next_ in followed
        if one["language"] != "text"
    ]


def page_words(line: str) -> list[str]:
    """A line of the shell as the words of tcemu's command."""
    return shlex.split(line)[1:]


def run_page(page: list[Block], together: bool = True) -> Iterator[tuple[Block, str]]:
    """Runs what is run, in the current folder, and says what each block printed. together: the blocks of Python share their names."""
    names: dict = {}
    for block in (block for block in page if block.runs):
        with contextlib.redirect_stdout(io.StringIO()) as stream:
            if block.language == "python":
                exec(compile(block.code, "a page", "exec"), names if together else {})
            for line in block.commands:
                assert main(page_words(line)) == 0, line
        yield block, stream.getvalue()


def comparable(text: str) -> str:
    """The text without what differs between runs and machines: times, and plain float32, whose sums are XLA's own affair."""
    lines = [line for line in text.strip().splitlines() if not line.startswith(("plain float32", "D from plain float32"))]
    return re.sub(r"\b\d+(\.\d+)? (m?s)\b", r"# \2", re.sub(r" +", " ", "\n".join(line.rstrip() for line in lines)))


def shown_text(block: Block, text: str) -> str:
    """What the page says that the block prints."""
    return text[slice(*block.shown)] if block.shown else ""


def prompt_error(code: str) -> str:
    """What Python's interactive prompt says against a block that is pasted: it ends a loop at an empty line alone. "": nothing."""
    waiting: list[str] = []
    for line in [*code.splitlines(), ""]:
        waiting.append(line)
        try:
            if compile_command("\n".join(waiting), symbol="single") is not None:
                waiting.clear()
        except SyntaxError as error:
            return f"{error.msg} at {line!r}"
    return "it is not complete" if any(waiting) else ""
