"""Which fragment each register operand of an instruction has: a row of `layouts`, chosen by the instruction's own fields."""

from tcemu.formats import F16
from tcemu.isa.instructions import Instruction
from tcemu.layouts import Fragment, fragment, metadata_fragment, mover_fragment, scale_fragment, wmma_fragment

WMMA_F16_REGISTERS = 8  # of A and B with .f16 in every shape; what the matrix does not fill are copies. PTX ISA 9.7.14.4.1
WMMA_SM = 90  # sm_75 and later hold wmma's fragments alike, but for the s32 accumulators of m8n32k16


def matrix_fragment(op: Instruction, operand: str, sm: int = WMMA_SM) -> Fragment:
    """The fragment of "a", "b", "c" or "d" of mma, mma.sp or wmma, of "a" or "d" of wgmma; wmma's as the target number `sm` holds it.

    Source: PTX ISA 9.7.14.4.1, 9.7.14.5, 9.7.14.6.2, 9.7.15.5.1.1.
    """
    if op.family.startswith("wmma"):
        return _wmma(op, operand, sm)
    volta = {"a": op.alayout, "b": op.blayout}.get(operand) if op.products == 4 else None
    sparse = op.sparse and operand == "a"
    return fragment(operand, (op.m, op.n, op.k), op.container_bits(operand), volta=volta, warps=op.warps, sparse=sparse)


def fragments(op: Instruction) -> dict[str, Fragment]:
    """Every operand of `op` that lies in registers, by its name in the manual, with its fragment.

    Metadata is seen as [selector, 16 rows, chunks] of one warp, scales as [thread-id, byte-id group, matrix], the movers' registers as
    [matrix, memory row, place]; wmma's fragments are those of sm_75 and later.
    """
    if op.family in ("mma", "mma.sp", "wgmma", "wgmma.sp"):
        held = {name: matrix_fragment(op, name) for name in ("abcd" if op.warps == 1 else "ad")}
        if op.sparse:
            held[op.metadata] = metadata_fragment(op.k, op.container_bits("a"))
        if op.scale_vec is not None:
            held |= {f"scale_{name}": scale_fragment(name, op.scale_vec) for name in "ab"}
        return held
    if op.family.startswith("wmma"):
        if op.operand:
            return {"r": matrix_fragment(op, op.operand)}
        return {name: matrix_fragment(op, name) for name in "abcd"}
    if op.family == "movmatrix":
        return {"a": mover_fragment((8, 8), 1), "d": mover_fragment((8, 8), 1, trans=True)}
    if op.family in ("ldmatrix", "stmatrix"):
        return {"r": mover_fragment((op.m, op.n), op.num, trans=op.trans)}
    return {}


def _wmma(op: Instruction, operand: str, sm: int) -> Fragment:
    fmt = getattr(op, operand)
    registers = WMMA_F16_REGISTERS if fmt == F16 and operand in "ab" else None
    layout = op.layout or {"a": op.alayout, "b": op.blayout}.get(operand) or "row"
    return wmma_fragment(operand, (op.m, op.n, op.k), fmt.bits, sm=sm, layout=layout, registers=registers, integer=fmt.is_integer)
