"""The package's errors. Each message says what was requested, what holds, what would work, and where the manual says so."""

import warnings
from functools import lru_cache

MAX_WARNINGS = 256  # different ones that are remembered


class Unsupported(ValueError):
    """PTX forbids the request: the spelling is not an instruction, or the target does not have the instruction."""


class NotModelled(ValueError):
    """PTX allows the request, but there is no evidence of the target's arithmetic, and tcemu does not guess."""


class UndefinedBehaviour(ValueError):
    """PTX leaves the result undefined. Raised in checked mode only."""


class KernelRefused(RuntimeError):
    """A compiler does not take a kernel. JAX's operations compute in its place.

    Attributes:
        summary: One line: the compiler, the kernel, and the beginning of what the compiler says.
    """

    def __init__(self, summary: str, said: str) -> None:
        super().__init__(said)
        self.summary = summary


@lru_cache(maxsize=MAX_WARNINGS)
def warn_once(message: str) -> None:
    """Warn of something once a process."""
    warnings.warn(message, stacklevel=2)


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
