"""Scopes of a PTX file: the meaning of a name at a position, and unique names within a function."""

from __future__ import annotations

from typing import NamedTuple

from tcemu.kernels.ptx.text.lexer import NAME, Token, Tokens
from tcemu.kernels.ptx.text.module import Position, Register

MAX_BLOCK_DEPTH = 64  # nesting of blocks


class DeclaredName(NamedTuple):
    """The declaration of a name."""

    category: str  # "register", "vector", "variable", "function", "label", "list of labels", "list of functions" or "prototype"
    name: str  # in the `Function`, where a name that an inner block declares again has a suffix
    position: Position
    kind: str = ""  # type of a register or of a vector's elements; "extern" for such a variable
    elements: tuple[Register, ...] = ()


class Scopes:
    """The visible scopes, innermost last: of the file, of a function's head, of its blocks."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens, self._scopes = tokens, [dict[str, DeclaredName]()]
        self.blocks: dict[int, dict[str, Token]] = {}  # labels of each block of the body, by the number of the bracket's token
        self._used_names, self._counts = set[str](), dict[str, int]()

    def enter_function(self, used_names: set[str]) -> Scopes:
        """Return the scopes of a function within those of the file. used_names: names of the whole file."""
        inner = Scopes(self.tokens)
        inner._scopes, inner._used_names = [*self._scopes, {}], set(used_names)
        return inner

    def enter(self, bracket: int) -> None:
        """Enter the block that a token opens. Its labels are declared at once, since branches may go forward."""
        self._scopes.append({})
        for label, token in self.blocks[bracket].items():
            self.declare(token, "label", label)

    def leave(self) -> None:
        """Leave the innermost block."""
        self._scopes.pop()

    def declare(self, token: Token, what: str, name: str, kind: str = "", elements: str = "") -> DeclaredName:
        """Declare a name in the innermost scope, once. elements: axes of a vector register, as "xyzw". Raises PtxError."""
        scope = self._scopes[-1]
        older = scope.get(name)
        if older and older.category == what == "variable" and older.kind == "extern":  # declared .extern before
            scope[name] = older._replace(kind=kind)
            return older
        if older:
            raise self.tokens.error(f"{name} is declared twice; first as a {older.category} in line {older.position.line}", token)
        unique = self._unique_name(name)
        registers = tuple(Register(f"{unique}.{axis}") for axis in elements)
        scope[name] = DeclaredName(what, unique, self.tokens.position(token), kind, registers)
        return scope[name]

    def redeclare(self, name: str, what: str) -> str:
        """Make a label a list or a prototype; return its name in the `Function`."""
        meaning = self._scopes[-1][name]
        self._scopes[-1][name] = meaning._replace(category=what)
        return meaning.name

    def _unique_name(self, name: str) -> str:
        """Return the name, with a suffix if another scope of the function or the file has it."""
        unique, count = name, self._counts.get(name, 0)
        while unique in self._used_names:
            count += 1
            unique = f"{name}${count}"
        self._counts[name] = count
        self._used_names.add(unique)
        return unique

    def find(self, name: str) -> DeclaredName | None:
        """Return the declaration of a name here, or None."""
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        return None

    def resolve(self, token: Token, expected: str) -> DeclaredName:
        """Return the declaration of a token's name. expected: the error's words for it. Raises PtxError if there is none."""
        meaning = self.find(token.text)
        if meaning is None:
            what = "is neither a supported special register nor" if token.text.startswith("%") else "is not"
            raise self.tokens.error(f"{token.text} {what} declared here; expected {expected}; PTX declares a name before its use", token)
        return meaning


def find_blocks(tokens: Tokens) -> tuple[dict[int, dict[str, Token]], int]:
    """Find the blocks of the body that begins at the next token.

    Returns:
        The labels of each block, by the number of its bracket's token; and the number of the last bracket's token, which is the end of the
        text if a bracket is not closed.

    Raises:
        PtxError: Blocks are nested too deeply, or a block has a label twice.
    """
    found: dict[int, dict[str, Token]] = {}
    open_brackets: list[int] = []
    everything = tokens.tokens
    for at in range(tokens.index, len(everything)):
        token = everything[at]
        if token.kind == "{":
            if len(open_brackets) >= MAX_BLOCK_DEPTH:
                raise tokens.error(f"blocks are nested deeper than {MAX_BLOCK_DEPTH}", token)
            open_brackets.append(at)
            found[at] = {}
        elif token.kind == "}":
            open_brackets.pop()
            if not open_brackets:
                return found, at
        elif token.kind == ":" and everything[at - 1].kind == NAME and everything[at - 1].text != "WARP_SZ":  # WARP_SZ is part of a ? b : c
            label, block = everything[at - 1], found[open_brackets[-1]]
            if label.text in block:
                first = tokens.position(block[label.text]).line
                raise tokens.error(f"{label.text} is declared twice; first as a label in line {first}", label)
            block[label.text] = label
    return found, len(everything) - 1
