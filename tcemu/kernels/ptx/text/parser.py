"""Parser of PTX: the file, functions, statements and operands (PTX ISA, sections 4, 5, 7 and 11)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from tcemu.kernels.ptx.text.constant_expressions import parse_constant, parse_integer, starts_constant
from tcemu.kernels.ptx.text.declarations import (
    SPACES,
    TYPES,
    declare_register,
    declare_registers,
    parse_axes,
    parse_head,
    parse_type,
    parse_variables,
    skip_brackets,
)
from tcemu.kernels.ptx.text.lexer import DIRECTIVE, END, NAME, NUMBER, STRING, Token, Tokens
from tcemu.kernels.ptx.text.module import (
    SPECIAL_REGISTERS,
    Address,
    Function,
    Guard,
    Module,
    Negated,
    Operand,
    Pair,
    Part,
    Prototype,
    Register,
    Sink,
    Statement,
    Symbol,
    Variable,
    Vector,
)
from tcemu.kernels.ptx.text.scopes import Scopes, find_blocks

_LINKAGE = (".visible", ".weak", ".extern", ".common")
_LABEL_LISTS = {".branchtargets": "list of labels", ".calltargets": "list of functions", ".callprototype": "prototype"}
_NUMBER_DIRECTIVES = (
    "maxntid", "reqntid", "minnctapersm", "maxnctapersm", "maxnreg", "maxclusterrank", "reqnctapercluster", "explicitcluster",
    "blocksareclusters", "noreturn", "abi_preserve", "abi_preserve_control",
)  # fmt: skip
_MAX_VECTOR_DEPTH = 8  # nesting of vectors
_OPERAND_FORMS = "a register, a constant, the name of a variable, a label, '{' or '['"
_ELEMENT_AXES = {**{axis: axis for axis in "xyzw"}, **dict(zip("rgba", "xyzw", strict=True))}
VIDEO = re.compile(r"v(add|sub|absdiff|min|max|shl|shr|mad|set|avrg)[24]?(\.|$)")  # opcodes whose operands may be parts of registers
SELECTOR = re.compile(r"[bh][0-7]{1,4}")
_ADDRESS_TYPES = {f"{sign}{bits}" for sign in "bus" for bits in (32, 64)}


def parse(text: str) -> Module:
    """Parse PTX text: entries, functions, registers, statements, labels and variables.

    The whole syntax of PTX is accepted, as nvcc, Triton and CUTLASS write it. Opcodes are not checked; `run` checks them.

    Args:
        text: PTX text.

    Returns:
        The module. `str` of it is PTX that parses to an equal module.

    Raises:
        PtxError: The text is not PTX, a name is declared twice in a scope or not at all, or a register has a wrong
            type; with line, column and the line of text.

    Source: PTX ISA 9.0, sections 4, 5, 7 and 11.
    """
    tokens = Tokens(text)
    version, target, size = _parse_header(tokens)
    return _FileParser(tokens).parse_file(Module(version, target, size, {}, (), text))


def _parse_header(tokens: Tokens) -> tuple[tuple[int, int], str, int]:
    """Parse `.version`, `.target` and `.address_size`."""
    if not tokens.accept_directive(".version"):
        raise tokens.unexpected(".version at the beginning of the file")
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
        size = parse_integer(tokens, "32 or 64")
        if size not in (32, 64):
            raise tokens.unexpected("32 or 64", at)
    return (major, minor), target, size


class _FileParser:
    """The parser of a file."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens, self.scopes = tokens, Scopes(tokens)
        self.functions: dict[str, Function] = {}
        self.variables: dict[str, Variable] = {}
        self.names = _outer_names(tokens)

    def parse_file(self, module: Module) -> Module:
        """Parse the file into a module that has its header."""
        while self.tokens.token.kind != END:
            self._parse_item()
        return replace(module, functions=self.functions, variables=tuple(self.variables.values()))

    def _parse_item(self) -> None:
        """Parse a declaration, a function or a directive of the file."""
        tokens = self.tokens
        linkage = {token.text for token in iter(lambda: tokens.accept_directive(*_LINKAGE), None)}
        token = tokens.expect(DIRECTIVE, "a directive, as .entry, .func or .global")
        if token.text in (".entry", ".func"):
            self._parse_function(token, extern=".extern" in linkage)
        elif token.text in (".global", ".const", ".shared"):  # a definition may follow an .extern declaration of the variable
            declared = parse_variables(tokens, self.scopes, token.text[1:], extern=".extern" in linkage)
            self.variables |= {variable.name: variable for variable in declared}
        elif linkage or not skip_directive(tokens, token):
            if token.text == ".alias" and not linkage:
                self._parse_alias()
            elif token.text in (".local", ".reg", ".param"):
                raise tokens.error(
                    f"{token.text} is only declared within a function; a file has .global, .const and .shared variables", token
                )
            else:
                raise tokens.unexpected("a directive of a file, as .entry, .func, .global, .const or .shared", token)

    def _parse_alias(self) -> None:
        """Parse `.alias other, name;`: a second name of a function."""
        tokens = self.tokens
        alias = tokens.expect(NAME, "the name of a function")
        tokens.expect(",")
        name = tokens.expect(NAME, "the name of a function")
        tokens.expect(";")
        for token in (alias, name):
            if token.text not in self.functions:
                raise tokens.error(f"{token.text} is not a function that is declared here", token)
        self.functions[alias.text] = replace(self.functions[name.text], name=alias.text)

    def _parse_function(self, kind: Token, *, extern: bool) -> None:
        """Parse the declaration or the definition of an entry or a function."""
        tokens, scopes = self.tokens, self.scopes.enter_function(self.names)
        entry, body = kind.text == ".entry", _FunctionParser(tokens, scopes)
        if tokens.accept_directive(".attribute"):
            skip_brackets(tokens, "(", ")")
        results = body.parse_parameters() if tokens.token.kind == "(" and not entry else ()
        token = tokens.expect(NAME, "the name of a function")
        parameters = body.parse_parameters() if tokens.token.kind == "(" else ()
        directives = _parse_directives(tokens)
        function = Function(token.text, entry, parameters, results, {}, (), (), {}, tokens.position(token), directives, defined=False)
        self._declare(token, function)
        if tokens.token.kind == "{" and not extern:
            self.functions[token.text] = body.parse_body(function)
        else:
            tokens.expect(";", "';'" if extern else "'{' or ';'")

    def _declare(self, token: Token, function: Function) -> None:
        """Declare a function. It may be declared several times in the same form, and defined once."""
        tokens, older = self.tokens, self.functions.get(token.text)
        if older is None:
            self.scopes.declare(token, "function", token.text)
            self.functions[token.text] = function
            return
        if older.defined and tokens.token.kind == "{":
            raise tokens.error(f"{token.text} is defined twice; first in line {older.position.line}", token)
        if _declared_form(older) != _declared_form(function):
            raise tokens.error(f"{token.text} has other parameters or results in line {older.position.line}", token)


