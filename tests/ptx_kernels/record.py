"""`python -m ptx_kernels.record OUT`, in tests/, on a machine with the GPU: runs the PTX that is kept, writes OUT/recorded.npz and .json.

The text goes to the driver as it is (cuModuleLoadData). Each kernel runs twice, each time in a new module and new memory; what differs
between the two runs is named. A process runs the kernels of one file, so that one that hangs stops no other. Needs NumPy and libcuda alone.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from zlib import crc32

import numpy as np

from .manifest import KERNELS, MORE, Kernel, TensorMap
from .words import differing, stored_arrays

TYPES = {  # CUtensorMapDataType
    "u8": 0, "e4m3": 0, "e5m2": 0, "u16": 1, "u32": 2, "s32": 3, "u64": 4, "s64": 5, "f16": 6, "f32": 7, "f64": 8, "bf16": 9,
    "f32_ftz": 10, "tf32": 11, "tf32_ftz": 12,
    "b4x16": 13, "b4x16_p64": 14, "b6x16_p32": 15,
}  # fmt: skip
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle
LIMIT_S = 60
DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Driver:
    """Open a context on the first GPU."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuInit", 0)
        self("cuDeviceGet", ctypes.byref(device), 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)
        name = ctypes.create_string_buffer(100)
        self("cuDeviceGetName", name, 100, device)
        self.gpu = name.value.decode()

    def __call__(self, name: str, *arguments) -> None:
        status = getattr(self.cuda, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {status} {(text.value or b'').decode()}")

    def load_function(self, text: str, entry: str, shared: int) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        module, function, log = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.create_string_buffer(8192)
        options = (ctypes.c_int * 2)(5, 6)  # CU_JIT_ERROR_LOG_BUFFER, its size
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), 8192)
        try:
            self("cuModuleLoadDataEx", ctypes.byref(module), text.encode() + b"\0", 2, options, values)
        except RuntimeError as error:
            raise RuntimeError(f"{error}: {log.value.decode()}") from error
        self("cuModuleGetFunction", ctypes.byref(function), module, entry.encode())
        self("cuFuncSetAttribute", function, DYNAMIC_SHARED, shared)
        return module, function

    def launch(self, kernel: Kernel, target: str) -> list[np.ndarray]:
        """Launch a kernel; return the buffers afterwards."""
        module, function = self.load_function(kernel.text(target), kernel.entry, kernel.shared)
        arrays, places = [np.ascontiguousarray(array) for array in kernel.draw_buffers()], []
        for array in arrays:
            place = ctypes.c_uint64()
            self("cuMemAlloc_v2", ctypes.byref(place), array.nbytes)
            self("cuMemcpyHtoD_v2", place, array.ctypes.data_as(ctypes.c_void_p), array.nbytes)
            places.append(place)
        pointers, values = iter(places), []
        for argument in kernel.arguments:
            if isinstance(argument, TensorMap):
                values.append(self.map(argument, places))
            elif isinstance(argument, np.generic):
                values.append(np.array(argument).ctypes.data_as(ctypes.c_void_p))
            else:
                values.append(ctypes.cast(ctypes.pointer(next(pointers)), ctypes.c_void_p))
        launched = (ctypes.c_void_p * len(values))(*values)
        grid, block = ((*sizes, 1, 1)[:3] for sizes in (kernel.grid, kernel.block))
        self("cuLaunchKernel", function, *grid, *block, kernel.shared, None, launched, None)
        self("cuCtxSynchronize")
        for array, place in zip(arrays, places, strict=True):
            self("cuMemcpyDtoH_v2", array.ctypes.data_as(ctypes.c_void_p), place, array.nbytes)
            self("cuMemFree_v2", place)
        self("cuModuleUnload", module)
        return arrays

    def map(self, argument: TensorMap, places: list) -> ctypes.c_void_p:
        """Encode a tensor map with cuTensorMapEncodeTiled."""
        rank, size = len(argument.sizes), int("".join(filter(str.isdigit, argument.kind))) // 8
        room = ctypes.create_string_buffer(128 + 64)
        place = (ctypes.addressof(room) + 63) // 64 * 64
        self.rooms = [*getattr(self, "rooms", []), room]
        strides = [int(np.prod(argument.sizes[:axis])) * size for axis in range(1, rank)]
        self(
            "cuTensorMapEncodeTiled", ctypes.c_void_p(place), TYPES[argument.kind], rank, places[argument.of],
            (ctypes.c_uint64 * rank)(*argument.sizes), (ctypes.c_uint64 * max(rank - 1, 1))(*strides),
            (ctypes.c_uint32 * rank)(*argument.box), (ctypes.c_uint32 * rank)(*[1] * rank), 0, SWIZZLES[argument.swizzle], 0, 0,
        )  # fmt: skip
        return ctypes.c_void_p(place)


