"""Parser of declarations: registers, variables, parameters and initial values."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tcemu.kernels.ptx.text.constant_expressions import parse_expression, parse_integer, parse_literal, starts_constant
from tcemu.kernels.ptx.text.lexer import DIRECTIVE, NAME, NUMBER, Token, Tokens
from tcemu.kernels.ptx.text.module import Pointer, Symbol, Variable
from tcemu.kernels.ptx.text.scopes import Scopes

SPACES = ("global", "const", "shared", "local", "param")
TYPES = {f"{sign}{bits}": bits for sign in "bus" for bits in (8, 16, 32, 64)} | {"f16": 16, "f16x2": 32, "f32": 32, "f64": 64, "b128": 128}
_REGISTERS = {**TYPES, "pred": 1}
_REGISTER_LIMIT, _BYTE_LIMIT, _INITIAL_LIMIT, _AXES_LIMIT = 1 << 20, 1 << 40, 1 << 26, 16
_VECTORS = {".v2": 2, ".v4": 4, ".v8": 8}


def parse_type(tokens: Tokens, types: dict[str, int]) -> str:
    """Parse a type, as "b32"."""
    token = tokens.expect(DIRECTIVE, "a type, as .b32")
    if token.text[1:] not in types:
        raise tokens.error(f"{token.text} is not a type of such a declaration; types are: {', '.join('.' + name for name in types)}", token)
    return token.text[1:]


# ---- registers


def declare_registers(tokens: Tokens, scopes: Scopes, kinds: dict[str, str]) -> None:
    """Parse `.reg .b32 a, %r<10>;` after its first word, and add the types to `kinds`."""
    axes = "xyzw"[: _VECTORS[vector.text]] if (vector := tokens.accept_directive(".v2", ".v4")) else ""
    kind = parse_type(tokens, _REGISTERS)
    while True:
        token = tokens.expect(NAME, "the name of a register")
        for name in _register_names(tokens, token, _REGISTER_LIMIT - len(kinds)):
            declare_register(tokens, scopes, kinds, token._replace(text=name), (kind, axes))
        if not tokens.accept(","):
            break
    tokens.expect(";", "',' or ';'")


def declare_register(tokens: Tokens, scopes: Scopes, kinds: dict[str, str], token: Token, type_and_axes: tuple[str, str]) -> str:
    """Declare a register or a vector register; return its name in the `Function`."""
    kind, axes = type_and_axes
    if "." in token.text or token.text == "_":
        raise tokens.error(f"{token.text} is not a valid name of a register", token)
    meaning = scopes.declare(token, "vector" if axes else "register", token.text, kind, axes)
    kinds.update({name.name: kind for name in meaning.elements} if axes else {meaning.name: kind})
    return meaning.name


def _register_names(tokens: Tokens, token: Token, remaining: int) -> Iterator[str]:
    """Yield the name itself, or %r0 to %r9 for `%r<10>`."""
    if not tokens.accept("<"):
        if remaining < 1:
            raise tokens.error(f"a function has more than {_REGISTER_LIMIT} registers", token)
        yield token.text
        return
    count_token = tokens.token
    count, kind = parse_literal(tokens, tokens.expect(NUMBER, "how many registers"))
    if kind not in ("s64", "u64") or not 0 < count <= remaining:
        raise tokens.error(f"the number of registers is 1 or more, and a function has at most {_REGISTER_LIMIT}", count_token)
    tokens.expect(">")
    yield from (f"{token.text}{number}" for number in range(int(count)))


# ---- variables and parameters


class DeclarationHead(NamedTuple):
    """The part of a declaration before the names."""

    space: str
    kind: str
    vector: int
    alignment: int
    extern: bool


def parse_head(tokens: Tokens, space: str, *, extern: bool = False) -> DeclarationHead:
    """Parse `.align 16 .v4 .f32`, after the state space. Attributes that change no value are skipped."""
    alignment = vector = 0
    kind = ""
    while token := tokens.accept(DIRECTIVE):
        if token.text == ".align":
            alignment = _parse_alignment(tokens)
        elif token.text in _VECTORS:
            vector = _VECTORS[token.text]
        elif token.text == ".attribute":
            skip_brackets(tokens, "(", ")")
        elif token.text == ".ptr" and space == "param":
            tokens.accept_directive(*(f".{name}" for name in SPACES))
            if tokens.accept_directive(".align"):
                _parse_alignment(tokens)
        elif kind:
            raise tokens.unexpected("the name of a variable", token)
        else:
            tokens.index -= 1
            kind = parse_type(tokens, TYPES)
    if not kind:
        raise tokens.unexpected("a type, as .b32")
    return DeclarationHead(space, kind, vector, alignment or TYPES[kind] // 8 * (vector or 1), extern)


def _parse_alignment(tokens: Tokens) -> int:
    token = tokens.token
    alignment = parse_integer(tokens, "an alignment in bytes")
    if alignment <= 0 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise tokens.error(f"an alignment is a power of two up to {1 << 20}, not {alignment}", token)
    return alignment


def skip_brackets(tokens: Tokens, opening: str, closing: str) -> None:
    """Skip everything from a bracket to the one that closes it."""
    first, depth = tokens.expect(opening), 1
    while depth:
        token = tokens.take()
        if token.offset >= len(tokens.text):
            raise tokens.error("this bracket is not closed", first)
        depth += (token.kind == opening) - (token.kind == closing)


def parse_variables(tokens: Tokens, scopes: Scopes, space: str, *, extern: bool = False) -> list[Variable]:
    """Parse a declaration as `.shared .align 16 .b8 a[16], b[4];` after its state space, and declare its names."""
    declaration = parse_head(tokens, space, extern=extern)
    found = tokens.parse_list(lambda: _parse_variable(tokens, scopes, declaration))
    tokens.expect(";", "',', '=' or ';'")
    return found


def _parse_variable(tokens: Tokens, scopes: Scopes, declaration: DeclarationHead) -> Variable:
    token = tokens.expect(NAME, "the name of a variable")
    if "." in token.text or token.text == "_":
        raise tokens.error(f"{token.text} is not a valid name of a variable", token)
    shape = parse_axes(tokens)
    name = scopes.declare(token, "variable", token.text, "extern" if declaration.extern else "").name
    shape += (declaration.vector,) if declaration.vector else ()
    initial, pointers = None, ()
    if equals := tokens.accept("="):
        if declaration.space not in ("global", "const") or declaration.extern:
            raise tokens.error("only .global and .const variables that are not .extern have initial values", equals)
        initial, pointers, shape = parse_initialiser(tokens, scopes, declaration.kind, shape)
    if None in shape and not (declaration.extern or declaration.space == "param"):
        raise tokens.error(
            f"the size of {token.text} is open; only .extern variables and variables with initial values may have an open size", token
        )
    head = name, declaration.space, declaration.kind, shape, declaration.alignment, tokens.position(token)
    return Variable(*head, declaration.extern, initial, pointers)


def parse_axes(tokens: Tokens) -> tuple[int | None, ...]:
    """Parse `[4][5]`; the first axis may be open, `[]`."""
    shape: list[int | None] = []
    total = 1
    while opening := tokens.accept("["):
        size = None if tokens.token.kind == "]" else parse_integer(tokens, "a number of elements")
        tokens.expect("]")
        total *= 1 if size is None else size
        if (size is None and shape) or not 0 < total <= _BYTE_LIMIT or len(shape) >= _AXES_LIMIT:
            what = f"an array has at most {_AXES_LIMIT} axes of 1 or more elements, {_BYTE_LIMIT} in all, and only its first may be open"
            raise tokens.error(what, opening)
        shape.append(size)
    return tuple(shape)


# ---- initial values


@dataclass
class _InitialBytes:
    """Initial bytes of a variable while they are parsed."""

    kind: str
    width: int
    data: bytearray = field(default_factory=bytearray)
    pointers: list[Pointer] = field(default_factory=list)


Initialiser = tuple[bytes, tuple[Pointer, ...], tuple[int, ...]]


def parse_initialiser(tokens: Tokens, scopes: Scopes, kind: str, shape: tuple[int | None, ...]) -> Initialiser:
    """Parse an initial value after `=`; return the bytes, the addresses in them, and the shape without open axes."""
    filling = _InitialBytes(kind, TYPES[kind] // 8)
    count = _fill_array(tokens, scopes, filling, shape, 0)
    known = tuple(count if size is None else size for size in shape)
    return bytes(filling.data), tuple(filling.pointers), known


def _fill_array(tokens: Tokens, scopes: Scopes, filling: _InitialBytes, shape: tuple[int | None, ...], start: int) -> int:
    """Parse the values of an array into the bytes from `start` on; return the number of elements along its first axis."""
    if not shape:
        _fill_value(tokens, scopes, filling, start)
        return 1
    size, inner = shape[0], math.prod(axis or 0 for axis in shape[1:]) * filling.width
    tokens.expect("{")
    count = 0
    while tokens.token.kind != "}":
        if count == size:
            raise tokens.error(f"there are more than {size} values for {size} elements")
        if start + (count + 1) * inner > _INITIAL_LIMIT:
            raise tokens.error(f"values extend beyond byte {_INITIAL_LIMIT} of a variable")
        _fill_array(tokens, scopes, filling, shape[1:], start + count * inner)
        count += 1
        if not tokens.accept(","):
            break
    tokens.expect("}", "',' or '}'")
    return count


def _fill_value(tokens: Tokens, scopes: Scopes, filling: _InitialBytes, start: int) -> None:
    """Parse a number or an address."""
    filling.data.extend(bytes(start + filling.width - len(filling.data)))
    first = tokens.token
    if first.kind == NAME and first.text != "WARP_SZ":
        return _fill_pointer(tokens, scopes, filling, start)
    if first.kind == NUMBER and tokens.peek().kind == "(":
        return _fill_masked_pointer(tokens, scopes, filling, start)
    if not (starts_constant(first) or first.kind in ("!",)):
        raise tokens.unexpected("a number or the name of a variable")
    filling.data[start : start + filling.width] = _encode_number(tokens, filling, first)


def _encode_number(tokens: Tokens, filling: _InitialBytes, first: Token) -> bytes:
    value, kind = parse_expression(tokens)
    floating = kind in ("f32", "f64")
    if filling.kind in ("f32", "f64") and floating:
        if kind == "f32":
            value = struct.unpack("<f", int(value).to_bytes(4, "little"))[0] if filling.kind == "f64" else value
            return int(value).to_bytes(4, "little") if filling.kind == "f32" else struct.pack("<d", value)
        with np.errstate(over="ignore"):
            return (np.float32 if filling.kind == "f32" else np.float64)(value).tobytes()
    bits = filling.width * 8
    if floating or filling.kind in ("f32", "f64"):
        raise tokens.error(f"a .{filling.kind} variable is initialised with {'integers' if floating else 'floating-point numbers'}", first)
    if not -(1 << (bits - 1)) <= value < 1 << bits:
        raise tokens.error(f"{value} does not fit a .{filling.kind}", first)
    return (int(value) & ((1 << bits) - 1)).to_bytes(filling.width, "little")


def _fill_pointer(tokens: Tokens, scopes: Scopes, filling: _InitialBytes, start: int) -> None:
    token = tokens.token
    if filling.width not in (4, 8) or filling.kind.startswith("f"):
        raise tokens.error(f"a .{filling.kind} does not hold an address; .b64, .u64 and .s64 do", token)
    filling.pointers.append(_parse_pointer(tokens, scopes, start, filling.width))


def _fill_masked_pointer(tokens: Tokens, scopes: Scopes, filling: _InitialBytes, start: int) -> None:
    """Parse `0xff00(x)`, one byte of an address."""
    token = tokens.take()
    mask = int(token.text, 16) if re.fullmatch(r"0[xX][0-9a-fA-F]+U?", token.text.rstrip("U")) else 0
    if mask not in [0xFF << position for position in range(0, 64, 8)] or filling.width != 1:
        raise tokens.error("a mask before an address takes one byte of it, as 0xff00(x), for a variable of .b8, .u8 or .s8", token)
    tokens.expect("(")
    filling.pointers.append(_parse_pointer(tokens, scopes, start, 1, (mask & -mask).bit_length() - 1))
    tokens.expect(")")


def _parse_pointer(tokens: Tokens, scopes: Scopes, start: int, width: int, shift: int = 0) -> Pointer:
    """Parse `x`, `x+4` or `generic(x)+4`, the address of a variable or a function that a variable holds."""
    name = tokens.expect(NAME, "the name of a variable")
    generic = name.text == "generic" and tokens.accept("(") is not None
    if generic:
        name = tokens.expect(NAME, "the name of a variable")
        tokens.expect(")")
    offset = parse_integer(tokens, "what is added to the address") if tokens.accept("+") else 0
    meaning = scopes.resolve(name, "a variable or a function")
    if meaning.category not in ("variable", "function"):
        raise tokens.error(f"{name.text} is a {meaning.category}; a variable holds the address of a variable or a function", name)
    return Pointer(start, Symbol(meaning.name, offset), generic, width, shift)
