"""`explain`: the words of `dot`, bits that add up to them, and the place where two arithmetics part."""

import json
import re
from fractions import Fraction
from itertools import combinations, pairwise

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from oracles import reference
from support import golden
from support import random_operands as operands
from support import recorded_cases as recorded
from support.sampling import sample_cases

import tcemu
from tcemu.base.errors import NotModelled
from tcemu.cli import main
from tcemu.engine.architectures.lookup import find_row
from tcemu.engine.arithmetic.reference.exact_values import decode, encode
from tcemu.engine.isa.legality import instructions
from tcemu.engine.layouts.sparsity import defined_fields
from tcemu.formats import F16, F32, S32

HALF = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
SCALED = "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.f32.e2m3.e5m2.f32.ue8m0"
NVFP4 = "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"
FAMILIES = ("mma", "mma.sp", "wmma.mma", "wgmma", "wgmma.sp")


def representatives() -> list:
    """One instruction for each arithmetic, family, K, types and modes, with a target that has it."""
    found = {}
    for target in ("sm_90a", "sm_120a"):
        for op in (op for family in FAMILIES for op in instructions(target, family)):
            try:
                model = find_row(op, target).model
            except NotModelled:
                continue
            types = (op.k, op.a, op.b, op.accumulator, op.d, op.rounding, op.satfinite, op.bit_op, op.kind, op.scaling)
            found.setdefault((op.family, model, *types), (op, target))
    return list(found.values())


CASES = representatives()
# every kind of arithmetic and every family; every run has one of three
DOUBLE = ("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64.rm", "sm_90a")
SPARSE_TF32 = ("mma.sp.sync.aligned.m16n8k16.row.col.f32.tf32.tf32.f32", "sm_90a")
SPARSE_INTEGERS = ("mma.sp.sync.aligned.m16n8k64.row.col.satfinite.s32.s8.u8.s32", "sm_90a")
ONE_BIT = ("wgmma.mma_async.sync.aligned.m64n8k256.s32.b1.b1.and.popc", "sm_90a")
SPARSE_SCALED = (
    "mma.sp::ordered_metadata.sync.aligned.m16n8k128.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3",
    "sm_120a",
)
SAMPLE = [
    ("mma.sync.aligned.m8n8k4.row.col.f16.f16.f16.f16", "sm_90a"),
    (HALF, "sm_90a"),
    ("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32", "sm_90a"),
    DOUBLE,
    SPARSE_TF32,
    SPARSE_INTEGERS,
    ("wmma.mma.sync.aligned.row.col.m16n16k16.f16.f32", "sm_90a"),
    ("wgmma.mma_async.sync.aligned.m64n8k32.f32.e5m2.e4m3", "sm_90a"),
    ONE_BIT,
    (SCALED, "sm_120a"),
    SPARSE_SCALED,
]


def words(fmt, codes):
    return operands.two_words(codes) if fmt.words == 2 else codes


def draw_codes(fmt, kind, shape, rng):
    return operands.integers(fmt.name, shape, rng) if fmt.is_integer else operands.codes(fmt.name, kind, shape, rng)


def scales(fmt, kind, shape, rng):
    """Codes of block scales: near one, anything, or the ends and NaN."""
    one = fmt.bias << fmt.mantissa_bits
    if kind == "special":
        return rng.choice(np.array([0, 1, 7, fmt.nan - 1, fmt.nan], np.uint8), shape)
    spread = 3 if kind in ("near one", "cancelling", "ties") else 40
    return np.clip(one + rng.integers(-spread, spread + 1, shape), 0, fmt.nan - 1).astype(np.uint8)


def tiles(op, rng):
    """A tile of each class of operands: codes of A, B, C, and what sparse and block-scaled instructions take besides."""
    more, c = {}, op.accumulator
    kinds = operands.CLASSES
    a = np.stack([draw_codes(op.a, kind, op.matrix_shape("a"), rng) for kind in kinds])
    b = np.stack([draw_codes(op.b, kind, op.matrix_shape("b")[::-1], rng) for kind in kinds])
    for tile, kind in enumerate(kinds):
        if kind == "cancelling":
            b[tile, :, 1::2] = b[tile, :, 0::2]
    accumulators = np.stack([draw_codes(c, kind, op.matrix_shape("d"), rng) for kind in kinds])
    if op.sparse:
        fields = defined_fields(op.chunk_size, op.ordered) if rng.random() < 0.5 or op.chunk_size == 8 else range(16)
        more["e"] = rng.choice(np.array(fields, np.uint8), (len(kinds), *op.matrix_shape("e" if op.family == "mma.sp" else "sp_meta")))
    if op.scaling:
        more |= {
            name: np.stack([scales(op.scaling.format, kind, op.matrix_shape(name), rng) for kind in kinds])
            for name in ("scale_a", "scale_b")
        }
    return a, np.swapaxes(b, -1, -2), accumulators, more


def compare(spelling, target, count, seed=0):
    """Elements of D, chosen at random over all tiles, in which `explain` and `dot` differ, of how many."""
    op, rng = tcemu.parse(spelling), np.random.default_rng(seed)
    a, b, c, more = tiles(op, rng)
    d = np.asarray(tcemu.dot(op, *(words(fmt, v) for fmt, v in ((op.a, a), (op.b, b), (op.d, c))), target=target, **more))
    d = operands.one_code(d) if op.d.words == 2 else d
    places = rng.permutation(d.size)[:count]
    wrong, looked = [], 0
    for t, i, j in zip(*np.unravel_index(places, d.shape), strict=True):
        own = {name: v[t, :, j] if name == "scale_b" else v[t, i] for name, v in more.items()}
        found = tcemu.explain(op, a[t, i], b[t, :, j], c[t, i, j], target=target, codes=True, **own)
        looked += readd(found)
        if found.result != int(d[t, i, j]):
            wrong.append(f"{(t, i, j)}: dot says {int(d[t, i, j]):#x}\n{found}")
    if not op.d.is_integer and min(len(places), 60) == 60:
        assert looked > len(places) // 2, "few printed steps were added up again"
    return wrong, len(places)


BITS = r"([+-])([01]+)\.([01]*)"
TERM = re.compile(rf"^(\S+(?: \d[\d+-]*)?) .*?{BITS}\|(-?)([01]*)(\.\.\.)?$")


def integer(sign, whole, fraction):
    return int(whole + fraction, 2) * (-1 if sign == "-" else 1)


