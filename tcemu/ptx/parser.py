"""PTX text read into a Module: the file, functions and their statements (PTX ISA, sections 4, 5, 7 and 11)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from tcemu.ptx.constants import integer
from tcemu.ptx.declarations import SPACES, TYPES, axes, head, register, registers, skip, type_of, variables
from tcemu.ptx.lexer import DIRECTIVE, END, NAME, NUMBER, STRING, Token, Tokens
from tcemu.ptx.module import Function, Guard, Module, Operand, Prototype, Register, Statement, Symbol, Variable, Vector
from tcemu.ptx.operands import guard, operand
from tcemu.ptx.scopes import Scopes, blocks_of

_LINKAGE = (".visible", ".weak", ".extern", ".common")
_LISTS = {".branchtargets": "list of labels", ".calltargets": "list of functions", ".callprototype": "prototype"}
_NUMBERED = (
    "maxntid", "reqntid", "minnctapersm", "maxnctapersm", "maxnreg", "maxclusterrank", "reqnctapercluster", "explicitcluster",
    "blocksareclusters", "noreturn", "abi_preserve", "abi_preserve_control",
)  # fmt: skip


def parse(text: str) -> Module:
    """The module that PTX text says: entries, functions, registers, statements, labels and variables.

    All of PTX's syntax is read, as nvcc, Triton and CUTLASS write it; what an instruction does, and whether it is one, is not asked here.
    Raises PtxError, with line, column and the line of text, if the text is not PTX, if a name is declared twice in a scope or not at all,
    or if a register has a type that cannot stand where it does. Source: PTX ISA 9.0, sections 4, 5, 7 and 11.
    """
    tokens = Tokens(text)
    version, target, size = _header(tokens)
    return _File(tokens).read(Module(version, target, size, {}, (), text))


def _header(tokens: Tokens) -> tuple[tuple[int, int], str, int]:
    """`.version`, `.target` and `.address_size`."""
    if not tokens.accept_directive(".version"):
        raise tokens.unexpected(".version, with which a PTX file begins")
    number = tokens.expect(NUMBER, "a version, as 9.0")
    if not re.fullmatch(r"\d{1,3}\.\d{1,3}", number.text):
        raise tokens.unexpected("a version, as 9.0", number)
    major, minor = map(int, number.text.split("."))
    if not tokens.accept_directive(".target"):
        raise tokens.unexpected(".target")
    target = tokens.expect(NAME, "a target, as sm_90a").text
    while tokens.accept(","):
        tokens.expect(NAME, "an option of the target, as debug")
    size = 32
    if tokens.accept_directive(".address_size"):
        at = tokens.token
        size = integer(tokens, "32 or 64")
        if size not in (32, 64):
            raise tokens.unexpected("32 or 64", at)
    return (major, minor), target, size


class _File:
    """A file that is being read."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens, self.scopes = tokens, Scopes(tokens)
        self.functions: dict[str, Function] = {}
        self.variables: dict[str, Variable] = {}
        self.names = _outer_names(tokens)

    def read(self, module: Module) -> Module:
        """The module with everything in the file."""
        while self.tokens.token.kind != END:
            self._item()
        return replace(module, functions=self.functions, variables=tuple(self.variables.values()))

    def _item(self) -> None:
        """One thing of the file."""
        tokens = self.tokens
        linkage = {token.text for token in iter(lambda: tokens.accept_directive(*_LINKAGE), None)}
        token = tokens.expect(DIRECTIVE, "a directive, as .entry, .func or .global")
        if token.text in (".entry", ".func"):
            self._function(token, extern=".extern" in linkage)
        elif token.text in (".global", ".const", ".shared"):
            self._variables(token.text[1:], extern=".extern" in linkage)
        elif linkage or not skipped(tokens, token):
            if token.text == ".alias" and not linkage:
                self._alias()
            elif token.text in (".local", ".reg", ".param"):
                raise tokens.wrong(f"{token.text} is declared within a function; a file has .global, .const and .shared variables", token)
            else:
                raise tokens.unexpected("a directive of a file, as .entry, .func, .global, .const or .shared", token)

    def _variables(self, space: str, *, extern: bool) -> None:
        """A declaration of variables. One that was declared .extern may follow."""
        for variable in variables(self.tokens, self.scopes, space, extern=extern):
            self.variables[variable.name] = variable

    def _alias(self) -> None:
        """`.alias other, name;`: a function by two names."""
        tokens = self.tokens
        alias = tokens.expect(NAME, "the name of a function")
        tokens.expect(",")
        name = tokens.expect(NAME, "the name of a function")
        tokens.expect(";")
        for token in (alias, name):
            if token.text not in self.functions:
                raise tokens.wrong(f"{token.text} is not a function that is declared here", token)
        self.functions[alias.text] = replace(self.functions[name.text], name=alias.text)

    def _function(self, kind: Token, *, extern: bool) -> None:
        """An entry or a function: a declaration, or a definition."""
        tokens, scopes = self.tokens, self.scopes.function(self.names)
        entry, body = kind.text == ".entry", _Body(tokens, scopes)
        if tokens.accept_directive(".attribute"):
            skip(tokens, "(", ")")
        results = body.parameters() if tokens.token.kind == "(" and not entry else ()
        token = tokens.expect(NAME, "the name of a function")
        parameters = body.parameters() if tokens.token.kind == "(" else ()
        directives = _directives(tokens)
        function = Function(token.text, entry, parameters, results, {}, (), (), {}, tokens.place(token), directives, defined=False)
        self._declare(token, function)
        if tokens.token.kind == "{" and not extern:
            self.functions[token.text] = body.read(function)
        else:
            tokens.expect(";", "';'" if extern else "'{' or ';'")

    def _declare(self, token: Token, function: Function) -> None:
        """The function's name; it may be declared often, always the same, and defined once."""
        tokens, older = self.tokens, self.functions.get(token.text)
        if older is None:
            self.scopes.declare(token, "function", token.text)
            self.functions[token.text] = function
            return
        if older.defined and tokens.token.kind == "{":
            raise tokens.wrong(f"{token.text} is defined twice; first in line {older.place.line}", token)
        if _signature(older) != _signature(function):
            raise tokens.wrong(f"{token.text} has other parameters or results in line {older.place.line}", token)


