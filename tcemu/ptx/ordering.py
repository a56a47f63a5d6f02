"""Instructions that order or hint, and change nothing here: every access is seen by all threads at once. And address spaces.

Source: PTX ISA 9.7.9.15 to 9.7.9.21, 9.7.13.
"""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np

from tcemu.errors import Unsupported
from tcemu.ptx import checks, memory
from tcemu.ptx.context import Context, Operation, Prepare, Step
from tcemu.ptx.memory import CONST_ROOM, LOCAL_ROOM, PARAM_ROOM, ROOM_BITS, SHARED_ROOM, window
from tcemu.ptx.module import Integer, Register, Statement

SCOPES = "cta|cluster|gpu|sys"


def _nothing(pattern: str, orders: bool = False) -> Prepare:
    """An instruction that changes nothing; pattern: its qualifiers, joined by dots. orders: it orders accesses of its threads."""

    def prepare(statement: Statement, context: Context) -> Step:
        if not re.fullmatch(pattern, ".".join(statement.qualifiers)):
            raise Unsupported(f"{statement.opcode!r} is not run: its qualifiers are none that are known for {statement.name!r}")
        return Step(checks.forget if orders else lambda machine: machine)

    return prepare


def prepare_sync(statement: Statement, context: Context) -> Step:
    """`bar.warp.sync`: lanes of a warp meet. What orders their accesses orders them here already."""
    if statement.opcode != "bar.warp.sync" or len(statement.operands) != 1:
        raise Unsupported(f"{statement.opcode!r} is not run here; bar.warp.sync takes one operand, the member mask")
    return Step(checks.forget_warps, together=True)


# ---- generic addresses


def _room(space: str, context: Context) -> int | None:
    """The room of a space in generic addresses; None: addresses in the space are generic ones."""
    if space.startswith("param"):
        return PARAM_ROOM if context.function.entry else LOCAL_ROOM
    return {"shared": SHARED_ROOM, "shared::cta": SHARED_ROOM, "shared::cluster": SHARED_ROOM, "local": LOCAL_ROOM}.get(space)


SPACES = ("global", "const", "local", "shared", "shared::cta", "shared::cluster", "param", "param::entry")


def prepare_cvta(statement: Statement, context: Context) -> Operation:
    """`cvta`: between an address in a space and the generic one (9.7.9.20)."""
    parts = statement.qualifiers
    back = parts[:1] == ("to",)
    space, kind = (*parts[back:], "", "")[:2]
    if space not in SPACES or kind != "u64" or len(parts) != 2 + back:
        raise Unsupported(f"{statement.opcode!r} is not run; cvta[.to].space.u64 is, with {', '.join(SPACES)}")
    room = _room(space, context)
    start = 0 if room is None else window(room)
    return _moved_by(np.uint64((-start if back else start) % 2**64))


_moves: dict[int, Operation] = {}


def _moved_by(offset: np.uint64) -> Operation:
    """One and the same operation for each offset."""
    return _moves.setdefault(int(offset), Operation(("u64",), ("u64",), lambda address: (address + offset,)))


def prepare_isspacep(statement: Statement, context: Context) -> Operation:
    """`isspacep`: whether a generic address lies in a space (9.7.9.19)."""
    space = ".".join(statement.qualifiers)
    if space not in SPACES:
        raise Unsupported(f"{statement.opcode!r} is not run; isspacep takes one of {', '.join(SPACES)}")
    if space == "global":
        return _in_rooms(memory.FIRST_ROOM, 1 << 64 - ROOM_BITS)
    room = CONST_ROOM if space == "const" else _room(space, context)
    return _in_rooms(room or 0, (room or 0) + 1)


_tests: dict[tuple[int, int], Operation] = {}


def _in_rooms(first: int, stop: int) -> Operation:
    def compute(address):
        room = address >> np.uint64(ROOM_BITS)
        return ((room >= np.uint64(first)) & (room < np.uint64(stop)),)

    return _tests.setdefault((first, stop), Operation(("pred",), ("u64",), compute))


def prepare_mapa(statement: Statement, context: Context) -> Operation:
    """`mapa`: an address in the shared memory of another block of the cluster; clusters have one block here, of rank 0 (9.7.9.23)."""
    parts = statement.qualifiers
    kind = parts[-1] if parts else ""
    if parts[:-1] not in ((), ("shared::cluster",)) or kind not in ("u32", "u64") or len(statement.operands) != 3:
        raise Unsupported(f"{statement.opcode!r} is not run; mapa[.shared::cluster].u32 and .u64 are")
    rank = statement.operands[2]
    if isinstance(rank, Integer) and rank.value:
        raise Unsupported(f"{statement.opcode!r} of the block of rank {rank.value} is not run: clusters have one block, of rank 0")
    return MAPA[kind]


def _mapped(kind: str) -> Operation:
    return Operation((kind,), (kind, "u32"), lambda address, rank: (jnp.where(rank == 0, address, ~address),))


MAPA = {kind: _mapped(kind) for kind in ("u32", "u64")}


def prepare_getctarank(statement: Statement, context: Context) -> Operation:
    """`getctarank`: 0, the one block of its cluster (9.7.9.24)."""
    if not isinstance(statement.operands[0], Register) or ".".join(statement.qualifiers) not in ("u32", "u64", "shared::cluster.u32"):
        raise Unsupported(f"{statement.opcode!r} is not run; getctarank.u64 and getctarank.shared::cluster.u32 are")
    return RANK


RANK = Operation(("u32",), ("u64",), lambda address: (jnp.zeros(address.shape, jnp.uint32),))

FENCE = (
    r"((sc|acq_rel)\.)?(cta|cluster|gpu|sys)|(acquire|release)\.sync_restrict::shared::(cta|cluster)\.cluster|mbarrier_init\.release\.cluster"
    r"|proxy\.(alias|async(\.(global|shared::cta|shared::cluster|shared))?|tensormap::generic\.\w+\.\w+|async::generic\..*)"
)
PREFETCH = r"(global|local)?\.?(L1|L2|L2::evict_last|L2::evict_normal)|tensormap|(const|param)\.tensormap"
PREPARE: dict[str, Prepare] = {
    "membar": _nothing(r"cta|gl|sys|(sc\.|acq_rel\.)?(cta|cluster|gpu|sys)|proxy\..*", orders=True),
    "fence": _nothing(FENCE, orders=True),
    "nanosleep": _nothing(r"u32"),
    "prefetch": _nothing(PREFETCH),
    "prefetchu": _nothing("L1"),
    "applypriority": _nothing(r"(global\.)?L2::evict_normal"),
    "discard": _nothing(r"(global\.)?L2"),
    "pmevent": _nothing("(mask)?"),
    "brkpt": _nothing(""),
    "bar": prepare_sync,
    "cvta": prepare_cvta,
    "isspacep": prepare_isspacep,
    "mapa": prepare_mapa,
    "getctarank": prepare_getctarank,
}
