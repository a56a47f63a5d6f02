"""Mutations: a file's text with one small fault. Each follows from the text alone and has a name that moves of lines do not change."""

import ast
import difflib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Mutant(NamedTuple):
    """A file with one fault."""

    path: str  # of the file, from the root of the repository
    place: str  # the function or class that holds the fault; "" outside of all
    line: int
    column: int
    kind: str
    before: str  # what is replaced, on one line
    after: str
    number: int  # among those that are equal in all of this but the line and the column
    start: int  # bytes of the file's text
    stop: int
    text: str  # what stands there instead
    first_line: int  # of the statement that holds the fault, without the statements within it
    last_line: int
    is_executed_by_import: bool  # the fault is in no function's body

    @property
    def name(self) -> str:
        """The identity, which does not change where lines move."""
        count = f" #{self.number}" if self.number else ""
        return f"{self.path} {self.place or '(module)'}: {self.before} -> {self.after}{count}"

    def source(self) -> str:
        """The file's text with the fault."""
        whole = (ROOT / self.path).read_bytes()
        return (whole[: self.start] + self.text.encode() + whole[self.stop :]).decode()

    def diff(self) -> str:
        lines = ((ROOT / self.path).read_text().splitlines(), self.source().splitlines())
        changed = [line for line in difflib.unified_diff(*lines, n=0, lineterm="") if line[:3] not in ("---", "+++") and line[:2] != "@@"]
        return "\n".join([f"{self.path}:{self.line}:{self.column}: {self.kind}, in {self.place or 'the module'}", *changed])


class Fault(NamedTuple):
    """One change of a text, before it has a name."""

    start: int
    stop: int
    text: str
    kind: str


class Place(NamedTuple):
    """Where in a module a fault is."""

    name: str  # of the function or class; "" outside of all
    in_function: bool
    lines: tuple[int, int]  # of the statement


NOWHERE = Place("", False, (0, 0))


OPERATORS = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.BitXor: ("^", "|"),
    ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"), ast.Mult: ("*", None), ast.Pow: ("**", None), ast.Div: ("/", None),
    ast.FloorDiv: ("//", None), ast.Mod: ("%", None),
}  # fmt: skip
ORDERED = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod)  # operators whose operands are swapped; a shift's direction is changed instead
COMPARISONS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="),
}  # fmt: skip
METHODS = {"max": "min", "min": "max", "maximum": "minimum", "minimum": "maximum"}
NAMES = {  # strings that mean an operation, a rounding or a kind of format
    "RN": "RZ", "RZ": "RN", "RM": "RP", "RP": "RM", "add": "sub", "sub": "add", "and": "or", "or": "and", "xor": "or", "shl": "lshr",
    "lshr": "ashr", "ashr": "lshr", "eq": "ne", "ne": "eq", "lt": "le", "le": "lt", "max": "min", "min": "max", "sext": "zext",
    "zext": "sext", "sitofp": "uitofp", "uitofp": "sitofp", "smax": "smin", "smin": "smax", "ieee": "nan", "nan": "fnuz",
}  # fmt: skip
DROPPED_CALLS = ("cut", "max", "min", "maximum", "minimum")  # f(x, y) becomes x