def _declared_form(function: Function) -> tuple[object, ...]:
    """Return the form that all declarations of a function must share."""
    forms = [[(given.space, given.kind, given.shape) for given in side] for side in (function.parameters, function.results)]
    return function.entry, *forms


def _outer_names(tokens: Tokens) -> set[str]:
    """Return all names outside brackets, which include those of functions and variables."""
    depth, names = 0, set()
    for token in tokens.tokens:
        depth += (token.kind in ("{", "(")) - (token.kind in ("}", ")"))
        if token.kind == NAME and depth == 0:
            names.add(token.text)
    return names


def _parse_directives(tokens: Tokens) -> dict[str, tuple[int, ...]]:
    """Parse directives of a function, as `.maxntid 128, 1, 1`."""
    found: dict[str, tuple[int, ...]] = {}
    while token := tokens.accept(DIRECTIVE):
        if token.text == ".pragma":
            skip_directive(tokens, token)
            continue
        if token.text == ".attribute":
            skip_brackets(tokens, "(", ")")
            continue
        if token.text[1:] not in _NUMBER_DIRECTIVES:
            raise tokens.unexpected("a directive of a function, '{' or ';'", token)
        numbers = []
        while tokens.token.kind == NUMBER:
            numbers.append(parse_integer(tokens))
            if not tokens.accept(","):
                break
        found[token.text[1:]] = tuple(numbers)
    return found


