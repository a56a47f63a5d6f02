"""Constants and constant expressions, evaluated in 64 bits (PTX ISA 4.5)."""

from __future__ import annotations

import math
import operator
import re
import struct
from collections.abc import Callable
from typing import NamedTuple

from tcemu.kernels.ptx.text.lexer import DIRECTIVE, NAME, NUMBER, Token, Tokens
from tcemu.kernels.ptx.text.module import Float, Integer

MAX_NESTING = 64  # nesting of brackets
WARP_SIZE = 32
_MASK = (1 << 64) - 1
_LEVELS = (  # weakest first, each from left to right
    ("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", ">", "<=", ">="), ("<<", ">>"), ("+", "-"), ("*", "/", "%"),
)  # fmt: skip
STRENGTH = {mark: level for level, marks in enumerate(_LEVELS) for mark in marks}
_COMPARE: dict[str, Callable[..., bool]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge,
}  # fmt: skip
_BITS: dict[str, Callable[[int, int], int]] = {"&": operator.and_, "|": operator.or_, "^": operator.xor}
_SUMS: dict[str, Callable[..., int | float]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_INTEGER = re.compile(r"(?:0[xX](?P<hex>[0-9a-fA-F]+)|0[bB](?P<binary>[01]+)|0(?P<octal>[0-7]+)|(?P<decimal>0|[1-9]\d*))(?P<u>U?)")
_BASES = {"hex": 16, "binary": 2, "octal": 8, "decimal": 10}


class Number(NamedTuple):
    """A value within an expression."""

    value: int | float
    kind: str  # "s64", "u64", "f64", or "f32" for 0f..., which is no operand of an operator


def parse_literal(tokens: Tokens, token: Token) -> Number:
    """Return the value of a number."""
    text = token.text
    if found := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", text):
        return Number(int(found[1], 16), "f32")
    if found := re.fullmatch(r"0[dD]([0-9a-fA-F]{16})", text):
        return Number(struct.unpack("<d", int(found[1], 16).to_bytes(8, "little"))[0], "f64")
    if found := _INTEGER.fullmatch(text):
        base = next(name for name in _BASES if found[name] is not None)
        value = int(found[base], _BASES[base]) if len(found[base].lstrip("0")) <= 64 else _MASK + 1
        if value > _MASK:
            raise tokens.error(f"{text} does not fit 64 bits, which is what integer constants have", token)
        return Number(value, "u64" if found["u"] or value >> 63 else "s64")
    if re.fullmatch(r"(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?", text):
        return Number(float(text), "f64")
    forms = "12, 0x1F, 017, 0b101, each with or without U, 1.5, 1.5e3, 0f and 8 hexadecimal digits, 0d and 16"
    raise tokens.error(f"{text} is not a PTX number; numbers are written {forms}", token)


def starts_constant(token: Token) -> bool:
    """Return True if a constant can begin with this token."""
    return token.kind in (NUMBER, "-", "+", "~", "(") or (token.kind == NAME and token.text == "WARP_SZ")


def parse_constant(tokens: Tokens) -> Integer | Float:
    """Parse a constant expression as an operand."""
    number = parse_expression(tokens)
    if number.kind == "f32":
        return Float(int(number.value), 32)
    if number.kind == "f64":
        return Float(int.from_bytes(struct.pack("<d", number.value), "little"), 64)
    return Integer(int(number.value))


def parse_integer(tokens: Tokens, expected: str = "an integer") -> int:
    """Parse a constant expression whose value is an integer. expected: the error's words for it."""
    token = tokens.token
    if not starts_constant(token):
        raise tokens.unexpected(expected)
    number = parse_expression(tokens)
    if number.kind not in ("s64", "u64"):
        raise tokens.error(f"expected {expected}, found a floating-point number", token)
    return int(number.value)


def parse_expression(tokens: Tokens, weakest: int = 0, depth: int = 0) -> Number:
    """Parse an expression whose operators bind at least as strongly as `weakest`; `a ? b : c` binds most weakly."""
    left = _parse_unary(tokens, depth)
    while (strength := STRENGTH.get(tokens.token.kind, -1)) >= weakest:
        mark = tokens.take()
        left = _apply_binary(tokens, mark, left, parse_expression(tokens, strength + 1, depth + 1))
    if weakest == 0 and tokens.token.kind == "?":
        mark = tokens.take()
        first = parse_expression(tokens, 0, _next_depth(tokens, depth))
        tokens.expect(":")
        second = parse_expression(tokens, 0, _next_depth(tokens, depth))
        if left.kind not in ("s64", "u64") or (first.kind == "f64") != (second.kind == "f64") or "f32" in (first.kind, second.kind):
            raise tokens.error("a condition is an integer, and both of its values are integers or both are of 64-bit floating point", mark)
        return first if left.value else second
    return left


def _next_depth(tokens: Tokens, depth: int) -> int:
    if depth >= MAX_NESTING:
        raise tokens.error(f"an expression is nested deeper than {MAX_NESTING}")
    return depth + 1


def _parse_unary(tokens: Tokens, depth: int) -> Number:
    """Parse a number, an expression in brackets, or either with signs or casts before it."""
    token = tokens.take()
    if token.kind == NUMBER:
        return parse_literal(tokens, token)
    if token.kind == NAME and token.text == "WARP_SZ":
        return Number(WARP_SIZE, "s64")
    next_depth = _next_depth(tokens, depth)
    if token.kind == "(":
        if cast := tokens.accept(DIRECTIVE):
            tokens.expect(")")
            return _apply_cast(tokens, cast, _parse_unary(tokens, next_depth))
        inner = parse_expression(tokens, 0, next_depth)
        tokens.expect(")")
        return inner
    if token.kind not in ("+", "-", "!", "~"):
        raise tokens.unexpected("a constant", token)
    value, kind = _parse_unary(tokens, next_depth)
    if kind == "f32" or (kind == "f64" and token.kind in "!~"):
        raise tokens.error(f"'{token.kind}' does not take {'a number written 0f...' if kind == 'f32' else 'floating point'}", token)
    if token.kind == "!":
        return Number(int(not value), "s64")
    changed = ~int(value) if token.kind == "~" else -value if token.kind == "-" else value
    return _wrap_integer(changed, kind)


def _wrap_integer(value: int | float, kind: str) -> Number:
    if kind == "f64":
        return Number(float(value), kind)
    value = int(value) & _MASK
    return Number(value - (1 << 64) if kind == "s64" and value >> 63 else value, kind)


def _apply_cast(tokens: Tokens, cast: Token, number: Number) -> Number:
    """Evaluate `(.s64)x`, `(.u64)x` or `(.f64)x`."""
    kind = cast.text[1:]
    if kind not in ("s64", "u64", "f64") or number.kind == "f32":
        raise tokens.error("a cast is (.s64), (.u64) or (.f64), of a 64-bit number", cast)
    if kind != "f64" and number.kind == "f64" and not math.isfinite(number.value):
        raise tokens.error("infinity and NaN cannot become integers", cast)
    return _wrap_integer(number.value, kind)


def _apply_binary(tokens: Tokens, mark: Token, left: Number, right: Number) -> Number:
    kinds, sign = {left.kind, right.kind}, mark.kind
    floating = "f64" in kinds
    if "f32" in kinds or (floating and len(kinds) > 1) or (floating and sign not in (*_COMPARE, *_SUMS, "/")):
        raise tokens.error(f"'{sign}' takes two integers, or where it can two 64-bit floating-point numbers", mark)
    if sign in _COMPARE:
        return Number(int(_COMPARE[sign](left.value, right.value)), "s64")
    if sign in ("&&", "||"):
        both, either = bool(left.value) and bool(right.value), bool(left.value) or bool(right.value)
        return Number(int(both if sign == "&&" else either), "s64")
    kind = "f64" if floating else "u64" if "u64" in kinds else "s64"
    if sign in _SUMS:
        return _wrap_integer(_SUMS[sign](left.value, right.value), kind)
    if sign in _BITS:
        return _wrap_integer(_BITS[sign](int(left.value), int(right.value)), kind)
    if sign in ("<<", ">>"):
        if not 0 <= right.value < 64:
            raise tokens.error(f"a shift of 64 bits by {right.value}", mark)
        shifted = int(left.value) << int(right.value) if sign == "<<" else int(left.value) >> int(right.value)
        return _wrap_integer(shifted, left.kind)
    if right.value == 0:
        raise tokens.error("a division by zero", mark)
    return _divide(sign, left, right, kind)


def _divide(sign: str, left: Number, right: Number, kind: str) -> Number:
    """Return a quotient, truncated if it is of integers, or the remainder, which has the sign of the dividend."""
    if kind == "f64":
        return Number(left.value / right.value, kind)
    dividend, divisor = (int(_wrap_integer(number.value, kind).value) for number in (left, right))
    quotient = abs(dividend) // abs(divisor) * (1 if (dividend < 0) == (divisor < 0) else -1)
    return _wrap_integer(quotient if sign == "/" else dividend - quotient * divisor, kind)
