"""The family tcgen05: its instructions as PTX spells them, and products, which are an MMA together with its instruction descriptor.

PTX leaves the shape and the types of `tcgen05.mma` to a 32-bit instruction descriptor. `Tcgen05Mma` is what PTX spells;
`Tcgen05Product` adds what the descriptor says, spelled as wgmma spells it:
`tcgen05.mma.cta_group::1.kind::f16.m128n256k16.f32.f16.f16`. `tcemu.engine.isa.tcgen05_descriptors` translates between the two.

Source: PTX ISA 9.7.16. Legality is stated in `tcemu.engine.isa.syntax_table`; the assembler's answers are in tests/assembler.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from re import fullmatch

from tcemu.engine.formats.number_formats import F16, Format
from tcemu.engine.isa.families import SYNC, BlockScaling, Instruction, MatrixMultiply, Slots, Sparsity
from tcemu.engine.isa.tcgen05_kinds import COLUMNS, INTEGER_COLUMNS, KINDS, SCALED_KINDS, STATIONARY_SHAPES, USUAL_SIZES, DepthRow, ShapeRow
from tcemu.engine.layouts.tensor_memory import MOVE_REGISTERS

SECTION = "9.7.16"
CTA_GROUPS = (1, 2)
COLLECTOR_USES = ("fill", "use", "lastuse", "discard")
A_COLLECTORS = tuple(f"a::{use}" for use in COLLECTOR_USES)
B_COLLECTORS = tuple(f"b{buffer}::{use}" for buffer in range(4) for use in COLLECTOR_USES)
DISCARD, WS_DISCARD = "a::discard", "b0::discard"  # where a spelling has no .collector: 9.7.16.10.9
MAX_LOAD_REGISTERS = 128
LOAD_NUMS = tuple(1 << i for i in range(8))
COPY_MULTICASTS = {  # .multicast of each .cp shape: 9.7.16.9.2
    "128x256b": (None,), "4x256b": (None,), "128x128b": (None,), "64x128b": ("warpx2::02_13", "warpx2::01_23"), "32x128b": ("warpx4",),
}  # fmt: skip
COPY_SOURCES = ("b6x16_p32", "b4x16_p64")  # with the destination format b8x16
MAX_ALLOCATION = 512  # columns that one statement allocates: 9.7.16.7.1


@dataclass(frozen=True, kw_only=True, repr=False)
class Tcgen05(Instruction):
    """An instruction of the family: the base of its records."""

    def operand_fits(self, name: str, text: str) -> bool:
        if name in BRACKETED_OPERANDS or name in BRACED_OPERANDS:
            return text.startswith("[" if name in BRACKETED_OPERANDS else "{")
        return not text.startswith(("[", "{"))

    def operand_problem(self, name: str, text: str) -> str | None:
        if self.operand_fits(name, text):
            return self._value_problem(name, text)
        expected = "an address in brackets" if name in BRACKETED_OPERANDS else "a vector" if name in BRACED_OPERANDS else "a single value"
        return f"{name} is {text}, but takes {expected}"

    def _value_problem(self, name: str, text: str) -> str | None:
        return None

    def _group_slot(self, cta_group: int) -> tuple[str]:
        return (f"cta_group::{cta_group}",)


BRACKETED_OPERANDS = frozenset({"dst", "taddr", "d", "a_tmem", "sp_meta", "scale_a", "scale_b", "mbar"})
BRACED_OPERANDS = frozenset({"r", "disable_output_lane"})


@dataclass(frozen=True, kw_only=True, repr=False)
class Tcgen05Allocation(Tcgen05):
    """`tcgen05.alloc`, `.dealloc` and `.relinquish_alloc_permit` (9.7.16.7)."""

    name: str  # "tcgen05.alloc", "tcgen05.dealloc", "tcgen05.relinquish_alloc_permit"
    cta_group: int
    space: str | None = None  # "shared::cta"; None is generic

    @property
    def family(self) -> str:
        return self.name

    @property
    def slots(self) -> Slots:
        slots: Slots = {"cta_group": self._group_slot(self.cta_group), **SYNC}
        if self.name == "tcgen05.alloc":
            slots["space"] = (self.space,)
        return slots if self.name == "tcgen05.relinquish_alloc_permit" else {**slots, "type": ("b32",)}

    @property
    def operand_forms(self) -> tuple[tuple[str, ...], ...]:
        return ({"tcgen05.alloc": ("dst", "columns"), "tcgen05.dealloc": ("address", "columns")}.get(self.name, ()),)

    def _value_problem(self, name: str, text: str) -> str | None:
        if name != "columns" or not fullmatch(r"-?\w+", text) or not text[0].isdigit():
            return None
        count, power = int(text, 0), self.name == "tcgen05.alloc"
        if 32 <= count <= MAX_ALLOCATION and count % 32 == 0 and (not power or not count & (count - 1)):
            return None
        return f"nCols is {text}, but takes {'a power of 2' if power else 'a multiple of 32'} from 32 to {MAX_ALLOCATION}"


@dataclass(frozen=True, kw_only=True, repr=False)
class Tcgen05Move(Tcgen05):
    """`tcgen05.ld`, `tcgen05.ld.red` and `tcgen05.st`: registers of a warp and tensor memory (9.7.16.8)."""

    name: str  # "tcgen05.ld", "tcgen05.st"
    tile: str  # "32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"
    num: int
    packed: bool = False  # .pack::16b of ld, .unpack::16b of st
    reduction: str | None = None  # "min" or "max" of .red
    absolute: bool = False  # .abs of .red
    nan: bool = False  # .NaN of .red
    element: str = "b32"  # "b32"; "f32", "u32", "s32" of .red

    @property
    def family(self) -> str:
        return "tcgen05.ld.red" if self.reduction else self.name

    @property
    def opcode(self) -> str:
        return self.family

    @property
    def shape(self) -> str:
        return self.tile

    @property
    def slots(self) -> Slots:
        tile = {"shape": (self.tile,), "num": (f"x{self.num}",)}
        if self.name == "tcgen05.st":
            return {**SYNC, **tile, "packing": ("unpack::16b" if self.packed else None,), "type": (self.element,)}
        return {
            **SYNC,
            **tile,
            "packing": ("pack::16b" if self.packed else None,),
            "operation": (self.reduction,),
            "absolute": ("abs" if self.absolute else None,),
            "nan": ("NaN" if self.nan else None,),
            "type": (self.element,),
        }

    @property
    def operand_forms(self) -> tuple[tuple[str, ...], ...]:
        split = ("half_split_offset",) if self.tile == "16x32bx2" else ()
        if self.name == "tcgen05.st":
            return (("taddr", *split, "r"),)
        return (("r", *(("reduced",) if self.reduction else ()), "taddr", *split),)

    def _value_problem(self, name: str, text: str) -> str | None:
        if name == "half_split_offset" and not fullmatch(r"-?\d\w*", text):
            return f"immHalfSplitoff is {text}, but takes a constant"
        return None

    def register_count(self, operand: str) -> int:
        if operand != "r":
            raise ValueError(f"{self}: operand {operand!r} is no vector of registers")
        return MOVE_REGISTERS[self.tile] * self.num


@dataclass(frozen=True, kw_only=True, repr=False)
class Tcgen05Order(Tcgen05):
    """`tcgen05.wait` and `tcgen05.fence` (9.7.16.8.5, 9.7.16.11)."""

    name: str  # "tcgen05.wait::ld", "tcgen05.wait::st", "tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync"

    @property
    def family(self) -> str:
        return self.name.partition("::")[0]

    @property
    def opcode(self) -> str:
        return self.name

    @property
    def slots(self) -> Slots:
        return SYNC if self.family == "tcgen05.wait" else {}


@dataclass(frozen=True, kw_only=True, repr=False)
class Tcgen05Copy(Tcgen05):
    """`tcgen05.cp`: from shared memory to tensor memory (9.7.16.9.2)."""

    cta_group: int
    tile: str  # "128x256b", "4x256b", "128x128b", "64x128b", "32x128b"
    multicast: str | None = None  # "warpx2::02_13", "warpx2::01_23", "warpx4"
    source: str | None = None  # "b6x16_p32", "b4x16_p64": the packed format, which becomes b8x16

    @property
    def family(self) -> str:
        return "tcgen05.cp"

    @property
    def shape(self) -> str:
        return self.tile

    @property
    def slots(self) -> Slots:
        return {
            "cta_group": self._group_slot(self.cta_group),
            "shape": (self.tile,),
            "multicast": (self.multicast,),
            "formats": ("b8x16" if self.source else None, self.source),
        }

    @property
    def operand_forms(self) -> tuple[tuple[str, ...], ...]:
        return (("taddr", "s_desc"),)


@dataclass(frozen=True, kw_only=True, repr=False)
class Tcgen05Shift(Tcgen05):
    """`tcgen05.shift`: rows of tensor memory down by one (9.7.16.9.3)."""

    cta_group: int

    @property
    def family(self) -> str:
        return "tcgen05.shift"

    @property
    def slots(self) -> Slots:
        return {"cta_group": self._group_slot(self.cta_group), "direction": ("down",)}

    @property
    def operand_forms(self) -> tuple[tuple[str, ...], ...]:
        return (("taddr",),)


@dataclass(frozen=True, kw_only=True, repr=False)
class Tcgen05Commit(Tcgen05):
    """`tcgen05.commit`: an arrival at an mbarrier when earlier MMAs, copies and shifts are complete (9.7.16.12)."""

    cta_group: int
    space: str | None = None  # "shared::cluster"; None is generic
    multicast: bool = False

    @property
    def family(self) -> str:
        return "tcgen05.commit"

    @property
    def slots(self) -> Slots:
        return {
            "cta_group": self._group_slot(self.cta_group),
            "completion": ("mbarrier::arrive::one",),
            "space": (self.space,),
            "multicast": ("multicast::cluster" if self.multicast else None,),
            "type": ("b64",),
        }

    @property
    def operand_forms(self) -> tuple[tuple[str, ...], ...]:
        return (("mbar", "cta_mask") if self.multicast else ("mbar",),)


@dataclass(frozen=True, kw_only=True, repr=False)
class Tcgen05Mma(Tcgen05):
    """`tcgen05.mma`, `.mma.sp`, `.mma.ws` and `.mma.ws.sp` as PTX spells them (9.7.16.10.9)."""

    cta_group: int
    kind: str  # one of KINDS
    sparse: bool = False
    ws: bool = False  # .ws: weight stationary, B in the collector
    size: str | None = None  # of .block_scale: "scale_vec::1X", "block32", ...; None: omitted
    ashift: bool = False
    collector: str = DISCARD  # "a::fill", "b0::use", ...

    @property
    def family(self) -> str:
        return f"tcgen05.mma{'.ws' if self.ws else ''}{'.sp' if self.sparse else ''}"

    @property
    def opcode(self) -> str:
        return "tcgen05.mma.ws" if self.ws else "tcgen05.mma"

    @property
    def scaled(self) -> bool:
        """True if the kind has block scales."""
        return self.kind in SCALED_KINDS

    @property
    def slots(self) -> Slots:
        return {
            "sparsity": ("sp" if self.sparse else None,),
            "cta_group": self._group_slot(self.cta_group),
            "kind": (f"kind::{self.kind}",),
            "block_scale": ("block_scale" if self.scaled else None,),
            "scale_vec": (self.size,),
            "ashift": ("ashift" if self.ashift else None,),
            "collector": (f"collector::{self.collector}",),
        }

    @property
    def default_slots(self) -> frozenset[str]:
        return frozenset({"collector"} if self.collector == (WS_DISCARD if self.ws else DISCARD) else ())

    @property
    def scale_count(self) -> int:
        """Scales per row of A and per column of B, with the usual K; 0 without block scales."""
        return count_scales(self, KINDS[self.kind].k)

    @property
    def operand_forms(self) -> tuple[tuple[str, ...], ...]:
        """A lies in shared memory behind `a_desc` or in tensor memory at `a_tmem`; .ashift takes it from tensor memory only."""
        meta = ("sp_meta",) if self.sparse else ()
        endings: tuple[tuple[str, ...], ...] = (("enable_input_d",),)
        if self.scaled:
            endings = (("scale_a", "scale_b", "enable_input_d"),)
        elif self.ws:
            endings = (*endings, ("enable_input_d", "zero_column_mask"))
        else:
            scaled = (("enable_input_d", "scale_input_d"),) if self.kind in ("f16", "tf32") else ()
            endings = (*endings, *scaled)
            endings = (*endings, *(("disable_output_lane", *ending) for ending in endings))
        places = ("a_tmem",) if self.ashift else ("a_desc", "a_tmem")
        return tuple(("d", a, "b_desc", *meta, "idesc", *ending) for ending in endings for a in places)

    def register_count(self, operand: str) -> int:
        if operand == "disable_output_lane":
            return 4 * self.cta_group
        raise ValueError(f"{self}: operand {operand!r} is no vector of registers")

    def _value_problem(self, name: str, text: str) -> str | None:
        if name == "scale_input_d" and not (fullmatch(r"\d\w*", text) and int(text, 0) <= 15):
            return f"scale-input-d is {text}, but takes a constant from 0 to 15"
        return None


@dataclass(frozen=True, kw_only=True, repr=False)
class Tcgen05Product(MatrixMultiply):
    """A `tcgen05.mma` with its instruction descriptor: D = A·B + D of a known shape and known types.

    M, N and K are those of the whole product, of both CTAs with `cta_group` 2. Where the elements lie, and the collectors, belong to the
    statement and change no result; they are not part of this record.
    """

    kind: str  # type: ignore[misc]  # required here, optional in the base
    cta_group: int = 1
    ws: bool = False
    size: str | None = None  # as in `Tcgen05Mma`

    @property
    def instruction(self) -> Tcgen05Mma:
        """The instruction as PTX spells it, without what the descriptor says."""
        collector = WS_DISCARD if self.ws else DISCARD
        return Tcgen05Mma(cta_group=self.cta_group, kind=self.kind, sparse=self.sparse, ws=self.ws, size=self.size, collector=collector)

    @property
    def family(self) -> str:
        return self.instruction.family

    @property
    def opcode(self) -> str:
        return self.instruction.opcode

    @property
    def slots(self) -> Slots:
        slots = self.instruction.slots
        return {
            **{name: slots[name] for name in ("sparsity", "cta_group", "kind", "block_scale", "scale_vec")},
            "shape": (self.shape,),
            "satfinite": ("satfinite" if self.satfinite else None,),
            "type": (self.d.name, self.a.name, self.b.name, None if self.scaling is None else self.scaling.format.name),
        }

    @property
    def depth(self) -> DepthRow:
        """The row of the product's K."""
        found = find_depth(self.instruction, self.k)
        assert found is not None, f"{self}: {product_problem(self)}"
        return found

    @property
    def warps(self) -> int:
        """Warps whose registers hold an operand: one, since a single thread issues the instruction."""
        return 1

    @property
    def metadata_operand(self) -> str:
        return "sp_meta" if self.sparse else ""

    @property
    def selectors(self) -> tuple[int, ...]:
        """Valid sparsity selectors in the instruction descriptor (9.7.16.10.8): a field of two bits for 16- and 32-bit types."""
        return (0, 1, 2, 3) if self.sparse and self.kind in ("f16", "tf32") else (0,) if self.sparse else ()

    @property
    def operand_forms(self) -> tuple[tuple[str, ...], ...]:
        return self.instruction.operand_forms

    def register_count(self, operand: str) -> int:
        return self.instruction.register_count(operand)


