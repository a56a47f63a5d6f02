"""A kernel ready to run: the basic blocks of its functions in one list, its variables at their addresses, every statement checked."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
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
from tcemu.kernels.ptx.linker.statement_runs import OperationRun, join_operations
from tcemu.kernels.ptx.operand_classes import describe_operand
from tcemu.kernels.ptx.scalar import video_instructions
from tcemu.kernels.ptx.simt import stack_memory, wide_registers
from tcemu.kernels.ptx.simt.chunk import PARAMETER_PREFIX, Chunk, ChunkLayout, NameTable
from tcemu.kernels.ptx.simt.device_memory import CONST_ROOM, FIRST_ROOM, FUNCTION_ROOM, room_start
from tcemu.kernels.ptx.text.module import (
    Address,
    Float,
    Function,
    Integer,
    Module,
    Operand,
    Register,
    Sink,
    Statement,
    Symbol,
    Variable,
    Vector,
    nested_operands,
)
from tcemu.kernels.ptx.text.ptx_types import KINDS

NO_OPERATION = Operation((), (), lambda: ())  # of a statement that the scheduler executes
# functions of the CUDA runtime, which the scheduler executes, with the number of their results and arguments
RUNTIME_FUNCTIONS = {"vprintf": (1, 2), "malloc": (1, 1), "free": (0, 1), "__assertfail": (0, 5)}
FUNCTION_ALIGNMENT = 16  # bytes between the addresses of functions
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
    count = 1  # statements

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
class LinkedCallee:
    """A function that a call may reach."""

    name: str
    address: int
    argument_moves: list[LinkedStatement]  # from the arguments to the parameters
    result_moves: list[LinkedStatement]  # from the results
    block: int = -1  # its first basic block
    recursive: bool = False  # it may call the caller again, whose registers and frame are saved meanwhile


@dataclass
class LinkedBlock:
    """A basic block of the linked kernel. Basic blocks are numbered in the kernel."""

    basic_block: BasicBlock
    statements: list[LinkedStatement]
    terminator: LinkedStatement | None  # the statement that ends the basic block
    first_number: int  # the number of its function's first statement
    names: NameTable
    runtime_function: str = ""  # for a call of a function of the CUDA runtime: its name
    callees: list[LinkedCallee] = field(default_factory=list)  # for a call: the functions that it may reach; one for a call by name

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
    call_depth: int = 0  # of nested calls without recursion
    recursive_groups: dict[str, int] = field(default_factory=dict)  # number of the functions that call each other, by function
    frame_words: dict[str, tuple[int, int]] = field(default_factory=dict)  # first word of each function's frame in local memory, and end
    taken_functions: frozenset[str] = frozenset()  # functions whose addresses the kernel may have, if it calls any through a register
    cluster_size: int = 1  # blocks of a cluster
    stack_start: int | None = None  # first byte of the stack in local memory; None: there is none
    plans: dict[int, tuple[ChunkLayout, list[LinkedStatement | OperationRun]]] = field(default_factory=dict)  # see `plan`

    def plan(self, statements: list[LinkedStatement], layout: ChunkLayout) -> list[LinkedStatement | OperationRun]:
        """Return what is executed for statements of the kernel without observers."""
        known, plan = self.plans.get(id(statements), (None, []))
        if known is not layout:
            plan = join_operations(statements, layout)
            self.plans[id(statements)] = layout, plan
        return plan

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
    position, source = statement.position, f" ({statement.source})" if statement.source else ""
    return type(error)(f"line {position.line}, column {position.column}{source}: {statement.opcode}: {error}")


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
        for callee in linked.callees:
            callee.block = starts[callee.name]
    return kernel


# ---- functions


def _callee_name(statement: Statement) -> str | None:
    """Return the name of the function that a statement calls; None for a call through a register."""
    callee = statement.operands[1]
    return callee.name if isinstance(callee, Symbol) else None


def function_address(module: Module, name: str) -> int:
    """Return the address of a function: a multiple of 16 in a room of its own, in which nothing can be read."""
    return room_start(FUNCTION_ROOM) + FUNCTION_ALIGNMENT * (1 + list(module.functions).index(name))


def _indirect_callees(module: Module, function: Function, statement: Statement, taken: Iterable[str]) -> list[str]:
    """Return the functions that a call through a register may reach: those of its list, or those of its prototype among `taken`.

    Raises Unsupported for a call without a list or a prototype.
    """
    listed = statement.operands[3] if len(statement.operands) > 3 else None
    if isinstance(listed, Symbol) and listed.name in function.call_targets:
        return [name for name in function.call_targets[listed.name] if module.functions[name].defined]
    if not isinstance(listed, Symbol) or listed.name not in function.prototypes:
        raise Unsupported("a call through a register needs a .callprototype or a list of .calltargets. PTX ISA 9.7.12.5")
    prototype = function.prototypes[listed.name]
    form = _form(prototype.results), _form(prototype.parameters)
    functions = [module.functions[name] for name in module.functions if name in taken]
    return [each.name for each in functions if each.defined and not each.entry and (_form(each.results), _form(each.parameters)) == form]


def _form(variables: Sequence[Variable]) -> tuple[tuple[str, int], ...]:
    """Return the spaces and the bytes of parameters or results, which a prototype and a function share."""
    return tuple((each.space, byte_size(each)) for each in variables)


def _taken_functions(module: Module, functions: Iterable[Function]) -> set[str]:
    """Return the functions whose address statements or initial values of variables contain."""
    pointers = {pointer.symbol.name for variable in module.variables for pointer in variable.pointers}
    for function in functions:
        for statement in function.statements:
            operands = statement.operands if statement.name != "call" else (*statement.operands[:1], *statement.operands[2:3])
            pointers |= {part.name for part in nested_operands(operands) if isinstance(part, Symbol)}
    return pointers & module.functions.keys()


def _check_runtime_call(name: str, statement: Statement) -> None:
    """Raise Unsupported for a call of a function of the CUDA runtime with another number of results or arguments."""
    lists = [len(operand.elements) for operand in statement.operands if isinstance(operand, Vector)]
    results, arguments = RUNTIME_FUNCTIONS[name]
    if tuple(lists) != (results, arguments):
        raise Unsupported(f"{name} of the CUDA runtime has {results} results and {arguments} arguments; got {lists}")


def _reachable_functions(module: Module, entry: Function, kernel: Kernel) -> list[Function]:
    """Return the entry and the functions that it may call. Raises Unsupported for a missing function and for recursion."""
    found: dict[str, Function] = {}
    callees: dict[str, list[tuple[Statement, str]]] = {}
    work = [entry]
    while work:
        function = work.pop()
        if function.name not in found:
            found[function.name] = function
            callees[function.name] = list(_called_functions(module, function))
            work += [module.functions[name] for _, name in reversed(callees[function.name])]
        if not work:
            reached = {name for each in found.values() for name in _functions_by_pointer(module, each, found.values())}
            work = [module.functions[name] for name in sorted(reached - found.keys())]
            kernel.taken_functions = frozenset(_taken_functions(module, found.values())) if reached else frozenset()
    kernel.recursive_groups = _recursive_groups(callees)
    for name in kernel.recursive_groups:
        _check_recursive(found[name], found.values())
    kernel.call_depth = len(found) - 1  # without recursion, no function is in a chain of calls twice
    return list(found.values())


def _functions_by_pointer(module: Module, function: Function, reached: Iterable[Function]) -> Iterator[str]:
    """Yield the functions that a function may call through registers."""
    for statement in function.statements:
        if statement.name == "call" and _callee_name(statement) is None:
            try:
                yield from _indirect_callees(module, function, statement, _taken_functions(module, reached))
            except Unsupported as error:
                raise locate_error(statement, error) from None


def _called_functions(module: Module, function: Function) -> Iterator[tuple[Statement, str]]:
    """Yield the calls of functions of the module by name, and their names. Raises Unsupported for a missing function."""
    for statement in function.statements:
        name = _callee_name(statement) if statement.name == "call" else None
        if name is None:
            continue
        callee = module.functions.get(name)
        try:
            if (callee is None or not callee.defined) and name in RUNTIME_FUNCTIONS:
                _check_runtime_call(name, statement)
                continue
            if callee is None or not callee.defined:
                raise Unsupported(f"{name} is not in the module; of the CUDA runtime {', '.join(RUNTIME_FUNCTIONS)} are supported")
        except Unsupported as error:
            raise locate_error(statement, error) from None
        yield statement, name


def _recursive_groups(callees: dict[str, list[tuple[Statement, str]]]) -> dict[str, int]:
    """Return for each function that may call itself, by name, the number of the functions that call each other with it."""
    edges = {name: [callee for _, callee in called] for name, called in callees.items()}
    index = {name: number for number, name in enumerate(edges)}
    numbered = {index[name]: [index[callee] for callee in called] for name, called in edges.items()}
    names, groups = list(edges), {}
    for number, component in enumerate(control_flow.strong_components(numbered, numbered)):
        if len(component) > 1 or component[0] in numbered[component[0]]:
            groups |= {names[each]: number for each in component}
    return groups


def _check_recursive(function: Function, functions: Iterable[Function]) -> None:
    """Raise Unsupported for a recursive function with memory that each of its calls must have for itself."""
    local = [
        (variable.position, f"it has the local variable {variable.name}") for variable in function.variables if variable.space == "local"
    ]
    stack = [
        (statement.position, f"the kernel has {statement.name}")
        for each in functions
        for statement in each.statements
        if statement.name in stack_memory.INSTRUCTIONS
    ]
    for position, what in (*local, *stack):
        raise Unsupported(
            f"line {position.line}, column {position.column}: recursion of {function.name} is not supported, since {what}, whose address "
            "nested calls would share; recursive functions with registers and parameters alone are supported"
        )


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
        statement = video_instructions.plain_statement(statement)
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
            if name is not None and name not in frames:
                linked.runtime_function = name
                _check_runtime_operands(last)
                continue
            reached = [name] if name is not None else _indirect_callees(kernel.module, function, last.statement, kernel.taken_functions)
            for each in reached:
                callee = kernel.module.functions[each]
                callee_names = NameTable(
                    f"{callee.name}:", wide_registers.add_halves(callee.registers), {**kernel.symbols, **frames[callee.name]}
                )
                moves = _link_call(last, callee, callee_names, kernel.stack_start is not None)
                group = kernel.recursive_groups.get(function.name)
                recursive = name is not None and group is not None and group == kernel.recursive_groups.get(callee.name)
                linked.callees.append(LinkedCallee(callee.name, kernel.symbols[callee.name], *moves, recursive=recursive))
                if recursive:
                    _check_moves(last.statement, moves[0])


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
    for what, passed, declared in (("argument", arguments, callee.parameters), ("result", results, callee.results)):
        for number, (operand, formal) in enumerate(zip(passed, declared, strict=True), 1):
            _check_call_operand(call, f"{what} {number}", operand, formal, callee.name)
    pairs = zip(arguments, callee.parameters, strict=True), zip(results, callee.results, strict=True)
    saved = Register(f"{stack_memory.STACK_PREFIX}{call.number}")
    return (
        [*moves.move_register(saved, stack_memory.HEIGHT)] * has_stack
        + [statement for operand, formal in pairs[0] for statement in moves.move_argument(operand, formal)],
        [*moves.move_register(stack_memory.HEIGHT, saved)] * has_stack
        + [statement for operand, formal in pairs[1] for statement in moves.move_result(operand, formal)],
    )


def _check_moves(call: Statement, moves: list[LinkedStatement]) -> None:
    """Raise Unsupported if a move of a recursive call's arguments overwrites the source of a later one."""
    written: set[Operand] = set()
    for move in moves:
        destination, *sources = move.statement.operands
        for source in sources:
            if source in written and not (isinstance(source, Register) and "%passed" in source.name):
                raise locate_error(
                    call, Unsupported("recursion with the function's own parameters as arguments in another place is not supported")
                )
        written.add(destination)


