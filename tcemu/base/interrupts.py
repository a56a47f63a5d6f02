"""Ctrl-C and SIGTERM: work whose results count stops between two chunks, any other work at once. No exception is raised inside a chunk.

Python raises a signal's exception at whatever point it has reached. Inside a callback of JAX the exception is lost. While a compiled call
still runs, the exception lets the interpreter exit during that call, which then crashes. So a loop defers signals (`defer_signals`) and
polls them. In a process that is one command (`exit_on_signals`), a thread waits for signals, so that they act while the main thread is
inside the compiler, too.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tcemu.base.files import WRITE_LOCK

SIGNALS = (signal.SIGINT, signal.SIGTERM)
WRITE_TIMEOUT = 10.0  # seconds to wait for a file that is being written before the process exits


class PendingSignal:
    """State of deferred signals.

    Attributes:
        signal: Number of the signal that was received, or 0.
        busy: True if stopping at once would lose results.
    """

    def __init__(self) -> None:
        self.signal, self.busy = 0, False


class Interrupted(KeyboardInterrupt):
    """Work stopped because of a deferred signal.

    Attributes:
        number: Number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


class ExitHandler:
    """Signal handler of a process that is one command. Calling it does nothing, since the thread that runs `watch` acts.

    Args:
        name: Name of the program, which begins its messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.pending: PendingSignal | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        pass

    def watch(self, descriptor: int) -> None:
        """Read signal numbers from a pipe and handle each of them.

        Args:
            descriptor: File descriptor of the pipe's reading end.
        """
        while numbers := os.read(descriptor, 1):
            self.handle(numbers[0])

    def handle(self, number: int) -> None:
        """Handle a signal: the first one waits until the current chunk is counted, any other ends the process with status 128 + `number`.

        The process ends at once where no results would be lost, but never while a file is being written.

        Args:
            number: Number of the signal. Numbers other than those of `SIGNALS` are ignored.
        """
        if number not in SIGNALS:
            return
        if self.pending is not None and self.pending.busy and not self.pending.signal:
            self.pending.signal = number
            _write_stderr(f"{self.name}: stopping after this chunk is counted; a second signal stops at once")
            return
        WRITE_LOCK.acquire(timeout=WRITE_TIMEOUT)
        _write_stderr(f"{self.name}: stopped")
        os._exit(128 + number)


def _write_stderr(line: str) -> None:
    """Write a line to stderr without Python's buffers, whose lock the main thread may hold."""
    os.write(2, f"{line}\n".encode())


def exit_on_signals(name: str) -> None:
    """Let Ctrl-C and SIGTERM end this process with one line on stderr and status 130 or 143. Call it in the main thread only.

    Args:
        name: Name of the program, which begins the line.
    """
    handler = ExitHandler(name)
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # a job in the background ignores it
            signal.signal(number, handler)
    reading, writing = os.pipe()
    if hasattr(os, "set_blocking"):  # missing on Windows before Python 3.12, which takes a blocking pipe
        os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=handler.watch, args=(reading,), name="signals", daemon=True).start()


def ignore_signals() -> None:
    """Ignore both signals from now on, since a signal during the interpreter's shutdown would replace the exit status of finished work."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def defer_signals() -> Iterator[PendingSignal]:
    """Defer Ctrl-C and SIGTERM in a context: the first signal is only recorded, a second one is handled as before.

    A signal whose handler is not a Python function, such as SIGTERM by default, is not deferred. Outside the main thread no signal is
    deferred, unless `exit_on_signals` was called.

    Yields:
        The state, whose `signal` becomes the number of the signal that was received.
    """
    pending, exit_handler = PendingSignal(), next((h for h in map(signal.getsignal, SIGNALS) if isinstance(h, ExitHandler)), None)
    if exit_handler is not None:
        exit_handler.pending, outer = pending, exit_handler.pending
        try:
            yield pending
        finally:
            exit_handler.pending = outer
        return
    if threading.current_thread() is not threading.main_thread():
        yield pending
        return
    before = {number: handler for number in SIGNALS if callable(handler := signal.getsignal(number))}

    def record(number: int, frame: FrameType | None) -> None:
        if pending.signal:
            before[signal.Signals(number)](number, frame)
        pending.signal = number

    for number in before:
        signal.signal(number, record)
    try:
        yield pending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
