"""How many warps execute `mma` a second? `python benchmarks/mma.py`: registers in and out, dense, sparse and block-scaled.

Each line is the best of several runs after the first, which compiles and stands apart: of one call and its end, and of 20 calls that
follow each other. The line "nothing" is a program that adds one to eight words. A few warps are checked against runs of their own.
"""

import jax
import jax.numpy as jnp
import numpy as np
from harness import add_execution, arguments, back_to_back, describe_machine, finish, timed

import tcemu

DENSE, SPARSE = "mma.sync.aligned.{}", "mma.sp::ordered_metadata.sync.aligned.{}"
OPS = {  # name -> spelling and target
    "f16": (DENSE.format("m16n8k16.row.col.f32.f16.f16.f32"), "sm_90"),
    "f16 to f16": (DENSE.format("m16n8k16.row.col.f16.f16.f16.f16"), "sm_90"),
    "tf32": (DENSE.format("m16n8k8.row.col.f32.tf32.tf32.f32"), "sm_90"),
    "e4m3 on sm_90": (DENSE.format("m16n8k32.row.col.f32.e4m3.e4m3.f32"), "sm_90"),
    "e4m3 on sm_120": (DENSE.format("m16n8k32.row.col.f32.e4m3.e4m3.f32"), "sm_120"),
    "s8": (DENSE.format("m16n8k32.row.col.s32.s8.s8.s32"), "sm_90"),
    "f64": (DENSE.format("m8n8k4.row.col.f64.f64.f64.f64"), "sm_90"),
    "sparse f16": (SPARSE.format("m16n8k32.row.col.f32.f16.f16.f32"), "sm_90"),
    "sparse s8": (SPARSE.format("m16n8k64.row.col.s32.s8.s8.s32"), "sm_90"),
    "mxfp8": (DENSE.format("m16n8k32.row.col.kind::mxf8f6f4.block_scale.f32.e4m3.e4m3.f32.ue8m0"), "sm_120a"),
    "nvfp4": (DENSE.format("m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"), "sm_120a"),
    "sparse nvfp4": (SPARSE.format("m16n8k128.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"), "sm_120a"),
}


def drawn(op: tcemu.Instruction, warps: int) -> tuple[jax.Array, ...]:
    """Registers of numbers near one, metadata of two neighbours in four, and scales of one."""
    rng = np.random.default_rng(0)
    held = []
    for name in "abc":
        fmt, shape = getattr(op, name), op.matrix_shape(name)
        codes = tcemu.formats.from_float(fmt, rng.normal(0, 3, (warps, *shape)))
        held.append(tcemu.pack(op, name, codes))
    held += [jnp.full((warps, 32), 0x44444444, jnp.uint32)] if op.sparse else []
    ones = {"ue8m0": 0x7F7F7F7F, "ue4m3": 0x38383838}.get(str(op.scaling and op.scaling.format), 0)
    return (*held, *([jnp.full((warps, 32), ones, jnp.uint32)] * 2 if op.scaling else []))


def runner(op: tcemu.Instruction, target: str):
    def run(a: jax.Array, b: jax.Array, c: jax.Array, *rest: jax.Array) -> jax.Array:
        e, scales = (rest[:1], rest[1:]) if op.sparse else ((), rest)
        scale_arguments = dict(zip(("scale_a", "scale_b"), scales, strict=False))
        if op.sparse:
            return tcemu.mma_sp(op, a, b, c, *e, selector=0, target=target, **scale_arguments)
        return tcemu.mma(op, a, b, c, target=target, **scale_arguments)

    return run


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--warps", type=int, nargs="+", default=[4096])
    parser.add_argument("--formats", nargs="+", choices=OPS, default=list(OPS), metavar="NAME", help=f"of {', '.join(OPS)}")
    add_execution(parser)
    args = parser.parse_args()
    machine = describe_machine()
    print(f"{'':>15} {'warps':>7} {'first call s':>13} {'best ms':>9} {'warps/s':>10} {'in a row ms':>12} {'warps/s':>10} {'MAC/s':>10}")
    lines, wrong = [], 0
    nothing, eight = jax.jit(lambda x: x + 1), jnp.zeros(8, jnp.uint32)
    first, best = timed(lambda: nothing(eight), 10 * args.repeats)
    lines.append({"name": "nothing", "first_call_s": first, "best_s": best})
    print(f"{'nothing':>15} {'':>7} {first:>13.2f} {1e3 * best:>9.3f}")
    for warps in args.warps:
        for name in args.formats:
            spelling, target = OPS[name]
            op = tcemu.parse(spelling)
            run, operands = runner(op, target), drawn(op, warps)
            whole = jax.jit(run)
            with tcemu.execution(args.execution):
                call = lambda whole=whole, operands=operands: whole(*operands)
                first, best = timed(call, args.repeats)
                in_a_row = back_to_back(call, args.repeats)
                made = np.asarray(whole(*operands))
            for i in {0, warps // 2, warps - 1}:
                wrong += int((np.asarray(run(*(x[i] for x in operands))) != made[i]).sum())
            macs = warps * op.m * op.n * op.matrix_shape("a")[1] / in_a_row
            lines.append(
                {"name": name, "warps": warps, "first_call_s": first, "best_s": best, "warps_per_s": warps / best}
                | {"in_a_row_s": in_a_row, "in_a_row_warps_per_s": warps / in_a_row, "mac_per_s": macs}
            )
            one = f"{name:>15} {warps:>7} {first:>13.2f} {1e3 * best:>9.3f} {warps / best:>10.2e}"
            print(f"{one} {1e3 * in_a_row:>12.3f} {warps / in_a_row:>10.2e} {macs:>10.2e}")
    return finish(args, machine, lines, wrong, "the warps that ran alone")


if __name__ == "__main__":
    raise SystemExit(main())
