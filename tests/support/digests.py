"""The operands and the words of tests/golden/pantheonsim.json, built again from what its programs compute.

`mma_forms` draws every register by a hash of the seed, the lane and the register's number, so that sums of floats are exact. The other
programs fill their inputs by arithmetic on the index. Digests are FNV-1a, of bytes or of whole words.
"""

import json

import numpy as np

import tcemu
from support import golden
from tcemu.formats import BF16, F16, F32, F64, TF32

RECORDED = json.loads((golden.SAMPLE / "pantheonsim.json").read_text())
TARGETS = {"RTX 3060": "sm_86", "L40S": "sm_89", "RTX PRO 6000": "sm_120a"}
SEEDS = (1, 2, 3)
LANES = np.arange(32, dtype=np.uint32)[:, None]
OFFSET_32, PRIME_32, OFFSET_64, PRIME_64 = 2166136261, 16777619, 1469598103934665603, 1099511628211


def fnv(words, bits, start=None, parts=1):
    """FNV-1a of 32 or 64 bits over words, each in `parts` bytes, or as a whole where parts is 1."""
    digest, prime = {32: (OFFSET_32, PRIME_32), 64: (OFFSET_64, PRIME_64)}[bits]
    digest = digest if start is None else start
    for word in words:
        for part in range(parts):
            piece = word if parts == 1 else word >> 8 * part & 0xFF
            digest = (digest ^ piece) * prime & (1 << bits) - 1
    return digest


# ---- mma_forms: operands of registers, exact in every format


def mix(x):
    x = np.asarray(x, np.uint32)
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x7FEB352D)
    x = (x ^ x >> np.uint32(15)) * np.uint32(0x846CA68B)
    return x ^ x >> np.uint32(16)


def hashed(seed, count):
    """uint32 [32, count]: a hash for each lane and index."""
    index = np.arange(count, dtype=np.uint32)
    return mix(np.uint32(seed * 0x9E3779B9 & 0xFFFFFFFF) ^ mix(LANES * np.uint32(131) + index * np.uint32(7919) + np.uint32(17)))


def quarters(x):
    """f32 multiples of 1/4 from -2 to 2."""
    return ((x % 17).astype(np.int32) - 8).astype(np.float32) * np.float32(0.25)


