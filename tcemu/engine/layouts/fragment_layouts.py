"""Register layouts: one permutation of digits for every fragment, metadata, scale and matrix-mover layout of PTX.

The lane number and the element number are split into digits; the matrix position is the same digits in another order. Within brackets the
first digit is the most significant. Decoding is a reshape, one transpose and a reshape; encoding reverses these steps.
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

LANES = 32  # lanes of a warp
REGISTER_BITS = 32  # bits of a register


@dataclass(frozen=True)
class Layout:
    """One permutation of digits, from the axes of a warp's fragment to the axes of a matrix.

    A digit in `copies` is in the fragment's axes only: the warp stores each element several times.

    Raises:
        ValueError: A side names a digit twice, or the two sides name different digits.
    """

    fragment_axes: str  # digits of the lane, then of the element, low to high: "(w g t) (c m p)"
    matrix_axes: str  # digits of the row, then of the column, after any leading axes: "(w m g) (c t p)"
    copies: str = ""  # digits that number the copies of an element
    source: str = field(default="", compare=False)  # sections of the PTX ISA manual

    def __post_init__(self) -> None:
        stored, shown, copies = _names(self.fragment_axes), _names(self.matrix_axes), _names(self.copies)
        if len(set(stored)) != len(stored) or len(set(shown)) != len(shown) or sorted(stored) != sorted(shown + copies):
            but = f", except the copies {self.copies!r}" if copies else ""
            raise ValueError(f"layout {self.fragment_axes!r} -> {self.matrix_axes!r}: each side must name the same digits{but}, once each")

    @property
    def digits(self) -> tuple[str, ...]:
        """The digits that need a size, in the order of the fragment's axes."""
        return _names(self.fragment_axes)

    def __str__(self) -> str:
        return f"layout {self.fragment_axes} -> {self.matrix_axes}"


@functools.cache
def _groups(side: str) -> tuple[tuple[str, ...], ...]:
    if not re.fullmatch(r"(\([a-z]( [a-z])*\)|[a-z])?( (\([a-z]( [a-z])*\)|[a-z]))*", side):
        raise ValueError(f"layout side {side!r}: expected one-letter digits separated by one space, in brackets where they share an axis")
    return tuple(tuple(group.strip("()").split()) for group in re.findall(r"\([^)]*\)|\S", side))


@functools.cache
def _names(side: str) -> tuple[str, ...]:
    return tuple(digit for group in _groups(side) for digit in group)


def _permute(x: Any, lead: int, source: tuple[str, ...], target: tuple[str, ...], trailing: int) -> Any:
    """Transpose an array with one axis for each digit from one order of digits to another."""
    after = lead + len(source)
    return x.transpose((*range(lead), *(lead + source.index(d) for d in target), *range(after, after + trailing)))


# ---- The table of layouts: lane, element -> (leading axes) row, column. Rows for B describe it as N x K; its fragments transpose it.
#
# Digits: w warp of the warpgroup; g groupID = lane >> 2; t threadID_in_group = lane % 4; p neighbouring columns in one thread; m 8-row
# half; c block of 4p columns
TILE = Layout("(w g t) (c m p)", "(w m g) (c t p)", source="9.7.14.5.2-13, 9.7.14.6.2, 9.7.15.5.1.1")

# mma.m8n8k4 .f16: q index of the product, of four; h half of the lanes. K: the elements of a lane follow each other along K (A.row, B.col;
# C, D .f16: along N); MN: along M or N
VOLTA_K = Layout("(h q t) i", "q (h t) i", source="9.7.14.5.1")
VOLTA_MN = Layout("(h q t) i", "q (h i) t", source="9.7.14.5.1")
VOLTA_C_F32 = Layout("(h q u v) (a b d)", "q (h b v) (a u d)", source="9.7.14.5.1")

# Sparsity metadata: an element is the 4-bit field of one chunk; s sparsity selector; columns are chunks, c of them in each of k lanes.
# Source: figures 119-147, 176-181, which are pictures; checked on every mma.sp and wgmma.sp spelling of sm_90
META_TWO_ROWS = Layout("(g s k) (m c)", "s (m g) (k c)", source="9.7.14.6.2.1-4, 9.7.15.6.2")
META_ONE_ROW = Layout("(g s k m) c", "s (m g) (k c)", source="9.7.14.6.2.5-8, 9.7.15.6.2")

