"""Where each element of a fragment sits: one permutation of digits for every fragment, metadata, scale and matrix-mover layout of PTX.

The lane number and the element number are cut into digits; the matrix position is the same digits in another order. Within brackets the
first digit is the most significant. Decoding is a reshape, one transpose and a reshape; encoding is the same row read backwards.
Section numbers are those of the PTX ISA manual, version 9.0.
"""

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LANES = 32  # of a warp
REGISTER_BITS = 32


@dataclass(frozen=True)
class Layout:
    """One permutation of digits, from how a warp holds the elements to how the matrix is seen.

    Raises ValueError when made, unless each side names each digit once and both sides name the same digits. Digits in `copies` stand on
    the left only: the same element is held several times, `decode` reads copy 0 and `encode` writes every copy.
    """

    held: str  # "(w g t) (c m p)": lane, then element, low to high
    seen: str  # "(w m g) (c t p)": row, then column, after any leading axes
    copies: str = ""
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        held, seen, copies = _names(self.held), _names(self.seen), _names(self.copies)
        if len(set(held)) != len(held) or len(set(seen)) != len(seen) or sorted(held) != sorted(seen + copies):
            but = f", but for the copies {self.copies!r}" if copies else ""
            raise ValueError(f"layout {self.held!r} -> {self.seen!r}: each side must name the same digits{but}, once each")

    @property
    def digits(self) -> tuple[str, ...]:
        """The digits that need a size, in the order of the left side."""
        return _names(self.held)

    def transpose(self) -> "Layout":
        """The same elements, with the last two axes of the matrix exchanged."""
        *lead, rows, columns = (f"({' '.join(group)})" for group in _groups(self.seen))
        return Layout(self.held, " ".join([*lead, columns, rows]), self.copies, self.source)

    def held_shape(self, **sizes: int) -> tuple[int, ...]:
        """The lengths of the axes on the left: (lanes, elements)."""
        return _shape(self.held, self._checked(sizes))

    def seen_shape(self, **sizes: int) -> tuple[int, ...]:
        """The lengths of the axes on the right: (..., rows, columns)."""
        return _shape(self.seen, self._checked(sizes))

    def decode(self, fragment: Any, *, trailing: int = 0, **sizes: int) -> Any:
        """[..., lanes, elements, <trailing>] -> [..., <seen axes>, <trailing>], any dtype, numpy or JAX.

        `trailing` counts axes after the elements that travel with them (the two words of an f64). Raises ValueError if a size is missing,
        unknown or below 1, or if the array's axes are not the product of their digits.
        """
        sizes = self._checked(sizes)
        lead = self._lead("fragment", fragment, self.held, sizes, trailing)
        batch, tail = fragment.shape[:lead], fragment.shape[fragment.ndim - trailing :]
        held, copies = _names(self.held), _names(self.copies)
        x = fragment.reshape(batch + tuple(sizes[d] for d in held) + tail)
        if copies:
            x = x[(slice(None),) * lead + tuple(slice(0, 1) if d in copies else slice(None) for d in held)]
            held = tuple(d for d in held if d not in copies)
            x = x.reshape(batch + tuple(sizes[d] for d in held) + tail)
        return _permute(x, lead, held, _names(self.seen), trailing).reshape(batch + _shape(self.seen, sizes) + tail)

    def encode(self, matrix: Any, *, trailing: int = 0, **sizes: int) -> Any:
        """[..., <seen axes>, <trailing>] -> [..., lanes, elements, <trailing>]; the inverse of `decode`, with the same errors."""
        sizes = self._checked(sizes)
        lead = self._lead("matrix", matrix, self.seen, sizes, trailing)
        batch, tail = matrix.shape[:lead], matrix.shape[matrix.ndim - trailing :]
        copies, every = _names(self.copies), _names(self.held)
        held = tuple(d for d in every if d not in copies)
        x = matrix.reshape(batch + tuple(sizes[d] for d in _names(self.seen)) + tail)
        x = _permute(x, lead, _names(self.seen), held, trailing)
        if copies:
            x = x.reshape(batch + tuple(1 if d in copies else sizes[d] for d in every) + tail)
            broadcast = jnp.broadcast_to if isinstance(x, jax.Array) else np.broadcast_to
            x = broadcast(x, batch + tuple(sizes[d] for d in every) + tail)
        return x.reshape(batch + _shape(self.held, sizes) + tail)

    def index(self, **sizes: int) -> np.ndarray:
        """int[lanes, elements]: the row-major position of each held element among those seen."""
        shape = self.seen_shape(**sizes)
        return self.encode(np.arange(math.prod(shape)).reshape(shape), **sizes)

    def _checked(self, sizes: dict[str, int]) -> dict[str, int]:
        if set(sizes) != set(self.digits) or any(size < 1 for size in sizes.values()):
            raise ValueError(f"{self}: wants a size of 1 or more for each of the digits {' '.join(self.digits)}; got {dict(sizes)}")
        return sizes

    def _lead(self, name: str, x: Any, side: str, sizes: Mapping[str, int], trailing: int) -> int:
        """How many batch axes `x` has; raises if the axes after them are not those of `side`."""
        want, end = _shape(side, sizes), x.ndim - trailing
        lead = end - len(want)
        if trailing < 0 or lead < 0 or x.shape[lead:end] != want:
            after = f" and {trailing} trailing" if trailing else ""
            digits = ", ".join(f"{d}={sizes[d]}" for d in _names(side))
            raise ValueError(f"{name}: {self} wants the axes [..., {str(want)[1:-1]}]{after}, {side} with {digits}; got shape {x.shape}")
        return lead

    def __str__(self) -> str:
        return f"layout {self.held} -> {self.seen}"


