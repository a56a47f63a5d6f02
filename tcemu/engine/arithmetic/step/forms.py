"""Which form of the step serves a model and a product, with the preconditions of each form as data. Every backend asks here.

Three records hold what is known of a step before tracing: `StepNumbers` of any fused step, `BoundedForm` of the bounded step, and
`GroupedForm` of block-scaled groups. Where the formats alone do not bound the operands, a guard looks at the exponents of a step at run
time: `factors_are_bounded`, `accumulator_is_bounded`, `scales_are_bounded`. `tests/engine/proofs` shows that each guard implies what the
formulas of its form need, for every model and format.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.order import Order
from tcemu.engine.arithmetic.product_spec import ProductSpec
from tcemu.engine.arithmetic.step.decoding import BIAS, FRACTION
from tcemu.engine.formats.number_formats import BF16, F16, F32, F64, TF32, UE8M0, Format
from tcemu.engine.formats.rounding import truncates

MAX_ACCUMULATOR = F32.max_exponent - 2  # exponent of the largest C of a bounded step: with the products, sums stay below 2^127
WORD_BITS = 31  # of the magnitude of an i32
MOST_FLOAT_BITS = 28  # fraction bits of products that are aligned as floats in any rounding
LOW_BITS = 25  # bits of the lower part of an aligned sum of a group
SUM_BITS = 2 * LOW_BITS - 1  # bits that both parts of the sum of groups hold, each as an exact f32


class StepNumbers(NamedTuple):
    """The numbers of a fused model that is known before tracing, with the order of its products."""

    terms: int  # products of a step
    of_instruction: int
    of_group: int
    groups: int
    chain: int  # steps in a chain; 0 for none
    together: bool
    fraction_bits: int
    mantissas: int  # fraction bits of a product, or of a group's sum
    summed: int  # products that are added exactly, as one term; 0 for none
    floor: int
    kept: int  # fraction bits of a result
    rounding: str
    alignment: str
    rounded_again: bool
    scaled: bool
    promoted: int = 0  # instructions whose sum is promoted to f32; 0 for none
    block_scaled: bool = False  # promoted sums are multiplied by f32 scales of their blocks


def step_numbers(model: Model, spec: ProductSpec) -> StepNumbers | None:
    """The numbers of a model whose steps are fused dot-adds and known before tracing; else None."""
    if (model.step_kind, model.flush, model.nan, model.dealing) != (None, None, None, "pairs"):
        return None
    known = all(isinstance(v, int) for v in (model.terms, model.fraction_bits, model.floor)) and isinstance(model.result_bits, int | None)
    modes = all(isinstance(v, str) for v in (model.rounding, model.alignment))
    if not (known and modes) or model.result not in (F16, F32):
        return None
    if spec.d != model.result and (model.result, spec.d) != (F32, F16):
        return None
    order, k = Order.from_model(model, spec.k), spec.k
    assert isinstance(model.fraction_bits, int) and isinstance(model.floor, int)
    kept = model.result.mantissa_bits if model.result_bits is None else model.result_bits
    assert isinstance(kept, int)
    mantissas = spec.a.mantissa_bits + spec.b.mantissa_bits
    if model.summed is not None:  # in units of 2^min_exponent, and of the scales' last places
        mantissas += 2 * spec.require_scale().mantissa_bits - spec.a.min_exponent - spec.b.min_exponent
    return StepNumbers(
        order.step_size(k), k, k // order.groups, order.groups, order.steps_per_chain(k) or 0, order.together, model.fraction_bits,
        mantissas, model.summed or 0, model.floor, kept, str(model.rounding), str(model.alignment),
        spec.d != model.result, spec.scale is not None,
    )  # fmt: skip


# ---- the products and the sums of a step


def is_compact(a: Format, b: Format) -> bool:
    """Returns whether every product of two values that are not zero is a normal f32, with room for the alignment, so that values can be
    multiplied.
    """
    least = a.min_exponent - a.mantissa_bits + b.min_exponent - b.mantissa_bits
    greatest = a.max_exponent + b.max_exponent + 2
    return least >= F32.min_exponent and greatest <= F32.max_exponent


def largest_product(a: Format, b: Format, fraction_bits: int) -> int:
    """The largest aligned product of a step in units, truncated: the exponent of the largest term is that of the alignment."""
    largest = ((2 << a.mantissa_bits) - 1) * ((2 << b.mantissa_bits) - 1)
    shift = fraction_bits - a.mantissa_bits - b.mantissa_bits
    return largest << shift if shift >= 0 else largest >> -shift


def largest_accumulator(fraction_bits: int) -> int:
    """A bound of an aligned accumulator in units."""
    return (2 << fraction_bits) - 1


def products_fit_word(fraction_bits: Any, a: Format, b: Format, terms: int) -> bool:
    """Returns whether the sum of some aligned products is an i32. fraction_bits: traced ones may be any."""
    return isinstance(fraction_bits, int) and fraction_bits <= 30 and terms * largest_product(a, b, fraction_bits) < 1 << WORD_BITS


def word_sums(fraction_bits: Any, a: Format, b: Format, terms: int, alignment: Any) -> int:
    """Sums of truncated products that are an i32 each: 1 or 2; 0 where terms are added in two parts (`general.split_term`)."""
    if not truncates(alignment):
        return 0
    return next((sums for sums in (1, 2) if products_fit_word(fraction_bits, a, b, -(-terms // sums))), 0)


def float_sums(a: Format, b: Format, fraction_bits: int, terms: int) -> int:
    """Sums of products that are rounded as floats, each an i32 with the accumulator: 1 or 2; 0 if that is not so."""
    if fraction_bits > MOST_FLOAT_BITS:
        return 0
    largest, own = largest_product(a, b, fraction_bits) + 1, (2 << fraction_bits) + 1  # 1: rounded up
    return next((sums for sums in (1, 2) if -(-terms // sums) * largest + own < 1 << WORD_BITS), 0)


# ---- bounded steps


class Lanes(NamedTuple):
    """Integers that hold the exponent of every factor, and the sum of two."""

    bits: int
    zero: int  # exponent of a factor that is zero
    special: int  # exponent of Inf and NaN


NARROW_LANES = Lanes(8, -64, 63)
WIDE_LANES = Lanes(16, -1 << 13, 1 << 13)


class BoundedForm(NamedTuple):
    """The bounded step of one model and product."""

    a: Format
    b: Format
    terms: int  # products of a step
    fraction_bits: int
    kept: int  # fraction bits of a result
    nan: int  # code of every NaN
    is_narrow: bool  # the formats alone bound the products

    @property
    def lanes(self) -> Lanes:
        return NARROW_LANES if self.is_narrow else WIDE_LANES

    @property
    def least(self) -> int:
        """The least exponent to which a step is aligned. No sum with the exponent of a zero factor is above it."""
        if self.is_narrow:
            return self.lanes.zero + max(self.a.max_exponent, self.b.max_exponent)
        return max(self.fraction_bits, self.a.mantissa_bits + self.b.mantissa_bits) + F32.min_exponent

    @property
    def most(self) -> int:
        """Exponent of the largest accumulator. Products of narrow formats are truncated to 0 beside a larger one."""
        return self.a.max_exponent + self.b.max_exponent + 3 + self.fraction_bits if self.is_narrow else MAX_ACCUMULATOR

    @property
    def sums(self) -> int:
        """Sums of products, each of which fits an i32: 1 or 2."""
        return 1 if products_fit_word(self.fraction_bits, self.a, self.b, self.terms) else 2

    @property
    def fits(self) -> bool:
        """True if the sum of all products and the accumulator fits an i32."""
        largest = self.terms * largest_product(self.a, self.b, self.fraction_bits) + largest_accumulator(self.fraction_bits)
        return self.sums == 1 and largest < 1 << WORD_BITS

    @property
    def spare_bits(self) -> int:
        """Bits of an f32's fraction below the integer part of an aligned product."""
        return FRACTION - (self.fraction_bits + 2)

    @property
    def truncates_by_addition(self) -> bool:
        product_bits = self.a.mantissa_bits + self.b.mantissa_bits + 2
        return self.is_narrow and self.spare_bits >= product_bits and self.terms < min(1 << self.spare_bits, 1 << 8)

    @property
    def adds_floats(self) -> bool:
        """True if `bounded.add_truncated` serves: the sum of a step's products fits the fraction of an f32."""
        return self.is_narrow and self.terms << (self.fraction_bits + 2) <= 1 << FRACTION


