"""XLA's scheduled HLO and buffer assignment, read from the texts of its dump.

Source: OpenXLA, xla/hlo/ir/hlo_instruction.cc (`ToString`), xla/service/buffer_assignment.cc (`ToString`) and
xla/backends/gpu/runtime/thunk.cc, as JAX 0.10 to 0.11 contain them.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tcemu.base.errors import NotModelled

DTYPES: dict[str, Any] = {
    "pred": np.bool_, "s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64, "u8": np.uint8, "u16": np.uint16, "u32": np.uint32,
    "u64": np.uint64, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64, "c64": np.complex64,
    "c128": np.complex128, "f8e4m3fn": ml_dtypes.float8_e4m3fn, "f8e5m2": ml_dtypes.float8_e5m2, "f8e8m0fnu": ml_dtypes.float8_e8m0fnu,
}  # fmt: skip
HEAD = re.compile(r"(?:ENTRY )?%(?P<name>\S+) \(.*\) -> .* \{$")
ARRAY = re.compile(r"(?P<dtype>\w+)\[(?P<sizes>[\d,]*)\](?:\{(?P<order>[\d,]*)[^}]*\})?")
INSTRUCTION = re.compile(r"\s+(?P<root>ROOT )?%(?P<name>\S+) = (?P<rest>.*)$")
OPCODE = re.compile(r"\s*(?P<opcode>[\w-]+)\(")
CONFIG = "backend_config="
ALLOCATION = re.compile(r"allocation (?P<number>\d+): size (?P<size>\d+)(?P<facts>.*):$")
VALUE = re.compile(
    r" value: <\d+ (?P<name>[^\s{]+)(?:\{(?P<index>[\d,]*)\})?(?: \(phi\))? @\d+> \(size=(?P<size>\d+),offset=(?P<offset>\d+)\)"
)
THUNK = re.compile(r"\s*(?P<number>\d+): (?P<kind>\w+)(?: \[[^\]]*\])?\s*(?P<facts>.*)$")
LAUNCH = re.compile(
    r"(?P<kernel>\S+) grid: \[(?P<grid>[\d, ]+)\] threads: \[(?P<block>[\d, ]+)\](?: cluster: \[(?P<cluster>[\d, ]+)\])?"
    r"\s+shared_memory: (?P<shared>\d+) bytes"
)
NUMBER = re.compile(r"(?P<sign>-)?nan\((?P<payload>0x[\da-fA-F]+)\)|[^\s{},()]+")  # a NaN that is not the usual one has its fraction
ANNOTATED = re.compile(r'profile_annotation: "(?P<name>[^"]*)"\s+thunk_id: (?P<number>\d+)')


class ArrayShape(NamedTuple):
    """Dtype, sizes and layout of an array; `order` is the axes from the outermost in memory to the innermost."""

    dtype: np.dtype
    sizes: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return int(np.prod(self.sizes, dtype=np.int64)) * self.dtype.itemsize

    def to_bytes(self, x: np.ndarray) -> np.ndarray:
        """Return the bytes of an array in the order of the layout, uint8."""
        return np.frombuffer(x.transpose(self.order).tobytes(), np.uint8)

    def from_bytes(self, data: np.ndarray) -> np.ndarray:
        """Return the array of bytes in the order of the layout, as a copy in row-major order."""
        x = np.frombuffer(data.tobytes(), self.dtype).reshape([self.sizes[axis] for axis in self.order])
        return np.array(x.transpose(np.argsort(self.order)), order="C")

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.sizes)}"


Shape = Any  # ArrayShape, or a tuple of shapes


class Slice(NamedTuple):
    """Where a value lies: bytes of an allocation."""

    allocation: int
    offset: int
    size: int

    def contains(self, other: Slice) -> bool:
        """True if the other one begins within these bytes, or at them if there are none."""
        return self.allocation == other.allocation and self.offset <= other.offset < self.offset + max(self.size, 1)


class Operand(NamedTuple):
    """The value of an instruction, or of a tuple the part at an index."""

    name: str
    part: tuple[int, ...] = ()


class Instruction(NamedTuple):
    """An instruction of a computation."""

    name: str
    opcode: str
    shape: Shape
    operands: tuple[Operand, ...]
    literal: str  # what stands in the parentheses of a constant or a parameter
    attributes: str
    is_root: bool

    def attribute(self, name: str) -> str:
        """Return the computation that an attribute names, or "" if there is no such attribute."""
        found = re.search(rf"\b{name}=%?([\w.-]+)", self.attributes)
        return found[1] if found else ""

    def target(self) -> str:
        """Return the name of the function that a custom call calls, or ""."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found[1] if found else ""

    def config(self) -> dict[str, Any]:
        """Return the instruction's `backend_config`; empty if there is none, or if it is no JSON."""
        at = self.attributes.find(CONFIG)
        with contextlib.suppress(json.JSONDecodeError):
            return json.JSONDecoder().raw_decode(self.attributes, at + len(CONFIG))[0] if at >= 0 else {}
        return {}


