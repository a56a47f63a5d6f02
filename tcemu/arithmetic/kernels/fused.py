"""The steps of `dot_add` for `tile_kernel`.

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
from tcemu.arithmetic.dot_add import SPECIAL_EXPONENT, Scale
from tcemu.arithmetic.kernels.tile import ABSENT, SIGN, Loads, end_in_integers, is_special, own_exponent, ptx, tiles
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


class FusedPlan(NamedTuple):
    """What the kernel must know; static."""

    a: Format
    b: Format
    terms: int  # of a step
    fraction_bits: int
    floor: int
    lost: int  # fraction bits of f32 that a result gives up
    scaled: bool
    assembly: bool

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


class Side(NamedTuple):
    """A multiplicand for the kernel: [batch, tiles, steps, ..., width of a tile], int32."""

    words: Array  # [..., terms, width]: the magnitude; in an f64 word with the sign
    exponents: Array  # [..., terms / 2, width]: two in a word
    signs: Array  # [..., terms / 4, width]: four bytes; in f64 words [..., 1, width], a bit a term


def prepare(plan: FusedPlan, side: int, codes: Array, scales: Scale | None, width: int) -> tuple[Side, Array]:
    """A multiplicand, and int32 [batch, steps], 1 where an Inf or a NaN stands.

    side: 0 for A, 1 for B, and the byte of a positive sign; codes: [batch, K, rows or columns], whole steps and whole tiles.
    """
    fmt = (plan.a, plan.b)[side]
    number, word = decode(fmt, codes), plan.word
    magnitude, exponent = number.magnitude[0].astype(jnp.int32), number.exponent
    if scales is not None:
        number = number._replace(nan=number.nan | (scales.exponent == SPECIAL_EXPONENT))
        exponent = exponent + jnp.where(number.nan, 0, scales.exponent)
    special, zero = number.nan | number.infinite, magnitude == 0
    normal = lax.bitcast_convert_type(magnitude.astype(jnp.float32), jnp.int32)
    words = ((normal >> 23) - F32.bias + word.bias + exponent << word.mantissa) | ((normal & 0x7FFFFF) >> (23 - word.mantissa))
    words = jnp.where(number.nan, NOT_A_NUMBER, jnp.where(number.infinite, INFINITE, jnp.where(zero, 0, words)))
    words = jnp.where(number.negative & (special | (not plan.narrow)), words | SIGN, words)
    by_line = lambda v, terms: v.reshape(v.shape[0], -1, terms, v.shape[-1])  # noqa: E731
    pair = by_line(jnp.where(zero | special, ABSENT, exponent + fmt.mantissa_bits), 2)
    group, bit = (4, 8) if plan.narrow else (plan.terms, 1)
    sign = jnp.where(number.negative, (side ^ 0xFE) if plan.narrow else 1, side if plan.narrow else 0).astype(jnp.uint32)
    signs = jnp.sum(by_line(sign, group) << (bit * jnp.arange(group, dtype=jnp.uint32)[:, None]), axis=2, dtype=jnp.uint32)
    cut = lambda v, rows: tiles(v, rows, width)  # noqa: E731
    prepared = Side(
        cut(words, plan.terms), cut((pair[:, :, 1] << 16) | (pair[:, :, 0] & 0xFFFF), plan.terms // 2),
        cut(lax.bitcast_convert_type(signs, jnp.int32), plan.terms // group),
    )  # fmt: skip
    return prepared, jnp.any(by_line(special, plan.terms), axis=(2, 3)).astype(jnp.int32)


# ---- the three inner operations, each in PTX and in plain integers


def add_max(plan: FusedPlan, x: Array, y: Array, best: Array) -> Array:
    """max(x + y, best) in both 16-bit halves."""
    if plan.assembly:
        return ptx(".reg .b32 t; add.s16x2 t, $1, $2; max.s16x2 $0, t, $3;", x, y, best)
    high = jnp.maximum((x >> 16) + (y >> 16), best >> 16)
    low = jnp.maximum(_low(x) + _low(y), _low(best))
    return (high << 16) | (low & 0xFFFF)


def _low(x: Array) -> Array:
    return (x << 16) >> 16


def cut_add(plan: FusedPlan, total: Array, xs: list[Array], ys: list[Array], signs: tuple[Array, Array] | None, unit: Array) -> Array:
    """total and CHUNK products, each cut to the unit. signs: the bytes of both sides, of narrow products."""
    x_at, y_at = (range(3 + side * CHUNK, 3 + (side + 1) * CHUNK) for side in (0, 1))
    if plan.assembly and signs is not None:
        text = ".reg .f32 r<4>; .reg .b32 p, q, s;"
        text += "".join(f"fma.rz.f32 r{t}, ${x_at[t]}, ${y_at[t]}, $2;" for t in range(CHUNK))
        text += "prmt.b32 p, r0, r1, 0x5410; prmt.b32 q, r2, r3, 0x5410;"  # the low halves
        text += f"xor.b32 s, ${y_at[-1] + 1}, ${y_at[-1] + 2}; dp2a.lo.s32.s32 p, p, s, $1; dp2a.hi.s32.s32 $0, q, s, p;"
        return ptx(text, total, unit, *xs, *ys, *signs)
    magnitudes, masks = ([f(v) for v in (*xs, *ys)] for f in (lambda v: v & ~SIGN, lambda v: v >> 31))
    if plan.assembly:
        text = ".reg .f64 p, q, c; .reg .b32 z, h, l<4>; mov.u32 z, 0; mov.b64 c, {z, $2};"
        for t in range(CHUNK):
            text += f"mov.b64 p, {{z, ${x_at[t]}}}; mov.b64 q, {{z, ${y_at[t]}}}; fma.rz.f64 p, p, q, c; mov.b64 {{l{t}, h}}, p;"
            text += f"xor.b32 l{t}, l{t}, ${x_at[t] + 2 * CHUNK}; xor.b32 l{t}, l{t}, ${y_at[t] + 2 * CHUNK};"
        text += "add.s32 l0, l0, l1; add.s32 l0, l0, $1; add.s32 l2, l2, l3; add.s32 $0, l0, l2;"
        return ptx(text, total, unit, *magnitudes, *masks)
    for t in range(CHUNK):
        cut = _cut(plan, magnitudes[t], magnitudes[CHUNK + t], unit)
        if signs is None:
            total = total + (cut ^ masks[t] ^ masks[CHUNK + t])
        else:
            total = total + jnp.where(((signs[0] ^ signs[1]) >> (8 * t)) & 0xFF == 1, cut, -cut)
    return total


def _cut(plan: FusedPlan, x: Array, y: Array, unit: Array) -> Array:
    """The product of two magnitudes in whole units."""
    word = plan.word
    significand = lambda v: jnp.where(v <= NOT_A_NUMBER, 0, ((v >> (word.mantissa - 10)) & 0x3FF) | 0x400)  # noqa: E731
    shift = (x >> word.mantissa) + (y >> word.mantissa) - (unit >> word.mantissa) - word.bias - 20 + word.fraction
    product = significand(x) * significand(y)
    return jnp.where(shift >= 0, product << jnp.clip(shift, 0, 31), product >> jnp.clip(-shift, 0, 31))


def finish(plan: FusedPlan, totals: list[Array], c: Array, exponent: Array) -> Array:
    """The step's result, f32 bits: the sums of the cut products, and the accumulator c, if that is finite; else c."""
    if not plan.assembly:
        signed = [(total < 0, (jnp.abs(total).astype(jnp.uint32), jnp.zeros(c.shape, jnp.uint32))) for total in totals]
        negative, magnitude = signed[0] if len(signed) == 1 else bits.add_signed(*signed[0], *signed[1])
        return end_in_integers(plan, negative, magnitude, exponent, c)
    return ptx((_end_wide if plan.wide else _end_narrow)(plan), c, exponent, *totals)