@lru_cache(maxsize=1024)
def _bounded_form(a: Format, b: Format, scaled: bool, terms: int, fraction_bits: int, kept: int, nan: int) -> BoundedForm:
    most = max(a.max_exponent, b.max_exponent)
    is_narrow = not scaled and NARROW_LANES.zero + most < a.min_exponent + b.min_exponent and most < NARROW_LANES.special
    return BoundedForm(a, b, terms, fraction_bits, kept, nan, is_narrow)


def bounded_form(model: Model, spec: ProductSpec, terms: int) -> BoundedForm | None:
    """Returns the form of the bounded step, or None if there is none for the model.

    Args:
        model: The model, specialised to the instruction.
        spec: The formats that are multiplied.
        terms: Products of a step.
    """
    fixed = (
        model.result == F32 and model.step_kind is None and model.summed is None and model.chain is None and spec.d == F32
        and isinstance(model.fraction_bits, int) and isinstance(model.terms, int) and isinstance(model.floor, int)
        and (model.result_bits is None or isinstance(model.result_bits, int))
        and truncates(model.alignment) and truncates(model.rounding)
    )  # fmt: skip
    if not fixed or not products_fit_word(model.fraction_bits, spec.a, spec.b, -(-terms // 2)):
        return None
    assert isinstance(model.floor, int) and isinstance(model.fraction_bits, int)
    if model.floor > F32.min_exponent:
        return None
    kept = FRACTION if model.result_bits is None else int(model.result_bits)
    nan = F32.nan if model.nan is None else model.nan
    return _bounded_form(spec.a, spec.b, spec.scale is not None, terms, model.fraction_bits, kept, nan)


def largest_exponent_sum(product_bits: Any) -> Any:
    """The greatest sum of the largest exponents of both sides. product_bits: bits of the number of products along K."""
    return MAX_ACCUMULATOR - 1 - product_bits


def factors_are_bounded(form: BoundedForm, x_low: Any, x_high: Any, y_low: Any, y_high: Any, product_bits: Any) -> Any:
    """Returns whether the nonzero factors of wide formats are bounded.

    Each is a normal f32 with its scale, and so is each product; the products of all steps stay below 2^(MAX_ACCUMULATOR + 1).

    Args:
        form: Of the step.
        x_low: The least exponent of A's factors that are not zero. As all of these a value, an array, or a number.
        x_high: The largest one.
        y_low: Of B.
        y_high: Of B.
        product_bits: Bits of the number of products along K.
    """
    normal = (x_low >= F32.min_exponent + form.a.mantissa_bits) & (y_low >= F32.min_exponent + form.b.mantissa_bits)
    normal = normal & (x_high <= F32.max_exponent) & (y_high <= F32.max_exponent)
    return normal & (x_low + y_low >= form.least) & (x_high + y_high <= largest_exponent_sum(product_bits))


def accumulator_is_bounded(magnitude: Any, field: Any, least: int, most: int) -> Any:
    """Returns whether a bounded step takes an f32 accumulator: it is zero, or its exponent lies from `least` to `most`.

    Args:
        magnitude: The code without sign.
        field: Its exponent field.
        least: Of the form.
        most: Of the form.
    """
    return (magnitude == 0) | ((field >= least + BIAS) & (field <= most + BIAS))


# ---- block-scaled groups


def unit_exponent(fmt: Format) -> int:
    """The exponent of the unit of which every value of the format is a multiple."""
    return fmt.min_exponent - fmt.mantissa_bits


def largest_value(fmt: Format) -> int:
    """The largest value of a format, in units of its least one."""
    return ((2 << fmt.mantissa_bits) - 1) << (fmt.max_exponent - fmt.min_exponent)


class GroupedForm(NamedTuple):
    """The bounded step of block-scaled groups."""

    numbers: StepNumbers
    a: Format
    b: Format
    scale: Format

    @property
    def groups(self) -> int:
        return self.numbers.terms // self.numbers.summed

    @property
    def unit(self) -> int:
        """Exponent of the unit of the products of two values without scales."""
        return unit_exponent(self.a) + unit_exponent(self.b)

    @property
    def least(self) -> int:
        """The least exponent to which a step is aligned: its unit and all multiples of a group's unit are normal."""
        return max(self.numbers.fraction_bits, 2 * self.scale.mantissa_bits) + F32.min_exponent

    @property
    def least_scale(self) -> int:
        """The least exponent of a scale: it is a normal f32."""
        return F32.min_exponent + self.scale.mantissa_bits

    @property
    def most_scale(self) -> int:
        """The greatest exponent of a scale: a group's sum times one scale is an f32, whatever the other scale is."""
        return F32.max_exponent - (self.numbers.summed * largest_value(self.a) * largest_value(self.b)).bit_length()

    @property
    def most(self) -> int:
        """The greatest sum of two scales' exponents, plus the bits of the number of products."""
        return MAX_ACCUMULATOR + 1 - (self.a.max_exponent + self.b.max_exponent + 4) + self.unit

    @property
    def has_narrow_scales(self) -> bool:
        """True if the format of the scales alone bounds their exponents."""
        low, high = self.scale.min_exponent, self.scale.max_exponent
        return low >= max(self.least_scale, -(-self.least // 2)) and high <= self.most_scale and 2 * high + 63 <= self.most


def grouped_form(numbers: StepNumbers, a: Format, b: Format, scale: Format | None, result: Format, d: Format) -> GroupedForm | None:
    """Returns the form of the bounded step of groups, or None if there is none for the model."""
    n = numbers
    if not n.summed or scale is None or result != F32 or d != F32 or n.chain or n.groups > 1:
        return None
    form = GroupedForm(n, a, b, scale)
    largest = n.summed * largest_value(a) * largest_value(b) * ((2 << scale.mantissa_bits) - 1) ** 2
    shift = n.fraction_bits - n.mantissas
    of_step = form.groups * (largest << max(shift, 0)) + (2 << n.fraction_bits)
    least_power = n.fraction_bits + form.unit - LOW_BITS - F32.max_exponent
    fits = (
        of_step < 1 << SUM_BITS and shift >= 0 and least_power >= F32.min_exponent and n.floor <= F32.min_exponent
        and n.rounding == n.alignment == "RZ" and n.fraction_bits >= n.kept
    )  # fmt: skip
    return form if fits else None


def scales_are_bounded(form: GroupedForm, x_low: Any, x_high: Any, y_low: Any, y_high: Any, product_bits: Any) -> Any:
    """Returns whether the scales of a step are bounded.

    Args:
        form: Of the step.
        x_low: The least exponent of A's scales. As all of these a value, an array, or a number.
        x_high: The largest one.
        y_low: Of B.
        y_high: Of B.
        product_bits: Bits of the number of products along K, which is at least that of one step.
    """
    bounded = (x_low >= form.least_scale) & (x_high <= form.most_scale) & (y_low >= form.least_scale) & (y_high <= form.most_scale)
    return bounded & (x_low + y_low >= form.least) & (x_high + y_high + product_bits <= form.most)


# ---- steps in integers, and on factors that are kept as floats


class IntegerForm(NamedTuple):
    """A step on significands: `general.align_signed` and `general.end_step`, or `anchored.end_in_f64`."""

    numbers: StepNumbers
    a: Format
    b: Format
    result: Format

    @property
    def sum_fits_int(self) -> bool:
        """True if the sum of the aligned products fits an i32, in any rounding."""
        n = self.numbers
        return n.summed == 0 and n.fraction_bits + 3 + (n.terms - 1).bit_length() < WORD_BITS

    @property
    def largest_units(self) -> tuple[int, int]:
        """The largest product and accumulator before they are truncated, in units, or in their last places where these are lower."""
        n, result = self.numbers, self.result
        product = ((2 << self.a.mantissa_bits) - 1) * ((2 << self.b.mantissa_bits) - 1) << max(0, n.fraction_bits - n.mantissas)
        return product, (2 << result.mantissa_bits) - 1 << max(0, n.fraction_bits - result.mantissa_bits)

    @property
    def truncates_words(self) -> bool:
        """True if `general.truncate_product` serves: magnitudes are words, and terms are truncated."""
        return self.numbers.alignment == "RZ" and not self.numbers.summed and max(self.largest_units) < 1 << WORD_BITS

    @property
    def terms_of_sum(self) -> int:
        """Products whose sum fits an i32, at most those of a step."""
        n = self.numbers
        return min(n.terms, ((1 << WORD_BITS) - 1) // self.largest_units[0]) if self.truncates_words else n.terms

    @property
    def accumulator_fits(self) -> bool:
        """True if an i32 has room for the aligned accumulator."""
        return self.largest_units[1] < 1 << (WORD_BITS if self.numbers.alignment == "RZ" else WORD_BITS - 1)

    @property
    def sum_fits_word(self) -> bool:
        """True if the magnitude of the whole sum is below 2^32."""
        product, own = self.largest_units
        return self.truncates_words and product * self.numbers.terms + own < 1 << 32

    @property
    def ends_in_f64(self) -> bool:
        """True if `anchored.end_in_f64` serves: the result is an f32, terms are truncated, and every unit is a normal f64."""
        n = self.numbers
        rounded = n.rounding == "RZ" or (n.rounding == "RN" and n.kept == FRACTION)
        return self.result == F32 and n.alignment == "RZ" and not n.summed and abs(n.floor) < 900 and rounded

    @property
    def products_are_normal(self) -> bool:
        """True if every product, and all bits of it, lie within f32."""
        lowest = self.a.min_exponent + self.b.min_exponent - self.numbers.mantissas
        return self.a.max_exponent + self.b.max_exponent < 100 and lowest > -120


def keeps_floats(n: StepNumbers, stored: tuple[Format, Format], multiplied: tuple[Format, Format]) -> bool:
    """Returns whether factors are kept as f32: products are then exact, and below 2^30 units. `bounded.truncate_by_conversion` truncates.

    Args:
        n: Of the step.
        stored: Formats of the codes.
        multiplied: Formats in which they are multiplied.
    """
    exact = n.mantissas + 2 <= FRACTION + 1 and all(
        fmt.bits <= 8 or (fmt in (F16, BF16, TF32) and fmt == own) for fmt, own in zip(stored, multiplied, strict=True)
    )
    aligned = n.alignment == "RZ" and 1 <= n.fraction_bits <= MOST_FLOAT_BITS and -140 <= n.floor <= 100  # so that units are f32
    return exact and aligned and not n.summed


# ---- anchored steps: sums that begin at a large power of two

REACH, NEAR = 15, 12  # binades below the largest exponents of a row and a column: those with a power, and those that a step may lie
BYTE = 0x80  # of the bytes of lowest bits: where the flag stands
NO_TOP, SPECIAL_TOP = -300, 1000  # the max exponent of a line of zeros, and of one with an Inf or a NaN
MOST_OF_SCALE = 120  # exponent of a group's largest scale
REPEATS = 4  # times that a tensor core adds each product which it truncates
RELATIVE_LIMIT = 90  # of the sum of the largest exponents of a row and a column, where exponents are relative
MOST_RELATIVE = 120  # exponents of plain accumulators, where exponents are relative


class AnchoredForm(NamedTuple):
    """The anchored step of one model and product: see `anchored`."""

    numbers: StepNumbers
    a: Format
    b: Format
    scale: Format
    result: Format
    wide: bool  # sums in f64
    relative: bool  # exponents count from the largest one of the line in the step
    base: int  # of the powers: 2^base
    offset: int  # exponent fields of their sums, divided by base, begin here
    power_of_a: int  # exponent of A's power of a factor of exponent 0
    power_of_b: int
    low_bits_begin: int  # the exponent of a product's lowest bit that counts as 0
    absent: int  # the exponent of the lowest bit of a zero
    depth: int  # binades below the max exponent of a line in which lowest bits are told apart
    most: int  # exponents of plain accumulators are below it
    least_unit: int  # exponent of the last place of plain accumulators, at least
    least_tops: int  # sum of the max exponents of a row and a column, at least
    floor_counts: bool  # the floor may lie above a step's exponent

    @property
    def field(self) -> int:
        """Where the exponent begins in a float's upper word."""
        return F64.mantissa_bits - 32 if self.wide else FRACTION

    @property
    def bias(self) -> int:
        return F64.bias if self.wide else BIAS

    @property
    def up(self) -> int:
        """Binades from a step's exponent to its anchor, whose last place is the step's unit."""
        return (F64 if self.wide else F32).mantissa_bits - self.numbers.fraction_bits

    @property
    def fields(self) -> int:
        return (2 * self.bias + 1) << self.field

    def can_repeat_products(self, own_bits: int) -> bool:
        """Returns whether a tensor core truncates the products of this step as the step does: see `anchored.begin_repeated`.

        Args:
            own_bits: Fraction bits of the tensor core's own steps of bf16, whose terms and results are truncated; 0: there are none.
        """
        n, spare = self.numbers, own_bits - F32.mantissa_bits
        if not 0 <= spare < REPEATS.bit_length() or self.wide or self.relative or n.summed or n.terms % 16:
            return False
        exact = max(self.a.mantissa_bits, self.b.mantissa_bits) <= BF16.mantissa_bits
        sums = REPEATS * ((n.terms << (n.fraction_bits + 2)) + (2 << n.fraction_bits))  # below half a binade of the anchor
        return exact and sums <= 1 << (own_bits - 1) and self.most + self.up + spare <= F32.max_exponent

    def exponent_limit(self, k: int) -> int:
        """The largest sum of the max exponents of a row and a column in a step of which no sum of k products leaves the binades."""
        return RELATIVE_LIMIT if self.relative else self.most - 2 - max(k - 1, 1).bit_length()


def anchored_form(model: Model, spec: ProductSpec) -> AnchoredForm | None:
    """Returns the form of the anchored step, or None if there is none for the model."""
    n = step_numbers(model, spec)
    served = "result", "terms", "fraction_bits", "floor", "result_bits", "multiplicand", "groups", "chain", "summed", "rounding"
    rounding = "RZ" if model.result == F32 else "RN"
    if n is None or not model.uses_only(*served) or n.rounding != rounding or n.rounded_again or n.of_group % n.terms:
        return None
    if not n.summed and n.terms not in (4, 8, 16, 32):
        return None
    relative = n.scaled or spec.a.exponent_bits > 5 or spec.b.exponent_bits > 5
    find = _grouped if n.summed else _relative if relative else _absolute
    form = find(n, spec.a, spec.b, spec.scale or UE8M0, model.result)
    return None if form is None or n.floor > form.most else form  # a step may align to the floor


def _absolute(n: StepNumbers, a: Format, b: Format, scale: Format, result: Format) -> AnchoredForm | None:
    """For formats whose product exponents all fit one float as powers."""
    least, largest = a.min_exponent + b.min_exponent, a.max_exponent + b.max_exponent
    offset = 2 - least
    base = 8 if 8 * (offset + largest) + 7 < 255 else 4
    wide = n.terms * 2 ** (n.fraction_bits + 2) + 2 ** (n.fraction_bits + 1) >= 2**21
    low_bits_begin = least - n.mantissas
    nearest = -offset - n.fraction_bits - low_bits_begin  # the least unit, counted as the sum of two bytes
    absent = min((255 - BYTE + nearest) // 2, 127)
    most = absent + n.fraction_bits + low_bits_begin  # E, so that a zero counts as an integer
    if not wide:
        most = min(most, F32.max_exponent - (F32.mantissa_bits - n.fraction_bits) - 1)
    fits = 4 * (offset + largest) + 3 < 255 and largest - low_bits_begin <= 255 - BYTE + nearest and absent >= 0
    if not fits or most < largest // 2 + 16 or n.fraction_bits > F32.mantissa_bits + 17:
        return None
    power = base * offset - F32.bias
    return AnchoredForm(
        n, a, b, scale, result, wide, False, base, offset, power // 2, power - power // 2, low_bits_begin, absent, 0, most - 1,
        -offset - n.fraction_bits, 0, n.floor > -offset,
    )  # fmt: skip


def _relative(n: StepNumbers, a: Format, b: Format, scale: Format, result: Format) -> AnchoredForm | None:
    """For other formats: powers are relative to the max exponents of the row and the column in the step."""
    depth, base = n.fraction_bits + NEAR + 1, 8
    absent = (255 - BYTE + n.fraction_bits + NEAR + 2) // 2
    least_unit = F32.min_exponent + 1
    if 2 * depth + 1 > absent:
        return None
    power = BYTE + base * NEAR - F32.bias  # bit 30 of the sum of powers is set from -NEAR on
    return AnchoredForm(
        n, a, b, scale, result, True, True, base, (F32.bias + power) // base, power // 2, power - power // 2, 0, absent, depth,
        MOST_RELATIVE, least_unit, least_unit + n.fraction_bits + NEAR, n.floor > least_unit + n.fraction_bits,
    )  # fmt: skip


def _grouped(n: StepNumbers, a: Format, b: Format, scale: Format, result: Format) -> AnchoredForm | None:
    """For products summed in groups: the powers are those of their scales, and bf16 holds each value with its scale's significand."""
    scales = (2 << scale.mantissa_bits) - 1
    largest = [largest_value(fmt) * scales for fmt in (a, b)]
    above = (n.summed * largest[0] * largest[1]).bit_length() - n.mantissas  # a group's sum is below 2^above times the power of its scales
    if max(largest) >= 2 << BF16.mantissa_bits or n.terms % 16 or n.summed % 16 or n.terms > 128:
        return None
    sum_fits = n.fraction_bits + above + (n.terms // n.summed).bit_length() + 1 <= F64.mantissa_bits
    if not sum_fits or above + n.fraction_bits >= F64.mantissa_bits or n.fraction_bits < n.kept:
        return None
    base, least_unit, offset = 8, F32.min_exponent + 1, 2 - 2 * scale.min_exponent
    relative = base * (offset + 2 * scale.max_exponent) + base - 1 >= F32.infinity >> F32.mantissa_bits  # as `_relative`, or `_absolute`
    power = BYTE + base * NEAR - F32.bias if relative else base * offset - F32.bias
    if not relative:
        least_unit = -offset - n.fraction_bits
    return AnchoredForm(
        n, a, b, scale, result, True, relative, base, (F32.bias + power) // base, power // 2, power - power // 2, 0, 0, 0, MOST_RELATIVE,
        least_unit, least_unit + n.fraction_bits + NEAR, n.floor > least_unit + n.fraction_bits,
    )  # fmt: skip
