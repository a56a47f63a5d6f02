"""Where elements sit, in formulas written out again for tests that must not use tcemu's tables.

g = lane >> 2, t = lane % 4. mma fragments: PTX ISA 9.7.14.5.1-13. The order of metadata fields (figures, in the manual) and the
addresses of wgmma operands are those that the H200 recordings confirmed.
"""

import re

import numpy as np

WIDTHS = {64: "f64", 32: "f32 tf32 s32", 16: "f16 bf16", 8: "e4m3 e5m2 s8 u8", 4: "s4 u4", 1: "b1"}
BITS = {name: bits for bits, names in WIDTHS.items() for name in names.split()}


def spelling(ptx: str) -> dict:
    """The fields of a spelling: family, m n k, types d a b c, layouts of A and B, mode, satfinite, bit_op."""
    words = re.sub("::ordered_metadata", "", ptx).split(".")
    m, n, k = map(int, re.search(r"m(\d+)n(\d+)k(\d+)", ptx).groups())
    types = [word for word in words if word in BITS]
    if len(types) == 2:  # wmma f16 names D and C only
        types = [types[0], "f16", "f16", types[1]]
    elif len(types) == 3:  # wgmma's C is D
        types = [*types, types[0]]
    return {
        "family": words[0] + (".sp" if "sp" in words else ""),
        "m": m,
        "n": n,
        "k": k,
        **dict(zip("dabc", types, strict=True)),
        "layouts": [word for word in words if word in ("row", "col")],
        "mode": next((word.upper() for word in words if word in ("rn", "rz", "rm", "rp")), "RN"),
        "satfinite": "satfinite" in words,
        "bit_op": next((word for word in words if word in ("xor", "and")), None),
    }


def elements(words: np.ndarray, bits: int) -> np.ndarray:
    """[..., words] -> [..., elements] raw codes as uint64, element 0 in the lowest bits; f64 is two words, low first."""
    words = words.astype(np.uint64)
    if bits == 64:
        return words[..., 0::2] | words[..., 1::2] << np.uint64(32)
    shifts = np.arange(0, 32, bits, dtype=np.uint64)
    return ((words[..., None] >> shifts) & np.uint64((1 << bits) - 1)).reshape(*words.shape[:-1], -1)


def a_place(lane: int, i: int, rows: int, run: int) -> tuple[int, int]:
    """(row, k) of element i of A; `run` elements share a 32-bit register (1 for f64)."""
    register, e = divmod(i, run)
    g, t = lane >> 2, lane % 4
    if rows == 8:
        return g, run * t + e + 4 * run * register
    return g + 8 * (register & 1), run * t + e + 4 * run * (register >> 1)


def b_place(lane: int, i: int, run: int) -> tuple[int, int]:
    """(k, column) of element i of B."""
    register, e = divmod(i, run)
    return run * (lane % 4) + e + 4 * run * register, lane >> 2


def c_place(lane: int, i: int) -> tuple[int, int]:
    """(row, column) of element i of C and D; m8 has only i < 2, wgmma has more than one n8 block."""
    return (lane >> 2) + 8 * (i >> 1 & 1), 8 * (i >> 2) + 2 * (lane % 4) + (i & 1)


def quad_pair_place(lane: int, i: int, operand: str, layout: str, type_: str) -> tuple[int, int, int]:
    """(which of the four products, row, column) of element i in m8n8k4 f16."""
    product, t, high = lane >> 2 & 3, lane % 4, 4 * (lane >> 4)
    if operand == "a":
        return (product, t + high, i) if layout == "row" else (product, i + high, t)
    if operand == "b":
        return (product, t, i + high) if layout == "row" else (product, i, t + high)
    if type_ == "f16":
        return product, t + high, i
    return product, (t & 1) + (i & 2) + high, (i & 4) + (t & 2) + (i & 1)


def metadata_place(a: str, chunks: int, row: int, chunk: int, selector: int) -> tuple[int, int]:
    """(lane, 4-bit field) that describes one chunk of one row of a warp's 16 rows of sparse A; `chunks` is their number in a row."""
    g, upper = row % 8, row // 8
    if a in ("f16", "bf16", "tf32"):
        if chunks == 4:
            return 4 * g + selector, chunk + 4 * upper
        return 4 * g + 2 * selector + (chunk >> 2), (chunk & 3) + 4 * upper
    if chunks == 8:
        return 4 * g + 2 * selector + upper, chunk
    return 4 * g + 2 * (chunk >> 3) + upper, chunk & 7


def wgmma_byte(descriptor: int, at: int, k: int, bits: int, k_major: bool) -> tuple[int, int]:
    """(byte address, bit in it) of the element at row or column `at` and depth `k` of an operand in shared memory."""
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    base, mode = descriptor >> 49 & 7, descriptor >> 62 & 3
    w = {0: 16, 1: 128, 2: 64, 3: 32}[mode]
    if k_major:
        depth = k * bits // 8
        offset = at % 8 * w + at // 8 * stride + depth % w + depth // w * leading
    elif mode == 0:
        offset = at % 8 * 2 + k % 8 * 16 + at // 8 * stride + k // 8 * leading
    else:
        offset = at % (w // 2) * 2 + at // (w // 2) * leading + k % 8 * w + k // 8 * stride
    address = start + offset
    return address ^ ((address >> 7) - base & w // 16 - 1) << 4, k * bits % 8
