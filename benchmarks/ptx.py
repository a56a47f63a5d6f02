"""How long does a kernel's PTX take to run without a GPU? `python benchmarks/ptx.py`: 512 cubed in f16 by mma.sync, tiles of 128 x 128.

The kernel is gemm_128x128 of tests/ptx_kernels/sources/gemm_async.cu: cp.async with three stages, swizzles, ldmatrix; 16 blocks of 256
threads. The first call reads the text and compiles every instruction; for an honest one leave JAX_COMPILATION_CACHE_DIR out. A third run
waits after each statement and says where the time goes: what it adds up to is more than a call takes. The result is compared with the
words that an H200 gave, by checksums of all rows and columns. `--small` is one block and K = 96.
"""

import sys
import time
from collections import Counter
from pathlib import Path

import jax
import numpy as np
from harness import arguments, describe_machine, finish

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from ptx_kernels.manifest import KERNELS, LARGE, Kernel
from ptx_kernels.replay import replay_kernel
from ptx_kernels.words import differing, differing_large, recorded_buffers, recorded_large

TENSOR = ("mma", "wmma", "wgmma")  # the tensor core's own instructions, loads of fragments apart
D = 2  # the buffer of the result


class Clock:
    """Seconds and number of statements by the first part of their opcodes, told after each of them."""

    def __init__(self) -> None:
        self.seconds, self.count, self.last = Counter(), Counter(), time.perf_counter()

    def __call__(self, line, chunk, mask) -> None:
        jax.block_until_ready((chunk.others, chunk.registers))
        now, name = time.perf_counter(), line.statement.name
        self.seconds[name] += now - self.last
        self.count[name] += 1
        self.last = now


def wrong_words(kernel: Kernel, made: np.ndarray) -> int:
    """How many words, or rows and columns of a large result, are not those of the GPU."""
    if kernel is LARGE:
        rows, columns, words = differing_large(made, recorded_large(kernel, D))
        return len(rows) + len(columns) + words
    return differing(kernel, D, made, recorded_buffers(kernel, "sm_80")[D]).count


def main() -> int:
    parser = arguments(__doc__, repeats=1)
    parser.add_argument("--small", action="store_true", help="128 x 128 x 96 in one block")
    args = parser.parse_args()
    kernel = next(each for each in KERNELS if each.name == "gemm_128x128") if args.small else LARGE
    m, n, k = (*kernel.operands[D].shape, kernel.operands[0].shape[1])
    machine = describe_machine()
    seconds, wrong = [], 0
    for _ in range(args.repeats + 1):
        start = time.perf_counter()
        made = replay_kernel(kernel, "sm_80")[D]
        seconds.append(time.perf_counter() - start)
        wrong += wrong_words(kernel, made)
    clock = Clock()
    replay_kernel(kernel, "sm_80", watch=clock)
    total = sum(clock.seconds.values())
    share = sum(clock.seconds[name] for name in TENSOR) / total
    first, best = seconds[0], min(seconds[1:])
    blocks, threads = int(np.prod(kernel.grid)), int(np.prod(kernel.block))
    print(f"{m} x {n} x {k}, {blocks} blocks of {threads} threads, {sum(clock.count.values())} statements executed")
    print(f"first call {first:.1f} s, best of {args.repeats} more {best:.1f} s ({m * n * k / best:.2e} MAC/s)")
    print(f"in the tensor core's instructions {100 * share:.0f} % of a run that waits after each statement ({total:.1f} s); in others:")
    for name, spent in clock.seconds.most_common(8):
        print(f"{name:>10} {clock.count[name]:>7} times {spent:>7.2f} s {100 * spent / total:>4.0f} %")
    line = {"m": m, "n": n, "k": k, "first_call_s": first, "best_s": best, "tensor_share": share, "watched_s": total,
            "seconds": dict(clock.seconds), "statements": dict(clock.count)}  # fmt: skip
    return finish(args, machine, [line], wrong, "the words of an H200 and the checksums of rows and columns")


if __name__ == "__main__":
    sys.exit(main())
