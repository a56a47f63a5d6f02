"""The lane formulas of the kernels as CUDA C++, rendered from `arithmetic.step` for one model and its formats.

Each function here returns the text of one group of formulas. The files of `kernels/` call them by the names that they are given here.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from tcemu.engine.arithmetic.step import anchored, bounded, decoding, general, kept_floats, quantizing, specials
from tcemu.engine.arithmetic.step.decoding import SPECIAL_EXPONENT, ZERO_EXPONENT, MarkedFactor
from tcemu.engine.arithmetic.step.forms import MOST_OF_SCALE, NEAR, NO_TOP, SPECIAL_TOP, AnchoredForm, IntegerForm
from tcemu.engine.arithmetic.step.kept_floats import FloatFactor, Moved
from tcemu.engine.arithmetic.step.values import F32, F64, I32, I64, Lane
from tcemu.engine.backends.cuda.values import TYPES, Struct, Value, function_text
from tcemu.engine.backends.elementwise_request import ElementwiseRequest
from tcemu.engine.formats.number_formats import F16, Format
from tcemu.engine.formats.number_formats import F32 as BINARY32
from tcemu.engine.formats.number_formats import F64 as BINARY64

FACTOR = Struct("Factor", MarkedFactor, (I32, I32))
FLOAT_FACTOR = Struct("FloatFactor", FloatFactor, (I32, I32))
MOVED = Struct("Moved", Moved, (F32, F32))
STEP_CONSTANTS = {"zero_exponent": ZERO_EXPONENT, "special_exponent": SPECIAL_EXPONENT}


def constants_text(**numbers: int) -> str:
    """A line `constexpr int NAME = value;` each, the name in capitals."""
    return "\n".join(f"[[maybe_unused]] constexpr int {name.upper()} = {int(value)};" for name, value in numbers.items())


def format_text(name: str, fmt: Format, *functions: str) -> str:
    """A format as a struct of its numbers and of functions, which templates find there."""
    numbers = f"mantissa_bits = {fmt.mantissa_bits}, min_exponent = {fmt.min_exponent}, max_exponent = {fmt.max_exponent}"
    words = {"infinity": fmt.infinity, "nan": fmt.nan, "sign": 1 << (fmt.bits - 1) if fmt.signed else 0}
    lines = [f"static constexpr int {numbers};"]
    lines.append(f"static constexpr u32 {', '.join(f'{word} = {value:#x}u' for word, value in words.items())};")
    return "\n".join([f"struct {name} {{", *(f"    {line}" for line in lines), *functions, "};"])


def decoding_functions(fmt: Format) -> list[str]:
    """Codes taken apart, rules 1 and 2: members of a format's struct."""
    sign = (lambda code: decoding.sign_mask(fmt, code)) if fmt.signed else (lambda code: code.constant(0))
    return [
        _member("sign_mask", sign, I32),
        _member("magnitude", partial(decoding.mark_magnitude, fmt), I32, result=FACTOR),
        _member("decode", partial(decoding.mark_factor, fmt), I32, result=FACTOR),
    ]


def stored_functions(stored: Format, fmt: Format) -> list[str]:
    """A stored code as a factor of the format in which it is multiplied: members of the stored format's struct."""
    magnitude = lambda code: decoding.convert_magnitude(stored, fmt, decoding.mark_magnitude(stored, code))
    return [
        f"    static constexpr int up = {kept_floats.exponent_offset(stored)};",
        _member("magnitude", partial(decoding.mark_magnitude, stored) if stored == fmt else magnitude, I32, result=FACTOR),
        *decoding_functions(stored)[:1],
        _member("kept_float", lambda code: kept_floats.keep_float(stored, fmt, code), I32, result=FLOAT_FACTOR),
    ]


def scaling_function(fmt: Format, scale: Format, summed: bool) -> str:
    """A factor under its block scale."""
    return _member("scaled", lambda factor, code: decoding.scale_factor(fmt, scale, summed, factor, code), FACTOR, I32, result=FACTOR)