@functools.cache
def _groups(side: str) -> tuple[tuple[str, ...], ...]:
    if not re.fullmatch(r"(\([a-z]( [a-z])*\)|[a-z])?( (\([a-z]( [a-z])*\)|[a-z]))*", side):
        raise ValueError(f"layout side {side!r}: wants one-letter digits, in brackets where they share an axis, one space between")
    return tuple(tuple(group.strip("()").split()) for group in re.findall(r"\([^)]*\)|\S", side))


@functools.cache
def _names(side: str) -> tuple[str, ...]:
    return tuple(digit for group in _groups(side) for digit in group)


def _shape(side: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[digit] for digit in group) for group in _groups(side))


def _permute(x: Any, lead: int, source: tuple[str, ...], target: tuple[str, ...], trailing: int) -> Any:
    after = lead + len(source)
    return x.transpose((*range(lead), *(lead + source.index(d) for d in target), *range(after, after + trailing)))


# ---- the table. lane, element -> (leading axes) row, column. B is written as N x K; its fragments transpose it.
#
# w warp of the warpgroup; g groupID = lane >> 2; t threadID_in_group = lane % 4; p neighbouring columns in one thread; m 8-row half;
# c block of 4p columns
TILE = Layout("(w g t) (c m p)", "(w m g) (c t p)", source="9.7.14.5.2-13, 9.7.14.6.2, 9.7.15.5.1.1")

# mma.m8n8k4 .f16: q which of the four products; h lane half. K: elements walk along K (A.row, B.col; C, D .f16: along N); MN: along M or N
VOLTA_K = Layout("(h q t) i", "q (h t) i", source="9.7.14.5.1")
VOLTA_MN = Layout("(h q t) i", "q (h i) t", source="9.7.14.5.1")
VOLTA_C_F32 = Layout("(h q u v) (a b d)", "q (h b v) (a u d)", source="9.7.14.5.1")

# sparsity metadata: an element is a 4-bit field of the register, one chunk's; s the sparsity selector; columns are chunks, c of them in
# each of k lanes. Figures 119-147, 176-181, which are pictures; checked on every mma.sp and wgmma.sp spelling of sm_90
META_TWO_ROWS = Layout("(g s k) (m c)", "s (m g) (k c)", source="9.7.14.6.2.1-4, 9.7.15.6.2")
META_ONE_ROW = Layout("(g s k m) c", "s (m g) (k c)", source="9.7.14.6.2.5-8, 9.7.15.6.2")

