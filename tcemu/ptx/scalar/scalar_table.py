"""The table of scalar instructions: the syntax of each (PTX ISA 9.1) and the function that builds its `Operation`.

A key is the name of an instruction. Where one name has several rows, a suffix after a point distinguishes them, as in "add.cc".
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp

from tcemu.ptx.instruction_interface import Prepare
from tcemu.ptx.scalar import bit_operations as bits
from tcemu.ptx.scalar import compare_and_select, float_approximations
from tcemu.ptx.scalar import float_arithmetic as floats
from tcemu.ptx.scalar import integer_arithmetic as integers
from tcemu.ptx.scalar import number_conversions as conversions
from tcemu.ptx.scalar.bit_operations import bitwise_operation
from tcemu.ptx.scalar.integer_arithmetic import INTEGER_TYPES, WORD_TYPES, integer_operation
from tcemu.ptx.scalar.opcode_syntax import Row, prepare_from_rows, row, shaped_row

BIT_TYPES = "b16|b32|b64"
LOGIC_TYPES = "pred|" + BIT_TYPES
REGISTER_TYPES = f"{BIT_TYPES}|{INTEGER_TYPES}|f32|f64"
WIDENING_TYPES = "u16|u32|s16|s32"
COMPARED_TYPES = f"{BIT_TYPES}|{INTEGER_TYPES}"
INTEGER_RELATIONS = "eq|ne|lt|le|gt|ge|lo|ls|hi|hs"
FLOAT_RELATIONS = "|".join(compare_and_select.FLOAT_RELATION_NAMES)
FLUSHABLE_TYPES = "f16|f16x2|f32"
UNFLUSHED_TYPES = "bf16|bf16x2|f64"
BOOLEAN_OPERATORS = "and|or|xor?"
SETP_LINES = (
    f"{INTEGER_RELATIONS} {BOOLEAN_OPERATORS} {COMPARED_TYPES}",
    f"{FLOAT_RELATIONS} {BOOLEAN_OPERATORS} ftz? {FLUSHABLE_TYPES}",
    f"{FLOAT_RELATIONS} {BOOLEAN_OPERATORS} {UNFLUSHED_TYPES}",
)
SET_LINES = (
    f"{INTEGER_RELATIONS} {BOOLEAN_OPERATORS} u32|s32|f32|f16|bf16 {COMPARED_TYPES}",
    f"{FLOAT_RELATIONS} {BOOLEAN_OPERATORS} ftz? u32|s32|f32|f16 f32",
    f"{FLOAT_RELATIONS} {BOOLEAN_OPERATORS} u32|s32|f32|f16|bf16 f64",
    f"{FLOAT_RELATIONS} {BOOLEAN_OPERATORS} bf16 f32|f16",
    f"{FLOAT_RELATIONS} {BOOLEAN_OPERATORS} ftz? u16|s16|u32|s32|f16 f16",
    f"{FLOAT_RELATIONS} {BOOLEAN_OPERATORS} u16|s16|u32|s32|bf16 bf16",
    f"{FLOAT_RELATIONS} {BOOLEAN_OPERATORS} ftz? f16x2|u32|s32 f16x2",
    f"{FLOAT_RELATIONS} {BOOLEAN_OPERATORS} bf16x2|u32|s32 bf16x2",
)

INTEGER_ROWS: dict[str, Row] = {
    # 9.7.1
    "add": row((f"{INTEGER_TYPES}|u16x2|s16x2", "sat s32"), integers.add),
    "sub": row((INTEGER_TYPES, "sat s32"), partial(integers.add, sign=-1)),
    "mul": row((f"lo|hi {INTEGER_TYPES}", f"wide {WIDENING_TYPES}"), integers.multiply),
    "mad": row((f"lo|hi {INTEGER_TYPES}", f"wide {WIDENING_TYPES}", "hi sat s32"), integers.multiply_add),
    "mul24": row("lo|hi u32|s32", integers.multiply_24),
    "mad24": row(("lo|hi u32|s32", "hi sat s32"), partial(integers.multiply_24, add=True)),
    "sad": row(INTEGER_TYPES, integer_operation(integers.sad, 3)),
    "div": row(INTEGER_TYPES, integer_operation(integers.divide, 2)),
    "rem": row(INTEGER_TYPES, integer_operation(integers.remainder, 2)),
    "abs": row("s16|s32|s64", integer_operation(integers.absolute, 1)),
    "neg": row("s16|s32|s64", integer_operation(jnp.negative, 1)),
    "min": row((f"{INTEGER_TYPES}|u16x2|s16x2", "relu s16x2|s32"), partial(integers.extremum, choose=jnp.minimum)),
    "max": row((f"{INTEGER_TYPES}|u16x2|s16x2", "relu s16x2|s32"), partial(integers.extremum, choose=jnp.maximum)),
    "popc": row("b32|b64", bits.population_count),
    "clz": row("b32|b64", bits.leading_zeros),
    "bfind": row(f"shiftamt? {WORD_TYPES}", bits.find_leading_one),
    "fns": row("b32", lambda _: bits.FIND_NTH),
    "brev": row("b32|b64", bits.reverse_bits),
    "bfe": row(WORD_TYPES, bits.extract_field),
    "bfi": row("b32|b64", bits.insert_field),
    "szext": row("clamp|wrap u32|s32", bits.extend_field),
    "bmsk": row("clamp|wrap b32", bits.make_mask),
    "dp4a": row("u32|s32 u32|s32", integers.dp4a),
    "dp2a": row("lo|hi u32|s32 u32|s32", integers.dp2a),
    # 9.7.2
    "addc": row(f"cc? {WORD_TYPES}", partial(integers.add_carry, carry_in=True)),
    "subc": row(f"cc? {WORD_TYPES}", partial(integers.add_carry, carry_in=True, subtract=True)),
    "madc": row(f"lo|hi cc? {WORD_TYPES}", partial(integers.multiply_add_carry, carry_in=True)),
    "add.cc": row(f"cc {WORD_TYPES}", partial(integers.add_carry, carry_in=False)),
    "sub.cc": row(f"cc {WORD_TYPES}", partial(integers.add_carry, carry_in=False, subtract=True)),
    "mad.cc": row(f"lo|hi cc {WORD_TYPES}", partial(integers.multiply_add_carry, carry_in=False)),
    # 9.7.6 to 9.7.8
    "setp": shaped_row(SETP_LINES, compare_and_select.set_predicate),
    "set": row(SET_LINES, compare_and_select.set_value),
    "selp": row(REGISTER_TYPES, compare_and_select.select),
    "slct": row((f"{REGISTER_TYPES} s32", f"ftz? {REGISTER_TYPES} f32"), compare_and_select.select_by_sign),
    "and": row(LOGIC_TYPES, bitwise_operation(lambda a, b: a & b, 2)),
    "or": row(LOGIC_TYPES, bitwise_operation(lambda a, b: a | b, 2)),
    "xor": row(LOGIC_TYPES, bitwise_operation(lambda a, b: a ^ b, 2)),
    "not": row(LOGIC_TYPES, bits.complement),
    "cnot": row(BIT_TYPES, bitwise_operation(lambda a: a == 0, 1)),
    "lop3": shaped_row(("b32", "or|and b32"), bits.lop3),
    "shf": row("l|r clamp|wrap b32", bits.funnel_shift),
    "shl": row(BIT_TYPES, bits.shift_left),
    "shr": row(f"{BIT_TYPES}|{INTEGER_TYPES}", bits.shift_right),
    # 9.7.9, 9.7.3.1, 9.7.3.2
    "mov": shaped_row(f"pred|{REGISTER_TYPES}|f16|bf16|f16x2|bf16x2", bits.move),
    "prmt": row(f"b32 {'|'.join(bits.PERMUTE_MODES)}?", bits.permute_bytes),
    "testp": row(f"{'|'.join(compare_and_select.PROPERTY_TESTS)} f32|f64", compare_and_select.test_property),
    "copysign": row("f32|f64", compare_and_select.copy_sign),
}

HALF_TYPES = "f16|f16x2"
BFLOAT_TYPES = "bf16|bf16x2"
IEEE_ROUNDINGS = "rn|rz|rm|rp"
SUM_LINES = (
    f"{IEEE_ROUNDINGS}? ftz? sat? f32",
    f"{IEEE_ROUNDINGS}? f64",
    f"rn? ftz? sat? {HALF_TYPES}",
    f"rn? {BFLOAT_TYPES}",
    f"{IEEE_ROUNDINGS}? ftz? f32x2",
)
FMA_LINES = (
    f"{IEEE_ROUNDINGS} ftz? sat? f32", f"{IEEE_ROUNDINGS} f64", f"{IEEE_ROUNDINGS} ftz? f32x2",
    f"rn ftz? sat? {HALF_TYPES}", f"rn ftz? relu {HALF_TYPES}", f"rn relu? {BFLOAT_TYPES}", f"rn oob relu? {HALF_TYPES}|{BFLOAT_TYPES}",
)  # fmt: skip
MIXED_SUM_LINE = f"{IEEE_ROUNDINGS}? sat? f32 f16|bf16"
QUOTIENT_LINES = (f"{IEEE_ROUNDINGS} ftz? f32", f"{IEEE_ROUNDINGS} f64")
SIGN_LINES = ("ftz? f32", "f64", f"ftz? {HALF_TYPES}", BFLOAT_TYPES)
EXTREMUM_LINES = (
    "ftz? NaN? abs? f32", "ftz? NaN? xorsign abs f32", "f64", f"ftz? NaN? {HALF_TYPES}", f"ftz? NaN? xorsign abs {HALF_TYPES}",
    f"NaN? {BFLOAT_TYPES}", f"NaN? xorsign abs {BFLOAT_TYPES}",
)  # fmt: skip
NUMBER_TYPES = "u8|u16|u32|u64|s8|s16|s32|s64|bf16|f16|f32|f64"
FP8_PAIR_TYPES = "e4m3x2|e5m2x2"
QUAD_TYPES = "e4m3x4|e5m2x4|e2m1x4|e2m3x4|e3m2x4"
FP6_FP4_PAIR_TYPES = "e2m1x2|e2m3x2|e3m2x2"
NARROW_CONVERSION_LINES = (
    f"rn satfinite relu? {FP8_PAIR_TYPES} f32|f16x2",
    f"rn satfinite relu? {FP6_FP4_PAIR_TYPES} f32",
    "rn satfinite relu? e2m1x2 f16x2",
)

FLOAT_ROWS: dict[str, Row] = {
    "add": row(SUM_LINES, floats.add),
    "sub": row(SUM_LINES, floats.subtract),
    "mul": row(SUM_LINES, floats.multiply),
    "fma": row(FMA_LINES, floats.multiply_add),
    "mad": row((f"{IEEE_ROUNDINGS} ftz? sat? f32", f"{IEEE_ROUNDINGS} f64"), floats.multiply_add),
    "add.mixed": row(MIXED_SUM_LINE, floats.mixed_add),
    "sub.mixed": row(MIXED_SUM_LINE, floats.mixed_subtract),
    "fma.mixed": row(f"{IEEE_ROUNDINGS} sat? f32 f16|bf16", floats.mixed_multiply_add),
    "div": row(QUOTIENT_LINES, floats.divide),
    "div.full": row("full ftz? f32", float_approximations.division("div.full")),
    "div.approx": row("approx ftz? f32", float_approximations.division("div.approx")),
    "rcp": row(QUOTIENT_LINES, floats.reciprocal),
    "rcp.approx": row("approx ftz? f32", float_approximations.unit_function("rcp")),
    "rcp.upper": row("approx ftz f64", float_approximations.reciprocal_seed),
    "sqrt": row(QUOTIENT_LINES, floats.square_root),
    "sqrt.approx": row("approx ftz? f32", float_approximations.unit_function("sqrt")),
    "rsqrt": row(("approx ftz? f32", "approx f64"), float_approximations.reciprocal_square_root),
    "rsqrt.upper": row("approx ftz f64", float_approximations.root_seed),
    "sin": row("approx ftz? f32", float_approximations.unit_function("sin")),
    "cos": row("approx ftz? f32", float_approximations.unit_function("cos")),
    "lg2": row("approx ftz? f32", float_approximations.unit_function("lg2")),
    "ex2": row(("approx ftz? f32", f"approx {HALF_TYPES}", f"approx ftz {BFLOAT_TYPES}"), float_approximations.exponential),
    "tanh": row(f"approx f32|{HALF_TYPES}|{BFLOAT_TYPES}", float_approximations.hyperbolic_tangent),
    "abs": row(SIGN_LINES, floats.absolute),
    "neg": row(SIGN_LINES, floats.negate),
    "min": shaped_row(EXTREMUM_LINES, partial(floats.extremum, minimum=True)),
    "max": shaped_row(EXTREMUM_LINES, partial(floats.extremum, minimum=False)),
    # 9.7.9.21, 9.7.9.22
    "cvt": row(f"rni|rzi|rmi|rpi|{IEEE_ROUNDINGS}? ftz? sat? {NUMBER_TYPES} {NUMBER_TYPES}", conversions.convert_scalar),
    "cvt.finite": row("rn|rz relu? satfinite? f16|bf16 f32", conversions.convert_scalar),
    "cvt.pair": row("rn|rz relu? satfinite? f16x2|bf16x2 f32", conversions.to_half_pair),
    "cvt.tf32": row(("rna satfinite? tf32 f32", "rn|rz satfinite? relu? tf32 f32"), conversions.to_tf32),
    "cvt.narrow": row(NARROW_CONVERSION_LINES, conversions.to_narrow),
    "cvt.scale": row("rz|rp satfinite? ue8m0x2 f32|bf16x2", conversions.to_scale),
    "cvt.stochastic": row(("rs relu? satfinite? f16x2|bf16x2 f32", f"rs relu? satfinite {QUAD_TYPES} f32"), conversions.refuse_stochastic),
    "cvt.wide": row((f"rn relu? f16x2 {FP8_PAIR_TYPES}|{FP6_FP4_PAIR_TYPES}", "rn bf16x2 ue8m0x2"), conversions.from_narrow),
    "cvt.pack": row(("pack sat u16|s16 s32", "pack sat u8|s8|u4|s4|u2|s2 s32 b32"), conversions.pack_integers),
}

TABLES = (INTEGER_ROWS, FLOAT_ROWS)
INSTRUCTION_NAMES = sorted({name.partition(".")[0] for table in TABLES for name in table})


def _build_prepare(name: str) -> Prepare:
    """Return the `Prepare` of a name from all its rows, in order."""
    return prepare_from_rows(*(row for table in TABLES for key, row in table.items() if key.partition(".")[0] == name))


PREPARE: dict[str, Prepare] = {name: _build_prepare(name) for name in INSTRUCTION_NAMES}
