"""Programs whose kernels map elements: arithmetic, conversions, gathers, random numbers, control flow."""

import ml_dtypes
import numpy as np
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton_kernels.program_table import EPSILON, Result, as_tensor, bf16, floats, integers, program


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) + tl.load(y_ptr + offsets, mask=mask), mask=mask)


@program("A100")
def vector_add(rng):
    x, y, out = floats(rng, 300), floats(rng, 300), np.zeros(300, np.float32)
    add_kernel[lambda meta: (triton.cdiv(300, meta["BLOCK"]),)](as_tensor(x), as_tensor(y), as_tensor(out), 300, BLOCK=128)
    return [Result(out, x + y)]


@program("A100")
def vector_add_bf16(rng):
    """The sum of two bf16 is rounded once."""
    x, y, out = bf16(floats(rng, 128)), bf16(floats(rng, 128)), bf16(np.zeros(128))
    add_kernel[(1,)](as_tensor(x), as_tensor(y), as_tensor(out), 128, BLOCK=128)
    return [Result(out, bf16(x.astype(np.float64) + y.astype(np.float64)))]


@triton.jit
def fma_kernel(x_ptr, y_ptr, z_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.fma(tl.load(x_ptr + offsets), tl.load(y_ptr + offsets), tl.load(z_ptr + offsets)))


@program("A100")
def fused_multiply_add(rng):
    """The exact sum has fewer than 53 bits, so that float64 rounds it once, to f32."""
    x, y, z = (floats(rng, 64, dtype=np.float16).astype(np.float32) for _ in range(3))
    out = np.zeros(64, np.float32)
    fma_kernel[(1,)](as_tensor(x), as_tensor(y), as_tensor(z), as_tensor(out), BLOCK=64)
    return [Result(out, (x.astype(np.float64) * y + z).astype(np.float32))]


@triton.jit
def leaky_relu(x):
    return tl.where(x >= 0, x, 0.01 * x)


@triton.jit
def activation_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, leaky_relu(tl.load(x_ptr + offsets, mask=offsets < n)), mask=offsets < n)


@program("A100")
def leaky_relu_by_a_helper(rng):
    x, out = floats(rng, 100), np.zeros(100, np.float32)
    activation_kernel[(2,)](as_tensor(x), as_tensor(out), 100, BLOCK=64)
    return [Result(out, np.where(x >= 0, x, np.float32(0.01) * x))]


@triton.jit
def clamp_kernel(x_ptr, y_ptr, low_ptr, high_ptr, nan_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + offsets), tl.load(y_ptr + offsets)
    tl.store(low_ptr + offsets, tl.clamp(x, -0.5, 0.5))
    tl.store(high_ptr + offsets, tl.maximum(x, y))
    tl.store(nan_ptr + offsets, tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL))


@program("A100")
def clamp_minimum_and_maximum(rng):
    x, y = floats(rng, 64), floats(rng, 64)
    y[3] = np.nan
    low, high, nan = (np.zeros(64, np.float32) for _ in range(3))
    clamp_kernel[(1,)](*map(as_tensor, (x, y, low, high, nan)), BLOCK=64)
    smallest = np.minimum(x, y)
    return [
        Result(low, np.clip(x, np.float32(-0.5), np.float32(0.5))),
        Result(high, np.fmax(x, y)),
        Result(np.isnan(nan), np.isnan(smallest)),
        Result(np.delete(nan, 3), np.delete(smallest, 3)),
    ]


@triton.jit
def cast_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets).to(out_ptr.dtype.element_ty))


def cast(x, dtype):
    out = np.zeros(x.shape, dtype)
    cast_kernel[(1,)](as_tensor(x), as_tensor(out), BLOCK=x.size)
    return [Result(out, x.astype(dtype))]


@program("A100")
def cast_to_bf16(rng):
    return cast(floats(rng, 256), ml_dtypes.bfloat16)


