"""All 2^32 operands of each special function, a GPU against tcemu: `python tests/sweep_special_functions.py [FUNCTION ...]`.

Needs libcuda, NumPy and JAX; JAX may run on the CPU beside the GPU. For each opcode it prints how many words differ, and the first of them.
The GPU compiles the PTX below; a chunk of operands is computed by both at a time. `--check` runs the same PTX by `tcemu.ptx` on a few
thousand operands instead, without a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from tcemu import ptx
from tcemu.arithmetic.special_functions import UNARY

sys.path.insert(0, str(Path(__file__).parent))
from ptx_kernels.record import Driver

BLOCK, CHUNK, CHECKED = 256, 1 << 26, 1 << 12  # threads of a block; operands at a time, on a GPU and with --check
TEXT = """.version 7.0
.target sm_70
.address_size 64
.visible .entry sweep(.param .u64 out, .param .u32 first)
{{
    .reg .b64 %at, %offset; .reg .b32 %i, %n, %t, %first; .reg .f32 %x, %y;
    ld.param.u64 %at, [out];
    ld.param.u32 %first, [first];
    mov.u32 %i, %ctaid.x;
    mov.u32 %n, %ntid.x;
    mov.u32 %t, %tid.x;
    mad.lo.u32 %i, %i, %n, %t;
    mul.wide.u32 %offset, %i, 4;
    add.u64 %at, %at, %offset;
    add.u32 %i, %i, %first;
    mov.b32 %x, %i;
    {opcode} %y, %x;
    st.global.f32 [%at], %y;
    ret;
}}
"""
Words = Callable[[str, int, int], np.ndarray]  # of an opcode, for the operands from a first one on


def opcodes(names: list[str]) -> dict[str, tuple[str, bool]]:
    """Return the name of the function and whether it flushes, by opcode."""
    return {f"{name}.approx{'.ftz' * flush}.f32": (name, flush) for name in names for flush in (False, True)}


def words_by_interpreter(opcode: str, first: int, count: int) -> np.ndarray:
    """Compute words by `tcemu.ptx`."""
    out = np.zeros(count, np.uint32)
    return ptx.run(TEXT.format(opcode=opcode), grid=count // BLOCK, block=BLOCK, args=[out, np.uint32(first)], target="H100")[0]


class WordsOfGpu:
    """The words that the first GPU gives."""

    def __init__(self) -> None:
        self.driver = Driver()

    def __call__(self, opcode: str, first: int, count: int) -> np.ndarray:
        module, function = self.driver.load_function(TEXT.format(opcode=opcode), "sweep", 0)
        out, place, start = np.empty(count, np.uint32), ctypes.c_uint64(), ctypes.c_uint32(first)
        self.driver("cuMemAlloc_v2", ctypes.byref(place), out.nbytes)
        values = (ctypes.c_void_p * 2)(*(ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in (place, start)))
        self.driver("cuLaunchKernel", function, count // BLOCK, 1, 1, BLOCK, 1, 1, 0, None, values, None)
        self.driver("cuCtxSynchronize")
        self.driver("cuMemcpyDtoH_v2", out.ctypes.data_as(ctypes.c_void_p), place, out.nbytes)
        self.driver("cuMemFree_v2", place)
        self.driver("cuModuleUnload", module)
        return out


def sweep(opcode: str, name: str, flush: bool, words: Words, starts: range, count: int) -> tuple[int, list[str]]:
    """Compare the words of all operands from each start on.

    Returns:
        The number of differing words, and the first of them in words.
    """
    compute = jax.jit(lambda codes: UNARY[name](codes, flush))
    wrong, shown = 0, []
    for first in starts:
        codes = np.arange(first, first + count, dtype=np.uint64).astype(np.uint32)
        theirs, ours = words(opcode, first, count), np.asarray(compute(codes))
        at = np.flatnonzero(theirs != ours)
        wrong += at.size
        shown += [f"{opcode} {codes[i]:#010x}: {theirs[i]:#010x}, tcemu {ours[i]:#010x}" for i in at[: 5 - len(shown)]]
    return wrong, shown


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("functions", nargs="*", metavar="FUNCTION", help=f"of {', '.join(UNARY)}; all without")
    parser.add_argument("--check", action="store_true", help="a few thousand operands by tcemu.ptx, without a GPU")
    args = parser.parse_args(arguments)
    if unknown := set(args.functions) - set(UNARY):
        parser.error(f"{', '.join(sorted(unknown))}: expected of {', '.join(UNARY)}")
    words: Words = words_by_interpreter if args.check else WordsOfGpu()
    count = CHECKED if args.check else CHUNK
    starts = range(0x3F000000, 0x3F000000 + 2 * count, count) if args.check else range(0, 1 << 32, count)
    total = 0
    for opcode, (name, flush) in opcodes(args.functions or list(UNARY)).items():
        wrong, shown = sweep(opcode, name, flush, words, starts, count)
        total += wrong
        print(f"{opcode}: {wrong:,} of {len(starts) * count:,} words differ", *shown, sep="\n    ", flush=True)
    return 1 if total else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
