"""The kernels of Triton's tutorials (3.6 to 3.9), written here from their descriptions.

Vector addition and dropout are in `elementwise_programs.py`, the product with an epilogue, the persistent and the block-scaled products in
`product_programs.py`.
"""

import numpy as np
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton_kernels.program_table import EPSILON, Result, as_tensor, floats, integers, program

# ---- 02: softmax, rows dealt to programs


@triton.jit
def softmax_kernel(x_ptr, out_ptr, rows, columns, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    places = tl.arange(0, BLOCK)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        x = tl.load(x_ptr + row * columns + places, mask=places < columns, other=-float("inf"))
        weights = tl.exp(x - tl.max(x, axis=0))
        tl.store(out_ptr + row * columns + places, weights / tl.sum(weights, axis=0), mask=places < columns)


@program("A100")
def tutorial_softmax(rng):
    """The argument of 2^x is rounded twice, exp and the quotient err by 2 units each, and a sum of 100 positive numbers in a tree by 7."""
    x, out = floats(rng, 5, 100), np.zeros((5, 100), np.float32)
    softmax_kernel[(2,)](as_tensor(x), as_tensor(out), 5, 100, BLOCK=128, STAGES=2, num_warps=4)
    wide = x.astype(np.float64) - x.max(1, keepdims=True)
    expected = np.exp(wide) / np.exp(wide).sum(1, keepdims=True)
    return [Result(out, expected, expected * EPSILON * (16 + 2 * abs(wide)))]


# ---- 05: layer norm, with a backward pass in two stages and locks


@triton.jit
def norm_kernel(x_ptr, y_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, n, epsilon, BLOCK: tl.constexpr):
    row, places = tl.program_id(0), tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        total += tl.load(x_ptr + row * n + start + places, mask=start + places < n, other=0.0)
    mean = tl.sum(total, axis=0) / n
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        x = tl.load(x_ptr + row * n + start + places, mask=start + places < n, other=0.0)
        x = tl.where(start + places < n, x - mean, 0.0)
        squares += x * x
    rstd = 1 / tl.sqrt(tl.sum(squares, axis=0) / n + epsilon)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, n, BLOCK):
        mask = start + places < n
        x = tl.load(x_ptr + row * n + start + places, mask=mask)
        w, b = tl.load(w_ptr + start + places, mask=mask), tl.load(b_ptr + start + places, mask=mask)
        tl.store(y_ptr + row * n + start + places, (x - mean) * rstd * w + b, mask=mask)


