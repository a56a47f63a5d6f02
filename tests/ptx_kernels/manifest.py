"""The corpus, one row for each kernel: its launch, its operands, and how its results are compared with a GPU's."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from .operands import Operand

FOLDER = Path(__file__).parent


class TensorMap(NamedTuple):
    """A CUtensorMap of one of the row's buffers. sizes, box: innermost first; swizzle: in bytes, 0 for none."""

    of: int
    kind: str
    sizes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0


class Kernel(NamedTuple):
    """file: of sources/ and, as FILE.ptx or FILE.sm_90a.ptx, of ptx/. arguments: operands, NumPy scalars, tensor maps, in their order.

    behind: buffers that no pointer names, only tensor maps. They count after the operands among the arguments. compared: how buffers are
    compared that are not compared word by word, by their number: "sorted". sm_80: whether it is compiled for sm_80 too.
    """

    file: str
    entry: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    arguments: tuple[Operand | TensorMap | np.generic, ...]
    shared: int = 0
    behind: tuple[Operand, ...] = ()
    compared: dict[int, str] = {}  # noqa: RUF012
    sm_80: bool = True
    size: str = ""  # of a second row with the same entry

    @property
    def name(self) -> str:
        return self.entry + self.size

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The buffers of the pointers in their order, then those of the tensor maps."""
        return (*(argument for argument in self.arguments if isinstance(argument, Operand)), *self.behind)

    @property
    def targets(self) -> tuple[str, ...]:
        return ("sm_80", "sm_90a") if self.sm_80 else ("sm_90a",)

    def draw_buffers(self) -> list[np.ndarray]:
        """Return the initial contents of the buffers."""
        return [operand.draw(f"{self.name} {i}") for i, operand in enumerate(self.operands)]

    def text(self, target: str) -> str:
        """Return the PTX for the target. One text serves both targets where nvcc's texts differ only in the line `.target`."""
        own = FOLDER / "ptx" / f"{self.file}.sm_90a.ptx"
        if target == "sm_90a" and own.exists():
            return own.read_text()
        return (FOLDER / "ptx" / f"{self.file}.ptx").read_text().replace(".target sm_80", f".target {target}")

    @property
    def texts(self) -> tuple[str, ...]:
        """The targets whose texts differ in more than the line `.target`."""
        return self.targets if (FOLDER / "ptx" / f"{self.file}.sm_90a.ptx").exists() else self.targets[:1]


def zeros(kind: str, *shape: int) -> Operand:
    return Operand(kind, shape, "constant")


def near(kind: str, *shape: int) -> Operand:
    return Operand(kind, shape)


def random_operand(kind: str, how: str, *shape: int) -> Operand:
    return Operand(kind, shape, how)


def uniform(kind: str, low: int, high: int, *shape: int) -> Operand:
    return Operand(kind, shape, "uniform", low, high)


i32, u32, u64, f32 = np.int32, np.uint32, np.uint64, np.float32


def _wmma(entry: str, kind: str, grid: tuple[int, int], m: int, n: int, k: int, sums: str, columns_of_b: bool, how: str = "near") -> Kernel:
    b = random_operand(kind, how, n, k) if columns_of_b else random_operand(kind, how, k, n)
    c = uniform("s32", -1000, 1000, m, n) if sums == "s32" else near(sums, m, n)
    return Kernel("wmma_gemm", entry, grid, (64,), (random_operand(kind, how, m, k), b, c, zeros(sums, m, n), i32(n), i32(k)))


WMMA = (
    _wmma("wmma_f16", "f16", (2, 2), 32, 64, 48, "f32", False),
    _wmma("wmma_f16_sums", "f16", (2, 2), 64, 32, 32, "f16", True),
    _wmma("wmma_bf16", "bf16", (1, 2), 16, 64, 48, "f32", False, "rare"),
    _wmma("wmma_tf32", "f32", (1, 2), 32, 32, 24, "f32", True),
    _wmma("wmma_s8", "s8", (1, 2), 32, 32, 64, "s32", True, "raw"),
    _wmma("wmma_f64", "f64", (1, 2), 16, 16, 12, "f64", False),
)


def _tiles(file: str, entry: str, kind: str, k: int, *rest, how: str = "near", sums: str = "f32", other: str = "", **more) -> Kernel:
    """32 x 64 by a kernel of block_tile.cuh, 96 bytes of each row; `rest` follows A and B, or d, n and the bytes of a row."""
    rest = rest or (zeros(sums, 32, 64), i32(64), i32(96))
    return Kernel(file, entry, (2, 1), (128,), (random_operand(kind, how, 32, k), random_operand(other or kind, how, 64, k), *rest), **more)