# ---- which products exist


def find_depth(op: Tcgen05Mma, k: int) -> DepthRow | None:
    """Return the row of a K of an instruction, or None if no target has it.

    Args:
        op: Instruction.
        k: K of the product; of a sparse one all elements count.
    """
    rows = (row for row in KINDS[op.kind].depths if (row.sparse or not op.sparse) and (row.stationary or not op.ws))
    return next((row for row in rows if row.k * (2 if op.sparse else 1) == k), None)


def count_scales(op: Tcgen05Mma, k: int) -> int:
    """Return the scales per row of A and per column of B; 0 without block scales.

    Args:
        op: Instruction.
        k: K of the dense instruction; a sparse one has as many scales for twice the elements.
    """
    return k // KINDS[op.kind].sizes[op.size] if op.scaled else 0


def product_shapes(op: Tcgen05Mma, depth: DepthRow | None = None) -> ShapeRow:
    """Return the M and N that an instruction's descriptor may have.

    Args:
        op: Instruction.
        depth: Row of the product's K; None: the K that every target has.

    Source: PTX ISA table 39.
    """
    if op.ws:
        return STATIONARY_SHAPES[op.sparse]
    if depth is not None and depth.shapes:
        return depth.shapes[op.cta_group]
    columns = (INTEGER_COLUMNS if op.kind == "i8" else COLUMNS)[op.cta_group]
    if op.cta_group == 1:
        return ShapeRow((128,) if op.scaled else (64, 128), columns)
    return ShapeRow((256,) if op.scaled and op.sparse else (128, 256), columns)