def count(plan: FusedPlan, x: Array) -> Array:
    """Set bits."""
    return ptx("popc.b32 $0, $1;", x) if plan.assembly else lax.population_count(x)


def _end_narrow(plan: FusedPlan) -> str:
    """The accumulator in units, in an s32; where no product can reach it, or it none, it alone is the result."""
    scale = F32.bias + plan.fraction_bits
    text = ".reg .b32 h, k, i; .reg .f32 d; .reg .f64 s, t; .reg .pred alone;"
    text += f"sub.s32 h, {scale}, $2; shl.b32 h, h, 23; mul.rn.f32 d, $1, h; cvt.rzi.s32.f32 i, d;"
    if plan.narrow:
        text += "add.s32 i, i, $3; cvt.rz.f32.s32 d, i;"
    else:
        text += "cvt.rn.f64.s32 s, i;" + "".join(f"cvt.rn.f64.s32 t, ${3 + at}; add.rn.f64 s, s, t;" for at in range(plan.sums))
        text += "cvt.rz.f32.f64 d, s;"
    text += f"add.s32 h, $2, {F32.bias - plan.fraction_bits}; shl.b32 h, h, 23; mul.rn.f32 d, d, h;"
    kept = -1 << max(0, F32.mantissa_bits - plan.fraction_bits)  # of the accumulator, where the step's exponent is its own
    text += (
        f"sub.s32 k, $2, {plan.least}; setp.gt.u32 alone, k, {plan.greatest - plan.least}; and.b32 h, $1, {kept}; selp.b32 h, h, d, alone;"
    )
    return text + f"and.b32 h, h, {-1 << plan.lost}; add.rn.f32 $0, h, 0f00000000;"  # no -0