# Block scales: an element is a byte of the register; s thread-id; h index of the group of f bytes (byte-id / f); f scale_vec size. scale_A
# is M x f, scale_B is f x N. CUTLASS SFALayout and tilelang show the lane of the pair that has rows 8-15; not measured on hardware
SCALE_A = Layout("(g s m) (h f)", "s h (m g) f", source="9.7.14.3, figures 42-45")
SCALE_B = Layout("(g s) (h f)", "s h f g", source="9.7.14.3, figures 42-45")

# Movers: j matrix (.num); m 8-column half of a memory row. The matrix axes are matrix, memory row, position in that row. b16 was measured
# on sm_90. Bytes: the order of m16n16's registers is that of CUTLASS SM100_U8x8_LDSM_T before its wrapper permutes the bytes; not measured
# on hardware
MOVER = Layout("(g t) (j p)", "j g (t p)", source="9.7.14.5.15-16, figures 104 106 107")
MOVER_T = Layout("(g t) (j m p)", "j (t p) (m g)", source="9.7.14.5.15-17, figures 105 108-110")

# wmma: PTX leaves the layout "unspecified and target architecture dependent" (9.7.14.4.1). These rows were read from the machine code of
# sm_70 to sm_120 and measured on sm_90. d copies; h block of 8m rows. In WMMA_70 (.f16 on sm_70 and sm_72) d and h are bits of the lane; K
# and MN as in VOLTA
WMMA = Layout("(g t) (d h c m p)", "(h m g) (c t p)", copies="d", source="9.7.14.4.1; sm_75 and later")
WMMA_70_A_K = Layout("(h d m t) i", "(m h t) i", copies="d", source="9.7.14.4.1; sm_70, sm_72")
WMMA_70_A_MN = Layout("(h d m t) (k i)", "(m h i) (k t)", copies="d", source="9.7.14.4.1; sm_70, sm_72")
WMMA_70_B_K = Layout("(h n d t) i", "(n h t) i", copies="d", source="9.7.14.4.1; sm_70, sm_72")
WMMA_70_B_MN = Layout("(h n d t) (k i)", "(n h i) (k t)", copies="d", source="9.7.14.4.1; sm_70, sm_72")
WMMA_70_C_F16 = Layout("(h n m t) i", "(m h t) (n i)", source="9.7.14.4.1; sm_70, sm_72")
WMMA_70_C_F32 = Layout("(h n m u v) (a b e)", "(m h b v) (n a u e)", source="9.7.14.4.1; sm_70, sm_72")


