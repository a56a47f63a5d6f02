"""The slow exact reference: number formats, the fused dot-add, and what each sm_90 instruction computes for one element of D.

Python integers and fractions only, one element at a time, and not a line shared with tcemu: neither it nor jax is imported here.
Codes are plain ints; modes are RN (ties to even), RZ, RM, RP. The arithmetic is that of the H200 recordings, which
test_reference_golden.py replays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

MODES = ("RN", "RZ", "RM", "RP")


@dataclass(frozen=True)
class Spec:
    """One format. A finite float is (-1)^sign * significand * 2^(exponent - fraction), subnormals at the smallest normal's exponent."""

    bits: int
    exponent: int = 0  # width of the exponent field; 0 is an integer
    fraction: int = 0
    bias: int = 0
    signed: bool = True
    # the last exponent field: "ieee" Inf and NaN, "nan" only the all-ones code, "fnuz" a NaN at -0, "finite" nothing special
    top: str = "finite"
    ignored: int = 0  # low bits of the code that mean nothing
    nan: int = 0  # what a NaN becomes; PTX `cvt` sends it to the largest value where there is none, and to 0 in an integer

    @property
    def least(self) -> int:  # exponent of the smallest normal, and of zero and the subnormals
        return 1 - self.bias

    @property
    def greatest(self) -> int:  # largest finite magnitude, as a code without sign and ignored bits
        ones = (1 << (self.exponent + self.fraction)) - 1
        return {"ieee": ones - (1 << self.fraction), "nan": ones - 1, "finite": ones, "fnuz": ones}[self.top]


FORMATS = {
    "f64": Spec(64, 11, 52, 1023, top="ieee", nan=(1 << 63) - 1),
    "f32": Spec(32, 8, 23, 127, top="ieee", nan=0x7FFFFFFF),
    "tf32": Spec(32, 8, 10, 127, top="ieee", ignored=13, nan=0x7FFFFFFF),
    "e8m13": Spec(32, 8, 13, 127, top="ieee", ignored=10, nan=0x7FFFFFFF),  # what an FP8 wgmma leaves in an f32 register
    "f16": Spec(16, 5, 10, 15, top="ieee", nan=0x7FFF),
    "bf16": Spec(16, 8, 7, 127, top="ieee", nan=0x7FFF),
    "e5m2": Spec(8, 5, 2, 15, top="ieee", nan=0x7F),
    "e4m3": Spec(8, 4, 3, 7, top="nan", nan=0x7F),
    "e5m2fnuz": Spec(8, 5, 2, 16, top="fnuz", nan=0x80),
    "e4m3fnuz": Spec(8, 4, 3, 8, top="fnuz", nan=0x80),
    "e3m2": Spec(6, 3, 2, 3, nan=0x1F),
    "e2m3": Spec(6, 2, 3, 1, nan=0x1F),
    "e2m1": Spec(4, 2, 1, 1, nan=0x7),
    "ue8m0": Spec(8, 8, 0, 127, signed=False, top="nan", nan=0xFF),  # no zero: code 0 is 2^-127 (OCP MX 1.0, 5.4.1)
    "ue4m3": Spec(7, 4, 3, 7, signed=False, top="nan", nan=0x7F),
    "ue5m3": Spec(8, 5, 3, 15, signed=False, top="nan", nan=0xFF),
    "s32": Spec(32),
    "s8": Spec(8),
    "u8": Spec(8, signed=False),
    "s4": Spec(4),
    "u4": Spec(4, signed=False),
    "b1": Spec(1, signed=False),
}


# ---- decode


@lru_cache(maxsize=1 << 13)
def power_of_two(exponent: int) -> Fraction:
    """2^exponent."""
    return Fraction(2) ** int(exponent)


