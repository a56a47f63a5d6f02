"""How long does a kernel's PTX take to run without a GPU? `python benchmarks/ptx.py`: 512 cubed in f16 by mma.sync, tiles of 128 x 128.

The kernel is gemm_128x128 of tests/ptx_kernels/sources/gemm_async.cu: cp.async with three stages, swizzles, ldmatrix; 16 blocks of 256
threads. The first call reads the text and compiles every instruction; for an honest one leave JAX_COMPILATION_CACHE_DIR out. A third run
waits after each statement and says where the time goes: what it adds up to is more than a call takes. The result is compared with the
words that an H200 gave, by checksums of all rows and columns. `--small` is one block and K = 96.

`--kernel tcgen05` is tcgen05_gemm_2cta of tests/ptx_files/tcgen05/sources: the same product by pairs of blocks on sm_100a, tensor copies
with two stages, each block with a tile of 128 x 128. The result is compared with `tcemu.gemm`. `--small` is one pair and K = 128.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from harness import arguments, describe_machine, finish

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from ptx_kernels.manifest import KERNELS, LARGE
from ptx_kernels.replay import replay_kernel
from ptx_kernels.words import differing, differing_large, recorded_buffers, recorded_large
from support.tcgen05_kernels import FOLDER, PAIR_PRODUCT, TARGET, pair_launch

from tcemu import ptx
from tcemu.kernels.ptx.runtime.tracing import ExecutedStatement

TENSOR = ("mma", "wmma", "wgmma", "tcgen05")  # the tensor core's own instructions, loads of fragments apart
D = 2  # the buffer of the result


class Clock:
    """Seconds and number of statements by the first part of their opcodes, told after each of them."""

    def __init__(self) -> None:
        self.seconds, self.count, self.last = Counter(), Counter(), time.perf_counter()

    def __call__(self, event: ExecutedStatement) -> None:
        jax.block_until_ready((event.chunk.leaves, event.chunk.registers))
        now, name = time.perf_counter(), event.linked.statement.name
        self.seconds[name] += now - self.last
        self.count[name] += 1
        self.last = now


class Benchmark(NamedTuple):
    """A kernel to run."""

    size: tuple[int, int, int]  # M, N and K
    blocks: int
    threads: int  # of a block
    run: Callable[..., np.ndarray]  # takes `watch`; returns the result
    count_wrong: Callable[[np.ndarray], int]  # words of the result that differ, or rows and columns of a large result
    reference: str


def mma_sync(small: bool) -> Benchmark:
    """The product by mma.sync."""
    kernel = next(each for each in KERNELS if each.name == "gemm_128x128") if small else LARGE

    def count_wrong(result: np.ndarray) -> int:
        if small:
            return differing(kernel, D, result, recorded_buffers(kernel, "sm_80")[D]).count
        rows, columns, words = differing_large(result, recorded_large(kernel, D))
        return len(rows) + len(columns) + words

    size = (*kernel.operands[D].shape, kernel.operands[0].shape[1])
    run = lambda **options: replay_kernel(kernel, "sm_80", **options)[D]
    reference = "the words of an H200 and the checksums of rows and columns"
    return Benchmark(size, prod(kernel.grid), prod(kernel.block), run, count_wrong, reference)


def tcgen05(small: bool) -> Benchmark:
    """The product by tcgen05, in pairs of blocks."""
    m, n, k = (256, 128, 128) if small else (512, 512, 512)
    a, b = PAIR_PRODUCT.draw("a", m, k), PAIR_PRODUCT.draw("b", n, k)
    text, launch = (FOLDER / "tcgen05_gemm_2cta.ptx").read_text(), pair_launch(a, b)

    def count_wrong(result: np.ndarray) -> int:
        return int((result.view(np.uint32) != PAIR_PRODUCT.multiply(a, b).view(np.uint32)).sum())

    run = lambda **options: np.asarray(ptx.run(text, target=TARGET, **launch, **options)[D])
    return Benchmark((m, n, k), prod(launch["grid"]), launch["block"], run, count_wrong, "the result by tcemu.gemm")


BENCHMARKS = {"mma.sync": mma_sync, "tcgen05": tcgen05}


def main() -> int:
    parser = arguments(__doc__, repeats=1)
    parser.add_argument("--kernel", choices=BENCHMARKS, default="mma.sync")
    parser.add_argument("--small", action="store_true", help="a product of one block, or of one pair of blocks")
    args = parser.parse_args()
    benchmark = BENCHMARKS[args.kernel](args.small)
    m, n, k = benchmark.size
    machine = describe_machine()
    seconds, wrong = [], 0
    for _ in range(args.repeats + 1):
        start = time.perf_counter()
        result = benchmark.run()
        seconds.append(time.perf_counter() - start)
        wrong += benchmark.count_wrong(result)
    clock = Clock()
    benchmark.run(watch=clock)
    total = sum(clock.seconds.values())
    share = sum(clock.seconds[name] for name in TENSOR) / total
    first, best = seconds[0], min(seconds[1:])
    print(f"{m} x {n} x {k}, {benchmark.blocks} blocks of {benchmark.threads} threads, {sum(clock.count.values())} statements executed")
    print(f"first call {first:.1f} s, best of {args.repeats} more {best:.1f} s ({m * n * k / best:.2e} MAC/s)")
    print(f"in the tensor core's instructions {100 * share:.0f} % of a run that waits after each statement ({total:.1f} s); in others:")
    for name, spent in clock.seconds.most_common(8):
        print(f"{name:>10} {clock.count[name]:>7} times {spent:>7.2f} s {100 * spent / total:>4.0f} %")
    line = {"kernel": args.kernel, "m": m, "n": n, "k": k, "first_call_s": first, "best_s": best, "tensor_share": share, "watched_s": total,
            "seconds": dict(clock.seconds), "statements": dict(clock.count)}  # fmt: skip
    return finish(args, machine, [line], wrong, benchmark.reference)


if __name__ == "__main__":
    sys.exit(main())
