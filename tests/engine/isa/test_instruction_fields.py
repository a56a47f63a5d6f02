"""`Instruction`: fields, spelling, and the derived signature against the manual's tables."""

import pytest

from tcemu.engine.isa.families import BlockScaling, spellings
from tcemu.engine.isa.grammar import parse
from tcemu.engine.isa.legality import check, instructions, targets
from tcemu.engine.isa.syntax_table import syntax_rows
from tcemu.formats import FORMATS

# 32-bit registers of A, B and C as PTX ISA 9.7.14.5.1 to .13 list them in words; an .f64 register is two words
REGISTERS = {
    "mma.sync.aligned.m8n8k4.row.col.f16.f16.f16.f16": (2, 2, 4),
    "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32": (2, 2, 8),
    "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64": (2, 2, 4),
    "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32": (1, 1, 2),
    "mma.sync.aligned.m8n8k32.row.col.s32.u4.u4.s32": (1, 1, 2),
    "mma.sync.aligned.m8n8k128.row.col.s32.b1.b1.s32.xor.popc": (1, 1, 2),
    "mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32": (2, 1, 4),
    "mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64": (4, 2, 8),
    "mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16": (2, 1, 2),
    "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32": (2, 1, 4),
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32": (4, 2, 4),
    "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64": (8, 4, 8),
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": (4, 2, 4),
    "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64": (16, 8, 8),
    "mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32": (2, 1, 4),
    "mma.sync.aligned.m16n8k16.row.col.f16.e5m2.e5m2.f16": (2, 1, 2),
    "mma.sync.aligned.m16n8k32.row.col.s32.s4.s4.s32": (2, 1, 4),
    "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32": (4, 2, 4),
    "mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f16.e2m1.e3m2.f16": (4, 2, 2),
    "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.f32.e2m1.e2m1.f32.ue8m0": (4, 2, 4),
    "mma.sync.aligned.m16n8k64.row.col.s32.u4.s4.s32": (4, 2, 4),
    "mma.sync.aligned.m16n8k64.row.col.kind::mxf4.block_scale.f32.e2m1.e2m1.f32.ue8m0": (4, 2, 4),
    "mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc": (2, 1, 4),
    "mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc": (4, 2, 4),
}


# PTX registers (an .f64 is one) of A, B, C and D: the tables of PTX ISA 9.7.14.4.1 and the counts that LLVM's NVPTX tests hold
# (llvm/test/CodeGen/NVPTX/wmma.py, commit 0179af46, class MMAFrag): shape and element types -> A, B; then accumulators
MULTIPLICANDS = """
wmma.mma m16n16k16 u8 s8 2 2, m8n32k16 u8 s8 1 4, m32n8k16 u8 s8 4 1, m16n16k16 bf16 4 4, m8n32k16 bf16 2 8, m32n8k16 bf16 8 2
wmma.mma m16n16k16 f16 8 8, m8n32k16 f16 8 8, m32n8k16 f16 8 8, m16n16k8 tf32 4 4, m8n8k4 f64 1 1, m8n8k32 u4 s4 1 1, m8n8k128 b1 1 1
mma m8n8k4 f16 2 2, m8n8k4 f64 1 1, m8n8k16 u8 s8 1 1, m8n8k32 u4 s4 1 1, m8n8k128 b1 1 1, m16n8k4 tf32 2 1, m16n8k8 f16 bf16 2 1
mma m16n8k8 tf32 4 2, m16n8k16 f16 bf16 4 2, m16n8k16 u8 s8 2 1, m16n8k32 u8 s8 4 2, m16n8k32 u4 s4 2 1, m16n8k64 u4 s4 4 2
mma m16n8k128 b1 2 1, m16n8k256 b1 4 2
mma.sp m16n8k16 f16 bf16 2 2, m16n8k32 f16 bf16 4 4, m16n8k8 tf32 2 2, m16n8k16 tf32 4 4, m16n8k32 u8 s8 2 2, m16n8k64 u8 s8 4 4
mma.sp m16n8k64 e4m3 e5m2 e3m2 e2m3 e2m1 4 4, m16n8k64 u4 s4 2 2, m16n8k128 u4 s4 e2m1 4 4
"""
ACCUMULATORS = """
wmma.mma m16n16k16 f16 4, m8n32k16 f16 4, m32n8k16 f16 4, m16n16k16 f32 s32 8, m8n32k16 f32 s32 8, m32n8k16 f32 s32 8, m16n16k8 f32 8
wmma.mma m8n8k4 f64 2, m8n8k32 s32 2, m8n8k128 s32 2
mma m8n8k4 f16 4, m8n8k4 f32 8, m8n8k4 f64 2, m8n8k16 s32 2, m8n8k32 s32 2, m8n8k128 s32 2, m16n8k4 f32 4, m16n8k8 f16 2, m16n8k8 f32 4
mma m16n8k16 f16 2, m16n8k16 f32 s32 4, m16n8k32 f16 2, m16n8k32 f32 s32 4, m16n8k64 f32 s32 4, m16n8k128 s32 4, m16n8k256 s32 4
mma.sp m16n8k8 f32 4, m16n8k16 f16 2, m16n8k16 f32 4, m16n8k32 f16 2, m16n8k32 f32 s32 4, m16n8k64 f16 2, m16n8k64 f32 s32 4
mma.sp m16n8k128 f32 s32 4
"""


