"""The steps of `dot_add` for the kernel in `tile`.

This is no other arithmetic. A step takes the largest exponent, cuts each product there, adds, and rounds once, as `dot_add` says; what
differs is how the machine is made to do it:

  exponents   of two terms in a word, 16 bits each: one packed add-and-maximum serves both.
  cut         |x| |y| + C, rounded toward zero, where C is the power of two whose last place is the step's unit. The low bits of that sum
              are the product, cut to whole units: of an f64, always; of an f32, if a product is less than 2^15 units.
  signs       the cut magnitude times +1 or -1, two terms an instruction (dp2a); or, where it is longer than 16 bits, the magnitude or its
              complement, which is one too low, so that at the end of a step the negative terms are counted and added.
  end         the sum and the accumulator, cut to the unit, are added exactly (in an s32, or in an f64) and cut to f32 by one conversion.

A product of zero adds nothing. Inf and NaN carry no exponent and a magnitude that no unit sees; they have a branch of their own, which a
step takes only where one of them stands in it.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from tcemu import bits
from tcemu.arithmetic.kernels.ptx import ptx
from tcemu.arithmetic.kernels.steps import ABSENT, SIGN, Loads, end_in_integers, is_special, own_exponent, tiles
from tcemu.arithmetic.multiplicands import SPECIAL_EXPONENT, Scale
from tcemu.formats import F32, Format, decode

INFINITE, NOT_A_NUMBER = 1, 2  # words of Inf and NaN: subnormals, below every unit
CHUNK = 4  # products cut and added together
MAX_TERMS = 32  # whose signs fit one word


class Word(NamedTuple):
    """The float that a significand travels in: the top 32 bits of an f64, or an f32."""

    bias: int
    mantissa: int  # fraction bits in the word
    fraction: int  # of the float


F64_WORD, F32_WORD = Word(1023, 20, 52), Word(127, 23, 23)


class FusedSteps(NamedTuple):
    """What the kernel must know of an arithmetic; static. See `steps.Steps`."""

    a: Format
    b: Format
    terms: int  # of a step
    fraction_bits: int
    floor: int
    lost: int  # fraction bits of f32 that a result gives up
    scaled: bool
    assembly: bool  # the inner operations are PTX

    @property
    def least(self) -> int:
        """The least exponent of a product that is not zero."""
        return self.a.least_exponent + self.b.least_exponent

    @property
    def greatest(self) -> int:
        """The greatest exponent of a step in which the products still have a unit."""
        return self.a.greatest_exponent + self.b.greatest_exponent + 1 + self.fraction_bits

    @property
    def wide(self) -> bool:
        """The steps that products take part in may lie beyond the exponents of f32; or the floor may lie among those of the accumulator."""
        powers = (self.fraction_bits - self.least, self.least - self.fraction_bits, self.fraction_bits - self.greatest)
        return self.scaled or self.floor > F32.least_exponent or not all(abs(power) < F32.bias for power in powers)

    @property
    def narrow(self) -> bool:
        """A product is less than 2^15 units, and with the accumulator the sum of a step is an s32."""
        return not self.wide and self._largest_units() < 2**15

    @property
    def word(self) -> Word:
        return F32_WORD if self.narrow else F64_WORD

    @property
    def sums(self) -> int:
        """s32 sums that a step is added in."""
        return 1 if self.terms * self._largest_units() < 2**31 else 2

    def _largest_units(self) -> int:
        """Of one product."""
        a, b = (2 ** (fmt.mantissa_bits + 1) - 1 for fmt in (self.a, self.b))
        return a * b << max(0, self.fraction_bits - self.a.mantissa_bits - self.b.mantissa_bits)

    @property
    def possible(self) -> bool:
        short = all(fmt.mantissa_bits <= 10 and fmt.words == 1 and not fmt.is_integer for fmt in (self.a, self.b))
        whole = self.terms % (CHUNK * self.sums) == 0 and self.terms <= MAX_TERMS
        return short and whole and self.terms // self.sums * self._largest_units() < 2**31

    @property
    def tile(self) -> tuple[int, int]:
        return (32, 128) if self.narrow else (32, 64)

    @property
    def warps(self) -> int:
        return 8 if self.narrow or self.sums > 1 else 4

    def prepare(self, side: int, codes: Array, scales: Scale | None, width: int) -> tuple[tuple[Array, ...], Array]:
        return prepare(self, side, codes, scales, width)

    def step(self, row: Loads, column: Loads, c: Array, special: Array) -> Array:
        return step(self, row, column, c, special)


# ---- preparing, once a matrix


class FusedOperand(NamedTuple):
    """A multiplicand for the kernel: [batch, tiles, steps, ..., width of a tile], int32."""

    words: Array  # [..., terms, width]: the magnitude; in an f64 word with the sign
    exponents: Array  # [..., terms / 2, width]: two in a word
    signs: Array  # [..., terms / 4, width]: four bytes; in f64 words [..., 1, width], a bit a term


def prepare(steps: FusedSteps, side: int, codes: Array, scales: Scale | None, width: int) -> tuple[FusedOperand, Array]:
    """A multiplicand, and int32 [batch, steps], 1 where an Inf or a NaN stands.

    side: 0 for A, 1 for B, and the byte of a positive sign; codes: [batch, K, rows or columns], whole steps and whole tiles.
    """
    fmt = (steps.a, steps.b)[side]
    number, word = decode(fmt, codes), steps.word
    magnitude, exponent = number.magnitude[0].astype(jnp.int32), number.exponent
    if scales is not None:
        number = number._replace(nan=number.nan | (scales.exponent == SPECIAL_EXPONENT))
        exponent = exponent + jnp.where(number.nan, 0, scales.exponent)
    special, zero = number.nan | number.infinite, magnitude == 0
    normal = lax.bitcast_convert_type(magnitude.astype(jnp.float32), jnp.int32)
    words = ((normal >> 23) - F32.bias + word.bias + exponent << word.mantissa) | ((normal & 0x7FFFFF) >> (23 - word.mantissa))
    words = jnp.where(number.nan, NOT_A_NUMBER, jnp.where(number.infinite, INFINITE, jnp.where(zero, 0, words)))
    words = jnp.where(number.negative & (special | (not steps.narrow)), words | SIGN, words)
    by_line = lambda v, terms: v.reshape(v.shape[0], -1, terms, v.shape[-1])  # noqa: E731
    pair = by_line(jnp.where(zero | special, ABSENT, exponent + fmt.mantissa_bits), 2)
    group, bit = (4, 8) if steps.narrow else (steps.terms, 1)
    sign = jnp.where(number.negative, (side ^ 0xFE) if steps.narrow else 1, side if steps.narrow else 0).astype(jnp.uint32)
    signs = jnp.sum(by_line(sign, group) << (bit * jnp.arange(group, dtype=jnp.uint32)[:, None]), axis=2, dtype=jnp.uint32)
    cut = lambda v, rows: tiles(v, rows, width)  # noqa: E731
    prepared = FusedOperand(
        cut(words, steps.terms), cut((pair[:, :, 1] << 16) | (pair[:, :, 0] & 0xFFFF), steps.terms // 2),
        cut(lax.bitcast_convert_type(signs, jnp.int32), steps.terms // group),
    )  # fmt: skip
    return prepared, jnp.any(by_line(special, steps.terms), axis=(2, 3)).astype(jnp.int32)


# ---- the three inner operations, each in PTX and in plain integers


ADD_MAX = """
    .reg .b32 %sum;
    add.s16x2 %sum, %x, %y;             // the exponents of two products at once
    max.s16x2 %result, %sum, %best;
