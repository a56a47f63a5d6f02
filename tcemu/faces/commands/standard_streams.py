"""Standard output and error of a command: fully written, or an error says that they are not."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from io import BufferedWriter, RawIOBase, TextIOWrapper
from typing import Any, TextIO

from tcemu.base.text import escape_controls

READER_GONE_STATUS = 141  # exit status of a command whose reader is gone, as in shells: 128 + SIGPIPE


class StreamError(Exception):
    """A standard stream cannot be written. `gone` is True if its reader has closed it, as `head` does."""

    def __init__(self, name: str, error: OSError) -> None:
        super().__init__(f"{name} cannot be written: {error.strerror or error}")
        self.gone = isinstance(error, BrokenPipeError)


class CheckedStream:
    """A standard stream that raises StreamError, so that an OSError of a command concerns its files.

    Characters that command a terminal are escaped: a command prints its arguments and the contents of files.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self.write_styled(escape_controls(text))
        return len(text)

    def write_styled(self, text: str) -> None:
        """Write a text with the terminal's codes that it has."""
        with self._faults():
            self._stream.write(text)

    def flush(self) -> None:
        with self._faults():
            self._stream.flush()

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with suppress(OSError):  # some streams have no descriptor
                _discard(self._stream)
            raise StreamError(self._name, error) from error


def print_styled(text: str) -> None:
    """Print a text of our own that has codes for the terminal."""
    write = getattr(sys.stdout, "write_styled", sys.stdout.write)
    write(f"{text}\n")


@contextmanager
def checked_streams() -> Iterator[None]:
    """Flush everything that is printed inside.

    Raises:
        StreamError: A stream cannot be written.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may not be text, and a terminal may support only ASCII
    with _buffered(sys.stdout) as whole:
        out, error = _checked(whole, "standard output"), _checked(sys.stderr, "standard error")
        with redirect_stdout(out), redirect_stderr(error):
            try:
                yield
            finally:
                for stream in (out, error):
                    if stream is not None:
                        stream.flush()


@contextmanager
def _buffered(stream: TextIO | None) -> Iterator[TextIO | None]:
    """The stream, with a line buffer if PYTHONUNBUFFERED has removed its buffer.

    Without a buffer Python takes a partial write for a complete one: the rest is lost without an error.
    """
    raw = getattr(stream, "buffer", None)
    if stream is None or not isinstance(raw, RawIOBase):
        yield stream
        return
    whole = TextIOWrapper(BufferedWriter(raw), encoding=stream.encoding, errors=stream.errors, line_buffering=True)
    try:
        yield whole
    finally:
        whole.detach().detach()  # otherwise it would close the stream of the process


def _checked(stream: TextIO | None, name: str) -> Any:
    return None if stream is None else CheckedStream(stream, name)  # None if it was closed before


def _discard(stream: TextIO) -> None:
    """Send the rest of the stream to the null device; otherwise Python writes it again at exit, and fails."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, stream.fileno())
    finally:
        os.close(nowhere)
