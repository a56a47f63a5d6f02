"""Compiles Triton kernels for sm_100 on a machine without a GPU; tl.dot becomes tcgen05.mma. Writes one .ptx a kernel into this folder.

Run with TRITON_DISABLE_LINE_INFO=1, so that no path of the machine gets into the text, as: python triton_kernels.py [NAME ...]
"""

import sys
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def matmul(a, b, c, k, am, bk, cm, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    i, j = tl.program_id(0), tl.program_id(1)
    rows, cols, ks = i * BM + tl.arange(0, BM), j * BN + tl.arange(0, BN), tl.arange(0, BK)
    pa, pb = a + rows[:, None] * am + ks[None, :], b + ks[:, None] * bk + cols[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(0, k, BK):
        acc = tl.dot(tl.load(pa), tl.load(pb), acc)
        pa += BK
        pb += BK * bk
    tl.store(c + rows[:, None] * cm + cols[None, :], acc.to(tl.float16))


@triton.jit
def matmul_tma(a, b, c, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    i, j = tl.program_id(0), tl.program_id(1)
    da = tl.make_tensor_descriptor(a, shape=[m, k], strides=[k, 1], block_shape=[BM, BK])
    db = tl.make_tensor_descriptor(b, shape=[n, k], strides=[k, 1], block_shape=[BN, BK])
    dc = tl.make_tensor_descriptor(c, shape=[m, n], strides=[n, 1], block_shape=[BM, BN])
    acc = tl.zeros((BM, BN), tl.float32)
    for at in range(0, k, BK):
        acc = tl.dot(da.load([i * BM, at]), db.load([j * BN, at]).T, acc)
    dc.store([i * BM, j * BN], acc.to(tl.float16))


@triton.jit
def scaled(a, b, sa, sb, c, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows, cols, ks, ss = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK), tl.arange(0, BK // 32)
    acc = tl.zeros((BM, BN), tl.float32)
    for at in range(0, k, BK):
        x = tl.load(a + rows[:, None] * k + at + ks[None, :])
        y = tl.load(b + cols[None, :] * k + at + ks[:, None])
        su = tl.load(sa + rows[:, None] * (k // 32) + at // 32 + ss[None, :])
        sv = tl.load(sb + cols[:, None] * (k // 32) + at // 32 + ss[None, :])
        acc = tl.dot_scaled(x, su, "e4m3", y, sv, "e4m3", acc)
    tl.store(c + rows[:, None] * BN + cols[None, :], acc)


@triton.jit
def one_tile(a, b, c, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TYPE: tl.constexpr):
    rows, cols, ks = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros((BM, BN), TYPE)
    for at in range(0, k, BK):
        x = tl.load(a + rows[:, None] * k + at + ks[None, :])
        y = tl.load(b + (at + ks)[:, None] * BN + cols[None, :])
        acc = tl.dot(x, y, acc, out_dtype=TYPE)
    tl.store(c + rows[:, None] * BN + cols[None, :], acc)


@triton.jit
def chained(a, b, v, c, n, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows, cols, ks = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    q = tl.load(a + rows[:, None] * BK + ks[None, :])
    acc = tl.zeros((BM, BK), tl.float32)
    for at in range(0, n, BN):
        p = tl.dot(q, tl.load(b + (at + cols)[None, :] * BK + ks[:, None]))
        acc = tl.dot(p.to(tl.float16), tl.load(v + (at + cols)[:, None] * BK + ks[None, :]), acc)
    tl.store(c + rows[:, None] * BK + ks[None, :], acc)


@triton.jit
def scaled_fp4(a, b, sa, sb, c, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, VEC: tl.constexpr):
    rows, cols, ks, ss = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK // 2), tl.arange(0, BK // VEC)
    acc = tl.zeros((BM, BN), tl.float32)
    for at in range(0, k, BK):
        x = tl.load(a + rows[:, None] * (k // 2) + at // 2 + ks[None, :])
        y = tl.load(b + cols[None, :] * (k // 2) + at // 2 + ks[:, None])
        su = tl.load(sa + rows[:, None] * (k // VEC) + at // VEC + ss[None, :])
        sv = tl.load(sb + cols[:, None] * (k // VEC) + at // VEC + ss[None, :])
        acc = tl.dot_scaled(x, su, "e2m1", y, sv, "e2m1", acc)
    tl.store(c + rows[:, None] * BN + cols[None, :], acc)


@triton.jit
def matmul_ws(da, db, dc, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    i, j = tl.program_id(0), tl.program_id(1)
    acc = tl.zeros((BM, BN), tl.float32)
    for at in tl.range(0, k, BK, warp_specialize=True):
        acc = tl.dot(da.load([i * BM, at]), db.load([j * BN, at]).T, acc)
    dc.store([i * BM, j * BN], acc.to(tl.float16))


def tiles(bm: int, bn: int, bk: int) -> dict:
    return {"BM": bm, "BN": bn, "BK": bk}


def small(kind: str, result: str, bm: int, bk: int, type_: tl.dtype, warps: int = 4) -> tuple:
    return one_tile, {"a": kind, "b": kind, "c": result, "k": "i32"}, {**tiles(bm, 64, bk), "TYPE": type_}, warps


HALVES = {"a": "*fp16", "b": "*fp16", "c": "*fp16"}
STRIDES = dict.fromkeys(("k", "am", "bk", "cm"), "i32")
FP8 = {"a": "*fp8e4nv", "b": "*fp8e4nv", "sa": "*u8", "sb": "*u8", "c": "*fp32", "k": "i32"}
SIZES = dict.fromkeys(("m", "n", "k"), "i32")
FP4 = {"a": "*u8", "b": "*u8", "sa": "", "sb": "", "c": "*fp32", "k": "i32"}
CHAIN = {"a": "*fp16", "b": "*fp16", "v": "*fp16", "c": "*fp32", "n": "i32"}
MAPS = {"da": "tensordesc<fp16[128,64]>", "db": "tensordesc<fp16[128,64]>", "dc": "tensordesc<fp16[128,128]>"}
KERNELS = {  # name: kernel, types of its arguments, constants, warps
    "triton_matmul": (matmul, {**HALVES, **STRIDES}, tiles(128, 64, 64), 4),
    "triton_matmul_tma": (matmul_tma, {**HALVES, **SIZES}, tiles(128, 64, 64), 4),
    "triton_dot_scaled": (scaled, FP8, tiles(128, 128, 128), 4),
    "triton_matmul_cluster": (matmul_tma, {**HALVES, **SIZES}, {**tiles(128, 128, 64), "num_ctas": 2}, 4),
    "triton_matmul_ws": (matmul_ws, {**MAPS, **SIZES}, tiles(128, 128, 64), 4),
    "triton_chained": (chained, CHAIN, tiles(128, 64, 64), 4),
    "triton_chained_m64": (chained, CHAIN, tiles(64, 64, 64), 4),
    "triton_dot_mxf4": (scaled_fp4, {**FP4, "sa": "*u8", "sb": "*u8"}, {**tiles(128, 64, 128), "VEC": 32}, 4),
    "triton_dot_nvf4": (scaled_fp4, {**FP4, "sa": "*fp8e4nv", "sb": "*fp8e4nv"}, {**tiles(128, 64, 128), "VEC": 16}, 4),
    "triton_tile_m64": small("*fp16", "*fp32", 64, 32, tl.float32),
    "triton_tile_m64_8warps": small("*fp16", "*fp32", 64, 32, tl.float32, 8),
    "triton_tile_f16": small("*fp16", "*fp16", 128, 32, tl.float16),
    "triton_tile_tf32": small("*fp32", "*fp32", 128, 32, tl.float32),
    "triton_tile_e4m3": small("*fp8e4nv", "*fp32", 128, 64, tl.float32),
    "triton_tile_i8": small("*i8", "*i32", 128, 64, tl.int32),
}
for name in sys.argv[1:] or KERNELS:
    kernel, types, constants, warps = KERNELS[name]
    constants = dict(constants)
    blocks = constants.pop("num_ctas", 1)  # of a cluster
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    place = list(signature).index
    aligned = {(place(x),): [["tt.divisibility", 16]] for x in types}  # pointers, and numbers that are multiples of 16
    source = ASTSource(fn=kernel, signature=signature, constexprs={(place(x),): v for x, v in constants.items()}, attrs=aligned)
    options = {"num_warps": warps, "num_stages": 2, "num_ctas": blocks, "ptx_version": 90}
    made = triton.compile(source, target=GPUTarget("cuda", 100, 32), options=options)
    Path(f"{name}.ptx").write_text(made.asm["ptx"])
    facts = made.metadata
    print(
        name, f"shared {facts.shared}, scratch {facts.global_scratch_size} aligned to {facts.global_scratch_align}, warps {facts.num_warps}"
    )
