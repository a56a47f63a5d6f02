"""Arguments of a launch: arrays become buffers in global memory, numbers and structs the bytes of parameters; outputs are read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from tcemu.kernels.ptx.linker.linked_kernel import Kernel, align_up, byte_size
from tcemu.kernels.ptx.simt.device_memory import CONST_ROOM, FIRST_ROOM, room_start
from tcemu.kernels.ptx.simt.tensor_maps import MAP_BYTES, TensorMap
from tcemu.kernels.ptx.text.module import Variable
from tcemu.kernels.ptx.text.ptx_types import KINDS

MAX_LAUNCH_BYTES = 1 << 35  # of a launch's variables and parameters, half of a large GPU's memory
ALIGNMENT = 256  # of a buffer, in bytes, as by cudaMalloc
FLOATS = {"f16": np.float16, "f32": np.float32, "f64": np.float64}


@dataclass(frozen=True)
class BufferPointer:
    """A pointer into an array: the argument of `tcemu.ptx.run` for a pointer that does not begin at the first byte, or for an array that
    several pointers share.

    Args:
        data: The array, whose contents `run` returns; or an int, the number of the argument that is that array.
        offset: Bytes from the beginning of the array.

    Raises:
        ValueError: The offset is negative.
    """

    data: Any = field(repr=False)
    offset: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.offset, int | np.integer) or self.offset < 0:
            raise ValueError(f"offset: got {self.offset!r}; expected bytes from the beginning of the array, 0 or more")


@dataclass(frozen=True)
class PointerTable:
    """An array some of whose words are pointers: the argument of `tcemu.ptx.run` for an array of addresses, as grouped products take it.

    Args:
        data: The array. The kernel finds addresses at the positions of `pointers`, and the array's own contents elsewhere.
        pointers: For byte positions in the array, multiples of 8, pointers into further arrays. `run` returns these arrays after those of
            the arguments, each once, in the order in which the tables name them; or, where `data` of a pointer is an int, the pointer leads
            into the argument with that number.

    Raises:
        ValueError: A position is not a word of the array.
    """

    data: Any = field(repr=False)
    pointers: Mapping[int, BufferPointer]

    def __post_init__(self) -> None:
        size = np.asarray(self.data).nbytes
        for byte in self.pointers:
            if byte % 8 or not 0 <= byte <= size - 8:
                raise ValueError(f"pointers: got the position {byte}; expected a multiple of 8 in an array of {size} bytes")


@dataclass(frozen=True)
class Buffer:
    """The memory of an argument or a variable, in a room of its own."""

    name: str
    room: int
    start: int  # position in global memory, in words
    data: np.ndarray  # uint8: initial contents

    @property
    def address(self) -> int:
        """The address of the first byte."""
        return room_start(self.room)


@dataclass
class LaunchInputs:
    """The initial memory and the parameters of a launch."""

    buffers: list[Buffer] = field(default_factory=list)  # of constants and variables, then of the arguments, case by case
    outputs: list[tuple[tuple[int, ...], np.dtype, list[int]]] = field(default_factory=list)  # shape, dtype and buffers of each array
    parameters: np.ndarray = field(default_factory=lambda: np.zeros((1, 0), np.uint8))  # uint8[cases, bytes]
    word_count: int = 0  # words of global memory
    reached: dict[int, Buffer] = field(default_factory=dict)  # by the identity of an array to which a table points
    arrays: dict[int, int] = field(default_factory=dict)  # number of the output to which a parameter points, by the parameter's byte offset

    def add_buffer(self, name: str, room: int, data: np.ndarray) -> Buffer:
        """Append a buffer."""
        buffer = Buffer(name, room, self.word_count, data)
        self.buffers.append(buffer)
        self.word_count += align_up(max(data.nbytes, 1), ALIGNMENT) // 4
        return buffer

    def initial_memory(self) -> np.ndarray:
        """Return the initial words of global memory."""
        words = np.zeros(_round_up(self.word_count), np.uint32)
        flat = words.view(np.uint8)
        for buffer in self.buffers:
            flat[4 * buffer.start : 4 * buffer.start + buffer.data.nbytes] = buffer.data
        return words

    def room_table(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the start of each room in words, and its size in bytes."""
        count = _round_up(max((buffer.room for buffer in self.buffers), default=0) + 1)
        starts, sizes = np.zeros(count, np.int64), np.zeros(count, np.uint64)
        for buffer in self.buffers:
            starts[buffer.room], sizes[buffer.room] = buffer.start, buffer.data.nbytes
        return starts, sizes

    def read_outputs(self, words: np.ndarray) -> list[np.ndarray]:
        """Return the arguments that are arrays, as the words of global memory have them."""
        flat, found = np.ascontiguousarray(words).view(np.uint8), []
        for shape, dtype, numbers in self.outputs:
            buffers = [self.buffers[number] for number in numbers]
            parts = [flat[4 * buffer.start : 4 * buffer.start + buffer.data.nbytes] for buffer in buffers]
            found.append(np.concatenate(parts).view(dtype).reshape(shape) if parts else np.zeros(shape, dtype))
        return found


