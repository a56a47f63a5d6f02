"""The texts of `tcemu.engine.backends.native` compiled for a CPU and run there: products of small whole numbers, exact in every type."""

import ctypes
import re
from functools import cache
from pathlib import Path

import jax
import numpy as np

from support.cuda_on_cpu import build_library
from tcemu.engine.backends.native import native_text as sources

FOLDER = Path(__file__).parent / "cuda_on_cpu"
KINDS = {"s8": ("s", 1), "e4m3": ("8", 1), "f16": ("h", 2), "bf16": ("b", 2), "tf32": ("t", 4)}
WGMMA = """
static void multiply(Accumulator (&d)[ACCUMULATORS], u64 a, u64 b, int keep) {{
    const int thread = threadIdx.x % 128;
    const auto at = [](u64 start, int line, int byte) {{
        const u32 place = (u32)(start & 0x3FFF) * 16 + line % 8 * 128 + line / 8 * 1024 + byte;
        return memory + (place ^ (place >> 7 & 7) << 4);
    }};
    for (int i = 0; i < 2 * PAIRS; ++i) {{
        const int row = thread / 32 * 16 + thread % 32 / 4 + 8 * (i >> 1 & 1), column = 8 * (i >> 2) + 2 * (thread % 4) + (i & 1);
        double sum = 0;
        for (int k = 0; k < 32; k += {size}) sum += element(at(a, row, k), '{kind}') * element(at(b, column, k), '{kind}');
        {add}
    }}
}}
static void hold(Accumulator (&d)[ACCUMULATORS]) {{}}
"""
ADD = {
    "f32": "d[i] = (float)((keep ? d[i] : 0) + sum);",
    "s32": "d[i] = (u32)(int)((keep ? (int)d[i] : 0) + sum);",
    "f16": """const int half = 16 * (i & 1);
        const u16 before = (u16)(d[i / 2] >> half);
        d[i / 2] = (d[i / 2] & ~(0xFFFFu << half)) | (u32)to_f16((keep ? of_f16(before) : 0) + sum) << half;""",
}
MMA = """
static void multiply(D &d, const A &a, const B &b) {  // m16n8k32 of s8
    u32 given[12];
    memcpy(given, &d, 16), memcpy(given + 4, &a, 16), memcpy(given + 8, &b, 8);
    const u32 *taken = exchange(given, 10, [](Warp &w) {
        for (int lane = 0; lane < 32; ++lane)
            for (int v = 0; v < 4; ++v) {
                const int row = lane / 4 + v / 2 * 8, column = lane % 4 * 2 + v % 2;
                int sum = (int)w.given[lane][v];
                for (int k = 0; k < 32; ++k) {
                    const int thread = k % 16 / 4;
                    const u32 x = w.given[row % 8 * 4 + thread][4 + row / 8 + k / 16 * 2], y = w.given[column * 4 + thread][8 + k / 16];
                    sum += (signed char)(x >> k % 4 * 8) * (signed char)(y >> k % 4 * 8);
                }
                w.taken[lane][v] = (u32)sum;
            }
    });
    memcpy(&d, taken, 16);
}
"""


@cache
def library(name: str, text: str) -> ctypes.PyDLL:
    """The text with a statement of its own, and `run`."""
    _, own, rest = text.split(sources.MACHINE_ENDS)
    statement, rest = rest.split(sources.STATEMENT_ENDS)
    rest = rest.replace("extern __shared__ __align__(1024) u8 dynamic[];", "u8 *dynamic = memory;")
    if name == "multiply_by_wgmma":
        d, a = re.search(r"m64n\d+k\d+\.(?:satfinite\.)?(\w+)\.(\w+)\.", statement).groups()
        kind, size = KINDS[a]
        statement = WGMMA.format(kind=kind, size=size, add=ADD[d])
    else:
        statement = MMA if name == "multiply_by_mma" else ""
    run = f'extern "C" void run(int grid, int threads, void **given) {{ run_entry({name}, grid, threads, given); }}'
    head = "\n".join((FOLDER / f"{part}.cpp").read_text() for part in ("machine", "native"))
    # one at a time: a text has memory of its own, which is not a thread's
    return ctypes.PyDLL(str(build_library("\n".join([own, statement, rest, run]), "-ffp-contract=off", head=head)))


def launch(entry, blocks, results, *operands):
    """In the place of `kernels.launch.launch`."""
    shapes = (results,) if isinstance(results, jax.ShapeDtypeStruct) else results

    def called(*given):
        given = [np.ascontiguousarray(v) for v in given]
        made = [
            np.frombuffer(bytes([0xA5]) * int(np.prod(s.shape) * np.dtype(s.dtype).itemsize), s.dtype).reshape(s.shape).copy()
            for s in shapes
        ]
        pointers = (ctypes.c_void_p * (len(given) + len(made)))(*(v.ctypes.data for v in (*given, *made)))
        library(entry.name, entry.text).run(blocks, entry.threads, pointers)
        return tuple(made)

    return jax.pure_callback(called, tuple(shapes), *operands)
