"""A kernel made ready to run: its functions in one list of pieces, its variables at their addresses, every statement checked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod

from tcemu.errors import NotModelled, Unsupported
from tcemu.ptx import flow
from tcemu.ptx.chunk import PARAMETER, Chunk, Names
from tcemu.ptx.context import Context, Operation, Step
from tcemu.ptx.flow import Piece
from tcemu.ptx.instructions import check_ending, prepare, prepared_by
from tcemu.ptx.memory import CONST_ROOM, FIRST_ROOM, window
from tcemu.ptx.module import Address, Function, Module, Operand, Register, Statement, Symbol, Variable, Vector
from tcemu.ptx.statements import Run, bind_operation, bind_step
from tcemu.ptx.values import KINDS

NOTHING = Operation((), (), lambda: ())  # of a statement that the scheduler runs
FRAME_ALIGNMENT = 16  # of the variables of a frame, in bytes; a parameter is copied in whole words


@dataclass
class Line:
    """A statement of the linked kernel. It is bound to its registers when it first runs. runs: what runs in its place."""

    number: int
    statement: Statement
    prepared: Operation | Step
    context: Context
    names: Names
    runs: Statement
    bound: Run | None = None

    def run(self, chunk: Chunk) -> None:
        """Runs it for the active threads of a chunk."""
        if self.bound is None:
            if isinstance(self.prepared, Operation):
                self.bound = bind_operation(self.prepared, self.runs, self.names)
            else:
                self.bound = bind_step(prepared_by(self.runs), self.runs, self.number, self.context, self.names)
        self.bound(chunk)


@dataclass
class Linked:
    """A piece of the linked kernel; the numbers of pieces are those of the kernel. lines: what it runs; last: what ends it.

    first: the number of its function's first statement. Of a call: entered, the callee's first piece; before, what hands the arguments
    over; behind, what fetches the results.
    """

    piece: Piece
    lines: list[Line]
    last: Line | None
    first: int
    names: Names
    entered: int = -1
    before: list[Line] = field(default_factory=list)
    behind: list[Line] = field(default_factory=list)


@dataclass
class Kernel:
    """A linked kernel. pieces: the entry's first one first. lines: by their numbers. shared, local: bytes of its variables.

    constants: bytes of .const variables; globals: .global ones, in rooms from FIRST_ROOM on. dynamic: where dynamic shared memory begins.
    """

    module: Module
    entry: Function
    target: str
    checked: bool
    pieces: list[Linked] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    shared: int = 0
    dynamic: int = 0
    local: int = 0
    parameters: dict[str, int] = field(default_factory=dict)
    parameter_bytes: int = 0
    constants: bytearray = field(default_factory=bytearray)
    globals: list[Variable] = field(default_factory=list)
    symbols: dict[str, int] = field(default_factory=dict)
    depth: int = 0  # of calls within calls


def size_of(variable: Variable) -> int:
    """The bytes of a variable; of an open array those that are known."""
    words = variable.kind.split(".")
    count = int(words[0][1:]) if len(words) > 1 else 1
    return prod(1 if n is None else n for n in variable.shape) * count * KINDS[words[-1]].bits // 8 * (None not in variable.shape)


def aligned(at: int, alignment: int) -> int:
    """The next multiple."""
    return -(-at // alignment) * alignment


def at(statement: Statement, error: Exception) -> Exception:
    """The error with the place of the statement."""
    return type(error)(f"line {statement.place.line}, column {statement.place.column}: {statement.opcode}: {error}")


def link(module: Module, entry: Function, target: str, checked: bool) -> Kernel:
    """The kernel of an entry. Raises Unsupported, with line and column, for what is not run."""
    kernel = Kernel(module, entry, target, checked)
    functions = _called(module, entry, kernel)
    _place_variables(kernel, functions)
    starts = {}
    frames = {function.name: _frame(kernel, function) for function in functions}
    for function in functions:
        starts[function.name] = len(kernel.pieces)
        _add_function(kernel, function, frames, checked)
    for linked in kernel.pieces:
        if linked.piece.ends == "call" and linked.last is not None:
            linked.entered = starts[_callee(linked.last.statement)]
    return kernel


# ---- functions


def _callee(statement: Statement) -> str:
    name = statement.operands[1]
    if not isinstance(name, Symbol):
        raise Unsupported("a call through a register is not run; a call of a function of the module by its name is")
    return name.name


def _called(module: Module, entry: Function, kernel: Kernel) -> list[Function]:
    """The entry and the functions that it calls, each once. Raises Unsupported for those that are not there, and for recursion."""
    found: dict[str, Function] = {}

    def visit(function: Function, path: tuple[str, ...]) -> None:
        found[function.name] = function
        kernel.depth = max(kernel.depth, len(path))
        for statement in function.statements:
            if statement.name != "call":
                continue
            try:
                name = _callee(statement)
                callee = module.functions.get(name)
                if callee is None or not callee.defined:
                    raise Unsupported(f"{name} is not in the module: functions of the CUDA runtime, as vprintf and malloc, are not run")
                if name in (*path, function.name):
                    raise Unsupported(f"recursion is not run: {' calls '.join((*path, function.name, name))}")
            except Unsupported as error:
                raise at(statement, error) from None
            visit(callee, (*path, function.name))

    visit(entry, ())
    return list(found.values())


def _add_function(kernel: Kernel, function: Function, frames: dict[str, dict[str, int]], checked: bool) -> None:
    context = Context(kernel.module, function, kernel.target, checked)
    names = Names(f"{function.name}:", dict(function.registers), {**kernel.symbols, **frames[function.name]})
    lines: list[Line] = []
    together: dict[int, flow.Gathering] = {}
    first = len(kernel.lines)
    for number, original in enumerate(function.statements):
        statement = _in_frame(original, function, frames[function.name])
        try:
            _known(statement, function, names)
            if flow.ending(statement):
                check_ending(statement, context)
                ready: Operation | Step = NOTHING
                if statement.name in ("bra", "brx"):
                    flow.targets_of(statement, function)
            else:
                ready = prepare(statement, context)
                parameter = _as_move(statement, kernel, function, names)
                if parameter is not None:
                    statement, ready = parameter, prepare(parameter, context)
        except (Unsupported, NotModelled) as error:
            raise at(original, error) from None
        if isinstance(ready, Step) and ready.together:
            together[number] = flow.gathering(statement, number)
        lines.append(Line(first + number, original, ready, context, names, statement))
    kernel.lines += lines
    base = len(kernel.pieces)
    found = flow.pieces(function, together)
    for piece in found:
        shifted = replace(piece, targets=tuple(base + to for to in piece.targets), after=base + piece.after if piece.after >= 0 else -1)
        last = lines[piece.last] if piece.last >= 0 else None
        linked = Linked(shifted, lines[piece.start : piece.stop], last, first, names)
        kernel.pieces.append(linked)
        if piece.ends == "call" and last is not None:
            callee = kernel.module.functions[_callee(last.statement)]
            callee_names = Names(f"{callee.name}:", callee.registers, {**kernel.symbols, **frames[callee.name]})
            linked.before, linked.behind = _passed(last, callee, callee_names)


def _known(statement: Statement, function: Function, names: Names) -> None:
    """Raises Unsupported for registers and symbols that nothing declares."""
    for operand in _parts(statement.operands):
        if isinstance(operand, Register):
            try:
                names.kind(operand)
            except KeyError:
                raise Unsupported(f"{operand.name} is no register of {function.name}, and no special register that is run") from None
        elif isinstance(operand, Symbol) and not flow.ending(statement) and operand.name not in names.symbols:
            raise Unsupported(f"{operand.name} has no address here: it is no variable of the module or of {function.name}")
    if statement.guard is not None and names.kinds.get(statement.guard.register) != "pred":
        raise Unsupported(f"{statement.guard.register} is no predicate of {function.name}")


def _parts(operands: tuple[Operand, ...]) -> Iterator[Operand]:
    for operand in operands:
        yield operand
        inner = [getattr(operand, name, None) for name in ("base", "coordinates", "first", "second", "register")]
        yield from _parts((*getattr(operand, "elements", ()), *(part for part in inner if part is not None)))


# ---- what calls hand over


def _in_frame(statement: Statement, function: Function, frame: dict[str, int]) -> Statement:
    """Parameters of functions lie in the frame, which is local memory."""
    parts = statement.qualifiers
    if statement.name not in ("ld", "st") or not parts or not any(part.startswith("param") for part in parts):
        return statement
    address = next((operand for operand in statement.operands if isinstance(operand, Address)), None)
    base = None if address is None else address.base
    if (isinstance(base, Symbol) and base.name in frame) or not function.entry:
        opcode = ".".join([statement.name, *("local" if part.startswith("param") else part for part in parts)])
        return replace(statement, opcode=opcode)
    return statement


def _as_move(statement: Statement, kernel: Kernel, function: Function, names: Names) -> Statement | None:
    """A load of one of the entry's parameters as a move of a register, whose value is known before anything runs; None for what is none."""
    if not function.entry or statement.name != "ld" or len(statement.qualifiers) != 2 or statement.qualifiers[0] != "param":
        return None
    (to, address), kind = statement.operands, KINDS[statement.qualifiers[1]]
    base = address.base if isinstance(address, Address) else None
    if not isinstance(to, Register) or not isinstance(base, Symbol) or base.name not in kernel.parameters:
        return None
    start, size = kernel.parameters[base.name] + base.offset + address.offset, kind.bits // 8  # type: ignore[union-attr]
    if size < 4 or start % size or not 0 <= start <= kernel.parameter_bytes - size or KINDS[names.kind(to)].bits != kind.bits:
        return None
    source = Register(f"{PARAMETER}{start}")
    names.kinds[source.name] = f"b{kind.bits}"
    return replace(statement, opcode=f"mov.b{kind.bits}", operands=(to, source))


