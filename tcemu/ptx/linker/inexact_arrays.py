"""The arrays of a kernel that may hold results of an instruction without the GPU's bits, such as `tanh.approx`.

The analysis follows values through registers and memory, whatever the order of the statements, and errs on the safe side: an array that it
does not name holds the GPU's bits. Memory is divided into the arrays of the parameters, the variables of the module, and the shared, local
and tensor memory as a whole. A branch that depends on such a value makes every array inexact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tcemu.ptx.instruction_interface import Operation
from tcemu.ptx.linker.control_flow import ending_kind
from tcemu.ptx.linker.linked_kernel import Kernel, LinkedStatement
from tcemu.ptx.simt.chunk import PARAMETER_PREFIX
from tcemu.ptx.text.module import Address, Operand, Register, Symbol, flatten_operands, nested_operands

SHARED, LOCAL, TENSOR, ANYWHERE = "shared memory", "local memory", "tensor memory", "anywhere"  # parts of memory, besides arrays
SPACES = {"shared": SHARED, "local": LOCAL, "shared::cta": SHARED, "shared::cluster": SHARED, "param": LOCAL}
LOADS = ("ld", "ldu", "ldmatrix")  # statements whose addresses are only read
SYNCHRONISATION = ("mbarrier", "bar", "barrier", "fence", "membar", "elect", "griddepcontrol", "prefetch", "nanosleep", "setmaxnreg")
IMPLICIT_MEMORY = {"wgmma": (SHARED,), "tcgen05": (SHARED, TENSOR)}  # operands that descriptors name
Place = int | str  # byte offset of a parameter, whose array is meant; the name of a variable; or one of the constants above


class _Access(NamedTuple):
    """The registers and the memory that a statement reads and writes, by name."""

    reads: frozenset[str]
    writes: frozenset[str]
    addresses: tuple[tuple[frozenset[str], frozenset[Place], Place | None], ...]  # of each address: registers, symbols, space
    stores: bool  # the first address is written
    implicit: tuple[str, ...]
    symbols: frozenset[Place]  # of operands that are no addresses


class _Values:
    """Facts about registers and memory. They only grow while the analysis runs."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        variables = [*kernel.module.variables, *(v for block in kernel.blocks for v in _function_variables(block.statements))]
        self.spaces: dict[str, Place] = {v.name: str(SPACES.get(v.space, v.name)) for v in variables}
        self.inexact: set[str] = set()  # registers
        self.places: set[Place] = set()  # memory that holds inexact values
        self.origins: dict[str, frozenset[Place]] = {}  # of a register: what it may point to

    def place(self, name: str) -> Place:
        """Return the memory that a symbol stands for."""
        start = self.kernel.parameters.get(name)
        return self.spaces.get(name, name) if start is None else start

    def register(self, linked: LinkedStatement, name: str) -> str:
        """Return a register's name in the kernel, with its origin noted if it is a parameter."""
        if name.startswith(PARAMETER_PREFIX):
            self.origins[name] = frozenset({int(name.removeprefix(PARAMETER_PREFIX))})
            return name
        return linked.names.prefix + name

    def targets(self, registers: frozenset[str], symbols: frozenset[Place], space: Place | None) -> frozenset[Place]:
        """Return the memory that an address may mean; ANYWHERE if nothing is known."""
        if space is not None:
            return frozenset({space})
        found = symbols.union(*(self.origins.get(name, frozenset()) for name in registers))
        return found or frozenset({ANYWHERE})

    def holds_inexact(self, places: Iterable[Place]) -> bool:
        """Return True if one of the places may hold an inexact value."""
        return any(place in self.places or ANYWHERE in self.places or (place == ANYWHERE and bool(self.places)) for place in places)


def _function_variables(statements: list[LinkedStatement]) -> Iterator:
    for linked in statements[:1]:
        yield from linked.context.function.variables


