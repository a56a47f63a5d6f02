"""The named errors. Each message says what was asked, what is so, what would work, and where it is written."""


class Unsupported(ValueError):
    """PTX forbids it: the spelling is not an instruction, or the target does not have it."""


class NotModelled(ValueError):
    """PTX allows it, but nobody has evidence of what this target computes, so tcemu refuses to guess."""


class UndefinedBehaviour(ValueError):
    """PTX leaves the result open; raised in checked mode only."""


class PtxError(ValueError):
    """Text that is not PTX: `tcemu.ptx.parse` cannot read it.

    line, column: where, from 1; found: what stands there; expected: what could, in words, or "" if the problem is another;
    source: the line of text.
    """

    def __init__(self, message: str, *, line: int = 0, column: int = 0, found: str = "", expected: str = "", source: str = "") -> None:
        super().__init__(message)
        self.line, self.column, self.found, self.expected, self.source = line, column, found, expected, source
