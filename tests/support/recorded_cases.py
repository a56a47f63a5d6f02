"""Each recorded case as plain matrices of codes, so that any implementation of D = A*B + C can be held to it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from oracles import fragment_formulas as fragments
from oracles import reference
from oracles.fragment_formulas import BITS, a_place, b_place, c_place, quad_pair_place

from support import golden


@dataclass(frozen=True)
class Recorded:
    """Codes as Python ints in object arrays; G counts the independent products of the case.

    `a` is [G, M, K], or [G, M, K/2] with `kept` [G, M, K/2] telling the depth of each stored element; `b` [G, K, N], `c`, `d` [G, M, N].
    `c` is None where the instruction had no accumulator.
    """

    op: dict
    a: np.ndarray
    b: np.ndarray
    c: np.ndarray | None
    d: np.ndarray
    kept: np.ndarray | None = None

    def reference_word(self, group: int, row: int, column: int) -> int:
        """The reference's word for one element of D."""
        depth = slice(None) if self.kept is None else self.kept[group, row].astype(int)
        return reference.dot(
            *(self.op[name] for name in "dabc"),
            self.a[group, row].tolist(),
            self.b[group, :, column][depth].tolist(),
            None if self.c is None else self.c[group, row, column],
            **{name: self.op[name] for name in ("k", "family", "mode", "satfinite", "bit_op")},
        )


def load(case: dict) -> Recorded:
    return {"mma": mma, "mma_sp": mma_sp, "wmma": wmma, "wgmma": wgmma, "wgmma_sp": wgmma}[case["family"]](case)


def gather_registers(registers: np.ndarray, bits: int, shape: Sequence[int], place) -> np.ndarray:
    """Registers [W, 32, n] -> matrices [W, *shape]: element i of a lane goes to `place(lane, i)`."""
    codes = fragments.elements(registers, bits)
    matrix = np.full((len(codes), *shape), None)
    for lane in range(32):
        for i in range(codes.shape[-1]):
            matrix[(slice(None), *place(lane, i))] = codes[:, lane, i].astype(object)
    assert not np.equal(matrix, None).any(), "some element of the matrix has no place in the registers"
    return matrix


def mma(case: dict, stored: int = 1) -> Recorded:
    """`stored` is 2 where only every second element of A is held."""
    op, words = fragments.spelling(case["ptx"]), golden.arrays(case)
    m, n, k = op["m"], op["n"], op["k"]
    shapes = {"a": (m, k // stored), "b": (k, n), "c": (m, n), "d": (m, n)}
    quad = op["a"] == "f16" and k == 4
    found = {}
    for name, shape in shapes.items():
        bits, type_ = BITS[op[name]], op[name]
        run = max(1, 32 // bits)
        if quad:
            layout = dict(zip("ab", op["layouts"], strict=True)).get(name, "")
            by_warp = gather_registers(words[name], bits, (4, *shape), partial(quad_pair_place, operand=name, layout=layout, type_=type_))
            found[name] = by_warp.reshape(-1, *shape)
        elif name == "a":
            found[name] = gather_registers(words[name], bits, shape, partial(a_place, rows=m, run=run))
        elif name == "b":
            found[name] = gather_registers(words[name], bits, shape, partial(b_place, run=run))
        else:
            found[name] = gather_registers(words[name], bits, shape, c_place)
    return Recorded(op, **found)


def kept_depths(op: dict, metadata: np.ndarray, selector: int) -> np.ndarray:
    """Metadata words [W, 32] of warps that hold 16 rows each -> [W, 16, K/2], the depth of each stored element."""
    chunks = op["k"] // reference.CHUNK.get(op["a"], 4)
    found = []
    for warp in metadata:
        for row in range(16):
            places = [fragments.metadata_place(op["a"], chunks, row, chunk, selector) for chunk in range(chunks)]
            found.append(reference.kept_positions(op["a"], [int(warp[lane]) >> 4 * field & 15 for lane, field in places]))
    return np.array(found).reshape(len(metadata), 16, -1)


def mma_sp(case: dict) -> Recorded:
    dense = mma(case, stored=2)
    return replace(dense, kept=kept_depths(dense.op, golden.arrays(case)["e"], case["selector"]))


def wmma(case: dict) -> Recorded:
    op, words = fragments.spelling(case["ptx"]), golden.arrays(case)
    m, n, k = op["m"], op["n"], op["k"]

    def matrix(name: str, rows: int, columns: int, layout: str) -> np.ndarray:
        codes = fragments.elements(words[name], BITS[op[name]]).astype(object)
        if layout == "row":
            return codes.reshape(-1, rows, columns)
        return codes.reshape(-1, columns, rows).swapaxes(-1, -2)

    a_layout, b_layout = op["layouts"]
    return Recorded(
        op,
        matrix("a", m, k, a_layout),
        matrix("b", k, n, b_layout),
        matrix("c", m, n, case["c_layout"]),
        matrix("d", m, n, case["d_layout"]),
    )


def wgmma(case: dict) -> Recorded:
    op, words = fragments.spelling(case["ptx"]), golden.arrays(case)
    n, k = op["n"], op["k"]
    sparse = case["sp_sel"] is not None
    stored = k // 2 if sparse else k
    memory = words["shared"].astype("<u4").view(np.uint8)
    signs, trans = case["immediates"][:2], case["immediates"][2:]
    trans = [0] * (2 - len(trans)) + trans  # A in registers has no imm-trans-a

    def operand(name: str, descriptor: int, outer: int, depth: int, transposed: int) -> np.ndarray:
        bits = BITS[op[name]]
        codes = np.full((outer, depth), None)
        for at in range(outer):
            for i in range(depth):
                byte, bit = fragments.wgmma_byte(descriptor, at, i, bits, not transposed)
                word = int.from_bytes(memory[byte : byte + max(1, bits // 8)].tobytes(), "little")
                codes[at, i] = word >> bit & (1 << bits) - 1
        return codes

    def rows(name: str, bits: int, columns: int, place) -> np.ndarray:
        return gather_registers(words[name], bits, (16, columns), place).reshape(64, columns)

    bits = BITS[op["a"]]
    if case["a"] == "registers":
        a = rows("a", bits, stored, partial(a_place, rows=16, run=max(1, 32 // bits)))
    else:
        a = operand("a", case["a_desc"], 64, stored, trans[0])
    b = operand("b", case["b_desc"], n, k, trans[1])
    for sign, codes in zip(signs, (a, b), strict=False):
        if sign == -1:
            codes ^= 1 << bits - 1
    c, d = (rows(name, BITS[op["d"]], n, c_place) for name in ("d_in", "d_out"))
    positions = kept_depths(op, words["sp_meta"], case["sp_sel"]).reshape(1, 64, -1) if sparse else None
    return Recorded(op, a[None], b.T[None], c[None] if case["scale_d"] else None, d[None], positions)
