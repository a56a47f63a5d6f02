"""Operands for the kernel `quantize`: numbers of all exponents under scales of all kinds, and many on the borders of the format."""

import jax.numpy as jnp
import numpy as np

from tcemu.engine.arithmetic.integer_quotients import divide_on_integers
from tcemu.formats import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, F16, F32, TF32, convert
from tcemu.operations.quantize.scale_groups import GroupSizes, broadcast_scales
from tcemu.quantize import BLOCK_FORMATS, RULES, BlockFormat

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
    word = lambda *shape: rng.integers(0, 1 << 32, shape, dtype=np.uint32)
    part = np.arange(rows) * 3 // rows
    scales = word(rows, -(-k // DEPTH))
    if scaled:
        scales = np.where(part[:, None] == 2, scales & 0xFF800000, scales)
        scales = np.where(rng.random(scales.shape) < 0.02, rng.choice(SPECIAL, scales.shape) | scales & 0x80000000, scales)
    else:
        scales = np.full_like(scales, 0x3F800000)
    x = word(rows, k)
    fields = np.repeat(scales >> 23 & 255, DEPTH, 1)[:, :k].astype(int)
    reach = target.min_exponent - target.mantissa_bits - 3, target.max_exponent + 3
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


def quantize_portably(case, x, scales):
    """Codes of the target, on integers."""
    source, target, saturate, _ = CASES[case]
    if scales is None:
        return convert(source, target, x, saturate=saturate)
    quotients = divide_on_integers(convert(source, F32, x), broadcast_scales(scales, x.shape, GroupSizes(1, DEPTH)), F32)
    return convert(F32, target, quotients, saturate=saturate)


MX, NVFP4 = ([name for name, rule in RULES.items() if (rule.two_level is None) == alone] for alone in (True, False))
BLOCKS = {  # a format by a rule, the dtype of x, the axis that is cut, rows that share a scale
    f"{kind} by {rule}, {dtype}, axis {axis}, {rows} rows": (BlockFormat(kind, BLOCK_FORMATS[kind].element, size, rule), dtype, axis, rows)
    for kind, rules in (("mxfp8_e4m3", MX), ("mxfp8_e5m2", MX), ("mxfp6_e2m3", MX), ("mxfp4", MX), ("nvfp4", NVFP4))
    for rule in rules
    for size, dtype, axis, rows in ((16, "float32", -1, 1), (32, "bfloat16", -2, 1), (5, "float16", -1, 16))
}


def matrix(*shape, seed=0):
    """With a row, a column and a block of zeros, numbers of many exponents, an Inf and a NaN."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * 2.0 ** rng.integers(-140, 120, (*shape[:-1], 1))
    x[..., 1, :], x[..., :, 2], x[..., :130, :140] = 0, 0, 0
    x[1, -1, 0], x[1, -2, 7] = np.inf, np.nan
    return x.astype(np.float32)


def block_matrix(name: str, *shape: int) -> np.ndarray:
    """An x for a row of BLOCKS, as `matrix`, with small numbers in one column of seven."""
    dtype = BLOCKS[name][1]
    x = matrix(*shape)
    x = np.where(np.arange(shape[-1]) % 7 == 3, -np.abs(x) * np.float32(2.0**-9), x)
    return (x if dtype != "float16" else np.where(np.isinf(x), x, np.clip(x, -3e4, 3e4))).astype(jnp.dtype(dtype))
