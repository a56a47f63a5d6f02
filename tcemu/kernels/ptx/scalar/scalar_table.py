"""The table of scalar instructions: the function that builds the `Operation` of each, by its key in `tcemu.engine.isa.statement_table`."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp

from tcemu.kernels.ptx.instruction_interface import Prepare
from tcemu.kernels.ptx.scalar import bit_operations as bits
from tcemu.kernels.ptx.scalar import compare_and_select, float_approximations
from tcemu.kernels.ptx.scalar import float_arithmetic as floats
from tcemu.kernels.ptx.scalar import integer_arithmetic as integers
from tcemu.kernels.ptx.scalar import number_conversions as conversions
from tcemu.kernels.ptx.scalar.bit_operations import bitwise_operation
from tcemu.kernels.ptx.scalar.integer_arithmetic import integer_operation
from tcemu.kernels.ptx.scalar.opcode_syntax import Row, prepare_from_rows, row, shaped_row

INTEGER_ROWS: dict[str, Row] = {
    # 9.7.1
    "add": row(integers.add),
    "sub": row(partial(integers.add, sign=-1)),
    "mul": row(integers.multiply),
    "mad": row(integers.multiply_add),
    "mul24": row(integers.multiply_24),
    "mad24": row(partial(integers.multiply_24, add=True)),
    "sad": row(integer_operation(integers.sad, 3)),
    "div": row(integer_operation(integers.divide, 2)),
    "rem": row(integer_operation(integers.remainder, 2)),
    "abs": row(integer_operation(integers.absolute, 1)),
    "neg": row(integer_operation(jnp.negative, 1)),
    "min": row(partial(integers.extremum, choose=jnp.minimum)),
    "max": row(partial(integers.extremum, choose=jnp.maximum)),
    "popc": row(bits.population_count),
    "clz": row(bits.leading_zeros),
    "bfind": row(bits.find_leading_one),
    "fns": row(lambda _: bits.FIND_NTH),
    "brev": row(bits.reverse_bits),
    "bfe": row(bits.extract_field),
    "bfi": row(bits.insert_field),
    "szext": row(bits.extend_field),
    "bmsk": row(bits.make_mask),
    "dp4a": row(integers.dp4a),
    "dp2a": row(integers.dp2a),
    # 9.7.2
    "addc": row(partial(integers.add_carry, carry_in=True)),
    "subc": row(partial(integers.add_carry, carry_in=True, subtract=True)),
    "madc": row(partial(integers.multiply_add_carry, carry_in=True)),
    "add.cc": row(partial(integers.add_carry, carry_in=False)),
    "sub.cc": row(partial(integers.add_carry, carry_in=False, subtract=True)),
    "mad.cc": row(partial(integers.multiply_add_carry, carry_in=False)),
    # 9.7.6 to 9.7.8
    "setp": shaped_row(compare_and_select.set_predicate, "pair"),
    "set": row(compare_and_select.set_value),
    "selp": row(compare_and_select.select),
    "slct": row(compare_and_select.select_by_sign),
    "and": row(bitwise_operation(lambda a, b: a & b, 2)),
    "or": row(bitwise_operation(lambda a, b: a | b, 2)),
    "xor": row(bitwise_operation(lambda a, b: a ^ b, 2)),
    "not": row(bits.complement),
    "cnot": row(bitwise_operation(lambda a: a == 0, 1)),
    "lop3": shaped_row(bits.lop3, "pair"),
    "shf": row(bits.funnel_shift),
    "shl": row(bits.shift_left),
    "shr": row(bits.shift_right),
    # 9.7.9, 9.7.3.1, 9.7.3.2
    "mov": shaped_row(bits.move, "vector"),
    "prmt": row(bits.permute_bytes),
    "testp": row(compare_and_select.test_property),
    "copysign": row(compare_and_select.copy_sign),
}

FLOAT_ROWS: dict[str, Row] = {
    "add.float": row(floats.add),
    "sub.float": row(floats.subtract),
    "mul.float": row(floats.multiply),
    "fma": row(floats.multiply_add),
    "mad.float": row(floats.multiply_add),
    "add.mixed": row(floats.mixed_add),
    "sub.mixed": row(floats.mixed_subtract),
    "fma.mixed": row(floats.mixed_multiply_add),
    "div.float": row(floats.divide),
    "div.full": row(float_approximations.division("div.full")),
    "div.approx": row(float_approximations.division("div.approx")),
    "rcp": row(floats.reciprocal),
    "rcp.approx": row(float_approximations.unit_function("rcp")),
    "rcp.upper": row(float_approximations.reciprocal_seed),
    "sqrt": row(floats.square_root),
    "sqrt.approx": row(float_approximations.unit_function("sqrt")),
    "rsqrt": row(float_approximations.reciprocal_square_root),
    "rsqrt.upper": row(float_approximations.root_seed),
    "sin": row(float_approximations.unit_function("sin")),
    "cos": row(float_approximations.unit_function("cos")),
    "lg2": row(float_approximations.unit_function("lg2")),
    "ex2": row(float_approximations.exponential),
    "tanh": row(float_approximations.hyperbolic_tangent),
    "abs.float": row(floats.absolute),
    "neg.float": row(floats.negate),
    "min.float": shaped_row(partial(floats.extremum, minimum=True), "", (3,)),
    "max.float": shaped_row(partial(floats.extremum, minimum=False), "", (3,)),
    "min.three": shaped_row(partial(floats.extremum, minimum=True), "", (4,)),
    "max.three": shaped_row(partial(floats.extremum, minimum=False), "", (4,)),
    # 9.7.9.21, 9.7.9.22
    "cvt": row(conversions.convert_scalar),
    "cvt.finite": row(conversions.convert_scalar),
    "cvt.pair": row(conversions.to_half_pair),
    "cvt.tf32": row(conversions.to_tf32),
    "cvt.narrow": row(conversions.to_narrow),
    "cvt.scale": row(conversions.to_scale),
    "cvt.stochastic": shaped_row(lambda qualifiers, _: conversions.refuse_stochastic(qualifiers), "vector"),
    "cvt.fixed": row(conversions.refuse_fixed_point),
    "cvt.wide": row(conversions.from_narrow),
    "cvt.pack": row(conversions.pack_integers),
}

ROWS = INTEGER_ROWS | FLOAT_ROWS
PREPARE: dict[str, Prepare] = {
    name: prepare_from_rows({key: row for key, row in ROWS.items() if key.partition(".")[0] == name})
    for name in sorted({key.partition(".")[0] for key in ROWS})
}
