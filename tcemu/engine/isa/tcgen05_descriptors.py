"""The instruction descriptor of tcgen05.mma, 32 bits: encoding, decoding, and what is wrong with one.

Source: PTX ISA 9.7.16.4.2, tables 42 to 44; CUTLASS mma_sm100_desc.hpp agrees.
"""

from collections.abc import Callable
from typing import NamedTuple

from tcemu.base.errors import Unsupported
from tcemu.engine.formats.number_formats import Format
from tcemu.engine.isa.tcgen05 import Tcgen05Mma, Tcgen05Product, find_depth, make_product, product_problem, scale_formats
from tcemu.engine.isa.tcgen05_kinds import FP4_KINDS, KINDS, SCALE_CODES, SCALE_IDS, KindRow

SECTION = "PTX ISA 9.7.16.4.2"
SCALE_FORMAT = 23  # lowest bit of the type of the scales
MAX_SHIFTS = (0, 8, 16, 32)  # of the zero-column mask of .ws, by bits 30 and 31
TRANSPOSABLE = ("f16", "bf16", "tf32", "e4m3", "e5m2", "s8", "u8")  # formats that may lie MN-major: table 51, CUTLASS


class InstructionDescriptor(NamedTuple):
    """A product, and what else the descriptor says of its operands."""

    product: Tcgen05Product
    negate_a: bool = False
    negate_b: bool = False
    transpose_a: bool = False  # True: MN-major
    transpose_b: bool = False
    selector: int = 0  # sparsity selector
    scale_a_id: int = 0
    scale_b_id: int = 0
    max_shift: int = 0  # largest column shift of .ws: 0, 8, 16 or 32


def encode_instruction_descriptor(described: InstructionDescriptor | Tcgen05Product) -> int:
    """Return the 32-bit instruction descriptor of a product.

    Args:
        described: The product, with the other fields where they are not 0.

    Raises:
        Unsupported: The descriptor cannot say this.
    """
    fields = described if isinstance(described, InstructionDescriptor) else InstructionDescriptor(described)
    op, kind = fields.product, KINDS[fields.product.kind]
    value = int(op.sparse) << 2 | kind.multiplicands[op.a] << 7 | kind.multiplicands[op.b] << 10 | op.n >> 3 << 17
    value |= fields.negate_a << 13 | fields.negate_b << 14 | fields.transpose_a << 15 | fields.transpose_b << 16
    if op.scaling is None:
        value |= fields.selector | int(op.satfinite) << 3 | kind.accumulators[op.d] << 4 | op.m >> 4 << 24
        value |= MAX_SHIFTS.index(fields.max_shift) << 30
    else:
        value |= fields.scale_b_id << 4 | SCALE_CODES[op.scaling.format] << SCALE_FORMAT | op.m >> 7 << 27 | fields.scale_a_id << 29
    depth = find_depth(op.instruction, op.k)
    value |= 0 if depth is None else sum((depth.code >> i & 1) << bit for i, bit in enumerate(kind.depth_bits))
    decoded = decode_instruction_descriptor(op.instruction, value)
    if decoded != fields:
        raise Unsupported(f"{op}: the instruction descriptor cannot say {fields}. {SECTION}")
    return value


