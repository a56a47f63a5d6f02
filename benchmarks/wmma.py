"""How fast do thousands of warps load, multiply and store? `python benchmarks/wmma.py`: warps per second of wmma and the matrix movers.

Each line is the best of several runs after the first, which compiles and stands apart. A few warps are checked against runs of their own.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from harness import arguments, describe_machine, finish, timed

import tcemu

TARGET = "sm_90a"
LOAD, STORE = "wmma.load.{}.sync.aligned.{}.m16n16k16.{}", "wmma.store.d.sync.aligned.row.m16n16k16.{}"
MMA = {
    "f16 to f32": ("f16", "f32", "wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32"),
    "f16 to f16": ("f16", "f16", "wmma.mma.sync.aligned.row.col.m16n16k16.f16.f16"),
    "bf16 to f32": ("bf16", "f32", "wmma.mma.sync.aligned.row.col.m16n16k16.f32.bf16.bf16.f32"),
    "s8 to s32": ("s8", "s32", "wmma.mma.sync.aligned.row.col.m16n16k16.s32.s8.s8.s32"),
}
MOVER = "{}.sync.aligned.m8n8.x4.b16"


def cases(warps: int, words: int) -> dict[str, tuple[Callable, tuple[jax.Array, ...]]]:
    """What is timed: a function of arrays whose first axis is the warp."""
    rng = np.random.default_rng(0)
    memory = jnp.asarray(rng.integers(0, 2**32, (warps, words), np.uint32))
    address = jnp.asarray(np.argsort(rng.random((warps, words // 4)), axis=-1)[:, :32] * 16, jnp.int32)
    registers = jnp.asarray(rng.integers(0, 2**32, (warps, 32, 4), np.uint32))
    offsets = jnp.asarray(16 * rng.integers(0, 16, warps), jnp.int32)
    cases = {}
    for name, (element, accumulator, op) in MMA.items():
        a, b = LOAD.format("a", "row", element), LOAD.format("b", "col", element)
        c, d = LOAD.format("c", "row", accumulator), STORE.format(accumulator)
        operands = tuple(tcemu.wmma_load(load, memory, target=TARGET) for load in (a, b, c))
        cases[f"wmma.load.a {element}, stride 32"] = (lambda m, op=a: tcemu.wmma_load(op, m, stride=32, target=TARGET), (memory,))
        cases[f"wmma.mma {name}"] = (lambda *x, op=op: tcemu.wmma_mma(op, *x, target=TARGET), operands)
        cases[f"wmma.store {accumulator}, stride 32"] = (
            lambda m, f, op=d: tcemu.wmma_store(op, m, f, stride=32, target=TARGET),
            (memory, operands[2]),
        )
    at = LOAD.format("a", "row", "f16")
    cases["wmma.load.a f16, an offset for each warp"] = (lambda m, o: tcemu.wmma_load(at, m, offset=o, target=TARGET), (memory, offsets))
    cases["ldmatrix x4"] = (lambda m, p: tcemu.ldmatrix(MOVER.format("ldmatrix"), m, p), (memory, address))
    cases["stmatrix x4"] = (lambda m, p, r: tcemu.stmatrix(MOVER.format("stmatrix"), m, p, r), (memory, address, registers))
    cases["movmatrix"] = (lambda r: tcemu.movmatrix("movmatrix.sync.aligned.m8n8.trans.b16", r), (registers[..., :1],))
    return cases


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--warps", type=int, nargs="+", default=[4096])
    parser.add_argument("--words", type=int, default=1024, help="of memory, for each warp")
    args = parser.parse_args()

    machine = describe_machine()
    print(f"{'':>42} {'warps':>7} {'first call s':>13} {'best ms':>9} {'warps/s':>10}")
    lines, wrong = [], 0
    for warps in args.warps:
        for name, (run, operands) in cases(warps, args.words).items():
            whole = jax.jit(run)
            first, best = timed(lambda whole=whole, operands=operands: whole(*operands), args.repeats)
            made = np.asarray(whole(*operands))
            for i in {0, warps // 2, warps - 1}:
                wrong += int((np.asarray(run(*(x[i] for x in operands))) != made[i]).sum())
            lines.append({"name": name, "warps": warps, "first_call_s": first, "best_s": best, "warps_per_s": warps / best})
            print(f"{name:>42} {warps:>7} {first:>13.2f} {1e3 * best:>9.2f} {warps / best:>10.2e}")
    return finish(args, machine, lines, wrong, "the warps that ran alone")


if __name__ == "__main__":
    raise SystemExit(main())