@program("A100")
def cast_to_f16(rng):
    return cast(floats(rng, 256) * np.exp2(integers(rng, -20, 10, 256)).astype(np.float32), np.float16)


@program("H100")
def cast_to_e4m3(rng):
    return cast(np.clip(floats(rng, 256) * 50, -440, 440).astype(np.float32), ml_dtypes.float8_e4m3fn)


@program("H100")
def cast_from_e5m2(rng):
    return cast(floats(rng, 256).astype(ml_dtypes.float8_e5m2), np.float32)


@program("A100")
def cast_to_integers(rng):
    """Towards zero."""
    return cast(floats(rng, 256) * np.float32(1e4), np.int32)


@triton.jit
def row_quantize_kernel(x_ptr, codes_ptr, scales_ptr, COLUMNS: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + row * COLUMNS + columns)
    scale = tl.div_rn(tl.max(tl.abs(x), axis=0), 127.0)
    tl.store(codes_ptr + row * COLUMNS + columns, libdevice.rint(tl.div_rn(x, scale)).to(tl.int8))
    tl.store(scales_ptr + row, scale)


@program("A100")
def int8_quantisation_by_rows(rng):
    x, codes, scales = floats(rng, 4, 128), np.zeros((4, 128), np.int8), np.zeros(4, np.float32)
    row_quantize_kernel[(4,)](as_tensor(x), as_tensor(codes), as_tensor(scales), COLUMNS=128)
    expected = np.abs(x).max(1) / np.float32(127)
    return [Result(scales, expected), Result(codes, np.rint(x / expected[:, None]).astype(np.int8))]