@triton.jit
def norm_gradient_kernel(
    x_ptr, dy_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, locks_ptr, n, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """dx of a row; its parts of dw and db are added to the sums of a group under a lock."""
    row, places = tl.program_id(0), tl.arange(0, BLOCK)
    mask = places < n
    x, dy = tl.load(x_ptr + row * n + places, mask=mask, other=0.0), tl.load(dy_ptr + row * n + places, mask=mask, other=0.0)
    rstd = tl.load(rstd_ptr + row)
    normal = tl.where(mask, (x - tl.load(mean_ptr + row)) * rstd, 0.0)
    weighted = tl.load(w_ptr + places, mask=mask, other=0.0) * dy
    first, second = tl.sum(normal * weighted, axis=0) / n, tl.sum(weighted, axis=0) / n
    tl.store(dx_ptr + row * n + places, (weighted - (normal * first + second)) * rstd, mask=mask)
    group = row % GROUP
    lock, count = locks_ptr + group, locks_ptr + GROUP + group
    dw, db = dw_ptr + group * n + places, db_ptr + group * n + places
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    weight_part, bias_part = dy * normal, dy
    if tl.load(count) == 0:
        tl.atomic_xchg(count, 1)
    else:
        weight_part += tl.load(dw, mask=mask)
        bias_part += tl.load(db, mask=mask)
    tl.store(dw, weight_part, mask=mask)
    tl.store(db, bias_part, mask=mask)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


@triton.jit
def column_sums_kernel(parts_ptr, out_ptr, rows, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, rows, BLOCK_M):
        lines = start + tl.arange(0, BLOCK_M)
        mask = (lines < rows)[:, None] & (columns < n)[None, :]
        total += tl.load(parts_ptr + lines[:, None] * n + columns[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + columns, tl.sum(total, axis=0), mask=columns < n)


@program("A100")
def tutorial_layer_norm_forward(rng):
    x, w, b = floats(rng, 3, 100), floats(rng, 100), floats(rng, 100)
    y, mean, rstd = np.zeros_like(x), np.zeros(3, np.float32), np.zeros(3, np.float32)
    norm_kernel[(3,)](*map(as_tensor, (x, y, w, b, mean, rstd)), 100, 1e-5, BLOCK=64, num_warps=2)
    wide = x.astype(np.float64)
    deviation = np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    expected = (wide - wide.mean(1, keepdims=True)) / deviation * w + b
    return [
        Result(mean, wide.mean(1), 8 * EPSILON * abs(wide).max()), Result(rstd, 1 / deviation[:, 0], 16 * EPSILON / deviation[:, 0]),
        Result(y, expected, 32 * EPSILON * (abs(expected - b) + abs(b) + abs(w))),
    ]  # fmt: skip


@program("A100")
def tutorial_layer_norm_backward(rng):
    """Sums of 100 terms in trees and of 6 rows in any order: each of some 10 roundings at the size of its largest terms."""
    x, dy, w = floats(rng, 6, 100), floats(rng, 6, 100), floats(rng, 100)
    wide = x.astype(np.float64)
    mean, rstd = wide.mean(1).astype(np.float32), (1 / np.sqrt(wide.var(1) + 1e-5)).astype(np.float32)
    dx, parts, locks = np.zeros_like(x), [np.zeros((2, 100), np.float32) for _ in range(2)], np.zeros(4, np.int32)
    norm_gradient_kernel[(6,)](*map(as_tensor, (x, dy, w, mean, rstd, dx, *parts, locks)), 100, GROUP=2, BLOCK=128, num_warps=1)
    dw, db = np.zeros(100, np.float32), np.zeros(100, np.float32)
    for part, out in zip(parts, (dw, db), strict=True):
        column_sums_kernel[(2,)](as_tensor(part), as_tensor(out), 2, 100, BLOCK_M=2, BLOCK_N=64, num_warps=1)
    normal = (wide - mean.astype(np.float64)[:, None]) * rstd.astype(np.float64)[:, None]
    weighted = w.astype(np.float64) * dy
    means = (normal * weighted).mean(1, keepdims=True), weighted.mean(1, keepdims=True)
    expected = (weighted - (normal * means[0] + means[1])) * rstd[:, None]
    size = (abs(weighted) + (abs(normal) + 1) * (abs(normal) * abs(weighted)).mean(1, keepdims=True) + 1) * rstd[:, None]
    return [
        Result(locks, np.array([0, 0, 1, 1], np.int32)), Result(dx, expected, 32 * EPSILON * size),
        Result(dw, (dy * normal).sum(0), 8 * EPSILON * abs(dy * normal).sum(0)),
        Result(db, dy.astype(np.float64).sum(0), 8 * EPSILON * abs(dy).sum(0)),
    ]  # fmt: skip


# ---- 06: attention, forward and backward


@triton.jit
def attend_blocks(
    total, weight, largest, q, k_ptr, v_ptr, rows, low, high, n, D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr
):
    columns, depth = tl.arange(0, BLOCK_N), tl.arange(0, D)
    for start in range(low, high, BLOCK_N):
        k = tl.load(k_ptr + (start + columns)[None, :] * D + depth[:, None])
        scores = tl.dot(q, k)
        if MASKED:
            scores = tl.where(rows[:, None] >= (start + columns)[None, :], scores, -1.0e6)
        new = tl.maximum(largest, tl.max(scores, 1))
        p = tl.math.exp2(scores - new[:, None])
        decay = tl.math.exp2(largest - new)
        weight = weight * decay + tl.sum(p, 1)
        v = tl.load(v_ptr + (start + columns)[:, None] * D + depth[None, :])
        total = tl.dot(p.to(tl.float16), v, total * decay[:, None])
        largest = new
    return total, weight, largest


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, scale, n, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr
):
    """FlashAttention: blocks without a mask first, then those on the diagonal. Exponents are of base 2."""
    tile, head = tl.program_id(0), tl.program_id(1)
    base = head * n * D
    rows, depth = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D)
    q = tl.load(q_ptr + base + rows[:, None] * D + depth[None, :])
    q = (q * (scale * 1.44269504)).to(tl.float16)
    total, weight = tl.zeros((BLOCK_M, D), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    largest = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    full = tile * BLOCK_M if CAUSAL else n
    total, weight, largest = attend_blocks(total, weight, largest, q, k_ptr + base, v_ptr + base, rows, 0, full, n, D, BLOCK_N, False)
    if CAUSAL:
        total, weight, largest = attend_blocks(
            total, weight, largest, q, k_ptr + base, v_ptr + base, rows, full, full + BLOCK_M, n, D, BLOCK_N, True
        )
    tl.store(out_ptr + base + rows[:, None] * D + depth[None, :], (total / weight[:, None]).to(tl.float16))
    tl.store(lse_ptr + head * n + rows, largest + tl.math.log2(weight))


@triton.jit
def attention_deltas_kernel(out_ptr, dout_ptr, delta_ptr, D: tl.constexpr, BLOCK_M: tl.constexpr):
    rows, depth = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D)
    place = rows[:, None] * D + depth[None, :]
    product = tl.load(out_ptr + place).to(tl.float32) * tl.load(dout_ptr + place).to(tl.float32)
    tl.store(delta_ptr + rows, tl.sum(product, axis=1))