MMA = (
    _tiles("mma_gemm", "mma_f16", "f16", 48, how="rare"),
    _tiles("mma_gemm", "mma_bf16", "bf16", 48),
    _tiles("mma_gemm", "mma_tf32", "f32", 24),
    _tiles("mma_gemm", "mma_s8", "s8", 96, how="raw", sums="s32"),
    _tiles("mma_gemm", "mma_u8_s8", "u8", 96, how="raw", sums="s32"),
    _tiles("mma_gemm", "mma_s4", "u8", 96, how="raw", sums="s32"),
    _tiles("mma_gemm", "mma_b1", "u8", 96, how="raw", sums="s32"),
    Kernel("mma_gemm", "mma_f16_trans", (1,), (32,), (near("f16", 16, 48), near("f16", 48, 16), zeros("f16", 16, 16), i32(48))),
    Kernel("mma_gemm", "mma_f64", (1,), (32,), (near("f64", 8, 24), near("f64", 8, 24), zeros("f64", 8, 8), i32(24))),
    _tiles("stmatrix", "stored_by_matrices", "f16", 48, sums="f16", sm_80=False),
    _tiles("stmatrix", "stored_transposed", "f16", 48, sums="f16", sm_80=False),
    _tiles("mma_fp8", "mma_e4m3", "e4m3", 96, how="wide", sm_80=False),
    _tiles("mma_fp8", "mma_e5m2", "e5m2", 96, sm_80=False),
    _tiles("mma_fp8", "mma_e4m3_e5m2", "e4m3", 96, how="wide", other="e5m2", sm_80=False),
    _tiles(
        "mma_fp8", "mma_e4m3_quantised", "e4m3", 96, zeros("e4m3", 32, 64), zeros("f32", 1), i32(64), i32(96), f32(7.25), sm_80=False
    ),
    *(
        Kernel("sparse", entry, (1,), (32,), (random_operand(kind, how, 16, 64 // size), random_operand(kind, how, 8, 128 // size),
               random_operand("u32", "metadata", 2, 32), zeros(sums, 16, 8), i32(2)))
        for entry, kind, how, size, sums in (
            ("sparse_f16", "f16", "near", 2, "f32"), ("sparse_bf16", "bf16", "rare", 2, "f32"), ("sparse_s8", "s8", "raw", 1, "s32"))
    ),
)  # fmt: skip
EPILOGUES = (
    _tiles("epilogues", "bias_relu", "f16", 48, near("f16", 64), zeros("f16", 32, 64), i32(64), i32(96)),
    _tiles("epilogues", "gelu", "f16", 48, near("f32", 64), zeros("bf16", 32, 64), i32(64), i32(96)),
    _tiles("epilogues", "residual", "f16", 48, near("f16", 32, 64), zeros("f16", 32, 64), i32(64), i32(96), f32(0.3), f32(-1.7)),
    _tiles("epilogues", "fp8_out", "f16", 48, zeros("u8", 32, 64), i32(64), i32(96), f32(9.5)),
    _tiles("epilogues", "requantised", "s8", 96, uniform("s32", -9999, 9999, 64), random_operand("f32", "constant",
        64)._replace(low=0x3A83126F),
           zeros("s8", 32, 64), i32(64), i32(96), i32(-3), how="raw"),
)  # fmt: skip


def _split(entry: str, kind: str, k: int, *rest, how: str = "near") -> Kernel:
    return Kernel(
        "split_k", entry, (2, 1, 3), (128,), (random_operand(kind, how, 32, k), random_operand(kind, how, 64, k), *rest, i32(64), i32(192))
    )


TILED = (
    Kernel("gemm_async", "gemm_128x128", (1, 1), (256,),
           (near("f16", 128, 96), near("f16", 96, 128), zeros("f32", 128, 128), i32(128), i32(96)), 49152),
    Kernel("gemm_async", "gemm_edges", (2, 2), (128,),
           (near("f16", 41, 40), near("f16", 40, 56), zeros("f32", 41, 56), i32(41), i32(56), i32(40))),
    _split("split_k_atomics", "f16", 96, random_operand("f32", "integers", 32, 64), how="integers"),
    _split("split_k_s8", "s8", 192, uniform("s32", -99, 99, 32, 64), how="raw"),
    _split("split_k_semaphore", "f16", 96, zeros("f32", 32, 64), zeros("s32", 2)),
    _split("split_k_last", "f16", 96, zeros("f32", 3, 32, 64), zeros("u32", 2), zeros("f16", 32, 64)),
)  # fmt: skip
# PTX 9.7.3 and 9.7.4: without a rounding in its name, a product may be fused with the sum that takes it
CONTRACTED = Kernel("numbers", "contracted", (1,), (64,), (near("f64", 64), near("f64", 64), zeros("f64", 64), zeros("f64", 64)))
LARGE = Kernel("gemm_async", "gemm_128x128", (4, 4), (256,),
               (near("f16", 512, 512), near("f16", 512, 512), zeros("f32", 512, 512), i32(512), i32(512)), 49152, size=" 512")  # fmt: skip


def _wgmma(entry: str, kind: str, size: int, how: str = "near", sums: str = "f32", other: str = "") -> Kernel:
    arguments = (
        random_operand(kind, how, 64, 256 // size),
        random_operand(other or kind, how, 32, 256 // size),
        zeros(sums, 64, 32),
        i32(256),
    )
    return Kernel("wgmma", entry, (1,), (128,), arguments, sm_80=False)


HOPPER = (
    _wgmma("wgmma_f16", "f16", 2),
    _wgmma("wgmma_bf16_negated", "bf16", 2, "rare"),
    _wgmma("wgmma_tf32", "f32", 4),
    _wgmma("wgmma_e4m3", "e4m3", 1, "wide"),
    _wgmma("wgmma_e5m2_e4m3", "e5m2", 1, other="e4m3"),
    _wgmma("wgmma_s8", "s8", 1, "raw", "s32"),
    _wgmma("wgmma_f16_registers", "f16", 2),
    _wgmma("wgmma_e4m3_registers", "e4m3", 1),
    Kernel("wgmma", "wgmma_transposed", (1,), (128,), (near("f16", 64, 16), near("f16", 16, 32), zeros("f32", 64, 32)), sm_80=False),
    Kernel("pipeline", "specialised", (2, 1), (256,),
           (near("f16", 3, 8, 8, 8, 8), near("f16", 2, 3, 4, 8, 8, 8), zeros("f32", 64, 64), i32(3)), 24576, sm_80=False),
    Kernel("pipeline", "bulk_round_trip", (2,), (64,), (random_operand("u32", "raw", 512), zeros("u32", 512)), sm_80=False),
    Kernel("tma", "tma_boxes", (3, 3), (64,), (TensorMap(1, "u32", (36, 20), (16, 8)), zeros("u32", 9, 8, 16)),
           behind=(random_operand("u32", "raw", 20, 36),), sm_80=False),
    Kernel("tma", "tma_gemm", (2, 1), (128,),
           (TensorMap(0, "f16", (192, 64), (64, 64), 128), TensorMap(1, "f16", (192, 64), (64, 32), 128),
            TensorMap(2, "f32", (64, 64), (32, 64)), i32(3)),
           24576, behind=(near("f16", 64, 192), near("f16", 64, 192), zeros("f32", 64, 64)), sm_80=False),
)  # fmt: skip
_QKV = (near("f16", 2, 64, 64), near("f16", 2, 64, 64), near("f16", 2, 64, 64))
_LONG = (near("f16", 1, 128, 64), near("f16", 1, 128, 64), near("f16", 1, 128, 64))
ROWS = (
    Kernel("softmax", "softmax_warp", (2,), (128,), (near("f32", 8, 100), zeros("f32", 8, 100), i32(100))),
    Kernel("softmax", "softmax_online", (2,), (128,), (near("f32", 2, 300), zeros("f32", 2, 300), i32(300))),
    Kernel("norms", "layer_norm", (3,), (128,),
           (near("f16", 3, 200), near("f32", 200), near("f32", 200), zeros("f16", 3, 200), i32(200), f32(1e-5))),
    Kernel("norms", "rms_norm", (2,), (128,), (near("f32", 8, 128), near("f32", 128), zeros("f32", 8, 128), f32(1e-6))),
    Kernel("attention", "attention", (1, 2), (128,), (*_QKV, zeros("f16", 2, 64, 64), zeros("f32", 2, 64), i32(64), f32(0.05))),
    Kernel("attention", "attention_causal", (2, 1), (128,), (*_LONG, zeros("f16", 1, 128, 64), zeros("f32", 1, 128), i32(128), f32(0.05))),
)  # fmt: skip
THREADS = (
    Kernel("reductions", "tree_sum", (2,), (256,), (near("f32", 1024), zeros("f32", 2))),
    Kernel("reductions", "largest", (2,), (128,), (random_operand("f32", "specials", 8, 77), zeros("f32", 8), zeros("s32", 8), i32(77))),
    Kernel("reductions", "redux", (2,), (64,), (random_operand("s32", "raw", 128), zeros("s32", 20))),
    Kernel("scans", "block_scan", (2,), (96,), (uniform("s32", -500, 500, 192), zeros("s32", 192))),
    Kernel("scans", "blelloch", (2,), (128,), (near("f32", 512), zeros("f32", 512))),
    Kernel("shuffles", "shuffles", (2,), (32,), (random_operand("s32", "raw", 64), zeros("s32", 64, 8), near("f64", 64), zeros("f64", 64))),
    Kernel("barriers", "handed_on", (2,), (64,), (random_operand("s32", "raw", 2, 5, 32), zeros("s32", 64), i32(5))),
    Kernel("barriers", "counted", (2,), (96,), (uniform("s32", -99, 99, 192), zeros("s32", 192))),
    Kernel("control", "collatz", (2,), (64,),
           (uniform("u32", 1, 3000, 128), zeros("s32", 128), zeros("u32", 128), i32(100), i32(60), u32(5000))),
    Kernel("control", "nested_breaks", (1,), (64,), (uniform("s32", 1, 300, 64), zeros("s32", 64), zeros("s32", 64), i32(12))),
    Kernel("control", "interpreter", (2,), (32,), (random_operand("u8", "raw", 64, 16), random_operand("u32", "raw", 64), zeros("u32",
        64), i32(60))),
    Kernel("control", "calls", (2,), (32,), (uniform("s32", -1000, 1000, 64, 7), zeros("s32", 64, 2), zeros("f32", 64), i32(7))),
)  # fmt: skip
SHARED = (
    Kernel("shared_memory", "transpose_padded", (3, 2), (32, 8), (near("f32", 45, 70), zeros("f32", 70, 45), i32(45), i32(70))),
    Kernel("shared_memory", "transpose_swizzled", (2, 2), (32, 8), (random_operand("u16", "raw", 64, 64), zeros("u16", 64, 64), i32(64))),
    Kernel("shared_memory", "transpose_in_registers", (2,), (64,), (random_operand("u32", "raw", 128), zeros("u32", 128))),
    Kernel("shared_memory", "bitonic", (2,), (128,), (random_operand("s32", "raw", 256), zeros("s32", 256)), 512),
    Kernel("shared_memory", "histogram", (3,), (64,), (random_operand("u8", "raw", 2000), zeros("u32", 256), i32(2000))),
    Kernel("shared_memory", "sgemm", (2, 2), (16, 16), (near("f32", 32, 48), near("f32", 48, 32), zeros("f32", 32, 32), i32(32), i32(48))),
    Kernel("shared_memory", "filter", (3,), (128,), (random_operand("f32", "specials", 300), zeros("f32", 300), zeros("s32", 3), i32(300))),
    Kernel("atomics", "atomics", (2,), (64,),
           (random_operand("s32", "raw", 128), random_operand("s32", "raw", 40), random_operand("u64", "raw", 12), zeros("f32", 4),
               zeros("f64", 4))),
    Kernel("atomics", "swap_loop", (2,), (64,), (near("f32", 128), zeros("u32", 2), uniform("u16", 7, 8, 2))),
    Kernel("atomics", "spin_lock", (2,), (32,), (zeros("s32", 1), zeros("s32", 1), zeros("s32", 1))),
    Kernel("atomics", "chained_scan", (4,), (32,), (uniform("s32", -99, 99, 128), zeros("s32", 128), zeros("s32", 4), zeros("s32", 4))),
    Kernel("atomics", "compacted", (2,), (64,),
           (uniform("s32", -40, 80, 128), zeros("s32", 128), zeros("s32", 2), zeros("u32", 512), i32(17)), compared={1: "sorted"}),
)  # fmt: skip
NUMBERS = (
    Kernel("numbers", "floats", (2,), (64,), (*[random_operand("f32", "specials", 128)] * 3, zeros("f32", 28, 128), i32(128))),
    Kernel("numbers", "doubles", (1,), (64,), (*[random_operand("f64", "specials", 64)] * 2, zeros("f64", 16, 64), i32(64))),
    Kernel("numbers", "halves", (1,), (64,), (*[random_operand("f16", "specials", 64, 2)] * 3, zeros("u32", 16, 64), i32(64))),
    Kernel("numbers", "bfloats", (1,), (64,), (*[random_operand("bf16", "specials", 64, 2)] * 3, zeros("u32", 13, 64), i32(64))),
    Kernel("numbers", "conversions", (1,), (64,), (random_operand("f32", "wide", 64), random_operand("s64", "raw", 64), zeros("s64", 29,
        64), i32(64))),
    Kernel("numbers", "integers", (1,), (64,), (random_operand("s64", "raw", 64), random_operand("s64", "raw", 64), zeros("s64", 56,
        64), i32(64))),
    Kernel("numbers", "hashes", (1,), (64,), (random_operand("u64", "raw", 64), zeros("u64", 64), zeros("u32", 6, 64), i32(6))),
    Kernel("numbers", "local_arrays", (1,), (64,),
           (random_operand("s32", "raw", 64, 12), zeros("s32", 64, 12), random_operand("u8", "raw", 64, 24), zeros("u32", 64))),
    Kernel("approximations", "approximations", (1,), (64,), (random_operand("f32", "limits", 64), zeros("f32", 10, 64), i32(64))),
    Kernel("approximations", "sines", (1,), (64,), (random_operand("f32", "wide", 64), zeros("f32", 3, 64), i32(64))),
    Kernel("approximations", "exponentials", (1,), (64,), (random_operand("f32", "specials", 64), zeros("f32", 4, 64), i32(64))),
)  # fmt: skip
HIDDEN = (u64(0), u64(0))  # Triton's last two parameters: scratch memory for the kernel and for its profile, which none of these use


def _descriptor_arguments(of: int, *sizes: int) -> tuple[TensorMap | np.generic, ...]:
    """Return the arguments that Triton passes for a tensor descriptor: the map, its shape and its strides, outermost first."""
    return (TensorMap(of, "f16", sizes[::-1], (64, 64), 128), *(i32(size) for size in sizes), np.int64(sizes[1]), np.int64(1))


# Dynamic shared memory is what Triton's metadata says for that target (`shared`); all take four warps, `num_warps`
TRITON = (
    Kernel("triton_matmul", "triton_matmul", (2, 2), (128,),
           (near("f16", 80, 64), near("f16", 64, 96), zeros("f16", 80, 96), i32(80), i32(96), i32(64), *HIDDEN), 16384),
    Kernel("triton_matmul_fp8", "triton_matmul_fp8", (1, 1), (128,),
           (near("e4m3", 64, 128), near("e4m3", 32, 128), near("f32", 64), zeros("bf16", 64, 32), i32(32), i32(128), *HIDDEN),
           12288, sm_80=False),
    Kernel("triton_matmul_tma", "triton_matmul_tma", (1, 1), (128,),
           (*_descriptor_arguments(0, 64, 128), *_descriptor_arguments(1, 128, 64), *_descriptor_arguments(2, 64, 64), i32(128),
               *HIDDEN), 32784,
           behind=(near("f16", 64, 128), near("f16", 128, 64), zeros("f16", 64, 64)), sm_80=False),
    Kernel("triton_softmax", "triton_softmax", (3,), (128,), (near("f32", 3, 200), zeros("f32", 3, 200), i32(200), *HIDDEN), 16),
    Kernel("triton_layer_norm", "triton_layer_norm", (3,), (128,),
           (near("f16", 3, 200), near("f32", 200), near("f32", 200), zeros("f16", 3, 200), i32(200), f32(1e-5), *HIDDEN), 512),
    Kernel("triton_attention", "triton_attention", (2, 1), (128,), (*_LONG, zeros("f16", 1, 128, 64), i32(128), f32(0.05), *HIDDEN), 24576),
)  # fmt: skip
LIBRARIES = (
    Kernel("cutlass_gemm", "cutlass_gemm", (2, 2), (128,),
           (near("f16", 80, 96), near("f16", 72, 96), near("f16", 80, 72), zeros("f16", 80, 72), i32(80), i32(72), i32(96),
            f32(0.75), f32(-1.25)), 24576),
    Kernel("cute_wgmma", "cute_wgmma", (2,), (256,),
           (near("bf16", 128, 320), near("bf16", 128, 320), zeros("f32", 128, 128), i32(128), i32(320)), 73728, sm_80=False),
)  # fmt: skip
MORE = (LARGE, CONTRACTED)  # with tests of their own
KERNELS = (*WMMA, *MMA, *EPILOGUES, *TILED, *HOPPER, *ROWS, *THREADS, *SHARED, *NUMBERS, *TRITON, *LIBRARIES)