def readd(found):
    """What is printed of each fused step adds up: terms to the sum, and the sum, rounded by the reference, to the result's word.

    Returns how many steps were looked at. Also: all that was cut and dropped is what the result lacks of the exact one.
    """
    op, steps = found.op, 0
    for block in str(found).split("\n\n"):
        if "aligned to 2^" not in block:
            continue
        point, last = (
            int(v) for v in re.search(r"aligned to 2\^(-?\d+),(?:.|\n)*?last\s+retained\s+bit\s+is\s+2\^(-?\d+)", block).groups()
        )
        total, unit = 0, Fraction(2) ** last
        for line in block.splitlines():
            term = TERM.match(line)
            if term is None or re.match(r"sum |R[NZMP] to ", line):
                continue
            name, *bits, added, cut, more = term.groups()
            assert len(bits[2]) == point - last
            total += integer(*bits)
            if name.startswith("k ") and name[2:].isdecimal() and not (op.sparse or op.scaling or more):
                k = int(name[2:])
                exact = reference.decode(op.a.name, found.a[k]) * reference.decode(op.b.name, found.b[k])
                rest = integer(bits[0], cut or "0", "") * unit / 2 ** len(cut)
                assert integer(*bits) * unit + (-rest if added else rest) == exact, line
        sign, whole, fraction = re.search(rf"^sum +{BITS}\|", block, re.M).groups()
        assert total == integer(sign, whole, fraction), block
        mode, name = re.search(r"^(R[NZMP]) to (\w+) ", block, re.M).groups()
        result = int(re.search(r"^result ([0-9a-f]+) = ", block, re.M)[1], 16)
        spec = reference.FORMATS["e8m13" if found.model.result_bits == 13 else name]
        want = reference._encode(spec, int(total < 0), abs(total), last, mode, always_inf=True) if total else 0
        assert result == (want if want << 1 & (1 << spec.bits) - 1 else 0), block
        rounded = re.search(rf"^{mode} to {name} +([+-])([01.]*)(?:/([01.]*))?\|$", block, re.M)
        value = reference.decode(name, result)
        if isinstance(value, Fraction):
            sign, kept, dropped = rounded.groups()
            lowest = last + len((dropped or "").replace(".", ""))
            assert int("0" + kept.replace(".", ""), 2) * Fraction(2) ** lowest == abs(value)
            if mode == "RZ":  # then the digits left and right of the mark are those of the sum
                assert int((kept + (dropped or "")).replace(".", ""), 2) == abs(total)
        steps += 1
    steps += check_chain(found)
    taken = [v for step in found.steps for v in (*(t.truncated for t in step.terms), step.rounding_loss)]
    if found.error is not None and None not in taken:
        assert found.exact - found.value == sum(taken)
    return steps


def check_chain(found):
    """Each printed word of a table of multiply-adds is the reference's, from the word before it. Returns how many there were."""
    op, rows = found.op, 0

    def held(code, source, name):
        return code if source == name else reference.convert(source, name, code)  # a conversion would make NaNs alike

    for block in str(found).split("\n\n"):
        title = re.match(r"steps? (\d+) .*: fused multiply-adds in (\w+), from (\S+) on, each\s+rounded (R[NZMP])", block)
        if title is None:
            continue
        first, name, start, mode = title.groups()
        zeros = {"nothing": 1 << reference.FORMATS[name].bits - 1, "+0": 0}
        running = zeros[start] if start in zeros else held(found.c, (op.accumulator).name, name)
        if start == "running":
            before = found.steps[int(first) - 2]
            running = held(before.result, before.fmt.name, name)
        for cells in (line.split() for line in block.splitlines() if re.match(r" *\d+  k ", line)):
            k = int(cells[2])
            running = reference.fma(held(found.a[k], op.a.name, name), held(found.b[k], op.b.name, name), running, name, mode)
            assert int(cells[6], 16) == running, block
            rows += 1
    return rows


@pytest.mark.parametrize("case", sample_cases(SAMPLE, 20, " ".join))
def test_explain_gives_the_words_of_dot(case):
    wrong, count = compare(*case, 60)
    assert count == 60 and wrong == [], f"{len(wrong)} of {count}: {wrong[:1]}"


def test_a_chain_from_zero_says_so():
    """m8n8k4 on sm_90a: 0 x -1 alone would be -0, and with C -0 the result."""
    found = tcemu.explain("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32", [0.0], [-1.0], -0.0, target="sm_90a")
    assert "fused multiply-adds in f32, from +0 on" in str(found) and found.result == 0 and check_chain(found) == 1


@pytest.mark.full
@pytest.mark.parametrize(("op", "target"), CASES, ids=str)
def test_explain_gives_the_words_of_dot_for_every_arithmetic(op, target):
    wrong, count = compare(op, target, 100, seed=1)
    assert count == 100 and wrong == [], f"{len(wrong)} of {count}: {wrong[:1]}"


# ---- published values


def what_if(terms, bits, floor, result=F32):
    return tcemu.Model(result, terms, bits, floor, "RZ" if result == F32 else "RN")


VOLTA, AMPERE, HOPPER = what_if(4, 23, -131), what_if(8, 24, -132), what_if(16, 25, -133)
EQ_10 = [-(2.0**13), -0.5, -0.25, -0.125], [2.0**10, 1.0, 1.0, 1.0], 2.0**23
HALF_F16 = HALF.replace(".f32.f16.f16.f32", ".f16.f16.f16.f16")
BF16 = HALF.replace("f16.f16", "bf16.bf16")
E5M2 = "mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e5m2.f32"
WGMMA = "wgmma.mma_async.sync.aligned.m64n8k32.f32.e5m2.e5m2"


@pytest.mark.parametrize(
    ("op", "target", "model", "value"),
    [
        (HALF, "sm_90a", VOLTA, "0"),
        (HALF, "sm_90a", AMPERE, "-1/2"),
        (HALF, "sm_90a", None, "-3/4"),
        (WGMMA, "sm_90a", None, "0"),
        (E5M2, "sm_120a", None, "-3/4"),
        (E5M2, "sm_90a", None, "0"),  # the first half is rounded to f32 beside -2^23, the second cut; C is added last
    ],
)
def test_equation_10(op, target, model, value):
    """arXiv 2511.10909 v2, table 8."""
    found = tcemu.explain(op, *EQ_10, target=target, model=model)
    assert (found.value, found.exact) == (Fraction(value), Fraction(-7, 8))


def test_equation_10_in_groups():
    """The same table: NVFP4 gives the exact -0.875, at scales that its range allows."""
    a, b = [0.0] * 64, [0.0] * 64
    for at, x, y in ((0, -4.0, 2.0), (16, -0.5, 1.0), (17, -0.5, 0.5), (32, -0.5, 0.5)):
        a[at], b[at] = x, y
    found = tcemu.explain(NVFP4, a, b, 2.0**19, scale_a=[256.0, 1.0, 0.5, 1.0], scale_b=[256.0, 1.0, 1.0, 1.0], target="sm_120a")
    assert found.value == found.exact == Fraction(-7, 8)
    assert [t.name for t in found.steps[0].terms] == ["C", "k 0-15", "k 16-31", "k 32-47", "k 48-63"]


