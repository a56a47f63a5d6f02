"""Constants of PTX, and expressions of them (PTX ISA, section 4.5): computed as the manual says, in 64 bits."""

from __future__ import annotations

import math
import operator
import re
import struct
from collections.abc import Callable
from typing import NamedTuple

from tcemu.ptx.lexer import DIRECTIVE, NAME, NUMBER, Token, Tokens
from tcemu.ptx.module import Float, Integer

LIMIT = 64  # how deep brackets may stand in each other
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
    """A value within an expression. kind: "s64", "u64", "f64", or "f32" for 0f..., which takes part in no operation."""

    value: int | float
    kind: str


def literal(tokens: Tokens, token: Token) -> Number:
    """The number that a token says."""
    text = token.text
    if found := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", text):
        return Number(int(found[1], 16), "f32")
    if found := re.fullmatch(r"0[dD]([0-9a-fA-F]{16})", text):
        return Number(struct.unpack("<d", int(found[1], 16).to_bytes(8, "little"))[0], "f64")
    if found := _INTEGER.fullmatch(text):
        base = next(name for name in _BASES if found[name] is not None)
        value = int(found[base], _BASES[base]) if len(found[base].lstrip("0")) <= 64 else _MASK + 1
        if value > _MASK:
            raise tokens.wrong(f"{text} does not fit 64 bits, which is what integer constants have", token)
        return Number(value, "u64" if found["u"] or value >> 63 else "s64")
    if re.fullmatch(r"(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?", text):
        return Number(float(text), "f64")
    forms = "12, 0x1F, 017, 0b101, each with or without U, 1.5, 1.5e3, 0f and 8 hexadecimal digits, 0d and 16"
    raise tokens.wrong(f"{text} is no number of PTX; numbers are written {forms}", token)


def starts(token: Token) -> bool:
    """Whether a constant can begin with this token."""
    return token.kind in (NUMBER, "-", "+", "~", "(") or (token.kind == NAME and token.text == "WARP_SZ")


def constant(tokens: Tokens) -> Integer | Float:
    """A constant or an expression of constants, read from the tokens."""
    number = expression(tokens)
    if number.kind == "f32":
        return Float(int(number.value), 32)
    if number.kind == "f64":
        return Float(int.from_bytes(struct.pack("<d", number.value), "little"), 64)
    return Integer(int(number.value))


def integer(tokens: Tokens, expected: str = "an integer") -> int:
    """An integer constant or an expression that gives one."""
    token = tokens.token
    if not starts(token):
        raise tokens.unexpected(expected)
    number = expression(tokens)
    if number.kind not in ("s64", "u64"):
        raise tokens.wrong(f"expected {expected}, found a floating-point number", token)
    return int(number.value)


def expression(tokens: Tokens, weakest: int = 0, depth: int = 0) -> Number:
    """An expression whose operators are at least as strong as `weakest`; `a ? b : c` is the weakest of all."""
    left = _unary(tokens, depth)
    while (strength := STRENGTH.get(tokens.token.kind, -1)) >= weakest:
        mark = tokens.take()
        left = _binary(tokens, mark, left, expression(tokens, strength + 1, depth + 1))
    if weakest == 0 and tokens.token.kind == "?":
        mark = tokens.take()
        first = expression(tokens, 0, _deeper(tokens, depth))
        tokens.expect(":")
        second = expression(tokens, 0, _deeper(tokens, depth))
        if left.kind not in ("s64", "u64") or (first.kind == "f64") != (second.kind == "f64") or "f32" in (first.kind, second.kind):
            raise tokens.wrong("a condition is an integer, and both of its values are integers or both are of 64-bit floating point", mark)
        return first if left.value else second
    return left


def _deeper(tokens: Tokens, depth: int) -> int:
    if depth >= LIMIT:
        raise tokens.wrong(f"an expression is nested deeper than {LIMIT}")
    return depth + 1