def step_functions(form: IntegerForm) -> list[str]:
    """The step in integers: a term aligned, the end of a step, and rule 8 on factors in integers."""
    n, result, lane = form.numbers, form.result, I32 if form.sum_fits_int else I64
    align = lambda term, distance: general.align_signed(term, n.mantissas, distance, n.fraction_bits, n.alignment, lane)
    return [
        f"typedef {TYPES[lane]} Sum;",
        function_text("align_term", align, I32, I32),
        function_text("end_step", lambda total, code, top: general.end_step(form, total, code, top), I64, I32, I32),
        function_text("class_of", lambda factor: specials.marked_class(factor), FACTOR),
        function_text("special_value", lambda code: specials.special_value(result, code), I32),
        function_text("special_result", lambda total, otherwise: specials.code_of_class(result, total, otherwise), F32, I32),
    ]


def sum_functions(form: IntegerForm) -> list[str]:
    """Sums outside the steps."""
    result, scaled = form.result, form.numbers.block_scaled
    add_promoted = lambda total, code, scale: general.add_promoted(result, total, code, scale if scaled else None)
    return [
        function_text("canonical", lambda code: specials.canonical_code(result, code), I32),
        function_text("add_f32", lambda x, y: general.add_codes(BINARY32, x, y), I32, I32),
        function_text("add_promoted", add_promoted, I32, I32, F32),
        function_text("f32_to_f16", lambda code: general.convert_code(BINARY32, F16, code), I32),
        function_text("f16_to_f32", lambda code: general.convert_code(F16, BINARY32, code), I32),
    ]


def tile_constants(form: AnchoredForm) -> dict[str, int]:
    """Numbers of the anchored step that the loops use."""
    names = ("wide", "relative", "base", "absent", "least_tops", "field")
    return {name: getattr(form, name) for name in names} | {
        "near": NEAR, "no_top": NO_TOP, "special_top": SPECIAL_TOP, "most_of_scale": MOST_OF_SCALE,
    }  # fmt: skip


def tile_functions(form: AnchoredForm, own_bits: int) -> list[str]:
    """The anchored step. own_bits: see `TileNumbers`."""
    value = F64 if form.wide else F32
    repeated = [
        function_text("begin_repeated", lambda c, word: anchored.begin_repeated(form, c, word, own_bits), value, I32),
        function_text("end_repeated", lambda total, half: anchored.end_repeated(form, total, half), value, I32),
    ]
    summed = [
        function_text("reach", lambda word, base: anchored.reach(form, word, base), I32, I32),
        function_text("not_integers", anchored.not_integers, *[I32] * 5),
        function_text("begin_sum", lambda c, word, count: anchored.begin_sum(form, c, word, count), value, I32, I32),
        function_text("add_product", anchored.add_product, value, value, value),
        function_text("end_sum", lambda total, half: anchored.end_sum(form, total, half), value, I32),
    ]
    of_groups = [
        function_text("truncate", lambda value, word: anchored.truncate(form, value, word), value, I32),
        function_text("round_kept", lambda total, half: anchored.round_kept(form, total, half), value, I32),
    ]
    align = lambda powers, c, base, half: anchored.alignment_word(form, powers, c, base, half)
    return [
        f"typedef {TYPES[value]} Value;",
        function_text("base_of_lines", lambda tops: anchored.base_of_lines(form, tops), I32),
        function_text("alignment_word", align, I32, value, I32, I32),
        *(of_groups if form.numbers.summed else repeated if own_bits else summed),
        function_text("result_float", lambda c: anchored.result_float(form, c), value),
        function_text("result_code", lambda c: anchored.result_code(form, c), value),
        function_text("is_plain", lambda code: anchored.is_plain(form, code), I32),
        function_text("magnitude_word", lambda c: anchored.upper_word(c) & specials.MAGNITUDE, value),
        function_text("is_small", lambda word: anchored.is_small(form, word), I32),
        function_text("add_value", lambda x, y: x + y, value, value),
        *_factor_functions(form),
    ]