"""


def add_max(steps: FusedSteps, x: Array, y: Array, best: Array) -> Array:
    """max(x + y, best) in both 16-bit halves."""
    if steps.assembly:
        return ptx(ADD_MAX, x=x, y=y, best=best)
    high = jnp.maximum((x >> 16) + (y >> 16), best >> 16)
    low = jnp.maximum(_low(x) + _low(y), _low(best))
    return (high << 16) | (low & 0xFFFF)


def _low(x: Array) -> Array:
    return (x << 16) >> 16


CUT_ADD_NARROW = """
    .reg .f32 %cut<4>;
    .reg .b32 %low, %high, %signs, %half;
    fma.rz.f32 %cut0, %x0, %y0, %unit;  // |x| |y| + C: the low bits are the product in whole units
    fma.rz.f32 %cut1, %x1, %y1, %unit;
    fma.rz.f32 %cut2, %x2, %y2, %unit;
    fma.rz.f32 %cut3, %x3, %y3, %unit;
    prmt.b32 %low, %cut0, %cut1, 0x5410;    // the low halves of two sums in a word
    prmt.b32 %high, %cut2, %cut3, 0x5410;
    xor.b32 %signs, %x_signs, %y_signs;     // a byte for each product: 1 or -1
    dp2a.lo.s32.s32 %half, %low, %signs, %total;
    dp2a.hi.s32.s32 %result, %high, %signs, %half;
