"""A program that XLA has compiled for a GPU, run on memory of NumPy: its kernels as PTX, in the order of its schedule."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from tcemu.base.errors import NotModelled
from tcemu.base.results import Result, Table
from tcemu.engine.isa.targets import resolve_target
from tcemu.kernels.ptx.runtime.kernel_arguments import BufferPointer
from tcemu.kernels.ptx.runtime.kernel_runner import run
from tcemu.kernels.ptx.text.module import Module as PtxModule
from tcemu.kernels.ptx.text.parser import parse
from tcemu.kernels.triton.kernel_launches import StatementCounter, bit_doubts, special_registers
from tcemu.kernels.xla.element_moves import evaluate_movement
from tcemu.kernels.xla.hlo_text import (
    ArrayShape,
    Instruction,
    Module,
    Shape,
    Slice,
    Thunk,
    parse_buffers,
    parse_literal,
    parse_module,
    parse_thunks,
)
from tcemu.kernels.xla.library_attention import OPERANDS, attend
from tcemu.kernels.xla.library_products import CALL, multiply_by_library, read_profile
from tcemu.kernels.xla.tile_maps import find_tiles, tile_map
from tcemu.operations.functional.torch_cuda.product_kernels import Launch

MODULE = "_gpu_after_optimizations.txt"  # how the name of a dumped module ends
ENTRY_NAME = re.compile(r"\.entry\s+([\w$]+)")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
INTEGER_K = 32  # K of mma for 8-bit integers
DOUBLED = (
    "XLA takes 16 elements of K at a time for an instruction that takes 32, and its kernel gives the instruction each element twice, so "
    "that every result is doubled, as all 12,544 words of three products on an H200 were; multiply in int32, or let XLA time kernels"
)
MAPPED = "Known are tiles of products, sums, transpositions, broadcasts, reshapes and functions of single elements"
ALIASES = ("bitcast", "optimization-barrier")  # their value is their operand's
NOTHING = ("after-all", "partition-id", "replica-id")  # they have no bytes, or the bytes of device 0


class Step(NamedTuple):
    """A step of a program after it ran."""

    name: str  # of the instruction
    operation: str  # what the function calls it, as "jit(f)/softmax/exp"
    kernel: str  # name of the kernel; "" for a copy, and for exact products by a library
    grid: tuple[int, ...]
    threads: int
    seconds: float
    inexact: tuple[str, ...]  # what may not have the GPU's bits, and why
    fault: str = ""  # of XLA's kernel, on the GPU too


class StepReport(Result):
    """The steps of a run, in order. `str` of it is a table; `records()` has a row for each step."""

    def __init__(self, name: str, target: str, steps: Sequence[Step]) -> None:
        self.name, self.target, self.steps = name, target, tuple(steps)

    def table(self) -> Table:
        """One row for each step."""
        rows = tuple(
            (
                step.name, step.operation, step.kernel or "copy", " x ".join(map(str, step.grid)), step.threads, round(step.seconds, 3),
                "; ".join(filter(None, (f"not exact: {', '.join(step.inexact)}" if step.inexact else "exact", step.fault))),
            )
            for step in self.steps
        )  # fmt: skip
        columns = ("instruction", "operation", "kernel", "grid", "threads", "seconds", "bits")
        return Table(f"Steps of {self.name} on {self.target}", columns, rows, {"target": self.target})

    def __str__(self) -> str:
        return self.table().text()

    __repr__ = __str__


class XlaProgram:
    """A program that XLA has compiled for a GPU.

    Attributes:
        name: Name of its module.
        target: The GPU whose arithmetic the kernels have.
        operands: Shapes of the parameters, in order.
        results: Shape of the result, or a tuple of shapes.
        module: Its instructions.
        launches: The kernels of libraries that a profile has, by the name of the instruction that calls the library.
    """

    def __init__(
        self, module: Module, buffers: str, thunks: Mapping[str, Sequence[Thunk]], ptx: Sequence[str], target: str,
        launches: Mapping[str, Sequence[Launch]] | None = None,
    ) -> None:  # fmt: skip
        self.module, self.name, self.target = module, module.name, resolve_target(target)
        self._sizes, self._places = parse_buffers(buffers)
        self._thunks, self.launches = thunks, launches or {}
        self._ptx = {name: text for text in ptx for name in ENTRY_NAME.findall(text)}
        self._modules: dict[str, PtxModule] = {}
        self._shapes = {each.name: each.shape for body in module.computations.values() for each in body}
        entry = module.computations[module.entry]
        parameters = {int(each.literal): each for each in entry if each.opcode == "parameter"}
        self.operands = tuple(parameters[number].shape for number in sorted(parameters))
        self.results = next(each for each in entry if each.is_root).shape

    @cached_property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels that the program launches, each once, in the order of their instructions."""
        return tuple(dict.fromkeys(thunk.kernel for steps in self._thunks.values() for thunk in steps if thunk.kernel))

    def run(
        self, *operands: Any, checked: bool = False, watch: Callable[[Step, tuple[np.ndarray, ...]], None] | None = None
    ) -> tuple[Any, StepReport]:
        """Run the program.

        Args:
            *operands: Arrays as `self.operands` says.
            checked: Raise for what PTX leaves undefined.
            watch: Called after each step with the step and the results of its instruction.

        Returns:
            The result, an array of NumPy or a tuple of them, and the report.

        Raises:
            ValueError: An operand has another shape or dtype.
            NotModelled: An instruction calls a library, or is of a kind that is not known. The message names it.
        """
        arrays = [np.asarray(x) for x in operands]
        if [(x.shape, x.dtype) for x in arrays] != [(shape.sizes, shape.dtype) for shape in self.operands]:
            given = ", ".join(f"{x.dtype}{list(x.shape)}" for x in arrays)
            raise ValueError(f"{self.name}: got {given or 'no operands'}; it was compiled for {', '.join(map(str, self.operands))}")
        machine = _Machine(self, checked, watch)
        return machine.run(arrays), StepReport(self.name, self.target, machine.steps)

    def ptx_module(self, kernel: str) -> PtxModule:
        """Return the module of a kernel.

        Raises:
            NotModelled: The dump does not have its PTX.
        """
        if kernel not in self._ptx:
            raise NotModelled(f"{self.name}: the dump has no PTX of {kernel}: make it with --xla_dump_emitter_re=ptx")
        if kernel not in self._modules:
            self._modules[kernel] = parse(self._ptx[kernel])
        return self._modules[kernel]

    def __repr__(self) -> str:
        return f"<XlaProgram {self.name} for {self.target}: {len(self.operands)} operands, {len(self.kernels)} kernels>"


