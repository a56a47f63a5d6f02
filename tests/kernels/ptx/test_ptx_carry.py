"""The carry flag CC.CF: chains of the instructions of PTX ISA 9.7.2 against Python's integers.

The oracle computes the flag as machine code does, where ptxas 13.0 passes one predicate on (IADD3, IADD3.X, IMAD.X for sm_80 to sm_120).
All triples of the twelve instructions ran on an H200, behind a flag of 0 or 1: 0 of 1,327,104 words differed. The quotients of 128 bits, of
NVIDIA's own code, have an answer without a GPU.
"""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from gpu_runs.video_and_carry import RESULTS, carry_text
from oracles.ptx_integer_reference import reference
from support.sampling import sample_cases
from support.tensor_map_bits import recording

from tcemu import ptx

WRITERS = ("add.cc", "sub.cc", "mad.lo.cc", "mad.hi.cc")
LINKS = ("addc.cc", "subc.cc", "madc.lo.cc", "madc.hi.cc")
READERS = ("addc", "subc", "madc.lo", "madc.hi")
PAIRS = [*product(WRITERS, READERS)]
TRIPLES = [*product(WRITERS, LINKS + WRITERS, READERS)]
EDGES = {bits: [0, 1, 2, 3, 2 ** (bits - 1) - 1, 2 ** (bits - 1), 2**bits - 2, 2**bits - 1] for bits in (32, 64)}
THREADS = 64
KINDS = [("u32",) * 3, ("s32",) * 3, ("u64",) * 3, ("s64",) * 3, ("u32", "u64", "s32"), ("u64", "s32", "u64")]


def chain_kernel(chains, kinds):
    """The text of a kernel that runs each chain on the thread's 9 operands and stores all results. kinds: of the statements of a chain."""
    lines, results, used = [], 0, sorted({int(kind[1:]) for kind in kinds})
    for chain in chains:
        for at, (name, kind) in enumerate(zip(chain, kinds, strict=False)):
            count = 3 if name.startswith("mad") else 2
            operands = ", ".join(f"%v{kind[1:]}_{3 * at + i}" for i in range(count))
            lines += [f"{name}.{kind} %d{kind[1:]}, {operands};", f"cvt.u64.u{kind[1:]} %w, %d{kind[1:]};"]
            lines += [f"st.global.u64 [%out+{8 * results}], %w;"]
            results += 1
    loads = [f"ld.global.u{bits} %v{bits}_{i}, [%in+{8 * i}];" for bits in used for i in range(9)]
    registers = [f".reg .b{bits} %d{bits}; .reg .b{bits} %v{bits}_<9>;" for bits in used]
    text = f"""
.version 8.0 .target sm_80 .address_size 64
.visible .entry k(.param .u64 data, .param .u64 results) {{
    .reg .b32 %t; .reg .b64 %in, %out, %w, %o;
    {" ".join(registers)}
    ld.param.u64 %in, [data]; ld.param.u64 %out, [results]; mov.u32 %t, %tid.x;
    mul.wide.u32 %o, %t, 72; add.u64 %in, %in, %o; mul.wide.u32 %o, %t, {8 * results}; add.u64 %out, %out, %o;
    {" ".join(loads)}
    {" ".join(lines)}
    ret; }}"""
    return text.replace("cvt.u64.u64 %w", "mov.b64 %w"), results


def expected_results(chain, kinds, operands):
    flag, found = None, []
    for at, (name, kind) in enumerate(zip(chain, kinds, strict=False)):
        bits = int(kind[1:])
        values = [x % 2**bits for x in operands[3 * at : 3 * at + (3 if name.startswith("mad") else 2)]]
        carries = "c." in name.replace(".cc", "") + "."  # addc, subc, madc
        result = reference(f"{name}.{kind}")(*values, *((flag,) if carries else ()))
        flag = result[1] if len(result) > 1 else flag
        found.append(result[0])
    return found


def drawn_operands(bits, seed):
    rng = np.random.default_rng(seed)
    found = rng.integers(0, 2**64, (THREADS, 9), np.uint64)
    edges = np.array(EDGES[bits], np.uint64)
    return np.where(rng.random(found.shape) < 0.6, edges[rng.integers(0, len(edges), found.shape)], found)


@pytest.mark.parametrize("kinds", sample_cases(KINDS, KINDS[3:5], "-".join))
def test_all_pairs_and_triples_share_one_flag(kinds):
    chains = PAIRS + TRIPLES
    assert (len(PAIRS), len(TRIPLES)) == (16, 128)
    text, count = chain_kernel(chains, kinds)
    data = drawn_operands(max(int(kind[1:]) for kind in kinds), 7)
    got = ptx.run(text, grid=1, block=THREADS, args=[data, np.zeros((THREADS, count), np.uint64)], target="H100")[1]
    want = [[word for chain in chains for word in expected_results(chain, kinds, list(map(int, row)))] for row in data]
    assert (got == np.array(want, np.uint64)).all()