def _signature(function: Function) -> tuple[object, ...]:
    """What all declarations of a function have in common."""
    forms = [[(given.space, given.kind, given.shape) for given in side] for side in (function.parameters, function.results)]
    return function.entry, *forms


def _outer_names(tokens: Tokens) -> set[str]:
    """All names that stand outside brackets: those of functions and variables are among them."""
    depth, names = 0, set()
    for token in tokens.tokens:
        depth += (token.kind in ("{", "(")) - (token.kind in ("}", ")"))
        if token.kind == NAME and depth == 0:
            names.add(token.text)
    return names


def _directives(tokens: Tokens) -> dict[str, tuple[int, ...]]:
    """`.maxntid 128, 1, 1` and the like."""
    found: dict[str, tuple[int, ...]] = {}
    while token := tokens.accept(DIRECTIVE):
        if token.text == ".pragma":
            skipped(tokens, token)
            continue
        if token.text == ".attribute":
            skip(tokens, "(", ")")
            continue
        if token.text[1:] not in _NUMBERED:
            raise tokens.unexpected("a directive of a function, '{' or ';'", token)
        numbers = []
        while tokens.token.kind == NUMBER:
            numbers.append(integer(tokens))
            if not tokens.accept(","):
                break
        found[token.text[1:]] = tuple(numbers)
    return found


def skipped(tokens: Tokens, token: Token) -> bool:
    """Whether the directive is one that says nothing of what the file computes; it is read over."""
    if token.text == ".pragma":
        tokens.expect(STRING)
        while tokens.accept(","):
            tokens.expect(STRING)
        tokens.expect(";")
    elif token.text == ".file":
        tokens.expect(NUMBER)
        tokens.expect(STRING)
        while tokens.accept(","):
            tokens.expect(NUMBER)
    elif token.text == ".section":
        if not tokens.accept(DIRECTIVE):
            tokens.expect(NAME, "the name of a section")
        skip(tokens, "{", "}")
    elif token.text == ".loc":
        _numbers(tokens, 3)
        while tokens.accept(","):
            word = tokens.expect(NAME, "function_name or inlined_at")
            if word.text == "inlined_at":
                _numbers(tokens, 3)
            else:
                tokens.expect(NAME, "a label")
                if tokens.accept("+"):
                    tokens.expect(NUMBER)
    else:
        return False
    return True


