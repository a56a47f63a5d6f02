"""The command line: words in, words out. What a command does is in `tcemu.commands`."""

import argparse
import os
import sys
import threading
from contextlib import suppress

from tcemu.commands import READER_GONE, CommandError
from tcemu.commands.catalog import add_check, add_list, add_show
from tcemu.commands.demo import add_demo
from tcemu.commands.explain import add_explain
from tcemu.commands.fuzz import add_fuzz, add_infer
from tcemu.commands.gemm import add_gemm
from tcemu.commands.verify import add_record, add_verify
from tcemu.compilation import cache_compilations
from tcemu.interrupts import Interrupted, leave_when_asked, what_is_done_stays

COMMANDS = (add_demo, add_gemm, add_explain, add_fuzz, add_infer, add_verify, add_record, add_check, add_list, add_show)


def main(argv: list[str] | None = None) -> int:
    """Runs one command. argv: its words (default: those of the process, which is then the command's alone).

    Returns the exit status: 2 with a message for a user's error. A process that is stopped ends with 130 (Ctrl-C) or 143 (SIGTERM).
    """
    own = argv is None and threading.current_thread() is threading.main_thread()
    if own:
        leave_when_asked("tcemu")
    parser = argparse.ArgumentParser(prog="tcemu", description="NVIDIA's tensor-core instructions, bit for bit, on any machine.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in COMMANDS:
        add(subparsers)
    args = parser.parse_args(argv)
    if own:
        cache_compilations()
    return of_the_process(args) if own else status_of(args)


def status_of(args: argparse.Namespace) -> int:
    """Runs the command; a user's error is said in one line."""
    try:
        return args.run(args)
    except CommandError as error:
        print(f"tcemu {args.command}: {error}", file=sys.stderr)
        return 2


def of_the_process(args: argparse.Namespace) -> int:
    """The same where the end of the command is that of the process: all is written, or it is said that it is not."""
    try:
        status = status_of(args)
        sys.stdout.flush()
    except BrokenPipeError:  # who read the output has gone, as `head` does
        status = READER_GONE
    except Interrupted as stopped:
        print("tcemu: stopped", file=sys.stderr)
        status = 128 + stopped.number
    except OSError as error:
        print(f"tcemu {args.command}: {error.strerror or error}", file=sys.stderr)
        status = 2
    else:
        if status < 128:
            what_is_done_stays()
            return status
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(status)  # past the interpreter's own end, which would write once more what cannot be written, or end under a compiled call


if __name__ == "__main__":
    sys.exit(main())
