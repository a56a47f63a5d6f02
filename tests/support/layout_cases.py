"""Every fragment that PTX has, with the positions its formula gives: `CASES` is what the layout tests loop over."""

from dataclasses import dataclass

import numpy as np
from oracles import layout_formulas as formulas

from tcemu.engine.layouts.fragment_layouts import Fragment, metadata_fragment, mma_fragment, mover_fragment, scale_fragment, wmma_fragment


@dataclass(frozen=True, eq=False)
class Case:
    name: str
    made: Fragment
    bits: int  # of one element in its register
    want: np.ndarray  # int[<lanes>, elements]
    copies: int = 1


def _inverse(elements, shape, formula):
    """The table of a formula that goes from a position in `shape` to (lane, element)."""
    out = np.full((32, elements), -1)
    for flat, position in enumerate(np.ndindex(*shape)):
        at = formula(*position)
        assert out[at] == -1, f"{position} shares lane and element {at}"
        out[at] = flat
    return out


def _name(shape):
    return "m{}n{}k{}".format(*shape)


def _dense():
    for row in formulas.MANUAL:
        for bits in row.bits:
            made = mma_fragment(row.operand, row.shape, bits, volta=row.volta)
            name = f"{row.section} {_name(row.shape)} {row.operand} {bits} {row.volta or ''}".strip()
            yield Case(name, made, bits, formulas.table(row.formula, row.elements, row.visible))


def _sparse():
    for k, bits, elements, row, first, chunk in formulas.SPARSE_A:
        run = 32 // bits

        def stored(n, i, run=run, row=row, first=first):  # half of the chunk's columns are stored, in order
            return row(n, i), first(n, i) // 2 + i % run

        made = mma_fragment("a", (16, 8, k), bits, sparse=True)
        yield Case(f"9.7.14.6.2 k{k} a {bits} chunk {chunk}", made, bits, formulas.table(stored, elements, (16, k // 2)))
    for k, bits, elements, formula in formulas.SPARSE_B:
        made = mma_fragment("b", (16, 8, k), bits, sparse=True)
        yield Case(f"9.7.14.6.2 k{k} b {bits}", made, bits, formulas.table(formula, elements, (k, 8)))


def _wgmma():
    def warps(formula, elements, shape):
        return formulas.table(formula, elements, shape, lanes=128).reshape(4, 32, elements)

    def d(thread, i):
        w, lane = divmod(thread, 32)
        return 16 * w + (lane >> 2) + 8 * ((i >> 1) & 1), 8 * (i >> 2) + 2 * (lane & 3) + (i & 1)

    for n in range(8, 257, 8):
        want = warps(d, n // 2, (64, n))
        for bits in (16, 32):
            yield Case(f"9.7.15.5.1.1 n{n} d {bits}", mma_fragment("d", (64, n, 16), bits, warps=4), bits, want)
    for k, bits in ((16, 16), (8, 32), (32, 8), (256, 1)):
        q = 32 // bits

        def a(thread, i, q=q):
            (w, lane), (r, e) = divmod(thread, 32), divmod(i, q)
            return 16 * w + (lane >> 2) + 8 * (r & 1), q * (lane & 3) + e + 4 * q * (r >> 1)

        want = warps(a, 4 * q, (64, k))
        yield Case(f"9.7.15.5.1.1 k{k} a {bits}", mma_fragment("a", (64, 8, k), bits, warps=4), bits, want)
        if bits != 1:
            yield Case(f"9.7.15.6.1 k{2 * k} a {bits}", mma_fragment("a", (64, 8, 2 * k), bits, warps=4, sparse=True), bits, want)


def _metadata():
    for k, bits, selectors, chunks, formula in formulas.METADATA:
        want = _inverse(8, (selectors, 16, chunks), lambda s, r, c, formula=formula: formula(r, c, s))
        yield Case(f"metadata k{k} {bits}", metadata_fragment(k, bits), 4, want)
    for k, bits, width, formula in formulas.METADATA_FIGURES:
        made = metadata_fragment(k, bits)

        def position(n, f, formula=formula, width=width):
            s, row, column = formula(n, f)
            return s, row, column // width

        yield Case(f"metadata figure k{k} {bits}", made, 4, formulas.table(position, 8, made.shape))


def _scales():
    for f in (1, 2, 4):
        a = _inverse(4, (2, 4 // f, 16, f), lambda s, h, m, j, f=f: (4 * (m % 8) + 2 * s + m // 8, f * h + j))
        b = _inverse(4, (4, 4 // f, f, 8), lambda s, h, j, n, f=f: (4 * n + s, f * h + j))
        yield Case(f"9.7.14.3 scale_vec::{f}X a", scale_fragment("a", f), 8, a)
        yield Case(f"9.7.14.3 scale_vec::{f}X b", scale_fragment("b", f), 8, b)


def _movers():
    for shape, trans, elements, memory, formula in formulas.MOVERS:
        one = formulas.table(formula, elements, memory)
        for count in (1, 2) if shape == (16, 16) else (1, 2, 4):
            want = np.concatenate([one + j * memory[0] * memory[1] for j in range(count)], axis=1)
            name = f"9.7.14.5.15-16 m{shape[0]}n{shape[1]}.x{count}{'.trans' * trans}"
            yield Case(name, mover_fragment(shape, count, trans=trans), 16 if shape == (8, 8) else 8, want)


def _seen(operand, shape):
    m, n, k = shape
    return {"a": (m, k), "b": (k, n), "c": (m, n)}[operand]


def _wmma():
    for operand, shape, bits, registers, integer, sm, formula in formulas.WMMA_75:
        seen = _seen(operand, shape)
        made = wmma_fragment(operand, shape, bits, sm=sm, registers=registers, integer=integer)
        want = formulas.table(formula, registers * 32 // bits, seen)
        name = f"wmma {_name(shape)} {operand} {bits} x{registers} sm_{sm} {'int' * integer}".strip()
        yield Case(name, made, bits, want, copies=want.size // (seen[0] * seen[1]))
    for operand, shape, bits, layout, formula in formulas.WMMA_70:
        seen = _seen(operand, shape)
        want = formulas.table(formula, 8 if operand == "c" else 16, seen)
        made = wmma_fragment(operand, shape, bits, sm=70, layout=layout, registers=want.shape[1] * bits // 32)
        yield Case(f"wmma {_name(shape)} {operand} {bits} {layout} sm_70", made, bits, want, copies=want.size // (seen[0] * seen[1]))


CASES = [case for make in (_dense, _sparse, _wgmma, _metadata, _scales, _movers, _wmma) for case in make()]
assert len({case.name for case in CASES}) == len(CASES)
