"""One launch of a kernel that Triton has compiled: its PTX run by `tcemu.ptx` on the memory of tensors. Triton itself is not needed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from tcemu.base.errors import NotModelled, Unsupported
from tcemu.engine.architectures.lookup import evidence, target_rows
from tcemu.engine.architectures.special_function_rows import special_function_evidence
from tcemu.engine.isa.targets import parse_target_name
from tcemu.kernels.ptx.runtime.host_memory import Extent, find_extent
from tcemu.kernels.ptx.runtime.kernel_arguments import BufferPointer, PointerTable
from tcemu.kernels.ptx.runtime.kernel_runner import run
from tcemu.kernels.ptx.runtime.tracing import ExecutedStatement
from tcemu.kernels.ptx.scalar import video_instructions
from tcemu.kernels.ptx.simt.special_registers import TIMERS
from tcemu.kernels.ptx.simt.tensor_maps import TensorMap
from tcemu.kernels.ptx.text.module import SPECIAL_REGISTERS, Function, Module, Register, nested_operands
from tcemu.kernels.triton.arguments import KernelValue, flatten_arguments
from tcemu.kernels.triton.device_properties import WARP_SIZE
from tcemu.kernels.triton.launches import Launch
from tcemu.kernels.triton.tensors import NumpyTensor, Region, find_addresses, find_region, merge_regions, storage_extent, tensor_device

RECORDED = ("silicon", "published")  # levels of evidence with words of a GPU
FLOATS = ("f16", "f16x2", "bf16", "bf16x2", "f32", "f64")


class CompiledKernel(NamedTuple):
    """A kernel as Triton leaves it."""

    module: Module
    function: Function
    signature: Mapping[Any, Any]  # Triton's types of the arguments, as `flatten_arguments` takes them
    metadata: Any  # an object with Triton's names: num_warps, shared, name, ...
    settings: Mapping[str, Any]  # for the report


class LaunchData(NamedTuple):
    """One launch with its data."""

    launch: Launch
    module: Module
    options: Mapping[str, Any]  # of `tcemu.ptx.run`
    memory: ArgumentMemory
    outputs: Sequence[np.ndarray]  # by region, in the order of `memory.holders`


def launch_kernel(
    kernel: CompiledKernel, grid: tuple[int, int, int], arguments: Sequence[Any], target: str, *, checked: bool, known: Sequence[Any] = ()
) -> LaunchData:
    """Run a kernel. Tensors are written in place.

    Args:
        kernel: The kernel.
        grid: Its programs, x first.
        arguments: Those of the Triton function, constants included.
        target: GPU.
        checked: As for `tcemu.ptx.run`.
        known: Tensors whose addresses the arguments may contain.
    """
    metadata, clusters = kernel.metadata, getattr(kernel.metadata, "num_ctas", 1)
    values = flatten_arguments(kernel.signature, metadata, arguments)
    values += _scratch_arguments(kernel, len(values), int(np.prod(grid)) * clusters)
    memory = ArgumentMemory(values, known)
    threads = kernel.function.directives.get("reqntid") or (metadata.num_warps * WARP_SIZE,)
    counter = StatementCounter()
    began = time.perf_counter()
    options = {
        "entry": kernel.function.name, "grid": (grid[0] * clusters, *grid[1:]), "block": threads, "args": memory.arguments(),
        "shared_bytes": metadata.shared, "cluster": (clusters, 1, 1) if clusters > 1 else None,
        "cooperative": bool(getattr(metadata, "launch_cooperative_grid", False)),
        "fmad": bool(getattr(metadata, "enable_fp_fusion", True)),  # else Triton gives ptxas --fmad=false
    }  # fmt: skip
    outputs = run(kernel.module, target=_run_target(kernel.module, target), checked=checked, watch=counter, **options)
    launch = Launch(
        kernel=metadata.name, grid=grid, threads=int(np.prod(threads)), settings=dict(kernel.settings), statements=counter.count,
        seconds=time.perf_counter() - began, printed=outputs.printed,
        inexact=bit_doubts(counter.opcodes, special_registers(kernel.function), target),
    )  # fmt: skip
    memory.write(outputs)
    return LaunchData(launch, kernel.module, options, memory, outputs)


def _scratch_arguments(kernel: CompiledKernel, given: int, blocks: int) -> list[KernelValue]:
    """Return the pointers to scratch memory, which Triton appends to the parameters of a kernel."""
    sizes = [getattr(kernel.metadata, f"{name}_scratch_size", 0) for name in ("global", "profile")]
    missing = len(kernel.function.parameters) - given
    if not 0 <= missing <= len(sizes):
        raise Unsupported(
            f"{kernel.function.name} has {len(kernel.function.parameters)} parameters, and Triton "
            f"{getattr(kernel.metadata, 'triton_version', '')} gives it {given} arguments: this form of kernel is not known to tcemu.triton"
        )
    scratch = [np.zeros(blocks * size, np.uint8).view(NumpyTensor) if size else None for size in sizes[:missing]]
    return [KernelValue(scalar=0) if each is None else KernelValue(name="(scratch memory)", tensor=each) for each in scratch]


def _run_target(module: Module, target: str) -> str:
    """Return the target on which the module runs: Triton compiles for sm_90a where sm_90 was asked for."""
    return module.target if parse_target_name(module.target).number == parse_target_name(target).number else target


class ArgumentMemory:
    """The memory behind the tensors of one launch: buffers of the simulated GPU, read before the launch."""

    def __init__(self, values: Sequence[KernelValue], known: Sequence[Any] = ()) -> None:
        """Read the memory. known: tensors whose addresses the tensors of 64-bit integers among the arguments may contain."""
        self.values = values
        self.extents = {number: storage_extent(value.tensor) for number, value in enumerate(values) if value.tensor is not None}
        reached = self._find_reached(known)
        self.regions = merge_regions([*self.extents.values(), *(extent for _, extent in reached)])
        self.owners: dict[int, int] = {}  # by region: the first argument that points into it, which brings its bytes
        for number, extent in self.extents.items():
            self.owners.setdefault(find_region(self.regions, extent), number)
        self.holders = {region: values[owner] for region, owner in self.owners.items()}  # by region: a tensor in it
        for value, extent in reached:
            self.holders.setdefault(find_region(self.regions, extent), value)
        self.before = {region: self.regions[region].read() for region in self.holders}
        self.tables = {number: table for number in self.owners.values() if (table := self._find_table(number))}

    def _find_reached(self, known: Sequence[Any]) -> list[tuple[KernelValue, Extent]]:
        """Return the known tensors whose addresses are in the arguments, with the memory behind them."""
        extents = [(tensor, storage_extent(tensor)) for tensor in known if tensor_device(tensor) == "cpu"]
        self.reachable = [extent for _, extent in extents]
        reached = []
        for number, extent in self.extents.items():
            for address in find_addresses(self._words(number, extent), self.reachable).values() if extents else ():
                tensor, behind = next(each for each in extents if each[1].start <= address < each[1].end)
                reached.append((KernelValue(name=f"memory behind {self.values[number].name}", tensor=tensor), behind))
        return reached

    def _words(self, number: int, extent: Extent) -> np.ndarray:
        """Return the words of an argument of 64-bit integers that may be addresses, in the order of memory; of other arguments none."""
        integers = str(self.values[number].tensor.dtype).removeprefix("torch.") in ("int64", "uint64") and extent.start % 8 == 0
        data = Region(extent, 0).read() if integers else np.zeros(0, np.uint8)
        return data[: len(data) // 8 * 8].view(np.uint64)

    def _find_table(self, number: int) -> dict[int, BufferPointer]:
        """Return the pointers in the buffer of an argument, by their bytes."""
        extent = self.regions[self.region(number)[0]].extent
        found = find_addresses(self._words(number, extent), self.reachable) if self.reachable else {}
        pointers = {}
        for place, address in found.items():
            region = find_extent([each.extent for each in self.regions], address)
            assert region is not None  # `find_addresses` has found it within one
            data = self.owners.get(region, self.before[region])
            pointers[8 * place + self.regions[self.region(number)[0]].padding] = BufferPointer(data, self.regions[region].offset(address))
        return pointers

    def arguments(self) -> list[BufferPointer | TensorMap | Any]:
        """Return the arguments for `tcemu.ptx.run`."""
        given = []
        for number, value in enumerate(self.values):
            if value.tensor is None:
                given.append(value.scalar)
                continue
            region, owner = self.region(number)
            data = self.before[region] if owner == number else owner
            if number in self.tables:
                data = PointerTable(data, self.tables[number])
            given.append(value.point(data, self.regions[region].offset(value.tensor.data_ptr())))
        return given

    def region(self, number: int) -> tuple[int, int]:
        """Return the region into which an argument points, and the argument that brings the region's bytes."""
        region = find_region(self.regions, self.extents[number])
        return region, self.owners[region]

    def write(self, outputs: Sequence[np.ndarray]) -> None:
        """Store what the kernel left."""
        for region, data in zip(self.holders, outputs, strict=True):
            after = np.array(data)
            for byte in self.tables.get(self.owners.get(region, -1), ()):  # the addresses of the CPU again
                after[byte : byte + 8] = self.before[region][byte : byte + 8]
            self.regions[region].write(after)


