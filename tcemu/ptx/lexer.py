"""PTX cut into tokens, and the errors that say where in the text something is wrong."""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import NamedTuple

from tcemu.errors import PtxError
from tcemu.ptx.module import Place

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
_WIDTH = 120  # characters of a long line that an error shows
_LONGEST, _SAID = 60, 500  # and of a long token, and of what is said of it


class Token(NamedTuple):
    """A piece of text. kind: NAME (an opcode too, with its dots), DIRECTIVE, NUMBER, STRING, END, or the mark itself, as ";"."""

    kind: str
    text: str
    offset: int


class Tokens:
    """The tokens of a text, and which of them is next.

    Raises PtxError where the text has a character that PTX does not, or a comment or string without an end.
    """

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self._lines = [0, *(found.end() for found in re.finditer("\n", text))]
        self.tokens = self._cut()

    def _cut(self) -> list[Token]:
        """All tokens of the text."""
        tokens, at, match = [], 0, _TOKEN.match
        while at < len(self.text):
            found = match(self.text, at)
            if found is None:
                raise self.error_at(at, f"{self.text[at]!r} is not a character of PTX", found=self.text[at])
            kind = found.lastgroup or ""
            if kind == "open":
                what = "comment" if found[0] == "/*" else "string"
                raise self.error_at(at, f"this {what} has no end", found=found[0], expected="*/" if what == "comment" else '"')
            if kind != "skip":
                tokens.append(Token(_KINDS.get(kind, found[0]), found[0], at))
            at = found.end()
        return [*tokens, Token(END, "", len(self.text))]

    @property
    def token(self) -> Token:
        """The next token."""
        return self.tokens[self.at]

    def ahead(self, count: int = 1) -> Token:
        """The token `count` after the next one."""
        return self.tokens[min(self.at + count, len(self.tokens) - 1)]

    def take(self) -> Token:
        """The next token, and on to the one after it."""
        token = self.tokens[self.at]
        self.at = min(self.at + 1, len(self.tokens) - 1)
        return token

    def accept(self, kind: str) -> Token | None:
        """The next token if it is of this kind."""
        return self.take() if self.tokens[self.at].kind == kind else None

    def accept_directive(self, *names: str) -> Token | None:
        """The next token if it is one of these directives, as ".align"."""
        token = self.tokens[self.at]
        return self.take() if token.kind == DIRECTIVE and token.text in names else None

    def expect(self, kind: str, expected: str = "") -> Token:
        """The next token, which must be of this kind. expected: what the error says instead of the kind."""
        if self.tokens[self.at].kind != kind:
            raise self.unexpected(expected or (kind if kind in (NAME, DIRECTIVE, NUMBER, STRING, END) else f"'{kind}'"))
        return self.take()

    def place(self, token: Token) -> Place:
        """Where a token stands."""
        return self._place(token.offset)

    def _place(self, offset: int) -> Place:
        line = bisect_right(self._lines, offset)
        return Place(line, offset - self._lines[line - 1] + 1)

    def unexpected(self, expected: str, token: Token | None = None) -> PtxError:
        """The error that another thing stands where `expected` should. token: the one found, by default the next."""
        token = token or self.token
        found = END if token.kind == END else f"'{_shown(token.text)}'"
        return self.error_at(token.offset, f"expected {expected}, found {found}", found=token.text, expected=expected)

    def wrong(self, problem: str, token: Token | None = None) -> PtxError:
        """The error that what stands at a token, by default the next one, cannot be."""
        token = token or self.token
        return self.error_at(token.offset, problem, found=token.text)

    def error_at(self, offset: int, problem: str, *, found: str = "", expected: str = "") -> PtxError:
        """The error with its line and column, and the line of text with a mark below."""
        line, column = self._place(offset)
        end = self._lines[line] - 1 if line < len(self._lines) else len(self.text)
        source = self.text[self._lines[line - 1] : end].rstrip("\r")
        first = max(0, min(column - 1 - _WIDTH // 2, len(source) - _WIDTH))
        shown = _shown(source[first : first + _WIDTH], _WIDTH)
        mark = "".join("\t" if letter == "\t" else " " for letter in shown[: column - 1 - first]) + "^"
        problem = _shown(problem, _SAID)
        message = f"PTX, line {line}, column {column}: {problem}\n    {shown}\n    {mark}"
        return PtxError(message, line=line, column=column, found=found, expected=expected, source=source)


def _shown(text: str, longest: int = _LONGEST) -> str:
    """The text as a message has it: cut where it is long, and no sign that a terminal obeys."""
    text = "".join(letter if letter.isprintable() or letter == "\t" else "\N{REPLACEMENT CHARACTER}" for letter in text[: longest + 1])
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
