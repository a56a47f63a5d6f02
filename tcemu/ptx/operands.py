"""The operands of instructions, read from tokens."""

from __future__ import annotations

from tcemu.ptx.constants import constant, integer, starts
from tcemu.ptx.lexer import NAME, Token, Tokens
from tcemu.ptx.module import Address, Guard, Negated, Operand, Pair, Register, Sink, Symbol, Vector
from tcemu.ptx.scopes import Meaning, Scopes
from tcemu.ptx.special import SPECIAL

_LIMIT = 8  # how deep vectors may stand in each other
_ANY = "a register, a constant, the name of a variable, a label, '{' or '['"
_AXES = {**{axis: axis for axis in "xyzw"}, **dict(zip("rgba", "xyzw", strict=True))}
_ADDRESSES = {f"{sign}{bits}" for sign in "bus" for bits in (32, 64)}


def operand(tokens: Tokens, scopes: Scopes, depth: int = 0) -> Operand:
    """Any operand."""
    token = tokens.token
    if token.kind == NAME and token.text != "WARP_SZ":
        first = _named(tokens, scopes)
        if tokens.accept("|"):
            return Pair(_destination(tokens, first, token), _destination(tokens, _named(tokens, scopes), tokens.token))
        return first
    if token.kind == "[":
        return address(tokens, scopes)
    if token.kind == "{":
        return vector(tokens, scopes, depth)
    if token.kind == "!" and tokens.ahead().kind == NAME:
        tokens.take()
        name = tokens.expect(NAME, "a predicate register")
        return Negated(Register(_predicate(tokens, scopes, name)))
    if token.kind == "!" or starts(token):
        return constant(tokens)
    raise tokens.unexpected(_ANY)


def guard(tokens: Tokens, scopes: Scopes) -> Guard | None:
    """`@p` or `@!p`, if it stands here."""
    if not tokens.accept("@"):
        return None
    negated = tokens.accept("!") is not None
    return Guard(_predicate(tokens, scopes, tokens.expect(NAME, "a predicate register")), negated)


def vector(tokens: Tokens, scopes: Scopes, depth: int = 0) -> Vector:
    """`{a, b, ...}`, with at least one element."""
    if depth >= _LIMIT:
        raise tokens.wrong(f"vectors are nested deeper than {_LIMIT}")
    tokens.expect("{")
    elements = [operand(tokens, scopes, depth + 1)]
    while tokens.accept(","):
        elements.append(operand(tokens, scopes, depth + 1))
    tokens.expect("}", "',' or '}'")
    return Vector(tuple(elements))


def address(tokens: Tokens, scopes: Scopes) -> Address:
    """`[base+offset]`, with coordinates for a tensor copy."""
    tokens.expect("[")
    base, offset, name = None, 0, tokens.token
    if name.kind == NAME and name.text != "WARP_SZ":
        tokens.take()
        base = _base(tokens, scopes, name)
        if tokens.token.kind in "+-":
            sign = -1 if tokens.take().kind == "-" else 1
            offset = sign * integer(tokens, "an offset in bytes")
    else:
        offset = integer(tokens, "a register, the name of a variable, or an integer")
    coordinates = vector(tokens, scopes) if tokens.accept(",") else None
    tokens.expect("]", "'+', ',' or ']'" if base else "',' or ']'")
    return Address(base, offset, coordinates)


def _base(tokens: Tokens, scopes: Scopes, token: Token) -> Register | Symbol:
    """What an address begins with."""
    found = _meant(tokens, scopes, token, "a register or the name of a variable")
    if isinstance(found, Register):
        kind = _kind(scopes, token)
        if kind not in _ADDRESSES:
            raise tokens.wrong(f"{token.text} is a register of .{kind}; an address has 32 or 64 bits, as .b64, .u64 or .s64", token)
        return found
    if isinstance(found, Symbol) and (what := scopes.known(token, "").what) in ("variable", "function"):
        return found
    what = scopes.known(token, "").what
    raise tokens.wrong(f"{token.text} is a {what}; an address begins with a register or a variable", token)


def _named(tokens: Tokens, scopes: Scopes) -> Operand:
    """An operand that is a name, and what is added to it."""
    token = tokens.expect(NAME, "a register")
    if token.text == "_":
        return Sink()
    found = _meant(tokens, scopes, token, _ANY)
    if isinstance(found, Symbol) and tokens.accept("+"):
        return Symbol(found.name, integer(tokens, "what is added to the address"))
    return found


def _meant(tokens: Tokens, scopes: Scopes, token: Token, wanted: str) -> Register | Vector | Symbol:
    """The register, the vector or the symbol that a name is."""
    text = token.text
    if text in SPECIAL:
        return Register(text)
    stem, dot, axis = text.partition(".")
    if dot:
        return _element(tokens, scopes, token, stem, axis)
    meaning = scopes.known(token, wanted)
    if meaning.what == "register":
        return Register(meaning.name)
    return Vector(meaning.elements) if meaning.what == "vector" else Symbol(meaning.name)


def _element(tokens: Tokens, scopes: Scopes, token: Token, stem: str, axis: str) -> Register:
    """`V.x`, an element of a vector register."""
    meaning = scopes.find(stem)
    if meaning is None and f"{stem}.x" in SPECIAL:
        raise tokens.wrong(f"{stem} has .x, .y, .z and .w, but no .{axis}", token)
    if meaning is None:
        raise tokens.wrong(f"{stem} is not declared here, and PTX declares a name before its use", token)
    for element in meaning.elements:
        if element.name.endswith(f".{_AXES.get(axis, '?')}"):
            return element
    has = ", ".join(element.name.rpartition(".")[2] for element in meaning.elements)
    why = f"its elements are {has}" if has else f"it is a {meaning.what}, and only vector registers (.v2, .v4) have elements"
    raise tokens.wrong(f"{stem} has no element .{axis}: {why}", token)


def _kind(scopes: Scopes, token: Token) -> str:
    """The type of the register that a name is; "" of anything else."""
    if token.text in SPECIAL:
        return SPECIAL[token.text]
    meaning: Meaning | None = scopes.find(token.text.partition(".")[0])
    return meaning.kind if meaning else ""


def _predicate(tokens: Tokens, scopes: Scopes, token: Token) -> str:
    """The name of a predicate register."""
    found = _meant(tokens, scopes, token, "a predicate register")
    kind = _kind(scopes, token)
    if isinstance(found, Register) and kind == "pred":
        return found.name
    is_what = f"a register of .{kind}" if isinstance(found, Register) else f"a {scopes.known(token, '').what}"
    raise tokens.wrong(f"{token.text} is {is_what}; what stands here must be a register of .pred", token)


def _destination(tokens: Tokens, found: Operand, token: Token) -> Operand:
    """One of the two of `p|q`."""
    if not isinstance(found, Register | Sink):
        raise tokens.wrong("both of p|q are registers, or '_'", token)
    return found
