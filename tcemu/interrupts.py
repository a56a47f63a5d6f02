"""Ctrl-C and SIGTERM: work that counts ends between two of its pieces, all other work at once. Nothing is raised in the middle.

An exception of a signal comes wherever Python happens to be. In a callback of JAX it is lost. Beside a compiled call that still runs it
lets the interpreter end under that call, which then crashes. So a loop holds signals back (`held_back`) and looks for them. In a process
of its own (`leave_when_asked`) a thread waits for them, which also acts while the main thread is inside the compiler.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tcemu.files import WRITING

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PATIENCE = 10.0  # seconds that a file may take to be written before the process ends under it


class Held:
    """Signals that are held back. signal: the number of the one that came, or 0. counted: something would be lost by ending at once."""

    def __init__(self) -> None:
        self.signal, self.counted = 0, False


class Interrupted(KeyboardInterrupt):
    """Work ended because of a signal that was held back. number: of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class Leaving:
    """The handler of a process that is one command: by itself it does nothing, since the thread that `watch`es acts."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.held: Held | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        pass

    def watch(self, descriptor: int) -> None:
        """Reads the numbers of signals as they come."""
        while came := os.read(descriptor, 1):
            self.came(came[0])

    def came(self, number: int) -> None:
        """The first signal waits for work that counts; any other ends the process, with 128 + its number, between two files."""
        if number not in SIGNALS:
            return
        if self.held is not None and self.held.counted and not self.held.signal:
            self.held.signal = number
            _say(f"{self.name}: stopping when this chunk is counted; once more ends at once")
            return
        WRITING.acquire(timeout=PATIENCE)
        _say(f"{self.name}: stopped")
        os._exit(128 + number)


def _say(line: str) -> None:
    """On stderr, past Python's buffers, whose lock the main thread may have."""
    os.write(2, f"{line}\n".encode())


def leave_when_asked(name: str) -> None:
    """Ctrl-C and SIGTERM end this process with one line and status 130 or 143. name: of the program. In the main thread only."""
    leaving = Leaving(name)
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as of a job in the background
            signal.signal(number, leaving)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=leaving.watch, args=(reading,), name="signals", daemon=True).start()


def what_is_done_stays() -> None:
    """From here on both signals are ignored: at the interpreter's own end they would take the status of work that is done."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def held_back() -> Iterator[Held]:
    """Ctrl-C and SIGTERM only set `signal` of what this gives. The second one does what it did before.

    SIGTERM is left alone where nobody handles it, and both outside the main thread.
    """
    held, leaving = Held(), next((h for h in map(signal.getsignal, SIGNALS) if isinstance(h, Leaving)), None)
    if leaving is not None:
        leaving.held, outer = held, leaving.held
        try:
            yield held
        finally:
            leaving.held = outer
        return
    if threading.current_thread() is not threading.main_thread():
        yield held
        return
    before = {number: handler for number in SIGNALS if callable(handler := signal.getsignal(number))}

    def hold(number: int, frame: FrameType | None) -> None:
        if held.signal:
            before[signal.Signals(number)](number, frame)
        held.signal = number

    for number in before:
        signal.signal(number, hold)
    try:
        yield held
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