def skip_directive(tokens: Tokens, token: Token) -> bool:
    """Skip a directive that does not change what the file computes; return False for any other directive."""
    if token.text == ".pragma":
        tokens.parse_list(lambda: tokens.expect(STRING))
        tokens.expect(";")
    elif token.text == ".file":
        tokens.expect(NUMBER)
        tokens.expect(STRING)
        while tokens.accept(","):
            tokens.expect(NUMBER)
    elif token.text == ".section":
        if not tokens.accept(DIRECTIVE):
            tokens.expect(NAME, "the name of a section")
        skip_brackets(tokens, "{", "}")
    elif token.text == ".loc":
        parse_location(tokens)
    else:
        return False
    return True


def parse_location(tokens: Tokens) -> str:
    """Parse the rest of a `.loc`; return the line of the source, and where it is inlined, in words; "" if no `.file` has the file."""
    places = [_parse_place(tokens)]
    while tokens.accept(","):
        word = tokens.expect(NAME, "function_name or inlined_at")
        if word.text == "inlined_at":
            places.append(_parse_place(tokens))
        else:
            tokens.expect(NAME, "a label")
            if tokens.accept("+"):
                tokens.expect(NUMBER)
    return ", inlined at ".join(filter(None, places))


def _parse_place(tokens: Tokens) -> str:
    """Parse file, line and column of a source."""
    file, line, _ = (tokens.expect(NUMBER).text for _ in range(3))
    name = tokens.files.get(file)
    return f"{name}:{line}" if name and line != "0" else ""  # compilers write line 0 for statements of their own