class Thunk(NamedTuple):
    """A step of the program as the runtime executes it: the launch of a kernel, a copy, ..."""

    number: int
    kind: str
    kernel: str = ""  # name of the kernel, and how it is launched
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    cluster: tuple[int, ...] | None = None
    shared_bytes: int = 0


class Module(NamedTuple):
    """A scheduled module.

    Attributes:
        name: Its name.
        entry: Name of the computation that runs first.
        computations: The instructions of each computation, in the order of execution.
    """

    name: str
    entry: str
    computations: Mapping[str, tuple[Instruction, ...]]


def parse_module(text: str) -> Module:
    """Parse the text of a scheduled module.

    Raises:
        NotModelled: The module is not scheduled, or an array has a dtype that NumPy lacks.
    """
    head, _, body = text.partition("\n")
    name = re.match(r"HloModule (\S+?),", head)
    if name is None or "is_scheduled=true" not in head:
        raise NotModelled("expected the text of an HLO module after XLA's optimizations, with is_scheduled=true")
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry, current, found = "", "", []
    for line in body.splitlines():
        if started := HEAD.match(line):
            current, found = started["name"], []
            entry = current if line.startswith("ENTRY") else entry
        elif line.startswith("}"):
            computations[current] = tuple(found)
        elif current and (match := INSTRUCTION.match(line)):
            found.append(_parse_instruction(match["name"], match["rest"], match["root"] is not None))
    return Module(name[1], entry, computations)


def _parse_instruction(name: str, rest: str, is_root: bool) -> Instruction:
    shape, at = _parse_shape(rest, 0)
    opcode = OPCODE.match(rest, at)
    assert opcode is not None, rest
    end = _closing(rest, opcode.end() - 1)
    inside = rest[opcode.end() : end]
    operands = () if opcode["opcode"] in ("constant", "parameter") else tuple(_operands(inside))
    return Instruction(name, opcode["opcode"], shape, operands, inside, rest[end + 1 :], is_root)


def _operands(text: str) -> Iterator[Operand]:
    for name, index in re.findall(r"%([\w.-]+)((?:#\d+)*)", text):
        yield Operand(name, tuple(map(int, index.split("#")[1:])))


def _closing(text: str, at: int) -> int:
    """Return the place of the parenthesis or brace that closes the one at a place. Strings are skipped."""
    depth, quoted = 0, False
    for place in range(at, len(text)):
        letter = text[place]
        if letter == '"' and text[place - 1] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += (letter in "({") - (letter in ")}")
            if depth == 0:
                return place
    raise NotModelled(f"the text of an instruction ends within parentheses: {text[:80]}")