@lru_cache(maxsize=1 << 18)
def parts(name: str, code: int) -> tuple[str, int, int, int]:
    """("finite" | "inf" | "nan", sign, significand, exponent) of a float code; bits above the format's width mean nothing."""
    spec = FORMATS[name]
    code &= (1 << spec.bits) - 1
    sign = code >> (spec.bits - 1) if spec.signed else 0
    magnitude = (code >> spec.ignored) & ((1 << (spec.exponent + spec.fraction)) - 1)
    field, low = magnitude >> spec.fraction, magnitude & ((1 << spec.fraction) - 1)
    if spec.top == "fnuz" and code == spec.nan:
        return "nan", sign, 0, 0
    if magnitude > spec.greatest:
        return ("inf" if spec.top == "ieee" and low == 0 else "nan"), sign, 0, 0
    if name == "ue8m0":
        return "finite", 0, 1, field - spec.bias
    if field == 0:
        return "finite", sign, low, spec.least
    return "finite", sign, low | 1 << spec.fraction, field - spec.bias


@lru_cache(maxsize=1 << 18)
def decode(name: str, code: int) -> Fraction | str | tuple[str, int]:
    """The exact value of a code: a Fraction, "nan", or ("inf", sign). A zero's sign is `sign_of`."""
    spec, code = FORMATS[name], int(code)
    if not spec.exponent:
        code &= (1 << spec.bits) - 1
        return Fraction(code - (1 << spec.bits) if spec.signed and code >> (spec.bits - 1) else code)
    kind, sign, significand, exponent = parts(name, code)
    if kind != "finite":
        return "nan" if kind == "nan" else ("inf", sign)
    return int((-1) ** sign * significand) * power_of_two(exponent - spec.fraction)


def sign_bit(name: str, code: int) -> int:
    """The sign bit of a code, 0 in a format that has none."""
    spec = FORMATS[name]
    return code >> (spec.bits - 1) & 1 if spec.signed else 0


# ---- encode


def _dyadic(value: Fraction) -> tuple[int, int]:
    """(n, e) with |value| = n * 2^e; a value that is not dyadic keeps bits far below every format's and a last bit that says so."""
    n, d = abs(value.numerator), value.denominator
    if d & (d - 1) == 0:
        return n, 1 - d.bit_length()
    scale = 1200 + d.bit_length()
    return (n << scale) // d << 1 | 1, -scale - 1


def _round_up(sign: int, odd: int, rest: int, half: int, mode: str) -> bool:
    """Whether a magnitude with `rest` left over goes to the next one."""
    if mode == "RN":
        return rest > half or (rest == half and odd == 1)
    if mode == "RNA":  # to nearest, ties away from zero
        return rest >= half
    return rest > 0 and mode == ("RM" if sign else "RP")


def _split(n: int, shift: int) -> tuple[int, int, int]:
    """n / 2^shift as (whole, rest, half), rest and half in one unit."""
    if shift <= 0:
        return n << -shift, 0, 1
    return n >> shift, n & ((1 << shift) - 1), 1 << (shift - 1)


def _encode(spec: Spec, sign: int, n: int, e: int, mode: str, saturate: bool = False, always_inf: bool = False) -> int:
    """The code of (-1)^sign * n * 2^e, n > 0. `always_inf`: what rounds beyond the largest magnitude is Inf, whatever the mode."""
    head = n.bit_length() - 1 + e
    if spec is not FORMATS["ue8m0"]:
        head = max(head, spec.least)
    whole, rest, half = _split(n, head - spec.fraction - e)
    # consecutive codes are consecutive magnitudes, so the exponent's carry is an ordinary carry
    magnitude = whole + ((head - spec.least) << spec.fraction)
    magnitude += _round_up(sign, magnitude & 1, rest, half, mode)
    if spec is FORMATS["ue8m0"]:
        magnitude = max(magnitude, 0)
    if magnitude > spec.greatest:
        toward_zero = mode == "RZ" or mode == ("RP" if sign else "RM")
        if always_inf or not (saturate or toward_zero or spec.top == "finite"):
            return encode_inf(spec, sign)
        magnitude = spec.greatest
    return _pack(spec, sign, magnitude)


