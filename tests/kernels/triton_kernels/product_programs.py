"""Programs whose kernels multiply matrices: tile shapes, warps, stages, formats, split-K, descriptors, persistent kernels, scaled operands.

Operands are small integers, so that every order of the sums gives the same bits; the order of one kernel is tested with
`test_triton_interpretation.py` and with the recorded kernels of `tests/ptx_kernels`.
"""

import ml_dtypes
import numpy as np
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor
from triton_kernels.program_table import EPSILON, Result, as_tensor, floats, integers, program


@triton.jit
def product_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr,
    LEAKY: tl.constexpr, PRECISION: tl.constexpr, TOTAL: tl.constexpr,
):  # fmt: skip
    """Tiles in groups of rows, so that neighbours share operands; K in parts that add atomically; an epilogue."""
    pid, part = tl.program_id(0), tl.program_id(1)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = pid // (GROUP_M * tiles_n) * GROUP_M
    rows_of_group = min(tiles_m - first, GROUP_M)
    tile_m = first + pid % (GROUP_M * tiles_n) % rows_of_group
    tile_n = pid % (GROUP_M * tiles_n) // rows_of_group
    rows, columns = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    steps = part * BLOCK_K + tl.arange(0, BLOCK_K)
    a = a_ptr + (rows % M)[:, None] * stride_am + steps[None, :] * stride_ak
    b = b_ptr + steps[:, None] * stride_bk + (columns % N)[None, :] * stride_bn
    total = tl.zeros((BLOCK_M, BLOCK_N), TOTAL)
    for k in range(0, tl.cdiv(K, BLOCK_K * SPLIT_K)):
        left = K - k * BLOCK_K * SPLIT_K
        total = tl.dot(
            tl.load(a, mask=steps[None, :] < left, other=0.0), tl.load(b, mask=steps[:, None] < left, other=0.0), total,
            input_precision=PRECISION, out_dtype=TOTAL,
        )  # fmt: skip
        a += BLOCK_K * SPLIT_K * stride_ak
        b += BLOCK_K * SPLIT_K * stride_bk
    if LEAKY:
        total = tl.where(total >= 0, total, 0.5 * total)
    place = c_ptr + rows[:, None] * stride_cm + columns[None, :] * stride_cn
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    if SPLIT_K > 1:
        tl.atomic_add(place, total.to(c_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(place, total.to(c_ptr.dtype.element_ty), mask=mask)


def run_product(
    rng, dtype, shape, block, *, out=np.float32, total=tl.float32, split_k=1, leaky=False, precision="tf32", transposed=False, **options
):
    """Launch the kernel for C [M, N] = A [M, K]·B [K, N] and return the result with its reference."""
    (m, n, k), (block_m, block_n, block_k) = shape, block
    a, b = integers(rng, -4, 5, m, k, dtype=np.float32).astype(dtype), integers(rng, -4, 5, k, n, dtype=np.float32).astype(dtype)
    c = np.zeros((m, n), out)
    held = np.ascontiguousarray(b.T) if transposed else b
    strides = (1, k) if transposed else (n, 1)
    product_kernel[lambda meta: (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]), split_k)](
        as_tensor(a), as_tensor(held), as_tensor(c), m, n, k, k, 1, *strides, n, 1, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        GROUP_M=2, SPLIT_K=split_k, LEAKY=leaky, PRECISION=precision, TOTAL=total, **options,
    )  # fmt: skip
    expected = a.astype(np.float64) @ b.astype(np.float64)
    if leaky:
        expected = np.where(expected >= 0, expected, expected / 2)
    return [Result(c, expected.astype(out))]


@program("A100")
def tutorial_product_with_an_epilogue(rng):
    """Sizes that no tile divides."""
    return run_product(rng, np.float16, (72, 40, 72), (32, 32, 32), out=np.float16, leaky=True, num_warps=4, num_stages=4)


@program("H100")
def product_by_wgmma_in_eight_warps(rng):
    return run_product(rng, ml_dtypes.bfloat16, (128, 64, 64), (128, 64, 32), num_warps=8, num_stages=3)


@program("H100")
def product_of_a_transposed_operand(rng):
    return run_product(rng, np.float16, (64, 32, 64), (64, 32, 64), transposed=True, num_warps=4, num_stages=1)


