"""The manual's fragment formulas for `mma`, written out again: where element i of a lane sits. For tests that must not use tcemu's tables.

g = lane >> 2, t = lane % 4. PTX ISA 9.7.14.5.1-13.
"""

import re
from collections.abc import Iterator

import numpy as np

WIDTHS = {64: "f64", 32: "f32 tf32 s32", 16: "f16 bf16", 8: "e4m3 e5m2 s8 u8", 4: "s4 u4", 1: "b1"}
BITS = {name: bits for bits, names in WIDTHS.items() for name in names.split()}


def spelling(ptx: str) -> dict:
    """m n k, the four types, layouts, mode, satfinite and bit_op of an `mma` or `mma.sp` spelling."""
    words = ptx.split(".")
    m, n, k = map(int, re.search(r"m(\d+)n(\d+)k(\d+)", ptx).groups())
    d, a, b, c = [word for word in words if word in BITS]
    return {
        "m": m,
        "n": n,
        "k": k,
        "d": d,
        "a": a,
        "b": b,
        "c": c,
        "layouts": [word for word in words if word in ("row", "col")],
        "mode": next((word.upper() for word in words if word in ("rn", "rz", "rm", "rp")), "RN"),
        "satfinite": "satfinite" in words,
        "bit_op": next((word for word in words if word in ("xor", "and")), None),
    }


def elements(registers: np.ndarray, bits: int) -> np.ndarray:
    """[..., 32, registers] -> [..., 32, elements] raw codes as uint64, element 0 in the lowest bits; f64 is two words, low first."""
    words = registers.astype(np.uint64)
    if bits == 64:
        return words[..., 0::2] | words[..., 1::2] << np.uint64(32)
    shifts = np.arange(0, 32, bits, dtype=np.uint64)
    return ((words[..., None] >> shifts) & np.uint64((1 << bits) - 1)).reshape(*words.shape[:-1], -1)


def a_place(lane: int, i: int, m: int, run: int) -> tuple[int, int]:
    """(row, k) of element i of A; `run` elements share a 32-bit register (1 for f64)."""
    register, e = divmod(i, run)
    g, t = lane >> 2, lane % 4
    if m == 8:
        return g, run * t + e + 4 * run * register
    return g + 8 * (register & 1), run * t + e + 4 * run * (register >> 1)


def b_place(lane: int, i: int, run: int) -> tuple[int, int]:
    """(k, column) of element i of B."""
    register, e = divmod(i, run)
    return run * (lane % 4) + e + 4 * run * register, lane >> 2


def c_place(lane: int, i: int) -> tuple[int, int]:
    """(row, column) of element i of C and D; for m8 only i < 2 occur."""
    return (lane >> 2) + 8 * (i >> 1), 2 * (lane % 4) + (i & 1)


def quad_pair_places(operand: str, layout: str, type_: str, lane: int, i: int) -> tuple[int, int, int]:
    """(which of the four products, row, column) of element i in m8n8k4 f16: PTX ISA 9.7.14.5.1."""
    product, t, high = (lane >> 2) & 3, lane % 4, 4 * (lane >> 4)
    if operand == "a":
        return (product, t + high, i) if layout == "row" else (product, i + high, t)
    if operand == "b":
        return (product, t, i + high) if layout == "row" else (product, i, t + high)
    if type_ == "f16":
        return product, t + high, i
    return product, (t & 1) + (i & 2) + high, (i & 4) + (t & 2) + (i & 1)


def matrices(op: dict, a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray, stored_k: int | None = None) -> Iterator[np.ndarray]:
    """Registers of W warps [W, 32, n] as matrices of codes: A [W, P, M, K], B [W, P, K, N], C and D [W, P, M, N].

    P is 4 in m8n8k4 f16, which does four products at once, and 1 elsewhere. `stored_k` is A's width where it is sparse.
    """
    m, n, k = op["m"], op["n"], op["k"]
    quad = op["a"] == "f16" and k == 4
    shapes = {"a": (m, stored_k or k), "b": (k, n), "c": (m, n), "d": (m, n)}
    for name, registers in (("a", a), ("b", b), ("c", c), ("d", d)):
        codes = elements(registers, BITS[op[name]])
        run = max(1, 32 // BITS[op[name]])
        matrix = np.full((len(codes), 4 if quad else 1, *shapes[name]), -1, dtype=object)
        for lane in range(32):
            for i in range(codes.shape[-1]):
                if quad:
                    place = quad_pair_places(name, op["layouts"]["ab".find(name)] if name in "ab" else "", op[name], lane, i)
                elif name == "a":
                    place = (0, *a_place(lane, i, m, run))
                elif name == "b":
                    place = (0, *b_place(lane, i, run))
                else:
                    place = (0, *c_place(lane, i))
                matrix[(slice(None), *place)] = codes[:, lane, i]
        assert not (matrix == -1).any(), f"{name} of {op} leaves elements unset"
        yield matrix