class _Faults:
    """The faults of one module of Python."""

    def __init__(self, whole: bytes) -> None:
        self.whole, self.tree = whole, ast.parse(whole)
        self.lines = [0]
        for line in whole.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        at = lambda line, column: self.lines[line - 1] + column
        return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def text(self, node: ast.AST) -> str:
        start, stop = self.span(node)
        text = self.whole[start:stop].decode()
        return text if isinstance(node, ast.Name | ast.Constant | ast.Call | ast.Attribute | ast.Subscript) else f"({text})"

    def replace(self, node: ast.AST, text: str, kind: str) -> Fault:
        return Fault(*self.span(node), text, kind)

    def all(self) -> Iterator[tuple[Place, Fault]]:
        """(place, fault), in the order of the text."""
        yield from self._visit(self.tree, NOWHERE)

    def _visit(self, node: ast.AST, place: Place) -> Iterator[tuple[Place, Fault]]:
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            place = place._replace(lines=(node.lineno, max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno))
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            place = place._replace(name=f"{place.name}.{node.name}" if place.name else node.name)
            parts: list[ast.AST] = list(node.body)
            if isinstance(node, ast.FunctionDef):
                for part in (*node.args.defaults, *node.args.kw_defaults):
                    if part is not None:
                        yield from self._visit(part, place)
                place = place._replace(in_function=True)
        elif isinstance(node, ast.Import | ast.ImportFrom | ast.Assert | ast.JoinedStr | ast.Raise | ast.arguments):
            return  # asserts and errors compute nothing; defaults are visited above
        elif isinstance(node, ast.If) and _text_of(node.test) in ("TYPE_CHECKING",):
            return
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return  # a docstring
        elif isinstance(node, ast.AnnAssign):
            parts = [node.value] if node.value else []
        elif isinstance(node, ast.Subscript):
            parts = [node.value, node.slice] if not isinstance(node.ctx, ast.Store) else []
        else:
            parts = list(ast.iter_child_nodes(node))
        for fault in self._of_node(node):
            yield place, fault
        for part in parts:
            yield from self._visit(part, place)

    def _of_node(self, node: ast.AST) -> Iterator[Fault]:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(node.value)):
                yield self.replace(node.value, name, "dropped assignment")
        elif isinstance(node, ast.Constant):
            yield from self._of_constant(node)
        elif isinstance(node, ast.BinOp):
            yield from self._of_operator(node)
        elif isinstance(node, ast.BoolOp):
            joint = " and " if isinstance(node.op, ast.And) else " or "
            for at in range(len(node.values)):
                yield self.replace(node, joint.join(self.text(v) for i, v in enumerate(node.values) if i != at), "dropped condition")
        elif isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):
            yield self.replace(node, self.text(node.operand), "dropped sign" if isinstance(node.op, ast.USub) else "dropped inversion")
        elif isinstance(node, ast.Compare) and type(node.ops[-1]) in COMPARISONS:
            parts = [node.left, *node.comparators]
            for at, op in enumerate(node.ops):
                if type(op) in COMPARISONS:
                    ops = [COMPARISONS[type(o)][i == at] if type(o) in COMPARISONS else "is" for i, o in enumerate(node.ops)]
                    text = self.text(parts[0]) + "".join(f" {o} {self.text(v)}" for o, v in zip(ops, parts[1:], strict=True))
                    yield self.replace(node, text, "comparison")
        elif isinstance(node, ast.IfExp):
            text = f"{self.text(node.orelse)} if {self.text(node.test)} else {self.text(node.body)}"
            yield self.replace(node, text, "swapped branches")
        elif isinstance(node, ast.If):
            yield self.replace(node.test, f"not {self.text(node.test)}", "negated condition")
        elif isinstance(node, ast.Call):
            yield from self._of_call(node)

    def _of_constant(self, node: ast.Constant) -> Iterator[Fault]:
        value, text = node.value, self.whole[slice(*self.span(node))].decode()
        if isinstance(value, bool):
            yield self.replace(node, str(not value), "truth")
        elif isinstance(value, int):
            yield self.replace(node, str(value + 1), "constant + 1")
            yield self.replace(node, f"({value - 1})", "constant - 1")
            if text.startswith("0x"):
                yield self.replace(node, hex(value ^ 1 << value.bit_length() - 1), "bit of a mask")
        elif isinstance(value, float) and value:
            yield self.replace(node, f"({2 * value!r})", "constant doubled")
        elif isinstance(value, str) and value in NAMES:
            yield self.replace(node, repr(NAMES[value]), "name")

    def _of_operator(self, node: ast.BinOp) -> Iterator[Fault]:
        left, right = self.text(node.left), self.text(node.right)
        own, other = OPERATORS[type(node.op)]
        if other is not None and not isinstance(node.left, ast.List):
            yield self.replace(node, f"{left} {other} {right}", "operator")
        if isinstance(node.op, ORDERED):
            yield self.replace(node, f"{right} {own} {left}", "swapped operands")
        if isinstance(node.op, ast.LShift | ast.RShift) and not isinstance(node.right, ast.Constant):
            yield self.replace(node.right, f"({right} + 1)", "amount + 1")
        if isinstance(node.op, ast.BitAnd | ast.BitOr):
            yield self.replace(node, left, "dropped right operand")
            if any(isinstance(part, ast.Compare) for part in ast.walk(node)) or isinstance(node.right, ast.Name):
                yield self.replace(node, right, "dropped left operand")

    def _of_call(self, node: ast.Call) -> Iterator[Fault]:
        function, given = node.func, [self.text(v) for v in node.args]
        name = function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
        of_value = isinstance(function, ast.Attribute) and len(given) == 1  # x.max(y)
        if name == "select" and len(given) == 2 and isinstance(function, ast.Attribute):
            yield self.replace(node, f"{self.text(function)}({given[1]}, {given[0]})", "swapped operands")
        if name == "shift_right_signed" and isinstance(function, ast.Attribute):
            yield self.replace(node, f"({self.text(function.value)} >> {given[0]})", "shift without sign")
        if name in METHODS:
            _, stop = self.span(function)
            yield Fault(stop - len(name), stop, METHODS[name], "max and min")
        if name in DROPPED_CALLS and given:
            kept = self.text(function.value) if of_value and isinstance(function, ast.Attribute) else given[0]
            if kept != "self" and not (len(given) == 1 and not of_value):
                yield self.replace(node, kept, "dropped call")


def _text_of(node: ast.AST) -> str:
    return ast.unparse(node)


def _on_one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text.strip())


