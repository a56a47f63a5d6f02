"""Video instructions: bytes, half-words and words of registers, added, compared, shifted and multiplied (PTX ISA 9.7.18).

The packed ones compute what the manual's text says. The scalar ones compute what the machine code does that ptxas 12.9 and 13.0 make of
them, which has no instruction of its own for them and departs from the text: a saturated byte or half-word is the upper limit for every
negative value, `.sat` to u32 has no upper limit but in vshl and vmad, a merge into h1 takes the upper half of the value, the second
operations min and max compare 64 bits, and vmad multiplies and adds signed words whatever the types are. On an H200 0 of 1,174,016 words of
2,293 statements differ (tests/gpu_runs/video_and_carry.py), on which the rules were fitted, and 0 of 1,986,560 words of 3,880 other
statements (tests/gpu_runs/video_held_out.py).
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from tcemu.base.errors import Unsupported
from tcemu.engine.isa.statement_table import StatementForm, describe_forms, find_forms
from tcemu.kernels.ptx.instruction_interface import Context, Operation, Prepare
from tcemu.kernels.ptx.text.module import Part, Statement

SECTION = "PTX ISA 9.7.18"
SCALAR = ("vadd", "vsub", "vabsdiff", "vmin", "vmax", "vshl", "vshr", "vmad", "vset")
PACKED = tuple(f"{name}{count}" for count in (2, 4) for name in ("vadd", "vsub", "vavrg", "vabsdiff", "vmin", "vmax", "vset"))
SECOND = ("add", "min", "max")  # second operations
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
LETTERS = {2: "h", 4: "b"}  # of the elements of packed instructions, by their number


class Selectors(NamedTuple):
    """The parts of the operands d, a, b and c: their selectors, "" for a whole operand, and the negated ones."""

    d: str = ""
    a: str = ""
    b: str = ""
    negated: tuple[bool, bool, bool] = (False, False, False)  # a, b and c


def plain_statement(statement: Statement) -> Statement:
    """Return a statement with whole registers as operands; the opcode tells it from others, since it has their parts."""
    if not any(isinstance(operand, Part) for operand in statement.operands):
        return statement
    parts = [f"{'-' * each.negated}{each.selector}" if isinstance(each, Part) else "" for each in statement.operands]
    operands = tuple(operand.register if isinstance(operand, Part) else operand for operand in statement.operands)
    return replace(statement, opcode=f"{statement.opcode} {','.join(parts)}", operands=operands)


def prepare_video(statement: Statement, context: Context) -> Operation:
    """Prepare a video instruction. Raises Unsupported for a selector that its operand cannot have."""
    form = next(iter(find_forms(statement.opcode)), None)
    if form is None:
        raise Unsupported(describe_forms(statement.opcode))
    packed = statement.name in PACKED
    count = int(statement.name[-1]) if packed else 1
    selectors = _read_selectors(statement, count)
    least = 4 if packed or statement.name == "vmad" or selectors.d or _second(form) else 3
    if len(statement.operands) not in ({least} if least == 4 or packed else {3, 4}):
        raise Unsupported(f"it has {len(statement.operands)} operands; expected {least}. {SECTION}")
    if selectors.d and _second(form) and not packed:
        raise Unsupported(f"a selector of the destination and a second operation exclude each other. {SECTION}")
    if any(selectors.negated) and "po" in form.qualifiers:
        raise Unsupported(f".po and negated operands exclude each other. {SECTION}")
    if selectors.negated[0] != selectors.negated[1] and selectors.negated[2]:
        raise Unsupported(f"the negated operand is either one of a and b, or c. {SECTION}")
    build = _packed_operation if packed else _scalar_operation
    return build(statement.name, form.qualifiers, selectors, len(statement.operands))


def _second(form: StatementForm) -> str:
    return next((part for part in form.qualifiers if part in SECOND), "")


def _read_selectors(statement: Statement, count: int) -> Selectors:
    operands = [*statement.operands, *[None] * 4][:4]
    letter = LETTERS.get(count, "")
    packed_source = rf"{letter}[0-{2 * count - 1}]{{{count}}}"
    mask = "|".join(letter + "".join(str(i) for i in reversed(range(count)) if bits >> i & 1) for bits in range(1, 1 << count))
    allowed = (mask, packed_source, packed_source, "") if letter else ("b[0-3]|h[01]",) * 3 + ("",)
    found = []
    for position, (operand, pattern) in enumerate(zip(operands, allowed, strict=True), 1):
        selector = operand.selector if isinstance(operand, Part) else ""
        if selector and not re.fullmatch(pattern or "(?!)", selector):
            raise Unsupported(f"operand {position} is {operand}; its selector is none of {statement.name}'s. {SECTION}")
        found.append(selector)
    negated = tuple(isinstance(operand, Part) and operand.negated for operand in operands)
    if any(negated) and (statement.name != "vmad" or negated[0]):
        raise Unsupported(f"only the operands a, b and c of vmad can be negated. {SECTION}")
    return Selectors(*found[:3], negated=negated[1:])  # type: ignore[arg-type]


# ---- bytes, half-words and words


def _extract(word: Array, offset: int, bits: int, kind: str) -> Array:
    """Return a field of a word as int64, extended by its sign if the type is signed."""
    field = (word.astype(jnp.int64) >> offset) & ((1 << bits) - 1)
    return jnp.where(field >> bits - 1 == 1, field - (1 << bits), field) if kind[0] == "s" else field


def _field(selector: str) -> tuple[int, int]:
    """Return the first bit and the bits of the field that a selector of a scalar instruction names."""
    bits = {"": 32, "b": 8, "h": 16}[selector[:1]]
    return int(selector[1:] or 0) * bits, bits


def _clamp(value: Array, bits: int, kind: str) -> Array:
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)
    return jnp.clip(value, low, high)


def _extend(value: Array, bits: int) -> Array:
    """Return the lowest bits of an int64 value, extended by their sign."""
    return (value << 64 - bits) >> 64 - bits


def _low_word(value: Array) -> Array:
    return value.astype(jnp.uint64).astype(jnp.uint32)


def _compare(comparison: str, a: Array, b: Array) -> Array:
    return {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}[comparison].astype(jnp.int64)


def _combine(name: str, a: Array, b: Array) -> Array:
    if name == "vavrg":
        return (a + b + (a + b >= 0).astype(jnp.int64)) >> 1
    return {"vadd": a + b, "vsub": a - b, "vabsdiff": jnp.abs(a - b), "vmin": jnp.minimum(a, b), "vmax": jnp.maximum(a, b)}[name]


# ---- scalar instructions


WORD = (1 << 32) - 1
SHIFTS = ("vshl", "vshr")
SHIFT_BITS = 34  # of the sum of vshl that is saturated
BOUNDED = ("vshl", "vmad")  # .sat to u32 has an upper limit


@cache
def _scalar_operation(name: str, qualifiers: tuple[str, ...], selectors: Selectors, operands: int) -> Operation:
    kinds = [part for part in qualifiers if part in ("u32", "s32")]
    kind, a_kind, b_kind = kinds if len(kinds) == 3 else ("u32", *kinds)
    saturates, second = "sat" in qualifiers, next((part for part in qualifiers if part in SECOND), "")
    offset, bits = _field(selectors.d)

    def compute(a: Array, b: Array, c: Array | None = None) -> tuple[Array]:
        x, y = _extract(a, *_field(selectors.a), a_kind), _extract(b, *_field(selectors.b), b_kind)
        if name == "vmad":
            assert c is not None
            return (_multiply_add(x, y, c, qualifiers, selectors.negated, "s" in a_kind + b_kind),)
        if name == "vset":
            value = _compare(next(part for part in qualifiers if part in COMPARISONS), x, y)
        elif name in SHIFTS:
            value = _shift(name, x, y, "clamp" in qualifiers)
        else:
            value = _combine(name, x, y)
        compared = value  # by a second operation
        if saturates:
            value = _saturate(name, _extend(value, SHIFT_BITS) if name == "vshl" else value, kind, bits)
            compared = value if kind == "u32" and name != "vshl" else _extend(value, 32)
        if c is None or (not selectors.d and not second):
            return (_low_word(value),)
        if selectors.d:
            mask = np.uint32((1 << bits) - 1 << offset)
            moved = value if selectors.d == "h1" else value << offset
            return (_low_word(moved) & mask | c & ~mask,)
        return (_second_operation(second, value, compared if name not in ("vadd", "vsub") else _extend(compared, 32), c, third_kind),)

    third_kind = a_kind if name == "vset" else kind
    return Operation((kind,), (a_kind, b_kind, kind)[: operands - 1], compute)


def _shift(name: str, x: Array, count: Array, clamps: bool) -> Array:
    """Return x << count, the lowest 64 bits, or x >> count."""
    count = jnp.minimum(count, 32) if clamps else count & 31
    return x >> count if name == "vshr" else (x.astype(jnp.uint64) << count.astype(jnp.uint64)).astype(jnp.int64)


def _saturate(name: str, value: Array, kind: str, bits: int) -> Array:
    """Saturate a value. Shifts saturate to words, also where a byte or half-word is merged."""
    if bits < 32 and name not in SHIFTS:
        limit = (1 << bits - (kind == "s32")) - 1
        return jnp.where(value >> 32 != 0, limit, jnp.minimum(value & WORD, limit))
    if kind == "s32" or name in BOUNDED:
        return _clamp(value, 32, kind)
    return jnp.where(value < 0, 0, value & WORD)


def _second_operation(second: str, value: Array, compared: Array, c: Array, kind: str) -> Array:
    """Return the sum of a value and c, or the lesser or greater one of c and what is compared, as 64 bits of the type."""
    if second == "add":
        return _low_word(value + _extract(c, 0, 32, "u32"))
    third = _extract(c, 0, 32, kind)
    less = compared < third if kind == "s32" else compared.astype(jnp.uint64) < third.astype(jnp.uint64)
    return _low_word(jnp.where(less, compared, third) if second == "min" else jnp.where(less, third, compared))


def _multiply_add(x: Array, y: Array, c: Array, qualifiers: tuple[str, ...], negated: tuple[bool, bool, bool], signed: bool) -> Array:
    """Return the low word of (+-x * y +- c + po) >> shift, clamped with .sat; x, y and c are signed words, the sum has 64 bits."""
    signed = signed or negated[0] != negated[1] or negated[2]
    product, third = _extend(x, 32) * _extend(y, 32), _extract(c, 0, 32, "s32")
    total = (-product if negated[0] != negated[1] else product) + (-third if negated[2] else third) + int("po" in qualifiers)
    shift = {"shr7": 7, "shr15": 15}.get(next((part for part in qualifiers if part.startswith("shr")), ""), 0)
    total = total >> shift if signed else (total.astype(jnp.uint64) >> shift).astype(jnp.int64)
    return _low_word(_saturate("vmad", total, "s32" if signed else "u32", 32) if "sat" in qualifiers else total)


# ---- packed instructions


@cache
def _packed_operation(name: str, qualifiers: tuple[str, ...], selectors: Selectors, operands: int) -> Operation:
    count = int(name[-1])
    bits = 32 // count
    kinds = [part for part in qualifiers if part in ("u32", "s32")]
    kind, a_kind, b_kind = kinds if len(kinds) == 3 else ("u32", *kinds)
    letter, numbers = LETTERS[count], range(count)
    chosen = [
        [int(digit) for digit in reversed((selector or letter + default)[1:])]
        for selector, default in ((selectors.a, "3210"[-count:]), (selectors.b, "7654"[-count:] if count == 4 else "32"))
    ]
    written = {int(digit) for digit in (selectors.d or letter + "3210"[-count:])[1:]}

    def compute(a: Array, b: Array, c: Array) -> tuple[Array]:
        def element(number: int, element_kind: str) -> Array:
            return _extract(a if number < count else b, number % count * bits, bits, element_kind)

        total = _extract(c, 0, 32, kind) if "add" in qualifiers else jnp.zeros(jnp.broadcast_shapes(a.shape, b.shape, c.shape), jnp.int64)
        for number in numbers:
            x, y = element(chosen[0][number], a_kind), element(chosen[1][number], b_kind)
            if name.startswith("vset"):
                value = _compare(next(part for part in qualifiers if part in COMPARISONS), x, y)
            else:
                value = _combine(name[:-1], x, y)
            value = _clamp(value, bits, kind) if "sat" in qualifiers else value
            if "add" in qualifiers:
                total = total + (value if number in written else 0)
            else:
                kept = value if number in written else _extract(c, number * bits, bits, "u32")
                total = total | (kept & (1 << bits) - 1) << number * bits
        return (_low_word(total),)

    return Operation((kind,), (a_kind, b_kind, kind), compute)


PREPARE: dict[str, Prepare] = dict.fromkeys((*SCALAR, *PACKED), prepare_video)
