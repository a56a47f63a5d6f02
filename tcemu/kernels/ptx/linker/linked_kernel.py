"""A kernel ready to run: the basic blocks of its functions in one list, its variables at their addresses, every statement checked."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from math import prod

from tcemu.base.errors import NotModelled, Unsupported
from tcemu.kernels.ptx.instruction_interface import Context, Operation, Step
from tcemu.kernels.ptx.linker import control_flow
from tcemu.kernels.ptx.linker.compiled_statements import BoundOperation, BoundStep
from tcemu.kernels.ptx.linker.control_flow import BasicBlock
from tcemu.kernels.ptx.linker.instruction_table import check_ending, check_legality, find_preparer, prepare_statement
from tcemu.kernels.ptx.simt import stack_memory, wide_registers
from tcemu.kernels.ptx.simt.chunk import PARAMETER_PREFIX, Chunk, ChunkLayout, NameTable
from tcemu.kernels.ptx.simt.device_memory import CONST_ROOM, FIRST_ROOM, room_start
from tcemu.kernels.ptx.text.module import Address, Function, Module, Operand, Register, Statement, Symbol, Variable, Vector, nested_operands
from tcemu.kernels.ptx.text.ptx_types import KINDS

NO_OPERATION = Operation((), (), lambda: ())  # of a statement that the scheduler executes
# functions of the CUDA runtime, which the scheduler executes, with the number of their results and arguments
RUNTIME_FUNCTIONS = {"vprintf": (1, 2), "malloc": (1, 1), "free": (0, 1), "__assertfail": (0, 5)}
FRAME_ALIGNMENT = 16  # of the variables of a frame, in bytes; a parameter is copied in whole words


@dataclass
class LinkedStatement:
    """A statement of the linked kernel. It is bound to its registers when it is first executed."""

    number: int  # in the kernel
    statement: Statement  # as in the text
    semantics: Operation | Step
    context: Context
    names: NameTable
    executed_statement: Statement  # the statement that is executed in its place
    executor: BoundOperation | BoundStep | None = None

    def execute(self, chunk: Chunk) -> None:
        """Execute the statement for the active threads of a chunk."""
        self.bind()(chunk)

    def bind(self) -> BoundOperation | BoundStep:
        """Return the statement bound to its registers."""
        if self.executor is None:
            if isinstance(self.semantics, Operation):
                self.executor = BoundOperation(self.semantics, self.executed_statement, self.context, self.names)
            else:
                self.executor = BoundStep(self.executed_statement, self.number, self.context, self.names)
        return self.executor


def compile_together(statements: Sequence[LinkedStatement], layout: ChunkLayout) -> None:
    """Compile the statements of a basic block side by side. Errors are left to their execution, which names the statement."""
    bound = {each.key: each for each in (linked.bind() for linked in statements)}
    if len(bound) < 2 or (os.cpu_count() or 1) < 2:
        return

    def compile_statement(each: BoundOperation | BoundStep) -> None:
        with suppress(Unsupported, NotModelled):
            each.find_program(layout)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for future in [pool.submit(copy_context().run, compile_statement, each) for each in bound.values()]:
            future.result()


@dataclass
class LinkedBlock:
    """A basic block of the linked kernel. Basic blocks are numbered in the kernel."""

    basic_block: BasicBlock
    statements: list[LinkedStatement]
    terminator: LinkedStatement | None  # the statement that ends the basic block
    first_number: int  # the number of its function's first statement
    names: NameTable
    callee_block: int = -1  # for a call: the callee's first basic block
    runtime_function: str = ""  # for a call of a function of the CUDA runtime: its name
    argument_moves: list[LinkedStatement] = field(default_factory=list)  # for a call: from the arguments to the parameters
    result_moves: list[LinkedStatement] = field(default_factory=list)  # for a call: from the callee's results

    def require_terminator(self) -> LinkedStatement:
        """Return the statement that ends the basic block.

        Raises:
            ValueError: The basic block ends where another begins.
        """
        if self.terminator is None:
            raise ValueError(f"the basic block of {self.basic_block.ending!r} ends with no statement")
        return self.terminator


@dataclass
class Kernel:
    """A linked kernel."""

    module: Module
    entry: Function
    target: str
    checked: bool
    blocks: list[LinkedBlock] = field(default_factory=list)  # the entry's first one first
    statements: list[LinkedStatement] = field(default_factory=list)  # by number
    shared_bytes: int = 0  # static shared memory
    dynamic_start: int = 0  # byte at which dynamic shared memory begins
    local_bytes: int = 0  # local memory of a thread
    parameters: dict[str, int] = field(default_factory=dict)  # byte offsets of the entry's parameters
    parameter_bytes: int = 0
    constants: bytearray = field(default_factory=bytearray)  # contents of the .const variables
    globals: list[Variable] = field(default_factory=list)  # .global variables, in rooms from FIRST_ROOM on
    symbols: dict[str, int] = field(default_factory=dict)  # addresses
    call_depth: int = 0  # of nested calls
    cluster_size: int = 1  # blocks of a cluster
    stack_start: int | None = None  # first byte of the stack in local memory; None: there is none

    @property
    def runtime_functions(self) -> frozenset[str]:
        """The functions of the CUDA runtime that the kernel calls."""
        return frozenset(linked.runtime_function for linked in self.blocks if linked.runtime_function)

    def uses(self, name: str) -> bool:
        """Return True if a statement of the kernel has an opcode with this first part."""
        return any(linked.statement.name == name for linked in self.statements)

    def reads(self, register: str) -> bool:
        """Return True if a statement of the kernel names a register."""
        return any(part == Register(register) for linked in self.statements for part in nested_operands(linked.statement.operands))

    @property
    def ranked_symbols(self) -> frozenset[str]:
        """The variables whose addresses contain the rank of the block: those in shared memory, where clusters have several blocks."""
        if self.cluster_size == 1:
            return frozenset()
        variables = (*self.module.variables, *(variable for function in self.module.functions.values() for variable in function.variables))
        return frozenset(variable.name for variable in variables if variable.space == "shared")


def byte_size(variable: Variable) -> int:
    """Return the bytes of a variable; 0 if its first axis is open."""
    words = variable.kind.split(".")
    count = int(words[0][1:]) if len(words) > 1 else 1
    return prod(1 if n is None else n for n in variable.shape) * count * KINDS[words[-1]].bits // 8 * (None not in variable.shape)


def align_up(offset: int, alignment: int) -> int:
    """Round up to a multiple of the alignment."""
    return -(-offset // alignment) * alignment


def locate_error(statement: Statement, error: Exception) -> Exception:
    """Return the error with the statement's position."""
    return type(error)(f"line {statement.position.line}, column {statement.position.column}: {statement.opcode}: {error}")