def _round_up(count: int) -> int:
    """Round a size up, so that launches of about the same size share compiled programs."""
    step = max(1 << max(count - 1, 1).bit_length() - 3, 32)
    return align_up(count, step)


def place_arguments(kernel: Kernel, args: Sequence[Any], cases: int | None) -> LaunchInputs:
    """Return the memory and the parameters of a launch. Raises TypeError or ValueError that name the parameter."""
    parameters = kernel.entry.parameters
    if len(args) != len(parameters):
        listed = ", ".join(f".{each.kind} {each.name}" for each in parameters)
        raise ValueError(f"args: got {len(args)}; {kernel.entry.name} has {len(parameters)} parameters: {listed or 'none'}")
    if cases is not None:
        for parameter, value in zip(parameters, args, strict=True):
            if _is_array(value):
                _case_values(parameter, value, cases)
    _check_memory(kernel, cases or 1)
    try:
        return _place_arguments(kernel, args, cases)
    except MemoryError:
        raise ValueError(f"the launch needs more memory than this machine has: {_memory_parts(kernel, cases or 1)[0]}") from None


def _memory_parts(kernel: Kernel, cases: int) -> list[str]:
    """Describe the variables and the parameters of a launch, the largest first."""
    return [f"{name} has {size:,} bytes" for size, name in sorted(_memory_sizes(kernel, cases), reverse=True)]


def _memory_sizes(kernel: Kernel, cases: int) -> list[tuple[int, str]]:
    sizes = [(byte_size(variable), f"the variable {variable.name}") for variable in kernel.globals]
    return [*sizes, (cases * _parameter_room(kernel), f"the memory of the parameters of {cases:,} cases")]


def _parameter_room(kernel: Kernel) -> int:
    return align_up(max(kernel.parameter_bytes, 1), 16)


def _check_memory(kernel: Kernel, cases: int) -> None:
    """Raise ValueError if the variables and parameters of a launch are too large to be emulated."""
    total = sum(size for size, _ in _memory_sizes(kernel, cases))
    if total > MAX_LAUNCH_BYTES:
        raise ValueError(
            f"{_memory_parts(kernel, cases)[0]}; the variables and parameters of an emulated launch have at most {MAX_LAUNCH_BYTES:,}. "
            "Declare a smaller array, or launch fewer cases at once"
        )


def _place_arguments(kernel: Kernel, args: Sequence[Any], cases: int | None) -> LaunchInputs:
    parameters = kernel.entry.parameters
    inputs = LaunchInputs(parameters=np.zeros((cases or 1, _parameter_room(kernel)), np.uint8))
    inputs.word_count = ALIGNMENT // 4  # no buffer begins at word 0
    inputs.add_buffer("constant memory", CONST_ROOM, np.frombuffer(bytes(kernel.constants), np.uint8).copy())
    for number, variable in enumerate(kernel.globals):
        inputs.add_buffer(variable.name, FIRST_ROOM + number, _initial_bytes(variable))
    _write_pointers(kernel, inputs)
    room = FIRST_ROOM + len(kernel.globals)
    buffers_by_argument: dict[int, list[Buffer]] = {}
    tables: dict[int, PointerTable] = {}
    for number, (parameter, value) in enumerate(zip(parameters, args, strict=True)):
        data = value.data if isinstance(value, TensorMap | BufferPointer) and not isinstance(value.data, int) else value
        if isinstance(data, PointerTable) and cases is not None:
            raise ValueError(f"{parameter.name}: a PointerTable is an argument of one launch; leave cases out")
        if isinstance(data, PointerTable):
            tables[number], data = data, data.data
        if _is_pointer(parameter, value, cases) or (data is not value and _is_array(data)):
            buffers_by_argument[number] = _add_buffers(inputs, parameter, _native_array(parameter, data), cases, room)
            room += len(buffers_by_argument[number])
    for number, table in tables.items():
        _write_table(inputs, parameters[number], table, buffers_by_argument, number)
    for number, (parameter, value) in enumerate(zip(parameters, args, strict=True)):
        start, size = kernel.parameters[parameter.name], byte_size(parameter)
        argument = value.data if isinstance(value, TensorMap | BufferPointer) and isinstance(value.data, int) else number
        if argument in buffers_by_argument:
            inputs.arrays[start] = list(buffers_by_argument).index(argument)
        if isinstance(value, BufferPointer):
            encoded = _encode_pointers(parameter, value, buffers_by_argument.get(argument), len(args))
        elif isinstance(value, TensorMap):
            maps = _encode_tensor_maps(parameter, value, buffers_by_argument.get(argument), len(args), size)
            encoded = [each.view(np.uint8) for each in maps]
        elif number in buffers_by_argument:  # an array or a table
            encoded = [np.frombuffer(np.uint64(buffer.address).tobytes(), np.uint8) for buffer in buffers_by_argument[number]]
        else:
            values = [value] if cases is None else _case_values(parameter, value, cases)
            encoded = [np.frombuffer(_encode_argument(parameter, single, size), np.uint8) for single in values]
        for case, data in enumerate(encoded):
            inputs.parameters[case, start : start + size] = data
    return inputs