def record(kernel: Kernel, driver: Driver) -> tuple[dict, dict[str, np.ndarray]]:
    """Return the description of a kernel, and the words of the buffers that it changed, by name; separate ones of sm_90a if they differ."""
    before = kernel.draw_buffers()
    said: dict = {"operands": [crc32(array.tobytes()) for array in before], "texts": {}, "changed": [], "runs differ": []}
    words, first = {}, None
    for target in kernel.targets:
        said["texts"][target] = crc32(kernel.text(target).encode())
        made, again = driver.launch(kernel, target), driver.launch(kernel, target)
        said["runs differ"] += [f"{target} {i}" for i in range(len(made)) if differing(kernel, i, again[i], made[i])]
        for i, array in enumerate(made):
            if first is None and array.tobytes() != before[i].tobytes():
                said["changed"].append(i)
                words |= {f"{kernel.name}.{i}{suffix}": part for suffix, part in stored_arrays(array).items()}
            elif first is not None and array.tobytes() != first[i].tobytes():
                words |= {f"{kernel.name}.{i}.{target}{suffix}": part for suffix, part in stored_arrays(array).items()}
        first = first or made
    return said, words


def record_file(file: str, out: Path) -> None:
    driver, said, words = Driver(), {}, {}
    for kernel in (*KERNELS, *MORE):
        if kernel.file == file:
            said[kernel.name], made = record(kernel, driver)
            words |= made
            np.savez(out / f"{file}.npz", **words)
            (out / f"{file}.json").write_text(json.dumps(said))
    (out / f"{file}.gpu").write_text(driver.gpu)


def main(out: Path) -> int:
    parts, files = Path("/tmp/ptx_kernels_parts"), sorted({kernel.file for kernel in KERNELS})
    parts.mkdir(exist_ok=True)

    def one(file: str) -> str:
        command = [sys.executable, "-m", "ptx_kernels.record", str(parts), file]
        try:
            done = subprocess.run(command, timeout=LIMIT_S, capture_output=True, text=True)
        except subprocess.TimeoutExpired:
            return f"{file}: no end after {LIMIT_S} s"
        return "" if done.returncode == 0 else f"{file}: {done.stderr[-700:]}"

    with ThreadPoolExecutor(6) as pool:
        failed = [line for line in pool.map(one, files) if line]
    said, words = {}, {}
    for file in files:
        if (parts / f"{file}.json").exists():
            said |= json.loads((parts / f"{file}.json").read_text())
            words |= np.load(parts / f"{file}.npz")
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    gpu = next((path.read_text() for path in parts.glob("*.gpu")), "")
    text = Path("/proc/driver/nvidia/version")
    driver = text.read_text().split("\n")[0] if text.exists() else ""
    machine = {"gpu": gpu, "driver": driver, "CUDA of the driver": version.value, "date": date.today().isoformat()}
    np.savez_compressed(out / "recorded.npz", **words)
    (out / "recorded.json").write_text(json.dumps({"machine": machine, "kernels": said}, indent=0))
    differ = [f"{name}: {places}" for name, row in said.items() for places in row["runs differ"]]
    print(f"{len(said)} kernels recorded on {gpu}; {len(differ)} buffers differ between two runs", *differ, *failed, sep="\n")
    return bool(failed or differ)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        record_file(sys.argv[2], Path(sys.argv[1]))
    else:
        sys.exit(main(Path(sys.argv[1])))
