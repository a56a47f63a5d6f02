"""How fast is an emulated product? `python benchmarks/gemm.py`: multiply-accumulates per second, beside a plain XLA f32 matmul.

Each line is the best of several runs after the first, which compiles and stands apart. Sampled rows are checked against `tcemu.dot`.
Operands are float32, rounded to the formats each time; with `--typed` those that JAX has a dtype for come in it.
The other exact emulators, mmasim and mmaemu, run beside it where they are installed.
"""

import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from harness import add_execution, arguments, describe_machine, finish, timed

import tcemu
from tcemu.formats import ARRAY_FORMATS

MMA = "mma.sync.aligned."
OPS = {  # name -> spelling and target
    "f16": (MMA + "m16n8k16.row.col.f32.f16.f16.f32", "sm_90a"),
    "bf16": (MMA + "m16n8k16.row.col.f32.bf16.bf16.f32", "sm_90a"),
    "tf32": (MMA + "m16n8k8.row.col.f32.tf32.tf32.f32", "sm_90a"),
    "e4m3": ("wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3", "sm_90a"),
    "e4m3 by mma": (MMA + "m16n8k32.row.col.f32.e4m3.e4m3.f32", "sm_90a"),
    "mxf8": (MMA + "m16n8k32.row.col.kind::mxf8f6f4.block_scale.f32.e4m3.e4m3.f32.ue8m0", "sm_120a"),
    "mxf4": (MMA + "m16n8k64.row.col.kind::mxf4.block_scale.f32.e2m1.e2m1.f32.ue8m0", "sm_120a"),
    "nvf4": (MMA + "m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3", "sm_120a"),
    "s8": (MMA + "m16n8k32.row.col.s32.s8.s8.s32", "sm_90a"),
    "f64": (MMA + "m8n8k4.row.col.f64.f64.f64.f64", "sm_90a"),
}
DTYPES = {fmt: dtype for dtype, fmt in ARRAY_FORMATS.items() if dtype != np.float32}


def scales(op: tcemu.Instruction, a: np.ndarray, b: np.ndarray) -> dict[str, jax.Array]:
    """Powers of two between 1/8 and 4, a block of K each; none where the instruction takes none."""
    if op.scaling is None:
        return {}
    rng, blocks = np.random.default_rng(2), a.shape[1] * op.scaling.count // op.k
    drawn = (2.0 ** rng.integers(-3, 3, shape) for shape in ((len(a), blocks), (blocks, b.shape[1])))
    return {name: jnp.asarray(v, jnp.float32) for name, v in zip(("scale_a", "scale_b"), drawn, strict=True)}


