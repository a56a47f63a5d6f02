"""The reference's step and instructions on the values that others printed and on the words that others recorded."""

from fractions import Fraction

import pytest
from support import golden

from oracles import reference
from oracles.reference import decode, encode, fused_dot_add


def f16s(values: list[float]) -> list[int]:
    return [encode("f16", Fraction(value)) for value in values]


def published_step(
    a: list[int], b: list[int], c: int, type_: str = "f16", fraction_bits: int = 25, result: str = "f32", floor: int | None = None
) -> int:
    rounding = reference.ROUNDING[result]
    floor = reference.FLOOR[result] if floor is None else floor
    return fused_dot_add(a, b, c, type_, type_, fraction_bits=fraction_bits, floor=floor, result=result, rounding=rounding)


def test_cancellation_of_mma_sim_equation_10():
    """arXiv 2511.10909 v2, table 8: -0.875 exactly; each generation keeps a number of fraction bits of its own."""
    a, b, c = [-8192, -0.5, -0.25, -0.125], [1024, 1, 1, 1], 0x4B000000
    for fraction_bits, want in [(23, 0.0), (24, -0.5), (25, -0.75), (35, -0.875)]:
        assert decode("f32", published_step(f16s(a), f16s(b), c, fraction_bits=fraction_bits)) == Fraction(want)
    e5m2 = [[encode("e5m2", Fraction(x)) for x in row] for row in (a, b)]
    assert published_step(*e5m2, c, "e5m2", 13, "e8m13") == 0
    padded = [row + [0] * 28 for row in e5m2]
    assert reference.dot("f32", "e5m2", "e5m2", "f32", *padded, c, k=32, family="wgmma") == 0


def test_f16_result_is_rounded_once():
    """MMA-Sim's behaviour test: 0.5 * (1 + 1 + 2^-10 + 2^-23). By way of f32, as in wmma f16 from f32, the last bit is lost."""
    a, b = f16s([0.5] * 4), f16s([1, 1, 2**-10, 2**-23])
    assert published_step(a, b, 0, result="f16") == 0x3C01
    assert published_step(a, b, 0) == 0x3F801000
    row, column = a + [0] * 12, b + [0] * 12
    assert reference.dot("f16", "f16", "f16", "f16", row, column, 0, k=16) == 0x3C01
    assert reference.dot("f16", "f16", "f16", "f32", row, column, 0, k=16, family="wmma") == 0x3C00


def test_fp8_accumulators_of_hopper():
    """DeepGEMM issue 37: wgmma clears the low ten bits of an accumulator, mma.sync keeps them. FLT_MAX, and the stall at 64, likewise."""
    zeros, sixteenths = [0] * 32, [encode("e4m3", Fraction(1, 16))] * 32

    def run(row: list[int], c: int, family: str) -> int:
        return reference.dot("f32", "e4m3", "e4m3", "f32", row, row, c, k=32, family=family)

    assert run(zeros, 0x40403017, "wgmma") == 0x40403000
    assert run(zeros, 0x40403017, "mma") == 0x40403017
    assert run(zeros, 0x7F7FFFFF, "wgmma") == 0x7F7FFC00
    assert run(zeros, 0x7F7FFFFF, "mma") == 0x7F7FFFFF
    total = 0
    for _ in range(600):
        total = run(sixteenths, total, "wgmma")
    assert total == 0x42800000


def test_row_3935_tells_chained_from_separate_fp8_sums():
    """Khattak and Mikaitis, B200 E5M2 row 3935: lowered to f16 as on sm_90; two separate sums would give C10DDF7D."""
    a = bytes.fromhex("c0b8b9b5a72c3bb63d2c40baa93839bdb638bc3c3338be3db2393927bdbfbcb9")
    b = bytes.fromhex("37bbb63504b830b73bbcbcbcbe3cba38b4c035b73cc032b734afbb3b3d3b393e")
    assert reference.dot("f32", "e5m2", "e5m2", "f32", list(a), list(b), 0x3F01684F, k=32) == 0xC10DDF7C


