"""Declarations of registers, variables and parameters, read from tokens."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tcemu.ptx.constants import expression, integer, literal, starts
from tcemu.ptx.lexer import DIRECTIVE, NAME, NUMBER, Token, Tokens
from tcemu.ptx.module import Pointer, Symbol, Variable
from tcemu.ptx.scopes import Scopes

SPACES = ("global", "const", "shared", "local", "param")
TYPES = {f"{sign}{bits}": bits for sign in "bus" for bits in (8, 16, 32, 64)} | {"f16": 16, "f16x2": 32, "f32": 32, "f64": 64, "b128": 128}
_REGISTERS = {**TYPES, "pred": 1}
_REGISTER_LIMIT, _BYTE_LIMIT, _INITIAL_LIMIT, _AXES_LIMIT = 1 << 20, 1 << 40, 1 << 26, 16
_VECTORS = {".v2": 2, ".v4": 4, ".v8": 8}


def type_of(tokens: Tokens, types: dict[str, int]) -> str:
    """A type, as "b32"."""
    token = tokens.expect(DIRECTIVE, "a type, as .b32")
    if token.text[1:] not in types:
        raise tokens.wrong(f"{token.text} is no type of what is declared here; these are: {', '.join('.' + name for name in types)}", token)
    return token.text[1:]


# ---- registers


def registers(tokens: Tokens, scopes: Scopes, kinds: dict[str, str]) -> None:
    """`.reg .b32 a, %r<10>;` after its first word, into `kinds`."""
    axes = "xyzw"[: _VECTORS[vector.text]] if (vector := tokens.accept_directive(".v2", ".v4")) else ""
    kind = type_of(tokens, _REGISTERS)
    while True:
        token = tokens.expect(NAME, "the name of a register")
        for name in _numbered(tokens, token, _REGISTER_LIMIT - len(kinds)):
            register(tokens, scopes, kinds, token._replace(text=name), (kind, axes))
        if not tokens.accept(","):
            break
    tokens.expect(";", "',' or ';'")


def register(tokens: Tokens, scopes: Scopes, kinds: dict[str, str], token: Token, type_and_axes: tuple[str, str]) -> str:
    """One register, or one vector of them; its name in the Function."""
    kind, axes = type_and_axes
    if "." in token.text or token.text == "_":
        raise tokens.wrong(f"{token.text} is no name of a register", token)
    meaning = scopes.declare(token, "vector" if axes else "register", token.text, kind, axes)
    kinds.update({name.name: kind for name in meaning.elements} if axes else {meaning.name: kind})
    return meaning.name


def _numbered(tokens: Tokens, token: Token, left: int) -> Iterator[str]:
    """The name itself, or `%r<10>`: %r0 to %r9."""
    if not tokens.accept("<"):
        if left < 1:
            raise tokens.wrong(f"a function has more than {_REGISTER_LIMIT} registers", token)
        yield token.text
        return
    at = tokens.token
    count, kind = literal(tokens, tokens.expect(NUMBER, "how many registers"))
    if kind not in ("s64", "u64") or not 0 < count <= left:
        raise tokens.wrong(f"the number of registers is a number from 1 on, and a function has at most {_REGISTER_LIMIT}", at)
    tokens.expect(">")
    yield from (f"{token.text}{number}" for number in range(int(count)))


# ---- variables and parameters


class Head(NamedTuple):
    """What stands before the names of a declaration."""

    space: str
    kind: str
    vector: int
    alignment: int
    extern: bool


def head(tokens: Tokens, space: str, *, extern: bool = False) -> Head:
    """`.align 16 .v4 .f32` and what a parameter has more, after the state space. Attributes that change no value are skipped."""
    alignment = vector = 0
    kind = ""
    while token := tokens.accept(DIRECTIVE):
        if token.text == ".align":
            alignment = _alignment(tokens)
        elif token.text in _VECTORS:
            vector = _VECTORS[token.text]
        elif token.text == ".attribute":
            skip(tokens, "(", ")")
        elif token.text == ".ptr" and space == "param":
            tokens.accept_directive(*(f".{name}" for name in SPACES))
            if tokens.accept_directive(".align"):
                _alignment(tokens)
        elif kind:
            raise tokens.unexpected("the name of a variable", token)
        else:
            tokens.at -= 1
            kind = type_of(tokens, TYPES)
    if not kind:
        raise tokens.unexpected("a type, as .b32")
    return Head(space, kind, vector, alignment or TYPES[kind] // 8 * (vector or 1), extern)


def _alignment(tokens: Tokens) -> int:
    token = tokens.token
    alignment = integer(tokens, "an alignment in bytes")
    if alignment <= 0 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise tokens.wrong(f"an alignment is a power of two up to {1 << 20}, not {alignment}", token)
    return alignment


def skip(tokens: Tokens, opening: str, closing: str) -> None:
    """Everything from one bracket to the one that closes it."""
    first, depth = tokens.expect(opening), 1
    while depth:
        token = tokens.take()
        if token.offset >= len(tokens.text):
            raise tokens.wrong("this bracket is not closed", first)
        depth += (token.kind == opening) - (token.kind == closing)


def variables(tokens: Tokens, scopes: Scopes, space: str, *, extern: bool = False) -> Iterator[Variable]:
    """All that a declaration such as `.shared .align 16 .b8 a[16], b[4];` declares, after its state space. Names come into the scope."""
    first = head(tokens, space, extern=extern)
    while True:
        token = tokens.expect(NAME, "the name of a variable")
        yield _variable(tokens, scopes, first, token)
        if not tokens.accept(","):
            break
    tokens.expect(";", "',', '=' or ';'")


def _variable(tokens: Tokens, scopes: Scopes, given: Head, token: Token) -> Variable:
    """One name, its axes, and what it begins with."""
    if "." in token.text or token.text == "_":
        raise tokens.wrong(f"{token.text} is no name of a variable", token)
    shape = axes(tokens)
    name = scopes.declare(token, "variable", token.text, "extern" if given.extern else "").name
    shape += (given.vector,) if given.vector else ()
    initial, pointers = None, ()
    if equals := tokens.accept("="):
        if given.space not in ("global", "const") or given.extern:
            raise tokens.wrong("only .global and .const variables that are not .extern begin with values", equals)
        initial, pointers, shape = initialiser(tokens, scopes, given.kind, shape)
    if None in shape and not (given.extern or given.space == "param"):
        raise tokens.wrong(f"the size of {token.text} is open; only .extern variables may leave it so, and those with values", token)
    return Variable(name, given.space, given.kind, shape, given.alignment, tokens.place(token), given.extern, initial, pointers)


def axes(tokens: Tokens) -> tuple[int | None, ...]:
    """`[4][5]`; the first may be open, `[]`."""
    shape: list[int | None] = []
    total = 1
    while opening := tokens.accept("["):
        size = None if tokens.token.kind == "]" else integer(tokens, "a number of elements")
        tokens.expect("]")
        total *= 1 if size is None else size
        if (size is None and shape) or not 0 < total <= _BYTE_LIMIT or len(shape) >= _AXES_LIMIT:
            what = f"an array has at most {_AXES_LIMIT} axes of 1 or more elements, {_BYTE_LIMIT} in all, and only its first may be open"
            raise tokens.wrong(what, opening)
        shape.append(size)
    return tuple(shape)


# ---- what variables begin with


@dataclass
class _Filling:
    """Bytes that are being filled in."""

    kind: str
    width: int
    data: bytearray = field(default_factory=bytearray)
    pointers: list[Pointer] = field(default_factory=list)


Filled = tuple[bytes, tuple[Pointer, ...], tuple[int, ...]]


def initialiser(tokens: Tokens, scopes: Scopes, kind: str, shape: tuple[int | None, ...]) -> Filled:
    """What stands after `=`: the bytes, the addresses in them, and the shape, of which no axis is open any more."""
    filling = _Filling(kind, TYPES[kind] // 8)
    count = _fill(tokens, scopes, filling, shape, 0)
    known = tuple(count if size is None else size for size in shape)
    return bytes(filling.data), tuple(filling.pointers), known


def _fill(tokens: Tokens, scopes: Scopes, filling: _Filling, shape: tuple[int | None, ...], at: int) -> int:
    """The values of an array from byte `at` on; how many elements of its first axis there are. An array has at most 16 axes."""
    if not shape:
        _value(tokens, scopes, filling, at)
        return 1
    size, inner = shape[0], math.prod(axis or 0 for axis in shape[1:]) * filling.width
    tokens.expect("{")
    count = 0
    while tokens.token.kind != "}":
        if count == size:
            raise tokens.wrong(f"there are more than {size} values for {size} elements")
        if at + (count + 1) * inner > _INITIAL_LIMIT:
            raise tokens.wrong(f"values stand behind byte {_INITIAL_LIMIT} of a variable")
        _fill(tokens, scopes, filling, shape[1:], at + count * inner)
        count += 1
        if not tokens.accept(","):
            break
    tokens.expect("}", "',' or '}'")
    return count


def _value(tokens: Tokens, scopes: Scopes, filling: _Filling, at: int) -> None:
    """One number or address."""
    filling.data.extend(bytes(at + filling.width - len(filling.data)))
    first = tokens.token
    if first.kind == NAME and first.text != "WARP_SZ":
        return _pointer(tokens, scopes, filling, at)
    if first.kind == NUMBER and tokens.ahead().kind == "(":
        return _masked(tokens, scopes, filling, at)
    if not (starts(first) or first.kind in ("!",)):
        raise tokens.unexpected("a number or the name of a variable")
    filling.data[at : at + filling.width] = _encoded(tokens, filling, first)


def _encoded(tokens: Tokens, filling: _Filling, first: Token) -> bytes:
    """A number as bytes of the variable's type."""
    value, kind = expression(tokens)
    floating = kind in ("f32", "f64")
    if filling.kind in ("f32", "f64") and floating:
        if kind == "f32":
            value = struct.unpack("<f", int(value).to_bytes(4, "little"))[0] if filling.kind == "f64" else value
            return int(value).to_bytes(4, "little") if filling.kind == "f32" else struct.pack("<d", value)
        with np.errstate(over="ignore"):
            return (np.float32 if filling.kind == "f32" else np.float64)(value).tobytes()
    bits = filling.width * 8
    if floating or filling.kind in ("f32", "f64"):
        raise tokens.wrong(f"a .{filling.kind} variable begins with {'integers' if floating else 'floating-point numbers'}", first)
    if not -(1 << (bits - 1)) <= value < 1 << bits:
        raise tokens.wrong(f"{value} does not fit a .{filling.kind}", first)
    return (int(value) & ((1 << bits) - 1)).to_bytes(filling.width, "little")


