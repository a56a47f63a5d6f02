"""The command line: words in, words out. What a command does is in `tcemu.commands`."""

import argparse
import os
import sys
import threading
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple

from tcemu.commands import CommandError
from tcemu.commands.printing import READER_GONE, Unwritten, printing
from tcemu.interrupts import Interrupted, leave_when_asked, what_is_done_stays


class Command(NamedTuple):
    """One command: `tcemu.commands.FILE` has its words, in add_NAME, and is imported when they are wanted. So --help needs no JAX."""

    name: str
    file: str
    help: str

    def __call__(self, subparsers: Any) -> None:
        """Adds the command, with all its words, to argparse's `subparsers`."""
        module = import_module(f"tcemu.commands.{self.file}")
        getattr(module, f"add_{self.name}")(WithHelp(subparsers, self.help))


class WithHelp(NamedTuple):
    """argparse's `subparsers`, with the line that a command has in the list of all."""

    subparsers: Any
    help: str

    def add_parser(self, name: str, **words: Any) -> argparse.ArgumentParser:
        return self.subparsers.add_parser(name, help=self.help, **words)


COMMANDS = (
    Command("demo", "demo", "classify handwritten digits with emulated tensor cores"),
    Command("gemm", "gemm", "a matrix product with an instruction's arithmetic, and its error"),
    Command("run", "run", "run a kernel's PTX without a GPU, bit for bit"),
    Command("explain", "explain", "one dot product, step by step"),
    Command("fuzz", "fuzz", "compare two targets on millions of cases"),
    Command("infer", "fuzz", "find the arithmetic of a black box"),
    Command("study", "study", "published claims about low-precision sums, reproduced"),
    Command("replay", "replay", "the order in which a library adds: find it, show it, compare two"),
    Command("verify", "verify", "compare the emulation with a real GPU"),
    Command("record", "verify", "write down what a real GPU computes"),
    Command("check", "catalog", "is this an instruction, and does this target have it?"),
    Command("list", "catalog", "the instructions of a target"),
    Command("show", "catalog", "what is known of an instruction"),
)


def main(argv: list[str] | None = None) -> int:
    """Runs one command. argv: its words (default: those of the process, which is then the command's alone).

    Returns the exit status: 2 with a message for a user's error, and for an output that cannot be written; 141 if its reader is gone.
    A process that is stopped ends with 130 (Ctrl-C) or 143 (SIGTERM). Raises SystemExit for --help and for words that are no command.
    """
    own = argv is None and threading.current_thread() is threading.main_thread()
    if own:
        leave_when_asked("tcemu")
    try:
        status = status_of(argv, caching=own)
    except Interrupted as stopped:
        if not own:
            raise
        _say("tcemu: stopped")
        status = 128 + stopped.number
    if own and status < 128:
        what_is_done_stays()
    elif own:
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(status)  # past the interpreter's own end, under which a compiled call may still run
    return status


def status_of(argv: list[str] | None, caching: bool = False) -> int:
    """Reads the words and runs their command. Its errors are said in one line each. caching: what is compiled is kept for the next."""
    name = "tcemu"
    try:
        with printing():
            args = asked(argv)
            name = f"tcemu {args.command}"
            try:
                in_full(args)
                if caching:
                    cache_compilations()
                return args.run(args)
            except (CommandError, OSError) as error:  # OSError: of a file, since those of the streams are Unwritten
                _say(f"{name}: {error}")
                return 2
    except Unwritten as error:
        if error.gone:
            return READER_GONE
        _say(f"{name}: {error}")
        return 2


def asked(argv: list[str] | None) -> argparse.Namespace:
    """The words, read. Raises SystemExit."""
    words = sys.argv[1:] if argv is None else argv
    return parser(next((word for word in words if not word.startswith("-")), "")).parse_args(words)


def parser(name: str | None = None) -> argparse.ArgumentParser:
    """The parser of all words; or of those of one command, of which the others have their name and help alone."""
    whole = argparse.ArgumentParser(prog="tcemu", description="NVIDIA's tensor-core instructions, bit for bit, on any machine.")
    whole.add_argument("--version", action="version", version=f"tcemu {sys.modules['tcemu'].__version__}")
    subparsers = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        if name in (None, command.name):
            command(subparsers)
        else:
            subparsers.add_parser(command.name, help=command.help)
    return whole


def cache_compilations() -> None:
    """See `tcemu.cache_compilations`, which imports JAX."""
    from tcemu.compilation import cache_compilations

    cache_compilations()


def in_full(args: argparse.Namespace) -> None:
    """The targets among the words, by their own names. Raises CommandError for one that there is not."""
    given = getattr(args, "target", None)
    if given is None:
        return
    from tcemu.isa.targets import named_target  # with the tables of instructions, which --help does not need

    try:
        if isinstance(given, str):
            args.target = named_target(given)
        else:
            args.target = [named_target(one) for one in given]
    except ValueError as error:
        raise CommandError(str(error)) from error


def _say(line: str) -> None:
    with suppress(OSError):  # there is no other place to say it
        print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
