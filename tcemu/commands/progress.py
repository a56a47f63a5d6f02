"""Progress on standard error, as one line."""

import time
from dataclasses import dataclass, field
from typing import TextIO

QUIET = 10.0  # seconds between two lines where the stream is no terminal


@dataclass
class ProgressLine:
    """Rewritten in place on a terminal; elsewhere a line now and then, and nothing for short work."""

    total: int
    stream: TextIO
    started: float = field(default_factory=time.monotonic)
    shown: float = 0.0
    covered: int = 0  # characters of the line that stands there

    @property
    def passed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def say(self, line: str, last: bool = False) -> None:
        """last: on a terminal the line stays; elsewhere it is left out, since the result follows."""
        if self.stream.isatty():
            print(f"\r{line.ljust(self.covered)}", end="\n" if last else "", file=self.stream, flush=True)
            self.covered = 0 if last else len(line)
        elif self.passed - self.shown >= QUIET and not last:
            self.shown = self.passed
            print(line, file=self.stream, flush=True)
