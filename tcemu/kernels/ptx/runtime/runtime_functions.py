"""Functions of the CUDA runtime that a kernel calls: `vprintf`, `malloc`, `free` and `__assertfail`.

Threads call them one after the other, block by block, in the order of their numbers; on a GPU the order is unspecified. Text is collected
and returned. The heap has the 8 MiB that a GPU's has unless a program asks for more. Source: CUDA C++ programming guide, formatted output,
dynamic global memory allocation, assertions; PTX interoperability guide, section 7.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from tcemu.base.errors import UndefinedBehaviour
from tcemu.kernels.ptx.linker.linked_kernel import LinkedBlock, align_up
from tcemu.kernels.ptx.runtime.kernel_arguments import LaunchInputs
from tcemu.kernels.ptx.simt.chunk import Chunk, NameTable
from tcemu.kernels.ptx.simt.device_memory import LOCAL_ROOM, OFFSET_MASK, ROOM_BITS, SHARED_OFFSET_MASK, SHARED_ROOM
from tcemu.kernels.ptx.simt.faults import Trapped
from tcemu.kernels.ptx.text.module import Integer, Operand, Register, Symbol, Vector

Describer = Callable[[int, int], str]  # returns a call in words, given the block and the thread
HEAP_BYTES = 8 << 20  # the default of cudaLimitMallocHeapSize
HEAP_ALIGNMENT = 16
MAX_TEXT_BYTES = 1 << 16  # of a string that a kernel prints
CONVERSION = re.compile(r"%([-+ #0]*)(\*|\d+)?(?:\.(\*|\d+)?)?(hh|h|ll|l|j|z|t|L)?([diouxXfFeEgGaAcsp%])")
WIDE_LENGTHS = ("ll", "l", "j", "z", "t")  # length modifiers of arguments of 8 bytes
INTEGERS, FLOATS = "diouxX", "fFeEgGaA"


class RuntimeFunctions:
    """The functions' state in a launch: the text that was printed, and the heap."""

    def __init__(self, inputs: LaunchInputs, heap_start: int) -> None:
        self.inputs = inputs
        self.text: list[str] = []
        self.heap = Heap(heap_start)

    @property
    def printed(self) -> str:
        """The text so far."""
        return "".join(self.text)

    def call(self, name: str, linked: LinkedBlock, chunk: Chunk, mask: np.ndarray, describe: Describer) -> None:
        """Execute a call for the threads of the mask, bool[blocks, threads], and write its results.

        Raises:
            Trapped: An assertion failed.
            UndefinedBehaviour: `free` of what `malloc` did not give, or a pointer to a string that leads nowhere.
        """
        lists = [operand.elements for operand in linked.require_terminator().statement.operands if isinstance(operand, Vector)]
        results, arguments = (lists[0], lists[1]) if len(lists) > 1 else ((), lists[0] if lists else ())
        memory = _HostMemory(self.inputs, chunk)
        for row, thread in np.argwhere(mask):
            place = int(row), int(thread)
            values = [memory.operand(argument, linked.names, *place) for argument in arguments]
            value = getattr(self, f"_{name.lstrip('_')}")(memory, values, place, describe)
            for result in results:
                memory.write_operand(result, linked.names, *place, value)
        memory.store()

    def _vprintf(self, memory: _HostMemory, values: list[int], place: tuple[int, int], describe: Describer) -> int:
        form = memory.string(values[0], *place, describe)
        text, count = format_text(form, _ArgumentReader(memory, values[1], place, describe))
        self.text.append(text)
        return count

    def _malloc(self, memory: _HostMemory, values: list[int], place: tuple[int, int], describe: Describer) -> int:
        return self.heap.allocate(values[0])

    def _free(self, memory: _HostMemory, values: list[int], place: tuple[int, int], describe: Describer) -> int:
        if values[0] and self.heap.blocks.pop(values[0], None) is None:
            raise UndefinedBehaviour(f"{describe(*place)}: free: at {values[0]:#x} is no block that malloc gave")
        return 0

    def _assertfail(self, memory: _HostMemory, values: list[int], place: tuple[int, int], describe: Describer) -> int:
        message, file, function = (memory.string(values[i], *place, describe) for i in (0, 1, 3))
        raise Trapped(f"{describe(*place)}: {file}:{values[2] & 0xFFFFFFFF}: {function}: assertion {message} failed")


def add_heap(inputs: LaunchInputs) -> int:
    """Add the heap to the memory of a launch; return the address of its first byte."""
    room = max(buffer.room for buffer in inputs.buffers) + 1
    return inputs.add_buffer("the heap", room, np.zeros(HEAP_BYTES, np.uint8)).address