def python_mutants(path: str) -> list[Mutant]:
    """The mutants of a module of Python, in the order of its text. path: from the root of the repository."""
    whole = (ROOT / path).read_bytes()
    faults = _Faults(whole)
    return _named(path, whole, list(faults.all()))


def _named(path: str, whole: bytes, faults: list[tuple[Place, Fault]]) -> list[Mutant]:
    """Faults with names. Only the first of two that give the same text is kept."""
    found: list[Mutant] = []
    counts: Counter[tuple[str, ...]] = Counter()
    seen: set[tuple[int, int, str]] = set()
    for place, fault in sorted(faults, key=lambda v: (v[1].start, v[1].stop)):
        if fault[:3] in seen or whole[fault.start : fault.stop].decode() == fault.text:
            continue
        seen.add(fault[:3])
        before, after = _shown(whole, fault)
        key = place.name, before, after
        line = whole.count(b"\n", 0, fault.start) + 1
        column = fault.start - (whole.rfind(b"\n", 0, fault.start) + 1) + 1
        is_executed_by_import = not place.in_function
        found.append(
            Mutant(path, place.name, line, column, fault.kind, before, after, counts[key], *fault[:3], *place.lines, is_executed_by_import)
        )
        counts[key] += 1
    return found


def _shown(whole: bytes, fault: Fault) -> tuple[str, str]:
    """What the name of a fault shows: its lines, before and after."""
    first, last = whole.rfind(b"\n", 0, fault.start) + 1, whole.find(b"\n", fault.stop)
    after = whole[first : fault.start] + fault.text.encode() + whole[fault.stop : last]
    return _on_one_line(whole[first:last].decode()), _on_one_line(after.decode())


# ---- CUDA C++

TOKEN = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"[^\"]*\"|^[ ]*#[^\n]*|0x[0-9A-Fa-f]+[uU]?[lL]*|\d+\.\d+[fF]?|\d+[uU]?[lL]*|[A-Za-z_]\w*"
    r"|<<=|>>=|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|\+\+|--|->|\S",
    re.MULTILINE | re.DOTALL,
)
CPP_OPERATORS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+", "&": "|", "|": "&", "^": "|", "<<": ">>",
    ">>": "<<", "&&": "||", "||": "&&", "+=": "-=", "-=": "+=", "|=": "&=", "&=": "|=",
}  # fmt: skip
CPP_COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
CPP_NAMES = {"max": "min", "min": "max", "true": "false", "false": "true"}
OPERAND = re.compile(r"[A-Za-z_]\w*|\d\w*")


def cuda_mutants(path: str) -> list[Mutant]:
    """The mutants of a file of CUDA C++, in the order of its text: constants, operators that have spaces around, operands, max and min."""
    whole = (ROOT / path).read_bytes()
    text = whole.decode("latin-1")  # a character for each byte
    tokens = [match for match in TOKEN.finditer(text) if not match[0].lstrip().startswith(("//", "/*", '"', "#"))]
    faults: list[tuple[Place, Fault]] = []
    place, depth = NOWHERE, 0
    for at, match in enumerate(tokens):
        word, start, stop = match[0], match.start(), match.end()
        depth += (word == "{") - (word == "}")
        if depth == 0 and (word == "(" or tokens[at - 1][0] == "struct"):
            name = tokens[at - 1][0] if word == "(" else word
            place = Place(name, False, (0, 0)) if OPERAND.fullmatch(name) else place
        if depth == 0:
            continue
        changes: list[Fault] = []
        spaced = text[start - 1] == " " and text[stop : stop + 1] == " "
        if word[0].isdigit() and "." not in word:
            digits = word.rstrip("uUlL")
            value, suffix = int(digits, 0), word[len(digits) :]
            changes.append(Fault(start, stop, f"{value + 1}{suffix}", "constant + 1"))
            if value:
                changes.append(Fault(start, stop, f"{value - 1}{suffix}", "constant - 1"))
            if digits.startswith("0x"):
                changes.append(Fault(start, stop, f"{hex(value ^ 1 << value.bit_length() - 1)}{suffix}", "bit of a mask"))
        elif word in CPP_OPERATORS and spaced:
            changes.append(Fault(start, stop, CPP_OPERATORS[word], "comparison" if word in CPP_COMPARISONS else "operator"))
            before, after = tokens[at - 1], tokens[at + 1]
            ends = tokens[at - 2][0], tokens[at + 2][0]
            if word in ("-", "<<", ">>") and all(OPERAND.fullmatch(v[0]) for v in (before, after)) and not {".", "->", "(", "["} & {*ends}:
                changes.append(Fault(before.start(), after.end(), f"{after[0]} {word} {before[0]}", "swapped operands"))
        elif word in CPP_NAMES and tokens[at + 1][0] in ("(", ",", ")", ";"):
            changes.append(Fault(start, stop, CPP_NAMES[word], "name"))
        faults += [(place, fault) for fault in changes]
    return _named(path, whole, faults)
