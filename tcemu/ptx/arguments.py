"""A launch's arguments: arrays as buffers in global memory, numbers and structs as the bytes of parameters, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from tcemu.ptx.link import Kernel, aligned, size_of
from tcemu.ptx.memory import CONST_ROOM, FIRST_ROOM, window
from tcemu.ptx.module import Variable
from tcemu.ptx.tensor_maps import BYTES, TensorMap
from tcemu.ptx.values import KINDS

ALIGNMENT = 256  # of a buffer, in bytes, as cudaMalloc has it
FLOATS = {"f16": np.float16, "f32": np.float32, "f64": np.float64}


@dataclass(frozen=True)
class Buffer:
    """Memory that a name stands for, in a room of its own."""

    name: str
    room: int
    start: int  # in words
    data: np.ndarray  # uint8, what it begins with

    @property
    def address(self) -> int:
        """Of its first byte."""
        return window(self.room)


@dataclass
class Launched:
    """What a launch begins with. buffers: of constants and variables, then those of the arguments, case by case; returned: of each argument
    that is an array its shape and dtype, and the numbers of its buffers. parameters: uint8 [cases, bytes]."""

    buffers: list[Buffer] = field(default_factory=list)
    returned: list[tuple[tuple[int, ...], np.dtype, list[int]]] = field(default_factory=list)
    parameters: np.ndarray = field(default_factory=lambda: np.zeros((1, 0), np.uint8))
    words: int = 0

    def add(self, name: str, room: int, data: np.ndarray) -> Buffer:
        """A buffer more."""
        buffer = Buffer(name, room, self.words, data)
        self.buffers.append(buffer)
        self.words += aligned(max(data.nbytes, 1), ALIGNMENT) // 4
        return buffer

    def memory(self) -> np.ndarray:
        """The words of global memory at the beginning."""
        words = np.zeros(_rounded(self.words), np.uint32)
        flat = words.view(np.uint8)
        for buffer in self.buffers:
            flat[4 * buffer.start : 4 * buffer.start + buffer.data.nbytes] = buffer.data
        return words

    def rooms(self) -> tuple[np.ndarray, np.ndarray]:
        """Where each room begins, in words, and its size in bytes."""
        count = _rounded(max((buffer.room for buffer in self.buffers), default=0) + 1)
        starts, sizes = np.zeros(count, np.int64), np.zeros(count, np.uint64)
        for buffer in self.buffers:
            starts[buffer.room], sizes[buffer.room] = buffer.start, buffer.data.nbytes
        return starts, sizes

    def results(self, words: np.ndarray) -> list[np.ndarray]:
        """What the words of global memory hold of the arguments that are arrays."""
        flat, found = np.ascontiguousarray(words).view(np.uint8), []
        for shape, dtype, numbers in self.returned:
            buffers = [self.buffers[number] for number in numbers]
            parts = [flat[4 * buffer.start : 4 * buffer.start + buffer.data.nbytes] for buffer in buffers]
            found.append(np.concatenate(parts).view(dtype).reshape(shape) if parts else np.zeros(shape, dtype))
        return found


def _rounded(count: int) -> int:
    """A little more: launches of about the same size then share what is compiled."""
    step = max(1 << max(count - 1, 1).bit_length() - 3, 32)
    return aligned(count, step)


def place(kernel: Kernel, args: Sequence[Any], cases: int | None) -> Launched:
    """The memory and the parameters of a launch. Raises TypeError or ValueError that name the parameter."""
    parameters = kernel.entry.parameters
    if len(args) != len(parameters):
        listed = ", ".join(f".{each.kind} {each.name}" for each in parameters)
        raise ValueError(f"args: got {len(args)}; {kernel.entry.name} has {len(parameters)} parameters: {listed or 'none'}")
    launched = Launched(parameters=np.zeros((cases or 1, aligned(max(kernel.parameter_bytes, 1), 16)), np.uint8))
    launched.words = ALIGNMENT // 4  # the first words are no buffer's
    launched.add("constant memory", CONST_ROOM, np.frombuffer(bytes(kernel.constants), np.uint8).copy())
    for number, variable in enumerate(kernel.globals):
        launched.add(variable.name, FIRST_ROOM + number, _initial(variable))
    _point(kernel, launched)
    room = FIRST_ROOM + len(kernel.globals)
    held: dict[int, list[Buffer]] = {}
    for number, (parameter, value) in enumerate(zip(parameters, args, strict=True)):
        data = value.data if isinstance(value, TensorMap) and _is_array(value.data) else value
        if _is_pointer(parameter, value, cases) or data is not value:
            held[number] = _buffers(launched, parameter, np.asarray(data), cases, room)
            room += len(held[number])
    for number, (parameter, value) in enumerate(zip(parameters, args, strict=True)):
        start, size = kernel.parameters[parameter.name], size_of(parameter)
        if isinstance(value, TensorMap):
            given = [map_.view(np.uint8) for map_ in _maps(parameter, value, held.get(number), held, args, size)]
        elif number in held:
            given = [np.frombuffer(np.uint64(buffer.address).tobytes(), np.uint8) for buffer in held[number]]
        else:
            values = [value] if cases is None else _of_cases(parameter, value, cases)
            given = [np.frombuffer(_bytes_of(parameter, single, size), np.uint8) for single in values]
        for case, data in enumerate(given):
            launched.parameters[case, start : start + size] = data
    return launched


def _buffers(launched: Launched, parameter: Variable, array: np.ndarray, cases: int | None, room: int) -> list[Buffer]:
    """The buffers of an array that comes back, one for each case, in rooms from `room` on."""
    buffers = []
    for case, data in enumerate(array[None] if cases is None else _of_cases(parameter, array, cases)):
        name = parameter.name if cases is None else f"{parameter.name} of case {case}"
        buffers.append(launched.add(name, room + case, np.ascontiguousarray(data).reshape(-1).view(np.uint8)))
    numbers = range(len(launched.buffers) - len(buffers), len(launched.buffers))
    launched.returned.append((array.shape, array.dtype, list(numbers)))
    return buffers


def _maps(
    parameter: Variable, value: TensorMap, own: list[Buffer] | None, held: dict[int, list[Buffer]], args: Sequence[Any], size: int
) -> list[np.ndarray]:
    """The objects of a tensor map, one for each case. own: the buffers of its array; held: those of all arguments, which it may name."""
    if size != BYTES:
        raise TypeError(f"{parameter.name}: got a TensorMap, which has {BYTES} bytes; the parameter has {size}")
    buffers = own if own is not None else held.get(value.data) if isinstance(value.data, int) else None
    if buffers is None:
        raise ValueError(
            f"{parameter.name}: its TensorMap points to {value.data!r}; wanted an array, or the number of an argument that is one, 0 to "
            f"{len(args) - 1}"
        )
    return [value.encoded(buffer.address, buffer.data.nbytes) for buffer in buffers]


def _is_pointer(parameter: Variable, value: Any, cases: int | None) -> bool:
    """Whether a value is an array to which the parameter points: of cases, one with an axis besides theirs."""
    return not parameter.shape and KINDS[parameter.kind].bits == 64 and _is_array(value) and value.ndim > (cases is not None)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | jax.Array)


def _of_cases(parameter: Variable, value: Any, cases: int) -> Any:
    shape = np.shape(value) if not isinstance(value, bytes | str) else ()
    if shape[:1] != (cases,):
        raise ValueError(f"{parameter.name}: got shape {list(shape)}; with cases={cases} every argument has a first axis of {cases}")
    return np.asarray(value)


def _initial(variable: Variable) -> np.ndarray:
    data = np.zeros(size_of(variable), np.uint8)
    initial = np.frombuffer(variable.initial or b"", np.uint8)
    data[: initial.size] = initial
    return data


def _point(kernel: Kernel, launched: Launched) -> None:
    """Addresses of variables within the bytes of others."""
    by_name = {buffer.name: buffer for buffer in launched.buffers}
    for variable in kernel.module.variables:
        if variable.space not in ("global", "const"):
            continue
        data = by_name[variable.name].data if variable.name in by_name else by_name["constant memory"].data
        base = 0 if variable.name in by_name else kernel.symbols.get(variable.name, 0) - window(CONST_ROOM)
        for pointer in variable.pointers:
            address = kernel.symbols[pointer.symbol.name] + pointer.symbol.offset >> pointer.shift
            part = np.frombuffer(np.uint64(address).tobytes(), np.uint8)[: pointer.width]
            data[base + pointer.byte : base + pointer.byte + pointer.width] = part


def _bytes_of(parameter: Variable, value: Any, size: int) -> bytes:
    """The bytes of a number, or of a struct that is handed over by value."""
    if parameter.shape:
        data = value if isinstance(value, bytes) else value.tobytes() if isinstance(value, np.generic | np.ndarray) else None
        if data is None or len(data) != size:
            got = type(value).__name__ if data is None else f"{len(data)} bytes"
            raise TypeError(f"{parameter.name}: got {got}; wanted bytes or a NumPy value of {size} bytes, which the kernel takes by value")
        return data
    if _is_array(value) and value.ndim:
        raise TypeError(f"{parameter.name}: got an array; the parameter is a number of type .{parameter.kind}, a pointer has 64 bits")
    return _number(parameter, value.item() if _is_array(value) else value)


def _number(parameter: Variable, value: Any) -> bytes:
    kind = KINDS[parameter.kind]
    if kind.name in FLOATS:
        if not isinstance(value, int | float | np.integer | np.floating):
            raise TypeError(f"{parameter.name}: got {type(value).__name__}; wanted a number, the parameter's type is .{kind.name}")
        return FLOATS[kind.name](value).tobytes()
    if isinstance(value, np.floating | np.void) and value.nbytes * 8 == kind.bits and kind.name.startswith("b"):
        return value.tobytes()
    if not isinstance(value, int | np.integer | np.bool_):
        raise TypeError(f"{parameter.name}: got {type(value).__name__}; wanted an integer, the parameter's type is .{kind.name}")
    low, high = -(1 << kind.bits - 1), (1 << kind.bits) - 1  # nvcc writes .u32 for int too
    if not low <= int(value) <= high:
        raise ValueError(f"{parameter.name}: got {value}; a parameter of type .{kind.name} holds {low} to {high}")
    return (int(value) % (1 << kind.bits)).to_bytes(kind.bits // 8, "little")