def test_floor_of_the_alignment():
    """MATLAB-tensor-core issue 7: an H100 gave 11 * 2^-149, which only the floor -133 gives. Then a probe on either side of it."""
    a = "9b94 19f3 9a2e 1a67 9a25 9b4e 9b29 9a33 99e0 1a14 9914 99d1 9ae9 1b1a 9a9c 1b3a"
    b = "9aaf 99f3 9acc 1b7c 19ed 1b25 9a1b 9a20 9af7 9a48 1ae1 1b32 1b12 1b0e 9a68 1735"
    row, column = ([int(word, 16) for word in words.split()] for words in (a, b))
    found = {floor: published_step(row, column, 0, "bf16", floor=floor) for floor in range(-140, -125)}
    assert found.pop(-133) == 11
    assert set(found.values()) == {10}
    for a, b, want in [((0x1B60, 0x1800), (0x1912, 0x1800), 1), ((0x1C84, 0x1800), (0x17F8, 0x1780), 0)]:
        assert reference.dot("f32", "bf16", "bf16", "f32", [*a, *[0] * 14], [*b, *[0] * 14], 0, k=16) == want


def test_zero_takes_no_part_and_never_comes_out_negative():
    tiny, huge = 0x00000001, 0x7F00  # f32 2^-149; bf16 2^127
    assert published_step([0, 0x8000], [huge, huge], tiny, "bf16") == tiny
    assert published_step([0x8000] * 2, [0x3C00] * 2, 0x80000000) == 0
    assert published_step([0x3F80, 0xBF80], [0x3F80, 0x3F80], 0x80000001, "bf16") == 0  # cut by the exponent of what cancelled
    assert published_step([0x8001], [0x0400], 0, result="f16") == 0


def test_overflow_inside_the_step_cancels_but_not_outside():
    assert published_step([0x7F00, 0xFF00], [0x4080, 0x4080], 0x3F800000, "bf16") == 0  # the products are 2^129 each
    assert published_step([0x7F00], [0x4000], 0, "bf16") == 0x7F800000
    # the largest bf16 is 2^128 - 2^120: just less than 2^120 more is cut to the largest f32, 2^120 is Inf
    assert published_step([0x7F7F], [0x3F80], 0x7B7FFFFF, "bf16") == 0x7F7FFFFF
    assert published_step([0x7F7F], [0x3F80], 0x7B800000, "bf16") == 0x7F800000


# ---- the words of other GPUs

PUBLISHED = {  # GPU: products in a step by bytes of A, fraction bits
    "V100": (8, 23),
    "A100": (16, 24),
    "A2": (16, 24),
    "Ada": (16, 24),
    "L40S": (16, 24),
    "H100": (32, 25),
    "H200": (32, 25),
    "B200": (32, 25),
}
TYPES = {"fp16": "f16", "bf16": "bf16", "tf32": "tf32", "E4M3": "e4m3", "E5M2": "e5m2"}


def published_word(gpu: str, type_: str, a: list[int], b: list[int], c: int, result: str) -> int:
    step_bytes, fraction_bits = PUBLISHED[gpu]
    if type_ not in reference.FP8:
        terms = step_bytes * 8 // (32 if type_ == "tf32" else 16)
        return reference.chain(a, b, c, type_, type_, result, terms, fraction_bits)
    if gpu in ("Ada", "L40S"):
        return reference.chain(a, b, c, type_, type_, "e8m13" if result == "f32" else "f16", 16, 13)
    if gpu == "B200" or result == "f16":  # mma.sync, lowered to f16
        return reference.dot(result, type_, type_, result, a, b, c, k=32)
    return reference.dot("f32", type_, type_, "f32", a, b, 0, k=32, family="wgmma")  # recorded with C = 0


@pytest.mark.parametrize("gpu", PUBLISHED)
def test_published_words(gpu):
    """Up to 200 rows of every file of a GPU; the inputs are f32 words that hold the narrow values exactly."""
    data, compared = golden.published_arrays(), 0
    for key in [key for key in data if key.startswith(f"{gpu}_") and "_d_" in key]:
        _, format_, _, output = key.split("_")
        type_, result = TYPES[format_], {"fp32": "f32", "fp16": "f16"}[output]
        for row in range(0, len(data[key]), max(1, len(data[key]) // 200)):
            a, b = ([reference.convert("f32", type_, int(w)) for w in data[f"{gpu}_{format_}_{x}"][row]] for x in "ab")
            c = reference.convert("f32", result, int(data[f"{gpu}_{format_}_c"][row]))
            got = published_word(gpu, type_, a, b, c, result)
            assert reference.convert(result, "f32", got) == int(data[key][row]), f"{key} row {row}"
            compared += 1
    assert compared >= 40
