"""What names mean at a place of a PTX file: scopes within scopes, and names of a function that are told apart."""

from __future__ import annotations

from typing import NamedTuple

from tcemu.ptx.lexer import NAME, Token, Tokens
from tcemu.ptx.module import Place, Register

LIMIT = 64  # how deep blocks may stand in each other


class Meaning(NamedTuple):
    """What a name is. what: "register", "vector", "variable", "function", "label", "list of labels", "list of functions", "prototype".

    name: in the Function, where names that inner blocks declare anew are told apart; kind: a register's type, or its elements', and
    "extern" of such a variable.
    """

    what: str
    name: str
    place: Place
    kind: str = ""
    elements: tuple[Register, ...] = ()


class Scopes:
    """The names that can be seen, innermost scope last: the file's, that of a function's head, those of its blocks."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens, self._scopes = tokens, [dict[str, Meaning]()]
        self._blocks: dict[int, dict[str, Token]] = {}
        self._taken, self._counts = set[str](), dict[str, int]()

    def function(self, taken: set[str]) -> Scopes:
        """The scopes of a function's head and body, with those of the file around them. taken: names of the file, also of what follows."""
        inner = Scopes(self.tokens)
        inner._scopes, inner._taken = [*self._scopes, {}], set(taken)
        return inner

    def body(self, blocks: dict[int, dict[str, Token]]) -> None:
        """A body begins; blocks: the labels of each block of it, by the number of its bracket."""
        self._blocks = blocks

    def enter(self, bracket: int) -> None:
        """Into the block that the token of this number opens. Its labels are known at once, as branches go forward too."""
        self._scopes.append({})
        for label, token in self._blocks[bracket].items():
            self.declare(token, "label", label)

    def leave(self) -> None:
        """Out of the innermost block."""
        self._scopes.pop()

    def declare(self, token: Token, what: str, name: str, kind: str = "", elements: str = "") -> Meaning:
        """A new name in the innermost scope. elements: of a vector register, as "xyzw". Raises PtxError if the scope has it already."""
        scope = self._scopes[-1]
        older = scope.get(name)
        if older and older.what == what == "variable" and older.kind == "extern":  # declared .extern before
            scope[name] = older._replace(kind=kind)
            return older
        if older:
            raise self.tokens.wrong(f"{name} is declared twice; first as a {older.what} in line {older.place.line}", token)
        unique = self._unique(name)
        registers = tuple(Register(f"{unique}.{axis}") for axis in elements)
        scope[name] = Meaning(what, unique, self.tokens.place(token), kind, registers)
        return scope[name]

    def redeclare(self, name: str, what: str) -> str:
        """A label that turned out to be a list or a prototype; its name in the Function."""
        meaning = self._scopes[-1][name]
        self._scopes[-1][name] = meaning._replace(what=what)
        return meaning.name

    def _unique(self, name: str) -> str:
        """The name, or with a suffix if another scope of the function or the file has it."""
        unique, count = name, self._counts.get(name, 0)
        while unique in self._taken:
            count += 1
            unique = f"{name}${count}"
        self._counts[name] = count
        self._taken.add(unique)
        return unique

    def find(self, name: str) -> Meaning | None:
        """What the name means here, or None."""
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        return None

    def known(self, token: Token, wanted: str) -> Meaning:
        """What the token means. Raises PtxError if nothing is declared under it."""
        meaning = self.find(token.text)
        if meaning is None:
            what = "is no special register that tcemu has, nor" if token.text.startswith("%") else "is not"
            raise self.tokens.wrong(f"{token.text} {what} declared here; expected {wanted}; PTX declares a name before its use", token)
        return meaning


def blocks_of(tokens: Tokens) -> tuple[dict[int, dict[str, Token]], int]:
    """The labels of every block of the body that begins at the next token, by the number of its bracket; and that of the last bracket.

    If a bracket is not closed, that is the end of the text. Raises PtxError if blocks are nested too deep, or if a block has a label twice.
    """
    found: dict[int, dict[str, Token]] = {}
    open_brackets: list[int] = []
    everything = tokens.tokens
    for at in range(tokens.at, len(everything)):
        token = everything[at]
        if token.kind == "{":
            if len(open_brackets) >= LIMIT:
                raise tokens.wrong(f"blocks are nested deeper than {LIMIT}", token)
            open_brackets.append(at)
            found[at] = {}
        elif token.kind == "}":
            open_brackets.pop()
            if not open_brackets:
                return found, at
        elif token.kind == ":" and everything[at - 1].kind == NAME and everything[at - 1].text != "WARP_SZ":  # that one is in a ? b : c
            label, block = everything[at - 1], found[open_brackets[-1]]
            if label.text in block:
                first = tokens.place(block[label.text]).line
                raise tokens.wrong(f"{label.text} is declared twice; first as a label in line {first}", label)
            block[label.text] = label
    return found, len(everything) - 1
