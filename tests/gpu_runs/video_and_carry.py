"""On a machine with an NVIDIA GPU: what the video instructions and chains of the carry flag compute, by the driver's own compiler.

python tests/gpu_runs/video_and_carry.py INPUTS OUT. INPUTS has statements.json, with "video" (statements on %r1 to %r4) and "triples"
(names of chained instructions), and inputs.npz, with "video" (512 operands a, b, c), "carry32" and "carry64" (nine operands and the flag
before a chain, for each thread). Needs NumPy and libcuda alone. Of such a run tests/golden/ptx_h200.json.xz has a sample.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

SECONDS = 85  # after which no kernel is begun
HEAD = ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 p, .param .u64 q) {\n"
LOAD = (
    "ld.param.u64 %d0, [p]; ld.param.u64 %d1, [q]; cvta.to.global.u64 %d0, %d0; cvta.to.global.u64 %d1, %d1;\n"
    "mov.u32 %r0, %tid.x; mul.wide.u32 %d2, %r0, {read}; add.u64 %d0, %d0, %d2; mul.wide.u32 %d2, %r0, {written}; add.u64 %d1, %d1, %d2;"
)
THREADS = {"video": 512, "carry32": 128, "carry64": 32}
RESULTS = 4  # words of a chain: those of its statements, and the flag behind it


def video_text(statements: Sequence[str], threads: int = THREADS["video"]) -> str:
    """Return a kernel that stores %r1 after each statement."""
    lines = [".reg .b32 %r<9>; .reg .b64 %d<6>;", LOAD.format(read=12, written=4)]
    lines += [f"ld.global.u32 %r{2 + i}, [%d0+{4 * i}];" for i in range(3)]
    lines += [f"{statement} st.global.u32 [%d1+{n * threads * 4}], %r1;" for n, statement in enumerate(statements)]
    return HEAD + "\n".join(lines) + "\nret; }\n"


def carry_text(triples: Sequence[Sequence[str]], bits: int, threads: int) -> str:
    """Return a kernel that sets the flag, runs a chain of three, and stores the three results and the flag."""
    size = bits // 8
    lines = [f".reg .b{bits} %x<16>; .reg .b32 %r0; .reg .b64 %d<6>;", LOAD.format(read=10 * size, written=RESULTS * size)]
    lines += [f"ld.global.u{bits} %x{i}, [%d0+{i * size}];" for i in range(10)]
    for n, triple in enumerate(triples):
        lines.append(f"add.cc.u{bits} %x14, %x9, {hex(2**bits - 1)}{'U' if bits == 64 else ''};")
        for place, name in enumerate(triple):
            sources = ", ".join(f"%x{3 * place + i}" for i in range(3 if "mad" in name else 2))
            lines.append(f"{name}.{'us'[(n + place) % 2]}{bits} %x{10 + place}, {sources};")
        lines.append(f"addc.u{bits} %x13, 0, 0;")
        lines += [f"st.global.u{bits} [%d1+{(n * threads * RESULTS + i) * size}], %x{10 + i};" for i in range(RESULTS)]
    return HEAD + "\n".join(lines) + "\nret; }\n"


class Driver:
    """A context on the first GPU."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        device, context, name = ctypes.c_int(), ctypes.c_void_p(), ctypes.create_string_buffer(100)
        self("cuInit", 0)
        self("cuDeviceGet", ctypes.byref(device), 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)
        self("cuDeviceGetName", name, 100, device)
        self.gpu = name.value.decode()

    def __call__(self, name: str, *arguments) -> None:
        if status := getattr(self.cuda, name)(*arguments):
            raise RuntimeError(f"{name}: {status}")

    def run(self, text: str, threads: int, data: np.ndarray, words: int) -> np.ndarray:
        """Run one block, and return the words that it writes. Raises RuntimeError with the compiler's message."""
        module, function, log = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.create_string_buffer(8192)
        options, values = (ctypes.c_int * 2)(5, 6), (ctypes.c_void_p * 2)(ctypes.addressof(log), 8192)  # CU_JIT_ERROR_LOG_BUFFER, its size
        try:
            self("cuModuleLoadDataEx", ctypes.byref(module), text.encode() + b"\0", 2, options, values)
        except RuntimeError as error:
            raise RuntimeError(f"{error}: {log.value.decode()}") from error
        self("cuModuleGetFunction", ctypes.byref(function), module, b"k")
        data, made = np.ascontiguousarray(data), np.full(words, 0xDEADBEEF, np.uint32)
        places = [ctypes.c_uint64(), ctypes.c_uint64()]
        for place, array in zip(places, (data, made), strict=True):
            self("cuMemAlloc_v2", ctypes.byref(place), ctypes.c_size_t(array.nbytes))
            self("cuMemcpyHtoD_v2", place, ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes))
        arguments = (ctypes.c_void_p * 2)(*map(ctypes.addressof, places))
        self("cuLaunchKernel", function, 1, 1, 1, threads, 1, 1, 0, None, arguments, None)
        self("cuCtxSynchronize")
        self("cuMemcpyDtoH_v2", ctypes.c_void_p(made.ctypes.data), places[1], ctypes.c_size_t(made.nbytes))
        for place in places:
            self("cuMemFree_v2", place)
        self("cuModuleUnload", module)
        return made


def work(task: tuple[str, str, int, list, float]) -> tuple[str, dict, list[str], str]:
    """Run some statements or chains. Those that the compiler rejects are found by halving."""
    folder, kind, first, items, end = task
    driver = globals().setdefault("DRIVER", None) or Driver()
    globals()["DRIVER"] = driver
    data, threads = np.load(Path(folder) / "inputs.npz")[kind], THREADS[kind]
    made, failed = {}, []

    def attempt(start: int, part: list) -> None:
        bits = 64 if kind == "carry64" else 32
        text = video_text(part) if kind == "video" else carry_text(part, bits, threads)
        try:
            count = len(part) * threads * (1 if kind == "video" else RESULTS * bits // 32)
            words = driver.run(text, threads, data, count).reshape(len(part), -1)
            made.update({start + i: words[i] for i in range(len(part))})
        except RuntimeError as error:
            if len(part) == 1 or time.time() > end:
                failed.append(f"{part[0]}: {str(error)[:300]}")
            else:
                attempt(start, part[: len(part) // 2])
                attempt(start + len(part) // 2, part[len(part) // 2 :])

    if time.time() < end:
        attempt(first, items)
    else:
        failed.append("no time")
    return kind, made, failed, driver.gpu


def main(folder: Path, out: Path) -> None:
    stated, end = json.loads((folder / "statements.json").read_text()), time.time() + SECONDS
    sources = {"video": (stated["video"], 46), "carry32": (stated["triples"], 36), "carry64": (stated["triples"], 36)}
    tasks = [
        (str(folder), kind, first, items[first : first + size], end)
        for kind, (items, size) in sources.items()
        for first in range(0, len(items), size)
    ]
    made, failed, gpu = {}, [], ""
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        for kind, words, errors, gpu in pool.imap_unordered(work, tasks):  # noqa: B007
            made.setdefault(kind, {}).update(words)
            failed += errors
    for kind, rows in made.items():
        places = sorted(rows)
        np.savez_compressed(out / f"{kind}.npz", places=np.array(places), words=np.stack([rows[place] for place in places]))
        print(kind, len(places), "statements or chains")
    print(gpu, *failed, sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