def _pack(spec: Spec, sign: int, magnitude: int) -> int:
    sign = 0 if spec.top == "fnuz" and not magnitude else sign
    return magnitude << spec.ignored | (sign << (spec.bits - 1) if spec.signed else 0)


def encode_inf(spec: Spec, sign: int, saturate: bool = False) -> int:
    """Inf where the format has it and it is not to saturate, else NaN where it has that (with the sign), else the largest magnitude."""
    if saturate or spec.top == "finite":
        return _pack(spec, sign, spec.greatest)
    if spec.top == "ieee":
        return _pack(spec, sign, spec.greatest + 1)
    if spec.top == "fnuz":
        return spec.nan
    return _pack(spec, sign, (1 << (spec.exponent + spec.fraction)) - 1)


def encode(name: str, value: Fraction | int, mode: str = "RN", saturate: bool = False, zero_sign: int = 0) -> int:
    """The code of a rational value.

    A value that rounds beyond the largest magnitude goes, without `saturate`, where IEEE 754 sends it: RN and the direction away from zero
    to Inf, or NaN of that sign where the format has only NaN (e4m3: above 464 in RN, as ml_dtypes), the others to the largest magnitude.
    e3m2, e2m3, e2m1 and the integers always saturate. A zero result has the sign of the value, an exact zero `zero_sign`.

    A negative value in an unsigned float is NaN, or with `saturate` the smallest code; so is zero in ue8m0, which has none (as ml_dtypes,
    and CUDA's saturating conversion, have it). A positive value below 2^-127 is code 0 of ue8m0 in every mode, that being the nearest;
    ties in ue8m0 go to the even code.
    """
    spec, value = FORMATS[name], Fraction(value)
    if mode not in (*MODES, "RNA"):
        raise ValueError(f"mode is {mode!r}; one of {MODES} or RNA is wanted")
    n, e = _dyadic(value)
    sign = int(value < 0)
    if not spec.exponent:
        whole, rest, half = _split(n, -e)
        magnitude = whole + _round_up(sign, whole & 1, rest, half, mode)
        low, high = (-(1 << (spec.bits - 1)), (1 << (spec.bits - 1)) - 1) if spec.signed else (0, (1 << spec.bits) - 1)
        return min(max(-magnitude if sign else magnitude, low), high) & ((1 << spec.bits) - 1)
    if not spec.signed and (sign or (n == 0 and name == "ue8m0")):
        return 0 if saturate else spec.nan
    return _encode(spec, sign, n, e, mode, saturate) if n else _pack(spec, zero_sign, 0)


@lru_cache(maxsize=1 << 18)
def convert(source: str, target: str, code: int, mode: str = "RN", saturate: bool = False) -> int:
    """One code to another format; NaN becomes `Spec.nan`, Inf what an overflow in RN becomes."""
    value, spec = decode(source, code), FORMATS[target]
    if isinstance(value, Fraction):
        return encode(target, value, mode, saturate, sign_bit(source, code))
    if value == "nan":
        return spec.nan
    sign = value[1]
    if not spec.exponent:
        return encode(target, Fraction((-1) ** int(sign) << 64))
    if sign and not spec.signed:
        return 0 if saturate else spec.nan
    return encode_inf(spec, int(sign), saturate)


# ---- the tensor core's step

Term = tuple[int, int, int, int]  # sign, integer, the exponent it is aligned by, the exponent of the integer's last bit
NAN = frozenset((0, 1))  # infinities of both signs: what a NaN does to a sum


