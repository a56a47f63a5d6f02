"""Operands for the kernel `quantize`: numbers of all exponents under scales of all kinds, and many on the borders of the format."""

import numpy as np

from tcemu.arithmetic.quotient import divide_on_integers
from tcemu.formats import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, F16, F32, TF32, convert
from tcemu.quantize.groups import GroupSizes, spread

SOURCES, TARGETS = (F32, BF16, F16), (E4M3, E5M2, F16, BF16, TF32, E2M3, E3M2, E2M1)
CASES = {  # source, target, saturate, divided by scales; but no rounding of a format to itself
    f"{source} to {target}{' saturated' * saturate}{' by scales' * scaled}": (source, target, saturate, scaled)
    for target in TARGETS
    for source in SOURCES
    for saturate in (True, False)
    for scaled in (True, False)
    if scaled or source != target
}
SPECIAL = np.array([0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FFFFFFF], np.uint32)  # magnitudes of f32
DEPTH = 24  # elements along K that share a scale: not a power of two, and not a divisor of K


def operands(case, rows, k, seed=0):
    """Codes of x [rows, K], and f32 codes of scales [rows, groups] or None.

    Of the rows, the first third holds any words; the second numbers whose quotient is near the format's range; the last such numbers under
    powers of two, cut to few bits, so that many quotients lie on a border, or in the middle between two.
    """
    source, target, _, scaled = CASES[case]
    rng = np.random.default_rng(seed)
    word = lambda *shape: rng.integers(0, 1 << 32, shape, dtype=np.uint32)  # noqa: E731
    part = np.arange(rows) * 3 // rows
    scales = word(rows, -(-k // DEPTH))
    if scaled:
        scales = np.where(part[:, None] == 2, scales & 0xFF800000, scales)
        scales = np.where(rng.random(scales.shape) < 0.02, rng.choice(SPECIAL, scales.shape) | scales & 0x80000000, scales)
    else:
        scales = np.full_like(scales, 0x3F800000)
    x = word(rows, k)
    fields = np.repeat(scales >> 23 & 255, DEPTH, 1)[:, :k].astype(int)
    reach = target.least_exponent - target.mantissa_bits - 3, target.greatest_exponent + 3
    near = np.clip(fields + rng.integers(*reach, x.shape), 0, 254).astype(np.uint32)
    x = np.where(part[:, None] > 0, x & 0x807FFFFF | near << 23, x)
    kept = rng.integers(0, target.mantissa_bits + 3, x.shape).astype(np.uint32)
    x = np.where(part[:, None] == 2, x & ~(np.uint32(0x7FFFFF) >> kept), x)
    x = np.where(rng.random(x.shape) < 0.02, rng.choice(SPECIAL, x.shape) | x & 0x80000000, x)
    if source != F32:  # its own words, and numbers of the same kind
        shift = 32 - source.bits
        rounded = np.asarray(convert(F32, source, x)) if source == F16 else x >> shift
        x = np.where(part[:, None] == 0, x >> shift, rounded).astype(source.dtype)
    return x, scales if scaled else None


def portable(case, x, scales):
    """Codes of the target, on integers."""
    source, target, saturate, _ = CASES[case]
    if scales is None:
        return convert(source, target, x, saturate=saturate)
    quotients = divide_on_integers(convert(source, F32, x), spread(scales, x.shape, GroupSizes(1, DEPTH)), F32)
    return convert(F32, target, quotients, saturate=saturate)