def test_fp8_as_f16_chained_and_apart():
    """Khattak and Mikaitis, B200 E5M2 row 3935: two steps chained give C10DDF7C, two separate sums C10DDF7D, 13 bits C10DE000."""
    a = bytes.fromhex("c0b8b9b5a72c3bb63d2c40baa93839bdb638bc3c3338be3db2393927bdbfbcb9")
    b = bytes.fromhex("37bbb63504b830b73bbcbcbcbe3cba38b4c035b73cc032b734afbb3b3d3b393e")
    apart = tcemu.get_model(E5M2, "sm_90a", toolkit="12.6")
    wide = what_if(32, 25, -133)
    found = tcemu.explain(E5M2, list(a), list(b), 0x3F01684F, codes=True, target="sm_90a", model=(None, apart, wide, what_if(32, 13, -133)))
    assert [e.result for e in found.explanations] == [0xC10DDF7C, 0xC10DDF7D, 0xC10DDF7C, 0xC10DE000]
    assert [[step.kind for step in e.steps] for e in found.explanations[:2]] == [
        ["fused", "fused", "add"],
        ["fused", "fused", "add", "add"],
    ]
    assert [t.name for step in found.explanations[1].steps[2:] for t in step.terms] == ["sum", "chain", "C", "sum"]


def test_half_results_are_rounded_once_or_twice():
    """MMA-Sim's behaviour test: 0.5 * (1 + 1 + 2^-10 + 2^-23); wmma goes by way of f32."""
    a, b = [0.5] * 4, [1.0, 1.0, 2.0**-10, 2.0**-23]
    wmma = "wmma.mma.sync.aligned.row.col.m16n16k16.f16.f32"
    found = {op: tcemu.explain(op, a, b, target="sm_90a") for op in (HALF_F16, HALF, wmma)}
    assert [e.result for e in found.values()] == [0x3C01, 0x3F801000, 0x3C00]
    assert [step.kind for step in found[wmma].steps] == ["fused", "convert"]
    assert found[wmma].steps[1].rounding_loss == Fraction(1, 2**11) and "step 2 of 2: running 1.00048828125, RN to f16 -> 3c00" in str(
        found[wmma]
    )


@pytest.mark.parametrize(
    ("model", "op", "a", "b", "c", "want"),
    [
        (AMPERE, BF16, [1.0] + [1e-7] * 7, [1.0] * 8, 0.0, 0x3F800003),
        (VOLTA, HALF, [0x3E00, 0x1000, 0x1000, 0], [0x3E00, 0x0C00, 0x0C00, 0], 0, 0x40100001),
        (VOLTA, HALF, [0x3C00, 0x1000, 0x1000, 0], [0x4080, 0x0C00, 0x0C00, 0], 0, 0x40100000),
        (VOLTA, HALF, [0x3E00, 0x3C01, 0x3C01, 0x3C00], [0x3E00, 0x3001, 0x3001, 0x3000], 0x3E000000, 0x40300801),
        (VOLTA, HALF, [0x3E00] * 4, [0x3D00] * 4, 0x3F7FFFFF, 0x4107FFFF),
    ],
)
def test_words_and_predictions_of_others(model, op, a, b, c, want):
    found = tcemu.explain(op, a, b, c, target="sm_90a", model=model, codes=isinstance(c, int))
    assert found.result == want


def test_the_floor():
    """MATLAB-tensor-core issue 7: an H100 gave 11 * 2^-149, which only the floor -133 gives."""
    a = "9b94 19f3 9a2e 1a67 9a25 9b4e 9b29 9a33 99e0 1a14 9914 99d1 9ae9 1b1a 9a9c 1b3a"
    b = "9aaf 99f3 9acc 1b7c 19ed 1b25 9a1b 9a20 9af7 9a48 1ae1 1b32 1b12 1b0e 9a68 1735"
    row, column = ([int(word, 16) for word in words.split()] for words in (a, b))
    others = [what_if(16, 25, floor) for floor in (-132, -134)]
    found = tcemu.explain(BF16, row, column, codes=True, target="sm_90a", model=(None, *others))
    assert [e.result for e in found.explanations] == [11, 10, 10]
    assert "aligned to 2^-133, the floor" in " ".join(str(found.explanations[0]).split())


def test_fp8_accumulators():
    """DeepGEMM issue 37: with zero products wgmma clears the low ten bits of C, mma keeps them; the view marks them."""
    cleared = tcemu.explain(WGMMA, [0] * 32, [0] * 32, 0x40403017, codes=True, target="sm_90a")
    assert cleared.result == 0x40403000 and re.search(r"^C .*\|0000010111$", str(cleared), re.M)
    assert tcemu.explain(E5M2, [0] * 32, [0] * 32, 0x40403017, codes=True, target="sm_90a").result == 0x40403017


