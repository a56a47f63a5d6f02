"""`pytest --on-gpu FILE`: each kernel that a test runs by `tcemu.ptx.run` also runs on this machine's GPU, and all words are compared.

The driver compiles the same text. A launch that the emulation refuses, that is checked, or that has `cases` or a `PointerTable` runs on no
GPU. FILE gets one line of JSON for each launch: the test, the kernel, its words, and how many of them differ. A difference fails the test.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from ptx_kernels.record import TYPES, Driver

import tcemu.ptx
from tcemu.engine.isa.targets import resolve_target
from tcemu.kernels.ptx.cuda_source import Source, read_module
from tcemu.kernels.ptx.runtime import kernel_runner
from tcemu.kernels.ptx.runtime.kernel_arguments import PointerTable
from tcemu.kernels.ptx.simt.tensor_maps import INTERLEAVES, SWIZZLES
from tcemu.ptx import BufferPointer, Module, TensorMap

SCALARS = {"f16": np.float16, "f32": np.float32, "f64": np.float64} | {
    f"{kind}{bits}": np.dtype(f"{sign}{bits // 8}") for kind, sign in (("u", "u"), ("s", "i"), ("b", "u")) for bits in (8, 16, 32, 64)
}  # of a parameter, by its PTX type
SWIZZLE_ATOMS = {32: 4, 64: 6}  # CU_TENSOR_MAP_SWIZZLE_128B_ATOM_32B and _ATOM_64B
CLUSTER_DIMENSION, COOPERATIVE = 4, 2  # CUlaunchAttributeID
# the driver of CUDA 13.0 reads PTX 9.0; a newer text is said to be of 9.0, and refused if it has more
DRIVER_PTX, NEWER_PTX = ".version 9.0", re.compile(r"\.version 9\.[1-9]")
LAUNCH_OPTIONS = ("entry", "grid", "block", "args", "shared_bytes", "cluster", "cooperative")
ANY_CLUSTER_SIZE = 13  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)), ("attribute_count", ctypes.c_uint),
    )  # fmt: skip


@cache
def open_driver() -> Driver:
    return Driver()


@cache
def gpu_target() -> str:
    """Return the target of the first GPU, as "sm_90a"."""
    numbers = [ctypes.c_int(), ctypes.c_int()]
    for number, attribute in zip(numbers, (75, 76), strict=True):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
        open_driver()("cuDeviceGetAttribute", ctypes.byref(number), attribute, 0)
    major, minor = (number.value for number in numbers)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def launch_kernel(
    module: Module, text: str, *, entry: str | None = None, grid: Any, block: Any, args: Sequence[Any] = (), shared_bytes: int = 0,
    cluster: Any = None, cooperative: bool = False,
) -> list[np.ndarray]:  # fmt: skip
    """Launch a kernel on the GPU from its PTX; the other arguments and the result are those of `tcemu.ptx.run`."""
    driver, function = open_driver(), kernel_runner.find_entry(module, entry)
    loaded, handle = driver.load_function(NEWER_PTX.sub(DRIVER_PTX, text), function.name, shared_bytes)
    buffers: dict[int, tuple[np.ndarray, ctypes.c_uint64]] = {}
    for number, value in enumerate(args):
        points = isinstance(value, BufferPointer | TensorMap)
        data = value.data if points else value
        if isinstance(data, np.ndarray | jax.Array) and (points or not function.parameters[number].shape):
            array, place = np.array(data, order="C"), ctypes.c_uint64()
            driver("cuMemAlloc_v2", ctypes.byref(place), max(array.nbytes, 1))
            driver("cuMemcpyHtoD_v2", place, array.ctypes.data_as(ctypes.c_void_p), array.nbytes)
            buffers[number] = array, place
    encoded = [_encode(parameter, args[number], number, buffers) for number, parameter in enumerate(function.parameters)]
    pointers = (ctypes.c_void_p * len(encoded))(*(each.ctypes.data for each in encoded))
    attributes = (LaunchAttribute * 2)()
    config = LaunchConfig((*_three(grid),), (*_three(block),), shared_bytes, None, attributes, 0)
    if cluster is not None:
        attributes[0].id = CLUSTER_DIMENSION
        attributes[0].value[:3] = _three(cluster)
        config.attribute_count = 1
        driver("cuFuncSetAttribute", handle, ANY_CLUSTER_SIZE, 1)
    if cooperative:
        attributes[config.attribute_count].id = COOPERATIVE
        attributes[config.attribute_count].value[0] = 1
        config.attribute_count += 1
    driver("cuLaunchKernelEx", ctypes.byref(config), handle, pointers, None)
    driver("cuCtxSynchronize")
    for array, place in buffers.values():
        driver("cuMemcpyDtoH_v2", array.ctypes.data_as(ctypes.c_void_p), place, array.nbytes)
        driver("cuMemFree_v2", place)
    driver("cuModuleUnload", loaded)
    return [array for array, _ in buffers.values()]


def _three(sizes: Any) -> tuple[int, int, int]:
    given = (sizes,) if np.isscalar(sizes) else tuple(sizes)
    x, y, z, *_ = (*map(int, given), 1, 1)
    return x, y, z


def _encode(parameter: Any, value: Any, number: int, buffers: dict) -> np.ndarray:
    """Return the bytes of an argument, aligned for a tensor map."""
    if isinstance(value, TensorMap):
        return _encode_map(value, buffers[value.data if isinstance(value.data, int) else number][1])
    if isinstance(value, BufferPointer):
        place = buffers[value.data if isinstance(value.data, int) else number][1]
        return np.array([place.value + value.offset], np.uint64)
    if number in buffers:
        return np.array([buffers[number][1].value], np.uint64)
    if parameter.shape:
        return np.frombuffer(value if isinstance(value, bytes) else np.asarray(value).tobytes(), np.uint8).copy()
    dtype = np.dtype(SCALARS[parameter.kind])
    given = np.asarray(value)
    if given.dtype.kind in "fV" and dtype.kind != "f":  # a float for a parameter of raw bits
        return np.frombuffer(given.tobytes(), dtype).copy()
    if dtype.kind == "f":
        return given.astype(dtype).reshape(1)
    return np.array([int(given) & (1 << 8 * dtype.itemsize) - 1], f"u{dtype.itemsize}")


def _encode_map(value: TensorMap, place: ctypes.c_uint64) -> np.ndarray:
    """Return a CUtensorMap."""
    room = np.zeros(256, np.uint8)
    start = -room.ctypes.data % 64
    rank = len(value.global_dims)
    swizzle = SWIZZLE_ATOMS.get(value.swizzle_atom, SWIZZLES.index(value.swizzle))
    open_driver()(
        "cuTensorMapEncodeTiled", ctypes.c_void_p(room.ctypes.data + start), TYPES[value.dtype], rank,
        ctypes.c_uint64(place.value + value.offset), (ctypes.c_uint64 * rank)(*value.global_dims),
        (ctypes.c_uint64 * max(rank - 1, 1))(*value.strides), (ctypes.c_uint32 * rank)(*value.box_dims),
        (ctypes.c_uint32 * rank)(*value.element_steps), INTERLEAVES.index(value.interleave), swizzle, 0, int(value.nan_fill),
    )  # fmt: skip
    return room[start : start + 128]


def _runs_here(module: Module) -> bool:
    """Return True if the driver takes the module's target: that of the GPU, or an older one without features of its own."""
    here, wanted = gpu_target().removeprefix("sm_"), module.target.removeprefix("sm_")
    return wanted == here or ("a" not in wanted and int(wanted.rstrip("f")) <= int(here.rstrip("a")))


