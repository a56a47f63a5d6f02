"""Operands of tcgen05 in shared memory and tensor memory, placed by formulas that are written here."""

from itertools import product

import numpy as np

import tcemu
from tcemu.engine.isa.tcgen05 import Tcgen05Product
from tcemu.engine.layouts.tcgen05_memory import encode_tcgen05_descriptor
from tcemu.formats import F16

RNG = np.random.default_rng(5)
PADDED = ("f8f6f4", "mxf8f6f4")


def codes(op: Tcgen05Product, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random codes of an operand's format, finite and of middling size."""
    fmt = getattr(op, name)
    if fmt.is_integer:
        return RNG.integers(0, 1 << fmt.bits, shape).astype(fmt.dtype)
    if fmt.bits < 8:
        return RNG.integers(0, 1 << fmt.bits, shape).astype(np.uint8)
    values = RNG.standard_normal(shape).astype(np.float32)
    return np.asarray(tcemu.formats.from_float(fmt, values))


def store_bits(memory: np.ndarray, byte: int, bit: int, bits: int, code: int) -> None:
    """Write the bits of one element into bytes."""
    for i in range(bits):
        at = bit + i
        memory[byte + at // 8] |= (code >> i & 1) << at % 8


def k_major(matrix: np.ndarray, bits: int, padded: bool, start: int, memory: np.ndarray) -> None:
    """Write rows K-major without swizzle: 16 bytes of eight rows, then the next 16 bytes along K (LBO), then eight rows on (SBO)."""
    rows, k = matrix.shape
    per_unit = 16 if padded else 128 // bits
    leading, stride = 128, 128 * -(-k // per_unit)
    for x, i in product(range(rows), range(k)):
        unit, inside = divmod(i, per_unit)
        store_bits(memory, start + 16 * (x % 8) + stride * (x // 8) + leading * unit, inside * bits, bits, int(matrix[x, i]))


def descriptor(k: int, bits: int, padded: bool, start: int) -> int:
    units = -(-k // (16 if padded else 128 // bits))
    return encode_tcgen05_descriptor(start, 128, 128 * units, 0)


D_PLACES = {  # M, cta_group, ws -> CTA, lane, column: section 9.7.16.10.5
    (256, 2, False): lambda r, c, n: (r // 128, r % 128, c),
    (128, 2, False): lambda r, c, n: (r // 64, r % 64 + 64 * (c >= n // 2), c % (n // 2)),
    (128, 1, False): lambda r, c, n: (0, r, c),
    (128, 1, True): lambda r, c, n: (0, r, c),
    (64, 1, True): lambda r, c, n: (0, r + 64 * (c >= n // 2), c % (n // 2)),
    (64, 1, False): lambda r, c, n: (0, r % 16 + 32 * (r // 16), c),
    (32, 1, True): lambda r, c, n: (0, r + 32 * (c // (n // 4)), c % (n // 4)),
}


def place(op: Tcgen05Product, base: int, columns_of_memory: int = 512):
    """Random operands: codes of A, B and C, and the memories that hold them."""
    ctas, padded = op.cta_group, op.kind in PADDED
    a, b = codes(op, "a", (op.m, op.k)), codes(op, "b", (op.n, op.k))
    c = (
        codes(op, "d", (op.m, op.n))
        if op.d.is_integer
        else np.asarray(tcemu.formats.from_float(op.d, RNG.standard_normal((op.m, op.n)).astype(np.float32)))
    )
    shared = np.zeros((ctas, 32768), np.uint8)
    rows, columns = op.m // ctas, op.n // ctas
    bits = [fmt.bits for fmt in (op.a, op.b)]
    for cta in range(ctas):
        k_major(a[cta * rows : (cta + 1) * rows], bits[0], padded and bits[0] < 8, 0, shared[cta])
        k_major(b[cta * columns : (cta + 1) * columns], bits[1], padded and bits[1] < 8, 16384, shared[cta])
    tmem = RNG.integers(0, 1 << 32, (ctas, 128, columns_of_memory), dtype=np.uint32)
    for r, column in np.ndindex(op.m, op.n):
        cta, lane, at = D_PLACES[op.m, ctas, op.ws](r, column, op.n)
        tmem[cta, lane, base + at] = int(c[r, column]) | (0xABCD0000 if op.d == F16 else 0)
    descs = [descriptor(op.k, bits[i], padded and bits[i] < 8, 16384 * i) for i in range(2)]
    words = shared.view(np.uint32)
    return a, b, c, (words, tmem) if ctas == 2 else (words[0], tmem[0]), descs


def result(op: Tcgen05Product, tmem: np.ndarray, base: int) -> np.ndarray:
    tmem = np.asarray(tmem)
    tmem = tmem.reshape(-1, *tmem.shape[-2:])
    d = np.zeros((op.m, op.n), np.uint32)
    for r, column in np.ndindex(op.m, op.n):
        cta, lane, at = D_PLACES[op.m, op.cta_group, op.ws](r, column, op.n)
        d[r, column] = tmem[cta, lane, base + at]
    return d