def product_terms(a_codes: Sequence[int], b_codes: Sequence[int], a_fmt: str, b_fmt: str) -> tuple[list[Term | None], set[int]]:
    """The exact, unnormalised products (None for a zero, which takes no part) and the signs of the infinite ones."""
    terms, infinities = [], set()
    below = FORMATS[a_fmt].fraction + FORMATS[b_fmt].fraction
    for a, b in zip(a_codes, b_codes, strict=True):
        a_kind, a_sign, a_significand, a_exponent = parts(a_fmt, a)
        b_kind, b_sign, b_significand, b_exponent = parts(b_fmt, b)
        term = None
        if a_kind != "finite" or b_kind != "finite":
            zero = (a_kind == "finite" and not a_significand) or (b_kind == "finite" and not b_significand)
            infinities |= NAN if zero or "nan" in (a_kind, b_kind) else {a_sign ^ b_sign}
        elif a_significand and b_significand:
            exponent = a_exponent + b_exponent
            term = (a_sign ^ b_sign, a_significand * b_significand, exponent, exponent - below)
        terms.append(term)
    return terms, infinities


def align_add_round(
    terms: Sequence[Term | None], infinities: set[int], c_code: int | None, fraction_bits: int, floor: int, result: str, rounding: str,
    alignment: str = "RZ",
) -> int:  # fmt: skip
    """Align terms and C to the largest exponent, cut (or round, by `alignment`), add exactly, round once.

    A term of integer 0 still has its say in the alignment.
    """
    spec, c_fmt = FORMATS[result], "f16" if result == "f16" else "f32"
    present = [term for term in terms if term is not None]
    if c_code is not None:
        kind, sign, significand, exponent = parts(c_fmt, c_code)
        if kind != "finite":
            infinities = infinities | (NAN if kind == "nan" else {sign})
        elif significand:
            present.append((sign, significand, exponent, exponent - FORMATS[c_fmt].fraction))
    if infinities:
        return spec.nan if infinities == NAN else encode_inf(spec, min(infinities))
    unit = max([floor, *(exponent for _, _, exponent, _ in present)]) - fraction_bits
    total = 0
    for sign, integer, _, last in present:
        cut, rest, half = _split(integer, unit - last)
        up = {"RN": rest > half or (rest == half and cut % 2), "RZ": False, "RM": rest and sign, "RP": rest and not sign}[alignment]
        total += (-1) ** sign * (cut + bool(up))
    if total == 0:
        return 0
    code = _encode(spec, int(total < 0), abs(total), unit, rounding, always_inf=True)
    return code if code << 1 & ((1 << spec.bits) - 1) else 0  # what rounds to zero is +0


def fused_dot_add(
    a_codes: Sequence[int],
    b_codes: Sequence[int],
    c_code: int | None,
    a_fmt: str,
    b_fmt: str,
    *,
    fraction_bits: int,
    floor: int,
    result: str,
    rounding: str,
    alignment: str = "RZ",
) -> int:
    """One truncated fused dot-add. C has the format of `result` ("f16", else f32: "f32" or "e8m13"); None is no accumulator."""
    terms, infinities = product_terms(a_codes, b_codes, a_fmt, b_fmt)
    return align_add_round(terms, infinities, c_code, fraction_bits, floor, result, rounding, alignment)


# ---- IEEE 754 operations


def fma(a: int, b: int, c: int, fmt: str, mode: str = "RN") -> int:
    """a * b + c rounded once, f32 or f64. NaN: f32 canonical; f64 the first NaN of b, c, a made quiet, or FFF8... if none came in."""
    spec = FORMATS[fmt]
    invalid = 0xFFF8 << 48 if fmt == "f64" else spec.nan
    operands = {"a": parts(fmt, a), "b": parts(fmt, b), "c": parts(fmt, c)}
    for code, name in ((b, "b"), (c, "c"), (a, "a")):
        if operands[name][0] == "nan":
            return code | 1 << (spec.fraction - 1) if fmt == "f64" else invalid
    (ka, sa, ma, ea), (kb, sb, mb, eb), (kc, sc, mc, ec) = operands.values()
    sp = sa ^ sb
    if ka == "inf" or kb == "inf":
        no_value = (ka == "finite" and ma == 0) or (kb == "finite" and mb == 0) or (kc == "inf" and sc != sp)
        return invalid if no_value else encode_inf(spec, sp)
    if kc == "inf":
        return encode_inf(spec, sc)
    p_last, c_last = ea + eb - 2 * spec.fraction, ec - spec.fraction
    last = min(p_last, c_last)
    total = (-1) ** sp * (ma * mb << (p_last - last)) + (-1) ** sc * (mc << (c_last - last))
    if total == 0:
        zero = sp if ma * mb == 0 and mc == 0 and sp == sc else int(mode == "RM")
        return _pack(spec, zero, 0)
    return _encode(spec, int(total < 0), abs(total), last, mode)