def link(module: Module, entry: Function, target: str, checked: bool, cluster_size: int = 1) -> Kernel:
    """Link an entry and the functions that it calls. Raises Unsupported, with line and column, for unsupported statements."""
    kernel = Kernel(module, entry, target, checked, cluster_size=cluster_size)
    functions = _reachable_functions(module, entry, kernel)
    _assign_addresses(kernel, functions)
    starts = {}
    frames = {function.name: _lay_out_frame(kernel, function) for function in functions}
    if any(statement.name in stack_memory.INSTRUCTIONS for function in functions for statement in function.statements):
        kernel.stack_start = align_up(kernel.local_bytes, FRAME_ALIGNMENT)
        kernel.local_bytes = kernel.stack_start + stack_memory.STACK_BYTES
    for function in functions:
        starts[function.name] = len(kernel.blocks)
        _add_function(kernel, function, frames, checked)
    for linked in kernel.blocks:
        if linked.basic_block.ending == "call" and linked.terminator is not None and not linked.runtime_function:
            linked.callee_block = starts[_callee_name(linked.terminator.statement)]
    return kernel


# ---- functions


def _callee_name(statement: Statement) -> str:
    name = statement.operands[1]
    if not isinstance(name, Symbol):
        raise Unsupported("a call through a register is not supported; a call of a function of the module by its name is")
    return name.name


def _check_runtime_call(name: str, statement: Statement) -> None:
    """Raise Unsupported for a call of a function of the CUDA runtime with another number of results or arguments."""
    lists = [len(operand.elements) for operand in statement.operands if isinstance(operand, Vector)]
    results, arguments = RUNTIME_FUNCTIONS[name]
    if tuple(lists) != (results, arguments):
        raise Unsupported(f"{name} of the CUDA runtime has {results} results and {arguments} arguments; got {lists}")


def _reachable_functions(module: Module, entry: Function, kernel: Kernel) -> list[Function]:
    """Return the entry and the functions that it calls. Raises Unsupported for a missing function and for recursion."""
    found: dict[str, Function] = {}
    callees: dict[str, list[tuple[Statement, str]]] = {}
    work = [entry]
    while work:
        function = work.pop()
        if function.name in found:
            continue
        found[function.name] = function
        callees[function.name] = list(_called_functions(module, function))
        work += [module.functions[name] for _, name in reversed(callees[function.name])]
    kernel.call_depth = _call_depth(entry.name, callees)
    return list(found.values())