def _check_call_operand(call: LinkedStatement, what: str, operand: Operand, formal: Variable, callee: str) -> None:
    """Raise Unsupported unless an operand is a register, a .param variable or, as an argument, a constant of the formal's size."""
    function, bits = call.context.function, 8 * byte_size(formal)
    if isinstance(operand, Sink) and what.startswith("result"):
        return
    if isinstance(operand, Register) and operand.name in function.registers and KINDS[function.registers[operand.name]].bits == bits:
        return
    constant = isinstance(operand, Integer) or (isinstance(operand, Float) and bits in (32, 64))
    if constant and what.startswith("argument") and not formal.shape:
        return
    variables = (*function.variables, *function.parameters, *function.results)
    if isinstance(operand, Symbol) and not operand.offset:
        found = next((each for each in variables if each.name == operand.name and each.space == "param"), None)
        if found is not None and 8 * byte_size(found) == bits and not (function.entry and found in function.parameters):
            return
    expected = "a register" if formal.shape else "a register" + (" or a constant" if what.startswith("argument") else " or _")
    raise locate_error(
        call.statement,
        Unsupported(
            f"{what} is {describe_operand(operand, function.registers)}; {callee} takes {expected} or a .param variable of {bits} bits. "
            "PTX ISA 7.1, 9.7.12.5"
        ),
    )