"""
CUT_ADD_WIDE = """
    .reg .f64 %x, %y, %c;
    .reg .b32 %zero, %unused, %cut<4>;
    mov.u32 %zero, 0;
    mov.b64 %c, {%zero, %unit};
"""
CUT_ADD_WIDE += "".join(
    f"""
    mov.b64 %x, {{%zero, %x{t}}};            // the upper word of an f64; the lower one is 0
    mov.b64 %y, {{%zero, %y{t}}};
    fma.rz.f64 %x, %x, %y, %c;              // |x| |y| + C
    mov.b64 {{%cut{t}, %unused}}, %x;        // the low word is the product in whole units
    xor.b32 %cut{t}, %cut{t}, %x_mask{t};     // its complement where one factor is negative
    xor.b32 %cut{t}, %cut{t}, %y_mask{t};
"""
    for t in range(CHUNK)
)
CUT_ADD_WIDE += """
    add.s32 %cut0, %cut0, %cut1;
    add.s32 %cut0, %cut0, %total;
    add.s32 %cut2, %cut2, %cut3;
    add.s32 %result, %cut0, %cut2;
"""


def cut_add(steps: FusedSteps, total: Array, xs: list[Array], ys: list[Array], signs: tuple[Array, Array] | None, unit: Array) -> Array:
    """total and CHUNK products, each cut to the unit. signs: the bytes of both sides, of narrow products."""
    if steps.assembly and signs is not None:
        factors = {f"{name}{t}": v for name, side in (("x", xs), ("y", ys)) for t, v in enumerate(side)}
        return ptx(CUT_ADD_NARROW, total=total, unit=unit, **factors, x_signs=signs[0], y_signs=signs[1])
    magnitudes, masks = ([part(v) for v in (*xs, *ys)] for part in (lambda v: v & ~SIGN, lambda v: v >> 31))
    if steps.assembly:
        names = [f"{side}{t}" for side in ("x", "y") for t in range(CHUNK)]
        mask_names = [f"{side}_mask{t}" for side in ("x", "y") for t in range(CHUNK)]
        factors = dict(zip(names, magnitudes, strict=True)) | dict(zip(mask_names, masks, strict=True))
        return ptx(CUT_ADD_WIDE, total=total, unit=unit, **factors)
    for t in range(CHUNK):
        cut = _cut(steps, magnitudes[t], magnitudes[CHUNK + t], unit)
        if signs is None:
            total = total + (cut ^ masks[t] ^ masks[CHUNK + t])
        else:
            total = total + jnp.where(((signs[0] ^ signs[1]) >> (8 * t)) & 0xFF == 1, cut, -cut)
    return total


def _cut(steps: FusedSteps, x: Array, y: Array, unit: Array) -> Array:
    """The product of two magnitudes in whole units."""
    word = steps.word
    significand = lambda v: jnp.where(v <= NOT_A_NUMBER, 0, ((v >> (word.mantissa - 10)) & 0x3FF) | 0x400)  # noqa: E731
    shift = (x >> word.mantissa) + (y >> word.mantissa) - (unit >> word.mantissa) - word.bias - 20 + word.fraction
    product = significand(x) * significand(y)
    return jnp.where(shift >= 0, product << jnp.clip(shift, 0, 31), product >> jnp.clip(-shift, 0, 31))


def finish(steps: FusedSteps, totals: list[Array], c: Array, exponent: Array) -> Array:
    """The step's result, f32 bits: the sums of the cut products, and the accumulator c, if that is finite; else c."""
    if not steps.assembly:
        signed = [(total < 0, (jnp.abs(total).astype(jnp.uint32), jnp.zeros(c.shape, jnp.uint32))) for total in totals]
        negative, magnitude = signed[0] if len(signed) == 1 else bits.add_signed(*signed[0], *signed[1])
        return end_in_integers(steps, negative, magnitude, exponent, c)
    sums = {f"total{at}": total for at, total in enumerate(totals)}
    return ptx((_end_wide if steps.wide else _end_narrow)(steps), c=c, exponent=exponent, **sums)


