"""The rules of a fused step on vectors of elements of D, in LLVM IR: see `fused_dot_add` and `bounded_steps`.

Nothing here depends on whether the machine flushes subnormals: floats are normal or zero wherever their value matters.
"""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import NamedTuple

from llvmlite import ir

from tcemu.arithmetic.bounded_steps import MAX_ACCUMULATOR, StepForm
from tcemu.arithmetic.fused_dot_add import SIGN, products_fit_one_limb
from tcemu.arithmetic.multiplicands import ZERO_EXPONENT
from tcemu.backends.llvm.decoding import BIAS, FRACTION
from tcemu.backends.llvm.values import F32, I8, I16, I32, I64, Builder, Value
from tcemu.formats import F32 as RESULT

TOWARD_ZERO = 11  # AVX-512's rounding operand: toward zero, without exceptions


class KernelForm(NamedTuple):
    """The parameters of a kernel, which is compiled for each set of them."""

    step: StepForm
    block: int  # products along K that share a block scale; 0: there are none
    wide_registers: bool  # AVX-512 is there
    by_columns: bool = False  # see `BlockForm`

    name = "steps"

    @property
    def scaled(self) -> bool:
        return self.block > 0

    @property
    def terms(self) -> int:
        return self.step.terms

    @property
    def lane_type(self) -> ir.IntType:
        """The type of exponents while their max is found."""
        return I8 if self.step.is_narrow else I16

    @property
    def lane_biases(self) -> tuple[int, int]:
        """What is added to the exponents of A and B in lanes, so that a sum has the bias of f32. Narrow lanes have no sign."""
        return (BIAS + 1) // 2 if self.step.is_narrow else BIAS, BIAS // 2 if self.step.is_narrow else 0

    @property
    def lane_zero(self) -> int:
        """The exponent of a zero in lanes."""
        return 0 if self.step.is_narrow else -1 << 13

    @property
    def least(self) -> int:
        """The least exponent to which a bounded step is aligned, with the bias of f32. No sum with the exponent of a zero is above it."""
        if not self.step.is_narrow:
            return self.step.least + BIAS
        a, b = self.lane_biases
        return max(self.step.spec.a.max_exponent + a, self.step.spec.b.max_exponent + b)

    @property
    def most(self) -> int:
        """The exponent of the largest accumulator of a bounded step. Products of narrow formats are truncated to 0 beside a larger one."""
        a, b = self.step.spec.a, self.step.spec.b
        return a.max_exponent + b.max_exponent + 3 + self.step.fraction_bits if self.step.is_narrow else MAX_ACCUMULATOR

    @property
    def kept(self) -> int:
        """Fraction bits of a result."""
        bits = self.step.model.result_bits
        return bits if isinstance(bits, int) else FRACTION

    @property
    def adds_floats(self) -> bool:
        """True if the products of a step are added as floats, rounded toward zero: their sum fits the fraction of an f32."""
        return self.wide_registers and self.step.is_narrow and self.terms << (self.step.fraction_bits + 2) <= 1 << FRACTION