def read(folder: str | Path, *, target: str, profile: str | Path | None = None) -> tuple[XlaProgram, ...]:
    """Read the programs of a folder to which XLA has dumped. It needs no GPU.

    The dump of a run on a GPU has the kernels that XLA chose there, also those it chose by timing them:
    XLA_FLAGS="--xla_dump_to=FOLDER --xla_dump_hlo_as_text --xla_dump_large_constants --xla_dump_emitter_re=ptx".

    Args:
        folder: The folder.
        target: The GPU for which it was compiled, as "H100".
        profile: The folder to which `jax.profiler.trace` wrote in the same run. It has the names of the kernels of libraries, without which
            products by cuBLASLt are not known.

    Returns:
        The programs, in the order of their names.

    Raises:
        FileNotFoundError: The folder has no module after XLA's optimizations.
        NotModelled: A module has a form that is not known.
    """
    folder = Path(folder)
    found, launches = [], {} if profile is None else read_profile(profile)
    for path in sorted(folder.glob(f"*{MODULE}")):
        stem = path.name.rpartition(".sm_")[0]
        texts = {name: (folder / f"{stem}.{name}.txt") for name in ("thunk_sequence", "thunk_metadata")}
        buffers = path.with_name(path.name.replace(MODULE, MODULE.replace(".txt", "-buffer-assignment.txt")))
        missing = [each.name for each in (*texts.values(), buffers) if not each.is_file()]
        if missing:
            raise FileNotFoundError(f"{folder}: {', '.join(missing)} is not there; XLA writes it beside {path.name}")
        thunks = parse_thunks(*(each.read_text(encoding="utf-8") for each in texts.values()))
        ptx = [each.read_text(encoding="utf-8") for each in sorted(folder.glob(f"{stem}.*ptx"))]
        module = parse_module(path.read_text(encoding="utf-8"))
        found.append(XlaProgram(module, buffers.read_text(encoding="utf-8"), thunks, ptx, target, launches.get(stem)))
    if not found:
        raise FileNotFoundError(f"{folder}: no file *{MODULE}; XLA writes it with --xla_dump_to={folder} --xla_dump_hlo_as_text")
    return tuple(found)