def _add_buffers(inputs: LaunchInputs, parameter: Variable, array: np.ndarray, cases: int | None, room: int) -> list[Buffer]:
    """Add the buffers of an array that is returned, one for each case, in rooms from `room` on."""
    buffers = []
    for case, data in enumerate(array[None] if cases is None else _case_values(parameter, array, cases)):
        name = parameter.name if cases is None else f"{parameter.name} of case {case}"
        buffers.append(inputs.add_buffer(name, room + case, np.ascontiguousarray(data).reshape(-1).view(np.uint8)))
    numbers = range(len(inputs.buffers) - len(buffers), len(inputs.buffers))
    inputs.outputs.append((array.shape, array.dtype, list(numbers)))
    return buffers


def _write_table(
    inputs: LaunchInputs, parameter: Variable, table: PointerTable, buffers_by_argument: dict[int, list[Buffer]], number: int
) -> None:
    """Write the addresses of a table into its buffer, and add the arrays to which they lead."""
    words = buffers_by_argument[number][0].data.copy()
    for byte, pointer in table.pointers.items():
        if isinstance(pointer.data, int):
            (target,) = buffers_by_argument[pointer.data]
        elif id(pointer.data) in inputs.reached:
            target = inputs.reached[id(pointer.data)]
        else:
            room = inputs.buffers[-1].room + 1
            (target,) = _add_buffers(
                inputs, replace(parameter, name=f"memory behind {parameter.name}"), np.asarray(pointer.data), None, room
            )
            inputs.reached[id(pointer.data)] = target
        words[byte : byte + 8] = np.frombuffer(np.uint64(target.address + pointer.offset).tobytes(), np.uint8)
    position = next(i for i, buffer in enumerate(inputs.buffers) if buffer is buffers_by_argument[number][0])
    inputs.buffers[position] = buffers_by_argument[number][0] = replace(inputs.buffers[position], data=words)


def _encode_pointers(parameter: Variable, value: BufferPointer, buffers: list[Buffer] | None, count: int) -> list[np.ndarray]:
    """Encode a pointer into a buffer, once for each case; `count`: number of arguments."""
    if parameter.shape or KINDS[parameter.kind].bits != 64:
        raise TypeError(f"{parameter.name}: got a BufferPointer, which has 64 bits; the parameter is .{parameter.kind}")
    if buffers is None:
        raise ValueError(
            f"{parameter.name}: its BufferPointer points into {value.data!r}; expected an array, or the number of an argument that is one, "
            f"0 to {count - 1}"
        )
    return [np.frombuffer(np.uint64(buffer.address + value.offset).tobytes(), np.uint8) for buffer in buffers]


def _encode_tensor_maps(parameter: Variable, value: TensorMap, buffers: list[Buffer] | None, count: int, size: int) -> list[np.ndarray]:
    """Encode a tensor map, once for each case.

    Args:
        parameter: The parameter that takes the map.
        value: The map.
        buffers: The buffers of the map's array; None: there is no such array.
        count: Number of arguments.
        size: Bytes of the parameter.
    """
    if size != MAP_BYTES:
        raise TypeError(f"{parameter.name}: got a TensorMap, which has {MAP_BYTES} bytes; the parameter has {size}")
    if buffers is None:
        raise ValueError(
            f"{parameter.name}: its TensorMap points to {value.data!r}; expected an array, or the number of an argument that "
            f"is one, 0 to {count - 1}"
        )
    return [value.encode(buffer.address, buffer.data.nbytes) for buffer in buffers]