@dataclass
class _FunctionParser:
    """The parser of a function."""

    tokens: Tokens
    scopes: Scopes
    registers: dict[str, str] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    call_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    prototypes: dict[str, Prototype] = field(default_factory=dict)
    location: str = ""  # line of the source by the last `.loc`

    def parse_parameters(self, *, named: bool = True) -> tuple[Variable, ...]:
        """Parse `(.param .u64 a, .reg .b32 b)`. named: declare the names, which a prototype does not."""
        self.tokens.expect("(")
        return tuple(self.tokens.parse_list(lambda: self._parse_parameter(named), ")"))

    def _parse_parameter(self, named: bool) -> Variable:
        """Parse `.reg .b32 x` or `.param .align 8 .b8 x[16]`."""
        tokens = self.tokens
        space = tokens.accept_directive(".param", ".reg")
        if not space:
            raise tokens.unexpected("a parameter, which begins with .param or .reg, or ')'")
        if space.text == ".reg":
            kind = parse_type(tokens, {**TYPES, "pred": 1})
            token = tokens.expect(NAME, "the name of a register")
            name = declare_register(tokens, self.scopes, self.registers, token, (kind, "")) if named else token.text
            return Variable(name, "reg", kind, (), max(1, {**TYPES, "pred": 8}[kind] // 8), tokens.position(token))
        given = parse_head(tokens, "param")
        token = tokens.expect(NAME, "the name of a parameter")
        if "." in token.text or (named and token.text == "_"):
            raise tokens.error(f"{token.text} is not a valid name of a parameter", token)
        shape = parse_axes(tokens) + ((given.vector,) if given.vector else ())
        name = self.scopes.declare(token, "variable", token.text).name if named else token.text
        return Variable(name, "param", given.kind, shape, given.alignment, tokens.position(token))

    def parse_body(self, function: Function) -> Function:
        """Parse the body of a function, which begins at the next token. There is no recursion over blocks, so none is too deep."""
        tokens = self.tokens
        first = tokens.token
        blocks, last = find_blocks(tokens)
        self.scopes.blocks = blocks
        while True:
            if tokens.token.kind == "{":
                self.scopes.enter(tokens.index)
                tokens.take()
            elif tokens.token.kind == "}":
                self.scopes.leave()
                if tokens.index == last:
                    tokens.take()
                    break
                tokens.take()
            elif tokens.token.kind == END:
                raise tokens.error("this bracket is not closed", first)
            else:
                self._parse_item()
        return replace(
            function, registers=self.registers, variables=tuple(self.variables), statements=tuple(self.statements), labels=self.labels,
            branch_targets=self.branch_targets, call_targets=self.call_targets, prototypes=self.prototypes, defined=True,
        )  # fmt: skip

    def _parse_item(self) -> None:
        """Parse a declaration, a label or an instruction."""
        tokens, token = self.tokens, self.tokens.token
        if token.kind == NAME and tokens.peek().kind == ":":
            self._parse_label()
        elif token.kind in (NAME, "@"):
            self.statements.append(self._parse_statement(parse_guard(tokens, self.scopes)))
        elif token.kind == DIRECTIVE:
            self._parse_declaration(tokens.take())
        else:
            raise tokens.unexpected("an instruction, a label, a declaration or '}'")

    def _parse_declaration(self, token: Token) -> None:
        """Parse a declaration in a body."""
        tokens, extern = self.tokens, False
        if token.text == ".extern":
            extern, token = True, tokens.expect(DIRECTIVE, ".shared")
        if token.text == ".reg" and not extern:
            declare_registers(tokens, self.scopes, self.registers)
        elif token.text == ".loc" and not extern:
            self.location = parse_location(tokens)
        elif token.text[1:] in SPACES:
            self.variables += parse_variables(tokens, self.scopes, token.text[1:], extern=extern)
        elif extern or not skip_directive(tokens, token):
            raise tokens.unexpected("an instruction, a label or a declaration, as .reg or .shared", token)

    def _parse_label(self) -> None:
        """Parse `L:`, a list of labels or functions, or a prototype."""
        tokens, label = self.tokens, self.tokens.take()
        tokens.expect(":")
        made = tokens.accept_directive(*_LABEL_LISTS)
        if not made:
            self.labels[self.scopes.resolve(label, "a label").name] = len(self.statements)
            return
        name = self.scopes.redeclare(label.text, _LABEL_LISTS[made.text])
        if made.text == ".callprototype":
            results = self.parse_parameters(named=False) if tokens.token.kind == "(" else ()
            tokens.expect(NAME, "'_'")
            given = self.parse_parameters(named=False) if tokens.token.kind == "(" else ()
            self.prototypes[name] = Prototype(results, given, "noreturn" in _parse_directives(tokens))
        else:
            expected = "label" if made.text == ".branchtargets" else "function"
            targets = tokens.parse_list(lambda: self._parse_reference(f"a {expected}", expected))
            (self.branch_targets if expected == "label" else self.call_targets)[name] = tuple(targets)
        tokens.expect(";")

    def _parse_reference(self, expected: str, *categories: str) -> str:
        """Parse a name that is declared in one of these categories."""
        token = self.tokens.expect(NAME, expected)
        meaning = self.scopes.resolve(token, expected)
        if meaning.category not in categories:
            raise self.tokens.error(f"{token.text} is a {meaning.category}, not {expected}", token)
        return meaning.name

    def _parse_statement(self, guard: Guard | None) -> Statement:
        tokens = self.tokens
        token = tokens.expect(NAME, "an instruction")
        opcode = token.text
        while more := tokens.accept(DIRECTIVE):  # "ld .global .u32" is "ld.global.u32"
            opcode += more.text
        operands: tuple[Operand, ...] = ()
        if opcode.partition(".")[0] == "call":
            operands = self._parse_call()
        elif tokens.token.kind != ";":
            parse_each = parse_part if VIDEO.match(opcode) else parse_operand
            operands = tuple(tokens.parse_list(lambda: parse_each(tokens, self.scopes)))
        tokens.expect(";", "',' or ';'" if operands else "an operand or ';'")
        return Statement(opcode, operands, guard, tokens.position(token), self.location)

    def _parse_call(self) -> tuple[Operand, ...]:
        """Parse `(result), name, (arguments), prototype` of a call; all but the name may be missing."""
        tokens = self.tokens
        results = self._parse_arguments() if tokens.token.kind == "(" else Vector(())
        if results.elements or tokens.token.kind == ",":
            tokens.expect(",")
        token = tokens.token
        callee = parse_operand(tokens, self.scopes)
        named = isinstance(callee, Symbol) and not callee.offset and self.scopes.resolve(token, "").category == "function"
        if not (named or isinstance(callee, Register)):
            raise tokens.error(f"{token.text} is neither a function that is declared here nor a register with the address of one", token)
        given, more = Vector(()), ()
        if tokens.accept(","):
            given = self._parse_arguments() if tokens.token.kind == "(" else None
            if given is None or tokens.accept(","):
                more = (Symbol(self._parse_reference("a prototype, or a list of functions", "prototype", "list of functions")),)
        return (results, callee, given or Vector(()), *more)

    def _parse_arguments(self) -> Vector:
        """Parse `(a, b)`."""
        self.tokens.expect("(")
        return Vector(tuple(self.tokens.parse_list(lambda: parse_operand(self.tokens, self.scopes), ")")))


# ---- operands


def parse_operand(tokens: Tokens, scopes: Scopes, depth: int = 0) -> Operand:
    """Parse an operand."""
    token = tokens.token
    if token.kind == NAME and token.text != "WARP_SZ":
        first = _parse_named(tokens, scopes)
        if tokens.accept("|"):
            return Pair(_check_destination(tokens, first, token), _check_destination(tokens, _parse_named(tokens, scopes), tokens.token))
        return first
    if token.kind == "[":
        return parse_address(tokens, scopes)
    if token.kind == "{":
        return parse_vector(tokens, scopes, depth)
    if token.kind == "!" and tokens.peek().kind == NAME:
        tokens.take()
        name = tokens.expect(NAME, "a predicate register")
        return Negated(Register(_parse_predicate(tokens, scopes, name)))
    if token.kind == "!" or starts_constant(token):
        return parse_constant(tokens)
    raise tokens.unexpected(_OPERAND_FORMS)


def parse_part(tokens: Tokens, scopes: Scopes) -> Operand:
    """Parse an operand of a video instruction, which may be a part of a register, or negated."""
    negated = tokens.token.kind == "-" and tokens.peek().kind == NAME
    if negated:
        tokens.take()
    token = tokens.token
    stem, _, selector = token.text.partition(".")
    meaning = scopes.find(stem) if token.kind == NAME else None
    if meaning is None or meaning.category != "register" or not (negated or SELECTOR.fullmatch(selector)):
        return parse_operand(tokens, scopes)
    tokens.take()
    if selector and not SELECTOR.fullmatch(selector):
        raise tokens.error(
            f"{token.text} is no part of a register; parts are .b0 to .b3, .h0, .h1 and, of packed instructions, several", token
        )
    return Part(Register(meaning.name), selector, negated)


def parse_guard(tokens: Tokens, scopes: Scopes) -> Guard | None:
    """Parse `@p` or `@!p`; None if there is no guard."""
    if not tokens.accept("@"):
        return None
    negated = tokens.accept("!") is not None
    return Guard(_parse_predicate(tokens, scopes, tokens.expect(NAME, "a predicate register")), negated)


def parse_vector(tokens: Tokens, scopes: Scopes, depth: int = 0) -> Vector:
    """Parse `{a, b, ...}`, with at least one element."""
    if depth >= _MAX_VECTOR_DEPTH:
        raise tokens.error(f"vectors are nested deeper than {_MAX_VECTOR_DEPTH}")
    tokens.expect("{")
    elements = tokens.parse_list(lambda: parse_operand(tokens, scopes, depth + 1))
    tokens.expect("}", "',' or '}'")
    return Vector(tuple(elements))


def parse_address(tokens: Tokens, scopes: Scopes) -> Address:
    """Parse `[base+offset]`, with coordinates for a tensor copy."""
    tokens.expect("[")
    base, offset, name = None, 0, tokens.token
    if name.kind == NAME and name.text != "WARP_SZ":
        tokens.take()
        base = _parse_base(tokens, scopes, name)
        if tokens.token.kind in "+-":
            sign = -1 if tokens.take().kind == "-" else 1
            offset = sign * parse_integer(tokens, "an offset in bytes")
    else:
        offset = parse_integer(tokens, "a register, the name of a variable, or an integer")
    coordinates = parse_vector(tokens, scopes) if tokens.accept(",") else None
    tokens.expect("]", "'+', ',' or ']'" if base else "',' or ']'")
    return Address(base, offset, coordinates)


def _parse_base(tokens: Tokens, scopes: Scopes, token: Token) -> Register | Symbol:
    """Return the register or symbol with which an address begins."""
    found = _resolve_name(tokens, scopes, token, "a register or the name of a variable")
    if isinstance(found, Register):
        kind = _register_kind(scopes, token)
        if kind not in _ADDRESS_TYPES:
            raise tokens.error(f"{token.text} is a register of .{kind}; an address has 32 or 64 bits, as .b64, .u64 or .s64", token)
        return found
    what = scopes.resolve(token, "").category
    if isinstance(found, Symbol) and what in ("variable", "function"):
        return found
    raise tokens.error(f"{token.text} is a {what}; an address begins with a register or a variable", token)


def _parse_named(tokens: Tokens, scopes: Scopes) -> Operand:
    """Parse an operand that is a name, with an offset."""
    token = tokens.expect(NAME, "a register")
    if token.text == "_":
        return Sink()
    found = _resolve_name(tokens, scopes, token, _OPERAND_FORMS)
    if isinstance(found, Symbol) and tokens.accept("+"):
        return Symbol(found.name, parse_integer(tokens, "what is added to the address"))
    return found


def _resolve_name(tokens: Tokens, scopes: Scopes, token: Token, expected: str) -> Register | Vector | Symbol:
    text = token.text
    if text in SPECIAL_REGISTERS:
        return Register(text)
    stem, dot, axis = text.partition(".")
    if dot:
        return _vector_element(tokens, scopes, token, stem, axis)
    meaning = scopes.resolve(token, expected)
    if meaning.category == "register":
        return Register(meaning.name)
    return Vector(meaning.elements) if meaning.category == "vector" else Symbol(meaning.name)


def _vector_element(tokens: Tokens, scopes: Scopes, token: Token, stem: str, axis: str) -> Register:
    """Return `V.x`, an element of a vector register."""
    meaning = scopes.find(stem)
    if meaning is None and f"{stem}.x" in SPECIAL_REGISTERS:
        raise tokens.error(f"{stem} has .x, .y, .z and .w, but no .{axis}", token)
    if meaning is None:
        raise tokens.error(f"{stem} is not declared here, and PTX declares a name before its use", token)
    for element in meaning.elements:
        if element.name.endswith(f".{_ELEMENT_AXES.get(axis, '?')}"):
            return element
    has = ", ".join(element.name.rpartition(".")[2] for element in meaning.elements)
    why = f"its elements are {has}" if has else f"it is a {meaning.category}, and only vector registers (.v2, .v4) have elements"
    raise tokens.error(f"{stem} has no element .{axis}: {why}", token)


def _register_kind(scopes: Scopes, token: Token) -> str:
    """Return the type of a register, or "" for any other name."""
    if token.text in SPECIAL_REGISTERS:
        return SPECIAL_REGISTERS[token.text]
    meaning = scopes.find(token.text.partition(".")[0])
    return meaning.kind if meaning else ""


def _parse_predicate(tokens: Tokens, scopes: Scopes, token: Token) -> str:
    """Return the name of a predicate register."""
    found = _resolve_name(tokens, scopes, token, "a predicate register")
    kind = _register_kind(scopes, token)
    if isinstance(found, Register) and kind == "pred":
        return found.name
    is_what = f"a register of .{kind}" if isinstance(found, Register) else f"a {scopes.resolve(token, '').category}"
    raise tokens.error(f"{token.text} is {is_what}; a register of .pred is expected here", token)


def _check_destination(tokens: Tokens, found: Operand, token: Token) -> Operand:
    """Check one of the two destinations of `p|q`."""
    if not isinstance(found, Register | Sink):
        raise tokens.error("both of p|q are registers, or '_'", token)
    return found
