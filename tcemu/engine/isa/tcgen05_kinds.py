"""The table of the kinds of tcgen05.mma: types, K, shapes, block scales, and their codes in the instruction descriptor.

A row says what some target has. Which target has which K and which scales is in its row of `tcemu.engine.isa.targets.TARGETS`.
"""

from typing import NamedTuple

from tcemu.engine.formats.number_formats import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, F16, F32, S8, S32, TF32, U8, UE4M3, UE5M3, UE8M0, Format


def _multiples(first: int, last: int, step: int) -> tuple[int, ...]:
    return tuple(range(first, last + 1, step))


class ShapeRow(NamedTuple):
    """The M and N of some products."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]


class DepthRow(NamedTuple):
    """One K of a kind."""

    k: int  # K of the dense instruction; a sparse one has twice as many
    code: int = 0  # in the descriptor's field of K
    shapes: dict[int, ShapeRow] = {}  # noqa: RUF012  # M and N by cta_group, where they are not those of every K
    multiplicands: tuple[Format, ...] = ()  # types that A and B may have; empty: those of the kind
    sparse: bool = True  # .sp has twice this K
    stationary: bool = True  # .ws has this K
    absolute: bool = False  # a row in shared memory may go on at another address: bit 52 of its descriptor


class KindRow(NamedTuple):
    """The types, the K and the block scales of one `.kind`."""

    multiplicands: dict[Format, int]  # types of A and B, with their codes in the instruction descriptor
    accumulators: dict[Format, int]  # types of D, with their codes; block-scaled kinds have no such field
    depths: tuple[DepthRow, ...]  # the first is the one that every target has
    sizes: dict[str | None, int] = {}  # noqa: RUF012  # elements of A's row per scale by .scale_vectorsize; empty: no block scales
    scales: dict[int, tuple[Format, ...]] = {}  # noqa: RUF012  # types of the scales by elements per scale, the usual one first
    depth_bits: tuple[int, ...] = ()  # bits of the descriptor's field of K, from low to high
    reserved: dict[str, int] = {}  # noqa: RUF012  # bits of the descriptor that are 0, as messages name them

    @property
    def k(self) -> int:
        """K of the dense instruction that every target has."""
        return self.depths[0].k


F8F6F4 = {E4M3: 0, E5M2: 1, E2M3: 3, E3M2: 4, E2M1: 5}  # codes in the instruction descriptor: tables 42 to 44
ONE_SIZE = {1: ShapeRow((128,), _multiples(8, 256, 8)), 2: ShapeRow((256,), _multiples(16, 256, 16))}  # one M for each cta_group
BY_K_64, BY_K_96 = DepthRow(64), DepthRow(96, code=1, shapes=ONE_SIZE, sparse=False, absolute=True)
UNSCALED = {"6": 1 << 6, "23": 1 << 23, "29": 1 << 29}
SCALED = {"0, 1 and 3": 0b1011, "6": 1 << 6, "24 to 26": 0b111 << 24}
# Rubin's, after CUTLASS 4.8: mma_traits_sm107.hpp, mma_sm107_umma.hpp and, of the descriptor, CuTe DSL's Tcgen05InstrDesc,
# Tcgen05MxInstrDesc and Tcgen05MxOmmaInstrDesc. PTX ISA 9.4, 9.7.18.10.7, has block16 with K = 128, sparse 256. 9.4 itself was not read
WIDE_SIZE = {1: ShapeRow((128,), _multiples(16, 256, 16)), 2: ShapeRow((256,), _multiples(32, 256, 32))}
FP8_K_64 = DepthRow(64, code=1, shapes=WIDE_SIZE, multiplicands=(E4M3, E5M2), sparse=False, stationary=False)
SCALED_K_64, BY_K_128 = DepthRow(64, code=1, shapes=ONE_SIZE, sparse=False), DepthRow(128, code=2, shapes=ONE_SIZE)

# PTX ISA tables 39, 42 to 44, 56 and 57; K = 96, which has no table: 9.7.16.4.2
KINDS: dict[str, KindRow] = {
    "f16": KindRow({F16: 0, BF16: 1}, {F16: 0, F32: 1}, (DepthRow(16),), reserved=UNSCALED),
    "tf32": KindRow({TF32: 2}, {F32: 1}, (DepthRow(8),), reserved=UNSCALED),
    "f8f6f4": KindRow(
        F8F6F4, {F16: 0, F32: 1}, (DepthRow(32), FP8_K_64), depth_bits=(29,), reserved={"6": 1 << 6, "23": 1 << 23}
    ),
    "i8": KindRow({U8: 0, S8: 1}, {S32: 2}, (DepthRow(32),), reserved=UNSCALED),
    "mxf8f6f4": KindRow(
        F8F6F4, {F32: 0}, (DepthRow(32), SCALED_K_64), {None: 32, "scale_vec::1X": 32, "block32": 32}, {32: (UE8M0,)},
        depth_bits=(31,), reserved=SCALED,
    ),
    "mxf4": KindRow(
        {E2M1: 1}, {F32: 0}, (BY_K_64, BY_K_96), {None: 32, "scale_vec::2X": 32, "block32": 32}, {32: (UE8M0,)},
        depth_bits=(31,), reserved=SCALED,
    ),
    "mxf4nvf4": KindRow(
        {E2M1: 1}, {F32: 0}, (BY_K_64, BY_K_96, BY_K_128), {"scale_vec::2X": 32, "scale_vec::4X": 16, "block32": 32, "block16": 16},
        {32: (UE8M0, UE4M3, UE5M3), 16: (UE4M3, UE8M0, UE5M3)}, depth_bits=(31, 3),
        reserved={"0 and 1": 0b11, "6": 1 << 6, "25 and 26": 0b11 << 25},
    ),
}  # fmt: skip
SCALED_KINDS = tuple(name for name, row in KINDS.items() if row.sizes)
FP4_KINDS = ("mxf4", "mxf4nvf4")  # whose operands are packed, two elements a byte
SCALE_CODES = {UE4M3: 0, UE8M0: 1, UE5M3: 2}  # in the descriptor, from bit 23 on
SCALE_IDS = {1: (0, 1, 2, 3), 2: (0, 2), 4: (0,), 3: (0, 1, 2, 3), 6: (0, 2), 8: (0,)}  # valid IDs by scales per row: 9.7.16.10.7
USUAL_SIZES = {  # the .scale_vectorsize that every target has, and the types of the scales
    "mxf8f6f4": ((None, UE8M0),), "mxf4": ((None, UE8M0),), "mxf4nvf4": (("block16", UE4M3), ("block16", UE8M0), ("block32", UE8M0)),
}  # fmt: skip
# M and N by family and cta_group: table 39
STATIONARY_SHAPES = {False: ShapeRow((32, 64, 128), (64, 128, 256)), True: ShapeRow((32, 64, 128), (64, 128))}  # by sparsity
INTEGER_COLUMNS = {1: (8, 16, 24, *_multiples(32, 256, 16)), 2: _multiples(32, 256, 32)}
COLUMNS = {1: _multiples(8, 256, 8), 2: _multiples(16, 256, 16)}