def _passed(call: Line, callee: Function, names: Names) -> tuple[list[Line], list[Line]]:
    """Statements that hand a call's arguments over, and those that fetch its results."""
    lists = [operand.elements for operand in call.statement.operands if isinstance(operand, Vector)]
    results, arguments = lists[0], lists[1]
    for what, here, wanted in (("arguments", arguments, callee.parameters), ("results", results, callee.results)):
        if len(here) != len(wanted):
            raise at(call.statement, Unsupported(f"{callee.name} has {len(wanted)} {what}; got {len(here)}"))
    handover = _Handover(call, names, callee)
    before = [line for operand, formal in zip(arguments, callee.parameters, strict=True) for line in handover.argument(operand, formal)]
    behind = [line for operand, formal in zip(results, callee.results, strict=True) for line in handover.result(operand, formal)]
    return before, behind


class _Handover:
    """Moves between a caller's operands and the parameters of its callee, each by its name with the prefix of its function."""

    def __init__(self, call: Line, names: Names, callee: Function) -> None:
        self.call, self.prefix = call, names.prefix
        sides = (call.names, names)
        self.kinds = {side.prefix + name: kind for side in sides for name, kind in side.kinds.items()}
        self.kinds |= {names.prefix + each.name: each.kind for each in (*callee.parameters, *callee.results) if each.space == "reg"}
        self.names = Names("", self.kinds, {side.prefix + name: value for side in sides for name, value in side.symbols.items()})

    def argument(self, operand: Operand, formal: Variable) -> Iterator[Line]:
        """A caller's operand into a parameter."""
        return self._moves(self._formal(formal), self._actual(operand), formal)

    def result(self, operand: Operand, formal: Variable) -> Iterator[Line]:
        """A result into a caller's operand."""
        return self._moves(self._actual(operand), self._formal(formal), formal)

    def _formal(self, variable: Variable) -> Operand:
        name = self.prefix + variable.name
        return Register(name) if variable.space == "reg" else Symbol(name)

    def _actual(self, operand: Operand) -> Operand:
        return replace(operand, name=self.call.names.prefix + operand.name) if isinstance(operand, Register | Symbol) else operand

    def _moves(self, to: Operand, of: Operand, variable: Variable) -> Iterator[Line]:
        size = max(size_of(variable), 1)
        step = next(width for width in (8, 4, 2, 1) if size % width == 0)
        kind = f"b{8 * step}"
        for offset in range(0, size, step):
            source = of
            if isinstance(of, Symbol):
                source = Register(f"{self.prefix}%passed{step}")
                self.kinds[source.name] = kind
                yield self._line(f"ld.local.{kind}", (source, Address(of, offset)))
            if isinstance(to, Symbol):
                yield self._line(f"st.local.{kind}", (Address(to, offset), source))
            else:
                yield self._line(f"mov.{kind}", (to, source))

    def _line(self, opcode: str, operands: tuple[Operand, ...]) -> Line:
        statement = Statement(opcode, operands, None, self.call.statement.place)
        return Line(self.call.number, statement, prepare(statement, self.call.context), self.call.context, self.names, statement)