@program("A100")
def product_in_one_warp_and_one_stage(rng):
    return run_product(rng, np.float16, (16, 16, 32), (16, 16, 16), num_warps=1, num_stages=1)


@program("A100")
def product_in_two_warps_and_two_stages(rng):
    return run_product(rng, ml_dtypes.bfloat16, (32, 32, 64), (32, 32, 32), num_warps=2, num_stages=2)


@program("A100")
def product_of_tf32(rng):
    return run_product(rng, np.float32, (32, 32, 32), (32, 32, 16), num_warps=4, num_stages=3)


@program("A100", ways=("emulated",))
def product_of_f32_without_tensor_cores(rng):
    return run_product(rng, np.float32, (16, 16, 16), (16, 16, 16), precision="ieee", num_warps=1)


@program("A100")
def product_of_int8(rng):
    return run_product(rng, np.int8, (32, 32, 64), (32, 32, 32), out=np.int32, total=tl.int32, num_warps=4, num_stages=2)


@program("L4")
def product_of_e4m3_by_mma(rng):
    return run_product(rng, ml_dtypes.float8_e4m3fn, (32, 32, 64), (32, 32, 32), num_warps=2, num_stages=3)


@program("H100")
def product_of_e5m2_by_wgmma(rng):
    return run_product(rng, ml_dtypes.float8_e5m2, (64, 32, 64), (64, 32, 64), transposed=True, num_warps=4)


@program("A100")
def product_with_sums_in_f16(rng):
    return run_product(rng, np.float16, (16, 16, 32), (16, 16, 32), out=np.float16, total=tl.float16, num_warps=1)


@program("A100")
def product_split_along_k(rng):
    """Four programs add to each element atomically; integers make every order exact."""
    return run_product(rng, np.float16, (32, 32, 128), (32, 32, 32), split_k=4, num_warps=2, num_stages=2)


@triton.jit
def batched_kernel(a_ptr, b_ptr, c_ptr, B: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    batch, rows, columns, steps = tl.arange(0, B)[:, None, None], tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + batch * M * K + rows[None, :, None] * K + steps[None, None, :])
    b = tl.load(b_ptr + batch * K * N + steps[None, :, None] * N + columns[None, None, :])
    tl.store(c_ptr + batch * M * N + rows[None, :, None] * N + columns[None, None, :], tl.dot(a, b))


@program("A100")
def batched_products(rng):
    a, b = integers(rng, -4, 5, 4, 16, 32, dtype=np.float16), integers(rng, -4, 5, 4, 32, 16, dtype=np.float16)
    c = np.zeros((4, 16, 16), np.float32)
    batched_kernel[(1,)](*map(as_tensor, (a, b, c)), B=4, M=16, N=16, K=32, num_warps=4)
    return [Result(c, a.astype(np.float32) @ b.astype(np.float32))]


