"""The table of containers: what a unit reads where a code is narrower than the bits that hold it, and the rest of the bits is not zero.

PTX says where a code stands in its container, and nothing of the padding. `tcemu.engine.layouts.packing` has the places; each row here says
what a target does with the padding there, with its evidence. A format that is read as another one has the same values with padding of
zeros.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from tcemu.engine.architectures.evidence import Evidence, assumed
from tcemu.engine.architectures.model_rows import SM_100, SM_103_110, SM_120, SM_121, digested
from tcemu.engine.formats.number_formats import E2M1, E2M3, E3M2, UE4M3, Format
from tcemu.engine.isa.families import MatrixMultiply, Mma
from tcemu.engine.isa.targets import TARGETS
from tcemu.engine.layouts.packing import CONTAINERS

REGISTERS, SCALES = "registers of mma", "scales of mma"
LOADED, MULTIPLIED, TENSOR_MEMORY = "rows that ldmatrix unpacks", "shared memory of tcgen05.mma", "tensor memory of tcgen05.mma"
COPIED = "shared memory that cp.async.bulk.tensor writes"


class ContainerRow(NamedTuple):
    """One container on some targets."""

    targets: tuple[str, ...]
    place: str  # where the container is
    formats: tuple[Format, ...]
    container: str  # what holds the code
    padding: str  # what becomes of the other bits
    evidence: Evidence
    read_as: Format | None = None  # format as which the unit reads the container from its lowest bit on; None: the code's own format


def _card(words: int, operands: str) -> Evidence:
    return digested(("RTX PRO 6000",), operands, words)


IGNORED = "ignored"
_TCGEN05 = tuple(target for target in (*SM_100, *SM_103_110) if TARGETS[target].tensor_columns)


def _mma_rows(targets: tuple[str, ...], e2m1: Evidence, six_bits: Evidence, ue4m3: Evidence) -> Iterator[ContainerRow]:
    """Yield the rows of the operands of mma and mma.sp of .kind::f8f6f4 and mxf8f6f4, and of the scales."""
    fraction = "bits 0 and 1 are two more fraction bits, 6 and 7 are ignored"
    yield ContainerRow(targets, REGISTERS, (E2M1,), "bits 2 to 5 of a byte", fraction, e2m1, read_as=E2M3)
    yield ContainerRow(targets, REGISTERS, (E2M3, E3M2), "bits 0 to 5 of a byte", IGNORED, six_bits)
    yield ContainerRow(targets, SCALES, (UE4M3,), "bits 0 to 6 of a byte", IGNORED, ue4m3)


def _rows() -> Iterator[ContainerRow]:
    packed = partial(ContainerRow, formats=(E2M1, E2M3, E3M2), container="b4x16_p64, b6x16_p32")
    as_sm_120, not_shown = assumed("as sm_120"), assumed("no published word has padding other than zeros")
    yield from _mma_rows(
        SM_120,
        _card(1152, "e2m1 beside the types of .kind::f8f6f4"),
        _card(1280, "e2m3 and e3m2 beside e4m3, e5m2 and e2m1"),
        _card(256, "e2m1 with ue4m3 scales"),
    )
    yield from _mma_rows(SM_121, as_sm_120, as_sm_120, as_sm_120)
    yield packed(targets=SM_120, place=LOADED, padding=IGNORED, evidence=_card(544, "rows of any bytes"))
    yield packed(targets=(*_TCGEN05, *SM_121), place=LOADED, padding=IGNORED, evidence=as_sm_120)
    yield packed(targets=_TCGEN05, place=MULTIPLIED, padding=IGNORED, evidence=not_shown)
    yield ContainerRow(
        _TCGEN05, TENSOR_MEMORY, (E2M1,), "bits 2 to 5 of a byte", IGNORED,
        assumed("no published word has padding other than zeros; mma on sm_120 reads e2m3"),
    )  # fmt: skip
    yield ContainerRow(_TCGEN05, TENSOR_MEMORY, (E2M3,), "bits 0 to 5 of a byte", IGNORED, not_shown)
    yield ContainerRow(_TCGEN05, TENSOR_MEMORY, (E3M2,), "bits 1 to 6 of a byte", IGNORED, not_shown)
    not_stated = assumed("PTX ISA 5.5.1.1 does not say, and no GPU was seen")
    yield packed(targets=(*_TCGEN05, *SM_120, *SM_121), place=COPIED, padding="zeros are written", evidence=not_stated)


ROWS = tuple(_rows())
PADDED_SCALES = frozenset(fmt for row in ROWS if row.place == SCALES for fmt in row.formats)  # scales with a bit of padding in their byte


def decoded_op(op: MatrixMultiply, target: str) -> MatrixMultiply:
    """Return the instruction in whose formats a target decodes the registers of A and B: `op`, where padding is ignored.

    Args:
        op: The instruction.
        target: Target, as `tcemu.engine.isa.targets.resolve_target` returns it.
    """
    if not isinstance(op, Mma) or op.kind not in CONTAINERS:
        return op
    read_as = {fmt: row.read_as for row in ROWS if row.place == REGISTERS and target in row.targets and row.read_as for fmt in row.formats}
    return replace(op, a=read_as.get(op.a, op.a), b=read_as.get(op.b, op.b))