def decode_instruction_descriptor(op: Tcgen05Mma, value: int) -> InstructionDescriptor:
    """Return what an instruction descriptor says.

    Args:
        op: The instruction as PTX spells it; its qualifiers decide how the bits are read.
        value: The descriptor.

    Raises:
        Unsupported: The descriptor is invalid for the instruction. The message names the field.
    """
    if not 0 <= value < 1 << 32:
        raise ValueError(f"idesc: got {value}; an instruction descriptor has 32 bits. {SECTION}")
    bits = lambda low, count: value >> low & (1 << count) - 1
    kind, given = KINDS[op.kind], f"{op}: instruction descriptor {value:#010x}"

    def fail(problem: str) -> Unsupported:
        return Unsupported(f"{given}: {problem}. {SECTION}")

    def look_up(name: str, code: int, codes: dict[Format, int]) -> Format:
        found = next((fmt for fmt, known in codes.items() if known == code), None)
        if found is None:
            raise fail(f"the type of {name} is {code}; .kind::{op.kind} has {', '.join(f'{i} {fmt}' for fmt, i in codes.items())}")
        return found

    if bits(2, 1) != op.sparse:
        raise fail(f"bit 2 is {bits(2, 1)}, but the instruction is {'sparse' if op.sparse else 'dense'}")
    a, b = look_up("A", bits(7, 3), kind.multiplicands), look_up("B", bits(10, 3), kind.multiplicands)
    reserved = kind.reserved
    if op.scaled:
        d, m = next(iter(kind.accumulators)), bits(27, 2) << 7
    else:
        d, m = look_up("D", bits(4, 2), kind.accumulators), bits(24, 5) << 4
        reserved = reserved | ({} if op.ws else {"30 and 31": 0b11 << 30}) | ({} if op.sparse else {"0 and 1": 0b11})
        reserved |= {} if op.kind == "i8" else {"3": 1 << 3}
    if wrong := [name for name, mask in reserved.items() if value & mask]:
        raise fail(f"bits {', '.join(wrong)} are reserved and must be 0")
    scale = _decode_scale(op, value, reserved, fail) if op.scaled else None
    saturates = op.kind == "i8" and bits(3, 1) == 1
    k = _decode_depth(op, kind, value, fail)
    product = make_product(op, m, bits(17, 6) << 3, d, a, b, scale=scale, satfinite=saturates, k=k)
    if problem := product_problem(product):
        raise fail(problem)
    found = InstructionDescriptor(
        product, negate_a=bits(13, 1) == 1, negate_b=bits(14, 1) == 1, transpose_a=bits(15, 1) == 1, transpose_b=bits(16, 1) == 1,
        selector=0 if op.scaled else bits(0, 2), scale_a_id=bits(29, 2) if op.scaled else 0, scale_b_id=bits(4, 2) if op.scaled else 0,
        max_shift=MAX_SHIFTS[bits(30, 2)] if op.ws else 0,
    )  # fmt: skip
    if problem := _operand_problem(found):
        raise fail(problem)
    return found


def _decode_depth(op: Tcgen05Mma, kind: KindRow, value: int, fail: Callable[[str], Unsupported]) -> int:
    """Return the K that the descriptor states."""
    code = sum((value >> bit & 1) << i for i, bit in enumerate(kind.depth_bits))
    depth = next((row for row in kind.depths if row.code == code), None)
    if depth is None:
        raise fail(f"the field of K is {code}; .kind::{op.kind} has {', '.join(f'{row.code} for {row.k}' for row in kind.depths)}")
    usual = 2 * kind.k
    if op.sparse and not depth.sparse:
        stated = f"2 x {depth.k}" if depth.k == usual else str(depth.k)
        raise fail(f"K of .kind::{op.kind} sparse is {usual}, not {stated}")
    return depth.k * (2 if op.sparse else 1)


def _decode_scale(op: Tcgen05Mma, value: int, reserved: dict[str, int], fail: Callable[[str], Unsupported]) -> Format:
    """Return the type of the scales that the descriptor states."""
    code = (value & ~sum(reserved.values())) >> SCALE_FORMAT & 0b11
    formats = scale_formats(op)
    known = {number: fmt for fmt, number in SCALE_CODES.items()}
    if known.get(code) not in formats:
        stated = f"scales of {known[code]}" if code in known else f"type {code} of the scales"
        raise fail(f"bit {SCALE_FORMAT} says {stated}, but they are {' or '.join(map(str, formats))}")
    return known[code]


def _operand_problem(found: InstructionDescriptor) -> str | None:
    """Return what is wrong with the fields that are not the product's, or None."""
    op = found.product
    for name, transposed, fmt in (("A", found.transpose_a, op.a), ("B", found.transpose_b, op.b)):
        if transposed and (fmt.name not in TRANSPOSABLE or op.kind in FP4_KINDS):
            return f"{name} of {fmt} cannot lie MN-major in .kind::{op.kind}"
    step = 16 * op.cta_group
    if found.transpose_b and op.b.bits == 8 and op.n % step:
        return f"N of an 8-bit MN-major B is a multiple of {step}, not {op.n}"
    if op.a.is_integer and (found.negate_a or found.negate_b):
        return "integers cannot be negated"
    if op.scaling is not None:
        for name, scale_id in (("SFA_ID", found.scale_a_id), ("SFB_ID", found.scale_b_id)):
            if scale_id not in SCALE_IDS[op.scaling.count]:
                return f"{name} is {scale_id}, but {op.scaling.count} scales per row take {SCALE_IDS[op.scaling.count]}"
    return None