def count(steps: FusedSteps, x: Array) -> Array:
    """Set bits."""
    return ptx("popc.b32 %result, %x;", x=x) if steps.assembly else lax.population_count(x)


def _end_narrow(steps: FusedSteps) -> str:
    """The accumulator in units, in an s32; where no product can reach it, or it none, it alone is the result."""
    to_units, from_units = F32.bias + steps.fraction_bits, F32.bias - steps.fraction_bits
    text = f"""
    .reg .b32 %word, %above, %units;
    .reg .f32 %sum;
    .reg .f64 %wide, %more;
    .reg .pred %alone;
    sub.s32 %word, {to_units}, %exponent;
    shl.b32 %word, %word, 23;               // 2^(fraction_bits - exponent)
    mul.rn.f32 %sum, %c, %word;
    cvt.rzi.s32.f32 %units, %sum;           // the accumulator, cut to whole units
"""
    if steps.narrow:
        text += """
    add.s32 %units, %units, %total0;
    cvt.rz.f32.s32 %sum, %units;            // rule 6: one rounding, toward zero
"""
    else:
        text += "cvt.rn.f64.s32 %wide, %units;\n"
        text += "".join(f"cvt.rn.f64.s32 %more, %total{at};\nadd.rn.f64 %wide, %wide, %more;\n" for at in range(steps.sums))
        text += "cvt.rz.f32.f64 %sum, %wide;     // rule 6: one rounding, toward zero\n"
    kept = -1 << max(0, F32.mantissa_bits - steps.fraction_bits)  # of the accumulator, where the step's exponent is its own
    return (
        text
        + f"""
    add.s32 %word, %exponent, {from_units};
    shl.b32 %word, %word, 23;               // the unit
    mul.rn.f32 %sum, %sum, %word;
    sub.s32 %above, %exponent, {steps.least};
    setp.gt.u32 %alone, %above, {steps.greatest - steps.least};
    and.b32 %word, %c, {kept};
    selp.b32 %word, %word, %sum, %alone;
    and.b32 %word, %word, {-1 << steps.lost};
    add.rn.f32 %result, %word, 0f00000000;  // -0 becomes +0
"""
    )


def _end_wide(steps: FusedSteps) -> str:
    """In an f64 throughout: |c| + C cuts the accumulator as it does products."""
    text = f"""
    .reg .f64 %unit, %cutter, %sum, %wide, %more;
    .reg .b32 %word, %sign, %zero;
    .reg .f32 %rounded;
    .reg .pred %is;
    mov.u32 %zero, 0;
    add.s32 %word, %exponent, {F64_WORD.bias - steps.fraction_bits};
    shl.b32 %word, %word, 20;
    mov.b64 %unit, {{%zero, %word}};
    add.s32 %word, %word, {52 << 20};
    mov.b64 %cutter, {{%zero, %word}};        // its last bit is the unit
    cvt.f64.f32 %wide, %c;
    abs.f64 %sum, %wide;
    add.rz.f64 %sum, %sum, %cutter;
    sub.rn.f64 %sum, %sum, %cutter;         // |c|, cut to whole units
    copysign.f64 %sum, %wide, %sum;
"""
    text += "".join(f"cvt.rn.f64.s32 %more, %total{at};\nfma.rn.f64 %sum, %more, %unit, %sum;\n" for at in range(steps.sums))
    return text + upper_end(steps.lost)