def add(x: int, y: int, fmt: str, mode: str = "RN") -> int:
    """x + y rounded once, any IEEE format; the NaN is the format's own."""
    spec = FORMATS[fmt]
    u, v = decode(fmt, x), decode(fmt, y)
    if isinstance(u, Fraction) and isinstance(v, Fraction):
        total, signs = u + v, (sign_bit(fmt, x), sign_bit(fmt, y))
        return encode(fmt, total, mode, zero_sign=signs[0] if u == 0 and signs[0] == signs[1] else int(mode == "RM"))
    infinities = {w for w in (u, v) if not isinstance(w, Fraction)}
    return spec.nan if "nan" in infinities or len(infinities) == 2 else encode_inf(spec, int(infinities.pop()[1]))


# ---- instructions of sm_90

FP8 = ("e4m3", "e5m2")
FLOOR = {"f32": -133, "e8m13": -133, "f16": -21}
ROUNDING = {"f32": "RZ", "e8m13": "RZ", "f16": "RN"}


def chain(
    a_row: Sequence[int], b_col: Sequence[int], c_code: int | None, a: str, b: str, result: str, terms: int, fraction_bits: int = 25
) -> int:
    """Fused steps of `terms` products, k ascending, each one's result the next one's accumulator; sm_90's floors and roundings."""
    for at in range(0, len(a_row), terms):
        c_code = fused_dot_add(
            a_row[at : at + terms],
            b_col[at : at + terms],
            c_code,
            a,
            b,
            fraction_bits=fraction_bits,
            floor=FLOOR[result],
            result=result,
            rounding=ROUNDING[result],
        )
    return c_code