# block scales: an element is a byte of the register; s thread-id, h which group of f bytes (byte-id / f), f scale_vec size. scale_A is
# seen M x f, scale_B f x N. Which lane of the pair has rows 8-15: CUTLASS SFALayout, tilelang; no hardware seen
SCALE_A = Layout("(g s m) (h f)", "s h (m g) f", source="9.7.14.3, figures 42-45")
SCALE_B = Layout("(g s) (h f)", "s h f g", source="9.7.14.3, figures 42-45")

# movers: j matrix (.num); seen: matrix, memory row, place in that row; m 8-column half of it. b16 seen on sm_90; bytes: the order of
# m16n16's registers is CUTLASS SM100_U8x8_LDSM_T before its wrapper permutes the bytes, no hardware seen
MOVER = Layout("(g t) (j p)", "j g (t p)", source="9.7.14.5.15-16, figures 104 106 107")
MOVER_T = Layout("(g t) (j m p)", "j (t p) (m g)", source="9.7.14.5.15-17, figures 105 108-110")

# wmma, which PTX leaves "unspecified and target architecture dependent" (9.7.14.4.1): read off the machine code of sm_70 to sm_120, and
# seen on sm_90. d copies; h block of 8m rows. On sm_70 and sm_72, for .f16, bits of the lane; K and MN as in VOLTA
WMMA = Layout("(g t) (d h c m p)", "(h m g) (c t p)", copies="d", source="9.7.14.4.1; sm_75 and later")
WMMA_70_A_K = Layout("(h d m t) i", "(m h t) i", copies="d", source="9.7.14.4.1; sm_70, sm_72")
WMMA_70_A_MN = Layout("(h d m t) (k i)", "(m h i) (k t)", copies="d", source="9.7.14.4.1; sm_70, sm_72")
WMMA_70_B_K = Layout("(h n d t) i", "(n h t) i", copies="d", source="9.7.14.4.1; sm_70, sm_72")
WMMA_70_B_MN = Layout("(h n d t) (k i)", "(n h i) (k t)", copies="d", source="9.7.14.4.1; sm_70, sm_72")
WMMA_70_C_F16 = Layout("(h n m t) i", "(m h t) (n i)", source="9.7.14.4.1; sm_70, sm_72")
WMMA_70_C_F32 = Layout("(h n m u v) (a b e)", "(m h b v) (n a u e)", source="9.7.14.4.1; sm_70, sm_72")


@dataclass(frozen=True)
class Fragment:
    """A layout with its sizes: what one warp, or one warpgroup of four warps, holds of one operand. Hashable, so it may be static."""

    layout: Layout
    sizes: tuple[tuple[str, int], ...]
    transposed: bool = False  # the layout's row is written for the transpose of what the caller sees

    @property
    def lanes(self) -> tuple[int, ...]:
        """The lane axes: (32,) for a warp, (4, 32) for a warpgroup."""
        warps = dict(self.sizes).get("w", 1)
        return (LANES,) if warps == 1 else (warps, LANES)

    @property
    def elements(self) -> int:
        """Elements in one lane, copies included."""
        return self.layout.held_shape(**dict(self.sizes))[1]

    @property
    def shape(self) -> tuple[int, ...]:
        """The axes that `decode` gives: rows and columns, after the leading axes of the layout if it has any."""
        return self._seen.seen_shape(**dict(self.sizes))

    @property
    def rows(self) -> int:
        return self.shape[-2]

    @property
    def columns(self) -> int:
        return self.shape[-1]

    def decode(self, elements: Any, *, trailing: int = 0) -> Any:
        """[..., <lanes>, elements, <trailing>] -> [..., *shape, <trailing>], any dtype, numpy or JAX. ValueError if the axes differ."""
        end = elements.ndim - trailing
        lead, held = end - len(self.lanes) - 1, (*self.lanes, self.elements)
        if lead < 0 or elements.shape[lead:end] != held:
            after = f" and {trailing} trailing" if trailing else ""
            raise ValueError(f"elements: wants the axes [..., {str(held)[1:-1]}]{after}: lanes and elements; got shape {elements.shape}")
        x = elements.reshape(*elements.shape[:lead], math.prod(self.lanes), *elements.shape[end - 1 :])
        return self._seen.decode(x, trailing=trailing, **dict(self.sizes))

    def encode(self, matrix: Any, *, trailing: int = 0) -> Any:
        """[..., *shape, <trailing>] -> [..., <lanes>, elements, <trailing>]; the inverse of `decode`, writing every copy."""
        x = self._seen.encode(matrix, trailing=trailing, **dict(self.sizes))
        end = x.ndim - trailing
        return x.reshape(*x.shape[: end - 2], *self.lanes, *x.shape[end - 1 :])

    def index(self) -> np.ndarray:
        """int[<lanes>, elements]: the row-major position in `shape` of each element."""
        return self.encode(np.arange(math.prod(self.shape)).reshape(self.shape))

    @property
    def _seen(self) -> Layout:
        return self.layout.transpose() if self.transposed else self.layout