def _called_functions(module: Module, function: Function) -> Iterator[tuple[Statement, str]]:
    """Yield the calls of functions of the module, and their names. Raises Unsupported for a missing function."""
    for statement in function.statements:
        if statement.name != "call":
            continue
        try:
            name = _callee_name(statement)
            callee = module.functions.get(name)
            if (callee is None or not callee.defined) and name in RUNTIME_FUNCTIONS:
                _check_runtime_call(name, statement)
                continue
            if callee is None or not callee.defined:
                raise Unsupported(f"{name} is not in the module; of the CUDA runtime {', '.join(RUNTIME_FUNCTIONS)} are supported")
        except Unsupported as error:
            raise locate_error(statement, error) from None
        yield statement, name


def _call_depth(entry: str, callees: dict[str, list[tuple[Statement, str]]]) -> int:
    """Return the length of the longest chain of calls. Raises Unsupported for recursion."""
    depths: dict[str, int] = {}
    path = [entry]
    rest = [iter(callees[entry])]
    while path:
        call = next(rest[-1], None)
        if call is None:
            rest.pop()
            name = path.pop()
            depths[name] = max((1 + depths[callee] for _, callee in callees[name]), default=0)
        elif call[1] in path:
            chain = [*path[path.index(call[1]) :], call[1]]
            shown = chain if len(chain) < 8 else [*chain[:4], "...", *chain[-2:]]
            raise locate_error(call[0], Unsupported(f"recursion is not supported: {' calls '.join(shown)}"))
        elif call[1] not in depths:
            path.append(call[1])
            rest.append(iter(callees[call[1]]))
    return depths[entry]


def _add_function(kernel: Kernel, function: Function, frames: dict[str, dict[str, int]], checked: bool) -> None:
    registers = wide_registers.add_halves(function.registers)
    context = Context(kernel.module, replace(function, registers=registers), kernel.target, checked)
    symbols = {**kernel.symbols, **frames[function.name]}
    names = NameTable(f"{function.name}:", registers, symbols, kernel.ranked_symbols)
    linked_statements: list[LinkedStatement] = []
    collectives: dict[int, control_flow.ConvergencePoint] = {}
    first = len(kernel.statements)
    for number, original in enumerate(function.statements):
        try:
            written, original = original, wide_registers.split_registers(original, function.registers)
            _check_operands(original, function, names)
            if control_flow.ending_kind(original):
                statement = original
                check_ending(statement, context)
                semantics: Operation | Step = NO_OPERATION
                if statement.name in ("bra", "brx"):
                    control_flow.branch_targets(statement, function)
            else:
                semantics = prepare_statement(original, context)
                check_legality(written, context)
                statement = _rewrite_parameter_access(original, function, frames[function.name])
                statement = _rewrite_parameter_load(statement, kernel, function, names) or statement
                if statement.name in stack_memory.INSTRUCTIONS and kernel.stack_start is not None:
                    statement = stack_memory.add_height(statement, kernel.stack_start)
                if statement is not original:
                    semantics = find_preparer(statement)(statement, context)
        except (Unsupported, NotModelled) as error:
            raise locate_error(original, error) from None
        if isinstance(semantics, Step) and semantics.collective:
            collectives[number] = control_flow.convergence_point(statement, number)
        linked_statements.append(LinkedStatement(first + number, original, semantics, context, names, statement))
    kernel.statements += linked_statements
    base = len(kernel.blocks)
    for block in control_flow.find_basic_blocks(function, collectives):
        fallthrough = base + block.fallthrough if block.fallthrough >= 0 else -1
        shifted = replace(block, targets=tuple(base + target for target in block.targets), fallthrough=fallthrough)
        last = linked_statements[block.last_statement] if block.last_statement >= 0 else None
        linked = LinkedBlock(shifted, linked_statements[block.start : block.stop], last, first, names)
        kernel.blocks.append(linked)
        if block.ending == "call" and last is not None:
            name = _callee_name(last.statement)
            if name not in frames:
                linked.runtime_function = name
                continue
            callee = kernel.module.functions[name]
            callee_names = NameTable(
                f"{callee.name}:", wide_registers.add_halves(callee.registers), {**kernel.symbols, **frames[callee.name]}
            )
            linked.argument_moves, linked.result_moves = _link_call(last, callee, callee_names, kernel.stack_start is not None)