def table(text: str, counts: int) -> dict[tuple[str, str, str], tuple[int, ...]]:
    """(family, shape, element type) -> registers."""
    found = {}
    for line in text.split("\n"):
        family, _, entries = line.partition(" ")
        for shape, *words in (entry.split() for entry in entries.split(",") if entry.strip()):
            found |= {(family, shape, name): tuple(map(int, words[-counts:])) for name in words[:-counts]}
    return found


def test_registers_equal_llvms_and_wmmas_tables():
    multiplicands, accumulators = table(MULTIPLICANDS, 2), table(ACCUMULATORS, 1)
    met = set()
    for op in syntax_rows():
        for operand in "abcd" if op.family in ("mma", "mma.sp", "wmma.mma") else ():
            element = getattr(op, operand)
            words, at = (multiplicands, "ab".index(operand)) if operand in "ab" else (accumulators, 0)
            key = (op.family, op.shape, element.name)
            if key in words:
                met.add((operand in "ab", *key))
                assert op.register_count(operand) == words[key][at] * (2 if element.bits == 64 else 1), (str(op), operand)
    assert len(met) == len(multiplicands) + len(accumulators) == 103


MOVED = """
ldmatrix.sync.aligned.m8n8.x1.b16 1, ldmatrix.sync.aligned.m8n8.x2.trans.b16 2, ldmatrix.sync.aligned.m8n8.x4.b16 4
ldmatrix.sync.aligned.m16n16.x1.trans.b8 2, ldmatrix.sync.aligned.m16n16.x2.trans.b8 4
ldmatrix.sync.aligned.m16n16.x1.trans.b8x16.b6x16_p32 2, ldmatrix.sync.aligned.m16n16.x2.trans.b8x16.b4x16_p64 4
ldmatrix.sync.aligned.m8n16.x1.b8x16.b6x16_p32 1, ldmatrix.sync.aligned.m8n16.x2.b8x16.b4x16_p64 2
ldmatrix.sync.aligned.m8n16.x4.b8x16.b6x16_p32 4, stmatrix.sync.aligned.m8n8.x1.b16 1, stmatrix.sync.aligned.m8n8.x4.trans.b16 4
stmatrix.sync.aligned.m16n8.x1.trans.b8 1, stmatrix.sync.aligned.m16n8.x2.trans.b8 2, stmatrix.sync.aligned.m16n8.x4.trans.b8 4
wmma.load.a.sync.aligned.row.m8n32k16.f16 8, wmma.load.b.sync.aligned.col.m8n32k16.u8 4, wmma.load.c.sync.aligned.row.m8n8k4.f64 4
wmma.store.d.sync.aligned.row.m16n16k16.f16 4
"""  # as LLVM and the manual count them; an f64 is two words