def check(op: tcemu.Instruction, target: str, a: np.ndarray, b: np.ndarray, scales: dict[str, jax.Array], d: np.ndarray) -> int:
    """Words that differ from a loop of single instructions over 16 sampled rows and 8 columns."""
    rows, columns = (np.sort(np.random.default_rng(1).permutation(n)[:w]) for n, w in ((len(a), op.m), (b.shape[1], op.n)))
    convert = jax.jit(tcemu.formats.from_float, static_argnums=0)
    x, y = convert(op.a, a[rows]), convert(op.b, b[:, columns])
    codes = {name: convert(op.scaling.format, v[rows] if name == "scale_a" else v[:, columns]) for name, v in scales.items()}
    acc = jnp.zeros((op.m, op.n, *(2,) * (op.d.words - 1)), op.d.dtype)
    for step in range(a.shape[1] // op.k):
        at, part = (slice(step * size, (step + 1) * size) for size in (op.k, op.scaling.count if op.scaling else 0))
        block_scales = {name: v[:, part] if name == "scale_a" else v[part] for name, v in codes.items()}
        acc = tcemu.dot(op, x[:, at], y[at], acc, target=target, **block_scales)
    sample = np.ascontiguousarray(np.asarray(d)[np.ix_(rows, columns)])
    return int((sample.view(np.uint32).reshape(np.shape(acc)) != np.asarray(acc)).sum())


def mmasim(n: int) -> tuple[Callable, int]:
    """One Hopper m16n8k16 of f16, which is what it offers at a time; n is not used."""
    import torch
    from mmasim.nv_ptx import MMA

    one = MMA("Hopper", "m16n8k16.f32.f16.f16.f32")
    a, b, c = torch.randn(16, 16).half(), torch.randn(16, 8).half(), torch.zeros(16, 8)
    return lambda: one(a, b, c), 16 * 8 * 16


def mmaemu(n: int) -> tuple[Callable, int]:
    """A whole product of e4m3, as Hopper's wgmma accumulates it."""
    import mmaemu
    import torch

    device = "cuda" if on_gpu() and torch.cuda.is_available() else "cpu"
    a, b = (torch.randn(n, n, device=device).to(torch.float8_e4m3fn) for _ in "ab")

    def product() -> None:
        mmaemu.accumulate(a, b, use_fast_accum=True, profile="hopper-ws0", splitk=1)
        if device == "cuda":
            torch.cuda.synchronize()

    return product, n**3


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def peers(repeats: int, largest: int) -> list[dict]:
    lines, n = [], largest if on_gpu() else min(largest, 256)
    for name, make in (("mmasim", mmasim), ("mmaemu", mmaemu)):
        try:
            product, macs = make(n)
        except ImportError as error:
            print(f"{name:>12}: not installed ({error})")
            continue
        seconds = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            product()
            seconds.append(time.perf_counter() - start)
        first, best = seconds[0], min(seconds[1:])
        lines.append({"format": name, "size": n, "first_call_s": first, "best_s": best, "mac_per_s": macs / best})
        print(f"{name:>12} {round(macs ** (1 / 3)):>6} {first:>13.2f} {best:>9.4f} {macs / best:>10.2e}")
    return lines


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--formats", nargs="+", choices=OPS, default=["f16", "bf16", "e4m3", "s8"])
    parser.add_argument("--recipes", nargs="*", default=[], help="lines of tcemu.matmul by these too")
    add_execution(parser)
    parser.add_argument("--typed", action="store_true", help="operands in their formats' own dtypes, where JAX has them")
    args = parser.parse_args()

    machine = describe_machine()
    print(f"{'format':>12} {'size':>6} {'first call s':>13} {'best s':>9} {'MAC/s':>10} {'x slower than plain f32':>24}")
    lines, wrong = [], 0
    plain = jax.jit(lambda a, b: jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST))
    of_bytes = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.int32))
    for n in args.sizes:
        rng = np.random.default_rng(0)
        a, b = rng.standard_normal((n, n), np.float32), rng.standard_normal((n, n), np.float32)
        x, y = jnp.asarray(a), jnp.asarray(b)
        base = 0.0  # seconds of the first line

        def note(name: str, run: Callable, n: int = n) -> None:
            nonlocal base
            first, best = timed(run, args.repeats)
            base = base or best
            lines.append({"format": name, "size": n, "first_call_s": first, "best_s": best, "mac_per_s": n**3 / best, "ratio": best / base})
            print(f"{name:>12} {n:>6} {first:>13.2f} {best:>9.4f} {n**3 / best:>10.2e} {best / base:>24.1f}", flush=True)

        bytes_ = [v.astype(jnp.int8) for v in (x, y)]
        note("plain", partial(plain, x, y))
        note("plain s8", partial(of_bytes, *bytes_))
        for name in args.formats:
            op, target = tcemu.parse(OPS[name][0]), OPS[name][1]
            block_scales = scales(op, a, b)
            u, v = bytes_ if op.a.is_integer else (x, y)
            if args.typed and (dtypes := [DTYPES[fmt] for fmt in (op.a, op.b) if fmt in DTYPES])[1:]:
                u, v = u.astype(dtypes[0]), v.astype(dtypes[1])
            product = partial(tcemu.gemm, u, v, op=op, target=target, **block_scales)
            with tcemu.execution(args.execution):
                note(name, product)
                d = np.asarray(product())
            wrong += check(op, target, np.asarray(u), np.asarray(v), block_scales, d)
        for name in args.recipes:
            with tcemu.execution(args.execution):
                note(name, partial(tcemu.matmul, x, y, recipe=tcemu.get_recipe(name)))
    lines += peers(args.repeats, max(args.sizes))
    return finish(args, machine, lines, wrong, "the sampled rows")


if __name__ == "__main__":
    raise SystemExit(main())