def test_words_recorded_by_others_with_the_bits_of_each_gpu():
    """Khattak and Mikaitis's words of seven GPUs, a few rows each, and what is printed of them."""

    models = {"V100": VOLTA, "A100": AMPERE, "A2": AMPERE, "Ada": AMPERE, "L40S": AMPERE, "H200": HOPPER, "B200": HOPPER}
    data, steps = golden.published_arrays(), 0
    for gpu, model in models.items():
        rows = data[f"{gpu}_fp16_d_fp32"]
        for at in range(0, len(rows), max(1, len(rows) // 12)):
            a, b = ([reference.convert("f32", "f16", int(w)) for w in data[f"{gpu}_fp16_{x}"][at]] for x in "ab")
            found = tcemu.explain(HALF, a, b, int(data[f"{gpu}_fp16_c"][at]), codes=True, target="sm_90a", model=model)
            assert found.result == int(rows[at]), f"{gpu} row {at}\n{found}"
            steps += readd(found)
    assert steps > 80


RECORDED = ("mma", "mma_sp", "wmma", "wgmma", "wgmma_sp")


def against_silicon(family, cases, elements):
    """Elements of about so many recorded cases that `explain` gives otherwise than an H200 did, and how many were looked at."""
    wrong, count, known = [], 0, golden.cases(family)
    for case in known[:: max(1, len(known) // cases)]:
        found, rng = recorded.load(case), np.random.default_rng(case["i"])
        op = tcemu.parse(case["ptx"])
        for _ in range(elements):
            g, i, j = (int(rng.integers(size)) for size in found.d.shape)
            column = found.b[g, :, j] if found.kept is None else found.b[g, :, j][found.kept[g, i].astype(int)]
            c = 0 if found.c is None else int(found.c[g, i, j])
            one = tcemu.explain(op, found.a[g, i].tolist(), column.tolist(), c, codes=True, target="sm_90a")
            count += 1
            if one.result != int(found.d[g, i, j]):
                wrong.append(f"{case['ptx']} {(g, i, j)}: {int(found.d[g, i, j]):#x} was recorded\n{one}")
    return wrong, count


@pytest.mark.parametrize("family", RECORDED)
def test_words_of_an_h200(family):
    wrong, count = against_silicon(family, cases=12, elements=6)
    assert count >= 48 and wrong == [], f"{len(wrong)} of {count}: {wrong[:1]}"


@pytest.mark.full
@pytest.mark.parametrize("family", RECORDED)
def test_words_of_an_h200_in_every_case(family):
    wrong, count = against_silicon(family, cases=1000, elements=40)
    assert count >= 320 and wrong == [], f"{len(wrong)} of {count}: {wrong[:1]}"


# ---- special values


@pytest.mark.parametrize(
    ("a", "b", "c", "word", "rule"),
    [
        ([np.nan, 1.0], [1.0, 1.0], 0.0, 0x7FFFFFFF, "NaN: A is NaN at k 0"),
        ([1.0, 1.0], [1.0, np.nan], 0.0, 0x7FFFFFFF, "NaN: B is NaN at k 1"),
        ([1.0, 0.0], [1.0, -np.inf], 0.0, 0x7FFFFFFF, "NaN: Inf x 0 at k 1"),
        ([np.inf, np.inf], [1.0, -1.0], 0.0, 0x7FFFFFFF, "NaN: +Inf at k 0 and -Inf at k 1"),
        ([1.0, -np.inf], [1.0, 2.0], np.inf, 0x7FFFFFFF, "NaN: +Inf at C and -Inf at k 1"),
        ([-np.inf, 1.0], [3.0, 1.0], -np.inf, 0xFF800000, "-inf: an infinity of one sign, at C, k 0"),
        ([1.0, 1.0], [1.0, 1.0], np.nan, 0x7FFFFFFF, "NaN: C is NaN"),
    ],
)
def test_the_special_rule_is_named(a, b, c, word, rule):
    found = tcemu.explain(HALF, a, b, c, target="sm_90a")
    assert (found.result, found.steps[0].rule) == (word, rule)
    assert rule in str(found) and found.error is None
    assert found.exact == found.value == ("nan" if word == 0x7FFFFFFF else "-inf")


def test_overflow_and_a_nan_scale():
    found = tcemu.explain(BF16, [2.0**127], [2.0], target="sm_90a")
    assert found.value == "+inf" and found.exact == 2**128 and "RZ: beyond the largest f32" in str(found)
    found = tcemu.explain(SCALED, [1.0] * 32, [1.0] * 32, scale_a=[np.nan], scale_b=[1], target="sm_120a")
    assert found.result == 0x7FFFFFFF and found.steps[0].rule == "NaN: the scale of A at k 0 is NaN"


def test_f64_nan_words():
    op = "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64"
    payload, one = 0x7FF4 << 48 | 5, 0x3FF0 << 48
    found = tcemu.explain(op, [payload, one], [one, payload | 2], payload | 16, codes=True, target="sm_90a")
    assert [step.result for step in found.steps[:2]] == [payload | 16 | 1 << 51, payload | 2 | 1 << 51]  # B's NaN before C's before A's
    infinite = tcemu.explain(op, [float("inf")], [0.0], target="sm_90a")
    assert infinite.result == 0xFFF8 << 48 and infinite.steps[0].rule == "NaN: Inf x 0 at k 0"


# ---- where two arithmetics part


def first_divergence(left, right, a, b, c=0.0, op=HALF):
    found = tcemu.explain(op, a, b, c, target="sm_90a", model=(left, right))
    (one,) = found.divergences
    return found, one


def test_parting_at_a_term():
    found, one = first_divergence(AMPERE, HOPPER, *EQ_10)
    assert (one.steps, one.term, one.removed) == ((1, 1), "k 2", (Fraction(-1, 4), 0))
    assert not found.agree and re.search(r"^k 2 .*<- \[1\] and \[2\] diverge$", str(found), re.M)
    said = (
        "diverge in step 1 at k 2, -0.25: [1] in step 1 shifts by 25 and truncates -0.25, retaining 0; [2] in step 1 shifts "
        "by 25 and truncates nothing."
    )
    assert said in " ".join(str(found).split())


def test_parting_at_a_rounding_that_one_side_has_alone():
    """Steps of 8 round 1 + 2^-24 before k 8 brings the other half of the last bit."""
    a = [1.0, 2.0**-12, *[0.0] * 6, 2.0**-12]
    found, one = first_divergence(what_if(8, 25, -133), HOPPER, a, a)
    assert (one.steps, one.term, one.removed) == ((1, None), None, (Fraction(1, 2**24), None))
    assert [e.result for e in found.explanations] == [0x3F800000, 0x3F800001]
    assert str(one).startswith(
        "where step 1 rounds, after C, k 0-7: [1] in step 1 has 3f800000 = 1, RZ drops 5.9605e-08 (0.5 ulp); [2] does not round"
    )


def test_parting_at_a_term_that_a_later_one_cuts():
    """2^24 at k 12 cuts 1/8 at k 1 in the same step; in steps of 8 it stands in the next one. The words agree all the same."""
    a, b = [1.0, 2.0**-2, *[0.0] * 10, 2.0**12], [1.0, 2.0**-1, *[0.0] * 10, 2.0**12]
    found, one = first_divergence(what_if(8, 25, -133), HOPPER, a, b)
    assert (one.steps, one.term, one.removed) == ((1, 1), "k 1", (0, Fraction(1, 8)))
    assert found.agree and found.explanations[0].result == 0x4B800000
    text = str(found)
    assert re.search(r"^k 1 .*<- \[1\] and \[2\] diverge$", text, re.M) and "\nThe results are equal nevertheless.\n" in text


def test_several_partings_and_wide_comparisons():
    models = [None, AMPERE, VOLTA, HOPPER.replace(fraction_bits=13), HOPPER.replace(fraction_bits=35), HOPPER.replace(rounding="RP")]
    found = tcemu.explain(HALF, *EQ_10, target="sm_90a", model=models)
    assert [None if p is None else p.term for p in found.divergences] == ["k 2", "k 1", "k 1", "k 3", None]
    assert [str(e.value) for e in found.explanations] == ["-3/4", "-1/2", "0", "0", "-7/8", "-3/4"]
    assert max(map(len, str(found).splitlines())) <= 118
    both = tcemu.explain(HALF, *EQ_10, target=("sm_90", "sm_90a", "sm_120"), model=(None, None, AMPERE))
    assert "[3] one more step adds zeros to the running value" in str(both)
    assert [e.label for e in both.explanations] == ["sm_90", "sm_90a", "sm_120, terms 8, fraction_bits 24, floor -132"]
    assert both.divergences[0] is None and both.divergences[1].labels == ("sm_90", both.explanations[2].label)


def test_parting_at_c_and_at_the_last_rounding():
    zeros = [0] * 32
    found = tcemu.explain(E5M2, zeros, zeros, 0x40403017, codes=True, target="sm_90a", model=(None, what_if(32, 13, -133)))
    (one,) = found.divergences
    assert (one.term, one.steps, one.removed) == ("C", (3, 1), (0, Fraction(0x17, 2**22)))
    nearest = HOPPER.replace(rounding="RN")
    found, one = first_divergence(HOPPER, nearest, [1.0, 2.0**-12], [1.0, 1.5 * 2.0**-12])
    assert (one.term, one.steps) == (None, (1, 1)) and one.removed == (Fraction(3, 2**25), Fraction(-1, 2**25))


def test_a_floor_far_below_the_result():
    """A what-if that no silicon has: the sum lies below the least subnormal, and nothing of it is left, or rounding up makes one."""
    for rounding, word in (("RZ", 0), ("RP", 1)):
        found = tcemu.explain(BF16, [2.0**-80], [2.0**-80], target="sm_90a", model=HOPPER.replace(floor=-300, rounding=rounding))
        assert found.result == word and readd(found) == 1
        assert re.search(rf"^{rounding} to f32 +\+.*/.*\|$", str(found), re.M)


def test_no_parting():
    found, one = first_divergence(AMPERE, HOPPER, [1.0, 2.0], [3.0, 4.0], 5.0)
    assert one is None and found.agree and "[1] and [2] remove the same bits everywhere" in str(found)


def test_words_that_differ_have_a_parting_and_equal_takings_equal_words():
    rng = np.random.default_rng(8)
    models = [what_if(t, f, -133) for t, f in ((4, 23), (8, 24), (16, 24), (16, 25), (5, 30))] + [HOPPER.replace(rounding="RN")]
    models += [HOPPER.replace(result_bits=13), HOPPER.replace(groups=2), HOPPER.replace(chain="k")]
    parted = same = 0
    for _ in range(12):
        spread = float(rng.choice([1, 3, 12]))
        a, b = (rng.integers(-8, 9, 16) * np.exp2(np.round(rng.uniform(-spread, spread, 16))) for _ in range(2))
        found = tcemu.explain(HALF, a.astype(float), b.astype(float), float(rng.integers(-9, 9)), target="sm_90a", model=models)
        for one, other in combinations(found.explanations, 2):
            first = type(found)((one, other)).divergences[0]
            assert first is not None or one.result == other.result
            parted, same = parted + (first is not None), same + (first is None)
    assert parted > 50 and same > 50


# ---- shapes of use


VOLTA_HALF = "mma.sync.aligned.m8n8k4.row.col.f16.f16.f16.f16"
CHAINED = HOPPER.replace(chain=32)
MODELS = (
    None,
    AMPERE,
    CHAINED,
    HOPPER.replace(rounding="RP", groups=2, alignment="RN", fraction_bits=18),
    tcemu.Model(F32, 1, None, rounding="RN"),
)
LONG = [(op, k, model) for op, k in ((HALF, 40), (E5M2, 70), (BF16, 16), (VOLTA_HALF, 10)) for model in MODELS]


def is_the_gemm_of(op, k, model):
    rng = np.random.default_rng(5)
    a, b, c = (rng.standard_normal(k) * np.exp2(rng.integers(-9, 9, k)) for _ in range(3))
    found = tcemu.explain(op, a, b, float(c[0]), target="sm_90a", model=model)
    want = np.asarray(tcemu.gemm(a[None], b[:, None], c[:1, None], op=op, target="sm_90a", model=model))
    assert found.result == int(want.view(f"u{want.itemsize}")[0, 0]), f"{op} {model}\n{found}"
    readd(found)
    return found


@pytest.mark.parametrize(("op", "k", "model"), [(HALF, 40, CHAINED)], ids=str)
def test_k_may_be_several_instructions(op, k, model):
    found = is_the_gemm_of(op, k, model)
    assert found.padding == -k % found.op.k > 0
    assert f"padded to whole instructions with {found.padding} zeros" in str(found)


@pytest.mark.full
@pytest.mark.parametrize(("op", "k", "model"), LONG, ids=str)
def test_k_may_be_several_instructions_by_every_model(op, k, model):
    is_the_gemm_of(op, k, model)


def test_gemm_of_f64_and_integers_over_several_instructions():
    rng = np.random.default_rng(6)
    f64, s8 = "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64", "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32"
    a, b, c = rng.standard_normal(9), rng.standard_normal(9), rng.standard_normal(1)
    want = tcemu.gemm(a[None], b[:, None], c[None], op=f64, target="sm_90a")
    assert tcemu.explain(f64, a, b, float(c[0]), target="sm_90a").result == int(want.view(np.uint64)[0, 0])
    one = np.ones(64)
    one[32:] = -1  # the first instruction clamps, the second goes down from there
    found = tcemu.explain(s8, one, np.ones(64), float(2**31 - 1), target="sm_90a")
    assert found.value == 2**31 - 1 - 32 and found.exact == 2**31 - 1
    assert [step.rule for step in found.steps] == ["the sum is beyond s32 and clamps", None]


def test_numbers_and_codes_name_the_same_elements():
    values = [1.5, -0.0, 0.1, np.inf]
    codes = [0x3FC0, 0x8000, 0x3DCD, 0x7F80]
    spellings = (
        values, np.array(values), np.array(values, np.float32).astype(ml_dtypes.bfloat16), jnp.array(values, jnp.bfloat16),
        [Fraction(3, 2), -0.0, Fraction(1, 10), np.float32(np.inf)],
    )  # fmt: skip
    for given in spellings:
        assert tcemu.explain(BF16, given, [1.0] * 4, target="sm_90a").a[:4] == tuple(codes)
    one = [0x3F80] * 4
    for given in (codes, np.array(codes, np.uint16), jnp.array(codes, jnp.uint16), np.array(codes), [np.uint16(code) for code in codes]):
        assert tcemu.explain(BF16, given, one, target="sm_90a", codes=True).a[:4] == tuple(codes)
    rounded = tcemu.explain(BF16, values, [1.0] * 4, target="sm_90a")
    assert rounded.rounded == ("a_row",) and "a_row: the format does not represent all numbers" in str(rounded)
    up = tcemu.explain(BF16, values, [1.0] * 4, target="sm_90a", rounding="RZ")
    assert up.a[2] == 0x3DCC
    f64 = "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64"
    assert tcemu.explain(f64, [0.1], [1.0], target="sm_90a").a == (0x3FB999999999999A,)
    for given in ([0x3FB999999999999A], np.array([0x3FB999999999999A], np.uint64), np.array([0.1]).view(np.uint32)[None]):
        assert tcemu.explain(f64, given, [0x3FF0 << 48], target="sm_90a", codes=True).a == (0x3FB999999999999A,)
    s8 = "mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32"
    assert tcemu.explain(s8, [-3.0, 1000.7], [2.0, -1.0], target="sm_90a").a[:2] == (0xFD, 0x7F)


@pytest.mark.parametrize(
    "name", ["f64", "f32", "tf32", "f16", "bf16", "e5m2", "e4m3", "e3m2", "e2m3", "e2m1", "ue8m0", "ue4m3", "s8", "u4"]
)
def test_codes_and_values_are_the_reference(name):
    """decode and encode against the reference, every code up to 8 bits and a sample beyond, in four roundings."""
    fmt, rng = tcemu.formats.FORMATS[name], np.random.default_rng(7)
    codes = range(1 << fmt.bits) if fmt.bits <= 8 else [*operands.special_codes(name), *operands.codes(name, "raw", (300,), rng).tolist()]
    as_reference = {"nan": "nan", "+inf": ("inf", 0), "-inf": ("inf", 1)}
    values = []
    for code in codes:
        value = decode(fmt, code).value
        assert as_reference.get(value, value) == reference.decode(name, code)
        values += [value] if isinstance(value, Fraction) else []
    between = [(x + y * Fraction(k, 8)) / 2 for x, y in pairwise(values) for k in (3, 8)][:400]
    for value in [*values[:400], *between]:
        for mode in reference.MODES:
            assert encode(fmt, value, mode) == reference.encode(name, value, mode), (value, mode)
            assert encode(fmt, value, mode, overflow="saturate") == reference.encode(name, value, mode, saturate=True), (value, mode)


def test_numbers_are_numbers_whatever_their_type():
    """As gemm takes them: [1, 2] is [1.0, 2.0], and no list of codes."""
    values, codes = [1, 2, 3, 200], (0x3F80, 0x4000, 0x4040, 0x4348)
    spellings = [values, [1, 2.0, Fraction(3), np.float32(200)], [np.uint16(v) for v in values]]
    spellings += [np.array(values, dtype) for dtype in (int, np.uint8, np.uint16, np.uint32, np.float16, np.longdouble)]
    for given in (*spellings, jnp.array(values)):
        found = tcemu.explain(BF16, given, [1] * 4, 5, target="sm_90a")
        assert found.a[:4] == codes and found.b[:4] == (0x3F80,) * 4 and found.value == 211, given
        d = tcemu.gemm(np.array([values]), np.ones((4, 1), int), np.array([[5]]), op=BF16, target="sm_90a")
        assert found.result == int(d.view(np.uint32)[0, 0])
    assert tcemu.explain(BF16, [True, False], [1, 1], target="sm_90a").value == 1
    assert tcemu.explain(BF16, [10**400, 1], [1, 1], target="sm_90a").value == "+inf"
    scaled = tcemu.explain(SCALED, [1], [1], scale_a=[2], scale_b=np.array([4]), target="sm_120a")
    assert scaled.value == 8
    with pytest.raises(TypeError, match=r"scale_a: got uint8, .* expected floats, or raw codes"):
        tcemu.explain(SCALED, [1], [1], scale_a=np.array([127], np.uint8), scale_b=[1], target="sm_120a")


def test_a_number_wider_than_float64_is_rounded_once():
    """1 + 2^-8 + 2^-60 lies above the tie of bf16; float64 would drop the last bit, and the tie go down."""
    if np.finfo(np.longdouble).nmant < 63:
        pytest.skip("longdouble has no more bits than float64 here")
    wide = np.longdouble(1) + np.longdouble(2) ** -8 + np.longdouble(2) ** -60
    for given in ([wide], np.array([wide])):
        assert tcemu.explain(BF16, given, [1.0], target="sm_90a").a[0] == 0x3F81


def test_a_dense_column_with_metadata():
    op = "mma.sp.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    column = [float(k) for k in range(16)]
    found = tcemu.explain(op, [1.0] * 8, column, e=[0b0100, 0b1110, 0b1001, 0b1100], target="sm_90a")
    assert [p.name for p in found.products] == [f"k {k}" for k in (0, 1, 6, 7, 9, 10, 12, 15)]
    assert found.value == 0 + 1 + 6 + 7 + 9 + 10 + 12 + 15
    met = tcemu.explain(op, [1.0] * 8, [column[k] for k in (0, 1, 6, 7, 9, 10, 12, 15)], target="sm_90a")
    assert met.result == found.result
    halves = op.replace("m16n8k16", "m16n8k8").replace("bf16.bf16", "tf32.tf32")
    found = tcemu.explain(halves, [1.0] * 4, [float(k) for k in range(8)], e=[0b0100, 0b1110, 0b0011, 0b0100], target="sm_90a")
    assert [p.name for p in found.products] == ["k 0", "k 3", "k 5+4", "k 6"]


def test_dict_and_json():
    found = tcemu.explain(E5M2, *EQ_10, target=("sm_90a", "sm_120a"))
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["agree"] is False and plain["divergences"][0]["steps"] == [1, None]
    one = plain["explanations"][1]
    (step,) = one["steps"]
    assert Fraction(step["sum"]) == sum(Fraction(term["retained"]) for term in step["terms"]) == Fraction(one["result"]["value"])
    assert all(Fraction(t["value"]) == Fraction(t["retained"]) + Fraction(t["truncated"]) for t in step["terms"])
    assert len(repr(found)) < 400 and "on sm_120a: D = bf400000" in repr(found)
    assert Fraction(one["exact"]["value"]) == Fraction(-7, 8) and one["result"]["word"] == "bf400000"
    assert one["model"]["result"] == "f32" and one["formats"]["a"] == "e5m2" and one["a"][:2] == [0xF0, 0xB8]


def test_the_view_fits_a_screen():
    rng = np.random.default_rng(9)
    text = str(tcemu.explain(HALF, rng.standard_normal(16), rng.standard_normal(16), 0.3, target="sm_90a"))
    assert max(map(len, text.splitlines())) <= 118 and len(text.splitlines()) <= 36
    assert "\x1b" not in text
    found = tcemu.explain(HALF, rng.standard_normal(16), rng.standard_normal(16), 0.3, target="sm_90a")
    assert "\x1b[2m" in found.text(colour=True) and re.sub(r"\x1b\[\d+m", "", found.text(colour=True)) == str(found)


@pytest.mark.parametrize(("spelling", "target"), SAMPLE)
def test_every_view_keeps_its_width(spelling, target):
    op, rng = tcemu.parse(spelling), np.random.default_rng(10)
    a, b, c, more = tiles(op, rng)
    for t in range(len(a)):
        own = {name: v[t, :, 0] if name == "scale_b" else v[t, 0] for name, v in more.items()}
        text = str(tcemu.explain(op, a[t, 0], b[t, :, 0], c[t, 0, 0], target=target, codes=True, **own))
        assert max(map(len, text.splitlines())) <= 120, text


# ---- errors


@pytest.mark.parametrize(
    ("error", "said", "given"),
    [
        (ValueError, r"a_row has 2 elements and b_col 3", {"a_row": [1.0, 1.0], "b_col": [1.0] * 3}),
        (ValueError, r"a_row: got no elements", {"a_row": [], "b_col": []}),
        (ValueError, r"a_row: -1 is no code of f16, .*codes=False is for numbers", {"a_row": [-1], "b_col": [0], "codes": True}),
        (ValueError, r"b_col: 65536 is no code of f16", {"a_row": [0], "b_col": [1 << 16], "codes": True}),
        (ValueError, r"b_col: an integer of more than 64 bits is no code of f16", {"a_row": [0], "b_col": [10**5000], "codes": True}),
        (TypeError, r"a_row: got 1\.0.* raw codes of f16 \(ints.*codes=False is for numbers", {"codes": True}),
        (TypeError, r"a_row: got 1\.0.* raw codes of f16", {"a_row": np.ones(1, np.float32), "codes": True}),
        (TypeError, r"a_row: got 'x'.* numbers \(ints, floats, .*codes=True is for raw codes", {"a_row": ["x"]}),
        (TypeError, r"a_row: got complex128\[1\].* numbers", {"a_row": np.ones(1, complex)}),
        (ValueError, r"a_row: got uint16\[1, 1\].* one row or column", {"a_row": np.zeros((1, 1), np.uint16)}),
        (ValueError, r"a_row: got float64\[1, 1\].* one row or column", {"a_row": np.zeros((1, 1))}),
        (ValueError, r"c: got 2 elements", {"c": [1.0, 2.0]}),
        (ValueError, r"rounding='SR': .* RN, RZ, RM, RP", {"rounding": "SR"}),
        (ValueError, r"e: .* has no sparsity metadata", {"e": [4]}),
        (ValueError, r"scale_a, scale_b: .* has no block scales", {"scale_a": [127]}),
        (tcemu.Unsupported, r"needs sm_80 or later", {"target": "sm_75"}),
        (tcemu.Unsupported, r"is ldmatrix; tcemu\.explain takes mma", {"op": "ldmatrix.sync.aligned.m8n8.x1.shared.b16"}),
        (ValueError, r"got 2 targets and 3 models", {"target": ("sm_90", "sm_90a"), "model": [None] * 3}),
        (ValueError, r"model: its result is s32, but .* accumulates in f32", {"model": tcemu.Model(S32)}),
    ],
)
def test_what_is_wrong_is_named(error, said, given):
    arguments = {"op": HALF, "a_row": [1.0], "b_col": [1.0], "target": "sm_90a"} | given
    with pytest.raises(error, match=said):
        tcemu.explain(arguments.pop("op"), arguments.pop("a_row"), arguments.pop("b_col"), **arguments)


@pytest.mark.parametrize(
    ("op", "model", "said"),
    [
        ("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64", tcemu.Model(F32, 4), r"products of f64 are fused multiply-adds"),
        (BF16, HOPPER.replace(multiplicand=F16), r"converts A and B to f16 first, which does not hold every value of bf16"),
        (BF16, tcemu.Model(F16, 1, None, rounding="RN"), r"converts A and B to f16 first, which does not hold every value of bf16"),
        (HALF, HOPPER.replace(groups=3), r"the 16 products of an instruction are no 3 groups of pairs"),
        (HALF, HOPPER.replace(summed=8), r"only products with block scales are summed in groups"),
        (SCALED, tcemu.Model(F32, 1, None), r"exact steps take no block scales"),
        (SCALED, tcemu.Model(F32, 32, summed=16), r"does not fit 24 bits"),
        (NVFP4, tcemu.Model(F32, 64, summed=32), r"must divide the 16 products that share a scale"),
        (NVFP4, tcemu.Model(F32, 64), r"scales of ue4m3 multiply whole groups"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_as_by_dot(op, model, said):
    op = tcemu.parse(op)
    matrices = [
        np.zeros(op.matrix_shape(name) + (2,) * (fmt.words - 1), fmt.dtype)
        for name, fmt in (("a", op.a), ("b", op.b), ("d", op.accumulator))
    ]
    names = ("scale_a", "scale_b") if op.scaling else ()
    given = {"target": "sm_120a", "model": model}
    with pytest.raises(ValueError, match=said) as by_dot:
        tcemu.dot(op, *matrices, **given, **{name: np.zeros(op.matrix_shape(name), np.uint8) for name in names})
    with pytest.raises(ValueError) as by_explain:
        tcemu.explain(op, [0.0] * op.k, [0.0] * op.k, **given, **dict.fromkeys(names, [1.0] * (op.scaling.count if op.scaling else 0)))
    assert str(by_explain.value) == str(by_dot.value)


def test_scales_metadata_and_traced_models_are_looked_at():
    with pytest.raises(ValueError, match=r"scale_b: missing.* 1 of ue8m0, one for 32 products"):
        tcemu.explain(SCALED, [1.0], [1.0], scale_a=[1.0], target="sm_120a")
    with pytest.raises(ValueError, match=r"scale_a: got 2.* 1 of"):
        tcemu.explain(SCALED, [1.0], [1.0], scale_a=[1.0, 1.0], scale_b=[1.0], target="sm_120a")
    sparse = "mma.sp.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    with pytest.raises(ValueError, match=r"K/2 and K"):
        tcemu.explain(sparse, [1.0] * 8, [1.0] * 8, e=[4] * 4, target="sm_90a")
    with pytest.raises(ValueError, match=r"4 metadata fields from 0 to 15"):
        tcemu.explain(sparse, [1.0] * 8, [1.0] * 16, e=[4, 4, 4, 16], target="sm_90a")
    with pytest.raises(TypeError, match=r"its fraction_bits is traced"):
        jax.jit(lambda n: tcemu.explain(HALF, [1.0], [1.0], target="sm_90a", model=HOPPER.replace(fraction_bits=n)).result)(24)
    array = HOPPER.replace(fraction_bits=jnp.int32(24), rounding=jnp.int32(1), terms=np.int32(8))
    assert tcemu.explain(HALF, *EQ_10, target="sm_90a", model=array).value == Fraction(-1, 2)


# ---- the command


def run(*words):
    return main(["explain", *words])


def test_the_command_prints_the_explanation(capsys):
    assert run(HALF, "--a", "-8192", "-0.5", "-0.25", "-0.125", "--b", "1024", "1", "1,1", "--c", "0x1p23") == 0
    assert capsys.readouterr() == (f"{tcemu.explain(HALF, *EQ_10, target='sm_90a')}\n", "")
    assert run(HALF, "--codes", "--a", "3c00", "0x3800", "--b", "4000,4000", "--c", "3f800000", "--target", "sm_90") == 0
    assert "D       40800000 = 4\n" in capsys.readouterr().out
    assert run(HALF, "--a=-1/3", "--b=1e-3", "--colour", "--c", "inf") == 0
    assert "exact   +inf" in capsys.readouterr().out


def test_the_command_compares(capsys):
    words = ("--a", "-8192", "-0.5", "-0.25", "-0.125", "--b", "1024", "1", "1", "1", "--c", "8388608")
    assert run(HALF, *words, "--target", "sm_90a", "--target", "sm_120a") == 0
    assert "[1] and [2] remove the same bits everywhere" in capsys.readouterr().out
    assert run(HALF, *words, "--what-if", "fraction_bits=24,terms=8,floor=-132", "--steps") == 0
    out = capsys.readouterr().out
    for said in ("[2] sm_90a, terms 8, fraction_bits 24, floor -132\n", "[2] evidence: a what-if", "diverge in step 1 at k 2, -0.25"):
        assert said in out
    assert out.count("step 1 of ") == 2


def test_the_command_writes_json_and_draws(capsys):
    spellings = [(HALF, "sm_90a"), DOUBLE, SPARSE_TF32, SPARSE_INTEGERS, ONE_BIT, (SCALED, "sm_120a"), SPARSE_SCALED]
    for spelling, target in spellings:
        outs = []
        for seed in ("1", "1", "2"):
            assert run(spelling, "--target", target, "--random", seed, "--json") == 0
            outs.append(json.loads(capsys.readouterr().out))
        assert outs[0] == outs[1] != outs[2]
        assert Fraction(outs[0]["result"]["value"]) - Fraction(outs[0]["exact"]["value"]) == Fraction(outs[0]["error"])


def test_the_command_takes_scales_and_metadata(capsys):
    assert run(SCALED, "--target", "sm_120a", "--a", "1", "2", "--b", "3", "4", "--scale-a", "0.5", "--scale-b", "4") == 0
    assert "= 22\n" in capsys.readouterr().out
    sparse = "mma.sp.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    column = [str(k) for k in range(16)]
    assert run(sparse, "--a", *["1"] * 8, "--b", *column, "--e", "4", "e9", "c") == 0
    assert "k 7" in (out := capsys.readouterr().out) and "= 60\n" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((HALF,), "the operands are missing: give --a and --b, or --random SEED"),
        ((HALF, "--a", "x", "--b", "1"), "'x' is no number; write it as -0.1, 1e-3, 1/3"),
        ((HALF, "--codes", "--a", "3g", "--b", "1"), "'3g' is no code; write it in hex"),
        ((HALF, "--random", "1", "--a", "1"), "--random draws all operands"),
        ((HALF, "--random", "1", "--what-if", "bits=3"), "unknown field 'bits'; the fields are terms, fraction_bits"),
        ((HALF, "--random", "1", "--what-if", "fraction_bits=99"), "fraction_bits must be from 1 to 40"),
        ((HALF, "--random", "1", "--target", "sm_75"), "needs sm_80 or later"),
        ((HALF, "--random", "-1"), "--random -1: a seed"),
        ((HALF, "--a", "1e999999999", "--b", "1"), "'1e999999999' is beyond every format, by far"),
        ((HALF, "--a", "-1e-999999999", "--b", "1"), "'-1e-999999999' is beyond every format, by far"),
        ((HALF, "--a", "0x1p99999", "--b", "1"), "'0x1p99999' is beyond every format, by far"),
        ((HALF, "--a", "1/0", "--b", "1"), "'1/0' is no number"),
        ((HALF, "--a", "1" * 9999, "--b", "1"), "is no number"),
        ((HALF, "--codes", "--a", "f" * 9999, "--b", "1"), "an integer of more than 64 bits is no code of f16"),
        ((HALF, "--codes", "--a", "-3c00", "--b", "1"), "is no code of f16"),
        ((HALF, "--random", "1", "--what-if", "x" * 999), "is no FIELD=VALUE"),
        ((HALF, "--random", "1", "--what-if", "floor=99999999999"), "floor must be from"),
        ((HALF, "--random", "1", "--what-if", "groups=0"), "groups must be a number of groups, at least 1"),
        ((HALF, "--random", "1", "--what-if", "rounding=7"), "rounding: got '7'"),
        ((HALF, "--random", "1", "--what-if", "terms=" + "9" * 9999), "--what-if terms=999"),
        ((HALF + "x" * 10**6, "--random", "1"), "unknown qualifier"),
        ((HALF, "--random", "1", "--target", "x" * 10**6), "unknown target"),
        ((HALF, "--a", "1", "--b", "1", "2"), "a_row has 1 elements and b_col 2"),
        (("ldmatrix.sync.aligned.m8n8.x1.shared.b16", "--a", "1", "--b", "1"), "is ldmatrix; tcemu.explain takes mma"),
    ],
)
def test_the_command_says_what_is_wrong(words, said, capsys):
    assert run(*words) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("tcemu explain: ") and said in error and error.count("\n") == 1
    assert len(error) < 2000


def test_the_command_takes_negative_numbers_as_they_are(capsys):
    for words, value in (
        ("--a -inf 2 --b 1 -1e-3", "-inf"),
        ("--a -1e-3 2 --b -1000 -.5", "0"),
        ("--a -1/4 --b -0x1p3 --c -1", "1"),
        ("--a -1,-2 --b=-1,2 --c -INF", "-inf"),
    ):
        assert run(HALF, *words.split(), "--json") == 0
        exact = json.loads(capsys.readouterr().out)["exact"]["value"]
        assert exact == value or abs(Fraction(exact) - Fraction(value)) < Fraction(1, 1000)


def test_numbers_beyond_float64_are_read_exactly(capsys):
    words = ("--a", "1e400", "-1e-400", "--b", "1", "1")
    assert run(HALF, *words, "--json") == 0
    read = json.loads(capsys.readouterr().out)
    assert read["a"][:2] == [0x7C00, 0x8000] and read["rounded"] == ["a_row"]
