"""The command line: words in, words out. What a command does is in `tcemu.commands`."""

import argparse
import sys

from tcemu.commands import CommandError
from tcemu.commands.catalog import add_check, add_list, add_show
from tcemu.commands.demo import add_demo
from tcemu.commands.explain import add_explain
from tcemu.commands.fuzz import add_fuzz, add_infer
from tcemu.commands.gemm import add_gemm
from tcemu.commands.verify import add_record, add_verify

COMMANDS = (add_demo, add_gemm, add_explain, add_fuzz, add_infer, add_verify, add_record, add_check, add_list, add_show)


def main(argv: list[str] | None = None) -> int:
    """Runs one command; argv: its words (default: those of the process). Returns the exit status: 2 with a message for a user's error."""
    parser = argparse.ArgumentParser(prog="tcemu", description="NVIDIA's tensor-core instructions, bit for bit, on any machine.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in COMMANDS:
        add(subparsers)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except CommandError as error:
        print(f"tcemu {args.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