def _check_operands(statement: Statement, function: Function, names: NameTable) -> None:
    """Raise Unsupported for undeclared registers and symbols."""
    for operand in nested_operands(statement.operands):
        if isinstance(operand, Register):
            try:
                names.kind(operand)
            except KeyError:
                raise Unsupported(f"{operand.name} is no register of {function.name}, and no supported special register") from None
        elif isinstance(operand, Symbol) and not control_flow.ending_kind(statement) and operand.name not in names.symbols:
            raise Unsupported(f"{operand.name} has no address here: it is no variable of the module or of {function.name}")
    if statement.guard is not None and names.kinds.get(statement.guard.register) != "pred":
        raise Unsupported(f"{statement.guard.register} is no predicate of {function.name}")


# ---- parameters and calls


def _rewrite_parameter_access(statement: Statement, function: Function, frame: dict[str, int]) -> Statement:
    """Turn an access to a parameter of a function into an access to its frame, which is local memory."""
    parts = statement.qualifiers
    if statement.name not in ("ld", "st") or not parts or not any(part.startswith("param") for part in parts):
        return statement
    address = next((operand for operand in statement.operands if isinstance(operand, Address)), None)
    base = None if address is None else address.base
    if (isinstance(base, Symbol) and base.name in frame) or not function.entry:
        opcode = ".".join([statement.name, *("local" if part.startswith("param") else part for part in parts)])
        return replace(statement, opcode=opcode)
    return statement


def _rewrite_parameter_load(statement: Statement, kernel: Kernel, function: Function, names: NameTable) -> Statement | None:
    """Turn a load of one of the entry's parameters into a move from a register, whose value is known at launch.

    Returns:
        The move, or None for any other statement.
    """
    if not function.entry or statement.name != "ld" or len(statement.qualifiers) != 2 or statement.qualifiers[0] != "param":
        return None
    (destination, address), kind = statement.operands, KINDS[statement.qualifiers[1]]
    base = address.base if isinstance(address, Address) else None
    if not isinstance(destination, Register) or not isinstance(base, Symbol) or base.name not in kernel.parameters:
        return None
    start, size = kernel.parameters[base.name] + base.offset + address.offset, kind.bits // 8  # type: ignore[union-attr]
    if size < 4 or start % size or not 0 <= start <= kernel.parameter_bytes - size or KINDS[names.kind(destination)].bits != kind.bits:
        return None
    source = Register(f"{PARAMETER_PREFIX}{start}")
    names.kinds[source.name] = f"b{kind.bits}"
    return replace(statement, opcode=f"mov.b{kind.bits}", operands=(destination, source))


def _link_call(
    call: LinkedStatement, callee: Function, names: NameTable, has_stack: bool
) -> tuple[list[LinkedStatement], list[LinkedStatement]]:
    """Return the statements that pass a call's arguments, and those that fetch its results; they save and restore the stack's height."""
    lists = [operand.elements for operand in call.statement.operands if isinstance(operand, Vector)]
    results, arguments = lists[0], lists[1]
    for what, passed, declared in (("arguments", arguments, callee.parameters), ("results", results, callee.results)):
        if len(passed) != len(declared):
            raise locate_error(call.statement, Unsupported(f"{callee.name} has {len(declared)} {what}; got {len(passed)}"))
    moves = _CallMoves(call, names, callee)
    pairs = zip(arguments, callee.parameters, strict=True), zip(results, callee.results, strict=True)
    saved = Register(f"{stack_memory.STACK_PREFIX}{call.number}")
    return (
        [*moves.move_register(saved, stack_memory.HEIGHT)] * has_stack
        + [statement for operand, formal in pairs[0] for statement in moves.move_argument(operand, formal)],
        [*moves.move_register(stack_memory.HEIGHT, saved)] * has_stack
        + [statement for operand, formal in pairs[1] for statement in moves.move_result(operand, formal)],
    )


