"""A line of progress while programs of torch's operators compile, which takes most of the time of a model's first call."""

import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock

from tcemu.base.progress import interactive_line


@dataclass
class CompileProgress:
    """The programs that this process has begun to compile while somebody watched, and the time that their first runs took."""

    programs: set[Hashable] = field(default_factory=set)
    seconds: float = 0.0  # time of the finished first runs
    last_report: float = 0.0  # `seconds` at the last line where the stream is not a terminal
    lock: Lock = field(default_factory=Lock)

    @contextmanager
    def show(self, name: str, program: Hashable) -> Iterator[None]:
        """Show a line on the standard error stream during the first run of a program, if somebody watches that stream.

        A terminal shows it until the run ends. A notebook gets a line for every ten seconds of first runs, so none for quick ones.

        Args:
            name: What the program computes.
            program: What distinguishes it from all other programs: operator, static arguments, shapes and dtypes.
        """
        line = interactive_line(1)
        with self.lock:
            is_known = program in self.programs
            if line is not None:
                self.programs.add(program)
            number = len(self.programs)
        if line is None or is_known:
            yield
            return
        began = time.monotonic()
        line.started, line.last_report = began - self.seconds, self.last_report
        line.update(f"tcemu.torch: compiles program {number}, {name}; {line.elapsed:.0f} s so far")
        self.last_report = line.last_report
        try:
            yield
        finally:
            line.clear()
            with self.lock:
                self.seconds += time.monotonic() - began


compile_progress = CompileProgress()