def _check_runtime_operands(call: LinkedStatement) -> None:
    """Raise Unsupported unless the operands of a call of the CUDA runtime are registers, .param variables or, as arguments, integers."""
    function = call.context.function
    variables = {each.name for each in function.variables if each.space == "param"}
    lists = [operand.elements for operand in call.statement.operands if isinstance(operand, Vector)]
    for what, operands in zip(("result", "argument"), lists, strict=True):
        for number, operand in enumerate(operands, 1):
            register = isinstance(operand, Register) and KINDS[function.registers.get(operand.name, "pred")].bits in (32, 64)
            variable = isinstance(operand, Symbol) and not operand.offset and operand.name in variables
            if not (register or variable or (isinstance(operand, Integer) and what == "argument")):
                wrong = describe_operand(operand, function.registers)
                expected = "a register of 32 or 64 bits, a .param variable" + ", an integer" * (what == "argument")
                raise locate_error(call.statement, Unsupported(f"{what} {number} is {wrong}; expected {expected}. PTX ISA 9.7.12.5"))


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
            if isinstance(origin, Symbol | Float):
                source = Register(f"{self.prefix}%passed{step}")
                self.kinds[source.name] = kind
            if isinstance(origin, Symbol):
                yield self._link_statement(f"ld.local.{kind}", (source, Address(origin, offset)))
            elif isinstance(origin, Float):
                yield self._link_statement(f"mov.{kind}", (source, origin))
            if isinstance(destination, Symbol):
                yield self._link_statement(f"st.local.{kind}", (Address(destination, offset), source))
            elif not isinstance(destination, Sink):
                yield self._link_statement(f"mov.{kind}", (destination, source))

    def _link_statement(self, opcode: str, operands: tuple[Operand, ...]) -> LinkedStatement:
        statement = Statement(opcode, operands, None, self.call.statement.position)
        semantics = find_preparer(statement)(statement, self.context)
        return LinkedStatement(self.call.number, statement, semantics, self.call.context, self.names, statement)


