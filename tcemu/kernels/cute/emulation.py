"""`tcemu.cute.run`: a compiled CuTe DSL function on arrays of the host, with the bits of a GPU.

The function's own host code makes the launches (`host_program`). Each kernel's arguments are bytes: where those are an address within a
tensor or a tensor map of one, `tcemu.ptx` gets the array, and the kernel's results go back into the tensors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tcemu.base.errors import Unsupported
from tcemu.base.results import Result, Table
from tcemu.engine.isa.targets import resolve_target
from tcemu.kernels.cute.host_program import HostLaunch, HostProgram
from tcemu.kernels.ptx.linker.linked_kernel import align_up, byte_size
from tcemu.kernels.ptx.runtime.host_memory import Extent, find_extent, merge_extents
from tcemu.kernels.ptx.runtime.kernel_arguments import POINTER_BYTES, Reference
from tcemu.kernels.ptx.runtime.kernel_runner import IN_ORDER, find_entry, run
from tcemu.kernels.ptx.runtime.launch_records import RecordedLaunch
from tcemu.kernels.ptx.simt.encoded_tensor_maps import decode_tensor_map
from tcemu.kernels.ptx.simt.tensor_maps import ALIGNMENT as MAP_ALIGNMENT
from tcemu.kernels.ptx.simt.tensor_maps import MAP_BYTES, TensorMap
from tcemu.kernels.ptx.text.module import Module, Variable
from tcemu.kernels.ptx.text.parser import parse

PTX_ADVICE = 'compile it by cute.compile(..., options="--keep-ptx --gpu-arch=sm_100a"), or give its text as ptx='


@dataclass(frozen=True)
class CuteLaunch:
    """A launch of a kernel of a compiled function.

    Attributes:
        kernel: Name of the entry.
        grid: Blocks.
        block: Threads of a block.
        cluster: Blocks of a cluster, or None.
        shared_bytes: Dynamic shared memory.
        printed: Text of the kernel's `printf`.
        notes: What checked mode remarks on.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] | None
    shared_bytes: int
    printed: str
    notes: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class CuteLaunches(Result):
    """The launches of a call of a compiled function, in order."""

    target: str
    launches: tuple[CuteLaunch, ...]

    def table(self) -> Table:
        """One row for each launch."""
        sizes = lambda size: " x ".join(map(str, size or ()))
        rows = tuple(
            (each.kernel, sizes(each.grid), sizes(each.block), sizes(each.cluster), each.shared_bytes, len(each.notes))
            for each in self.launches
        )
        columns = ("kernel", "grid", "block", "cluster", "shared_bytes", "notes")
        return Table(f"Launches on {self.target}", columns, rows, {"target": self.target})


def run_compiled(
    compiled: Any,
    *args: Any,
    target: str,
    ptx: str | None = None,
    checked: bool = False,
    schedule: str = IN_ORDER,
    seed: int = 0,
    **kwargs: Any,
) -> CuteLaunches:
    """Call a compiled CuTe DSL function without a GPU, with the bits of one.

    The tensors are arrays of the host, as `cutlass.cute.runtime.from_dlpack` makes them of NumPy arrays and PyTorch's tensors on the CPU.
    The kernels change them in place, as they do on a GPU.

    Args:
        compiled: What `cute.compile` returned.
        args: Arguments of the compiled function.
        target: GPU whose arithmetic the kernels have, as "B200"; the one for which the function was compiled.
        ptx: PTX of the kernels; None: the text that the compiled function has kept.
        checked: Raise for what PTX leaves undefined.
        schedule: As `tcemu.ptx.run` takes it.
        seed: As `tcemu.ptx.run` takes it.
        kwargs: Keyword arguments of the compiled function.

    Returns:
        The launches.

    Raises:
        Unsupported: The function has kept no PTX, its host code calls functions of CUDA that have no counterpart, or as `tcemu.ptx.run`.
        NotModelled: A tensor map has fields that no recorded map has.
        Exception: As `tcemu.ptx.run`.

    Source: CuTe DSL 4.8.1, whose compiled functions have host code in LLVM's dialect of MLIR.
    """
    text = ptx if ptx is not None else getattr(compiled, "__ptx__", None)
    if not text:
        raise Unsupported(f"{getattr(compiled, 'function_name', compiled)!r} has no PTX: {PTX_ADVICE}")
    target = resolve_target(target)
    module, launches = parse(text), list[CuteLaunch]()
    regions = merge_extents(find_tensors((*args, *kwargs.values())))

    def launch(made: HostLaunch) -> None:
        recorded = _read_launch(module, made, target, regions)
        outputs = run(
            module, entry=made.kernel, grid=made.grid, block=made.block, cluster=made.cluster, shared_bytes=made.shared_bytes,
            cooperative=made.cooperative, args=recorded.arguments(module.entries[made.kernel].parameters), target=target, checked=checked,
            schedule=schedule, seed=seed,
        )  # fmt: skip
        for name, output in zip(recorded.names, outputs, strict=True):
            regions[int(name)].view()[:] = np.ascontiguousarray(output).reshape(-1).view(np.uint8)
        launches.append(CuteLaunch(made.kernel, made.grid, made.block, made.cluster, made.shared_bytes, outputs.printed, outputs.notes))

    HostProgram(compiled, target, launch)(*args, **kwargs)
    return CuteLaunches(target, tuple(launches))