def _fragment(layout: Layout, sizes: Mapping[str, int], transposed: bool = False) -> Fragment:
    return Fragment(layout, tuple((digit, sizes[digit]) for digit in layout.digits), transposed)


def tile_sizes(rows: int, columns: int, run: int, warps: int = 1) -> dict[str, int]:
    """The sizes of TILE for a matrix of rows x columns whose threads hold `run` neighbouring columns. ValueError if they do not divide."""
    if rows % (8 * warps) or columns % (4 * run) or min(rows, columns) < 1:
        raise ValueError(f"a tile of {rows} x {columns}: rows must be a multiple of {8 * warps}, columns of {4 * run}. PTX ISA 9.7.14.5")
    return dict(w=warps, g=8, t=4, m=rows // (8 * warps), c=columns // (4 * run), p=run)


def run_of(bits: int) -> int:
    """Neighbouring columns of a multiplicand in one thread: those of one 32-bit register, and one for .f64."""
    return max(1, REGISTER_BITS // bits)


def fragment(
    operand: str, shape: tuple[int, int, int], bits: int, *, volta: str | None = None, warps: int = 1, sparse: bool = False
) -> Fragment:
    """The fragment of one operand of `mma`, `mma.sp` or `wgmma`.

    operand: "a" (seen M x K), "b" (K x N), "c" or "d" (M x N). shape: (m, n, k). bits: of one element in its register, container included
    (8 for .e2m1 of .kind::f8f6f4). volta: "row" or "col", the operand's layout, for A and B of m8n8k4 .f16, whose fragments have a leading
    axis of four products; no other fragment depends on it. warps: 4 for wgmma. sparse: A is the stored M x K/2.
    Raises ValueError for an operand, layout or size that no fragment has; which shapes are legal is not asked here.
    Source: PTX ISA 9.7.14.5.1-13, 9.7.14.6.2, 9.7.15.5.1.1.
    """
    _one_of("operand", operand, "abcd")
    m, n, k = shape
    if (m, n, k) == (8, 8, 4) and (bits == 16 or (operand in "cd" and bits == 32)):
        return _volta(operand, bits, volta)
    if volta is not None:
        raise ValueError(f"volta: {volta!r} for {operand} of m{m}n{n}k{k}, {bits} bits: only A and B of m8n8k4 .f16 take it. 9.7.14.5.1")
    if operand == "b":
        if warps != 1:
            raise ValueError("operand: the B of wgmma is in shared memory and has no fragment. PTX ISA 9.7.15.5.1")
        return _fragment(TILE, tile_sizes(n, k, run_of(bits)), transposed=True)
    if operand == "a":
        return _fragment(TILE, tile_sizes(m, k // 2 if sparse else k, run_of(bits), warps))
    return _fragment(TILE, tile_sizes(m, n, 2, warps))


def _volta(operand: str, bits: int, layout: str | None) -> Fragment:
    lane = dict(h=2, q=4, t=4)
    if operand in "cd":
        if layout is not None:
            raise ValueError(f"volta: {layout!r} for {operand} of m8n8k4: only A and B take it. PTX ISA 9.7.14.5.1")
        return _fragment(VOLTA_K, lane | dict(i=8)) if bits == 16 else _fragment(VOLTA_C_F32, dict(h=2, q=4, u=2, v=2, a=2, b=2, d=2))
    _one_of("volta", layout, ("row", "col"))
    along_k = layout == ("row" if operand == "a" else "col")
    return _fragment(VOLTA_K if along_k else VOLTA_MN, lane | dict(i=4), transposed=operand == "b")


# type bits, K -> row and sizes. 9.7.14.6.2.1-8 in turn; wgmma.sp (9.7.15.6.2) has the second, third and sixth, per warp
_METADATA = {
    (16, 16): _fragment(META_TWO_ROWS, dict(g=8, s=4, k=1, m=2, c=4)),
    (16, 32): _fragment(META_TWO_ROWS, dict(g=8, s=2, k=2, m=2, c=4)),
    (32, 16): _fragment(META_TWO_ROWS, dict(g=8, s=2, k=2, m=2, c=4)),
    (32, 8): _fragment(META_TWO_ROWS, dict(g=8, s=4, k=1, m=2, c=4)),
    (8, 32): _fragment(META_ONE_ROW, dict(g=8, s=2, k=1, m=2, c=8)),
    (8, 64): _fragment(META_ONE_ROW, dict(g=8, s=1, k=2, m=2, c=8)),
    (4, 64): _fragment(META_ONE_ROW, dict(g=8, s=2, k=1, m=2, c=8)),
    (4, 128): _fragment(META_ONE_ROW, dict(g=8, s=1, k=2, m=2, c=8)),
}


def metadata_fragment(k: int, bits: int) -> Fragment:
    """Sparsity metadata: the eight 4-bit fields of each lane's register -> [..., selector, 16 rows, chunks].

    bits: of one element of A in its register. For wgmma.sp the warps of the group are a batch axis. The selector axis has as many places
    as the selector has values. Raises ValueError if no sparse shape has this K. Source: PTX ISA 9.7.14.6.2, 9.7.15.6.2.
    """
    _one_of("(bits, k)", (bits, k), _METADATA)
    return _METADATA[bits, k]


def scale_fragment(operand: str, scale_vec: int) -> Fragment:
    """Block scales: the four bytes of each lane's register -> [..., thread_id, byte_id / scale_vec, *scale matrix].

    operand "a": the matrix is 16 x scale_vec; "b": scale_vec x 8. Raises ValueError for another operand or size. Source: PTX ISA 9.7.14.3.
    """
    _one_of("operand", operand, "ab")
    _one_of("scale_vec", scale_vec, (1, 2, 4))
    groups = dict(g=8, h=4 // scale_vec, f=scale_vec)
    return _fragment(SCALE_A, groups | dict(s=2, m=2)) if operand == "a" else _fragment(SCALE_B, groups | dict(s=4))


# shape, .trans -> row and sizes; p elements to a register, or to one half of it for m16n8
_MOVERS = {
    ((8, 8), False): (MOVER, dict(p=2)),  # .b16
    ((8, 8), True): (MOVER_T, dict(m=1, p=2)),  # .b16
    ((8, 16), False): (MOVER, dict(p=4)),  # .b8x16, unpacked to bytes
    ((16, 16), True): (MOVER_T, dict(m=2, p=4)),  # .b8, ldmatrix only
    ((16, 8), True): (MOVER_T, dict(m=2, p=2)),  # .b8, stmatrix only
}


def mover_fragment(shape: tuple[int, int], count: int, *, trans: bool = False) -> Fragment:
    """ldmatrix, stmatrix, movmatrix: elements in registers -> [..., count, memory rows, elements of a memory row].

    shape: (8, 8) of .b16; (8, 16), (16, 16) and (16, 8) of bytes. count: .num. The address of row r of matrix j is held by lane
    j * rows + r. movmatrix.trans decodes (8, 8) and encodes (8, 8) with trans. Raises ValueError for another shape, or one that has no
    form with, or without, .trans. Source: PTX ISA 9.7.14.5.15-17.
    """
    _one_of("(shape, trans)", (shape, trans), _MOVERS)
    layout, sizes = _MOVERS[shape, trans]
    return _fragment(layout, dict(g=8, t=4, j=count) | sizes)


# rows of A or of B (as N x K) -> h and m of WMMA
_WMMA_BLOCKS = {("a", 8): (1, 1), ("a", 16): (1, 2), ("a", 32): (2, 2), ("b", 8): (1, 1), ("b", 16): (2, 1), ("b", 32): (2, 2)}


def wmma_fragment(
    operand: str,
    shape: tuple[int, int, int],
    bits: int,
    *,
    sm: int,
    layout: str = "row",
    registers: int | None = None,
    integer: bool = False,
) -> Fragment:
    """The fragment of one operand of `wmma`, as targets of number `sm` (70 or more) hold it.

    operand, shape, bits: as in `fragment`. layout: the "row" or "col" of the load, which matters to A and B of sm_70 and sm_72 alone.
    registers: the 32-bit registers that the manual gives the operand (.f16: eight); those that A or B does not fill hold copies.
    None: no copies from sm_75 on. integer: the instruction multiplies integers. Raises ValueError if wmma has no such fragment.
    Source: PTX ISA 9.7.14.4.1 and the evidence beside the rows.
    """
    _one_of("operand", operand, "abcd")
    _one_of("layout", layout, ("row", "col"))
    m, n, k = shape
    if sm < 75 and not integer:
        made = _wmma_70(operand, (m, n, k), bits, layout)
    elif operand in "cd":
        turned = (m, n, k) == (8, 32, 16) and (sm >= 80 or not integer)  # computed as its transpose
        made = _fragment(TILE, tile_sizes(n, m, 2) if turned else tile_sizes(m, n, 2), transposed=turned)
    else:
        rows = m if operand == "a" else n
        _one_of("(operand, rows)", (operand, rows), _WMMA_BLOCKS)
        h, half = _WMMA_BLOCKS[operand, rows]
        copies = max(1, (registers or 0) * LANES * REGISTER_BITS // (rows * k * bits))
        made = _fragment(WMMA, tile_sizes(rows, k, run_of(bits)) | dict(d=copies, h=h, m=half), transposed=operand == "b")
    filled = made.elements * bits // REGISTER_BITS
    if registers not in (None, filled):
        raise ValueError(f"registers: {operand} of m{m}n{n}k{k}, {bits} bits, fills {filled}; got {registers}. 9.7.14.4.1")
    return made


def _wmma_70(operand: str, shape: tuple[int, int, int], bits: int, layout: str) -> Fragment:
    _one_of("shape", shape, ((16, 16, 16), (32, 8, 16), (8, 32, 16)))
    _one_of("bits", bits, (16,) if operand in "ab" else (16, 32))
    m, n = shape[0] // 8, shape[1] // 8
    if operand in "cd":
        if bits == 16:
            return _fragment(WMMA_70_C_F16, dict(h=2, n=n, m=m, t=4, i=8))
        return _fragment(WMMA_70_C_F32, dict(h=2, n=n, m=m, u=2, v=2, a=2, b=2, e=2))
    along_k = layout == ("row" if operand == "a" else "col")
    sizes = dict(h=2, t=4, i=16) if along_k else dict(h=2, t=4, k=4, i=4)
    if operand == "a":
        return _fragment(WMMA_70_A_K if along_k else WMMA_70_A_MN, sizes | dict(m=m, d=4 // m))
    return _fragment(WMMA_70_B_K if along_k else WMMA_70_B_MN, sizes | dict(n=n, d=4 // n), transposed=True)


def _one_of(name: str, value: Any, wanted: Any) -> None:
    if value not in tuple(wanted):
        raise ValueError(f"{name}: {value!r} is none of {', '.join(map(repr, wanted))}")
