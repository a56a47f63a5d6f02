"""The command line: words in, words out. What a command does is in `tcemu.commands`."""

import argparse
import os
import sys
import threading
from contextlib import suppress

from tcemu.commands import CommandError
from tcemu.commands.catalog import add_check, add_list, add_show
from tcemu.commands.demo import add_demo
from tcemu.commands.explain import add_explain
from tcemu.commands.fuzz import add_fuzz, add_infer
from tcemu.commands.gemm import add_gemm
from tcemu.commands.printing import READER_GONE, Unwritten, printing
from tcemu.commands.replay import add_replay
from tcemu.commands.verify import add_record, add_verify
from tcemu.compilation import cache_compilations
from tcemu.interrupts import Interrupted, leave_when_asked, what_is_done_stays

COMMANDS = (add_demo, add_gemm, add_explain, add_fuzz, add_infer, add_replay, add_verify, add_record, add_check, add_list, add_show)


def main(argv: list[str] | None = None) -> int:
    """Runs one command. argv: its words (default: those of the process, which is then the command's alone).

    Returns the exit status: 2 with a message for a user's error, and for an output that cannot be written; 141 if its reader is gone.
    A process that is stopped ends with 130 (Ctrl-C) or 143 (SIGTERM). Raises SystemExit for --help and for words that are no command.
    """
    own = argv is None and threading.current_thread() is threading.main_thread()
    if own:
        leave_when_asked("tcemu")
        cache_compilations()
    try:
        status = status_of(argv)
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


def status_of(argv: list[str] | None) -> int:
    """Reads the words and runs their command. Its errors are said in one line each."""
    name = "tcemu"
    try:
        with printing():
            args = asked(argv)
            name = f"tcemu {args.command}"
            try:
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
    parser = argparse.ArgumentParser(prog="tcemu", description="NVIDIA's tensor-core instructions, bit for bit, on any machine.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in COMMANDS:
        add(subparsers)
    return parser.parse_args(argv)


def _say(line: str) -> None:
    with suppress(OSError):  # there is no other place to say it
        print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