# ---- the run

Tree = Any  # where a value lies: a Slice, or a tuple of trees


class _Machine:
    """The memory of one run, and the instructions on it."""

    def __init__(self, program: XlaProgram, checked: bool, watch: Callable[[Step, tuple[np.ndarray, ...]], None] | None) -> None:
        self.program, self.checked, self.watch = program, checked, watch
        self.memory = {number: np.zeros(size, np.uint8) for number, size in program._sizes.items()}
        self.steps: list[Step] = []

    def run(self, operands: Sequence[np.ndarray]) -> Any:
        module = self.program.module
        places = []
        for instruction in (each for each in module.computations[module.entry] if each.opcode == "parameter"):
            place = self.program._places[instruction.name, ()]
            self.write(place, instruction.shape, operands[int(instruction.literal)])
            places.append((int(instruction.literal), place))
        tree = self.run_computation(module.entry, [place for _, place in sorted(places)])
        return jax.tree.map(self.read, self.program.results, tree, is_leaf=_is_shape)

    def write(self, place: Slice, shape: Any, x: np.ndarray) -> None:
        """Write an array in the order of its layout."""
        self.bytes(place)[: shape.nbytes] = shape.to_bytes(x)

    def read(self, shape: ArrayShape, place: Slice) -> np.ndarray:
        """Return a copy of an array, in row-major order."""
        return shape.from_bytes(self.bytes(place)[: shape.nbytes])

    def bytes(self, place: Slice) -> np.ndarray:
        return self.memory[place.allocation][place.offset : place.offset + place.size]

    def run_computation(self, name: str, parameters: Sequence[Tree]) -> Tree:
        """Run the instructions of a computation, and return where its result lies."""
        values: dict[str, Tree] = {}
        root = ""
        for instruction in self.program.module.computations[name]:
            operands = [_part(values[operand.name], operand.part) for operand in instruction.operands]
            if instruction.opcode == "parameter":
                values[instruction.name] = parameters[int(instruction.literal)]
            else:
                values[instruction.name] = self.run_instruction(instruction, operands)
            root = instruction.name if instruction.is_root else root
        return values[root]

    def run_instruction(self, instruction: Instruction, operands: Sequence[Tree]) -> Tree:
        opcode = instruction.opcode
        if opcode in ALIASES:
            return operands[0]
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "get-tuple-element":
            found = re.search(r"\bindex=(\d+)", instruction.attributes)
            assert found is not None
            return operands[0][int(found[1])]
        if opcode == "while":
            return self.run_while(instruction, operands[0])
        if opcode == "conditional":
            return self.run_conditional(instruction, operands)
        if opcode == "call":
            return self.run_computation(instruction.attribute("to_apply"), operands)
        if opcode == "async-start":
            return tuple(operands), self.run_computation(instruction.attribute("calls"), operands)
        if opcode == "async-done":
            return operands[0][1]
        thunks = self.program._thunks.get(instruction.name, ())
        if not thunks and opcode not in (*NOTHING, "constant"):
            raise NotModelled(f"{self.program.name}: the runtime's steps do not name {instruction.name}, which is a {opcode}")
        tree = self.place(instruction.name, instruction.shape)
        if opcode == "constant":
            assert isinstance(tree, Slice)
            assert isinstance(instruction.shape, ArrayShape)
            self.write(tree, instruction.shape, parse_literal(instruction.shape, instruction.literal))
            return tree
        for thunk in thunks:
            self.run_thunk(thunk, instruction, _leaves(operands), _leaves([tree]), len(thunks) == 1)
        return tree

    def place(self, name: str, shape: Shape, index: tuple[int, ...] = ()) -> Tree:
        """Return where the value of an instruction lies."""
        if isinstance(shape, tuple) and not isinstance(shape, ArrayShape):
            return tuple(self.place(name, part, (*index, number)) for number, part in enumerate(shape))
        if (name, index) not in self.program._places:
            raise NotModelled(f"{self.program.name}: the buffer assignment does not say where {name}{list(index) or ''} lies")
        return self.program._places[name, index]

    def run_while(self, instruction: Instruction, state: Tree) -> Tree:
        trips = TRIPS.search(instruction.attributes)
        count = None if trips is None else int(trips[1])
        condition, body = instruction.attribute("condition"), instruction.attribute("body")
        while count != 0 if count is not None else self.is_true(self.run_computation(condition, [state])):
            self.run_computation(body, [state])  # in place: the buffers of the state and of the body's result are the same
            count = None if count is None else count - 1
        return state

    def is_true(self, place: Tree) -> bool:
        assert isinstance(place, Slice)
        return bool(self.bytes(place)[0])

    def run_conditional(self, instruction: Instruction, operands: Sequence[Tree]) -> Tree:
        chosen = self.bytes(operands[0])
        if named := BRANCHES.search(instruction.attributes):
            branches = re.findall(r"[\w.-]+", named[1])
            number = int(chosen.view(np.int32)[0])
            number = number if 0 <= number < len(branches) else len(branches) - 1
        else:
            branches = [instruction.attribute("true_computation"), instruction.attribute("false_computation")]
            number = 0 if chosen[0] else 1
        self.run_computation(branches[number], [operands[1 + number]])
        return self.place(instruction.name, instruction.shape)

    def run_thunk(
        self, thunk: Thunk, instruction: Instruction, operands: Sequence[Slice], results: Sequence[Slice], is_alone: bool
    ) -> None:  # fmt: skip
        began, doubts = time.perf_counter(), ()
        if thunk.kernel:
            doubts = self.launch(thunk, instruction, [*operands, *results])
        elif thunk.kind == "kDynamicSliceFusion" or (thunk.kind == "kCopy" and instruction.opcode == "fusion" and is_alone):
            self.move(instruction, operands, results)
        elif thunk.kind == "kCopy":
            for source, target in zip(operands, results, strict=False):
                if source.size != target.size:
                    raise NotModelled(f"{self.program.name}: {instruction.name} copies a part of its operand; the dump does not tell which")
                self.bytes(target)[:] = self.bytes(source)
        elif thunk.kind in ("kMemzero", "kMemset32BitValue"):
            self.fill(thunk, instruction, results)
        elif thunk.kind == "kCublasLtMatmul" and instruction.target() == CALL:
            thunk = self.multiply(thunk, instruction, operands, results)
        elif thunk.kind == "kCuDnn" and instruction.target() in OPERANDS:
            found = attend(self.program.name, instruction, self.read_operands(instruction, operands))
            for place, shape, x in zip(results, instruction.shape, found, strict=False):
                self.write(place, shape, x)
        else:
            called = instruction.target()
            what = f"calls the library function {called}" if called else f"is a step of the kind {thunk.kind}"
            raise NotModelled(f"{self.program.name}: {instruction.name} {what}, which has no rule in tcemu.xla")
        operation = re.search(r'op_name="([^"]*)"', instruction.attributes)
        threads = int(np.prod(thunk.block, dtype=int)) if thunk.block else 0
        seconds = time.perf_counter() - began
        fault = DOUBLED if self.is_doubled(instruction) else ""
        step = Step(instruction.name, operation[1] if operation else "", thunk.kernel, thunk.grid, threads, seconds, doubts, fault)
        if fault:
            warnings.warn(f"{self.program.name}: {instruction.name}: {fault}", stacklevel=2)
        self.steps.append(step)
        if self.watch is not None:
            self.watch(step, tuple(map(self.read, _array_shapes(instruction.shape), results)))

    def is_doubled(self, instruction: Instruction) -> bool:
        """True for a kernel that multiplies 8-bit integers in tiles that are shorter along K than their instruction."""
        body = self.program.module.computations.get(instruction.attribute("calls"), ())
        tiles = [int(each.config().get("sizes", [INTEGER_K])[0]) for each in body if each.opcode == "dot" and _multiplies_bytes(each, body)]
        return any(tile < INTEGER_K for tile in tiles)

    def operand_shapes(self, instruction: Instruction) -> list[ArrayShape]:
        return _array_shapes([_part(self.program._shapes[operand.name], operand.part) for operand in instruction.operands])

    def read_operands(self, instruction: Instruction, operands: Sequence[Slice]) -> list[np.ndarray]:
        return [self.read(shape, place) for shape, place in zip(self.operand_shapes(instruction), operands, strict=True)]

    def multiply(self, thunk: Thunk, instruction: Instruction, operands: Sequence[Slice], results: Sequence[Slice]) -> Thunk:
        """Compute a product by cuBLASLt, and return the step with the kernel that computed it on the GPU."""
        shapes, arrays = self.operand_shapes(instruction), self.read_operands(instruction, operands)
        launches = self.program.launches.get(instruction.name, ())
        found = multiply_by_library(self.program.name, instruction, shapes, arrays, launches)
        self.write(results[0], _array_shapes(instruction.shape)[0], found)
        return thunk._replace(kernel=launches[0].name, grid=launches[0].grid, block=launches[0].block) if launches else thunk

    def move(self, instruction: Instruction, operands: Sequence[Slice], results: Sequence[Slice]) -> None:
        """Run a fusion that only moves elements to or from places that are data."""
        body = self.program.module.computations[instruction.attribute("calls")]
        shapes = [each.shape for each in sorted((each for each in body if each.opcode == "parameter"), key=lambda each: int(each.literal))]
        arrays = [self.read(shape, place) for shape, place in zip(shapes, operands, strict=True)]
        self.write(results[0], instruction.shape, evaluate_movement(self.program.name, body, arrays))

    def fill(self, thunk: Thunk, instruction: Instruction, results: Sequence[Slice]) -> None:
        """Fill a result with zeros, or with the constant that its computation broadcasts."""
        for place in results:
            self.bytes(place)[:] = 0
        if thunk.kind == "kMemzero":
            return
        body = self.program.module.computations[instruction.attribute("calls")]
        constants = [each for each in body if each.opcode == "constant"]
        if len(constants) != 1 or len(results) != 1 or not isinstance(constants[0].shape, ArrayShape):
            raise NotModelled(f"{self.program.name}: {instruction.name} fills memory with a value that its computation does not show")
        value = parse_literal(constants[0].shape, constants[0].literal).reshape(1).view(np.uint8)
        self.bytes(results[0])[:] = np.resize(value, results[0].size)

    def tile(self, instruction: Instruction, number: int) -> tuple[ArrayShape, tuple[int, ...]]:
        """Return the shape of an operand or result of a fusion, and its tile."""
        body = self.program.module.computations.get(instruction.attribute("calls"), ())
        parameters = sorted((each for each in body if each.opcode == "parameter"), key=lambda each: int(each.literal))
        root = [each for each in body if each.is_root]
        results = root[0].operands if root and root[0].opcode == "tuple" else root
        name = next((each.name for place, each in enumerate((*parameters, *results)) if place == number), "")
        tiles = find_tiles(body, instruction.config()) if name else {}
        if name not in tiles:
            raise NotModelled(
                f"{self.program.name}: {instruction.name} takes a tensor map of its operand {number}, whose tile the dump does not tell: "
                f"compile with --xla_gpu_autotune_level=0, by which no kernel was seen to take one. {MAPPED}"
            )
        return next(each.shape for each in body if each.name == name), tiles[name]

    def launch(self, thunk: Thunk, instruction: Instruction, slices: Sequence[Slice]) -> tuple[str, ...]:
        """Run a kernel on slices of memory: one parameter for each of them, or one for each that differs."""
        module = self.program.ptx_module(thunk.kernel)
        function = module.entries[thunk.kernel]
        count = len(function.parameters)
        distinct = list(dict.fromkeys(slices))
        passed = next((each for each in (distinct, slices) if len(each) == count), None)
        if passed is None:
            raise NotModelled(
                f"{self.program.name}: {thunk.kernel} has {count} parameters for {len(slices)} buffers, {len(distinct)} different"
            )
        regions = _merge(distinct)
        first: dict[Slice, int] = {}
        arguments: list[Any] = []
        for parameter, place in zip(function.parameters, passed, strict=True):
            region = next(each for each in regions if each.contains(place))
            number = first.setdefault(region, len(arguments))
            data, offset = self.bytes(region) if number == len(arguments) else number, place.offset - region.offset
            if parameter.shape:  # 128 bytes by value
                arguments.append(tile_map(*self.tile(instruction, slices.index(place)), data, offset))
            else:
                arguments.append(BufferPointer(data, offset))
        counter = StatementCounter()
        outputs = run(
            module, entry=thunk.kernel, grid=thunk.grid, block=thunk.block, args=arguments, target=self.program.target,
            shared_bytes=thunk.shared_bytes, cluster=thunk.cluster, checked=self.checked, watch=counter,
        )  # fmt: skip
        for region, output in zip(first, outputs, strict=True):
            self.bytes(region)[:] = np.asarray(output).reshape(-1).view(np.uint8)
        return bit_doubts(counter.opcodes, special_registers(function), self.program.target)


def _multiplies_bytes(each: Instruction, body: Sequence[Instruction]) -> bool:
    names = {operand.name for operand in each.operands}
    return any(other.name in names and other.shape.dtype in (np.int8, np.uint8) for other in body)


def _part(tree: Tree, index: Sequence[int]) -> Tree:
    for number in index:
        tree = tree[number]
    return tree


def _is_shape(x: Any) -> bool:
    return isinstance(x, ArrayShape)


def _array_shapes(shape: Shape) -> list[ArrayShape]:
    return jax.tree.leaves(shape, is_leaf=_is_shape)


def _leaves(trees: Sequence[Tree]) -> list[Slice]:
    return jax.tree.leaves(list(trees), is_leaf=lambda x: isinstance(x, Slice))


def _merge(slices: Sequence[Slice]) -> list[Slice]:
    """Return the regions of memory that slices cover; those that overlap are in one region."""
    regions: list[Slice] = []
    for place in sorted(slices):
        last = regions[-1] if regions else None
        if last is not None and last.allocation == place.allocation and place.offset < last.offset + last.size:
            end = max(last.offset + last.size, place.offset + place.size)
            regions[-1] = Slice(last.allocation, last.offset, end - last.offset)
        else:
            regions.append(place)
    return regions