def scale_formats(op: Tcgen05Mma) -> tuple[Format, ...]:
    """Return the formats that the block scales have on some target, the usual one first (table 44, and the tables of 9.7.16.10.7).

    Args:
        op: Block-scaled instruction.
    """
    row = KINDS[op.kind]
    return row.scales[row.sizes[op.size]]


def product_problem(op: Tcgen05Product) -> str | None:
    """Return what is wrong with a product's shape and types on every target, or None.

    Args:
        op: Product whose instruction exists.

    Source: PTX ISA tables 39, 42 to 44.
    """
    row, instruction = KINDS[op.kind], op.instruction
    for name, fmt, known in (("A", op.a, row.multiplicands), ("B", op.b, row.multiplicands), ("D", op.d, row.accumulators)):
        if fmt not in known:
            return f".kind::{op.kind} has {name} of {', '.join(map(str, known))}, not {fmt}"
    if op.kind == "f16" and op.a != op.b:
        return "A and B of .kind::f16 have one type; no source says what f16 with bf16 gives"
    if op.d == F16 and op.kind == "f16" and op.a != F16:
        return "D is f16 only where A and B are f16"
    if op.satfinite and op.kind != "i8":
        return "only .kind::i8 saturates"
    depth = find_depth(instruction, op.k)
    if depth is None:
        return f"K of .kind::{op.kind}{' sparse' if op.sparse else ''} is {row.k * (2 if op.sparse else 1)}, not {op.k}"
    for name, fmt in (("A", op.a), ("B", op.b)):
        if depth.multiplicands and fmt not in depth.multiplicands:
            return f"K = {op.k} of .kind::{op.kind} has {name} of {', '.join(map(str, depth.multiplicands))}, not {fmt}"
    shapes = product_shapes(instruction, depth)
    for name, size, sizes in (("M", op.m, shapes.rows), ("N", op.n, shapes.columns)):
        if size not in sizes:
            return f"{name} is one of {', '.join(map(str, sizes))}, not {size}"
    return _scaling_problem(op, depth)


