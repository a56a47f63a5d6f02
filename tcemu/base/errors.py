"""The package's errors. Each message says what was requested, what holds, what would work, and where the manual says so."""


class Unsupported(ValueError):
    """PTX forbids the request: the spelling is not an instruction, or the target does not have the instruction."""


class NotModelled(ValueError):
    """PTX allows the request, but there is no evidence of the target's arithmetic, and tcemu does not guess."""


class UndefinedBehaviour(ValueError):
    """PTX leaves the result undefined. Raised in checked mode only."""


class PtxError(ValueError):
    """`tcemu.ptx.parse` cannot read a text as PTX.

    Attributes:
        line: Line of the error, counted from 1.
        column: Column of the error, counted from 1.
        found: Text at that position.
        expected: Description of the text that could stand at that position, or "" if the problem is a different one.
        source: The line of text.
    """

    def __init__(self, message: str, *, line: int = 0, column: int = 0, found: str = "", expected: str = "", source: str = "") -> None:
        super().__init__(message)
        self.line, self.column, self.found, self.expected, self.source = line, column, found, expected, source