class StatementCounter:
    """Counts executed statements and collects their opcodes."""

    def __init__(self) -> None:
        self.count = 0
        self.opcodes: set[str] = set()

    def __call__(self, event: ExecutedStatement) -> None:
        self.count += 1
        self.opcodes.add(event.linked.statement.opcode)


def special_registers(function: Function) -> set[str]:
    """Return the special registers that a kernel reads."""
    operands = (part for statement in function.statements for part in nested_operands(statement.operands))
    return {part.name for part in operands if isinstance(part, Register) and part.name in SPECIAL_REGISTERS}


# ---- why the bits of a launch may not be those of the GPU: evidence below recorded words, and what PTX leaves open


def bit_doubts(opcodes: Iterable[str], registers: Iterable[str], target: str) -> tuple[str, ...]:
    """Return the reasons for which executed statements may not have the GPU's bits; empty if there are none.

    Args:
        opcodes: Opcodes of the statements.
        registers: Special registers that they read.
        target: The GPU.
    """
    opcodes = sorted(set(opcodes))
    doubts = [doubt for opcode in opcodes if (doubt := _doubt(opcode, target))]
    timers = sorted({*registers} & {*TIMERS})
    if timers:
        doubts.append(f"{', '.join(timers)}: the emulation counts statements")
    return tuple(dict.fromkeys(doubts))


def _doubt(opcode: str, target: str) -> str:
    name, *parts = opcode.split(".")
    if name in video_instructions.PREPARE or (name == "cvt" and any(part.startswith("scaled") for part in parts)):
        return f"{opcode}: computed as the manual says; no words of a GPU are known"
    if name in ("atom", "red") and "add" in parts and {*parts} & {*FLOATS}:
        return f"{name}.add of floats: the order of the threads is open"
    if opcode.startswith("tcgen05.mma"):
        levels = {row.evidence.level for row in target_rows(target) if row.family.startswith("tcgen05")}
        return _level_text("tcgen05.mma", target, next(iter(sorted(levels - {*RECORDED})), ""))
    with suppress(NotModelled, Unsupported, ValueError):
        if name in ("mma", "wmma", "wgmma"):
            return _level_text(name, target, evidence(opcode, target).level)
        return _level_text(opcode, target, special_function_evidence(opcode, target).level)
    return ""


def _level_text(what: str, target: str, level: str) -> str:
    return "" if not level or level in RECORDED else f"{what} on {target}: the evidence is {level}"
