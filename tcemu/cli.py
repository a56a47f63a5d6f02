"""The command line: parses the arguments and runs a command of `tcemu.commands`."""

import argparse
import os
import sys
import threading
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

from tcemu.base.interrupts import Interrupted, exit_on_signals, ignore_signals
from tcemu.base.text import escape_controls
from tcemu.faces.commands import CommandError, command_errors
from tcemu.faces.commands.standard_streams import READER_GONE_STATUS, StreamError, checked_streams


class Command(NamedTuple):
    """A command. `tcemu.commands.FILE` defines its arguments in add_NAME and is imported only when needed, so that --help needs no JAX."""

    name: str
    file: str
    help: str

    def __call__(self, subparsers: Any) -> None:
        """Add the command with all its arguments to argparse's `subparsers`."""
        module = import_module(f"tcemu.faces.commands.{self.file}")
        getattr(module, f"add_{self.name}")(SimpleNamespace(add_parser=partial(subparsers.add_parser, help=self.help)))


class PlainParser(argparse.ArgumentParser):
    """A parser, and the class of its subparsers, without the colours of Python 3.14, which the streams would escape."""

    def __init__(self, *args: Any, **words: Any) -> None:
        super().__init__(*args, **words)
        self.color = False


COMMANDS = (
    Command("demo", "demo_command", "classify handwritten digits with emulated tensor cores"),
    Command("gemm", "gemm_command", "a matrix product with an instruction's arithmetic, and its error"),
    Command("run", "run_command", "run a kernel's PTX without a GPU, bit for bit"),
    Command("launches", "launches_command", "record launches of kernels, and repeat them on a real GPU"),
    Command("explain", "explain_command", "one dot product, step by step"),
    Command("fuzz", "fuzz_commands", "compare two targets on millions of cases"),
    Command("infer", "fuzz_commands", "find the arithmetic of a black box"),
    Command("quantizers", "quantizers_command", "how libraries quantise, and which of them give equal words"),
    Command("study", "study_command", "published claims about low-precision sums, reproduced"),
    Command("replay", "replay_command", "the order in which a library adds: find it, show it, compare two"),
    Command("drift", "drift_command", "which operation of two recorded runs diverged first, and why"),
    Command("verify", "verify_commands", "compare the emulation with a real GPU"),
    Command("record", "verify_commands", "write down what a real GPU computes"),
    Command("check", "catalog_commands", "is this an instruction, and does this target have it?"),
    Command("list", "catalog_commands", "the instructions of a target"),
    Command("show", "catalog_commands", "what is known of an instruction"),
)


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments. By default those of the process, which is then dedicated to the command.

    Returns:
        The exit status: 0 or 1 as the command defines it; 2 after a message about a user's error or an output that cannot be written; 141
        if the reader of the output is gone. A process that is stopped exits with 130 (Ctrl-C) or 143 (SIGTERM).

    Raises:
        SystemExit: --help, or arguments that are no command.
    """
    dedicated = argv is None and threading.current_thread() is threading.main_thread()
    if dedicated:
        exit_on_signals("tcemu")
    try:
        status = run_command(argv, caching=dedicated)
    except Interrupted as stopped:
        if not dedicated:
            raise
        _print_error("tcemu: stopped")
        status = 128 + stopped.number
    if dedicated and status < 128:
        ignore_signals()
    elif dedicated:
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(status)  # without the interpreter's shutdown, during which a compiled call may still run
    return status


def run_command(argv: list[str] | None, caching: bool = False) -> int:
    """Parse the arguments and run their command. Errors become one line each. caching: keep compiled programs for the next command."""
    name = "tcemu"
    try:
        with checked_streams():
            args = parse_arguments(argv)
            name = f"tcemu {args.command}"
            try:
                resolve_targets(args)
                if caching:
                    cache_compilations()
                return args.run(args)
            except (CommandError, OSError) as error:  # an OSError concerns a file; those of the streams are StreamError
                _print_error(f"{name}: {error}")
                return 2
    except StreamError as error:
        if error.gone:
            return READER_GONE_STATUS
        _print_error(f"{name}: {error}")
        return 2


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the arguments."""
    words = sys.argv[1:] if argv is None else argv
    name = next((word for word in words if not word.startswith("-")), "")
    root = parser(name)
    if name and name not in (names := [command.name for command in COMMANDS]):
        near = get_close_matches(name, names, n=1)
        root.error(f"unknown command {name!r}{f', did you mean {near[0]!r}?' if near else ''}; the commands are {', '.join(names)}")
    args, unknown = root.parse_known_args(words)
    if unknown:
        known = [option for action in _command_parser(root, name)._actions for option in action.option_strings if option.startswith("--")]
        near = [option for word in unknown if word.startswith("--") for option in get_close_matches(word.partition("=")[0], known, n=1)]
        hint = f" (did you mean {' or '.join(near)}?)" if near else ""
        _command_parser(root, name).error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return args


def _command_parser(root: argparse.ArgumentParser, name: str) -> argparse.ArgumentParser:
    """The parser of one command, which prints the usage of that command."""
    return next(action.choices[name] for action in root._actions if isinstance(action, argparse._SubParsersAction))


def parser(name: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands. With a name, only that command has its arguments; the others have their name and help."""
    root = PlainParser(prog="tcemu", description="NVIDIA's tensor-core instructions, bit for bit, on any machine.")
    root.add_argument("--version", action="version", version=f"tcemu {sys.modules['tcemu'].__version__}")
    subparsers = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        if name in (None, command.name):
            command(subparsers)
        else:
            subparsers.add_parser(command.name, help=command.help)
    return root


def cache_compilations() -> None:
    """Call `tcemu.cache_compilations`, which imports JAX."""
    from tcemu.base.compilation import cache_compilations

    cache_compilations()


def resolve_targets(args: argparse.Namespace) -> None:
    """Replace the targets among the arguments by their PTX names.

    Raises:
        CommandError: There is no such target.
    """
    given = getattr(args, "target", None)
    if given is None:
        return
    from tcemu.engine.isa.targets import resolve_target  # it imports the tables of instructions, which --help does not need

    with command_errors(ValueError):
        if isinstance(given, str):
            args.target = resolve_target(given)
        else:
            args.target = [resolve_target(name) for name in given]


def _print_error(line: str) -> None:
    with suppress(OSError):  # standard error is closed
        print(escape_controls(line), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
