"""One line of progress on a terminal or in a log."""

import sys
import time
from dataclasses import dataclass, field
from typing import TextIO

REPORT_INTERVAL = 10.0  # seconds between two lines where the stream is not a terminal


@dataclass
class ProgressLine:
    """A progress line. A terminal shows it in place; any other stream gets a line every `REPORT_INTERVAL`, so none for short work."""

    total: int  # amount of work, in the caller's unit
    stream: TextIO
    started: float = field(default_factory=time.monotonic)  # time of the start, in seconds of `time.monotonic`
    last_report: float = 0.0  # time of the last printed line, in seconds after the start
    width: int = 0  # characters of the current line

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def update(self, line: str, last: bool = False) -> None:
        """Show a line.

        Args:
            line: Text without a line break.
            last: True for the last line. A terminal keeps it; any other stream omits it, since the result follows.
        """
        if self.stream.isatty():
            print(f"\r{line.ljust(self.width)}", end="\n" if last else "", file=self.stream, flush=True)
            self.width = 0 if last else len(line)
        elif self.elapsed - self.last_report >= REPORT_INTERVAL and not last:
            self.last_report = self.elapsed
            print(line, file=self.stream, flush=True)

    def count(self, task: str, done: int, unit: str) -> None:
        """Show how much of the work is done, as "sweep: 12 of 32 points, 4 s"; the line goes when all is done.

        Args:
            task: What the work is.
            done: Amount of work that is done.
            unit: The unit of `done` and `total`, in the plural.
        """
        if done >= self.total:
            self.clear()
        else:
            self.update(f"{task}: {done:,} of {self.total:,} {unit}, {self.elapsed:.0f} s")

    def clear(self) -> None:
        """Clear the line on a terminal, so that other text can follow in its place."""
        if self.width:
            print(f"\r{' ' * self.width}\r", end="", file=self.stream, flush=True)
            self.width = 0


def is_interactive(stream: TextIO) -> bool:
    """Return whether somebody watches a stream: it is a terminal, or the program runs in a notebook."""
    return stream.isatty() or "ipykernel" in sys.modules


def interactive_line(total: int) -> ProgressLine | None:
    """Return a progress line on the standard error stream if somebody watches it."""
    return ProgressLine(total, sys.stderr) if sys.stderr is not None and is_interactive(sys.stderr) else None
