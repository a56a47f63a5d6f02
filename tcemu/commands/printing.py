"""What a command prints: written to its end, or an error that says that it is not."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from io import BufferedWriter, RawIOBase, TextIOWrapper
from typing import Any, TextIO

READER_GONE = 141  # the exit status that shells give a command whose reader is gone: 128 + SIGPIPE


class Unwritten(Exception):
    """A standard stream cannot be written. gone: because its reader went away, as `head` does."""

    def __init__(self, name: str, error: OSError) -> None:
        super().__init__(f"{name} cannot be written: {error.strerror or error}")
        self.gone = isinstance(error, BrokenPipeError)


class Stream:
    """A standard stream whose faults are raised as Unwritten, so that an OSError of a command is one of its files."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._faults():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._faults():
            self._stream.flush()

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with suppress(OSError):  # some streams have no descriptor
                _silence(self._stream)
            raise Unwritten(self._name, error) from error


@contextmanager
def printing() -> Iterator[None]:
    """What is printed inside leaves the process before the end. Raises Unwritten if it cannot."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the names of files may be no text, and a terminal may know ASCII alone
    with _whole(sys.stdout) as whole:
        out, error = _stream(whole, "standard output"), _stream(sys.stderr, "standard error")
        with redirect_stdout(out), redirect_stderr(error):
            try:
                yield
            finally:
                for stream in (out, error):
                    if stream is not None:
                        stream.flush()


@contextmanager
def _whole(stream: TextIO | None) -> Iterator[TextIO | None]:
    """The stream, but one that PYTHONUNBUFFERED has left without a buffer, line by line through one.

    Without it Python takes a write of which the system did a part for a whole one: the rest is lost, and no error tells.
    """
    raw = getattr(stream, "buffer", None)
    if stream is None or not isinstance(raw, RawIOBase):
        yield stream
        return
    whole = TextIOWrapper(BufferedWriter(raw), encoding=stream.encoding, errors=stream.errors, line_buffering=True)
    try:
        yield whole
    finally:
        whole.detach().detach()  # else it would close the process's own


def _stream(stream: TextIO | None, name: str) -> Any:
    return None if stream is None else Stream(stream, name)  # None where it was closed before


def _silence(stream: TextIO) -> None:
    """What the stream still holds goes nowhere: else Python tries again at its end, and complains."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, stream.fileno())
    finally:
        os.close(nowhere)