def _scaling_problem(op: Tcgen05Product, depth: DepthRow) -> str | None:
    instruction = op.instruction
    if not instruction.scaled:
        return f".kind::{op.kind} has no block scales" if op.scaling is not None else None
    if op.scaling is None:
        return f".kind::{op.kind} has block scales; give their type after that of B"
    count, formats = count_scales(instruction, depth.k), scale_formats(instruction)
    if op.scaling.format not in formats:
        return f"the scales are {' or '.join(map(str, formats))}, not {op.scaling.format}"
    return None if op.scaling.count == count else f"a row has {count} scales, not {op.scaling.count}"


def make_product(
    op: Tcgen05Mma, m: int, n: int, d: Format, a: Format, b: Format | None = None, *,
    scale: Format | None = None, satfinite: bool = False, k: int | None = None,
) -> Tcgen05Product:  # fmt: skip
    """Return the product of an instruction with a shape and types, unchecked; `product_problem` says what is wrong with it.

    Args:
        op: Instruction.
        m: Rows of D.
        n: Columns of D.
        d: Format of D.
        a: Format of A.
        b: Format of B; None: as A.
        scale: Format of the block scales; None: the usual one of the instruction.
        satfinite: True if an integer sum saturates.
        k: K, of a sparse product all elements; None: the K that every target has.
    """
    usual = KINDS[op.kind].k
    depth = None if k is None else find_depth(op, k)
    scaling = None
    if op.scaled:
        scaling = BlockScaling(count_scales(op, usual if depth is None else depth.k), scale or scale_formats(op)[0])
    return Tcgen05Product(
        m=m, n=n, k=usual * (2 if op.sparse else 1) if k is None else k, d=d, a=a, b=b or a, kind=op.kind, cta_group=op.cta_group,
        ws=op.ws, size=op.size, sparsity=Sparsity() if op.sparse else None, scaling=scaling, satfinite=satfinite,
    )  # fmt: skip


