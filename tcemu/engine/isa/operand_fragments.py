"""Fragments of an instruction's register operands: rows of `layouts.fragment_layouts`, selected by the instruction's fields."""

from tcemu.engine.formats.number_formats import F16, Format
from tcemu.engine.isa.families import WMMA_F16_REGISTERS, Instruction, MatrixMultiply, Mma, Mover, Wmma, WmmaMemory
from tcemu.engine.isa.tcgen05 import Tcgen05Product
from tcemu.engine.layouts.fragment_layouts import Fragment, metadata_fragment, mma_fragment, mover_fragment, scale_fragment, wmma_fragment

WMMA_SM = 90  # number of the default target; from sm_75 on only the wmma fragment of the s32 accumulators of m8n32k16 differs by target


def matrix_fragment(op: MatrixMultiply | WmmaMemory, operand: str, sm: int = WMMA_SM) -> Fragment:
    """Return the fragment of "a", "b", "c" or "d" of mma, mma.sp or wmma, or of "a" or "d" of wgmma.

    Args:
        op: The instruction.
        operand: Name of the operand.
        sm: Number of the target, for wmma; the fragments of other instructions are the same on all targets.

    Source: PTX ISA 9.7.14.4.1, 9.7.14.5, 9.7.14.6.2, 9.7.15.5.1.1.
    """
    if isinstance(op, Tcgen05Product):
        raise ValueError(
            f"{op}: its operands lie in shared memory and in tensor memory, not in registers; "
            "tcemu.engine.instructions.tcgen05 computes with "
            "them there, and tcemu.engine.layouts.tensor_memory has their places. PTX ISA 9.7.16"
        )
    if isinstance(op, WmmaMemory):
        return _wmma(op, operand, op.layout, sm)
    layout = {"a": op.alayout, "b": op.blayout}.get(operand) if isinstance(op, Mma | Wmma) else None
    if isinstance(op, Wmma):
        return _wmma(op, operand, layout or "row", sm)
    volta = layout if op.matrix_count == 4 else None
    sparse = op.sparse and operand == "a"
    return mma_fragment(operand, (op.m, op.n, op.k), op.container_bits(operand), volta=volta, warps=op.warps, sparse=sparse)


def register_fragments(op: Instruction) -> dict[str, Fragment]:
    """Return the fragments of an instruction's register operands, by the operand's name in the manual.

    Metadata has the axes [selector, 16 rows, chunks] of one warp, scales [thread-id, byte-id group, matrix], and the movers' registers
    [matrix, memory row, index in the row].

    Args:
        op: Instruction. The fragments of wmma are valid for sm_75 and later.
    """
    if isinstance(op, Mover):
        if not op.uses_memory:
            return {"a": mover_fragment((8, 8), 1), "d": mover_fragment((8, 8), 1, trans=True)}
        return {"r": mover_fragment((op.m, op.n), op.num, trans=op.trans)}
    if isinstance(op, WmmaMemory):
        return {"r": matrix_fragment(op, op.operand)}
    if not isinstance(op, MatrixMultiply) or isinstance(op, Tcgen05Product):
        return {}
    fragments = {name: matrix_fragment(op, name) for name in ("abcd" if op.warps == 1 else "ad")}
    if op.sparse:
        fragments[op.metadata_operand] = metadata_fragment(op.k, op.container_bits("a"))
    if op.scaling is not None:
        fragments |= {f"scale_{name}": scale_fragment(name, op.scaling.count) for name in "ab"}
    return fragments


def _wmma(op: Wmma | WmmaMemory, operand: str, layout: str, sm: int) -> Fragment:
    fmt: Format = op.operand_format(operand)
    registers = WMMA_F16_REGISTERS if fmt == F16 and operand in "ab" else None
    return wmma_fragment(operand, (op.m, op.n, op.k), fmt.bits, sm=sm, layout=layout, registers=registers, integer=fmt.is_integer)