@pytest.mark.parametrize("entry", [entry.strip() for line in MOVED.split("\n") for entry in line.split(",") if entry.strip()])
def test_registers_moved(entry):
    spelling, count = entry.split()
    assert parse(spelling).register_count("r") == int(count)


@pytest.mark.parametrize("spelling", REGISTERS)
def test_registers_equal_the_manuals(spelling):
    op = parse(spelling)
    assert tuple(op.register_count(x) for x in "abc") == REGISTERS[spelling]
    assert str(op) == spelling


def test_fields():
    op = parse("mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3")
    assert (op.family, op.m, op.n, op.k, op.alayout, op.blayout) == ("mma", 16, 8, 64, "row", "col")
    assert (op.kind, op.scaling) == ("mxf4nvf4", BlockScaling(4, FORMATS["ue4m3"]))
    assert (op.d, op.a, op.b, op.c) == tuple(FORMATS[name] for name in ("f32", "e2m1", "e2m1", "f32"))
    assert (op.satfinite, op.rounding, op.bit_op) == (False, None, None)
    assert (op.scaling.byte_ids, op.scaling.thread_ids["a"], op.scaling.thread_ids["b"]) == ((0,), (0, 1), (0, 1, 2, 3))  # table 37
    assert op.matrix_shape("scale_a") == (16, 4) and op.matrix_shape("scale_b") == (4, 8)  # table 35
    assert op.operands == ("d", "a", "b", "c", "scale_a", "selector_a", "scale_b", "selector_b")
    assert op.register_count("scale_a") == 1


def test_defaults_are_the_same_instruction():
    f64 = "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64"
    assert parse(f64) == parse(f64 + ".rn") and parse(f64).rounding == "rn" and parse(f64) != parse(f64 + ".rz")
    mxf4 = "mma.sync.aligned.m16n8k64.row.col.kind::mxf4.block_scale{}.f32.e2m1.e2m1.f32.ue8m0"
    assert parse(mxf4.format("")) == parse(mxf4.format(".scale_vec::2X"))
    assert spellings(parse(mxf4.format(""))) == (mxf4.format(""), mxf4.format(".scale_vec::2X"))


def test_round_trip_and_hash():
    everything = {op for target in targets() for op in instructions(target)}
    assert everything == set(syntax_rows())
    for op in everything:
        assert parse(str(op)) == op
        assert all(parse(spelling) is parse(str(op)) for spelling in spellings(op))
        assert parse(op) is op
    assert len(everything) == len({str(op) for op in everything})


def test_operand_that_does_not_exist():
    op = parse("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32")
    for operand in ("e", "scale_a", ""):
        with pytest.raises(ValueError, match="operand"):
            op.register_count(operand)
    assert op.scaling is None and op.sparsity is None
    with pytest.raises(ValueError, match="block scales"):
        op.require_scaling()


# elements of one metadata chunk, selectors, and chunks a row, as the text of PTX ISA 9.7.14.6.1, 9.7.14.6.2 and 9.7.15.6.1 gives them
SPARSE = {
    "mma.sp.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16": (4, 4, 4),
    "mma.sp.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32": (4, 2, 8),
    "mma.sp.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32": (2, 4, 4),
    "mma.sp.sync.aligned.m16n8k16.row.col.f32.tf32.tf32.f32": (2, 2, 8),
    "mma.sp.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32": (4, 2, 8),
    "mma.sp.sync.aligned.m16n8k64.row.col.s32.s8.s8.s32": (4, 1, 16),
    "mma.sp.sync.aligned.m16n8k64.row.col.f32.e5m2.e4m3.f32": (4, 1, 16),
    "mma.sp.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32": (8, 2, 8),
    "mma.sp.sync.aligned.m16n8k128.row.col.s32.u4.u4.s32": (8, 1, 16),
    "mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.kind::f8f6f4.f32.e2m1.e2m1.f32": (4, 1, 16),
    "mma.sp::ordered_metadata.sync.aligned.m16n8k128.row.col.kind::mxf4.block_scale.f32.e2m1.e2m1.f32.ue8m0": (8, 1, 16),
    "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16": (4, 2, 8),
    "wgmma.mma_async.sp.sync.aligned.m64n8k16.f32.tf32.tf32": (2, 2, 8),
    "wgmma.mma_async.sp.sync.aligned.m64n8k64.s32.s8.s8": (4, 1, 16),
}