@pytest.mark.parametrize(
    ("body", "second"),
    [
        ("sub.cc.u32 %r3, %r1, %r2; addc.u32 %r4, 0, 0;", lambda a, b: int(a >= b)),
        ("add.cc.u32 %r3, %r1, %r2; subc.u32 %r4, 100, 0;", lambda a, b: 99 + (a + b >= 2**32)),
        ("sub.cc.u32 %r3, %r1, %r2; subc.u32 %r4, 100, 0;", lambda a, b: 100 - (a < b)),
        ("sub.cc.u32 %r3, %r1, %r2; madc.lo.u32 %r4, %r1, 0, 0;", lambda a, b: int(a >= b)),
    ],
)
def test_the_flag_of_a_subtraction_is_set_where_nothing_is_borrowed(body, second):
    pairs = [(5, 3), (3, 5), (7, 7), (0, 0), (2**32 - 1, 1), (1, 2**32 - 1), (2**31, 2**31)]
    data = np.zeros((len(pairs), 4), np.uint32)
    data[:, :2] = pairs
    text = f"""
.version 8.0 .target sm_90a .address_size 64
.visible .entry k(.param .u64 p) {{
    .reg .b32 %r<9>, carry; .reg .b64 %d<4>;
    ld.param.u64 %d0, [p]; mov.u32 %r0, %tid.x; mul.wide.u32 %d1, %r0, 16; add.u64 %d0, %d0, %d1; mov.u32 carry, 77;
    ld.global.v2.b32 {{%r1, %r2}}, [%d0]; {body} st.global.v2.b32 [%d0+8], {{%r3, %r4}}; ret; }}"""
    got = ptx.run(text, grid=1, block=len(pairs), args=[data], target="H100")[0]
    assert got[:, 3].tolist() == [second(a, b) for a, b in pairs]


def test_nvidias_division_of_128_bits_gives_the_quotient():
    """tests/ptx_files/wide_division.cu by nvcc 13.0, which calls NVIDIA's own code; it reads the flag of `subc.cc` by `addc`."""
    rng = np.random.default_rng(5)
    widths = rng.integers(1, 129, (256, 2))
    numbers = [[int.from_bytes(rng.bytes(16), "little") % 2 ** int(width) for width in row] for row in widths]
    numbers += [[2**128 - 1, 2**64 - 1], [2**128 - 1, 2**64 + 1], [2**127, 3], [2**96 - 1, 2**95 + 1], [0, 1], [5, 2**127 + 1]]
    numbers = [[a, max(b, 1)] for a, b in numbers]

    a, b = (
        np.frombuffer(b"".join(number.to_bytes(16, "little") for number in column), np.uint64).copy()
        for column in zip(*numbers, strict=True)
    )
    text = (Path(__file__).parents[2] / "ptx_files/wide_division.ptx").read_text()
    found = ptx.run(text, grid=1, block=len(numbers), args=[a, b, np.zeros_like(a), np.zeros_like(a)], target="H100")[2:]
    quotients, remainders = ([int.from_bytes(row.tobytes(), "little") for row in each.reshape(-1, 2)] for each in found)
    assert quotients == [a // b for a, b in numbers]
    assert remainders == [a % b for a, b in numbers]


ALL = ("add.cc", "addc.cc", "addc", "sub.cc", "subc.cc", "subc", "mad.lo.cc", "mad.hi.cc", "madc.lo.cc", "madc.hi.cc", "madc.lo", "madc.hi")
ALL_TRIPLES = [*product(ALL, repeat=3)]  # in the order of the recording
KERNEL = 36  # triples of a recorded kernel


def compare_recorded(bits, firsts):
    """Compare the chains of some kernels with an H200's words, and count the words."""
    found, count = recording()["carry"][str(bits)], 0
    operands = np.array(found["operands"], f"u{bits // 8}")
    words = np.array(found["words"], operands.dtype)
    for first in firsts:
        chains = ALL_TRIPLES[first : first + KERNEL]
        made = np.zeros((len(chains), len(operands), RESULTS), operands.dtype)
        text = carry_text(chains, bits, len(operands))
        _, made = ptx.run(text, grid=1, block=len(operands), args=[operands, made], target="H100")
        assert np.array_equal(made, words[first : first + KERNEL])
        count += made.size
    return count


@pytest.mark.parametrize("bits", (32, 64))
def test_recorded_triples_of_an_h200(bits):
    assert compare_recorded(bits, (0, 1008)) == 2 * KERNEL * RESULTS * {32: 4, 64: 3}[bits]


@pytest.mark.full
@pytest.mark.parametrize("bits", (32, 64))
def test_all_recorded_triples_of_an_h200(bits):
    assert compare_recorded(bits, range(0, 1728, KERNEL)) == 1728 * RESULTS * {32: 4, 64: 3}[bits]