class _CallMoves:
    """Moves between a caller's operands and the parameters of its callee. Names carry the prefix of their function."""

    def __init__(self, call: LinkedStatement, names: NameTable, callee: Function) -> None:
        self.call, self.prefix = call, names.prefix
        tables = (call.names, names)
        self.kinds = {table.prefix + name: kind for table in tables for name, kind in table.kinds.items()}
        self.kinds |= {names.prefix + each.name: each.kind for each in (*callee.parameters, *callee.results) if each.space == "reg"}
        self.context = replace(call.context, function=replace(call.context.function, registers=self.kinds))
        self.names = NameTable("", self.kinds, {table.prefix + name: value for table in tables for name, value in table.symbols.items()})

    def move_register(self, destination: Register, source: Register) -> Iterator[LinkedStatement]:
        """Yield the statement that copies a register of 64 bits."""
        yield self._link_statement("mov.b64", (destination, source))

    def move_argument(self, operand: Operand, formal: Variable) -> Iterator[LinkedStatement]:
        """Yield the statements that copy a caller's operand to a parameter."""
        return self._copy_variable(self._formal_operand(formal), self._actual_operand(operand), formal)

    def move_result(self, operand: Operand, formal: Variable) -> Iterator[LinkedStatement]:
        """Yield the statements that copy a result to a caller's operand."""
        return self._copy_variable(self._actual_operand(operand), self._formal_operand(formal), formal)

    def _formal_operand(self, variable: Variable) -> Operand:
        name = self.prefix + variable.name
        return Register(name) if variable.space == "reg" else Symbol(name)

    def _actual_operand(self, operand: Operand) -> Operand:
        return replace(operand, name=self.call.names.prefix + operand.name) if isinstance(operand, Register | Symbol) else operand

    def _copy_variable(self, destination: Operand, origin: Operand, variable: Variable) -> Iterator[LinkedStatement]:
        size = max(byte_size(variable), 1)
        step = next(width for width in (8, 4, 2, 1) if size % width == 0)
        kind = f"b{8 * step}"
        for offset in range(0, size, step):
            source = origin
            if isinstance(origin, Symbol):
                source = Register(f"{self.prefix}%passed{step}")
                self.kinds[source.name] = kind
                yield self._link_statement(f"ld.local.{kind}", (source, Address(origin, offset)))
            if isinstance(destination, Symbol):
                yield self._link_statement(f"st.local.{kind}", (Address(destination, offset), source))
            else:
                yield self._link_statement(f"mov.{kind}", (destination, source))

    def _link_statement(self, opcode: str, operands: tuple[Operand, ...]) -> LinkedStatement:
        statement = Statement(opcode, operands, None, self.call.statement.position)
        semantics = find_preparer(statement)(statement, self.context)
        return LinkedStatement(self.call.number, statement, semantics, self.call.context, self.names, statement)


# ---- variables


def _lay_out_frame(kernel: Kernel, function: Function) -> dict[str, int]:
    """Return the addresses in local memory of a function's variables and parameters, except those of the entry."""
    frame = {}
    locals_ = [variable for variable in function.variables if variable.space in ("local", "param")]
    formals = [] if function.entry else [each for each in (*function.parameters, *function.results) if each.space != "reg"]
    for variable in (*formals, *locals_):
        kernel.local_bytes = align_up(kernel.local_bytes, max(variable.alignment, FRAME_ALIGNMENT))
        frame[variable.name] = kernel.local_bytes
        kernel.local_bytes += max(byte_size(variable), 1)
    return frame


def _assign_addresses(kernel: Kernel, functions: list[Function]) -> None:
    """Give every variable of the module and of the functions its address, and the entry's parameters their offsets."""
    declared = [*kernel.module.variables, *(variable for function in functions for variable in function.variables)]
    statements = [each for function in functions for each in function.statements]
    used = {part.name for each in statements for part in nested_operands(each.operands) if isinstance(part, Symbol)}
    dynamic = []
    for variable in declared:
        if variable.space == "shared" and (variable.extern or None in variable.shape):
            dynamic.append(variable)
        elif variable.space == "shared" and variable.name in used:
            kernel.shared_bytes = align_up(kernel.shared_bytes, variable.alignment)
            kernel.symbols[variable.name] = kernel.shared_bytes
            kernel.shared_bytes += byte_size(variable)
        elif variable.space == "const":
            start = align_up(len(kernel.constants), variable.alignment)
            kernel.symbols[variable.name] = room_start(CONST_ROOM) + start
            initial = variable.initial or b""
            kernel.constants += bytes(start - len(kernel.constants)) + initial + bytes(max(byte_size(variable) - len(initial), 0))
        elif variable.space == "global":
            kernel.symbols[variable.name] = room_start(FIRST_ROOM + len(kernel.globals))
            kernel.globals.append(variable)
    kernel.dynamic_start = align_up(kernel.shared_bytes, max([variable.alignment for variable in dynamic], default=1))
    kernel.symbols |= {variable.name: kernel.dynamic_start for variable in dynamic}
    for parameter in kernel.entry.parameters:
        kernel.parameter_bytes = align_up(kernel.parameter_bytes, parameter.alignment)
        kernel.parameters[parameter.name] = kernel.symbols[parameter.name] = kernel.parameter_bytes
        kernel.parameter_bytes += byte_size(parameter)