def _numbers(tokens: Tokens, count: int) -> None:
    for _ in range(count):
        tokens.expect(NUMBER)


@dataclass
class _Body:
    """A function that is being read."""

    tokens: Tokens
    scopes: Scopes
    registers: dict[str, str] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    call_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    prototypes: dict[str, Prototype] = field(default_factory=dict)

    def parameters(self, *, named: bool = True) -> tuple[Variable, ...]:
        """`(.param .u64 a, .reg .b32 b)`. named: else, as in a prototype, the names mean nothing."""
        tokens = self.tokens
        tokens.expect("(")
        found = []
        while tokens.token.kind != ")":
            space = tokens.accept_directive(".param", ".reg")
            if not space:
                raise tokens.unexpected("a parameter, which begins with .param or .reg, or ')'")
            found.append(self._register_parameter(named) if space.text == ".reg" else self._parameter(named))
            if not tokens.accept(","):
                break
        tokens.expect(")", "',' or ')'")
        return tuple(found)

    def _register_parameter(self, named: bool) -> Variable:
        """`.reg .b32 x`."""
        kind = type_of(self.tokens, {**TYPES, "pred": 1})
        token = self.tokens.expect(NAME, "the name of a register")
        name = register(self.tokens, self.scopes, self.registers, token, (kind, "")) if named else token.text
        return Variable(name, "reg", kind, (), max(1, {**TYPES, "pred": 8}[kind] // 8), self.tokens.place(token))

    def _parameter(self, named: bool) -> Variable:
        """`.param .align 8 .b8 x[16]`."""
        tokens = self.tokens
        given = head(tokens, "param")
        token = tokens.expect(NAME, "the name of a parameter")
        if "." in token.text or (named and token.text == "_"):
            raise tokens.wrong(f"{token.text} is no name of a parameter", token)
        shape = axes(tokens) + ((given.vector,) if given.vector else ())
        name = self.scopes.declare(token, "variable", token.text).name if named else token.text
        return Variable(name, "param", given.kind, shape, given.alignment, tokens.place(token))

    def read(self, function: Function) -> Function:
        """The function with its body, which begins at the next token. Blocks are followed by counting, so that none is too deep."""
        tokens = self.tokens
        first = tokens.token
        blocks, last = blocks_of(tokens)
        self.scopes.body(blocks)
        while True:
            if tokens.token.kind == "{":
                self.scopes.enter(tokens.at)
                tokens.take()
            elif tokens.token.kind == "}":
                self.scopes.leave()
                if tokens.at == last:
                    tokens.take()
                    break
                tokens.take()
            elif tokens.token.kind == END:
                raise tokens.wrong("this bracket is not closed", first)
            else:
                self._item()
        return replace(
            function, registers=self.registers, variables=tuple(self.variables), statements=tuple(self.statements), labels=self.labels,
            branch_targets=self.branch_targets, call_targets=self.call_targets, prototypes=self.prototypes, defined=True,
        )  # fmt: skip

    def _item(self) -> None:
        """A declaration, a label or an instruction."""
        tokens, token = self.tokens, self.tokens.token
        if token.kind == NAME and tokens.ahead().kind == ":":
            self._label()
        elif token.kind in (NAME, "@"):
            self.statements.append(self._statement(guard(tokens, self.scopes)))
        elif token.kind == DIRECTIVE:
            self._declaration(tokens.take())
        else:
            raise tokens.unexpected("an instruction, a label, a declaration or '}'")

    def _declaration(self, token: Token) -> None:
        """What begins with a directive."""
        tokens, extern = self.tokens, False
        if token.text == ".extern":
            extern, token = True, tokens.expect(DIRECTIVE, ".shared")
        if token.text == ".reg" and not extern:
            registers(tokens, self.scopes, self.registers)
        elif token.text[1:] in SPACES:
            self.variables += variables(tokens, self.scopes, token.text[1:], extern=extern)
        elif extern or not skipped(tokens, token):
            raise tokens.unexpected("an instruction, a label or a declaration, as .reg or .shared", token)

    def _label(self) -> None:
        """`L:`, or a list of labels or functions, or a prototype."""
        tokens, label = self.tokens, self.tokens.take()
        tokens.expect(":")
        made = tokens.accept_directive(*_LISTS)
        if not made:
            self.labels[self.scopes.known(label, "a label").name] = len(self.statements)
            return
        name = self.scopes.redeclare(label.text, _LISTS[made.text])
        if made.text == ".callprototype":
            results = self.parameters(named=False) if tokens.token.kind == "(" else ()
            tokens.expect(NAME, "'_'")
            given = self.parameters(named=False) if tokens.token.kind == "(" else ()
            self.prototypes[name] = Prototype(results, given, "noreturn" in _directives(tokens))
        else:
            wanted = "label" if made.text == ".branchtargets" else "function"
            targets = [self._target(wanted)]
            while tokens.accept(","):
                targets.append(self._target(wanted))
            (self.branch_targets if wanted == "label" else self.call_targets)[name] = tuple(targets)
        tokens.expect(";")

    def _target(self, wanted: str) -> str:
        """The name of a label or a function."""
        token = self.tokens.expect(NAME, f"a {wanted}")
        meaning = self.scopes.known(token, f"a {wanted}")
        if meaning.what != wanted:
            raise self.tokens.wrong(f"{token.text} is a {meaning.what}, not a {wanted}", token)
        return meaning.name

    def _statement(self, before: Guard | None) -> Statement:
        """An instruction with its operands."""
        tokens = self.tokens
        token = tokens.expect(NAME, "an instruction")
        opcode = token.text
        while more := tokens.accept(DIRECTIVE):  # "ld .global .u32" is "ld.global.u32"
            opcode += more.text
        operands: tuple[Operand, ...] = ()
        if opcode.partition(".")[0] == "call":
            operands = self._call()
        elif tokens.token.kind != ";":
            found = [operand(tokens, self.scopes)]
            while tokens.accept(","):
                found.append(operand(tokens, self.scopes))
            operands = tuple(found)
        tokens.expect(";", "',' or ';'" if operands else "an operand or ';'")
        return Statement(opcode, operands, before, tokens.place(token))

    def _call(self) -> tuple[Operand, ...]:
        """`call (result), name, (arguments), prototype`; all but the name may be missing."""
        tokens = self.tokens
        results = self._arguments() if tokens.token.kind == "(" else Vector(())
        if results.elements or tokens.token.kind == ",":
            tokens.expect(",")
        token = tokens.token
        callee = operand(tokens, self.scopes)
        named = isinstance(callee, Symbol) and not callee.offset and self.scopes.known(token, "").what == "function"
        if not (named or isinstance(callee, Register)):
            raise tokens.wrong(f"{token.text} is neither a function that is declared here nor a register with the address of one", token)
        given, more = Vector(()), ()
        if tokens.accept(","):
            given = self._arguments() if tokens.token.kind == "(" else None
            if given is None or tokens.accept(","):
                more = (Symbol(self._listed()),)
        return (results, callee, given or Vector(()), *more)

    def _listed(self) -> str:
        """The prototype or the list of functions of an indirect call."""
        token = self.tokens.expect(NAME, "a prototype, or a list of functions")
        meaning = self.scopes.known(token, "a prototype, or a list of functions")
        if meaning.what not in ("prototype", "list of functions"):
            raise self.tokens.wrong(f"{token.text} is a {meaning.what}, not a prototype or a list of functions", token)
        return meaning.name

    def _arguments(self) -> Vector:
        """`(a, b)`."""
        tokens = self.tokens
        tokens.expect("(")
        found = []
        while tokens.token.kind != ")":
            found.append(operand(tokens, self.scopes))
            if not tokens.accept(","):
                break
        tokens.expect(")", "',' or ')'")
        return Vector(tuple(found))