@triton.jit
def persistent_kernel(
    a, b, c, M, N, K, PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    FLATTEN: tl.constexpr, SPECIALISE: tl.constexpr,
):  # fmt: skip
    """Each program takes tile after tile, through tensor descriptors."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * tiles_n, PROGRAMS, flatten=FLATTEN, warp_specialize=SPECIALISE):
        row, column = tile // tiles_n * BLOCK_M, tile % tiles_n * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(0, K, BLOCK_K):
            total = tl.dot(a.load([row, step]), b.load([column, step]).T, total)
        c.store([row, column], total.to(c.dtype))


def run_persistent(rng, shape, block, programs, dtype=np.float16, specialise=False, **options):
    (m, n, k), (block_m, block_n, block_k) = shape, block
    a, b = integers(rng, -4, 5, m, k, dtype=np.float32).astype(dtype), integers(rng, -4, 5, n, k, dtype=np.float32).astype(dtype)
    c = np.zeros((m, n), np.float16)
    arrays = ((a, [block_m, block_k]), (b, [block_n, block_k]), (c, [block_m, block_n]))
    descriptors = [TensorDescriptor(as_tensor(x), list(x.shape), [x.shape[1], 1], tile) for x, tile in arrays]
    persistent_kernel[(programs,)](
        *descriptors, m, n, k, PROGRAMS=programs, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, FLATTEN=not specialise,
        SPECIALISE=specialise, **options,
    )  # fmt: skip
    return [Result(c, (a.astype(np.float32) @ b.astype(np.float32).T).astype(np.float16))]


@program("H100")
def persistent_product_by_tensor_maps(rng):
    return run_persistent(rng, (128, 64, 64), (64, 32, 64), 2, num_warps=4, num_stages=2)


@program("A100")
def persistent_product_by_descriptors_without_tensor_maps(rng):
    return run_persistent(rng, (64, 64, 32), (32, 32, 32), 3, num_warps=2, num_stages=2)


@program("B200", ways=("emulated",))
def persistent_product_with_specialised_warps(rng):
    """Warps that load, warps that multiply by tcgen05 and warps that store."""
    return run_persistent(rng, (128, 128, 128), (128, 64, 64), 1, specialise=True, num_warps=4, num_stages=2)


@program("B200", ways=("emulated",))
def product_by_tcgen05(rng):
    return run_product(rng, np.float16, (128, 64, 64), (128, 64, 64), num_warps=4, num_stages=2)


@triton.jit
def scaled_kernel(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    PACKED: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    rows, columns, steps, groups = tl.arange(0, M)[:, None], tl.arange(0, N), tl.arange(0, K // PACKED), tl.arange(0, K // GROUP)[None, :]
    a = tl.load(a_ptr + rows * (K // PACKED) + steps[None, :])
    b = tl.load(b_ptr + columns[None, :] * (K // PACKED) + steps[:, None])
    a_scale = tl.load(a_scale_ptr + rows * (K // GROUP) + groups)
    b_scale = tl.load(b_scale_ptr + columns[:, None] * (K // GROUP) + groups)
    total = tl.dot_scaled(a, a_scale, FORMAT, b, b_scale, FORMAT)
    tl.store(c_ptr + rows * N + columns[None, :], total)


def run_scaled(rng, form, shape, group, scales, **options):
    """Codes of e2m1, two in a byte, or of e4m3; scales of powers of two or, for nvfp4, of e4m3 numbers that are powers of two."""
    m, n, k = shape
    packed = 2 if form == "e2m1" else 1
    if packed == 2:
        codes = [rng.integers(0, 16, size=(rows, k)).astype(np.uint8) for rows in (m, n)]
        values = [each.view(np.uint8).astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64) for each in codes]
        held = [each[:, ::2] | each[:, 1::2] << 4 for each in codes]
    else:
        held = [integers(rng, -4, 5, rows, k, dtype=np.float32).astype(ml_dtypes.float8_e4m3fn) for rows in (m, n)]
        values = [each.astype(np.float64) for each in held]
    exponents = [rng.integers(-2, 3, size=(rows, k // group)) for rows in (m, n)]
    codes = [(each + 127).astype(np.uint8) if scales == "ue8m0" else np.exp2(each).astype(ml_dtypes.float8_e4m3fn) for each in exponents]
    c = np.zeros((m, n), np.float32)
    scaled_kernel[(1,)](
        *map(as_tensor, (held[0], codes[0], held[1], codes[1], c)), M=m, N=n, K=k, GROUP=group, PACKED=packed, FORMAT=form, **options
    )
    left, right = (value * np.exp2(each).repeat(group, axis=1) for value, each in zip(values, exponents, strict=True))
    return [Result(c, (left @ right.T).astype(np.float32))]


@program("B200", ways=("emulated",))
def scaled_product_of_mxfp8_by_tcgen05(rng):
    return run_scaled(rng, "e4m3", (128, 64, 128), 32, "ue8m0", num_warps=4)


@program("B200", ways=("emulated",))
def scaled_product_of_mxfp4_by_tcgen05(rng):
    return run_scaled(rng, "e2m1", (128, 64, 128), 32, "ue8m0", num_warps=4)


@program("B200", ways=("emulated",))
def scaled_product_of_nvfp4_by_tcgen05(rng):
    return run_scaled(rng, "e2m1", (128, 64, 128), 16, "e4m3", num_warps=4)


@program("H100")
def scaled_product_of_mxfp8_by_bf16(rng):
    """Before sm_100 Triton converts the operands to bf16; their integers stay exact."""
    return run_scaled(rng, "e4m3", (64, 32, 64), 32, "ue8m0", num_warps=4)


@triton.jit
def convolution_kernel(
    x_ptr, w_ptr, y_ptr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr
):
    """A 3 x 3 convolution as nine products, with zeros around the image."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, column, channels, outs = place // WIDTH, place % WIDTH, tl.arange(0, C), tl.arange(0, OUT)
    total = tl.zeros((BLOCK, OUT), tl.float32)
    for tap in tl.static_range(9):
        y, x = row + tap // 3 - 1, column + tap % 3 - 1
        inside = (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH)
        a = tl.load(x_ptr + (y * WIDTH + x)[:, None] * C + channels[None, :], mask=inside[:, None], other=0.0)
        w = tl.load(w_ptr + tap * C * OUT + channels[:, None] * OUT + outs[None, :])
        total = tl.dot(a, w, total)
    tl.store(y_ptr + place[:, None] * OUT + outs[None, :], total)


