"""The commands of the command line, one file per subject. `cli` parses the arguments and handles errors and output."""

from collections.abc import Iterator
from contextlib import contextmanager

TARGET_HELP = 'a GPU, such as H100 or "RTX 4090" (tcemu list --gpus lists them), or its target, such as sm_90a'
OP_HELP = 'a PTX spelling, or a short name such as f16, "e4m3 wgmma" or nvf4 (tcemu list --short lists them)'
EXAMPLE_SPELLING = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"  # example in the help texts


class CommandError(Exception):
    """The request cannot be fulfilled. The message says what would work and is printed without a traceback."""


@contextmanager
def command_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Raise errors of these kinds as a `CommandError` with their message."""
    try:
        yield
    except kinds as error:
        raise CommandError(str(error)) from error