def form_words(op, name, seed, every_bit=False):
    """The registers of "a", "b" or "c" of one seed, uint32 [32, n]."""
    fmt, count = op.operand_format(name), op.register_count(name)
    seed += {"a": 0, "b": 7, "c": 13}[name]
    if fmt == F64:
        wide = hashed(seed, count // 2).astype(np.uint64) << np.uint64(32) | hashed(seed + 1, count // 2)
        return ((wide >> np.uint64(11)).astype(np.float64) / 2.0**53 * 2.0 - 1.0).view("<u4")
    if fmt in (F16, BF16):
        values = quarters(hashed(seed, 2 * count))
        return (values.astype(np.float16).view("<u2") if fmt == F16 else (values.view(np.uint32) >> 16).astype("<u2")).view("<u4")
    x = hashed(seed, count)
    if fmt == F32:
        return (quarters(x) * np.float32(2)).view(np.uint32)
    if fmt == TF32:
        return x & np.uint32(0x807FFFFF) | np.uint32(0x3F800000) if every_bit else quarters(x).view(np.uint32)
    if name != "c":
        return x
    if op.satfinite:  # near both ends of s32
        return np.where(x & 1, np.uint32(0x7FFFF000) + (x >> np.uint32(20)), np.uint32(0x80000FFF) - (x >> np.uint32(20)))
    return ((x % 2001).astype(np.int32) - 1000).view(np.uint32)


def form_metadata(op, seed):
    """uint32 [32]: eight defined fields a lane."""
    fields = np.array([0x4, 0xE] if op.a == TF32 else [0x4, 0x8, 0x9, 0xC, 0xD, 0xE], np.uint32)
    return np.bitwise_or.reduce(fields[hashed(seed + 29, 8) % len(fields)] << (4 * np.arange(8, dtype=np.uint32)), axis=1)


def form_digest(case, multiply):
    """The digest of a form over all seeds, and its words. multiply(op, a, b, c, **sparse): the registers of D."""
    op, digest, count = tcemu.parse(case["op"]), OFFSET_64, 0
    for seed in SEEDS:
        a, b, c = (form_words(op, name, seed, "operands" in case) for name in "abc")
        sparse = {"e": form_metadata(op, seed), "selector": case["selector"]} if op.sparse else {}
        d = np.ascontiguousarray(multiply(op, a, b, c, **sparse)).view("<u8" if op.d == F64 else "<u4")
        digest = (digest ^ fnv(d.ravel().tolist(), 64, parts=8) + seed & (1 << 64) - 1) * PRIME_64 & (1 << 64) - 1
        count += d.size
    return f"{digest:016x}", count


# ---- mma_blockscale: codes of any bits, in bytes and halves of bytes


def block_operands(op):
    """The registers of every operand of a block-scaled or narrow mma."""
    i = np.arange(352, dtype=np.uint32)
    words = i * np.uint32(2654435761) ^ (i >> np.uint32(3)) * np.uint32(40503)
    scales = sum((123 + (i[192:256] * 7 + 3 * byte) % 8) << np.uint32(8 * byte) for byte in range(4)).astype(np.uint32)
    words[192:256] = scales
    words[256:288] = np.uint32(0x4E4E4E4E) ^ np.where(i[256:288] & 1, np.uint32(0x0A0A0A0A), np.uint32(0))
    lanes = words.reshape(11, 32).T
    c = np.broadcast_to(np.array([0, 1, -2, 0.25], np.float32), (32, 4)).copy()
    c[:, 0] = 0.5 * np.arange(32)
    given = {"a": lanes[:, :4], "b": lanes[:, [4, 5, 9, 10] if op.sparse else [4, 5]], "c": c.view(np.uint32)}
    given |= {"scale_a": lanes[:, 6], "scale_b": lanes[:, 7]} if op.scaling else {}
    return given | ({"e": lanes[:, 8], "selector": 0} if op.sparse else {})


def block_digest(d):
    """The digest of D's registers, uint32 [32, 4]."""
    return f"{fnv([fnv(lane, 32) for lane in np.asarray(d).tolist()], 64):016x}"


# ---- lowprec_cvt and narrow_cvt: f32 numbers


def paired(x):
    """f32 words of numbers and of those that the programs put beside them."""
    return x.view(np.uint32), x[(np.arange(len(x)) * 7 + 3) % len(x)].view(np.uint32)


def narrow_inputs():
    """f32 [4096]: numbers of a few units, and NaN, infinities, subnormal numbers, large numbers and zeros among them."""
    i = np.arange(4096)
    x = ((i * 2654435761 % 2**32 % 40001) - 20000).astype(np.float32) / np.float32(1999)
    odd = i % 2 == 1
    for step, values in (
        (97, np.nan), (89, np.where(odd, np.inf, -np.inf)), (83, np.where(odd, 1e-40, -3e-39)), (79, np.where(odd, 1e30, -7e5)),
        (73, 0.0), (71, -0.0),
    ):  # fmt: skip
        x = np.where(i % step == 0, values, x)
    return x.astype(np.float32)


def fp8_inputs():
    """f32 [512]: ties and limits of FP8, zeros, infinities and NaN, then numbers of 28 binades."""
    near = [
        0.0, -0.0, 1, -1, 0.5, 1.5, 2.5, 3.5, 448, 449, 464, 465, 480, 500, -500, 57344, 57345, 61440, 65504, 65536, 1e5, 1e-3,
        2.0**-9, 2.0**-10, 1.5 * 2.0**-10, 2.0**-16, 2.0**-17, 1.5 * 2.0**-17, np.inf, -np.inf, np.nan, 0.1, 0.3, 100.1, 2.0**-4,
        2.0**-6, 1.5 * 2.0**-7, 1.125 * 2.0**-6, 240, 256, 272, 3, 5, 7, 9, 11, 13, 15, -(2.0**-9), -448, -449, -57344, -61440,
    ]  # fmt: skip
    random = mix(np.arange(512, dtype=np.uint32) * np.uint32(2654435761) + np.uint32(17))
    mantissa = (random & 0xFFFFFF).astype(np.float32) / np.float32(2**24) * np.float32(2) - np.float32(1)
    x = np.ldexp(mantissa, (random >> 24 & 0xFF).astype(np.int32) % 28 - 14).astype(np.float32)
    x[: len(near)] = near
    return x
