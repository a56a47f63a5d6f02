"""Arguments that several commands parse: counts and --what-if."""

import argparse

from tcemu.engine.arithmetic.model import Model, what_if
from tcemu.engine.isa.grammar import shorten_text
from tcemu.faces.commands import CommandError


def apply_what_if(model: Model, text: str) -> Model:
    """The model changed by the text of one --what-if.

    Raises:
        CommandError: The text is not a change of a model.
    """
    try:
        return what_if(model, text)
    except ValueError as error:
        raise CommandError(f"--what-if {shorten_text(text)}: {error}") from error


def parse_count(text: str) -> int:
    """A count from 0 to 2^62 - 1, also written as 1e6.

    Raises:
        argparse.ArgumentTypeError: The text is no such count.
    """
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (0 <= value < 1 << 62 and value == int(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is no count from 0 to 2^62 - 1; write it as 1000000 or 1e6")
    return int(text) if text.isdecimal() else int(value)


def parse_positive_count(text: str) -> int:
    """A count of at least 1.

    Raises:
        argparse.ArgumentTypeError: The text is no such count.
    """
    count = parse_count(text)
    if not count:
        raise argparse.ArgumentTypeError(f"{text!r}: expected at least 1")
    return count
