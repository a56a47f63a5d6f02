"""How fast are emulated warpgroups? `python benchmarks/wgmma.py`: multiply-accumulates per second of one `wgmma` on many warpgroups.

Each line is the best of several runs after the first, which compiles and stands apart; memory is the compiler's own account of what the
program needs besides its arguments and result. A sparse instruction is counted with its whole K. Two warpgroups of each line are checked
against calls of their own.
"""

import time

import jax
import numpy as np
from harness import arguments, describe_machine, finish

import tcemu
from tcemu.engine.layouts.shared_memory import SharedLayout

DENSE, SPARSE = "wgmma.mma_async.sync.aligned.m64n{n}", "wgmma.mma_async.sp.sync.aligned.m64n{n}"
OPS = {
    "f16": DENSE + "k16.f32.f16.f16",
    "tf32": DENSE + "k8.f32.tf32.tf32",
    "e4m3": DENSE + "k32.f32.e4m3.e4m3",
    "s8": DENSE + "k32.s32.s8.s8",
    "b1": DENSE + "k256.s32.b1.b1.and.popc",
    "sparse f16": SPARSE + "k32.f32.f16.f16",
    "sparse e4m3": SPARSE + "k64.f32.e4m3.e4m3",
}
TARGET = "sm_90a"


def line(spelling: str, warpgroups: int, repeats: int) -> dict:
    """One instruction on so many warpgroups, A and B from each one's own shared memory with the 64-byte swizzle."""
    op, rng = tcemu.parse(spelling), np.random.default_rng(0)
    a = SharedLayout(op.a, *op.matrix_shape("a"), "k", 64)
    b = SharedLayout(op.b, op.n, op.k, "k", 64, start=64 * 64)
    draw = lambda *shape: jax.numpy.asarray(rng.integers(0, 2**32, shape, np.uint32))
    d, shared = draw(warpgroups, 4, 32, op.register_count("d")), draw(warpgroups, b.words)
    sparse = {"sp_meta": np.full((4, 32), 0x4E4E4E4E, np.uint32)} if op.sparse else {}

    def product(d: jax.Array, shared: jax.Array) -> jax.Array:
        return tcemu.wgmma(op, d, b.descriptor(), shared, a_desc=a.descriptor(), target=TARGET, **sparse)

    start = time.perf_counter()
    compiled = jax.jit(product).lower(d, shared).compile()
    compile_s, seconds = time.perf_counter() - start, []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        whole = jax.block_until_ready(compiled(d, shared))
        seconds.append(time.perf_counter() - start)
    best = min(seconds[1:])
    wrong = sum(int((np.asarray(product(d[at], shared[at])) != np.asarray(whole[at])).sum()) for at in (0, warpgroups - 1))
    memory = compiled.memory_analysis()
    return {
        "op": spelling, "warpgroups": warpgroups, "compile_s": compile_s, "best_s": best,
        "mac_per_s": warpgroups * op.m * op.n * op.k / best, "warpgroups_per_s": warpgroups / best,
        "temp_bytes": memory.temp_size_in_bytes if memory else None, "wrong": wrong,
    }  # fmt: skip


def main() -> int:
    parser = arguments(__doc__, repeats=3)
    parser.add_argument("--warpgroups", type=int, nargs="+", default=[1, 100, 1000])
    parser.add_argument("--formats", nargs="+", choices=OPS, default=["f16", "e4m3", "s8"])
    parser.add_argument("-n", type=int, default=256, help="the N of the instruction")
    args = parser.parse_args()

    machine = describe_machine()
    print(f"{'format':>12} {'warpgroups':>10} {'compile s':>10} {'best s':>9} {'MAC/s':>10} {'warpgroups/s':>13} {'memory MB':>10}")
    lines = []
    for name in args.formats:
        for count in args.warpgroups:
            figures = line(OPS[name].format(n=args.n), count, args.repeats)
            lines.append({"format": name} | figures)
            memory = "" if figures["temp_bytes"] is None else f"{figures['temp_bytes'] / 1e6:.1f}"
            print(
                f"{name:>12} {count:>10} {figures['compile_s']:>10.2f} {figures['best_s']:>9.4f} {figures['mac_per_s']:>10.2e} "
                f"{figures['warpgroups_per_s']:>13.0f} {memory:>10}"
            )
    wrong = sum(figures["wrong"] for figures in lines)
    return finish(args, machine, lines, wrong, "the sampled warpgroups")


if __name__ == "__main__":
    raise SystemExit(main())
