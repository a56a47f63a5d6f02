"""Arguments of a launch: arrays become buffers in global memory, numbers and structs the bytes of parameters; outputs are read back."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from tcemu.kernels.ptx.linker.linked_kernel import Kernel, align_up, byte_size
from tcemu.kernels.ptx.simt.device_memory import CONST_ROOM, FIRST_ROOM, room_start
from tcemu.kernels.ptx.simt.tensor_maps import MAP_BYTES, TensorMap
from tcemu.kernels.ptx.text.module import Variable
from tcemu.kernels.ptx.text.ptx_types import KINDS

MAX_LAUNCH_BYTES = 1 << 35  # of a launch's variables and parameters, half of a large GPU's memory
ALIGNMENT = 256  # of a buffer, in bytes, as by cudaMalloc
POINTER_BYTES = 8
FLOATS = {"f16": np.float16, "f32": np.float32, "f64": np.float64}


@dataclass(frozen=True)
class BufferPointer:
    """A pointer into an array: the argument of `tcemu.ptx.run` for a pointer that does not begin at the first byte, or for an array that
    several pointers share.

    Args:
        data: The array, whose contents `run` returns; or an int, the number of the argument that is that array.
        offset: Bytes from the beginning of the array.
        name: The array's name in errors; "": that of the kernel's parameter.

    Raises:
        ValueError: The offset is negative.
    """

    data: Any = field(repr=False)
    offset: int = 0
    name: str = ""

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
class Struct:
    """A struct that a kernel takes by value, with pointers and tensor maps in it: the argument of `tcemu.ptx.run` for such a parameter.

    `run` returns the arrays to which the struct points after those of the arguments, each once, in the order of the fields; or, where the
    data of a pointer is an int, the pointer leads into the argument with that number.

    Args:
        layout: Structured NumPy dtype (`align=True` gives the layout of C) or `ctypes.Structure` class with the struct's fields. Pointers
            are 64-bit integers or objects in a dtype, and c_void_p, pointers or 64-bit integers in ctypes.
        values: The value of each field by name: a number; for a pointer an array, a `BufferPointer`, a `PointerTable` or None; for a tensor
            map, a field of 128 bytes, a `TensorMap`; for a struct within the struct a mapping; for an array within it a sequence; for any
            field its bytes.

    Raises:
        TypeError: The layout is no struct, or a value does not fit its field.
        ValueError: A field has no value, or a value no field.
    """

    layout: Any
    values: Mapping[str, Any] = field(repr=False)

    def __post_init__(self) -> None:
        tuple(self.fields())

    @property
    def dtype(self) -> np.dtype:
        """The layout as a NumPy dtype."""
        if isinstance(self.layout, type) and issubclass(self.layout, ctypes.Structure):
            return _ctypes_dtype(self.layout, self.layout.__name__)
        dtype = np.dtype(self.layout)
        if dtype.names is None:
            raise TypeError(f"layout: got {self.layout!r}; expected a structured NumPy dtype or a ctypes.Structure class")
        return dtype

    def fields(self) -> Iterator[StructField]:
        """Yield the fields with their values, those within structs and arrays one by one."""
        return _split_field(StructField("", 0, self.dtype, self.values))


class StructField(NamedTuple):
    """A field of a struct and its value."""

    name: str  # as "a.b[2]"
    offset: int  # bytes from the beginning of the struct
    dtype: np.dtype
    value: Any

    @property
    def is_pointer(self) -> bool:
        """The value is a pointer or an array to which the field points."""
        return isinstance(self.value, BufferPointer | PointerTable) or (_is_array(self.value) and self.value.ndim > 0)


def _ctypes_dtype(kind: Any, name: str) -> np.dtype:
    """Return the dtype of a ctypes type; pointers are integers of 64 bits."""
    if issubclass(kind, ctypes.Structure):
        fields = getattr(kind, "_fields_", ())
        if any(len(each) > 2 for each in fields):
            raise TypeError(f"layout: {name} has bit fields; give such a struct as bytes")
        return np.dtype(
            {
                "names": [each[0] for each in fields],
                "formats": [_ctypes_dtype(each[1], f"{name}.{each[0]}") for each in fields],
                "offsets": [getattr(kind, each[0]).offset for each in fields],
                "itemsize": ctypes.sizeof(kind),
            }
        )
    if issubclass(kind, ctypes.Array):
        return np.dtype((_ctypes_dtype(kind._type_, name), (kind._length_,)))
    if _has_pointers(kind):
        return np.dtype(np.uint64)
    try:
        return np.dtype(kind)
    except TypeError:
        raise TypeError(f"layout: {name} is {kind.__name__}; expected numbers, pointers, structs and arrays of them") from None


def _split_field(given: StructField) -> Iterator[StructField]:
    """Yield the fields within a field; the field itself if its value is a number, a pointer, a tensor map or bytes."""
    name, offset, dtype, value = given
    if isinstance(value, TensorMap | bytes):
        size = MAP_BYTES if isinstance(value, TensorMap) else len(value)
        if size != dtype.itemsize:
            raise TypeError(f"{name or 'values'}: got {type(value).__name__} of {size} bytes; the field has {dtype.itemsize}")
        yield given
    elif dtype.subdtype is not None:
        base, shape = dtype.subdtype
        for number, each in enumerate(_sequence(name, value, shape[0])):
            inner = np.dtype((base, shape[1:])) if shape[1:] else base
            yield from _split_field(StructField(f"{name}[{number}]", offset + number * inner.itemsize, inner, each))
    elif dtype.names is not None and isinstance(value, np.void) and value.dtype == dtype and not dtype.hasobject:
        yield StructField(name, offset, dtype, value.tobytes())
    elif dtype.names is not None:
        if not isinstance(value, Mapping) or set(value) != set(dtype.names):
            got = f"fields {', '.join(value)}" if isinstance(value, Mapping) else type(value).__name__
            raise ValueError(f"{name or 'values'}: got {got}; expected a mapping with the fields {', '.join(dtype.names)}")
        for part in dtype.names:
            kind, start = dtype.fields[part][:2]  # type: ignore[index]
            yield from _split_field(StructField(f"{name}.{part}" if name else part, offset + start, kind, value[part]))
    else:
        _check_leaf(given)
        yield given


def _sequence(name: str, value: Any, count: int) -> Sequence[Any]:
    if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str) or len(value) != count:
        got = f"{len(value)} values" if isinstance(value, Sequence | np.ndarray) else type(value).__name__
        raise TypeError(f"{name}: got {got}; expected a sequence of {count} values")
    return value  # type: ignore[return-value]


def _check_leaf(given: StructField) -> None:
    """Raise TypeError unless a value fits a field that is a number or a pointer."""
    name, _, dtype, value = given
    may_point = dtype.itemsize == POINTER_BYTES and dtype.kind in "uiO"
    if (given.is_pointer or value is None) and may_point:
        return
    if given.is_pointer or value is None or dtype.kind == "V":
        raise TypeError(f"{name}: got {type(value).__name__}; the field has {dtype.itemsize} bytes of dtype {dtype}, a pointer has 64 bits")
    if not isinstance(value, int | float | np.number | np.bool_):
        what = "an array, a BufferPointer, a PointerTable, None or a number" if may_point else "a number"
        raise TypeError(f"{name}: got {type(value).__name__}; expected {what}")
    _encode_leaf(given)


def _encode_leaf(given: StructField) -> bytes:
    """Return the bytes of a number. Raises TypeError or ValueError for one that the field does not hold."""
    dtype = np.dtype(np.uint64) if given.dtype.kind == "O" else given.dtype
    value = 0 if given.value is None else given.value
    if dtype.kind not in "ui":
        return np.asarray(value).astype(dtype).tobytes()
    if not isinstance(value, int | np.integer | np.bool_):
        raise TypeError(f"{given.name}: got {type(value).__name__}; expected an integer, the field is {dtype}")
    return _encode_integer(given.name, int(value), dtype.itemsize, f"field of {dtype}")


def _encode_integer(name: str, value: int, size: int, holder: str) -> bytes:
    low, high = -(1 << 8 * size - 1), (1 << 8 * size) - 1  # nvcc writes .u32 for int too
    if not low <= value <= high:
        raise ValueError(f"{name}: got {value}; a {holder} holds {low} to {high}")
    return (value % (1 << 8 * size)).to_bytes(size, "little")


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


class Reference(NamedTuple):
    """A pointer or a tensor map in the parameters of a launch, or in a buffer."""

    holder: int | None  # output with the reference in its bytes, by its number; None: the parameters of a case
    byte: int  # position of the reference
    output: int  # output to which the reference leads
    offset: int = 0  # bytes from the beginning of the output; of a tensor map 0
    tensor_map: TensorMap | None = None


@dataclass
class LaunchInputs:
    """The initial memory and the parameters of a launch."""

    buffers: list[Buffer] = field(default_factory=list)  # of constants and variables, then of the arguments, case by case
    outputs: list[tuple[tuple[int, ...], np.dtype, list[int]]] = field(default_factory=list)  # shape, dtype and buffers of each array
    parameters: np.ndarray = field(default_factory=lambda: np.zeros((1, 0), np.uint8))  # uint8[cases, bytes]
    word_count: int = 0  # words of global memory
    reached: dict[int, Buffer] = field(default_factory=dict)  # by the identity of an array to which a table or a struct points
    references: list[Reference] = field(default_factory=list)  # the same ones for every case

    def add_reference(self, holder: Buffer | None, byte: int, target: Buffer, value: BufferPointer | TensorMap) -> None:
        """Note a pointer or a tensor map. holder: the buffer that contains it; None: the parameters."""
        numbers = {self.buffers[buffers[0]].room: number for number, (_, _, buffers) in enumerate(self.outputs)}
        place = None if holder is None else numbers[holder.room], byte, numbers[target.room]
        self.references.append(Reference(*place, 0, value) if isinstance(value, TensorMap) else Reference(*place, value.offset))

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
                _case_values(parameter.name, value, cases)
    sizes = [(byte_size(variable), f"the variable {variable.name}") for variable in kernel.globals]
    sizes.append(((cases or 1) * _parameter_room(kernel), f"the memory of the parameters of {cases or 1:,} cases"))
    largest = "{1} has {0:,} bytes".format(*max(sizes))
    if sum(size for size, _ in sizes) > MAX_LAUNCH_BYTES:
        raise ValueError(
            f"{largest}; the variables and parameters of an emulated launch have at most {MAX_LAUNCH_BYTES:,}. Declare a smaller array, or "
            "launch fewer cases at once"
        )
    try:
        return _place_arguments(kernel, args, cases)
    except MemoryError:
        raise ValueError(f"the launch needs more memory than this machine has: {largest}") from None


def _parameter_room(kernel: Kernel) -> int:
    return align_up(max(kernel.parameter_bytes, 1), 16)


def _place_arguments(kernel: Kernel, args: Sequence[Any], cases: int | None) -> LaunchInputs:
    parameters = kernel.entry.parameters
    inputs = LaunchInputs(parameters=np.zeros((cases or 1, _parameter_room(kernel)), np.uint8))
    inputs.word_count = ALIGNMENT // 4  # no buffer begins at word 0
    inputs.add_buffer("constant memory", CONST_ROOM, np.frombuffer(bytes(kernel.constants), np.uint8).copy())
    for number, variable in enumerate(kernel.globals):
        inputs.add_buffer(variable.name, FIRST_ROOM + number, _initial_bytes(variable))
    _write_pointers(kernel, inputs)
    buffers: dict[int, list[Buffer]] = {}  # of the arguments that are arrays, by number
    tables: dict[int, PointerTable] = {}
    for number, (parameter, value) in enumerate(zip(parameters, args, strict=True)):
        data = value.data if isinstance(value, TensorMap | BufferPointer) and not isinstance(value.data, int) else value
        if isinstance(data, PointerTable | Struct) and cases is not None:
            raise ValueError(f"{parameter.name}: a {type(data).__name__} is an argument of one launch; leave cases out")
        if isinstance(data, PointerTable):
            tables[number], data = data, data.data
        if _is_pointer(parameter, value, cases) or (data is not value and _is_array(data)):
            name = (value.name if isinstance(value, BufferPointer) else "") or parameter.name
            buffers[number] = _add_buffers(inputs, name, _native_array(parameter.name, data), cases)
    for number, table in tables.items():
        buffers[number][0] = _write_table(inputs, parameters[number].name, table, buffers[number][0], buffers)
    for number, (parameter, value) in enumerate(zip(parameters, args, strict=True)):
        start, size = kernel.parameters[parameter.name], byte_size(parameter)
        argument = value.data if isinstance(value, TensorMap | BufferPointer) and isinstance(value.data, int) else number
        if isinstance(value, BufferPointer | TensorMap):
            _check_reference(parameter, value, argument in buffers, len(args))
        if isinstance(value, Struct):
            encoded = [_encode_struct(inputs, parameter, value, buffers, start, size)]
        elif argument in buffers:
            reference = value if isinstance(value, BufferPointer | TensorMap) else BufferPointer(value)
            encoded = [_encode_reference(reference, buffer) for buffer in buffers[argument]]
            inputs.add_reference(None, start, buffers[argument][0], reference)
        else:
            values = [value] if cases is None else _case_values(parameter.name, value, cases)
            encoded = [np.frombuffer(_encode_argument(parameter, single, size), np.uint8) for single in values]
        for case, data in enumerate(encoded):
            inputs.parameters[case, start : start + size] = data
    return inputs


def _check_reference(parameter: Variable, value: BufferPointer | TensorMap, known: bool, count: int) -> None:
    """Raise TypeError or ValueError for a pointer or tensor map that does not fit the parameter or, unless `known`, leads to no array."""
    name, size = type(value).__name__, MAP_BYTES if isinstance(value, TensorMap) else POINTER_BYTES
    if byte_size(parameter) != size:
        found = f"{byte_size(parameter)}: .{parameter.kind}{_axes(parameter)}"
        raise TypeError(f"{parameter.name}: got a {name}, which has {size} bytes; the parameter has {found}")
    if not known:
        expected = f"an array, or the number of an argument that is one, 0 to {count - 1}"
        raise ValueError(f"{parameter.name}: its {name} points into {value.data!r}; expected {expected}")


def _encode_reference(value: BufferPointer | TensorMap, buffer: Buffer) -> np.ndarray:
    if isinstance(value, TensorMap):
        return value.encode(buffer.address, buffer.data.nbytes).view(np.uint8)
    return np.frombuffer(np.uint64(buffer.address + value.offset).tobytes(), np.uint8)


def _add_buffers(inputs: LaunchInputs, name: str, array: np.ndarray, cases: int | None) -> list[Buffer]:
    """Add the buffers of an array that is returned, one for each case, in rooms of their own."""
    buffers, room = [], inputs.buffers[-1].room + 1 if len(inputs.buffers) > 1 else FIRST_ROOM
    for case, data in enumerate(array[None] if cases is None else _case_values(name, array, cases)):
        given = name if cases is None else f"{name} of case {case}"
        buffers.append(inputs.add_buffer(given, room + case, np.ascontiguousarray(data).reshape(-1).view(np.uint8)))
    numbers = range(len(inputs.buffers) - len(buffers), len(inputs.buffers))
    inputs.outputs.append((array.shape, array.dtype, list(numbers)))
    return buffers


def _find_buffer(inputs: LaunchInputs, name: str, data: Any, buffers: dict[int, list[Buffer]]) -> Buffer:
    """Return the buffer of a pointer in memory or in a struct: that of an argument, or of an array, which is added once.

    Args:
        inputs: The launch.
        name: What holds the pointer, for messages.
        data: The array or the table to which it points, or the number of an argument.
        buffers: The buffers of the arguments.
    """
    if isinstance(data, int):
        if data not in buffers:
            expected = f"an array, or the number of an argument that is one: {', '.join(map(str, buffers)) or 'none is'}"
            raise ValueError(f"{name}: it points into argument {data}; expected {expected}")
        return buffers[data][0]
    if id(data) not in inputs.reached:
        array = data.data if isinstance(data, PointerTable) else data
        if not _is_array(array):
            raise TypeError(f"{name}: it points into {type(array).__name__}; expected a NumPy or JAX array, or the number of an argument")
        (buffer,) = _add_buffers(inputs, name, _native_array(name, array), None)
        inputs.reached[id(data)] = buffer
        if isinstance(data, PointerTable):
            inputs.reached[id(data)] = _write_table(inputs, name, data, buffer, buffers)
    return inputs.reached[id(data)]


def _write_table(inputs: LaunchInputs, name: str, table: PointerTable, buffer: Buffer, buffers: dict[int, list[Buffer]]) -> Buffer:
    """Write the addresses of a table into its buffer, and add the arrays to which they lead; return the buffer with its contents."""
    words = buffer.data.copy()
    for byte, pointer in table.pointers.items():
        target = _find_buffer(inputs, f"memory behind {name}", pointer.data, buffers)
        words[byte : byte + POINTER_BYTES] = _encode_reference(pointer, target)
        inputs.add_reference(buffer, byte, target, pointer)
    position = next(i for i, each in enumerate(inputs.buffers) if each is buffer)
    inputs.buffers[position] = replace(buffer, data=words)
    return inputs.buffers[position]


def _encode_struct(
    inputs: LaunchInputs, parameter: Variable, struct: Struct, buffers: dict[int, list[Buffer]], start: int, size: int
) -> np.ndarray:
    """Encode a struct of `size` bytes at byte `start` of the parameters, and add the arrays to which it points."""
    if struct.dtype.itemsize != size:
        raise TypeError(f"{parameter.name}: got a Struct of {struct.dtype.itemsize} bytes; the parameter has {size}")
    encoded = np.zeros(size, np.uint8)
    for each in struct.fields():
        value = BufferPointer(each.value) if each.is_pointer and not isinstance(each.value, BufferPointer) else each.value
        if isinstance(value, BufferPointer | TensorMap):
            buffer = _find_buffer(inputs, f"{parameter.name}.{each.name}", value.data, buffers)
            data = _encode_reference(value, buffer)
            inputs.add_reference(None, start + each.offset, buffer, value)
        else:
            data = np.frombuffer(value if isinstance(value, bytes) else _encode_leaf(each), np.uint8)
        encoded[each.offset : each.offset + len(data)] = data
    return encoded


def _axes(parameter: Variable) -> str:
    return "".join(f"[{size}]" for size in parameter.shape)


def _is_pointer(parameter: Variable, value: Any, cases: int | None) -> bool:
    """Return True for an array to which the parameter points; with cases, it has an axis besides theirs.

    Raises TypeError for an array of as many bytes as a parameter `.b8 x[8]` has, which may be a pointer or a struct.
    """
    if byte_size(parameter) != POINTER_BYTES or not _is_array(value) or value.ndim <= (cases is not None):
        return False
    if parameter.shape and value.nbytes == POINTER_BYTES * (cases or 1):
        raise TypeError(
            f"{parameter.name}: got an array of {POINTER_BYTES} bytes; the parameter .{parameter.kind}{_axes(parameter)} may be a "
            "pointer or a struct. Say which by the type: BufferPointer(array) is a pointer, bytes or a NumPy scalar a struct by value"
        )
    return True


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | jax.Array)


def _native_array(name: str, value: Any) -> np.ndarray:
    """Return an array as a kernel sees it, in the machine's byte order. Raises TypeError for one that is no plain memory."""
    if np.ma.is_masked(value):
        raise TypeError(f"{name}: got a masked array; what its mask hides has no value: give x.filled(VALUE)")
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise TypeError(f"{name}: got an array of Python objects; expected numbers")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _case_values(name: str, value: Any, cases: int) -> Any:
    shape = np.shape(value) if not isinstance(value, bytes | str) else ()
    if shape[:1] != (cases,):
        raise ValueError(f"{name}: got shape {list(shape)}; with cases={cases} every argument has a first axis of {cases}")
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
    if isinstance(value, ctypes.Structure | ctypes.Union | ctypes.Array):
        value = _ctypes_bytes(parameter, value)
    if parameter.shape:
        if isinstance(value, np.generic | np.ndarray) and value.dtype.hasobject:
            raise TypeError(
                f"{parameter.name}: got dtype {value.dtype}, which has Python objects; give a ptx.Struct for pointers in a struct"
            )
        data = value if isinstance(value, bytes) else value.tobytes() if isinstance(value, np.generic | np.ndarray) else None
        if data is None or len(data) != size:
            got = type(value).__name__ if data is None else f"{len(data)} bytes"
            pointer = "; for a pointer, an array or a BufferPointer" if size == POINTER_BYTES else ""
            raise TypeError(
                f"{parameter.name}: got {got}; expected bytes or a NumPy or ctypes value of {size} bytes, which the kernel takes by value, "
                f"or a ptx.Struct with its pointers{pointer}"
            )
        return data
    if _is_array(value) and value.ndim:
        raise TypeError(f"{parameter.name}: got an array; the parameter is a number of type .{parameter.kind}, a pointer has 64 bits")
    return _encode_number(parameter, value.item() if _is_array(value) else value)


def _ctypes_bytes(parameter: Variable, value: Any) -> bytes:
    """Return the bytes of a ctypes value. Raises TypeError for one with pointers, which lead into the memory of the CPU."""
    if isinstance(value, ctypes.Structure) and _has_pointers(type(value)):
        raise TypeError(
            f"{parameter.name}: got {type(value).__name__}, whose pointers lead into the memory of the CPU; give "
            f"ptx.Struct({type(value).__name__}, values) with arrays as the pointers' values"
        )
    return bytes(value)


def _has_pointers(kind: Any) -> bool:
    if issubclass(kind, ctypes.Structure):
        return any(_has_pointers(each[1]) for each in getattr(kind, "_fields_", ()))
    if issubclass(kind, ctypes.Array):
        return _has_pointers(kind._type_)
    is_function = hasattr(kind, "_flags_")
    return (
        issubclass(kind, ctypes._Pointer) or is_function or getattr(kind, "_type_", None) in ("P", "z", "Z", "O")
    )  # c_void_p, c_char_p, ...


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
    return _encode_integer(parameter.name, int(value), kind.bits // 8, f"parameter of type .{kind.name}")
