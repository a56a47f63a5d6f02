"""What each command of the command line does, one file a command; `cli` only reads the words."""

import os
import sys
from collections.abc import Callable
from functools import wraps
from io import TextIOWrapper
from typing import Any

EXAMPLE = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"  # what the help texts show each command with
READER_GONE = 141  # the exit status that shells give a command whose reader is gone: 128 + SIGPIPE


class CommandError(Exception):
    """The user asked for something that cannot be done; the message says what would work. No traceback is shown."""


def printing(run: Callable[[Any], int]) -> Callable[[Any], int]:
    """A command's function that also answers for what it prints.

    A reader that goes away, as `head` does, ends it quietly with READER_GONE. An output that cannot be written raises CommandError.
    """

    @wraps(run)
    def answering(args: Any) -> int:
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # the names of files may be no text, and a terminal may know ASCII alone
        try:
            try:
                return run(args)
            finally:
                _flush()
        except BrokenPipeError:
            _silence()
            return READER_GONE
        except OSError as error:
            _silence()
            raise CommandError(f"standard output cannot be written: {error.strerror or error}") from error

    return answering


def _flush() -> None:
    """What is printed leaves here, where an error has a name, and not when Python ends."""
    if sys.stdout is not None:  # None where it was closed before
        sys.stdout.flush()


def _silence() -> None:
    """What is still held for standard output goes nowhere: else Python tries again at its end, and complains."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