# ---- the usual products


@cache
def usual_products() -> tuple[Tcgen05Product, ...]:
    """Return the largest product of one CTA for each kind, sparsity, set of types and sort of scales: M = 128, N = 256."""
    return tuple(op for kind, sparse in product(KINDS, (False, True)) for op in _usual_products(kind, sparse))


def _usual_products(kind: str, sparse: bool) -> Iterator[Tcgen05Product]:
    row = KINDS[kind]
    for size, scale in USUAL_SIZES.get(kind, ((None, None),)):
        op = Tcgen05Mma(cta_group=1, kind=kind, sparse=sparse, size=size)
        for d, a, b in product(row.accumulators, row.multiplicands, row.multiplicands):
            for satfinite in (False, True) if kind == "i8" else (False,):
                made = make_product(op, 128, 256, d, a, b, scale=scale, satfinite=satfinite)
                if product_problem(made) is None:
                    yield made


@cache
def _products_by_operands() -> dict[tuple, Tcgen05Product]:
    return {_operand_key(op): op for op in usual_products()}


def _operand_key(op: MatrixMultiply) -> tuple:
    return op.a, op.b, op.d, op.satfinite, op.sparse, op.scaling, op.scaling and op.kind


def find_counterpart(op: MatrixMultiply) -> Tcgen05Product | None:
    """Return the tcgen05 product with the types, scales and sparsity of another instruction.

    Args:
        op: Instruction.

    Returns:
        The usual product, or None if tcgen05 does not multiply such operands.
    """
    return _products_by_operands().get(_operand_key(op))
