"""What can go wrong while a kernel runs: each thread notes the first fault that it meets, and the host raises one afterwards.

Families of instructions add their own messages by `add`; `Machine.fault` names one by its key.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from zlib import crc32

import jax.numpy as jnp
import numpy as np
from jax import Array

from tcemu.errors import UndefinedBehaviour

ADDRESS = 1 << 31  # in a code: the fault has an address
STATEMENT = 32  # the bits of a code from which on the statement's number stands


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


class Noted(NamedTuple):
    """The first fault of every thread, uint64 [blocks, threads]. code: 0 for none; values: two numbers for the message."""

    code: Array
    address: Array
    first: Array
    second: Array


class Found(NamedTuple):
    """A fault on the host. address: None if it has none."""

    message: Message
    values: tuple[int, ...]
    statement: int
    block: int
    thread: int
    address: int | None


_codes: dict[int, str] = {}


def none_noted(shape: tuple[int, ...]) -> Noted:
    """No thread has met a fault."""
    return Noted(*(jnp.zeros(shape, jnp.uint64) for _ in Noted._fields))


def coded(key: str, values: tuple[Any, ...], has_address: bool) -> tuple[int, list[Any]]:
    """The code of a message whose values that are known stand in its text; and the values that each thread has of its own."""
    message = MESSAGES[key]
    known = [value if isinstance(value, int) else None for value in values]
    if any(value is not None for value in known):
        places = iter(range(len(values)))
        shown = [value if value is not None else f"{{{next(places)}}}" for value in known]
        key = f"{key} {shown}"
        add(**{key: message._replace(text=message.text.format(*shown))})
    code = crc32(key.encode()) & (ADDRESS - 1) or 1
    if _codes.setdefault(code, key) != key:
        raise ValueError(f"{key}: its code is that of {_codes[code]}; another key would do")
    return code | ADDRESS * has_address, [value for value in values if not isinstance(value, int)]


def note(noted: Noted, code: Array, address: Array | None, values: list[Array]) -> Noted:
    """The faults with those of threads whose code is not 0, unless they have met one before."""
    fresh = (code != 0) & (noted.code == 0)

    def kept(old: Array, new: Any) -> Array:
        return old if new is None else jnp.where(fresh, jnp.asarray(new).astype(jnp.uint64), old)

    first, second = [*values, None, None][:2]
    return Noted(kept(noted.code, code), kept(noted.address, address), kept(noted.first, first), kept(noted.second, second))


def found(noted: Noted) -> Found | None:
    """The fault of the statement that comes first, of the first thread that met it there; None if there is none."""
    codes = np.asarray(noted.code)
    if not codes.any():
        return None
    statements = np.where(codes != 0, codes >> np.uint64(STATEMENT), np.uint64(2**63))
    block, thread = (int(i) for i in np.unravel_index(int(statements.argmin()), codes.shape))
    code = int(codes[block, thread])
    first, second, address = (int(np.asarray(each)[block, thread]) for each in (noted.first, noted.second, noted.address))
    message = MESSAGES[_codes[code & (ADDRESS - 1)]]
    return Found(message, (first, second), code >> STATEMENT, block, thread, address if code & ADDRESS else None)


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
    race_write=Message("thread {0} wrote another value there since the last barrier", UndefinedBehaviour, "shared"),
    race_read=Message("thread {0} wrote there since the last barrier", UndefinedBehaviour, "shared"),
    race_overwrite=Message("thread {0} read there since the last barrier", UndefinedBehaviour, "shared"),
)