def find_inexact_places(kernel: Kernel) -> frozenset[Place]:
    """Return the memory that may hold inexact values after the kernel: byte offsets of parameters, names, or ANYWHERE.

    Args:
        kernel: The linked kernel.
    """
    statements = [*kernel.statements, *(each for block in kernel.blocks for each in (*block.argument_moves, *block.result_moves))]
    if all(not isinstance(each.semantics, Operation) or each.semantics.exact for each in statements):
        return frozenset()
    values = _Values(kernel)
    accesses = [(linked, _access(linked, values)) for linked in statements]
    while any([_propagate(linked, access, values) for linked, access in accesses]):
        pass
    return frozenset(values.places)


def inexact_arrays(kernel: Kernel, arrays: dict[int, int]) -> frozenset[int]:
    """Return the numbers of the arrays that may hold inexact values.

    Args:
        kernel: The linked kernel.
        arrays: The number of the array to which each parameter points, by the parameter's byte offset.
    """
    places = find_inexact_places(kernel)
    return frozenset(number for start, number in arrays.items() if ANYWHERE in places or start in places)


def _access(linked: LinkedStatement, values: _Values) -> _Access:
    statement = linked.executed_statement
    operands = statement.operands
    addresses = tuple(operand for operand in operands if isinstance(operand, Address))
    count = 1
    if isinstance(linked.semantics, Operation):
        count = len(linked.semantics.results) - linked.semantics.carry_out
        flat = flatten_operands(operands)
        written, read = flat[:count], flat[count:]
    else:
        written = [] if not operands or isinstance(operands[0], Address) else flatten_operands(operands[:1])
        read = [operand for operand in operands if not isinstance(operand, Address)]
    space = next((SPACES[part] for part in statement.qualifiers if part in SPACES), None)
    is_copy = statement.name == "cp"  # its spaces belong to the two addresses in turn
    guard = [] if statement.guard is None else [Register(statement.guard.register)]
    return _Access(
        reads=_registers(linked, (*read, *guard), values),
        writes=_registers(linked, written, values),
        addresses=tuple(_address(linked, address, i, None if is_copy else space, values) for i, address in enumerate(addresses)),
        stores=bool(addresses) and statement.name not in LOADS,
        implicit=IMPLICIT_MEMORY.get(statement.name, ()),
        symbols=frozenset(values.place(part.name) for part in nested_operands(tuple(read)) if isinstance(part, Symbol)),
    )


def _address(
    linked: LinkedStatement, address: Address, number: int, space: Place | None, values: _Values
) -> tuple[frozenset[str], frozenset[Place], Place | None]:
    parts = linked.executed_statement.qualifiers
    if linked.executed_statement.name == "cp":
        spaces = [part for part in parts if part in SPACES or part == "global"]
        name = spaces[number] if number < len(spaces) else "shared"
        space = SPACES.get(name)
    symbols = frozenset(values.place(part.name) for part in nested_operands((address,)) if isinstance(part, Symbol))
    return _registers(linked, (address,), values), symbols, space


def _registers(linked: LinkedStatement, operands: Iterable[Operand], values: _Values) -> frozenset[str]:
    return frozenset(values.register(linked, part.name) for part in nested_operands(tuple(operands)) if isinstance(part, Register))


def _propagate(linked: LinkedStatement, access: _Access, values: _Values) -> bool:
    """Apply a statement to what is known; return True if that grew."""
    before = len(values.inexact), len(values.places), sum(map(len, values.origins.values()))
    statement, exact = linked.executed_statement, not isinstance(linked.semantics, Operation) or linked.semantics.exact
    inexact = not exact or not access.reads.isdisjoint(values.inexact)
    if ending_kind(statement):
        if inexact:
            values.places.add(ANYWHERE)
    elif statement.name not in SYNCHRONISATION:
        places = [values.targets(*address) for address in access.addresses]
        read = places[1:] if access.stores and statement.name not in ("atom", "red") else places
        inexact |= any(values.holds_inexact(each) for each in read) or values.holds_inexact(access.implicit)
        if inexact:
            values.inexact |= access.writes
            if access.stores:
                values.places |= places[0]
            if statement.name == "tcgen05":
                values.places |= set(access.implicit)
    if not access.addresses:
        origins = access.symbols.union(*(values.origins.get(name, frozenset()) for name in access.reads))
        for name in access.writes:
            values.origins[name] = values.origins.get(name, frozenset()) | origins
    return before != (len(values.inexact), len(values.places), sum(map(len, values.origins.values())))