class Heap:
    """Blocks of memory by their addresses; the first gap that is large enough is given."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.blocks: dict[int, int] = {}  # sizes by address

    def allocate(self, size: int) -> int:
        """Return the address of a new block, or 0 if there is no room."""
        size = align_up(max(size, 1), HEAP_ALIGNMENT)
        address = self.start
        for other in sorted(self.blocks):
            if other - address >= size:
                break
            address = other + self.blocks[other]
        if address + size > self.start + HEAP_BYTES:
            return 0
        self.blocks[address] = size
        return address


class _HostMemory:
    """The memory of a chunk, and the operands of a call, on the host."""

    def __init__(self, inputs: LaunchInputs, chunk: Chunk) -> None:
        self.inputs, self.chunk = inputs, chunk
        self.local = np.array(chunk["local"]).view(np.uint8)  # a copy: results are written into it
        self.shared, self.memory = (np.asarray(chunk[name]).view(np.uint8) for name in ("shared", "memory"))
        self.registers: dict[str, np.ndarray] = {}  # values that the call has written

    def operand(self, operand: Operand, names: NameTable, row: int, thread: int) -> int:
        """Return an argument: a register, a constant, or 8 bytes of a parameter."""
        if isinstance(operand, Register):
            return int(np.asarray(self.chunk.register(names.qualified_name(operand), names.kind(operand)))[row, thread])
        if isinstance(operand, Symbol):
            start = names.symbols[operand.name]
            return int.from_bytes(self.local[row, thread, start : start + 8].tobytes(), "little")
        assert isinstance(operand, Integer)
        return operand.value

    def write_operand(self, operand: Operand, names: NameTable, row: int, thread: int, value: int) -> None:
        """Write a result: a register, or 8 bytes of a parameter, whose room is a multiple of 16."""
        if isinstance(operand, Symbol):
            start = names.symbols[operand.name]
            self.local[row, thread, start : start + 8] = np.frombuffer((value % 2**64).to_bytes(8, "little"), np.uint8)
        elif isinstance(operand, Register):
            name = names.qualified_name(operand)
            if name not in self.registers:
                self.registers[name] = np.array(self.chunk.register(name, names.kind(operand)))
            values = self.registers[name]
            values[row, thread] = value % 2 ** (8 * values.dtype.itemsize)

    def store(self) -> None:
        """Write the results to the chunk."""
        self.chunk["local"] = jnp.asarray(self.local.view(np.uint32))
        for name, values in self.registers.items():
            self.chunk.write_register(name, jnp.asarray(values))

    def read(self, address: int, size: int, row: int, thread: int) -> bytes:
        """Return bytes at a generic address; fewer where the memory ends."""
        room, offset = address >> ROOM_BITS, address & OFFSET_MASK
        if room == LOCAL_ROOM:
            return self.local[row, thread, offset : offset + size].tobytes()
        if room == SHARED_ROOM:
            return self.shared[row, offset & SHARED_OFFSET_MASK :][:size].tobytes()
        for buffer in self.inputs.buffers:
            if buffer.room == room:
                end = 4 * buffer.start + buffer.data.nbytes
                return self.memory[4 * buffer.start + offset : min(4 * buffer.start + offset + size, end)].tobytes()
        return b""

    def string(self, address: int, row: int, thread: int, describe: Describer) -> str:
        """Return the text at an address up to the zero byte."""
        data, found = self.read(address, MAX_TEXT_BYTES, row, thread), b"\0"
        text, found, _ = data.partition(b"\0")
        if not found:
            raise UndefinedBehaviour(f"{describe(row, thread)}: at {address:#x} is no text that ends with a zero byte")
        return text.decode(errors="replace")


class _ArgumentReader:
    """The arguments of a `vprintf`, which lie one after the other, each at a multiple of its size."""

    def __init__(self, memory: _HostMemory, address: int, place: tuple[int, int], describe: Describer) -> None:
        self.memory, self.address, self.place, self.describe = memory, address, place, describe

    def integer(self, size: int, signed: bool) -> int:
        """Return the next argument of 4 or 8 bytes."""
        self.address = align_up(self.address, size)
        data = self.memory.read(self.address, size, *self.place)
        if len(data) != size:
            raise UndefinedBehaviour(f"{self.describe(*self.place)}: vprintf has no argument at {self.address:#x}")
        self.address += size
        return int.from_bytes(data, "little", signed=signed)

    def double(self) -> float:
        """Return the next argument as a double."""
        return struct.unpack("<d", struct.pack("<Q", self.integer(8, False)))[0]

    def string(self) -> str:
        """Return the text to which the next argument points."""
        address = self.integer(8, False)
        return self.memory.string(address, *self.place, self.describe) if address else "(null)"


def format_text(form: str, arguments: _ArgumentReader) -> tuple[str, int]:
    """Format arguments as C's printf does; return the text and the number of arguments."""
    count = 0

    def replace(found: re.Match[str]) -> str:
        nonlocal count
        flags, width, precision, length, kind = found.groups()
        if kind == "%":
            return "%"
        given = [arguments.integer(4, True) if part == "*" else part for part in (width, precision)]
        count += 1 + (width == "*") + (precision == "*")
        form = "%" + flags + ("" if given[0] is None else str(given[0]))
        form += ("." + str(given[1] or "")) if "." in found[0] else ""
        if kind in INTEGERS:
            value = arguments.integer(8 if length in WIDE_LENGTHS else 4, kind in "di")
            narrow = {"hh": 8, "h": 16}.get(length or "")
            if narrow:
                value %= 1 << narrow
                value -= (kind in "di" and value >> narrow - 1) << narrow
            return (form + kind) % value
        if kind in FLOATS:
            value = arguments.double()
            return _hexadecimal_float(value, kind) if kind in "aA" else (form + kind) % value
        if kind == "c":
            return (form + "c") % chr(arguments.integer(4, False) & 0xFF)
        if kind == "p":
            return (form + "s") % f"{arguments.integer(8, False):#x}"
        return (form + "s") % arguments.string()

    return CONVERSION.sub(replace, form), count


def _hexadecimal_float(value: float, kind: str) -> str:
    text = re.sub(r"\.?0*p", "p", float(value).hex()) if np.isfinite(value) else str(value)
    return text.upper() if kind == "A" else text