def upper_end(lost: int) -> str:
    """%sum, an f64, to f32, cut toward zero. lost: fraction bits that the result gives up. The caller declares the registers."""
    return f"""
    cvt.rz.f32.f64 %rounded, %sum;
    mov.b32 %word, %rounded;
    and.b32 %word, %word, {-1 << lost};
    add.rn.f32 %word, %word, 0f00000000;    // -0 becomes +0
    abs.f64 %sum, %sum;
    setp.ge.f64 %is, %sum, 0d47F0000000000000;  // 2^128 or more
    and.b32 %sign, %word, 0x80000000;
    or.b32 %sign, %sign, 0x7F800000;
    selp.b32 %word, %sign, %word, %is;      // rule 7: Inf of that sign
    and.b32 %sign, %c, 0x7F800000;
    setp.eq.s32 %is, %sign, 0x7F800000;
    selp.b32 %result, %c, %word, %is;       // an accumulator that is Inf or NaN stays
"""


# ---- the step


def step(steps: FusedSteps, row: Loads, column: Loads, c: Array, special: Array) -> Array:
    """One step. row, column: load one line of a FusedOperand's arrays, by the array's number and the line's."""
    word, terms, exponents, signs = steps.word, steps.terms, 1, 2
    best = jnp.full(c.shape, (ABSENT << 16) | (ABSENT & 0xFFFF), jnp.int32)
    for pair in range(terms // 2):
        best = add_max(steps, row(exponents, pair), column(exponents, pair), best)
    exponent = jnp.maximum(jnp.maximum(best >> 16, _low(best)), _exponent(steps, c))
    offset = word.bias - steps.fraction_bits + word.fraction
    unit = ((exponent if steps.assembly or steps.wide else jnp.minimum(exponent, steps.greatest + 1)) + offset) << word.mantissa
    totals = []
    for part in range(steps.sums):
        total = jnp.zeros(c.shape, jnp.int32)
        for t in range(part * terms // steps.sums, (part + 1) * terms // steps.sums, CHUNK):
            xs, ys = ([side(0, t + v) for v in range(CHUNK)] for side in (row, column))
            bytes_ = (row(signs, t // CHUNK), column(signs, t // CHUNK)) if steps.narrow else None
            total = cut_add(steps, total, xs, ys, bytes_, unit)
        if not steps.narrow:
            total = total + count(steps, (row(signs, 0) ^ column(signs, 0)) & _part(steps, part))
        totals.append(total)
    if steps.assembly:  # as computed again, the exponent takes no register meanwhile; what wraps is beyond `greatest`, either way
        exponent = (unit >> word.mantissa) - offset
    d = finish(steps, totals, c, exponent)
    return lax.cond(special > 0, lambda: _careful(steps, row, column, c, d), lambda: d)


def _part(steps: FusedSteps, part: int) -> Array:
    """The bits of the terms of one sum."""
    width = steps.terms // steps.sums
    return jnp.uint32(((1 << width) - 1) << (part * width)).astype(jnp.int32)


def _exponent(steps: FusedSteps, c: Array) -> Array:
    """The accumulator's exponent and the floor, whichever is larger. `_end_narrow` needs none that is less than the products'."""
    if steps.wide or not steps.assembly:
        return jnp.maximum(own_exponent(c), steps.floor)
    return jnp.maximum(((c >> 23) & 0xFF) - F32.bias, steps.least - 1)


def _careful(steps: FusedSteps, row: Loads, column: Loads, c: Array, d: Array) -> Array:
    """The step's result where it may hold an Inf or a NaN: they are multiplied and added as floats are; other factors count as 1 or 0."""

    def value(word: Array) -> Array:
        finite = jnp.where(word == 0, 0.0, 1.0)
        return jnp.where(word == INFINITE, jnp.inf, jnp.where(word == NOT_A_NUMBER, jnp.nan, finite)).astype(jnp.float32)

    def add(t: Array, total: Array) -> Array:
        x, y = row(0, t), column(0, t)
        negative = (x ^ y) < 0
        if steps.narrow:  # the byte of a product is 1 or -1
            negative = ((row(2, t >> 2) ^ column(2, t >> 2)) >> ((t & 3) << 3)) & 2 == 2
        product = value(x & ~SIGN) * value(y & ~SIGN)
        return total + jnp.where(product <= 1, 0.0, jnp.where(negative, -product, product))

    start = jnp.where(is_special(c), lax.bitcast_convert_type(c, jnp.float32), 0.0)
    total = lax.fori_loop(0, steps.terms, add, start)
    return jnp.where(total == 0, d, lax.bitcast_convert_type(total, jnp.int32))