@dataclass(frozen=True)
class Fragment:
    """The registers of one operand in a warp, or in a warpgroup of four warps: a layout with its sizes.

    Hashable, so it may be static under `jit`. `decode` reads copy 0 of an element, `encode` writes every copy.

    Raises:
        ValueError: A digit of the layout has no size, or one below 1.
    """

    layout: Layout  # row of the table
    sizes: tuple[tuple[str, int], ...]  # digits and their sizes
    transposed: bool = False  # True if the layout describes the transpose of the caller's matrix

    def __post_init__(self) -> None:
        if {digit for digit, _ in self.sizes} != set(self.layout.digits) or any(size < 1 for _, size in self.sizes):
            digits = " ".join(self.layout.digits)
            raise ValueError(f"{self.layout}: expected a size of 1 or more for each of the digits {digits}; got {dict(self.sizes)}")

    @property
    def lanes(self) -> tuple[int, ...]:
        """The lane axes: (32,) for a warp, (4, 32) for a warpgroup."""
        warps = dict(self.sizes).get("w", 1)
        return (LANES,) if warps == 1 else (warps, LANES)

    @property
    def elements(self) -> int:
        """Number of elements in one lane, copies included."""
        return self._side_sizes(self.layout.fragment_axes)[1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Axes of the matrix: rows and columns, after any leading axes of the layout."""
        return self._side_sizes(self._matrix_axes)

    @property
    def rows(self) -> int:
        return self.shape[-2]

    @property
    def columns(self) -> int:
        return self.shape[-1]

    def decode(self, elements: Any, *, trailing: int = 0) -> Any:
        """Rearrange the elements of the lanes into a matrix.

        Args:
            elements: NumPy or JAX array [..., <lanes>, elements, <trailing>] of any dtype.
            trailing: Number of axes after the elements that belong to each element, such as the two words of an f64.

        Returns:
            Array [..., *shape, <trailing>].

        Raises:
            ValueError: The axes are not the fragment's.
        """
        lead, sizes = self._lead("elements", elements, (*self.lanes, self.elements), trailing), dict(self.sizes)
        batch, tail = elements.shape[:lead], elements.shape[elements.ndim - trailing :]
        stored, copies = self.layout.digits, _names(self.layout.copies)
        x = elements.reshape(batch + tuple(sizes[d] for d in stored) + tail)
        if copies:
            x = x[(slice(None),) * lead + tuple(slice(0, 1) if d in copies else slice(None) for d in stored)]
            stored = tuple(d for d in stored if d not in copies)
            x = x.reshape(batch + tuple(sizes[d] for d in stored) + tail)
        return _permute(x, lead, stored, _names(self._matrix_axes), trailing).reshape(batch + self.shape + tail)

    def encode(self, matrix: Any, *, trailing: int = 0) -> Any:
        """Rearrange a matrix into the elements of the lanes and write every copy; the inverse of `decode`.

        Args:
            matrix: NumPy or JAX array [..., *shape, <trailing>] of any dtype.
            trailing: As in `decode`.

        Returns:
            Array [..., <lanes>, elements, <trailing>].

        Raises:
            ValueError: The axes are not the matrix's.
        """
        lead, sizes, shown = self._lead("matrix", matrix, self.shape, trailing), dict(self.sizes), _names(self._matrix_axes)
        batch, tail = matrix.shape[:lead], matrix.shape[matrix.ndim - trailing :]
        every, copies = self.layout.digits, _names(self.layout.copies)
        x = matrix.reshape(batch + tuple(sizes[d] for d in shown) + tail)
        x = _permute(x, lead, shown, tuple(d for d in every if d not in copies), trailing)
        if copies:
            x = x.reshape(batch + tuple(1 if d in copies else sizes[d] for d in every) + tail)
            broadcast = jnp.broadcast_to if isinstance(x, jax.Array) else np.broadcast_to
            x = broadcast(x, batch + tuple(sizes[d] for d in every) + tail)
        return x.reshape(*batch, *self.lanes, self.elements, *tail)

    def index(self) -> np.ndarray:
        """Return the row-major index in the matrix of each element of the lanes.

        Returns:
            int[<lanes>, elements].
        """
        return self.encode(np.arange(math.prod(self.shape)).reshape(self.shape))

    @property
    def _matrix_axes(self) -> str:
        if not self.transposed:
            return self.layout.matrix_axes
        *lead, rows, columns = (f"({' '.join(group)})" for group in _groups(self.layout.matrix_axes))
        return " ".join([*lead, columns, rows])

    def _side_sizes(self, side: str) -> tuple[int, ...]:
        sizes = dict(self.sizes)
        return tuple(math.prod(sizes[digit] for digit in group) for group in _groups(side))

    def _lead(self, name: str, x: Any, expected: tuple[int, ...], trailing: int) -> int:
        """Return the number of batch axes of `x`, or raise ValueError if the axes after them are not the expected ones."""
        end = x.ndim - trailing
        lead = end - len(expected)
        if trailing < 0 or lead < 0 or x.shape[lead:end] != expected:
            after = f" and {trailing} trailing" if trailing else ""
            digits = ", ".join(f"{digit}={size}" for digit, size in self.sizes)
            raise ValueError(f"{name}: {self.layout} with {digits} needs the axes [..., {str(expected)[1:-1]}]{after}; got shape {x.shape}")
        return lead


def _fragment(layout: Layout, sizes: Mapping[str, int], transposed: bool = False) -> Fragment:
    """Make a fragment; its sizes are in the order of the layout's digits."""
    return Fragment(layout, tuple((digit, sizes[digit]) for digit in layout.digits), transposed)


def tile_sizes(rows: int, columns: int, run: int, warps: int = 1) -> dict[str, int]:
    """Return the digit sizes of TILE for a matrix.

    Args:
        rows: Rows of the matrix, a multiple of 8 * warps.
        columns: Columns of the matrix, a multiple of 4 * run.
        run: Neighbouring columns in one thread.
        warps: Warps that share the rows: 4 for a warpgroup.

    Returns:
        The size of each digit.

    Raises:
        ValueError: The rows or columns are not such multiples above 0.

    Source: PTX ISA 9.7.14.5.
    """
    if rows % (8 * warps) or columns % (4 * run) or min(rows, columns) < 1:
        raise ValueError(f"a tile of {rows} x {columns}: rows must be a multiple of {8 * warps}, columns of {4 * run}. PTX ISA 9.7.14.5")
    return dict(w=warps, g=8, t=4, m=rows // (8 * warps), c=columns // (4 * run), p=run)


def elements_per_register(bits: int) -> int:
    """Return the number of neighbouring columns of A or B in one thread.

    Args:
        bits: Width of an element in its register.

    Returns:
        Elements of one 32-bit register; 1 for .f64.
    """
    return max(1, REGISTER_BITS // bits)


def mma_fragment(
    operand: str, shape: tuple[int, int, int], bits: int, *, volta: str | None = None, warps: int = 1, sparse: bool = False
) -> Fragment:
    """Return the fragment of one operand of `mma`, `mma.sp` or `wgmma`.

    The function does not check if an instruction of this shape exists.

    Args:
        operand: "a" (matrix M x K), "b" (K x N), "c" or "d" (M x N).
        shape: (m, n, k).
        bits: Width of an element's container in its register (8 for .e2m1 of .kind::f8f6f4).
        volta: "row" or "col", the layout of A or B of m8n8k4 .f16. Its fragments have a leading axis of four products. No other fragment
            depends on the layout.
        warps: 4 for wgmma.
        sparse: True if A is the stored M x K/2.

    Raises:
        ValueError: No fragment has this operand, layout or size.

    Source: PTX ISA 9.7.14.5.1-13, 9.7.14.6.2, 9.7.15.5.1.1.
    """
    _require_choice("operand", operand, "abcd")
    m, n, k = shape
    if (m, n, k) == (8, 8, 4) and (bits == 16 or (operand in "cd" and bits == 32)):
        return _volta(operand, bits, volta)
    if volta is not None:
        raise ValueError(f"volta: {volta!r} for {operand} of m{m}n{n}k{k}, {bits} bits: only A and B of m8n8k4 .f16 take it. 9.7.14.5.1")
    if operand == "b":
        if warps != 1:
            raise ValueError("operand: the B of wgmma is in shared memory and has no fragment. PTX ISA 9.7.15.5.1")
        return _fragment(TILE, tile_sizes(n, k, elements_per_register(bits)), transposed=True)
    if operand == "a":
        return _fragment(TILE, tile_sizes(m, k // 2 if sparse else k, elements_per_register(bits), warps))
    return _fragment(TILE, tile_sizes(m, n, 2, warps))


def _volta(operand: str, bits: int, layout: str | None) -> Fragment:
    lane = dict(h=2, q=4, t=4)
    if operand in "cd":
        if layout is not None:
            raise ValueError(f"volta: {layout!r} for {operand} of m8n8k4: only A and B take it. PTX ISA 9.7.14.5.1")
        return _fragment(VOLTA_K, lane | dict(i=8)) if bits == 16 else _fragment(VOLTA_C_F32, dict(h=2, q=4, u=2, v=2, a=2, b=2, d=2))
    _require_choice("volta", layout, ("row", "col"))
    along_k = layout == ("row" if operand == "a" else "col")
    return _fragment(VOLTA_K if along_k else VOLTA_MN, lane | dict(i=4), transposed=operand == "b")


# (bits of a type, K) -> layout and sizes, in the order of 9.7.14.6.2.1-8. wgmma.sp (9.7.15.6.2) uses the second, third and sixth in each
# warp
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
    """Return the fragment of sparsity metadata: the eight 4-bit fields of each lane's register.

    Its matrix is [..., selector, 16 rows, chunks]; the length of the selector axis is the number of values of the selector. For wgmma.sp
    the warps of the group are a batch axis.

    Args:
        k: K of the instruction.
        bits: Width of an element of A in its register.

    Raises:
        ValueError: No sparse shape has this K.

    Source: PTX ISA 9.7.14.6.2, 9.7.15.6.2.
    """
    _require_choice("(bits, k)", (bits, k), _METADATA)
    return _METADATA[bits, k]


def scale_fragment(operand: str, scale_vec: int) -> Fragment:
    """Return the fragment of block scales: the four bytes of each lane's register.

    Its matrix is [..., thread_id, byte_id / scale_vec, *scale matrix].

    Args:
        operand: "a", with a scale matrix of 16 x scale_vec, or "b", with scale_vec x 8.
        scale_vec: Scales per row of A or column of B: 1, 2 or 4.

    Raises:
        ValueError: The operand or the size is not one of these.

    Source: PTX ISA 9.7.14.3.
    """
    _require_choice("operand", operand, "ab")
    _require_choice("scale_vec", scale_vec, (1, 2, 4))
    groups = dict(g=8, h=4 // scale_vec, f=scale_vec)
    return _fragment(SCALE_A, groups | dict(s=2, m=2)) if operand == "a" else _fragment(SCALE_B, groups | dict(s=4))


# (shape, .trans) -> layout and sizes; p elements per register, or per half register for m16n8
_MOVERS = {
    ((8, 8), False): (MOVER, dict(p=2)),  # .b16
    ((8, 8), True): (MOVER_T, dict(m=1, p=2)),  # .b16
    ((8, 16), False): (MOVER, dict(p=4)),  # .b8x16, unpacked to bytes
    ((16, 16), True): (MOVER_T, dict(m=2, p=4)),  # .b8, ldmatrix only
    ((16, 8), True): (MOVER_T, dict(m=2, p=2)),  # .b8, stmatrix only
}


def mover_fragment(shape: tuple[int, int], count: int, *, trans: bool = False) -> Fragment:
    """Return the fragment of ldmatrix, stmatrix or movmatrix.

    Its matrix is [..., count, memory rows, elements of a memory row]. Lane j * rows + r has the address of row r of matrix j.
    movmatrix.trans decodes (8, 8) and encodes (8, 8) with trans.

    Args:
        shape: (8, 8) of .b16; (8, 16), (16, 16) or (16, 8) of bytes.
        count: Number of matrices, .num.
        trans: True for .trans.

    Raises:
        ValueError: The shape is not one of these, or does not exist with this `trans`.

    Source: PTX ISA 9.7.14.5.15-17.
    """
    _require_choice("(shape, trans)", (shape, trans), _MOVERS)
    layout, sizes = _MOVERS[shape, trans]
    return _fragment(layout, dict(g=8, t=4, j=count) | sizes)


# (operand, rows of A or of B as N x K) -> sizes of WMMA's digits h and m
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
    """Return the fragment of one operand of `wmma` on a target.

    Args:
        operand: As in `mma_fragment`.
        shape: As in `mma_fragment`.
        bits: As in `mma_fragment`.
        sm: Number of the target, 70 or more.
        layout: "row" or "col" of the load. Only A and B of sm_70 and sm_72 depend on it.
        registers: Number of 32-bit registers of the operand in the manual (.f16: eight). Registers that A or B does not fill store copies.
            None: no copies from sm_75 on.
        integer: True if the instruction multiplies integers.

    Raises:
        ValueError: wmma has no such fragment.

    Source: PTX ISA 9.7.14.4.1 and the evidence beside the rows.
    """
    _require_choice("operand", operand, "abcd")
    _require_choice("layout", layout, ("row", "col"))
    m, n, k = shape
    if sm < 75 and not integer:
        fragment = _wmma_70(operand, (m, n, k), bits, layout)
    elif operand in "cd":
        transposed = (m, n, k) == (8, 32, 16) and (sm >= 80 or not integer)  # computed as its transpose
        fragment = _fragment(TILE, tile_sizes(n, m, 2) if transposed else tile_sizes(m, n, 2), transposed=transposed)
    else:
        rows = m if operand == "a" else n
        _require_choice("(operand, rows)", (operand, rows), _WMMA_BLOCKS)
        h, half = _WMMA_BLOCKS[operand, rows]
        copies = max(1, (registers or 0) * LANES * REGISTER_BITS // (rows * k * bits))
        sizes = tile_sizes(rows, k, elements_per_register(bits)) | dict(d=copies, h=h, m=half)
        fragment = _fragment(WMMA, sizes, transposed=operand == "b")
    filled = fragment.elements * bits // REGISTER_BITS
    if registers not in (None, filled):
        raise ValueError(f"registers: {operand} of m{m}n{n}k{k}, {bits} bits, fills {filled}; got {registers}. 9.7.14.4.1")
    return fragment


def _wmma_70(operand: str, shape: tuple[int, int, int], bits: int, layout: str) -> Fragment:
    """Return the fragment of one operand of wmma with .f16 A and B on sm_70 and sm_72."""
    _require_choice("shape", shape, ((16, 16, 16), (32, 8, 16), (8, 32, 16)))
    _require_choice("bits", bits, (16,) if operand in "ab" else (16, 32))
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


def _require_choice(name: str, value: Any, choices: Any) -> None:
    if value not in tuple(choices):
        raise ValueError(f"{name}: {value!r} is not one of {', '.join(map(repr, choices))}")
