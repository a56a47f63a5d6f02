"""A recipe in NumPy: scales, elements, promotion, parts of K and the output, over a loop of `tcemu.dot`, one instruction at a time."""

import ml_dtypes
import numpy as np

import tcemu
from oracles import reference

DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
F32 = np.float32


def find_scale(group, fmt, power_of_two=False):
    amax = np.abs(group).max(initial=0)
    if amax == 0:
        return F32(1)
    scale = max(F32(amax) / F32(LARGEST[fmt]), F32(2.0**-126))
    if power_of_two:
        fraction, exponent = np.frexp(scale)
        scale = np.ldexp(F32(1), exponent - (fraction == 0.5))
    return F32(scale)


def block_scales(x, fmt, rows, depth, power_of_two=False):
    """One scale for each block of `rows` x `depth` of x [R, K]."""
    return np.array(
        [
            [find_scale(x[i : i + rows, j : j + depth], fmt, power_of_two) for j in range(0, x.shape[1], depth)]
            for i in range(0, x.shape[0], rows)
        ]
    )


def expand_scales(scales, shape, rows, depth):
    return np.repeat(np.repeat(scales, rows, 0), depth, 1)[: shape[0], : shape[1]]


def elements(x, fmt, scales):
    """Codes of x / scale."""
    values = x / scales
    assert values.dtype == np.float32
    if fmt in LARGEST:
        values = np.clip(values, -LARGEST[fmt], LARGEST[fmt])
    codes = values.astype(DTYPES[fmt])
    return codes.view(f"u{codes.itemsize}")


def fma(x, y, z):
    codes = (np.broadcast_to(v, z.shape).astype(F32).ravel().view(np.uint32).tolist() for v in (x, y, z))
    return np.array([reference.fma(a, b, c, "f32") for a, b, c in zip(*codes, strict=True)], np.uint32).view(F32).reshape(z.shape)


def instruction(op, target, a, b, c, **how):
    """D = A·B + C of codes [M, k] and [k, N] and float C [M, N], by tiles of one instruction."""
    op = tcemu.parse(op)
    m, n = a.shape[0], b.shape[1]

    def tiles(x, r, s):
        x = np.pad(x, [(0, -x.shape[0] % r), (0, -x.shape[1] % s)])
        return np.swapaxes(x.reshape(-1, r, x.shape[1] // s, s), 1, 2)

    a, b, c = tiles(a, op.m, op.k), tiles(b, op.k, op.n), tiles(c.view(np.uint32), op.m, op.n)
    assert a.shape[1] == 1
    if "scale_a" in how:
        x, y = how["scale_a"], how["scale_b"]
        how = {"scale_a": tiles(x, op.m, x.shape[1]), "scale_b": tiles(y, y.shape[0], op.n)}
    d = np.swapaxes(np.asarray(tcemu.dot(op, a, b, c, target=target, **how)), 1, 2)
    return d.reshape(d.shape[0] * d.shape[1], -1)[:m, :n].view(F32)


def chain_product(op, target, a, b, c, scales=None):
    """Instruction after instruction along K; scales: codes for each of the blocks along K, or None."""
    op = tcemu.parse(op)
    for k in range(0, a.shape[1], op.k):
        how = {}
        if scales is not None:
            at = slice(k // op.k * op.scaling.count, (k // op.k + 1) * op.scaling.count)
            how = {"scale_a": scales[0][:, at], "scale_b": scales[1][at]}
        c = instruction(op, target, a[:, k : k + op.k], b[k : k + op.k], c, **how)
    return c


def promoted_product(op, target, a, b, every, scale=None):
    """scale(k): what multiplies the sum that begins at k, [M, N]; None: nothing does."""
    k, total = tcemu.parse(op).k * every, np.zeros((a.shape[0], b.shape[1]), F32)
    for start in range(0, a.shape[1], k):
        part = chain_product(op, target, a[:, start : start + k], b[start : start + k], np.zeros_like(total))
        total = total + part if scale is None else fma(scale(start), part, total)
    return total


def ascending(parts):
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def tree(parts):
    while len(parts) > 1:
        parts = [sum(parts[i + 1 : i + 2], parts[i]) for i in range(0, len(parts), 2)]
    return parts[0]