@triton.jit
def attention_gradient_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, scale, n, D: tl.constexpr, BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys over all blocks of queries, then dq of a block of queries over all blocks of keys."""
    block, head = tl.program_id(0), tl.program_id(1)
    places, depth, base = tl.arange(0, BLOCK), tl.arange(0, D)[None, :], head * n * D
    keys = (block * BLOCK + places)[:, None]
    k, v = tl.load(k_ptr + base + keys * D + depth), tl.load(v_ptr + base + keys * D + depth)
    dk, dv = tl.zeros((BLOCK, D), tl.float32), tl.zeros((BLOCK, D), tl.float32)
    for start in range(block * BLOCK if CAUSAL else 0, n, BLOCK):
        rows = start + places
        q, dout = tl.load(q_ptr + base + rows[:, None] * D + depth), tl.load(dout_ptr + base + rows[:, None] * D + depth)
        scores = tl.dot(k, tl.trans(q)) * (scale * 1.44269504)
        p = tl.math.exp2(scores - tl.load(lse_ptr + head * n + rows)[None, :])
        if CAUSAL:
            p = tl.where(rows[None, :] >= keys, p, 0.0)
        dv = tl.dot(p.to(tl.float16), dout, dv)
        ds = p * (tl.dot(v, tl.trans(dout)) - tl.load(delta_ptr + head * n + rows)[None, :])
        dk = tl.dot(ds.to(tl.float16), q, dk)
    tl.store(dv_ptr + base + keys * D + depth, dv)
    tl.store(dk_ptr + base + keys * D + depth, dk * scale)
    rows = block * BLOCK + places
    q, dout = tl.load(q_ptr + base + rows[:, None] * D + depth), tl.load(dout_ptr + base + rows[:, None] * D + depth)
    lse, delta = tl.load(lse_ptr + head * n + rows)[:, None], tl.load(delta_ptr + head * n + rows)[:, None]
    dq = tl.zeros((BLOCK, D), tl.float32)
    for start in range(0, (block + 1) * BLOCK if CAUSAL else n, BLOCK):
        keys = (start + places)[:, None]
        k, v = tl.load(k_ptr + base + keys * D + depth), tl.load(v_ptr + base + keys * D + depth)
        p = tl.math.exp2(tl.dot(q, tl.trans(k)) * (scale * 1.44269504) - lse)
        if CAUSAL:
            p = tl.where(rows[:, None] >= (start + places)[None, :], p, 0.0)
        ds = p * (tl.dot(dout, tl.trans(v)) - delta)
        dq = tl.dot(ds.to(tl.float16), k, dq)
    tl.store(dq_ptr + base + rows[:, None] * D + depth, dq * scale)


def softmax_of_attention(q, k, scale, causal):
    scores = scale * q @ np.swapaxes(k, -1, -2)
    if causal:
        scores = np.where(np.tri(scores.shape[-1], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


HALF_UNIT = 2.0**-11  # the largest relative error of rounding to f16


def attention(rng, causal, n=64, d=32, heads=2, block=32, **options):
    """P and the scaled Q are rounded to f16, which moves the scores, and then the output by up to the rows of V; and the output is."""
    q, k, v = (floats(rng, heads, n, d, dtype=np.float16) for _ in range(3))
    out, lse, scale = np.zeros_like(q), np.zeros((heads, n), np.float32), d**-0.5
    attention_kernel[(n // block, heads)](
        *map(as_tensor, (q, k, v, out, lse)), scale, n, D=d, BLOCK_M=block, BLOCK_N=block, CAUSAL=causal, **options
    )
    wide = [each.astype(np.float64) for each in (q, k, v)]
    weights = softmax_of_attention(wide[0], wide[1], scale, causal)
    expected = weights @ wide[2]
    moved = scale * abs(wide[0]) @ abs(np.swapaxes(wide[1], -1, -2)) * HALF_UNIT
    bound = (weights * (2 * moved.max(-1, keepdims=True) + HALF_UNIT)) @ abs(wide[2]) + HALF_UNIT * abs(expected) + EPSILON
    return [Result(out, expected, bound)]


@program("A100")
def tutorial_attention(rng):
    return attention(rng, causal=False, num_warps=4, num_stages=2)


@program("A100")
def tutorial_causal_attention(rng):
    return attention(rng, causal=True, num_warps=2, num_stages=3)


@program("H100")
def tutorial_causal_attention_by_wgmma(rng):
    return attention(rng, causal=True, n=128, heads=1, block=64, num_warps=4, num_stages=2)


@program("A100")
def tutorial_attention_backward(rng):
    """P and dS are rounded to f16 before their products; everything else is f32 with errors of a few 2^-22."""
    heads, n, d, block = 1, 64, 32, 32
    q, k, v, dout = (floats(rng, heads, n, d, dtype=np.float16) for _ in range(4))
    scale = d**-0.5
    wide = [each.astype(np.float64) for each in (q, k, v, dout)]
    weights = softmax_of_attention(wide[0], wide[1], scale, True)
    scores = np.where(np.tri(n, dtype=bool), scale * wide[0] @ np.swapaxes(wide[1], -1, -2), -np.inf)
    lse = (np.log2(np.e) * (scores.max(-1) + np.log(np.exp(scores - scores.max(-1, keepdims=True)).sum(-1)))).astype(np.float32)
    out = (weights @ wide[2]).astype(np.float16)
    delta, gradients = np.zeros((heads, n), np.float32), [np.zeros((heads, n, d), np.float32) for _ in range(3)]
    attention_deltas_kernel[(heads * n // block,)](*map(as_tensor, (out, dout, delta)), D=d, BLOCK_M=block, num_warps=2)
    attention_gradient_kernel[(n // block, heads)](
        *map(as_tensor, (q, k, v, dout, lse, delta, *gradients)), scale, n, D=d, BLOCK=block, CAUSAL=True, num_warps=2
    )
    deltas = (out.astype(np.float64) * wide[3]).sum(-1)
    slopes = weights * (wide[3] @ np.swapaxes(wide[2], -1, -2) - deltas[..., None])
    expected = scale * slopes @ wide[1], scale * np.swapaxes(slopes, -1, -2) @ wide[0], np.swapaxes(weights, -1, -2) @ wide[3]
    size = (
        scale * abs(slopes) @ abs(wide[1]), scale * abs(np.swapaxes(slopes, -1, -2)) @ abs(wide[0]),
        np.swapaxes(weights, -1, -2) @ abs(wide[3]),
    )  # fmt: skip
    small = 2.0**-14 * 2.0**-10 * n * 4  # of dS below the normal numbers of f16, times operands below 4
    results = [Result(delta, deltas, 8 * EPSILON * abs(out.astype(np.float64) * wide[3]).sum(-1))]
    for each, value, bound in zip(gradients, expected, size, strict=True):
        results.append(Result(each, value, 1.02 * HALF_UNIT * bound + 64 * EPSILON * (bound + 1) + small))
    return results


# ---- 07: functions of libdevice


@triton.jit
def asin_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, libdevice.asin(tl.load(x_ptr + offsets, mask=offsets < n)), mask=offsets < n)


@program("A100", ways=("emulated",))
def tutorial_function_of_libdevice(rng):
    """CUDA's asinf has an error of at most 2 units."""
    x, out = rng.uniform(-1, 1, 100).astype(np.float32), np.zeros(100, np.float32)
    asin_kernel[(2,)](as_tensor(x), as_tensor(out), 100, BLOCK=64)
    expected = np.arcsin(x.astype(np.float64))
    return [Result(out, expected, 2 * np.spacing(abs(expected).astype(np.float32)))]