def count_differences(emulated: Sequence[Any], recorded: Sequence[np.ndarray]) -> list[int]:
    """Return the differing elements of each array, NaN and zeros compared as bits."""
    counts = []
    for x, y in zip(emulated, recorded, strict=True):
        size = y.dtype.itemsize
        here, there = (np.ascontiguousarray(np.asarray(each)).reshape(-1).view(np.uint8).reshape(-1, size) for each in (x, y))
        counts.append(int((here != there).any(1).sum()))
    return counts


def compare_launches(path: str) -> None:
    """Replace `tcemu.ptx.run`, before a test module imports it, by a function that also runs each kernel on the GPU."""
    emulate: Callable = kernel_runner.run

    def run(source: Source, **options: Any) -> Any:
        outputs = emulate(source, **options)
        module = read_module(source, options["target"], options.get("entry"), options.get("options", ()))
        tables = any(
            isinstance(part, PointerTable)
            for value in options.get("args", ())
            for part in (value, value.data if isinstance(value, BufferPointer) else value)
        )
        if options.get("checked") or options.get("cases") is not None or tables or not _runs_here(module):
            return outputs
        here = outputs
        if resolve_target(options["target"]) != gpu_target():
            here = emulate(module, **{name: options[name] for name in LAUNCH_OPTIONS if name in options}, target=gpu_target())
        text = source if isinstance(source, str) and ".version" in source else module.text or str(module)
        recorded = launch_kernel(module, text, **{name: options[name] for name in LAUNCH_OPTIONS if name in options})
        wrong, words = count_differences(here, recorded), [array.size for array in recorded]
        kernel = options.get("entry") or next(iter(module.entries))
        row = {"test": os.environ.get("PYTEST_CURRENT_TEST", ""), "kernel": kernel, "words": sum(words), "differ": wrong}
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")
        assert not any(wrong), f"{kernel}: of arrays of {words} elements these many differ from the GPU's: {wrong}"
        return outputs

    kernel_runner.run = run  # type: ignore[assignment]
    tcemu.ptx.run = run  # type: ignore[assignment]