@triton.jit
def integer_kernel(x_ptr, y_ptr, div_ptr, mod_ptr, bits_ptr, high_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + offsets), tl.load(y_ptr + offsets)
    tl.store(div_ptr + offsets, x // y)
    tl.store(mod_ptr + offsets, x % y)
    hashed = x ^ (x << 13)
    hashed = hashed ^ (hashed >> 17)
    tl.store(bits_ptr + offsets, (hashed & ~y) | 5)
    tl.store(high_ptr + offsets, tl.umulhi(x.to(tl.uint32), y.to(tl.uint32)))


@program("A100")
def integer_arithmetic(rng):
    """Division and remainder are those of C."""
    x, y = integers(rng, -(1 << 30), 1 << 30, 128), integers(rng, 1, 1 << 20, 128) * rng.choice([-1, 1], 128).astype(np.int32)
    div, mod, bits = (np.zeros(128, np.int32) for _ in range(3))
    high = np.zeros(128, np.uint32)
    integer_kernel[(1,)](*map(as_tensor, (x, y, div, mod, bits, high)), BLOCK=128)
    wide = x.astype(np.int64), y.astype(np.int64)
    quotient = np.sign(wide[0]) * np.sign(wide[1]) * (np.abs(wide[0]) // np.abs(wide[1]))
    hashed = (x.view(np.uint32) ^ (x.view(np.uint32) << 13)).view(np.int32)
    hashed = hashed ^ (hashed >> 17)
    product = x.view(np.uint32).astype(np.uint64) * y.view(np.uint32).astype(np.uint64)
    return [
        Result(div, quotient.astype(np.int32)), Result(mod, (wide[0] - quotient * wide[1]).astype(np.int32)),
        Result(bits, (hashed & ~y) | 5), Result(high, (product >> np.uint64(32)).astype(np.uint32)),
    ]  # fmt: skip


@triton.jit
def transpose_kernel(x_ptr, out_ptr, rows, columns, BLOCK: tl.constexpr):
    row, column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tile = tl.load(x_ptr + row[:, None] * columns + column[None, :], mask=(row < rows)[:, None] & (column < columns)[None, :])
    place = out_ptr + column[:, None] * rows + row[None, :]
    tl.store(place, tl.trans(tile), mask=(column < columns)[:, None] & (row < rows)[None, :])


@program("A100")
def transposition(rng):
    x, out = floats(rng, 24, 40), np.zeros((40, 24), np.float32)
    transpose_kernel[(2, 3)](as_tensor(x), as_tensor(out), 24, 40, BLOCK=16)
    return [Result(out, np.ascontiguousarray(x.T))]


@triton.jit
def embedding_kernel(table_ptr, index_ptr, out_ptr, COLUMNS: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, COLUMNS)
    index = tl.load(index_ptr + row)
    tl.store(out_ptr + row * COLUMNS + columns, tl.load(table_ptr + index * COLUMNS + columns))


@program("A100")
def embedding(rng):
    table, index, out = floats(rng, 50, 64), integers(rng, 0, 50, 9, dtype=np.int64), np.zeros((9, 64), np.float32)
    embedding_kernel[(9,)](as_tensor(table), as_tensor(index), as_tensor(out), COLUMNS=64)
    return [Result(out, table[index])]


@triton.jit
def gather_kernel(x_ptr, index_ptr, out_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    place = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out_ptr + place, tl.gather(tl.load(x_ptr + place), tl.load(index_ptr + place), axis=0))


@program("A100")
def gather_along_an_axis(rng):
    x, index, out = floats(rng, 16, 32), integers(rng, 0, 16, 16, 32), np.zeros((16, 32), np.float32)
    gather_kernel[(1,)](as_tensor(x), as_tensor(index), as_tensor(out), ROWS=16, COLUMNS=32)
    return [Result(out, np.take_along_axis(x, index, axis=0))]


@triton.jit
def scatter_kernel(x_ptr, index_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + tl.load(index_ptr + offsets), tl.load(x_ptr + offsets))


@program("A100")
def scatter_by_a_permutation(rng):
    x, index, out = floats(rng, 128), rng.permutation(128).astype(np.int32), np.zeros(128, np.float32)
    scatter_kernel[(2,)](as_tensor(x), as_tensor(index), as_tensor(out), BLOCK=64)
    expected = np.empty_like(x)
    expected[index] = x
    return [Result(out, expected)]


@triton.jit
def rotary_kernel(x_ptr, cos_ptr, sin_ptr, out_ptr, HALF: tl.constexpr):
    row, places = tl.program_id(0), tl.arange(0, HALF)
    left, right = tl.load(x_ptr + row * 2 * HALF + places), tl.load(x_ptr + row * 2 * HALF + HALF + places)
    cos, sin = tl.load(cos_ptr + row * HALF + places), tl.load(sin_ptr + row * HALF + places)
    tl.store(out_ptr + row * 2 * HALF + places, left * cos - right * sin)
    tl.store(out_ptr + row * 2 * HALF + HALF + places, right * cos + left * sin)


def rotary(rng, **options):
    x, out = floats(rng, 5, 64), np.zeros((5, 64), np.float32)
    angles = np.arange(5)[:, None] / 10000.0 ** (np.arange(32) / 32)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    rotary_kernel[(5,)](*map(as_tensor, (x, cos, sin, out)), HALF=32, **options)
    return x[:, :32], x[:, 32:], cos, sin, out


@program("A100")
def rotary_embedding(rng):
    """Three roundings, or two where the compiler fuses, each of half a unit of at most the sum of both magnitudes."""
    left, right, cos, sin, out = rotary(rng)
    wide = [each.astype(np.float64) for each in (left, right, cos, sin)]
    expected = np.concatenate([wide[0] * wide[2] - wide[1] * wide[3], wide[1] * wide[2] + wide[0] * wide[3]], axis=1)
    size = np.concatenate([abs(wide[0] * wide[2]) + abs(wide[1] * wide[3]), abs(wide[1] * wide[2]) + abs(wide[0] * wide[3])], axis=1)
    return [Result(out, expected, EPSILON * size)]


@program("A100")
def rotary_embedding_without_fusion(rng):
    left, right, cos, sin, out = rotary(rng, enable_fp_fusion=False)
    return [Result(out, np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=1))]


def philox(counter: np.ndarray, seed: int) -> np.ndarray:
    """The first word of Philox 4x32-10 of Salmon et al. 2011, for counters (counter, 0, 0, 0)."""
    mask, words = 0xFFFFFFFF, [counter.astype(object), *(np.zeros(counter.shape, object) for _ in range(3))]
    keys = [seed & mask, seed >> 32]
    for _ in range(10):
        left, right = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [(right >> 32) ^ words[1] ^ keys[0], right & mask, (left >> 32) ^ words[3] ^ keys[1], left & mask]
        keys = [(keys[0] + 0x9E3779B9) & mask, (keys[1] + 0xBB67AE85) & mask]
    return words[0].astype(np.uint32)


@triton.jit
def dropout_kernel(x_ptr, out_ptr, words_ptr, n, p, seed, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    kept = tl.rand(seed, offsets) > p
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, tl.where(kept, x * 2, 0.0), mask=mask)
    tl.store(words_ptr + offsets, tl.randint(seed, offsets), mask=mask)


@program("A100")
def seeded_dropout(rng):
    x, out, words = floats(rng, 100), np.zeros(100, np.float32), np.zeros(100, np.int32)
    dropout_kernel[(2,)](as_tensor(x), as_tensor(out), as_tensor(words), 100, 0.5, 12345, BLOCK=64)
    expected = philox(np.arange(100), 12345)
    signed = expected.view(np.int32).astype(np.int64)
    uniform = np.where(signed < 0, -signed - 1, signed) * 4.6566127342e-10
    return [Result(words, expected.view(np.int32)), Result(out, np.where(uniform > 0.5, 2 * x, np.float32(0)).astype(np.float32))]


@triton.jit
def interleave_kernel(x_ptr, y_ptr, joined_ptr, even_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    joined = tl.interleave(tl.load(x_ptr + offsets), tl.load(y_ptr + offsets))
    tl.store(joined_ptr + tl.arange(0, 2 * BLOCK), joined)
    even, odd = tl.split(tl.reshape(joined, (BLOCK, 2)))
    tl.store(even_ptr + offsets, even - odd)


@program("A100")
def interleave_and_split(rng):
    x, y = floats(rng, 64), floats(rng, 64)
    joined, even = np.zeros(128, np.float32), np.zeros(64, np.float32)
    interleave_kernel[(1,)](*map(as_tensor, (x, y, joined, even)), BLOCK=64)
    return [Result(joined, np.stack([x, y], axis=1).ravel()), Result(even, x - y)]


@triton.jit
def permute_kernel(x_ptr, out_ptr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, A * B * C))
    tl.store(out_ptr + tl.arange(0, A * B * C), tl.reshape(tl.permute(tl.reshape(x, (A, B, C)), (2, 0, 1)), (A * B * C,)))


@program("A100")
def reshape_and_permute(rng):
    x, out = floats(rng, 4, 8, 16), np.zeros((16, 4, 8), np.float32)
    permute_kernel[(1,)](as_tensor(x), as_tensor(out), A=4, B=8, C=16)
    return [Result(out, np.ascontiguousarray(x.transpose(2, 0, 1)))]


@triton.jit
def collatz_kernel(out_ptr):
    """A loop whose length is data."""
    start = tl.program_id(0) + 1
    n, steps = start, 0
    while n > 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
    tl.store(out_ptr + start - 1, steps)


@program("A100")
def loops_over_data(rng):
    out = np.zeros(12, np.int32)
    collatz_kernel[(12,)](as_tensor(out))
    return [Result(out, np.array([0, 1, 7, 2, 5, 8, 16, 3, 19, 6, 14, 9], np.int32))]


@triton.jit
def search_kernel(table_ptr, x_ptr, out_ptr, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x, low = tl.load(x_ptr + offsets), tl.zeros((BLOCK,), tl.int32)
    for step in tl.static_range(STEPS):
        low = tl.where(tl.load(table_ptr + low + (1 << (STEPS - 1 - step)) - 1) < x, low + (1 << (STEPS - 1 - step)), low)
    tl.store(out_ptr + offsets, low)


@program("A100")
def binary_search(rng):
    table, x, out = np.sort(floats(rng, 63)), floats(rng, 64), np.zeros(64, np.int32)
    search_kernel[(1,)](as_tensor(table), as_tensor(x), as_tensor(out), STEPS=6, BLOCK=64)
    return [Result(out, np.searchsorted(table, x).astype(np.int32))]


@triton.jit
def adam_kernel(w_ptr, g_ptr, m_ptr, v_ptr, rate, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    w, g = tl.load(w_ptr + offsets, mask=mask), tl.load(g_ptr + offsets, mask=mask)
    m = 0.875 * tl.load(m_ptr + offsets, mask=mask) + 0.125 * g
    v = 0.9375 * tl.load(v_ptr + offsets, mask=mask) + 0.0625 * (g * g)
    tl.store(m_ptr + offsets, m, mask=mask)
    tl.store(v_ptr + offsets, v, mask=mask)
    tl.store(w_ptr + offsets, w - tl.div_rn(rate * m, tl.sqrt_rn(v) + 1e-8), mask=mask)


@program("A100")
def adam_without_fusion(rng):
    w, g, m = (floats(rng, 100) for _ in range(3))
    v = np.abs(floats(rng, 100))
    one = np.float32(1)
    first, second = one * 0.875 * m + np.float32(0.125) * g, np.float32(0.9375) * v + np.float32(0.0625) * (g * g)
    expected = w - (np.float32(0.1) * first) / (np.sqrt(second) + np.float32(1e-8))
    adam_kernel[(2,)](*map(as_tensor, (w, g, m, v)), 0.1, 100, BLOCK=64, enable_fp_fusion=False)
    return [Result(m, first), Result(v, second), Result(w, expected)]


@triton.jit
def gelu_kernel(x_ptr, erf_ptr, tanh_ptr, gated_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    tl.store(erf_ptr + offsets, 0.5 * x * (1 + tl.erf(x * 0.7071067811865476)))
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    tl.store(tanh_ptr + offsets, x * tl.sigmoid(2 * inner))
    tl.store(gated_ptr + offsets, x * tl.sigmoid(x))


@program("A100")
def gelu_and_silu(rng):
    """erf and exp of the GPU err by a few units of 2^-23; 1 + erf cancels for negative x, so that the error counts against |x|."""
    from math import erf

    x = floats(rng, 64)
    results = [np.zeros(64, np.float32) for _ in range(3)]
    gelu_kernel[(1,)](*map(as_tensor, (x, *results)), BLOCK=64)
    wide = x.astype(np.float64)
    inner = np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
    expected = (
        0.5 * wide * (1 + np.vectorize(erf)(wide * np.sqrt(0.5))), wide / (1 + np.exp(-2 * inner)), wide / (1 + np.exp(-wide)),
    )  # fmt: skip
    return [Result(each, value, 16 * EPSILON * (abs(wide) + wide**2)) for each, value in zip(results, expected, strict=True)]


@triton.jit
def double_kernel(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + offsets), tl.load(y_ptr + offsets)
    tl.store(out_ptr + offsets, tl.sqrt(x * x + y * y) / (y + 4.0))


@program("A100")
def doubles_without_fusion(rng):
    x, y, out = floats(rng, 64, dtype=np.float64), floats(rng, 64, dtype=np.float64), np.zeros(64)
    double_kernel[(1,)](as_tensor(x), as_tensor(y), as_tensor(out), BLOCK=64, enable_fp_fusion=False)
    return [Result(out, np.sqrt(x * x + y * y) / (y + 4.0))]