def _end_wide(plan: FusedPlan) -> str:
    """In an f64 throughout: |c| + C cuts the accumulator as it does products."""
    text = ".reg .f64 u, m, t, v, w; .reg .b32 h, s, z; .reg .f32 d; .reg .pred p; mov.u32 z, 0;"
    text += f"add.s32 h, $2, {F64_WORD.bias - plan.fraction_bits}; shl.b32 h, h, 20; mov.b64 u, {{z, h}};"
    text += f"add.s32 h, h, {52 << 20}; mov.b64 m, {{z, h}}; cvt.f64.f32 v, $1; abs.f64 t, v; add.rz.f64 t, t, m; sub.rn.f64 t, t, m;"
    text += "copysign.f64 t, v, t;" + "".join(f"cvt.rn.f64.s32 w, ${3 + at}; fma.rn.f64 t, w, u, t;" for at in range(plan.sums))
    return text + UPPER_END.format(mask=-1 << plan.lost)


UPPER_END = (  # t, an f64, to f32: never -0; Inf where t leaves the range; and c, $1, where that is Inf or NaN
    "cvt.rz.f32.f64 d, t; mov.b32 h, d; and.b32 h, h, {mask}; add.rn.f32 h, h, 0f00000000;"
    "abs.f64 t, t; setp.ge.f64 p, t, 0d47F0000000000000; and.b32 s, h, 0x80000000; or.b32 s, s, 0x7F800000; selp.b32 h, s, h, p;"
    "and.b32 s, $1, 0x7F800000; setp.eq.s32 p, s, 0x7F800000; selp.b32 $0, $1, h, p;"
)


# ---- the step


def step(plan: FusedPlan, row: Loads, column: Loads, c: Array, special: Array) -> Array:
    """One step. row, column: load one line of a Side's arrays, by the array's number and the line's."""
    word, terms, exponents, signs = plan.word, plan.terms, 1, 2
    best = jnp.full(c.shape, (ABSENT << 16) | (ABSENT & 0xFFFF), jnp.int32)
    for pair in range(terms // 2):
        best = add_max(plan, row(exponents, pair), column(exponents, pair), best)
    exponent = jnp.maximum(jnp.maximum(best >> 16, _low(best)), _exponent(plan, c))
    offset = word.bias - plan.fraction_bits + word.fraction
    unit = ((exponent if plan.assembly or plan.wide else jnp.minimum(exponent, plan.greatest + 1)) + offset) << word.mantissa
    totals = []
    for part in range(plan.sums):
        total = jnp.zeros(c.shape, jnp.int32)
        for t in range(part * terms // plan.sums, (part + 1) * terms // plan.sums, CHUNK):
            xs, ys = ([side(0, t + v) for v in range(CHUNK)] for side in (row, column))
            bytes_ = (row(signs, t // CHUNK), column(signs, t // CHUNK)) if plan.narrow else None
            total = cut_add(plan, total, xs, ys, bytes_, unit)
        if not plan.narrow:
            total = total + count(plan, (row(signs, 0) ^ column(signs, 0)) & _part(plan, part))
        totals.append(total)
    if plan.assembly:  # as computed again, the exponent takes no register meanwhile; what wraps is beyond `greatest`, either way
        exponent = (unit >> word.mantissa) - offset
    d = finish(plan, totals, c, exponent)
    return lax.cond(special > 0, lambda: _careful(plan, row, column, c, d), lambda: d)


def _part(plan: FusedPlan, part: int) -> Array:
    """The bits of the terms of one sum."""
    width = plan.terms // plan.sums
    return jnp.uint32(((1 << width) - 1) << (part * width)).astype(jnp.int32)


def _exponent(plan: FusedPlan, c: Array) -> Array:
    """The accumulator's exponent and the floor, whichever is larger. `_end_narrow` needs none that is less than the products'."""
    if plan.wide or not plan.assembly:
        return jnp.maximum(own_exponent(c), plan.floor)
    return jnp.maximum(((c >> 23) & 0xFF) - F32.bias, plan.least - 1)


def _careful(plan: FusedPlan, row: Loads, column: Loads, c: Array, d: Array) -> Array:
    """The step's result where it may hold an Inf or a NaN: they are multiplied and added as floats are; other factors count as 1 or 0."""

    def value(word: Array) -> Array:
        finite = jnp.where(word == 0, 0.0, 1.0)
        return jnp.where(word == INFINITE, jnp.inf, jnp.where(word == NOT_A_NUMBER, jnp.nan, finite)).astype(jnp.float32)

    def add(t: Array, total: Array) -> Array:
        x, y = row(0, t), column(0, t)
        negative = (x ^ y) < 0
        if plan.narrow:  # the byte of a product is 1 or -1
            negative = ((row(2, t >> 2) ^ column(2, t >> 2)) >> ((t & 3) << 3)) & 2 == 2
        product = value(x & ~SIGN) * value(y & ~SIGN)
        return total + jnp.where(product <= 1, 0.0, jnp.where(negative, -product, product))

    start = jnp.where(is_special(c), lax.bitcast_convert_type(c, jnp.float32), 0.0)
    total = lax.fori_loop(0, plan.terms, add, start)
    return jnp.where(total == 0, d, lax.bitcast_convert_type(total, jnp.int32))