def _pointer(tokens: Tokens, scopes: Scopes, filling: _Filling, at: int) -> None:
    """`x`, `x+4` or `generic(x)+4`."""
    token = tokens.take()
    generic = token.text == "generic" and tokens.accept("(") is not None
    name = tokens.expect(NAME, "the name of a variable") if generic else token
    if generic:
        tokens.expect(")")
    offset = integer(tokens, "what is added to the address") if tokens.accept("+") else 0
    if filling.width not in (4, 8) or filling.kind.startswith("f"):
        raise tokens.wrong(f"a .{filling.kind} does not hold an address; .b64, .u64 and .s64 do", token)
    filling.pointers.append(Pointer(at, _symbol(tokens, scopes, name, offset), generic, filling.width))


def _masked(tokens: Tokens, scopes: Scopes, filling: _Filling, at: int) -> None:
    """`0xff00(x)`: one byte of an address."""
    token = tokens.take()
    mask = int(token.text, 16) if re.fullmatch(r"0[xX][0-9a-fA-F]+U?", token.text.rstrip("U")) else 0
    shift = (mask & -mask).bit_length() - 1
    if mask not in [0xFF << position for position in range(0, 64, 8)] or filling.width != 1:
        raise tokens.wrong("a mask before an address takes one byte of it, as 0xff00(x), for a variable of .b8, .u8 or .s8", token)
    tokens.expect("(")
    name = tokens.expect(NAME, "the name of a variable")
    generic = name.text == "generic" and tokens.accept("(") is not None
    name = tokens.expect(NAME, "the name of a variable") if generic else name
    if generic:
        tokens.expect(")")
    offset = integer(tokens, "what is added to the address") if tokens.accept("+") else 0
    tokens.expect(")")
    filling.pointers.append(Pointer(at, _symbol(tokens, scopes, name, offset), generic, 1, shift))


def _symbol(tokens: Tokens, scopes: Scopes, name: Token, offset: int) -> Symbol:
    """A variable or a function whose address a variable holds."""
    meaning = scopes.known(name, "a variable or a function")
    if meaning.what not in ("variable", "function"):
        raise tokens.wrong(f"{name.text} is a {meaning.what}; a variable holds the address of a variable or a function", name)
    return Symbol(meaning.name, offset)