@program("A100")
def convolution_by_products(rng):
    x, w = integers(rng, -4, 5, 8, 8, 16, dtype=np.float16), integers(rng, -4, 5, 3, 3, 16, 16, dtype=np.float16)
    y = np.zeros((8, 8, 16), np.float32)
    convolution_kernel[(2,)](*map(as_tensor, (x, w, y)), HEIGHT=8, WIDTH=8, C=16, OUT=16, BLOCK=32, num_warps=2)
    padded = np.pad(x.astype(np.float32), ((1, 1), (1, 1), (0, 0)))
    expected = sum(padded[i : i + 8, j : j + 8] @ w[i, j].astype(np.float32) for i in range(3) for j in range(3))
    return [Result(y, expected)]


@triton.jit
def weight_only_kernel(x_ptr, w_ptr, scale_ptr, y_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """f16 activations and int4 weights, two in a byte along N, with a scale for each column."""
    rows, steps, half = tl.arange(0, M)[:, None], tl.arange(0, K), tl.arange(0, N // 2)
    packed = tl.load(w_ptr + steps[:, None] * (N // 2) + half[None, :])
    w = tl.interleave((packed & 15).to(tl.int8) - 8, (packed >> 4).to(tl.int8) - 8).to(tl.float16)
    columns = tl.arange(0, N)[None, :]
    total = tl.dot(tl.load(x_ptr + rows * K + steps[None, :]), w) * tl.load(scale_ptr + columns)
    tl.store(y_ptr + rows * N + columns, total)


@program("A100")
def product_of_int4_weights(rng):
    """One rounding, that of the product by the scale."""
    x, codes, scale = integers(rng, -4, 5, 16, 32, dtype=np.float16), integers(rng, 0, 16, 32, 32, dtype=np.uint8), floats(rng, 1, 32)
    y = np.zeros((16, 32), np.float32)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    weight_only_kernel[(1,)](*map(as_tensor, (x, packed, scale, y)), M=16, N=32, K=32, num_warps=2)
    return [Result(y, (x.astype(np.float32) @ (codes.astype(np.float32) - 8)) * scale)]


@triton.jit
def swiglu_kernel(x_ptr, gate_ptr, up_ptr, y_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, columns, steps = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    x = tl.load(x_ptr + rows * K + steps[None, :])
    gate = tl.dot(x, tl.load(gate_ptr + steps[:, None] * N + columns))
    up = tl.dot(x, tl.load(up_ptr + steps[:, None] * N + columns))
    tl.store(y_ptr + rows * N + columns, gate * tl.sigmoid(gate) * up)


@program("A100")
def fused_swiglu(rng):
    """The products are exact. exp errs by 2 units after an argument rounded twice, the quotient by 2, three products by half a one."""
    x = integers(rng, -2, 3, 16, 32, dtype=np.float16)
    gate, up = (integers(rng, -2, 3, 32, 16, dtype=np.float16) / np.float16(8) for _ in range(2))
    y = np.zeros((16, 16), np.float32)
    swiglu_kernel[(1,)](*map(as_tensor, (x, gate, up, y)), M=16, N=16, K=32, num_warps=1)
    left, right = (x.astype(np.float64) @ each.astype(np.float64) for each in (gate, up))
    expected = left / (1 + np.exp(-left)) * right
    return [Result(y, expected, EPSILON * abs(expected) * (8 + 2 * abs(left)))]
