"""Triton functions as people write them, for the tests of `tcemu.triton`."""

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) + tl.load(y_ptr + offsets, mask=mask), mask=mask)


@triton.jit
def scale_kernel(x_ptr, scale, shift, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(x_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) * scale + shift, mask=mask)


@triton.jit
def shift_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """y = x + 1, where x and y may be parts of one array."""
    offsets = tl.arange(0, BLOCK)
    value = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.debug_barrier()
    tl.store(y_ptr + offsets, value + 1, mask=offsets < n)


@triton.jit
def row_of(pid, columns):
    return pid * columns


@triton.jit
def place_kernel(out_ptr, columns, rows):
    """Each program of a three-dimensional grid writes its number, by a helper."""
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tl.store(out_ptr + row_of(z * rows + y, columns) + x, x + 10 * y + 100 * z)


@triton.autotune(
    configs=[
        triton.Config({"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32}, num_warps=4, num_stages=2),
        triton.Config({"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 32}, num_warps=2, num_stages=1),
    ],
    key=["k"],
)
@triton.heuristics({"EVEN_K": lambda args: args["k"] % args["BLOCK_K"] == 0})
@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, k, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    steps = tl.arange(0, BLOCK_K)
    a = a_ptr + rows[:, None] * stride_am + steps[None, :] * stride_ak
    b = b_ptr + steps[:, None] * stride_bk + columns[None, :] * stride_bn
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, k, BLOCK_K):
        if EVEN_K:
            left, right = tl.load(a), tl.load(b)
        else:
            left = tl.load(a, mask=(start + steps)[None, :] < k, other=0.0)
            right = tl.load(b, mask=(start + steps)[:, None] < k, other=0.0)
        total = tl.dot(left, right, total)
        a += BLOCK_K * stride_ak
        b += BLOCK_K * stride_bk
    tl.store(c_ptr + rows[:, None] * stride_cm + columns[None, :] * stride_cn, total)


@triton.jit
def descriptor_kernel(source, target, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Copies a tile by tensor descriptors that the host made, and doubles it."""
    row, column = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS
    target.store([row, column], source.load([row, column]) * 2)


@triton.jit
def outside_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK) * 1000, 1.0)


@triton.jit
def accumulated_dot_kernel(a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, columns, steps = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    a, b = tl.load(a_ptr + rows * K + steps[None, :]), tl.load(b_ptr + steps[:, None] * N + columns)
    place = c_ptr + rows * N + columns
    tl.store(place, tl.dot(a, b, tl.load(place)))


@triton.jit
def precise_dot_kernel(a_ptr, b_ptr, c_ptr, PRECISION: tl.constexpr):
    place = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(c_ptr + place, tl.dot(tl.load(a_ptr + place), tl.load(b_ptr + place), input_precision=PRECISION))


@triton.jit
def cluster_kernel(a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """A product of one program, whose blocks form a cluster for `num_ctas` above 1."""
    rows, columns, steps = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + rows[:, None] * K + steps[None, :])
    b = tl.load(b_ptr + steps[:, None] * N + columns[None, :])
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], tl.dot(a, b))


@triton.jit
def tanh_kernel(x_ptr, y_ptr, z_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    y = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(y_ptr + offsets, y)
    tl.store(z_ptr + offsets, tl.exp(x))


@triton.jit
def wide_product_kernel(a_ptr, b_ptr, c_ptr, K, M: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr):
    """A product of f32 matrices by several products of narrower parts."""
    rows, columns, steps = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK_K)
    total = tl.zeros((M, N), tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(a_ptr + rows[:, None] * K + (k + steps)[None, :])
        b = tl.load(b_ptr + (k + steps)[:, None] * N + columns[None, :])
        total = tl.dot(a, b, total, input_precision=PRECISION)
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], total)


@triton.jit
def cast_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets).to(out_ptr.dtype.element_ty))


@triton.jit
def bf16_arithmetic_kernel(x_ptr, y_ptr, z_ptr, out_ptr, BLOCK: tl.constexpr):
    """x + y, x·y and the fused x·y + z."""
    offsets = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + offsets), tl.load(y_ptr + offsets)
    tl.store(out_ptr + offsets, x + y)
    tl.store(out_ptr + BLOCK + offsets, x * y)
    tl.store(out_ptr + 2 * BLOCK + offsets, tl.fma(x, y, tl.load(z_ptr + offsets)))


@triton.jit
def bf16_atomic_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """The sum of a block, element by element."""
    offsets = tl.arange(0, BLOCK)
    tl.atomic_add(out_ptr + offsets * 0, tl.load(x_ptr + offsets))


@triton.jit
def library_kernel(x_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(x_ptr + offsets, libdevice.exp(tl.load(x_ptr + offsets)))


@triton.jit
def extrema_kernel(x_ptr, out_ptr, limit):
    """Python's min on numbers of the kernel."""
    place = tl.program_id(0)
    tl.store(out_ptr + place, min(tl.load(x_ptr + place), limit))