# ---- 08: products of several sizes by addresses in memory


@triton.jit
def grouped_kernel(addresses_ptr, sizes_ptr, groups, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """The tiles of all products are dealt to a fixed number of programs. addresses: of A, B and C of each product."""
    tile, before = tl.program_id(0), 0
    for group in range(groups):
        m, n, k = tl.load(sizes_ptr + 3 * group), tl.load(sizes_ptr + 3 * group + 1), tl.load(sizes_ptr + 3 * group + 2)
        columns = tl.cdiv(n, BLOCK)
        tiles = tl.cdiv(m, BLOCK) * columns
        while tile >= before and tile < before + tiles:
            a_ptr = tl.load(addresses_ptr + 3 * group).to(tl.pointer_type(tl.float16))
            b_ptr = tl.load(addresses_ptr + 3 * group + 1).to(tl.pointer_type(tl.float16))
            c_ptr = tl.load(addresses_ptr + 3 * group + 2).to(tl.pointer_type(tl.float16))
            row = (tile - before) // columns * BLOCK + tl.arange(0, BLOCK)[:, None]
            column = (tile - before) % columns * BLOCK + tl.arange(0, BLOCK)[None, :]
            steps = tl.arange(0, BLOCK_K)
            total = tl.zeros((BLOCK, BLOCK), tl.float32)
            for start in range(0, k, BLOCK_K):
                a = tl.load(a_ptr + row * k + (start + steps)[None, :])
                total = tl.dot(a, tl.load(b_ptr + (start + steps)[:, None] * n + column), total)
            tl.store(c_ptr + row * n + column, total.to(tl.float16))
            tile += PROGRAMS
        before += tiles


@program("A100", ways=("emulated",))
def tutorial_grouped_products(rng):
    shapes = ((32, 16, 32), (16, 32, 16), (16, 16, 48))
    operands = [[integers(rng, -4, 5, *size, dtype=np.float16) for size in ((m, k), (k, n))] for m, n, k in shapes]
    tensors = [[*map(as_tensor, pair), as_tensor(np.zeros((m, n), np.float16))] for pair, (m, n, k) in zip(operands, shapes, strict=True)]
    addresses = np.array([[each.data_ptr() for each in group] for group in tensors], np.uint64).view(np.int64)
    kept = addresses.copy()
    grouped_kernel[(2,)](as_tensor(addresses), as_tensor(np.array(shapes, np.int32)), 3, PROGRAMS=2, BLOCK=16, BLOCK_K=16, num_warps=1)
    results = [Result(group[2], (group[0].astype(np.float32) @ group[1].astype(np.float32)).astype(np.float16)) for group in tensors]
    return [*(Result(np.asarray(each.actual), np.asarray(each.expected)) for each in results), Result(addresses, kept)]


# ---- 11: a launch that begins before the one before it has ended


@triton.jit
def dependent_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    gdc_wait()
    x, y = tl.load(x_ptr + offsets, mask=mask), tl.load(y_ptr + offsets, mask=mask)
    gdc_launch_dependents()
    tl.store(out_ptr + offsets, x + y, mask=mask)


@program("H100", ways=("emulated",))
def tutorial_dependent_launches(rng):
    x, y, middle, out = floats(rng, 200), floats(rng, 200), np.zeros(200, np.float32), np.zeros(200, np.float32)
    dependent_kernel[(2,)](*map(as_tensor, (x, y, middle)), 200, BLOCK=128, launch_pdl=True)
    dependent_kernel[(2,)](*map(as_tensor, (middle, y, out)), 200, BLOCK=128, launch_pdl=True)
    return [Result(middle, x + y), Result(out, x + y + y)]
