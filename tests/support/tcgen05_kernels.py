"""The kernels of tests/ptx_files/tcgen05: how each is launched, and its result by `tcemu.gemm` and in float64.

The kernels were compiled by nvcc, CuTe and Triton for sm_100a, and no GPU has run them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import tcemu
from tcemu import ptx

FOLDER = Path(__file__).parents[1] / "ptx_files" / "tcgen05"
TARGET = "sm_100a"
F16, BF16, E4M3, F32 = np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float32


class Launch(NamedTuple):
    """The arguments of a launch, and what the kernel should leave in one of them."""

    args: list[Any]
    result: int  # the argument with the result
    expected: np.ndarray  # by gemm, in the order of the kernel
    exact: np.ndarray  # the product in float64
    grid: tuple[int, ...] = (1,)
    block: int = 128
    shared: int = 0


class Product(NamedTuple):
    """A product D = A B^T as the kernels compute it."""

    spelling: str  # behind tcgen05.mma.cta_group::1.
    dtype: Any  # of A and B

    def draw(self, seed: str, rows: int, k: int) -> np.ndarray:
        """Return a matrix, with values of different sizes, zeros and subnormals among them."""
        rng = np.random.default_rng(list(seed.encode()))
        if self.dtype is np.int8:
            return rng.integers(-128, 128, (rows, k)).astype(np.int8)
        values = rng.standard_normal((rows, k)) * 2.0 ** rng.integers(-4, 5, (rows, 1)) * (rng.random((rows, k)) > 0.05)
        values[0, : k // 2] *= 2.0**-20
        drawn = values.astype(self.dtype)
        return (drawn.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) if self.dtype is F32 else drawn  # tf32

    def multiply(self, a: np.ndarray, b: np.ndarray, c: np.ndarray | None = None, **scales: np.ndarray) -> np.ndarray:
        """Return A B^T + C by `gemm`."""
        op = f"tcgen05.mma.cta_group::1.{self.spelling}"
        return np.asarray(tcemu.gemm(a, b.T, c, op=op, target=TARGET, **scales))


def exact(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return A B^T in float64."""
    return a.astype(np.float64) @ b.astype(np.float64).T


def f16(m: int, n: int, dtype: Any = F16, d: str = "f32") -> Product:
    name = "f16" if dtype is F16 else "bf16"
    return Product(f"kind::f16.m{m}n{n}k16.{d}.{name}.{name}", dtype)


def e4m3(n: int) -> Product:
    return Product(f"kind::f8f6f4.m128n{n}k32.f32.e4m3.e4m3", E4M3)


TF32 = Product("kind::tf32.m128n64k8.f32.tf32.tf32", F32)
I8 = Product("kind::i8.m128n64k32.s32.s8.s8", np.int8)


def one_block(product: Product, m: int, n: int, k: int, name: str) -> Launch:
    """Kernels of nvcc and CuTe: a[m, k], b[n, k], d f32[m, n]."""
    a, b = product.draw(f"{name} a", m, k), product.draw(f"{name} b", n, k)
    return Launch([a, b, np.zeros((m, n), F32)], 2, product.multiply(a, b), exact(a, b))


def one_tile(product: Product, m: int, k: int, name: str, result: Any = F32, shared: int = 16400, block: int = 128) -> Launch:
    """Triton's kernel of one tile: a[m, k], b[k, 64], c[m, 64], k."""
    a, b = product.draw(f"{name} a", m, k), product.draw(f"{name} b", 64, k)
    args = [a, np.ascontiguousarray(b.T), np.zeros((m, 64), result), k, *SCRATCH]
    return Launch(args, 2, product.multiply(a, b).astype(result), exact(a, b), block=block, shared=shared)


SCRATCH = [np.zeros(16, np.uint8)] * 2  # Triton's two last pointers


def matmul(name: str) -> Launch:
    product, m, n, k = f16(128, 64), 256, 128, 192
    a, b = product.draw(f"{name} a", m, k), product.draw(f"{name} b", n, k)
    args = [a, np.ascontiguousarray(b.T), np.zeros((m, n), F16), k, k, n, n, *SCRATCH]
    return Launch(args, 2, product.multiply(a, b).astype(F16), exact(a, b), (2, 2), shared=49168)