# ---- variables


def _frame(kernel: Kernel, function: Function) -> dict[str, int]:
    """The addresses in local memory of a function's variables. Parameters of the entry lie elsewhere."""
    frame = {}
    own = [variable for variable in function.variables if variable.space in ("local", "param")]
    handed = [] if function.entry else [each for each in (*function.parameters, *function.results) if each.space != "reg"]
    for variable in (*handed, *own):
        kernel.local = aligned(kernel.local, max(variable.alignment, FRAME_ALIGNMENT))
        frame[variable.name] = kernel.local
        kernel.local += max(size_of(variable), 1)
    return frame


def _place_variables(kernel: Kernel, functions: list[Function]) -> None:
    declared = [*kernel.module.variables, *(variable for function in functions for variable in function.variables)]
    statements = [each for function in functions for each in function.statements]
    used = {part.name for each in statements for part in _parts(each.operands) if isinstance(part, Symbol)}
    dynamic = []
    for variable in declared:
        if variable.space == "shared" and (variable.extern or None in variable.shape):
            dynamic.append(variable)
        elif variable.space == "shared" and variable.name in used:
            kernel.shared = aligned(kernel.shared, variable.alignment)
            kernel.symbols[variable.name] = kernel.shared
            kernel.shared += size_of(variable)
        elif variable.space == "const":
            start = aligned(len(kernel.constants), variable.alignment)
            kernel.symbols[variable.name] = window(CONST_ROOM) + start
            initial = variable.initial or b""
            kernel.constants += bytes(start - len(kernel.constants)) + initial + bytes(max(size_of(variable) - len(initial), 0))
        elif variable.space == "global":
            kernel.symbols[variable.name] = window(FIRST_ROOM + len(kernel.globals))
            kernel.globals.append(variable)
    kernel.dynamic = aligned(kernel.shared, max([variable.alignment for variable in dynamic], default=1))
    kernel.symbols |= {variable.name: kernel.dynamic for variable in dynamic}
    for parameter in kernel.entry.parameters:
        kernel.parameter_bytes = aligned(kernel.parameter_bytes, parameter.alignment)
        kernel.parameters[parameter.name] = kernel.symbols[parameter.name] = kernel.parameter_bytes
        kernel.parameter_bytes += size_of(parameter)