def _fp8_as_f16(a_row: Sequence[int], b_col: Sequence[int], c_code: int, a: str, b: str, d: str) -> int:
    """FP8 through mma.sync: as f16 from zero, k mod 4 in {0, 1}, then {2, 3}; C added last. In mma.sp k counts the kept products."""
    wide_a, wide_b = [convert(a, "f16", x) for x in a_row], [convert(b, "f16", x) for x in b_col]
    order = [i for i in range(len(a_row)) if i % 4 < 2] + [i for i in range(len(a_row)) if i % 4 >= 2]
    partial = chain([wide_a[i] for i in order], [wide_b[i] for i in order], 0, "f16", "f16", d, len(order) // 2)
    return add(partial, c_code, d)


def _quad_pair(a_row: Sequence[int], b_col: Sequence[int], c_code: int, c: str, d: str) -> int:
    """m8n8k4 f16 after sm_70: f32 operations on widened operands."""
    a0, a1, a2, a3 = (convert("f16", "f32", x) for x in a_row)
    b0, b1, b2, b3 = (convert("f16", "f32", x) for x in b_col)
    minus_zero, wide_c = 1 << 31, convert(c, "f32", c_code)
    if d == "f32":  # from +0 on: an NVIDIA H200 gives +0 where all four products are -0
        total = 0
        for x, y in ((a0, b0), (a1, b1), (a2, b2), (a3, b3)):
            total = fma(x, y, total, "f32")
        return add(total, wide_c, "f32")
    low = fma(a1, b1, fma(a0, b0, minus_zero, "f32"), "f32")  # x + (-0) is x: a product alone
    high = fma(a3, b3, fma(a2, b2, minus_zero, "f32"), "f32")
    return convert("f32", "f16", add(add(wide_c, low, "f32"), high, "f32"))


def clamped_dot(a: str, b: str, a_row: Sequence[int], b_col: Sequence[int], c_code: int, step: int) -> int:
    """An integer sum that is clamped to s32 after each `step` products, as `.satfinite` is by targets that split an instruction."""
    for start in range(0, len(a_row), step):
        part = slice(start, start + step)
        c_code = _integers(a_row[part], b_col[part], c_code, a, b, True, None)
    return c_code


def _integers(a_row: Sequence[int], b_col: Sequence[int], c_code: int, a: str, b: str, satfinite: bool, bit_op: str | None) -> int:
    if a == "b1":
        total = sum((x ^ y if bit_op == "xor" else x & y) & 1 for x, y in zip(a_row, b_col, strict=True))
    else:
        total = sum(int(decode(a, x)) * int(decode(b, y)) for x, y in zip(a_row, b_col, strict=True))
    total += int(decode("s32", c_code))
    return encode("s32", total) if satfinite else total & 0xFFFFFFFF


def dot(
    d: str,
    a: str,
    b: str,
    c: str,
    a_row: Sequence[int],
    b_col: Sequence[int],
    c_code: int | None,
    *,
    k: int,
    family: str = "mma",
    mode: str = "RN",
    satfinite: bool = False,
    bit_op: str | None = None,
) -> int:
    """One element of D of one instruction on sm_90: the types as PTX orders them, a row of A, a column of B and C as codes.

    `family` is mma, mma.sp, wmma, wgmma or wgmma.sp. A sparse one takes the K/2 kept elements of A and the B elements they meet
    (`kept_positions`). `c_code` None is wgmma's scale-d false. `bit_op` is "xor" or "and" for b1.
    """
    wanted = k // 2 if family.endswith(".sp") else k
    if not len(a_row) == len(b_col) == wanted:
        raise ValueError(f"{family} k{k}: {wanted} elements of A and of B are wanted, {len(a_row)} and {len(b_col)} came")
    if c_code is None and family.startswith("wgmma"):
        if d == "s32":
            c_code = 0
    elif c_code is None:
        raise ValueError(f"{family} has always an accumulator; c_code is None")
    if d == "s32":
        return _integers(a_row, b_col, c_code, a, b, satfinite, bit_op)
    if d == "f64":
        for x, y in zip(a_row, b_col, strict=True):
            c_code = fma(x, y, c_code, "f64", mode)
        return c_code
    if family.startswith("wgmma"):
        fp8 = a in FP8
        return chain(a_row, b_col, c_code, a, b, "e8m13" if fp8 and d == "f32" else d, wanted, 13 if fp8 else 25)
    if a in FP8:
        return _fp8_as_f16(a_row, b_col, c_code, a, b, d)
    if family == "mma" and a == "f16" and k == 4:
        return _quad_pair(a_row, b_col, c_code, c, d)
    if c == "f16" and d == "f32":
        c_code = convert("f16", "f32", c_code)
    step = chain(a_row, b_col, c_code, a, b, "f16" if c == d == "f16" else "f32", 4 if family == "wmma" and a == "tf32" else wanted)
    return convert("f32", "f16", step) if c == "f32" and d == "f16" else step


# ---- sparse metadata

CHUNK = {"tf32": 2, "s4": 8, "u4": 8}  # dense elements that one 4-bit field describes; 4 for the other types


def kept_positions(a: str, fields: Sequence[int]) -> list[int]:
    """The dense k of each kept element of a row, from its chunks' fields: two of four, two pairs of four, for tf32 one of two."""
    width = CHUNK.get(a, 4)
    positions = []
    for chunk, field in enumerate(fields):
        first, second = field & 3, field >> 2 & 3
        inside = {2: [first >> 1], 4: [first, second], 8: [2 * first, 2 * first + 1, 2 * second, 2 * second + 1]}[width]
        positions += [width * chunk + i for i in inside]
    return positions