def matmul_tma(name: str, cluster: int = 1) -> Launch:
    product, m, n, k = f16(128, 64), 256 // cluster, 128, 192 if cluster == 1 else 64
    a, b = product.draw(f"{name} a", m, k), product.draw(f"{name} b", n, k)
    grid = (2, 2 // cluster)
    scratch = np.zeros(384 * grid[0] * grid[1], np.uint8)  # three tensor maps for each block
    args = [a, b, np.zeros((m, n), F16), m, n, k, scratch, SCRATCH[0]]
    return Launch(args, 2, product.multiply(a, b).astype(F16), exact(a, b), grid, shared=49184)


def matmul_ws(name: str) -> Launch:
    product, m, n, k = f16(128, 128), 256, 128, 192
    a, b, c = product.draw(f"{name} a", m, k), product.draw(f"{name} b", n, k), np.zeros((m, n), F16)
    args: list[Any] = []
    for array in (a, b, c):
        rows, columns = array.shape
        boxes = (64, 128)
        args += [ptx.TensorMap(array, "f16", (columns, rows), boxes, swizzle=128), rows, columns, columns, 1]
    return Launch([*args, m, n, k, *SCRATCH], 2, product.multiply(a, b).astype(F16), exact(a, b), (2, 1), 256, 65724)


PAIR_PRODUCT = f16(128, 128)  # of each of the two blocks


def pair_launch(a: np.ndarray, b: np.ndarray) -> dict[str, Any]:
    """Return the arguments of `tcemu.ptx.run` for tcgen05_gemm_2cta: pairs of blocks with tiles of 256 x 128."""
    (m, k), n = a.shape, len(b)
    maps = [ptx.TensorMap(x, "f16", (k, len(x)), (64, rows), swizzle=128) for x, rows in ((a, 128), (b, 64))]
    return {"grid": (m // 128, n // 128), "block": 192, "args": [*maps, np.zeros((m, n), F32), k // 64], "shared_bytes": 49152}


def pair_of_blocks(name: str) -> Launch:
    a, b = PAIR_PRODUCT.draw(f"{name} a", 512, 192), PAIR_PRODUCT.draw(f"{name} b", 256, 192)
    launch = pair_launch(a, b)
    return Launch(launch["args"], 2, PAIR_PRODUCT.multiply(a, b), exact(a, b), launch["grid"], launch["block"], launch["shared_bytes"])


def chained(m: int, name: str) -> Launch:
    product, n = f16(m, 64), 128
    q, b, v = (product.draw(f"{name} {each}", rows, 64) for each, rows in (("q", m), ("b", n), ("v", n)))
    b, v = (b / 4).astype(F16), v
    total: np.ndarray | None = None
    wide = np.zeros((m, 64))
    for at in range(0, n, 64):
        p = product.multiply(q, b[at : at + 64]).astype(F16)
        total = product.multiply(p, v[at : at + 64].T.copy(), total)
        wide += p.astype(np.float64) @ v[at : at + 64].astype(np.float64)
    assert total is not None
    shared = 49184 if m == 128 else 40992
    return Launch([q, b, v, np.zeros((m, 64), F32), n, *SCRATCH], 3, total, wide, shared=shared)


def draw_scales(seed: str, rows: int, count: int) -> np.ndarray:
    """Return codes of ue8m0 scales near 1."""
    return np.random.default_rng(list(seed.encode())).integers(120, 132, (rows, count)).astype(np.uint8)


def repeat(scales: np.ndarray, size: int) -> np.ndarray:
    return np.repeat(scales, size, axis=1)


def scaled(name: str, own: bool = False) -> Launch:
    """e4m3 with a scale for every 32 elements. own: the kernel of nvcc, which takes its scales as they lie in shared memory."""
    m, n, k = (128, 64, 128) if own else (128, 128, 256)
    product = Product(f"kind::mxf8f6f4.block_scale.m128n{n}k32.f32.e4m3.e4m3.ue8m0", E4M3)
    a, b = product.draw(f"{name} a", m, k), product.draw(f"{name} b", n, k)
    sa, sb = draw_scales(f"{name} sa", m, k // 32), draw_scales(f"{name} sb", n, k // 32)
    expected = product.multiply(a, b, scale_a=sa, scale_b=sb.T.copy())
    wide = exact(a * 2.0 ** (repeat(sa, 32) - 127.0), b * 2.0 ** (repeat(sb, 32) - 127.0))
    d = np.zeros((m, n), F32)
    if not own:
        return Launch([a, b, sa, sb, d, k, *SCRATCH], 4, expected, wide, shared=33280)
    images = []
    for scales in (sa, sb):  # [row % 32][row / 32][k / 32]
        image = np.zeros((32, 4, 4), np.uint8)
        rows = np.arange(len(scales))
        image[rows % 32, rows // 32] = scales
        images.append(image)
    return Launch([a, b, *images, d], 4, expected, wide)


def fp4(name: str, size: int) -> Launch:
    """e2m1 with a scale for every `size` elements: ue8m0 for 32, e4m3 for 16."""
    m, n, k = 128, 64, 256
    kind, scale = ("mxf4", "ue8m0") if size == 32 else ("mxf4nvf4", "ue4m3")
    block = "" if size == 32 else ".block16"
    product = Product(f"kind::{kind}.block_scale{block}.m128n64k64.f32.e2m1.e2m1.{scale}", ml_dtypes.float4_e2m1fn)
    rng = np.random.default_rng(list(name.encode()))
    codes = [rng.integers(0, 16, (rows, k)).astype(np.uint8) for rows in (m, n)]
    a, b = (x.view(ml_dtypes.float4_e2m1fn) for x in codes)
    if size == 32:
        sa, sb = draw_scales(f"{name} sa", m, k // size), draw_scales(f"{name} sb", n, k // size)
        values = [2.0 ** (x - 127.0) for x in (sa, sb)]
    else:
        sa, sb = (rng.integers(0, 0x7F, (rows, k // size)).astype(np.uint8) for rows in (m, n))
        values = [x.view(E4M3).astype(np.float64) for x in (sa, sb)]
    expected = product.multiply(a, b, scale_a=sa, scale_b=sb.T.copy())
    wide = exact(*(x.astype(np.float64) * repeat(v, size) for x, v in zip((a, b), values, strict=True)))
    packed = [x[:, ::2] | x[:, 1::2] << 4 for x in codes]
    passed = [x if size == 32 else x.view(E4M3) for x in (sa, sb)]
    args = [*packed, *passed, np.zeros((m, n), F32), k, *SCRATCH]
    return Launch(args, 4, expected, wide, shared=12800 if size == 32 else 13312)


CUTE = ("k_inter", "k_sw32", "k_sw64", "mn_inter", "mn_sw32", "mn_sw64", "mn_sw128", "m128_64b16x", "m128_128b8x", "m128_256b4x")
CUTE_M64 = ("m64_32b16x", "m64_64b16x", "m64_128b8x", "m64_256b4x")
KERNELS: dict[str, Callable[[str], Launch]] = {
    "tcgen05_gemm_1cta": partial(one_block, f16(128, 64), 128, 64, 64),
    "tcgen05_gemm_2cta": pair_of_blocks,
    "tcgen05_mxf8_1cta": partial(scaled, own=True),
    "cute_gemm_1cta": partial(one_block, f16(128, 64, BF16), 128, 64, 64),
    **{f"cute_{name}": partial(one_block, f16(128, 64, BF16), 128, 64, 64) for name in CUTE},
    **{f"cute_{name}": partial(one_block, f16(64, 64, BF16), 64, 64, 64) for name in CUTE_M64},
    **{f"cute_tf32_{name}": partial(one_block, TF32, 128, 64, 32) for name in ("k", "mn")},
    "cute_e4m3_k": partial(one_block, e4m3(64), 128, 64, 128),
    "cute_e4m3_mn": partial(one_block, e4m3(128), 128, 128, 128),
    "triton_matmul": matmul,
    "triton_matmul_tma": matmul_tma,
    "triton_matmul_cluster": partial(matmul_tma, cluster=2),
    "triton_matmul_ws": matmul_ws,
    "triton_dot_scaled": scaled,
    "triton_dot_mxf4": partial(fp4, size=32),
    "triton_dot_nvf4": partial(fp4, size=16),
    "triton_chained": partial(chained, 128),
    "triton_chained_m64": partial(chained, 64),
    "triton_tile_m64": partial(one_tile, f16(64, 64), 64, 96),
    "triton_tile_m64_8warps": partial(one_tile, f16(64, 64), 64, 96, block=256),
    "triton_tile_f16": partial(one_tile, f16(128, 64, d="f16"), 128, 96, result=F16, shared=24592),
    "triton_tile_tf32": partial(one_tile, TF32, 128, 96, shared=49168),
    "triton_tile_e4m3": partial(one_tile, e4m3(64), 128, 192, shared=24592),
    "triton_tile_i8": partial(one_tile, I8, 128, 192, result=np.int32, shared=24592),
}  # fmt: skip


def launch_kernel(name: str, text: str | None = None, **options: Any) -> tuple[Launch, np.ndarray]:
    """Run a kernel; return its launch and the result."""
    launch = make_launch(name)
    found = ptx.run(
        (FOLDER / f"{name}.ptx").read_text() if text is None else text, grid=launch.grid, block=launch.block, args=launch.args,
        shared_bytes=launch.shared, target=TARGET, **options,
    )  # fmt: skip
    return launch, np.asarray(found[launch.result])


def make_launch(name: str) -> Launch:
    """Return the launch of a kernel."""
    return KERNELS[name](name=name)