class StepArithmetic:
    """The operations of a step, for a function that is being built."""

    def __init__(self, form: KernelForm, b: Builder) -> None:
        self.form, self.b = form, b

    def usable_accumulator(self, code: Value) -> Value:
        """The accumulator of a bounded step of narrow formats, or 0 in place of a large one, which `select_unreached` keeps.

        A small one stays: where products cancel, it is what is left of it that the step returns. It does not decide the alignment.
        """
        return ((code >> FRACTION) & 0xFF <= self.form.most + BIAS).select(code, 0)

    def align_accumulator(self, code: Value, top: Value) -> tuple[Value, Value, Value]:
        """Rule 3 of a bounded step: the accumulator as f32, the code of the step's unit, and 1 / unit as f32.

        top: max exponent of the products, in lanes.
        """
        b, form = self.b, self.form
        top = b.maximum(top.cast("zext" if form.step.is_narrow else "sext", I32), (code >> FRACTION) & 0xFF)
        if not form.step.is_narrow:
            top = b.maximum(top, b.constant(code.type, form.least))
        unit = (top - form.step.fraction_bits) << FRACTION
        return code.as_float(), unit, (((2 * BIAS) << FRACTION) - unit).as_float()

    def add_integers(self, integers: list[Value]) -> list[Value]:
        """Rule 5: one or two sums that fit an s32."""
        form = self.form.step
        if products_fit_one_limb(form.model, form.spec, form.terms):
            return [reduce(add, integers)]
        half = -(-form.terms // 2)
        return [reduce(add, integers[:half]), reduce(add, integers[half:])]

    def round(self, addends: list[Value], unit: Value) -> Value:
        """Rule 6: the sum of the addends, truncated to an f32 without the bits that the result does not keep. unit: code of the power."""
        b = self.b
        if self._fits_one_limb(addends) and self.form.wide_registers:
            total, rounding = reduce(add, addends), b.constant(I32, TOWARD_ZERO)
            raw = b.call("llvm.x86.avx512.sitofp.round.v16f32.v16i32", total._shaped(F32), total, rounding)
            return self.cut((raw * unit.as_float()).bits())
        negative, magnitude, up = self._add_up(addends)
        code = (self._truncated_float(magnitude) * (unit if up is None else unit + (up << FRACTION)).as_float()).bits()
        return self.cut(code | (negative & -SIGN))

    def _fits_one_limb(self, addends: list[Value]) -> bool:
        form = self.form.step
        largest = (1 << (form.fraction_bits + 2)) * form.terms + (1 << (form.fraction_bits + 1))
        return len(addends) == 2 and largest < 1 << 31

    def _add_up(self, addends: list[Value]) -> tuple[Value, Value, Value | None]:
        """The sum of the addends: its sign, -1 or 0, and its magnitude, below 2^32, times 2^up. None: up is 0."""
        up = None
        if self._fits_one_limb(addends):
            total = reduce(add, addends)
            negative = total.shift_right_signed(31)
            magnitude = (total ^ negative) - negative
        elif len(addends) == 2:
            x, y = addends
            total = x + y
            same_sign = ~(x ^ y)  # of two addends of one sign, the sum has that sign even where it wraps
            negative = ((x & same_sign) | (total & ~same_sign)).shift_right_signed(31)
            magnitude = (total ^ negative) - negative
        else:
            wide = reduce(add, (v.cast("sext", I64) for v in addends))
            sign = wide.shift_right_signed(63)
            size = (wide ^ sign) - sign
            negative = sign.cast("trunc", I32)
            large = size > 0xFFFFFFFF  # the lowest bits of such a sum are not kept
            magnitude = large.select(size >> 8, size).cast("trunc", I32)
            up = large.cast("zext", I32) << 3
        return negative, magnitude, up

    def _truncated_float(self, magnitude: Value) -> Value:
        """A number below 2^32 as an f32, truncated."""
        b = self.b
        if self.form.wide_registers:
            name = "llvm.x86.avx512.uitofp.round.v16f32.v16i32"
            return b.call(name, magnitude._shaped(F32), magnitude, b.constant(I32, TOWARD_ZERO))
        # without the bits that cannot be kept, the conversion truncates: see `fused_dot_add`
        return (magnitude & ~(magnitude >> (FRACTION + 1))).cast("uitofp", F32)

    def cut(self, code: Value) -> Value:
        """Without the fraction bits that the result does not keep."""
        kept = self.form.kept
        return code if kept == FRACTION else code & (-1 << (FRACTION - kept))

    def select_unreached(self, code: Value, word: Value, top: Value) -> Value:
        """The result of a bounded step, and the accumulator, truncated, where no product reaches it: see `bounded_steps.reduce_narrow`."""
        form = self.form.step
        kept = min(form.fraction_bits, self.form.kept)
        start = code & (-1 << (FRACTION - kept))
        start = (start << 1 == 0).select(0, start)
        start = (code & (SIGN - 1) > RESULT.infinity).select(self.nan, start)
        has_product = top != self.form.least
        return (has_product & ((code >> FRACTION) & 0xFF <= self.form.most + BIAS)).select(word, start)

    def add_any_vector(self, products: list[tuple[Value, Value]], code: Value) -> Value:
        """Rules 3 to 7 for any numbers. products: fractions below 4, and exponents."""
        b, form = self.b, self.form.step
        magnitude = code & (SIGN - 1)
        field = magnitude >> FRACTION
        subnormal = field == 0
        takes_part = (magnitude != 0) & (field != 0xFF)
        exponent = takes_part.select(subnormal.select(1, field) - BIAS, ZERO_EXPONENT)
        tiny = magnitude.cast("uitofp", F32) * 2.0**-FRACTION
        fraction = subnormal.select(tiny.bits(), (code & (1 << FRACTION) - 1) | (BIAS << FRACTION)) | (code & -SIGN)
        # rule 3
        assert isinstance(form.model.floor, int)
        top = reduce(b.maximum, [e for _, e in products], b.maximum(exponent, b.constant(code.type, form.model.floor)))
        # rules 4 and 5: a power below the normal range becomes 0, as the term is then truncated to 0
        offset = (BIAS + form.fraction_bits) - top

        def truncate(fraction: Value, exponent: Value) -> Value:
            power = b.maximum(exponent + offset, b.constant(code.type, 0)) << FRACTION
            return (fraction * power.as_float()).cast("fptosi", I32)

        addends = self.add_integers([truncate(*product) for product in products])
        word = self.encode([*addends, truncate(fraction.as_float(), exponent)], top - form.fraction_bits)
        return (field == 0xFF).select((magnitude > RESULT.infinity).select(self.nan, code), word)

    def encode(self, addends: list[Value], unit: Value) -> Value:
        """Rules 6 and 7: the sum of the addends, in units of 2^unit, truncated to an f32 that may be subnormal or Inf."""
        negative, magnitude, up = self._add_up(addends)
        unit = unit if up is None else unit + up
        number = self._truncated_float(magnitude).bits()
        field = (number >> FRACTION) + unit
        below = (RESULT.min_exponent - FRACTION) - unit  # bits of the magnitude below the last one of a subnormal
        small = (below >= 0).select(magnitude >> (below & 31), magnitude << ((0 - below) & 31))
        word = (field > 0).select(number + (unit << FRACTION), (below > 31).select(0, small))
        word = self.cut((field > RESULT.max_exponent + BIAS).select(RESULT.infinity, word))
        word = (magnitude == 0).select(0, word)
        return (word == 0).select(0, word | (negative & -SIGN))

    def add_specials(self, code: Value, products: list[Value]) -> Value:
        """Rule 8: the f32 sum of products in which Inf and NaN stand for themselves, and of an accumulator that is Inf or NaN."""
        while len(products) > 1:
            products = [reduce(add, products[at : at + 2]) for at in range(0, len(products), 2)]
        return ((code & RESULT.infinity) == RESULT.infinity).select(code, 0).as_float() + products[0]

    def special_code(self, total: Value) -> Value:
        """The code of a sum that is Inf or NaN."""
        return (total == total).select(total.bits(), self.nan)

    @property
    def nan(self) -> int:
        nan = self.form.step.model.nan
        return nan if isinstance(nan, int) else RESULT.nan
