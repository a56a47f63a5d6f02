"""What can go wrong while a kernel runs: noted in the machine by the first thread that meets it, raised by the host afterwards.

Families of instructions add their own messages by `add`; `Machine.fault` names one by its key.
"""

from __future__ import annotations

from typing import NamedTuple

from tcemu.errors import UndefinedBehaviour

WORDS = 10  # of the fault that a machine keeps: 1 + its message, statement, block, thread, 1 where it has an address, address, 4 values
VALUES = 4


class OutOfBounds(ValueError):
    """A kernel's access to memory that is no buffer's, or outside its variables. A GPU stops with "an illegal memory access"."""


class Misaligned(ValueError):
    """A kernel's access at an address that is no multiple of its size. A GPU stops with "misaligned address"."""


class Trapped(ValueError):
    """A kernel executed `trap`."""


class Message(NamedTuple):
    """text: with places for the values, as "{0}"; error: what is raised; space: of the address, as "shared", "" for a generic one."""

    text: str
    error: type[ValueError]
    space: str = ""


MESSAGES: dict[str, Message] = {}


def add(**messages: Message) -> None:
    """More messages. A key that is there already must mean the same."""
    for key, message in messages.items():
        if MESSAGES.setdefault(key, message) != message:
            raise ValueError(f"{key}: another message has this key: {MESSAGES[key].text}")


for _space in ("global", "shared", "local", "const", "param", ""):
    _named = _space or "generic"
    add(
        **{
            f"bounds.{_named}": Message(f"{{0}} bytes of {_named} memory are out of bounds", OutOfBounds, _space),
            f"alignment.{_named}": Message(f"{{0}} bytes of {_named} memory must lie at a multiple of {{1}}", Misaligned, _space),
        }
    )
add(
    uninitialised=Message("{0} bytes of shared memory are read that nothing has written", UndefinedBehaviour, "shared"),
    race_write=Message("thread {1} wrote another value there since the last barrier", UndefinedBehaviour, "shared"),
    race_read=Message("thread {1} wrote there since the last barrier", UndefinedBehaviour, "shared"),
    race_overwrite=Message("thread {1} read there since the last barrier", UndefinedBehaviour, "shared"),
)
