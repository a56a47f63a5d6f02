"""The parameters of a kernel with bounded steps, and the lanes in which it finds the max exponents of a step."""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

from llvmlite import ir

from tcemu.engine.arithmetic.step import bounded, general, specials
from tcemu.engine.arithmetic.step.decoding import BIAS
from tcemu.engine.arithmetic.step.forms import BoundedForm
from tcemu.engine.arithmetic.step.rounding import encode_truncated
from tcemu.engine.backends.llvm.values import I8, I16, I32, Builder, Value


class KernelForm(NamedTuple):
    """The parameters of a kernel, which is compiled for each set of them."""

    step: BoundedForm
    floor: int  # of the model
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
        return 0 if self.step.is_narrow else self.step.lanes.zero

    @property
    def least(self) -> int:
        """The least exponent to which a bounded step is aligned, with the bias of f32. No sum with the exponent of a zero is above it."""
        if not self.step.is_narrow:
            return self.step.least + BIAS
        a, b = self.lane_biases
        return max(self.step.a.max_exponent + a, self.step.b.max_exponent + b)

    @property
    def adds_floats(self) -> bool:
        """True if the products of a step are added as floats, rounded toward zero."""
        return self.wide_registers and self.step.adds_floats


class LaneSteps:
    """The step of a kernel's form on vectors of elements of D, for a function that is being built."""

    def __init__(self, form: KernelForm, b: Builder) -> None:
        self.form, self.b = form, b

    def align(self, code: Value, top: Value) -> bounded.Alignment:
        """Rule 3 of a bounded step. top: max exponent of the products, in lanes."""
        form = self.form.step
        least = None if form.is_narrow else self.form.least
        return bounded.align(top.cast("zext" if form.is_narrow else "sext", I32), code, least, form.fraction_bits)

    def round(self, addends: list[Value], unit: Value) -> Value:
        """Rule 6 of a bounded step."""
        return bounded.round_sum(addends, unit, self.form.step.fits, self.form.step.kept)

    def select_unreached(self, code: Value, word: Value, top: Value, nan: int | None) -> Value:
        """The result of a bounded step of narrow formats, or the accumulator where no product reaches it. nan: of every NaN, or None."""
        form = self.form.step
        return bounded.select_unreached(code, word, top != self.form.least, form.most, form.fraction_bits, form.kept, nan)

    def add_any_vector(self, products: list[tuple[Value, Value]], code: Value, nan: int | None) -> Value:
        """A step of any numbers, truncated.

        Args:
            products: Fractions below 4, and exponents.
            code: The accumulator.
            nan: The code of every NaN; None: what becomes of an accumulator that is Inf or NaN is decided elsewhere.
        """
        form = self.form.step
        fraction, exponent, special = general.own_fraction(code)
        top = reduce(lambda x, y: x.max(y), [e for _, e in products], exponent.max(self.form.floor))
        offset = (BIAS + form.fraction_bits) - top
        terms = bounded.add_terms([general.align_fraction(*product, offset) for product in products], form.sums)
        total = bounded.add_addends([*terms, general.align_fraction(fraction, exponent, offset)], form.fits)
        word = encode_truncated(total, top - form.fraction_bits, form.kept)
        if nan is None:
            return word
        own = (code & specials.MAGNITUDE > specials.INFINITY).select(nan, code)
        return special.select(own, word)
