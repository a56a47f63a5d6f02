"""The block-scaled reference, on published values and where the sum is exact: there any order and any arithmetic must give the same."""

import random
from fractions import Fraction

from oracles import reference
from oracles.block_scaled_reference import grouped_dot_add, scaled_dot_add
from oracles.reference import decode, encode

ONE = {"ue8m0": 127, "ue4m3": 0x38}


def codes(name: str, values: list[float], length: int) -> list[int]:
    return [encode(name, Fraction(value)) for value in values] + [0] * (length - len(values))


def test_cancellation_of_mma_sim_equation_10():
    """arXiv 2511.10909 v2, table 8, Blackwell: MXFP8 gives -0.75, MXFP4 and NVFP4 the exact -0.875."""
    a, b = codes("e5m2", [-8192, -0.5, -0.25, -0.125], 32), codes("e5m2", [1024, 1, 1, 1], 32)
    assert decode("f32", scaled_dot_add(a, b, 0x4B000000, "e5m2", "e5m2", [127], [127])) == Fraction(-3, 4)
    a, b = ([0] * 64 for _ in range(2))
    for at, x, y in [(0, -4, 2), (16, -0.5, 1), (17, -0.5, 0.5), (32, -0.5, 0.5)]:
        a[at], b[at] = encode("e2m1", Fraction(x)), encode("e2m1", Fraction(y))
    scales = [encode("ue8m0", Fraction(x)) for x in (2**20, 1, Fraction(1, 2), 1)]
    assert decode("f32", grouped_dot_add(a, b, 0x4B000000, "ue8m0", scales, [127])) == Fraction(-7, 8)
    wide = [encode("ue4m3", Fraction(x)) for x in (256, 1, Fraction(1, 2), 1)], [encode("ue4m3", Fraction(x)) for x in (256, 1, 1, 1)]
    c = encode("f32", Fraction(8 * 2**16))
    assert decode("f32", grouped_dot_add(a, b, c, "ue4m3", *wide)) == Fraction(-7, 8)


def test_unit_scales_change_nothing():
    rng = random.Random(1)
    for name in ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1"):
        for _ in range(100):
            a, b = ([rng.getrandbits(reference.FORMATS[name].bits) for _ in range(32)] for _ in range(2))
            c = rng.getrandbits(32)
            plain = reference.fused_dot_add(a, b, c, name, name, fraction_bits=25, floor=-133, result="f32", rounding="RZ")
            assert scaled_dot_add(a, b, c, name, name, [127], [127]) == plain
            shift = rng.randint(-60, 60)
            assert scaled_dot_add(a, b, c, name, name, [127 + shift], [127 - shift]) == plain


def test_exact_sums_are_rounded_toward_zero():
    """Scales within 2^5 of each other and a C of few bits: nothing is cut by the alignment, so only the last rounding is left."""
    rng = random.Random(2)
    for scale, count in (("ue8m0", 2), ("ue4m3", 4), ("ue8m0", 4)):
        for _ in range(200):
            a, b = ([rng.getrandbits(4) for _ in range(64)] for _ in range(2))
            near = ONE[scale] - (2 << 3 if scale == "ue4m3" else 2)
            a_scales, b_scales = ([near + rng.randrange(5 if scale == "ue8m0" else 32) for _ in range(count)] for _ in range(2))
            c = encode("f32", Fraction(rng.randint(-99, 99), 16))
            total = decode("f32", c)
            for k in range(64):
                block = k * count // 64
                total += decode("e2m1", a[k]) * decode("e2m1", b[k]) * decode(scale, a_scales[block]) * decode(scale, b_scales[block])
            assert grouped_dot_add(a, b, c, scale, a_scales, b_scales) == encode("f32", total, "RZ")


def test_scale_and_value_are_not_interchangeable():
    """Products of one value, its factor of two in the scale or in the elements: a group is aligned by its scales alone (so sm_120 does)."""

    def run(value: float, exponent: int) -> Fraction:
        a, b = codes("e2m1", [value, -value], 64), codes("e2m1", [1, 1], 64)  # they cancel, and still lift the alignment
        a[16] = b[16] = encode("e2m1", Fraction(1, 2))
        return decode("f32", grouped_dot_add(a, b, 0, "ue8m0", [127 + exponent, 127, 127, 127], [127]))

    assert run(2, 33) == Fraction(1, 4)
    assert run(1, 34) == 0
    assert run(0, 34) == Fraction(1, 4)  # a group of zeros has no say


def test_specials_of_scales():
    zeros, infinity = [0] * 64, 0x7F800000
    assert grouped_dot_add(zeros, zeros, infinity, "ue8m0", [0xFF, 127], [127, 127]) == 0x7FFFFFFF
    assert grouped_dot_add(zeros, zeros, 0, "ue4m3", [0x7F] * 4, [0x38] * 4) == 0x7FFFFFFF
    assert scaled_dot_add(zeros[:32], zeros[:32], infinity, "e4m3", "e4m3", [0xFF], [127]) == 0x7FFFFFFF
    full = [encode("e2m1", Fraction(6))] * 64
    assert grouped_dot_add(full, full, 0xFF800000, "ue8m0", [254, 254], [254, 254]) == 0xFF800000  # the accumulator, never NaN
    assert grouped_dot_add(full, full, 0, "ue8m0", [254, 254], [254, 254]) == infinity
    assert grouped_dot_add(full, full, 0x3F800000, "ue4m3", [0] * 4, [0x7E] * 4) == 0x3F800000  # a zero scale takes no part
    assert grouped_dot_add(full, full, 0, "ue8m0", [0, 0], [127, 127]) == encode("f32", Fraction(36 * 64) / 2**127)  # 0x00 is 2^-127