# ---- memory of the host


def find_tensors(values: Sequence[Any]) -> Iterator[Extent]:
    """Yield the memory of the tensors among arguments, also within sequences."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from find_tensors(value)
        elif hasattr(value, "data_ptr") and hasattr(value, "element_type") and hasattr(value, "stride"):
            extent = 1 + sum((size - 1) * abs(step) for size, step in zip(_flatten(value.shape), _flatten(value.stride), strict=True))
            start = int(value.data_ptr)
            yield Extent(start, start + -(-extent * value.element_type.width // 8))


def _flatten(shape: Any) -> list[int]:
    return [number for each in shape for number in _flatten(each)] if isinstance(shape, tuple | list) else [int(shape)]


# ---- arguments of a kernel


def _read_launch(module: Module, made: HostLaunch, target: str, regions: Sequence[Extent]) -> RecordedLaunch:
    """Return a launch with the bytes of its arguments, and the tensors to which they lead. The names of its arrays are those of regions."""
    parameters = find_entry(module, made.kernel).parameters
    pointers = (ctypes.c_void_p * max(len(parameters), 1)).from_address(made.arguments)
    places, data, found = [], bytearray(), list[Reference]()
    for parameter, pointer in zip(parameters, pointers, strict=False):
        start = align_up(len(data), MAP_ALIGNMENT)
        size = byte_size(parameter)
        data += bytes(start - len(data)) + ctypes.string_at(pointer or 0, size)
        places.append((start, size))
        found += _find_references(parameter, data, start, regions)
    used = list(dict.fromkeys(each.output for each in found))  # in the order in which the arguments name them
    references = tuple(each._replace(output=used.index(each.output)) for each in found)
    before = tuple(regions[number].view().copy()[None] for number in used)
    return RecordedLaunch(
        module.text, made.kernel, target, made.grid, made.block, made.cluster, made.cooperative, True, made.shared_bytes, tuple(places),
        np.frombuffer(bytes(data), np.uint8)[None], tuple(map(str, used)), before, before, references, {},
    )  # fmt: skip


def _find_references(parameter: Variable, data: bytearray, start: int, regions: Sequence[Extent]) -> Iterator[Reference]:
    """Yield the tensor maps and the addresses of tensors among the bytes of an argument. They lead to regions by their number."""
    byte, end = start, len(data)
    while byte + POINTER_BYTES <= end:
        address = int.from_bytes(data[byte : byte + POINTER_BYTES], "little")
        region = find_extent(regions, address)
        if region is None:
            byte += POINTER_BYTES
            continue
        offset = address - regions[region].start
        if _has_room_for_map(parameter, byte - start, end - byte):
            decoded = decode_tensor_map(bytes(data[byte : byte + MAP_BYTES]))
            tensor_map: TensorMap = replace(decoded.tensor_map, data=region, offset=offset)
            yield Reference(None, byte, region, 0, tensor_map)
            byte += MAP_BYTES
        else:
            yield Reference(None, byte, region, offset)
            byte += POINTER_BYTES


def _has_room_for_map(parameter: Variable, byte: int, left: int) -> bool:
    """Return True if a tensor map may lie at a byte of a parameter: it is aligned to 64 bytes, which nothing else in CuTe DSL is."""
    return parameter.alignment >= MAP_ALIGNMENT and byte % MAP_ALIGNMENT == 0 and left >= MAP_BYTES