def _unary(tokens: Tokens, depth: int) -> Number:
    """A number, one in brackets, or one with signs or casts before it."""
    token = tokens.take()
    if token.kind == NUMBER:
        return literal(tokens, token)
    if token.kind == NAME and token.text == "WARP_SZ":
        return Number(WARP_SIZE, "s64")
    deeper = _deeper(tokens, depth)
    if token.kind == "(":
        if cast := tokens.accept(DIRECTIVE):
            tokens.expect(")")
            return _cast(tokens, cast, _unary(tokens, deeper))
        inner = expression(tokens, 0, deeper)
        tokens.expect(")")
        return inner
    if token.kind not in ("+", "-", "!", "~"):
        raise tokens.unexpected("a constant", token)
    value, kind = _unary(tokens, deeper)
    if kind == "f32" or (kind == "f64" and token.kind in "!~"):
        raise tokens.wrong(f"'{token.kind}' does not take {'a number written 0f...' if kind == 'f32' else 'floating point'}", token)
    if token.kind == "!":
        return Number(int(not value), "s64")
    changed = ~int(value) if token.kind == "~" else -value if token.kind == "-" else value
    return _wrapped(changed, kind)


def _wrapped(value: int | float, kind: str) -> Number:
    """An integer in 64 bits."""
    if kind == "f64":
        return Number(float(value), kind)
    value = int(value) & _MASK
    return Number(value - (1 << 64) if kind == "s64" and value >> 63 else value, kind)


def _cast(tokens: Tokens, cast: Token, number: Number) -> Number:
    """`(.s64)x`, `(.u64)x` or `(.f64)x`."""
    kind = cast.text[1:]
    if kind not in ("s64", "u64", "f64") or number.kind == "f32":
        raise tokens.wrong("a cast is (.s64), (.u64) or (.f64), of a 64-bit number", cast)
    if kind != "f64" and number.kind == "f64" and not math.isfinite(number.value):
        raise tokens.wrong("infinity and NaN are no integers", cast)
    return _wrapped(number.value, kind)


def _binary(tokens: Tokens, mark: Token, left: Number, right: Number) -> Number:
    """left mark right."""
    kinds, sign = {left.kind, right.kind}, mark.kind
    floating = "f64" in kinds
    if "f32" in kinds or (floating and len(kinds) > 1) or (floating and sign not in (*_COMPARE, *_SUMS, "/")):
        raise tokens.wrong(f"'{sign}' takes two integers, or where it can two 64-bit floating-point numbers", mark)
    if sign in _COMPARE:
        return Number(int(_COMPARE[sign](left.value, right.value)), "s64")
    if sign in ("&&", "||"):
        both, either = bool(left.value) and bool(right.value), bool(left.value) or bool(right.value)
        return Number(int(both if sign == "&&" else either), "s64")
    kind = "f64" if floating else "u64" if "u64" in kinds else "s64"
    if sign in _SUMS:
        return _wrapped(_SUMS[sign](left.value, right.value), kind)
    if sign in _BITS:
        return _wrapped(_BITS[sign](int(left.value), int(right.value)), kind)
    if sign in ("<<", ">>"):
        if not 0 <= right.value < 64:
            raise tokens.wrong(f"a shift of 64 bits by {right.value}", mark)
        shifted = int(left.value) << int(right.value) if sign == "<<" else int(left.value) >> int(right.value)
        return _wrapped(shifted, left.kind)
    if right.value == 0:
        raise tokens.wrong("a division by zero", mark)
    return _divided(sign, left, right, kind)


def _divided(sign: str, left: Number, right: Number, kind: str) -> Number:
    """A quotient, cut towards zero if of integers, or the remainder, which has the sign of the dividend."""
    if kind == "f64":
        return Number(left.value / right.value, kind)
    dividend, divisor = (int(_wrapped(number.value, kind).value) for number in (left, right))
    quotient = abs(dividend) // abs(divisor) * (1 if (dividend < 0) == (divisor < 0) else -1)
    return _wrapped(quotient if sign == "/" else dividend - quotient * divisor, kind)
