"""The rows of integers, logic, comparisons and moves: syntax (PTX ISA 9.1) and what makes the `Operation`."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp

from tcemu.ptx.scalar import bit_fields, comparisons, integers, moves
from tcemu.ptx.scalar.bit_fields import bitwise
from tcemu.ptx.scalar.integers import ALL, WORDS, of_numbers
from tcemu.ptx.scalar.syntax import Row, row, shaped

BITS = "b16|b32|b64"
LOGIC = "pred|" + BITS
ANY = f"{BITS}|{ALL}|f32|f64"
NARROW = "u16|u32|s16|s32"
COMPARED = f"{BITS}|{ALL}"
RELATION = "eq|ne|lt|le|gt|ge|lo|ls|hi|hs"
RELATION_OF_FLOATS = "|".join(comparisons.OF_FLOATS)
FLUSHED = "f16|f16x2|f32"
FLOATS = "bf16|bf16x2|f64"
BOOLEAN = "and|or|xor?"
SETP = (
    f"{RELATION} {BOOLEAN} {COMPARED}",
    f"{RELATION_OF_FLOATS} {BOOLEAN} ftz? {FLUSHED}",
    f"{RELATION_OF_FLOATS} {BOOLEAN} {FLOATS}",
)
SET = (
    f"{RELATION} {BOOLEAN} u32|s32|f32|f16|bf16 {COMPARED}",
    f"{RELATION_OF_FLOATS} {BOOLEAN} ftz? u32|s32|f32|f16 f32",
    f"{RELATION_OF_FLOATS} {BOOLEAN} u32|s32|f32|f16|bf16 f64",
    f"{RELATION_OF_FLOATS} {BOOLEAN} bf16 f32|f16",
    f"{RELATION_OF_FLOATS} {BOOLEAN} ftz? u16|s16|u32|s32|f16 f16",
    f"{RELATION_OF_FLOATS} {BOOLEAN} u16|s16|u32|s32|bf16 bf16",
    f"{RELATION_OF_FLOATS} {BOOLEAN} ftz? f16x2|u32|s32 f16x2",
    f"{RELATION_OF_FLOATS} {BOOLEAN} bf16x2|u32|s32 bf16x2",
)

INTEGER_ROWS: dict[str, Row] = {
    # 9.7.1
    "add": row((f"{ALL}|u16x2|s16x2", "sat s32"), integers.add),
    "sub": row((ALL, "sat s32"), partial(integers.add, sign=-1)),
    "mul": row((f"lo|hi {ALL}", f"wide {NARROW}"), integers.multiply),
    "mad": row((f"lo|hi {ALL}", f"wide {NARROW}", "hi sat s32"), integers.multiply_add),
    "mul24": row("lo|hi u32|s32", integers.multiply_24),
    "mad24": row(("lo|hi u32|s32", "hi sat s32"), partial(integers.multiply_24, add=True)),
    "sad": row(ALL, of_numbers(integers.sad, 3)),
    "div": row(ALL, of_numbers(integers.divide, 2)),
    "rem": row(ALL, of_numbers(integers.remainder, 2)),
    "abs": row("s16|s32|s64", of_numbers(integers.absolute, 1)),
    "neg": row("s16|s32|s64", of_numbers(jnp.negative, 1)),
    "min": row((f"{ALL}|u16x2|s16x2", "relu s16x2|s32"), partial(integers.extremum, pick=jnp.minimum)),
    "max": row((f"{ALL}|u16x2|s16x2", "relu s16x2|s32"), partial(integers.extremum, pick=jnp.maximum)),
    "popc": row("b32|b64", bit_fields.population),
    "clz": row("b32|b64", bit_fields.leading_zeros),
    "bfind": row(f"shiftamt? {WORDS}", bit_fields.find_leading),
    "fns": row("b32", lambda _: bit_fields.FIND_NTH),
    "brev": row("b32|b64", bit_fields.reverse_bits),
    "bfe": row(WORDS, bit_fields.extract),
    "bfi": row("b32|b64", bit_fields.insert),
    "szext": row("clamp|wrap u32|s32", bit_fields.extend),
    "bmsk": row("clamp|wrap b32", bit_fields.mask),
    "dp4a": row("u32|s32 u32|s32", integers.dp4a),
    "dp2a": row("lo|hi u32|s32 u32|s32", integers.dp2a),
    # 9.7.2
    "addc": row(f"cc? {WORDS}", partial(integers.add_carry, takes=True)),
    "subc": row(f"cc? {WORDS}", partial(integers.add_carry, takes=True, subtract=True)),
    "madc": row(f"lo|hi cc? {WORDS}", partial(integers.multiply_add_carry, takes=True)),
    "add.cc": row(f"cc {WORDS}", partial(integers.add_carry, takes=False)),
    "sub.cc": row(f"cc {WORDS}", partial(integers.add_carry, takes=False, subtract=True)),
    "mad.cc": row(f"lo|hi cc {WORDS}", partial(integers.multiply_add_carry, takes=False)),
    # 9.7.6 to 9.7.8
    "setp": shaped(SETP, comparisons.set_predicate),
    "set": row(SET, comparisons.set_value),
    "selp": row(ANY, moves.select),
    "slct": row((f"{ANY} s32", f"ftz? {ANY} f32"), moves.select_by_sign),
    "and": row(LOGIC, bitwise(lambda a, b: a & b, 2)),
    "or": row(LOGIC, bitwise(lambda a, b: a | b, 2)),
    "xor": row(LOGIC, bitwise(lambda a, b: a ^ b, 2)),
    "not": row(LOGIC, bit_fields.complement),
    "cnot": row(BITS, bitwise(lambda a: a == 0, 1)),
    "lop3": shaped(("b32", "or|and b32"), bit_fields.lop3),
    "shf": row("l|r clamp|wrap b32", bit_fields.funnel),
    "shl": row(BITS, bit_fields.shift_left),
    "shr": row(f"{BITS}|{ALL}", bit_fields.shift_right),
    # 9.7.9, 9.7.3.1, 9.7.3.2
    "mov": shaped(f"pred|{ANY}|f16|bf16|f16x2|bf16x2", moves.move),
    "prmt": row(f"b32 {'|'.join(bit_fields.MODES)}?", bit_fields.permute),
    "testp": row(f"{'|'.join(comparisons.TESTS)} f32|f64", comparisons.test_property),
    "copysign": row("f32|f64", comparisons.copy_sign),
}