def preparing_functions(form: AnchoredForm, fmt: Format, in_bf16: bool) -> list[str]:
    """A factor as the anchored step reads it: members of a format's struct. in_bf16: a tensor core multiplies it."""
    if in_bf16:
        own = [_member("bf16", lambda factor: anchored.factor_bf16(form, fmt, factor), FACTOR)]
    else:
        own = [
            _member("value", lambda factor: anchored.factor_value(form, fmt, factor), FACTOR),
            _member("lowest_bit", lambda factor, top: anchored.lowest_bit(form, fmt, factor, top), FACTOR, I32),
        ]
    return own


def _factor_functions(form: AnchoredForm) -> list[str]:
    """The same, whatever the format."""
    power = lambda one: lambda factor, top: anchored.exponent_power(form, factor, top, one)
    return [
        function_text("sign_byte", lambda factor: anchored.sign_byte(factor), FACTOR),
        function_text("is_near", lambda factor, top: anchored.is_near(factor, top), FACTOR, I32),
        function_text("power_of_a", power(form.power_of_a), FACTOR, I32),
        function_text("power_of_b", power(form.power_of_b), FACTOR, I32),
    ]


def register_constants(form: IntegerForm, stored: tuple[Format, Format]) -> dict[str, int]:
    """Numbers of a warp's steps that the loops use."""
    offsets = sum(map(kept_floats.exponent_offset, stored))
    return {
        "truncates_words": form.truncates_words, "products_are_normal": form.products_are_normal, "upper": anchored.UPPER,
        "not_zero": kept_floats.NOT_ZERO,
        "terms_of_sum": form.terms_of_sum if form.terms_of_sum < form.numbers.terms else 1 << 30,
        "no_exponents": (BINARY64.bias - offsets) << anchored.UPPER,
    }  # fmt: skip


def register_functions(form: IntegerForm) -> list[str]:
    """The steps of a warp, on significands and on factors that are kept as f32."""
    is_i32 = form.terms_of_sum == form.numbers.terms

    def end_of_step(sum: Value, code: Value, top: Value) -> Value:
        return (
            end_by_word(sum, code, (top + BINARY64.bias) << anchored.UPPER) if form.ends_in_f64 else general.end_step(form, sum, code, top)
        )

    def end_by_word(sum: Value, code: Value, word: Value) -> Value:
        if form.ends_in_f64:
            return anchored.end_in_f64(form, sum.resize(I32) if is_i32 else sum, code, word)
        return general.end_step(form, sum, code, (word >> anchored.UPPER) - BINARY64.bias)

    return [
        function_text("truncate_product", general.truncate_product, I32, I32, I32, I32),
        function_text("end_of_step", end_of_step, I64, I32, I32),
        function_text("truncate_by_conversion", lambda x, y, scale: bounded.truncate_by_conversion(x * y, scale), F32, F32, F32),
        function_text("own_word", lambda code: kept_floats.own_word(form, code), I32),
        function_text("align_word", lambda products, own: kept_floats.align_word(form, products, own), I32, I32),
        function_text("scale_of_word", lambda word: kept_floats.scale_of_word(form, word), I32),
        function_text("is_far", lambda products, word: kept_floats.is_far(form, products, word), I32, I32),
        MOVED.text,
        function_text("move", lambda word: kept_floats.move(form, word), I32, result=MOVED),
        function_text("finite_as_one", lambda word: kept_floats.finite_as_one(form, word), I32),
        function_text("end_by_word", end_by_word, I64, I32, I32),
    ]


def quantizer_functions(request: ElementwiseRequest) -> list[str]:
    """Numbers of a format, divided by scales or multiplied by them, and rounded."""
    source, target, scale = request.source, request.target, request.scale
    by_scale = lambda value, scale: value * scale if request.multiplied else value / scale
    return [
        function_text("number", lambda code: quantizing.decode_number(source, code), I32),
        function_text("scale_number", lambda code: quantizing.decode_scale(scale, code), I32),
        function_text("by_scale", by_scale, F32, F32),
        function_text("rounded", lambda value: quantizing.round_value(target, request.saturate, value), F32),
    ]


def _member(name: str, formula: Callable[..., Any], *parameters: Lane | Struct, result: Struct | None = None) -> str:
    text = function_text(name, formula, *parameters, result=result, prefix="static ")
    return "\n".join(f"    {line}" for line in text.splitlines())