def _parse_shape(text: str, at: int) -> tuple[Shape, int]:
    if text[at] == "(":
        parts, end = [], _closing(text, at)
        at += 1
        while at < end:
            at += len(re.match(r"[\s,]*(?:/\*index=\d+\*/)?\s*", text[at:])[0])  # pyright: ignore[reportOptionalSubscript]
            if at < end:
                part, at = _parse_shape(text, at)
                parts.append(part)
        return tuple(parts), end + 1
    found = ARRAY.match(text, at)
    if found is None:
        raise NotModelled(f"the shape {text[at : at + 40]!r} is not known to tcemu.xla")
    if found["dtype"] == "token":
        return (), found.end()
    if found["dtype"] not in DTYPES:
        raise NotModelled(f"{found['dtype']} has no array of NumPy; known are {', '.join(DTYPES)}")
    sizes = _integers(found["sizes"])
    order = tuple(reversed(_integers(found["order"]))) if found["order"] else tuple(range(len(sizes)))
    return ArrayShape(np.dtype(DTYPES[found["dtype"]]), sizes, order), found.end()


def _integers(text: str | None) -> tuple[int, ...]:
    return tuple(map(int, text.replace(" ", "").split(","))) if text else ()


def parse_buffers(text: str) -> tuple[dict[int, int], dict[tuple[str, tuple[int, ...]], Slice]]:
    """Return the sizes of the allocations, and where each value lies, by the name of its instruction and its index in a tuple."""
    sizes: dict[int, int] = {}
    places: dict[tuple[str, tuple[int, ...]], Slice] = {}
    number = -1
    for line in text.splitlines():
        if allocation := ALLOCATION.match(line):
            number = int(allocation["number"])
            if "thread-local" in allocation["facts"]:
                number = -1  # a value within a kernel
            else:
                sizes[number] = int(allocation["size"])
        elif number >= 0 and (value := VALUE.match(line)):
            places[value["name"], _integers(value["index"])] = Slice(number, int(value["offset"]), int(value["size"]))
    return sizes, places


def parse_thunks(sequence: str, metadata: str) -> dict[str, list[Thunk]]:
    """Return the steps of the runtime by the name of their instruction, in the order of their numbers."""
    thunks = {thunk.number: thunk for thunk in _sequence(sequence)}
    found: dict[str, list[Thunk]] = {}
    for match in ANNOTATED.finditer(metadata):
        if int(match["number"]) in thunks:
            found.setdefault(match["name"], []).append(thunks[int(match["number"])])
    return {name: sorted(steps) for name, steps in found.items()}


def _sequence(text: str) -> Iterator[Thunk]:
    for line in text.splitlines():
        if match := THUNK.match(line):
            number, kind = int(match["number"]), match["kind"]
            if launch := LAUNCH.search(match["facts"]):
                grid, block, cluster = (_integers(launch[name]) for name in ("grid", "block", "cluster"))
                yield Thunk(number, kind, launch["kernel"], grid, block, cluster or None, int(launch["shared"]))
            else:
                yield Thunk(number, kind)


def parse_literal(shape: ArrayShape, text: str) -> np.ndarray:
    """Return the array of a constant.

    Raises:
        NotModelled: The text leaves its elements out.
    """
    if "..." in text:
        raise NotModelled("the dump leaves out the elements of large constants: make it with --xla_dump_large_constants")
    found = [*NUMBER.finditer(re.sub(r"/\*.*?\*/", "", text))]
    if shape.dtype.kind in "biu":
        values = [match[0] == "true" if match[0] in ("true", "false") else int(match[0]) for match in found]
        return np.array(values).astype(shape.dtype).reshape(shape.sizes)
    part = np.real(np.empty(0, shape.dtype)).dtype if shape.dtype.kind == "c" else shape.dtype
    numbers = np.array([np.nan if match["payload"] else float(match[0]) for match in found]).astype(part)
    codes, infinity = (x.view(f"u{part.itemsize}") for x in (numbers, np.full(1, np.inf).astype(part)))
    for place, match in enumerate(found):
        if match["payload"]:
            codes[place] = int(infinity[0]) | int(match["payload"], 16) | (match["sign"] is not None) << 8 * part.itemsize - 1
    return numbers.view(shape.dtype).reshape(shape.sizes)
