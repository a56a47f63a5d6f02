"""Faults of a running kernel: each thread records the first fault that it meets, and the host raises one afterwards.

Families of instructions add their messages by `register_messages`; `Machine.fault` names a message by its key.
"""

from __future__ import annotations

from threading import Lock
from typing import Any, NamedTuple
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

HAS_ADDRESS = 1 << 31  # bit of a code: the fault has an address
STATEMENT_SHIFT = 32  # first bit of the statement's number in a code


class OutOfBounds(ValueError):
    """A kernel accessed memory outside its buffers and variables. A GPU reports "an illegal memory access"."""


class Misaligned(ValueError):
    """A kernel accessed an address that is no multiple of the access's size. A GPU reports "misaligned address"."""


class Trapped(ValueError):
    """A kernel executed `trap`."""


class Message(NamedTuple):
    """The message of a fault."""

    text: str  # with replacement fields for the values, as "{0}"
    error: type[ValueError]
    space: str = ""  # state space of the address, as "shared"; "" for a generic address


MESSAGES: dict[str, Message] = {}
_codes: dict[int, str] = {}
_lock = Lock()  # over both; statements are traced in any thread


def register_messages(**messages: Message) -> None:
    """Add messages by key. Raises ValueError if a key already has another message."""
    with _lock:
        for key, message in messages.items():
            if MESSAGES.setdefault(key, message) != message:
                raise ValueError(f"{key}: another message has this key: {MESSAGES[key].text}")


def known_messages() -> dict[str, Message]:
    """Return the messages of all codes that traced statements may record, by key."""
    with _lock:
        return {key: MESSAGES[key] for key in _codes.values()}


def restore_messages(messages: dict[str, Message]) -> None:
    """Give messages the codes that they had in the process that traced a stored statement."""
    register_messages(**messages)
    for key in messages:
        _register_code(key)


def _register_code(key: str) -> int:
    code = crc32(key.encode()) & (HAS_ADDRESS - 1) or 1
    with _lock:
        if _codes.setdefault(code, key) != key:
            raise ValueError(f"{key}: its code is that of {_codes[code]}; another key would do")
    return code


class FaultState(NamedTuple):
    """The first fault of every thread, uint64[blocks, threads] each."""

    code: Array  # 0: no fault
    address: Array
    first_value: Array  # for "{0}" of the message
    second_value: Array  # for "{1}"


class Fault(NamedTuple):
    """A fault on the host."""

    message: Message
    values: tuple[int, ...]
    statement: int  # the statement's number in the kernel
    block: int  # row in the chunk
    thread: int
    address: int | None


def no_faults(shape: tuple[int, ...]) -> FaultState:
    """Return the state in which no thread has met a fault."""
    return FaultState(*(jax.device_put(np.zeros(shape, np.uint64)) for _ in FaultState._fields))


def encode_fault(key: str, values: tuple[Any, ...], has_address: bool) -> tuple[int, list[Any]]:
    """Return the code of a message in which the integers among `values` are filled in, and the other values, which are arrays."""
    message = MESSAGES[key]
    known = [value if isinstance(value, int) else None for value in values]
    if any(value is not None for value in known):
        fields = iter(range(len(values)))
        shown = [value if value is not None else f"{{{next(fields)}}}" for value in known]
        key = f"{key} {shown}"
        register_messages(**{key: message._replace(text=message.text.format(*shown))})
    return _register_code(key) | HAS_ADDRESS * has_address, [value for value in values if not isinstance(value, int)]


def record_faults(state: FaultState, code: Array, address: Array | None, values: list[Array]) -> FaultState:
    """Record the faults of threads whose code is not 0, unless a thread already has one."""
    fresh = (code != 0) & (state.code == 0)

    def update(old: Array, new: Any) -> Array:
        return old if new is None else jnp.where(fresh, jnp.asarray(new).astype(jnp.uint64), old)

    first, second = [*values, None, None][:2]
    return FaultState(
        update(state.code, code), update(state.address, address), update(state.first_value, first), update(state.second_value, second)
    )


def first_fault(state: FaultState) -> Fault | None:
    """Return the fault of the earliest statement, of the first thread that met it there; None without a fault."""
    codes = np.asarray(state.code)
    if not codes.any():
        return None
    statements = np.where(codes != 0, codes >> np.uint64(STATEMENT_SHIFT), np.uint64(2**63))
    block, thread = (int(i) for i in np.unravel_index(int(statements.argmin()), codes.shape))
    code = int(codes[block, thread])
    first, second, address = (int(np.asarray(each)[block, thread]) for each in (state.first_value, state.second_value, state.address))
    message = MESSAGES[_codes[code & (HAS_ADDRESS - 1)]]
    return Fault(message, (first, second), code >> STATEMENT_SHIFT, block, thread, address if code & HAS_ADDRESS else None)


for _space in ("global", "shared", "shared::cluster", "local", "const", "param", ""):
    _named = _space or "generic"
    register_messages(
        **{
            f"bounds.{_named}": Message(f"{{0}} bytes of {_named} memory are out of bounds", OutOfBounds, _space),
            f"alignment.{_named}": Message(f"{{0}} bytes of {_named} memory must lie at a multiple of {{1}}", Misaligned, _space),
        }
    )
