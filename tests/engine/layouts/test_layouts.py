"""Layouts against the manual's formulas, CuTe's atoms, hardware findings, and mutants of themselves."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensor_layouts
from oracles import layout_formulas as formulas
from support.layout_cases import CASES
from support.sampling import sample_cases
from tensor_layouts import atoms_nv
from tensor_layouts.layouts import idx2crd, size

from tcemu.engine.layouts import fragment_layouts as layouts
from tcemu.engine.layouts.fragment_layouts import (
    Fragment,
    Layout,
    metadata_fragment,
    mma_fragment,
    mover_fragment,
    scale_fragment,
    tile_sizes,
    wmma_fragment,
)
from tcemu.engine.layouts.packing import pack_registers, unpack_registers
from tcemu.formats import B1, F16, F32, F64, S4, S8

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
ROWS = {name: row for name, row in vars(layouts).items() if isinstance(row, Layout)}


# ---- the formulas


@every_case
def test_the_fragment_is_where_the_formula_says(case):
    """Every position is held once, or by every copy, and the registers are rows x columns x bits."""
    index, lanes = case.made.index(), math.prod(case.made.lanes)
    np.testing.assert_array_equal(index, case.want)
    assert (np.bincount(index.ravel(), minlength=math.prod(case.made.shape)) == case.copies).all()
    assert case.made.elements * lanes == math.prod(case.made.shape) * case.copies
    assert case.made.elements * case.bits % 32 == 0


@every_case
def test_decode_and_encode_are_inverses_under_batch_and_trailing_axes(case):
    shape = case.made.shape
    for batch, tail in (((), ()), ((3,), ()), ((2, 3), (2,))):
        matrix = np.arange(math.prod(batch + shape + tail)).reshape(batch + shape + tail)
        held = case.made.encode(matrix, trailing=len(tail))
        assert held.shape == (*batch, *case.made.lanes, case.made.elements, *tail)
        np.testing.assert_array_equal(case.made.decode(held, trailing=len(tail)), matrix)
        flat = matrix.reshape((*batch, math.prod(shape), *tail))
        np.testing.assert_array_equal(held, np.take(flat, case.want, axis=len(batch)))


def test_all_rows_are_tested_and_all_sections_transcribed():
    assert {case.made.layout for case in CASES} == set(ROWS.values())
    assert len({row.section for row in formulas.MANUAL}) == 13
    assert {(row.section, row.operand) for row in formulas.MANUAL} == {(f"9.7.14.5.{s}", x) for s in range(1, 14) for x in "abc"}


# ---- the manual's slips


def test_the_printed_formula_of_m16n8k256_is_no_bijection():
    """9.7.14.5.13 prints `+ i` for i < 64: 256 positions come twice and 256 never."""
    counts = np.bincount(formulas.table(formulas.literal_m16n8k256_a, 128, (16, 256)).ravel(), minlength=16 * 256)
    assert (counts == 0).sum() == 256 and (counts == 2).sum() == 256
    never = np.flatnonzero(counts == 0)
    assert set(never // 256) == set(range(8, 16)) and set(never % 256) == set(range(32))


SLIPPED = {
    "9.7.14.5.9 C .f16": mma_fragment("c", (16, 8, 16), 16),
    "9.7.14.6.2.2 B .f16": mma_fragment("b", (16, 8, 32), 16, sparse=True),
    "9.7.14.6.2.3 B .tf32": mma_fragment("b", (16, 8, 16), 32, sparse=True),
    "9.7.15.6.2.3 metadata": metadata_fragment(64, 8),
    "9.7.14.4.1 wmma C .f64": wmma_fragment("c", (8, 8, 4), 64, sm=80),
    "9.7.14.5.15 ldmatrix .m16n16.x1": mover_fragment((16, 16), 1, trans=True),
}


@pytest.mark.parametrize("slip", formulas.SLIPS, ids=lambda slip: slip.where)
def test_the_printed_list_of_elements_does_not_hold_the_matrix(slip):
    made = SLIPPED[slip.where]
    assert made.elements == slip.right
    assert sorted(slip.printed) != list(range(made.elements))
    held = made.index()[:, list(range(slip.right))]
    assert sorted(held.ravel()) == list(range(math.prod(made.shape)))


# ---- CuTe, by other authors


def _cute(layout, rows):
    """int[threads, values, 2]: the row and column that a CuTe layout of column-major offsets gives each thread's values."""
    threads, values = (size(mode) for mode in layout.shape)
    flat = [[layout(idx2crd((t, v), layout.shape)) for v in range(values)] for t in range(threads)]
    offsets = np.array(flat)
    return np.stack([offsets % rows, offsets // rows], axis=-1)


# ptx types of an atom -> bits. sm_120's k64 atoms are the layouts of .e2m1 whatever their name says: eight to a register
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f64": 64, "f32": 32, "s32": 32, "s8": 8, "s4": 4, "b1": 1, "e4m3": 8, "e5m2": 8}


def _types(atom):
    d, a, b, c = [part for part in atom.ptx.split(" ")[0].split(".") if part in BITS]
    k = atom.shape_mnk[2]
    packed = 4 if "SM120" in atom.name and k == (128 if "SPARSE" in atom.name else 64) else 0
    return BITS[d], packed or BITS[a], packed or BITS[b], BITS[c]


ATOMS = [atom for atom in vars(atoms_nv).values() if isinstance(atom, atoms_nv.MMAAtom)]
MMA = [a for a in ATOMS if a.ptx.startswith("mma.sync") and "complex" not in a.ptx and "sparse" not in a.ptx and "SM70" not in a.name]
MMA_SP = [a for a in ATOMS if a.ptx.startswith("mma.sync") and "sparse" in a.ptx]
VOLTA = [a for a in ATOMS if "SM70" in a.name]
WGMMA = [a for a in ATOMS if a.ptx.startswith("wgmma")]


def _equal(made, cute, transposed=False):
    """The fragment of ours holds what CuTe says, thread by thread. CuTe's B is N x K."""
    at = np.stack(np.unravel_index(made.index().reshape(cute.shape[:2]), made.shape)[-2:], axis=-1)
    np.testing.assert_array_equal(at[..., ::-1] if transposed else at, cute)


def test_cute_has_the_atoms_counted_here():
    assert (len(MMA), len(MMA_SP), len(VOLTA), len(WGMMA)) == (35, 4, 8, 46)


@pytest.mark.parametrize("atom", MMA, ids=lambda atom: atom.name)
def test_mma_against_cute(atom):
    (m, n, _), (_, a, b, c) = atom.shape_mnk, _types(atom)
    _equal(mma_fragment("a", atom.shape_mnk, a), _cute(atom.a_layout, m))
    _equal(mma_fragment("c", atom.shape_mnk, c), _cute(atom.c_layout, m))
    cute = _cute(atom.b_layout, n)
    if (
        atom.name == "SM80_16x8x32_S32S4S4S32_TN"
    ):  # a slip of theirs: strides (32, 1), 8 put 512 elements in 160 places; (64, 1), 8 is meant
        assert len({tuple(at) for at in cute.reshape(-1, 2)}) == 160
        cute = _cute(tensor_layouts.Layout(((4, 8), 8), ((64, 1), 8)), n)
    _equal(mma_fragment("b", atom.shape_mnk, b), cute, transposed=True)


@pytest.mark.parametrize("atom", MMA_SP, ids=lambda atom: atom.name)
def test_mma_sp_against_cute(atom):
    """CuTe's sparse A names the columns before half were dropped: two for each stored element."""
    (m, n, _), (_, a, b, c) = atom.shape_mnk, _types(atom)
    cute = _cute(atom.a_layout, m)
    assert (cute[:, 0::2, 0] == cute[:, 1::2, 0]).all() and (cute[:, 0::2, 1] + 1 == cute[:, 1::2, 1]).all()
    _equal(mma_fragment("a", atom.shape_mnk, a, sparse=True), cute[:, ::2] // [1, 2])
    _equal(mma_fragment("b", atom.shape_mnk, b, sparse=True), _cute(atom.b_layout, n), transposed=True)
    _equal(mma_fragment("c", atom.shape_mnk, c), _cute(atom.c_layout, m))


@pytest.mark.parametrize("atom", VOLTA, ids=lambda atom: atom.name)
def test_volta_against_cute(atom):
    a, b = atom.ptx.split(".")[4:6]
    quad = np.array([[atom.thr_id(t) + 4 * q for t in range(8)] for q in range(4)])  # product, thread of it -> lane
    for operand, layout, volta, bits in (
        ("a", atom.a_layout, a, 16),
        ("b", atom.b_layout, b, 16),
        ("c", atom.c_layout, None, _types(atom)[3]),
    ):
        made = mma_fragment(operand, (8, 8, 4), bits, volta=volta)
        q, row, column = np.unravel_index(made.index()[quad], made.shape)
        assert (q == np.arange(4)[:, None, None]).all()
        at = np.stack([column, row] if operand == "b" else [row, column], axis=-1)
        np.testing.assert_array_equal(at, np.broadcast_to(_cute(layout, 8), at.shape))


@pytest.mark.parametrize("n", sample_cases(sorted({atom.shape_mnk[1] for atom in WGMMA} | set(range(8, 257, 8))), 4))
def test_wgmma_accumulators_against_cute(n):
    atoms = [atom for atom in WGMMA if atom.shape_mnk[1] == n] or [atoms_nv.make_gmma_atom_ss(n)]
    for layout in {repr(atom.c_layout): atom.c_layout for atom in atoms}.values():
        _equal(mma_fragment("d", (64, n, 16), 32, warps=4), _cute(layout, 64))


@pytest.mark.parametrize("trans", (False, True))
@pytest.mark.parametrize("count", (1, 2, 4))
def test_ldmatrix_against_cute(count, trans):
    """CuTe counts bits of memory: register bits -> place in the rows that the lanes address, 16 bytes each."""
    name = f"SM75_U16x{2 * count}_LDSM_T" if trans else f"SM75_U32x{count}_LDSM_N"
    layout = getattr(atoms_nv, name).dst_layout_bits
    threads, values = (size(mode) for mode in layout.shape)
    bits = np.array([[layout(idx2crd((t, v), layout.shape)) for v in range(values)] for t in range(threads)])
    made = mover_fragment((8, 8), count, trans=trans)
    want = made.index()[..., None] * 16 + np.arange(16)
    if not trans:  # the whole rows: lane t holds bits 32 t .. 32 t + 31 of matrix j
        assert bits.shape == (32, 32 * count)
    np.testing.assert_array_equal(bits.reshape(want.shape), want)


# ---- a wrong row is seen


def _mutants():
    for name, row in ROWS.items():
        for side in ("fragment_axes", "matrix_axes"):
            text = getattr(row, side)
            for a, b in itertools.combinations(sorted(d for d in text if d.isalpha()), 2):
                yield name, side, a + b, dataclasses.replace(row, **{side: text.translate(str.maketrans(a + b, b + a))})


# Of META_ONE_ROW's s and k one is always 1, so that their order in the lane says nothing
SAME = {("META_ONE_ROW", "fragment_axes", "ks")}


def _differs(mutant, case):
    wrong = dataclasses.replace(case.made, layout=mutant)
    same = wrong.shape == case.made.shape and wrong.elements == case.made.elements
    return not (same and np.array_equal(wrong.index(), case.want))


def test_every_swap_of_two_digits_is_caught():
    mutants = list(_mutants())
    survived = {
        (name, side, pair)
        for name, side, pair, mutant in mutants
        if not any(_differs(mutant, c) for c in CASES if c.made.layout == ROWS[name])
    }
    assert survived == SAME
    assert len(mutants) == 394


# ---- no gather


MOVES = ("gather", "scatter", "dynamic_slice", "dynamic_update_slice", "dynamic-slice", "dynamic-update-slice", "while", "sort")
FORMATS = {1: B1, 4: S4, 8: S8, 16: F16, 32: F32, 64: F64}


def _both_ways(case):
    """unpack and decode, encode and pack, with the argument and the shape of the result of each."""
    fmt, trailing = FORMATS[case.bits], int(case.bits == 64)
    tail = (2,) * trailing
    words = case.made.elements * case.bits // 32
    registers = jax.ShapeDtypeStruct((2, *case.made.lanes, words), jnp.uint32)
    codes = jax.ShapeDtypeStruct((2, *case.made.shape, *tail), fmt.dtype)
    yield (lambda r: case.made.decode(unpack_registers(r, fmt), trailing=trailing)), registers, codes.shape
    yield (lambda m: pack_registers(case.made.encode(m, trailing=trailing), fmt)), codes, registers.shape


@every_case
def test_the_trace_moves_digits_and_gathers_nothing(case):
    for function, example, shape in _both_ways(case):
        jaxpr = jax.make_jaxpr(function)(example)
        assert jaxpr.out_avals[0].shape == shape
        names = [equation.primitive.name for equation in jaxpr.eqns]
        assert not any(move in name for name in names for move in MOVES), names
        assert names.count("transpose") <= 1


# one case of each row, run and width, compiled
COMPILED = list({(c.made.layout, c.made.transposed, c.bits, c.copies): c for c in CASES}.values())


@pytest.mark.parametrize("case", sample_cases(COMPILED, 7, lambda case: case.name))
def test_the_compiled_program_gathers_nothing_and_is_right(case):
    (read, registers, _), (write, codes, _) = _both_ways(case)
    programs = [jax.jit(function).lower(example).compile() for function, example in ((read, registers), (write, codes))]
    for program in programs:
        text = program.as_text()
        assert "ENTRY" in text and not any(f" {move}(" in text for move in MOVES)
    words = np.random.default_rng(1).integers(0, 1 << 32, registers.shape, np.uint32)
    fmt, tail = FORMATS[case.bits], (2,) * (case.bits == 64)
    elements = np.asarray(unpack_registers(words, fmt))
    matrix = np.zeros((2, math.prod(case.made.shape), *tail), elements.dtype)
    for copy in reversed(range(case.copies)):  # copy 0, the lowest in lane and element, is read
        for batch in range(2):
            first = [np.flatnonzero(case.want.ravel() == at)[copy] for at in range(matrix.shape[1])]
            matrix[batch] = elements[batch].reshape(-1, *tail)[first]
    matrix = matrix.reshape(codes.shape)
    np.testing.assert_array_equal(programs[0](words), matrix)
    held = np.take(matrix.reshape(2, -1, *tail), case.want, axis=1)
    np.testing.assert_array_equal(programs[1](matrix), np.asarray(pack_registers(held, fmt)))


def test_a_gather_would_be_seen():
    (case,) = (case for case in CASES if case.name == "9.7.14.5.1 m8n8k4 a 16 row")
    where = jnp.asarray(np.argsort(case.want.ravel()))
    lowered = jax.jit(lambda x: jnp.take(x.reshape(2, -1), where, axis=1)).lower(jnp.zeros((2, 32, case.made.elements)))
    assert " gather(" in lowered.compile().as_text() or "dynamic-slice(" in lowered.compile().as_text()


# ---- what is refused


@pytest.mark.parametrize(
    ("held", "seen", "copies"),
    [
        ("(g t) i", "g t", ""),
        ("(g t) i", "(g t) i j", ""),
        ("(g t) t", "g t", ""),
        ("(g t) i", "g (t t)", ""),
        ("(g d) i", "g i", ""),
        ("(g t) i", "g (t i)", "d"),
        ("(g d) i", "g (d i)", "d"),
    ],
)
def test_a_row_that_is_no_bijection_cannot_be_made(held, seen, copies):
    with pytest.raises(ValueError, match="same digits"):
        Layout(held, seen, copies)


@pytest.mark.parametrize("side", ["(g t", "g  t", "(gt) i", "G t", "g, t", ")g(", "()"])
def test_a_row_that_is_not_written_as_digits_cannot_be_made(side):
    with pytest.raises(ValueError, match="one-letter"):
        Layout(side, side)


def test_the_errors_name_the_argument_and_the_sizes():
    sizes = tile_sizes(16, 8, 2)
    tile = Fragment(layouts.TILE, tuple(sizes.items()))
    with pytest.raises(ValueError, match=r"elements: .*w=1, g=8, t=4, m=2, c=1, p=2 needs .*got shape \(31, 4\)"):
        tile.decode(np.zeros((31, 4)))
    with pytest.raises(ValueError, match=r"matrix: .*\[..., 16, 8\].*got shape \(8,\)"):
        tile.encode(np.zeros(8))
    with pytest.raises(ValueError, match="each of the digits w g t c m p"):
        Fragment(layouts.TILE, (("g", 8), ("t", 4)))
    with pytest.raises(ValueError, match="each of the digits"):
        Fragment(layouts.TILE, tuple((sizes | dict(x=1)).items()))
    with pytest.raises(ValueError, match="size of 1 or more"):
        Fragment(layouts.TILE, tuple((sizes | dict(w=0)).items()))
    made = mma_fragment("a", (16, 8, 16), 16)
    with pytest.raises(ValueError, match=r"elements: .*\[..., 32, 8\].* \(32, 4\)"):
        made.decode(np.zeros((32, 4)))
    with pytest.raises(ValueError, match=r"and 1 trailing.*got shape \(32, 8\)"):
        made.decode(np.zeros((32, 8)), trailing=1)
    with pytest.raises(ValueError, match=r"elements: .*\[..., 4, 32, 4\]"):
        mma_fragment("d", (64, 8, 16), 32, warps=4).decode(np.zeros((128, 4)))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: mma_fragment("e", (16, 8, 16), 16), "operand: 'e' .*'a', 'b', 'c', 'd'"),
        (lambda: mma_fragment("a", (16, 8, 12), 16), "16 x 12: .*multiple of 8"),
        (lambda: mma_fragment("a", (8, 8, 4), 8), "tile of 8 x 4"),
        (lambda: mma_fragment("a", (8, 8, 4), 16), "volta: None .*'row', 'col'"),
        (lambda: mma_fragment("c", (8, 8, 4), 16, volta="row"), "volta: 'row' for c"),
        (lambda: mma_fragment("a", (16, 8, 16), 16, volta="row"), "only A and B of m8n8k4 .f16"),
        (lambda: mma_fragment("b", (64, 8, 16), 16, warps=4), "shared memory"),
        (lambda: metadata_fragment(32, 4), r"\(bits, k\): \(4, 32\)"),
        (lambda: scale_fragment("c", 1), "operand: 'c'"),
        (lambda: scale_fragment("a", 3), "scale_vec: 3"),
        (lambda: mover_fragment((16, 16), 1), r"\(\(16, 16\), False\)"),
        (lambda: wmma_fragment("a", (16, 16, 16), 16, sm=90, registers=6), "registers: a of m16n16k16, 16 bits, fills 4; got 6"),
        (lambda: wmma_fragment("c", (16, 16, 16), 32, sm=90, registers=4), "registers: c of m16n16k16, 32 bits, fills 8; got 4"),
        (lambda: wmma_fragment("a", (16, 16, 16), 16, sm=70, registers=4), "fills 8; got 4"),
        (lambda: wmma_fragment("a", (16, 16, 16), 8, sm=70), "bits: 8 .*16"),
        (lambda: wmma_fragment("a", (16, 16, 16), 16, sm=90, layout="x"), "layout: 'x'"),
        (lambda: wmma_fragment("a", (64, 16, 16), 16, sm=90), r"\(operand, rows\): \('a', 64\)"),
        (lambda: wmma_fragment("a", (16, 16, 8), 16, sm=70), r"shape: \(16, 16, 8\)"),
    ],
)
def test_what_no_fragment_is_is_refused(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_a_fragment_may_be_static():
    made = mma_fragment("b", (16, 8, 16), 16)
    assert made == mma_fragment("b", (16, 8, 16), 16) and hash(made) == hash(mma_fragment("b", (16, 8, 16), 16))
    assert made != Fragment(made.layout, made.sizes)
    decode = jax.jit(Fragment.decode, static_argnums=0)
    np.testing.assert_array_equal(decode(made, jnp.asarray(made.index())), np.arange(128).reshape(16, 8))
    assert (made.rows, made.columns, made.lanes) == (16, 8, (32,))