def _is_pointer(parameter: Variable, value: Any, cases: int | None) -> bool:
    """Return True for an array to which the parameter points; with cases, it has an axis besides theirs."""
    return not parameter.shape and KINDS[parameter.kind].bits == 64 and _is_array(value) and value.ndim > (cases is not None)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | jax.Array)


def _native_array(parameter: Variable, value: Any) -> np.ndarray:
    """Return an array as a kernel sees it, in the machine's byte order. Raises TypeError for one that is no plain memory."""
    if np.ma.is_masked(value):
        raise TypeError(f"{parameter.name}: got a masked array; what its mask hides has no value: give x.filled(VALUE)")
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise TypeError(f"{parameter.name}: got an array of Python objects; expected numbers")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _case_values(parameter: Variable, value: Any, cases: int) -> Any:
    shape = np.shape(value) if not isinstance(value, bytes | str) else ()
    if shape[:1] != (cases,):
        raise ValueError(f"{parameter.name}: got shape {list(shape)}; with cases={cases} every argument has a first axis of {cases}")
    return np.asarray(value)


def _initial_bytes(variable: Variable) -> np.ndarray:
    data = np.zeros(byte_size(variable), np.uint8)
    initial = np.frombuffer(variable.initial or b"", np.uint8)
    data[: initial.size] = initial
    return data


def _write_pointers(kernel: Kernel, inputs: LaunchInputs) -> None:
    """Write the addresses that initial contents of variables contain."""
    by_name = {buffer.name: buffer for buffer in inputs.buffers}
    for variable in kernel.module.variables:
        if variable.space not in ("global", "const"):
            continue
        data = by_name[variable.name].data if variable.name in by_name else by_name["constant memory"].data
        base = 0 if variable.name in by_name else kernel.symbols.get(variable.name, 0) - room_start(CONST_ROOM)
        for pointer in variable.pointers:
            address = kernel.symbols[pointer.symbol.name] + pointer.symbol.offset >> pointer.shift
            part = np.frombuffer(np.uint64(address).tobytes(), np.uint8)[: pointer.width]
            data[base + pointer.byte : base + pointer.byte + pointer.width] = part


def _encode_argument(parameter: Variable, value: Any, size: int) -> bytes:
    """Return the bytes of a number, or of a struct that is passed by value."""
    if parameter.shape:
        data = value if isinstance(value, bytes) else value.tobytes() if isinstance(value, np.generic | np.ndarray) else None
        if data is None or len(data) != size:
            got = type(value).__name__ if data is None else f"{len(data)} bytes"
            raise TypeError(
                f"{parameter.name}: got {got}; expected bytes or a NumPy value of {size} bytes, which the kernel takes by value"
            )
        return data
    if _is_array(value) and value.ndim:
        raise TypeError(f"{parameter.name}: got an array; the parameter is a number of type .{parameter.kind}, a pointer has 64 bits")
    return _encode_number(parameter, value.item() if _is_array(value) else value)


def _encode_number(parameter: Variable, value: Any) -> bytes:
    kind = KINDS[parameter.kind]
    if kind.name in FLOATS:
        if not isinstance(value, int | float | np.integer | np.floating):
            raise TypeError(f"{parameter.name}: got {type(value).__name__}; expected a number, the parameter's type is .{kind.name}")
        with np.errstate(over="ignore"):
            number = FLOATS[kind.name](value)
        if np.isinf(number) and abs(value) != np.inf:
            raise ValueError(f"{parameter.name}: got {value}; a parameter of type .{kind.name} does not reach it")
        return number.tobytes()
    if isinstance(value, np.floating | np.void) and value.nbytes * 8 == kind.bits and kind.name.startswith("b"):
        return value.tobytes()
    if not isinstance(value, int | np.integer | np.bool_):
        expected = "an integer, or for a pointer a NumPy or JAX array" if kind.bits == 64 else "an integer"
        raise TypeError(f"{parameter.name}: got {type(value).__name__}; expected {expected}, the parameter's type is .{kind.name}")
    low, high = -(1 << kind.bits - 1), (1 << kind.bits) - 1  # nvcc writes .u32 for int too
    if not low <= int(value) <= high:
        raise ValueError(f"{parameter.name}: got {value}; a parameter of type .{kind.name} holds {low} to {high}")
    return (int(value) % (1 << kind.bits)).to_bytes(kind.bits // 8, "little")