# ---- variables


def _lay_out_frame(kernel: Kernel, function: Function) -> dict[str, int]:
    """Return the addresses in local memory of a function's variables and parameters, except those of the entry."""
    frame, start = {}, align_up(kernel.local_bytes, FRAME_ALIGNMENT)
    locals_ = [variable for variable in function.variables if variable.space in ("local", "param")]
    formals = [] if function.entry else [each for each in (*function.parameters, *function.results) if each.space != "reg"]
    for variable in (*formals, *locals_):
        kernel.local_bytes = align_up(kernel.local_bytes, max(variable.alignment, FRAME_ALIGNMENT))
        frame[variable.name] = kernel.local_bytes
        kernel.local_bytes += max(byte_size(variable), 1)
    kernel.frame_words[function.name] = start // 4, align_up(max(kernel.local_bytes, start), 4) // 4
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
    kernel.symbols |= {name: function_address(kernel.module, name) for name in kernel.module.functions}
    kernel.dynamic_start = align_up(kernel.shared_bytes, max([variable.alignment for variable in dynamic], default=1))
    kernel.symbols |= {variable.name: kernel.dynamic_start for variable in dynamic}
    for parameter in kernel.entry.parameters:
        kernel.parameter_bytes = align_up(kernel.parameter_bytes, parameter.alignment)
        kernel.parameters[parameter.name] = kernel.symbols[parameter.name] = kernel.parameter_bytes
        kernel.parameter_bytes += byte_size(parameter)