@pytest.mark.parametrize("spelling", SPARSE)
def test_metadata(spelling):
    op = parse(spelling)
    metadata = "sp_meta" if op.warps == 4 else "e"
    chunk, selectors, chunks = SPARSE[spelling]
    assert (op.chunk_size, op.selectors, op.matrix_shape(metadata)) == (chunk, tuple(range(selectors)), (op.m, chunks))
    assert op.matrix_shape("a") == (op.m, op.k // 2) and op.matrix_shape("b") == (op.k, op.n) and op.register_count(metadata) == 1


def test_forms_of_wgmma():
    def forms(text):
        return [" ".join(form) for form in parse(text).operand_forms]

    bf16 = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16"
    scales = "scale_d imm_scale_a imm_scale_b"
    assert forms(bf16) == [f"d a_desc b_desc {scales} imm_trans_a imm_trans_b", f"d a b_desc {scales} imm_trans_b"]
    assert forms("wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32") == [f"d a_desc b_desc {scales}", f"d a b_desc {scales}"]
    sparse = "wgmma.mma_async.sp.sync.aligned.m64n8k64.s32.u8.u8"
    assert forms(sparse) == ["d a_desc b_desc sp_meta sp_sel scale_d", "d a b_desc sp_meta sp_sel scale_d"]
    assert parse(bf16).register_count("a") == 4 and parse(bf16.replace("n8", "n256")).register_count("d") == 128


# rows of the table of default strides in PTX ISA 9.7.14.4.2: A row, A col, B row, B col, accumulator row, accumulator col
STRIDES = {
    ("m16n16k16", "f16", "f32"): (16, 16, 16, 16, 16, 16),
    ("m8n32k16", "f16", "f32"): (16, 8, 32, 16, 32, 8),
    ("m32n8k16", "f16", "f32"): (16, 32, 8, 16, 8, 32),
    ("m8n8k32", "s4", "s32"): (32, None, None, 32, 8, 8),  # A is row, B is col only
    ("m8n8k128", "b1", "s32"): (128, None, None, 128, 8, 8),
    ("m16n16k8", "tf32", "f32"): (8, 16, 16, 8, 16, 16),
    ("m8n8k4", "f64", "f64"): (4, 8, 8, 4, 8, 8),
}


@pytest.mark.parametrize("shape", STRIDES)
def test_default_strides(shape):
    (name, multiplicand, accumulator), strides = shape, STRIDES[shape]
    for (operand, layout), stride in zip([(o, x) for o in "abc" for x in ("row", "col")], strides, strict=True):
        if stride is not None:
            element = accumulator if operand == "c" else multiplicand
            assert parse(f"wmma.load.{operand}.sync.aligned.{layout}.{name}.{element}").default_stride == stride
    assert not hasattr(parse("movmatrix.sync.aligned.m8n8.trans.b16"), "default_stride")


def test_statement_is_kept_as_text():
    text = "@!%p1 wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16\n {%f0, %f1,%f2,\t%f3}, {%r0,%r1,%r2,%r3}, %d1, 1, -1,-1, 1;"
    op = parse(text)
    assert op.guard == "!%p1"
    assert op.arguments == ("{%f0, %f1,%f2, %f3}", "{%r0,%r1,%r2,%r3}", "%d1", "1", "-1", "-1", "1")
    assert op == parse(str(op)) and hash(op) == hash(parse(str(op))) and parse(str(op)).arguments == ()
    other = parse("movmatrix.sync.aligned.m8n8.trans.b16 %r1, %r2;")
    assert other.arguments == ("%r1", "%r2") and check(other, "sm_90").arguments == other.arguments
