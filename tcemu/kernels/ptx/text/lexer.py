"""PTX text as tokens, and errors with the position in the text."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple, TypeVar

from tcemu.base.errors import PtxError
from tcemu.kernels.ptx.text.module import Position

NAME, DIRECTIVE, NUMBER, STRING, END = "a name", "a directive", "a number", "a string", "the end of the text"

_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r\n\v\f]+|//[^\n]*|/\*[\s\S]*?\*/)
    |(?P<number>(?:\d+\.\d*|\.\d+(?![\w$.:])|\d+)(?:[eE][+-]?\d+)?[\w$]*)
    |(?P<name>(?:[A-Za-z][\w$]*|[$%][\w$]+|_[\w$]*)(?:\.[\w$]+(?:::[\w$]+)*)*)
    |(?P<directive>\.[A-Za-z0-9_$]+(?:::[\w$]+)*)
    |(?P<string>"(?:[^"\\\n]|\\.)*")
    |(?P<open>/\*|")
    |(?P<mark><<|>>|<=|>=|==|!=|&&|\|\||[-{}\[\]()<>,;:+*/%&|^~!?=@])""",
    re.VERBOSE | re.ASCII,
)
_KINDS = {"number": NUMBER, "name": NAME, "directive": DIRECTIVE, "string": STRING}
_LINE_WIDTH = 120  # characters of a long line in an error
_TOKEN_LIMIT, _MESSAGE_LIMIT = 60, 500  # characters of a token, and of the description, in an error

Item = TypeVar("Item")


class Token(NamedTuple):
    """A token of the text."""

    kind: str  # NAME (also an opcode with its dots), DIRECTIVE, NUMBER, STRING, END, or the mark itself, as ";"
    text: str
    offset: int


class Tokens:
    """The tokens of a text, and a cursor.

    Raises:
        PtxError: The text has a character that PTX does not have, or a comment or string without an end.
    """

    def __init__(self, text: str) -> None:
        self.text, self.index = text, 0
        self._lines = [0, *(found.end() for found in re.finditer("\n", text))]
        self.tokens = self._tokenise()

    def _tokenise(self) -> list[Token]:
        tokens, at, match = [], 0, _TOKEN.match
        while at < len(self.text):
            found = match(self.text, at)
            if found is None:
                raise self.located_error(at, f"{self.text[at]!r} is not a character of PTX", found=self.text[at])
            kind = found.lastgroup or ""
            if kind == "open":
                what = "comment" if found[0] == "/*" else "string"
                raise self.located_error(at, f"this {what} has no end", found=found[0], expected="*/" if what == "comment" else '"')
            if kind != "skip":
                tokens.append(Token(_KINDS.get(kind, found[0]), found[0], at))
            at = found.end()
        return [*tokens, Token(END, "", len(self.text))]

    @cached_property
    def files(self) -> dict[str, str]:
        """The names of source files by their numbers in `.file`, which may follow their use."""
        following = zip(self.tokens, self.tokens[1:], self.tokens[2:], strict=False)
        return {number.text: name.text[1:-1] for word, number, name in following if word.text == ".file" and name.kind == STRING}

    @property
    def token(self) -> Token:
        """The next token."""
        return self.tokens[self.index]

    def peek(self, count: int = 1) -> Token:
        """Return the token `count` after the next one."""
        return self.tokens[min(self.index + count, len(self.tokens) - 1)]

    def take(self) -> Token:
        """Return the next token, and advance."""
        token = self.tokens[self.index]
        self.index = min(self.index + 1, len(self.tokens) - 1)
        return token

    def accept(self, kind: str) -> Token | None:
        """Take the next token if it is of this kind; else return None."""
        return self.take() if self.tokens[self.index].kind == kind else None

    def accept_directive(self, *names: str) -> Token | None:
        """Take the next token if it is one of these directives, as ".align"; else return None."""
        token = self.tokens[self.index]
        return self.take() if token.kind == DIRECTIVE and token.text in names else None

    def expect(self, kind: str, expected: str = "") -> Token:
        """Take the next token, which must be of this kind. expected: the error's words for the kind. Raises PtxError."""
        if self.tokens[self.index].kind != kind:
            raise self.unexpected(expected or (kind if kind in (NAME, DIRECTIVE, NUMBER, STRING, END) else f"'{kind}'"))
        return self.take()

    def parse_list(self, parse: Callable[[], Item], end: str = "") -> list[Item]:
        """Parse items with commas between them. end: the mark that ends the list, which may then be empty; "": the caller takes it."""
        found: list[Item] = []
        while not (end and self.token.kind == end):
            found.append(parse())
            if not self.accept(","):
                break
        if end:
            self.expect(end, f"',' or '{end}'")
        return found

    def position(self, token: Token) -> Position:
        """Return the position of a token."""
        return self._offset_position(token.offset)

    def _offset_position(self, offset: int) -> Position:
        line = bisect_right(self._lines, offset)
        return Position(line, offset - self._lines[line - 1] + 1)

    def unexpected(self, expected: str, token: Token | None = None) -> PtxError:
        """Return the error that a token, by default the next one, is not what was expected."""
        token = token or self.token
        found = END if token.kind == END else f"'{_abbreviate(token.text)}'"
        return self.located_error(token.offset, f"expected {expected}, found {found}", found=token.text, expected=expected)

    def error(self, problem: str, token: Token | None = None) -> PtxError:
        """Return an error at a token, by default the next one."""
        token = token or self.token
        return self.located_error(token.offset, problem, found=token.text)

    def located_error(self, offset: int, problem: str, *, found: str = "", expected: str = "") -> PtxError:
        """Return an error with line and column, and the line of text with a mark below."""
        line, column = self._offset_position(offset)
        end = self._lines[line] - 1 if line < len(self._lines) else len(self.text)
        source = self.text[self._lines[line - 1] : end].rstrip("\r")
        first = max(0, min(column - 1 - _LINE_WIDTH // 2, len(source) - _LINE_WIDTH))
        shown = _abbreviate(source[first : first + _LINE_WIDTH], _LINE_WIDTH)
        mark = "".join("\t" if letter == "\t" else " " for letter in shown[: column - 1 - first]) + "^"
        problem = _abbreviate(problem, _MESSAGE_LIMIT)
        message = f"PTX, line {line}, column {column}: {problem}\n    {shown}\n    {mark}"
        return PtxError(message, line=line, column=column, found=found, expected=expected, source=source)


def _abbreviate(text: str, longest: int = _TOKEN_LIMIT) -> str:
    """Shorten a long text, and replace characters that a terminal would interpret."""
    text = "".join(letter if letter.isprintable() or letter == "\t" else "\N{REPLACEMENT CHARACTER}" for letter in text[: longest + 1])
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
