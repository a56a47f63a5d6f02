"""Tensor-core instructions as values: a record for each family under the small base `Instruction`.

A record's fields are the qualifiers that tell its spellings apart; everything else (operands, sizes, the spelling itself) follows from
them.
Optional parts are records too: `Sparsity` and `BlockScaling`. Which instructions exist is stated in `tcemu.engine.isa.syntax_table`, which
target has them in `tcemu.engine.isa.legality`, and what they compute in `tcemu.architectures`.

`tcemu.engine.isa.tcgen05` has the records of section 9.7.16.

To add a family: a record here, with its qualifiers by slot in the order of the manual's syntax block, and its rows in `syntax_table`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TypeVar

from tcemu.engine.formats.number_formats import F16, Format
from tcemu.engine.layouts.fragment_layouts import LANES, REGISTER_BITS

Slots = dict[str, tuple[str | None, ...]]  # the qualifiers of a spelling by slot, in the manual's order; None stands for an absent one

FAMILIES = (
    "mma", "mma.sp", "wmma.load", "wmma.store", "wmma.mma", "ldmatrix", "stmatrix", "movmatrix", "wgmma", "wgmma.sp",
    "wgmma.fence", "wgmma.commit_group", "wgmma.wait_group",
    "tcgen05.mma", "tcgen05.mma.sp", "tcgen05.mma.ws", "tcgen05.mma.ws.sp", "tcgen05.ld", "tcgen05.ld.red", "tcgen05.st", "tcgen05.cp",
    "tcgen05.shift", "tcgen05.alloc", "tcgen05.dealloc", "tcgen05.relinquish_alloc_permit", "tcgen05.wait", "tcgen05.fence",
    "tcgen05.commit",
)  # fmt: skip
DEFAULT_SCALE_COUNT = {"mxf4": 2, "mxf8f6f4": 1}  # .scale_vec where a spelling omits it: 9.7.14.5.14; .kind::mxf4nvf4 has no default
DEFAULT_ROUNDING = "rn"  # 9.7.14.5.14, 9.7.14.4.5
SYNC: Slots = {"sync": ("sync",), "aligned": ("aligned",)}
WMMA_F16_REGISTERS = 8  # registers per lane of A and B with .f16, whatever the shape: 9.7.14.4.1


@dataclass(frozen=True)
class Sparsity:
    """Two of four elements of A are stored, and metadata names them (`.sp`)."""

    ordered: bool = False  # .sp::ordered_metadata


@dataclass(frozen=True)
class BlockScaling:
    """Blocks along K of A and B have scales of their own (`.block_scale`)."""

    count: int  # scales per row of A and per column of B: 1, 2 or 4 (.scale_vec)
    format: Format  # number format of a scale (.stype)

    @property
    def byte_ids(self) -> tuple[int, ...]:
        """Valid values of byte-id-a and byte-id-b (table 37)."""
        return {1: (0, 1, 2, 3), 2: (0, 2), 4: (0,)}[self.count]

    @property
    def thread_ids(self) -> dict[str, tuple[int, ...]]:
        """Valid values of thread-id-a and thread-id-b (table 37), by "a" and "b"."""
        return {"a": (0, 1), "b": (0, 1, 2, 3)}


@dataclass(frozen=True, kw_only=True, repr=False)
class Instruction(ABC):
    """One PTX instruction of sections 9.7.14 to 9.7.16: the base of the records of all families.

    Instructions are hashable, so they may be static under `jit`. `tcemu.parse` makes one from any spelling, and `str(op)` is the canonical
    spelling: the manual's order, defaults left out. Two instructions are equal if they have the same spelling; `arguments` and `guard` are
    not compared.

    Example:
        >>> import tcemu
        >>> tcemu.parse("f16 sparse").sparse
        True
    """

    arguments: tuple[str, ...] = field(default=(), compare=False)  # operands of the parsed statement, as text
    guard: str | None = field(default=None, compare=False)  # guard predicate of the parsed statement, as text

    def __str__(self) -> str:
        return spell(self)

    def __repr__(self) -> str:
        return f"tcemu.parse({spell(self)!r})"

    @property
    @abstractmethod
    def family(self) -> str:
        """The family's name, one of FAMILIES."""

    @property
    def opcode(self) -> str:
        """The name before the qualifiers, such as "wmma.load.a"."""
        return self.family

    @property
    def slots(self) -> Slots:
        """The qualifiers by slot, in the order of the manual's syntax block."""
        return SYNC

    @property
    def default_slots(self) -> frozenset[str]:
        """The slots that hold their default, so that a spelling may omit them."""
        return frozenset()

    @property
    def shape(self) -> str:
        """The shape qualifier, such as "m16n8k16"; "" if the instruction has no shape."""
        return ""

    @property
    def warps(self) -> int:
        """Warps that execute one instruction together (9.7.15.1)."""
        return 1

    @property
    def matrix_count(self) -> int:
        """Matrices per operand that one warp computes or moves."""
        return 1

    @property
    def operand_forms(self) -> tuple[tuple[str, ...], ...]:
        """The operand lists that a statement may have, in the manual's order and names; a selector pair counts as one operand."""
        return ((),)

    @property
    def operands(self) -> tuple[str, ...]:
        """Every operand of any form of the statement."""
        return tuple(dict.fromkeys(name for form in self.operand_forms for name in form))

    def operand_fits(self, name: str, text: str) -> bool:
        """Return True if the text of an argument may be the operand: this tells forms of equal length apart."""
        return True

    def operand_problem(self, name: str, text: str) -> str | None:
        """Return what is wrong with the text of one argument, or None."""
        return None

    @property
    def argument_form(self) -> tuple[str, ...]:
        """The operand form that the arguments fit; () if they fit none."""
        same = [form for form in self.operand_forms if len(form) == len(self.arguments)]
        fit = (form for form in same if all(map(self.operand_fits, form, self.arguments)))
        return next(fit, same[0] if same else ())

    def matrix_shape(self, operand: str) -> tuple[int, int]:
        """Return the rows and columns of the matrix behind an operand.

        "a" is M x K (sparse: the stored M x K/2), "b" is K x N, "c" and "d" are M x N (9.7.14.1), "scale_a" and "scale_b" follow table 35,
        "e" and "sp_meta" are M x chunks of four bits (9.7.14.6.1). Matrix movers have `num` matrices of M x N in "r", "d" or "a". The "r"
        of wmma.load and wmma.store is the matrix that is loaded or stored.

        Raises:
            ValueError: The instruction has no such operand, or the operand is no matrix.
        """
        matrices = self._matrices()
        if operand not in matrices:
            raise ValueError(
                f"{self}: operand {operand!r} is no matrix of this instruction; expected one of {', '.join(matrices) or 'none'}"
            )
        return matrices[operand]

    def operand_format(self, operand: str) -> Format:
        """Return the number format of an operand's elements.

        Raises:
            ValueError: The operand holds no matrix elements, or only raw bits.
        """
        raise ValueError(f"{self}: operand {operand!r} holds no matrix elements")

    def container_bits(self, operand: str) -> int:
        """Return the bits that one element of an operand takes in a register.

        The narrow types take 8 bits under .kind::f8f6f4 and .kind::mxf8f6f4 (9.7.14.5.14), and after ldmatrix unpacked them (9.7.14.5.15).

        Raises:
            ValueError: The operand holds no matrix elements.
        """
        return self.operand_format(operand).bits

    def register_bits(self, operand: str) -> int:
        """Return the bits of one register of an operand, as PTX declares it: 64 for .f64, else 32."""
        try:
            return 64 if self.operand_format(operand).bits == 64 else 32
        except ValueError:
            return 32

    def copy_count(self, operand: str) -> int:
        """Return how many copies of each element the warp holds."""
        return 1

    def register_count(self, operand: str) -> int:
        """Return the number of 32-bit registers per lane of an operand; an .f64 counts as two.

        Raises:
            ValueError: The operand does not exist or is not in registers.
        """
        rows, columns = self.matrix_shape(operand)
        elements = self.matrix_count * self.copy_count(operand) * rows * columns
        return elements * self.container_bits(operand) // (LANES * REGISTER_BITS * self.warps)

    def _matrices(self) -> dict[str, tuple[int, int]]:
        return {}


Record = TypeVar("Record", bound=Instruction)


@dataclass(frozen=True, kw_only=True, repr=False)
class MatrixMultiply(Instruction):
    """An instruction that computes D = A·B + C: the base of `Mma`, `Wmma` and `Wgmma`."""

    m: int
    n: int
    k: int
    d: Format
    a: Format
    b: Format
    kind: str | None = None  # "f8f6f4", "mxf8f6f4", "mxf4", "mxf4nvf4"
    sparsity: Sparsity | None = None
    scaling: BlockScaling | None = None
    rounding: str | None = None  # f64: "rn" (also when omitted), "rz", "rm", "rp"; otherwise None
    satfinite: bool = False
    bit_op: str | None = None  # b1: "xor" or "and", followed by popc

    @property
    def shape(self) -> str:
        return f"m{self.m}n{self.n}k{self.k}"

    @property
    def sparse(self) -> bool:
        """True if A is sparse."""
        return self.sparsity is not None

    @property
    def ordered(self) -> bool:
        """True if the first index of each metadata field must be the lower one (`.sp::ordered_metadata`)."""
        return self.sparsity is not None and self.sparsity.ordered

    @property
    def accumulator(self) -> Format:
        """The format of C; of D where the instruction accumulates in place."""
        return self.d

    @property
    def accumulator_operand(self) -> str:
        """The operand that holds C: "c", or "d" where the instruction accumulates in place."""
        return "d"

    def require_scaling(self) -> BlockScaling:
        """Return the instruction's block scaling.

        Raises:
            ValueError: The instruction has no block scales.
        """
        if self.scaling is None:
            raise ValueError(f"{self} has no block scales")
        return self.scaling

    @property
    def scale_block(self) -> int:
        """Elements along K that share a block scale; 0 without block scales."""
        return 0 if self.scaling is None else self.k // self.scaling.count

    @property
    def chunk_size(self) -> int:
        """Elements along K that one 4-bit metadata field describes, half of which are stored; 0 if dense (9.7.14.6.1)."""
        return {32: 2, 4: 8}.get(self.container_bits("a"), 4) if self.sparse else 0

    @property
    def metadata_operand(self) -> str:
        """The operand that holds the sparsity metadata (9.7.14.6.3, 9.7.15.6.3); "" if dense."""
        return ""

    @property
    def selectors(self) -> tuple[int, ...]:
        """Valid sparsity selectors, which say which lanes of a quad hold the metadata (9.7.14.6.1, 9.7.15.6.1); empty if dense."""
        if not self.sparse:
            return ()
        metadata_bits = 4 * self.m * (self.k // self.chunk_size)
        return tuple(range(LANES * REGISTER_BITS * self.warps // metadata_bits))

    def operand_format(self, operand: str) -> Format:
        formats = {"d": self.d, "a": self.a, "b": self.b, self.accumulator_operand: self.accumulator}
        if operand not in formats:
            raise ValueError(f"{self}: operand {operand!r} holds no matrix elements")
        return formats[operand]

    def container_bits(self, operand: str) -> int:
        bits = self.operand_format(operand).bits
        return 8 if operand in ("a", "b") and self.kind in ("f8f6f4", "mxf8f6f4") else bits

    def register_count(self, operand: str) -> int:
        if operand in self.operands and operand in ("scale_a", "scale_b", "e", "sp_meta"):
            return 1
        return super().register_count(operand)

    def _matrices(self) -> dict[str, tuple[int, int]]:
        stored = self.k // 2 if self.sparse else self.k
        matrices = {"d": (self.m, self.n), "a": (self.m, stored), "b": (self.k, self.n), self.accumulator_operand: (self.m, self.n)}
        if self.scaling is not None:
            matrices |= {"scale_a": (self.m, self.scaling.count), "scale_b": (self.scaling.count, self.n)}
        if self.sparse:
            matrices[self.metadata_operand] = (self.m, self.k // self.chunk_size)
        return matrices

    def _sparsity_slot(self) -> tuple[str | None]:
        return (None if self.sparsity is None else "sp::ordered_metadata" if self.sparsity.ordered else "sp",)

    def _bit_op_slot(self) -> tuple[str | None, ...]:
        return (self.bit_op, "popc" if self.bit_op else None)


@dataclass(frozen=True, kw_only=True, repr=False)
class WithC(MatrixMultiply):
    """An instruction whose C and D are separate operands: the base of `Mma` and `Wmma`."""

    c: Format
    alayout: str  # "row" or "col"
    blayout: str

    @property
    def accumulator(self) -> Format:
        return self.c

    @property
    def accumulator_operand(self) -> str:
        return "c"


@dataclass(frozen=True, kw_only=True, repr=False)
class Mma(WithC):
    """`mma` and `mma.sp` (9.7.14.5.14, 9.7.14.6.3)."""

    @property
    def family(self) -> str:
        return "mma.sp" if self.sparse else "mma"

    @property
    def opcode(self) -> str:
        return "mma"

    @property
    def slots(self) -> Slots:
        scaling = self.scaling
        return {
            "sparsity": self._sparsity_slot(),
            **SYNC,
            "shape": (self.shape,),
            "layout": (self.alayout, self.blayout),
            "satfinite": ("satfinite" if self.satfinite else None,),
            "kind": (f"kind::{self.kind}" if self.kind else None,),
            "block_scale": (None if scaling is None else "block_scale",),
            "scale_vec": (None if scaling is None else f"scale_vec::{scaling.count}X",),
            "type": (self.d.name, self.a.name, self.b.name, self.c.name, None if scaling is None else scaling.format.name),
            "bit_op": self._bit_op_slot(),
            "rounding": (self.rounding,),
        }

    @property
    def default_slots(self) -> frozenset[str]:
        rounding = {"rounding"} if self.rounding == DEFAULT_ROUNDING else set()
        usual = self.scaling is not None and self.scaling.count == DEFAULT_SCALE_COUNT.get(self.kind or "")
        return frozenset(rounding | ({"scale_vec"} if usual else set()))

    @property
    def matrix_count(self) -> int:
        """Four M x N x K products for m8n8k4 with f16 (9.7.14.5.1), one otherwise."""
        return 4 if self.shape == "m8n8k4" and self.a == F16 else 1

    @property
    def metadata_operand(self) -> str:
        return "e" if self.sparse else ""

    @property
    def operand_forms(self) -> tuple[tuple[str, ...], ...]:
        names = ("d", "a", "b", "c") + (("e", "f") if self.sparse else ())
        return (names + (("scale_a", "selector_a", "scale_b", "selector_b") if self.scaling is not None else ()),)


@dataclass(frozen=True, kw_only=True, repr=False)
class Wmma(WithC):
    """`wmma.mma` (9.7.14.4.5)."""

    @property
    def family(self) -> str:
        return "wmma.mma"

    @property
    def slots(self) -> Slots:
        # .atype and .btype are left out where they are .f16 (9.7.14.4.5)
        multiplicands = (None, None) if self.a == F16 else (self.a.name, self.b.name)
        return {
            "bit_op": self._bit_op_slot(),
            **SYNC,
            "layout": (self.alayout, self.blayout),
            "shape": (self.shape,),
            "rounding": (self.rounding,),
            "type": (self.d.name, *multiplicands, self.c.name),
            "satfinite": ("satfinite" if self.satfinite else None,),
        }

    @property
    def default_slots(self) -> frozenset[str]:
        return frozenset({"rounding"} if self.rounding == DEFAULT_ROUNDING else ())

    @property
    def operand_forms(self) -> tuple[tuple[str, ...], ...]:
        return (("d", "a", "b", "c"),)

    def copy_count(self, operand: str) -> int:
        return _wmma_copies(operand, self.operand_format(operand), self.matrix_shape(operand))


@dataclass(frozen=True, kw_only=True, repr=False)
class Wgmma(MatrixMultiply):
    """`wgmma.mma_async`, dense and `.sp` (9.7.15.5.2, 9.7.15.6.3)."""

    @property
    def family(self) -> str:
        return "wgmma.sp" if self.sparse else "wgmma"

    @property
    def opcode(self) -> str:
        return "wgmma.mma_async"

    @property
    def slots(self) -> Slots:
        return {
            "sparsity": self._sparsity_slot(),
            **SYNC,
            "shape": (self.shape,),
            "satfinite": ("satfinite" if self.satfinite else None,),
            "type": (self.d.name, self.a.name, self.b.name),
            "bit_op": self._bit_op_slot(),
        }

    @property
    def warps(self) -> int:
        return 4

    @property
    def metadata_operand(self) -> str:
        return "sp_meta" if self.sparse else ""

    def operand_fits(self, name: str, text: str) -> bool:
        return name != "a_desc" or not text.startswith("{")

    @property
    def operand_forms(self) -> tuple[tuple[str, ...], ...]:
        """A is in registers `a` or in shared memory behind `a_desc`; no immediate may be left out."""
        scales, trans_a, trans_b = (), (), ()
        if self.a.exponent_bits:
            scales = ("imm_scale_a", "imm_scale_b")
            if self.a.bits == 16:
                trans_a, trans_b = ("imm_trans_a",), ("imm_trans_b",)
        rest = ("sp_meta", "sp_sel", "scale_d") if self.sparse else ("scale_d",)
        return ("d", "a_desc", "b_desc", *rest, *scales, *trans_a, *trans_b), ("d", "a", "b_desc", *rest, *scales, *trans_b)


@dataclass(frozen=True, kw_only=True, repr=False)
class WmmaMemory(Instruction):
    """`wmma.load` and `wmma.store` (9.7.14.4.3, 9.7.14.4.4)."""

    operand: str  # "a", "b" or "c" is loaded, "d" is stored
    m: int
    n: int
    k: int
    format: Format
    layout: str  # "row" or "col" in memory
    space: str | None  # "global", "shared", "shared::cta"; None is generic

    @property
    def family(self) -> str:
        return "wmma.store" if self.operand == "d" else "wmma.load"

    @property
    def opcode(self) -> str:
        return f"{self.family}.{self.operand}"

    @property
    def slots(self) -> Slots:
        return {**SYNC, "layout": (self.layout,), "shape": (self.shape,), "space": (self.space,), "type": (self.format.name,)}

    @property
    def shape(self) -> str:
        return f"m{self.m}n{self.n}k{self.k}"

    @property
    def operand_forms(self) -> tuple[tuple[str, ...], ...]:
        names = ("p", "r") if self.operand == "d" else ("r", "p")
        return names, (*names, "stride")

    @property
    def default_stride(self) -> int:
        """The stride in elements where a statement omits it (9.7.14.4.2)."""
        rows, columns = self.matrix_shape("r")
        return columns if self.layout == "row" else rows

    def operand_format(self, operand: str) -> Format:
        if operand not in ("r", self.operand):
            raise ValueError(f"{self}: operand {operand!r} holds no matrix elements")
        return self.format

    def copy_count(self, operand: str) -> int:
        return _wmma_copies(self.operand, self.operand_format(operand), self.matrix_shape(operand))

    def _matrices(self) -> dict[str, tuple[int, int]]:
        shape = {"a": (self.m, self.k), "b": (self.k, self.n)}.get(self.operand, (self.m, self.n))
        return {self.operand: shape, "r": shape}


def _wmma_copies(operand: str, fmt: Format, shape: tuple[int, int]) -> int:
    """Copies of each element of a wmma fragment: .f16 A and B fill eight registers whatever the shape (9.7.14.4.1)."""
    if operand not in ("a", "b") or fmt != F16:
        return 1
    return WMMA_F16_REGISTERS * LANES * REGISTER_BITS // (shape[0] * shape[1] * fmt.bits)


@dataclass(frozen=True, kw_only=True, repr=False)
class Mover(Instruction):
    """`ldmatrix`, `stmatrix` and `movmatrix` (9.7.14.5.15 to 9.7.14.5.17)."""

    name: str  # "ldmatrix", "stmatrix", "movmatrix"
    m: int
    n: int
    element: str  # "b16", "b8", or the .dst_fmt "b8x16"
    num: int = 1  # matrices moved
    trans: bool = False
    src_fmt: str | None = None  # ldmatrix: "b6x16_p32" or "b4x16_p64"
    space: str | None = None  # "shared", "shared::cta"; None is generic

    @property
    def family(self) -> str:
        return self.name

    @property
    def uses_memory(self) -> bool:
        """True for ldmatrix and stmatrix; movmatrix goes from registers to registers."""
        return self.name != "movmatrix"

    @property
    def slots(self) -> Slots:
        trans, types = ("trans" if self.trans else None,), (self.element, self.src_fmt)
        if not self.uses_memory:
            return {**SYNC, "shape": (self.shape,), "trans": trans, "type": types}
        return {**SYNC, "shape": (self.shape,), "num": (f"x{self.num}",), "trans": trans, "space": (self.space,), "type": types}

    @property
    def shape(self) -> str:
        return f"m{self.m}n{self.n}"

    @property
    def operand_forms(self) -> tuple[tuple[str, ...], ...]:
        return ({"ldmatrix": ("r", "p"), "stmatrix": ("p", "r"), "movmatrix": ("d", "a")}[self.name],)

    def container_bits(self, operand: str) -> int:
        if operand not in ("r", "d", "a"):
            raise ValueError(f"{self}: operand {operand!r} holds no matrix elements")
        return 16 if self.element == "b16" else 8

    def _matrices(self) -> dict[str, tuple[int, int]]:
        return {name: (self.m, self.n) for name in (("r",) if self.uses_memory else ("d", "a"))}

    @property
    def matrix_count(self) -> int:
        return self.num


@dataclass(frozen=True, kw_only=True, repr=False)
class WgmmaControl(Instruction):
    """`wgmma.fence`, `wgmma.commit_group` and `wgmma.wait_group` (9.7.15.7)."""

    name: str  # "wgmma.fence", "wgmma.commit_group", "wgmma.wait_group"

    @property
    def family(self) -> str:
        return self.name

    @property
    def warps(self) -> int:
        return 4

    @property
    def operand_forms(self) -> tuple[tuple[str, ...], ...]:
        return (("n",) if self.name == "wgmma.wait_group" else (),)


# ---- spelling


def qualifier_slots(op: Instruction, *, defaults: bool = False) -> tuple[tuple[str, ...], ...]:
    """Return the qualifiers slot by slot; with `defaults`, also those that a spelling may omit."""
    omitted = frozenset() if defaults else op.default_slots
    return tuple(() if slot in omitted else tuple(q for q in qualifiers if q) for slot, qualifiers in op.slots.items())


def spell(op: Instruction, *, defaults: bool = False) -> str:
    """Return the PTX spelling in the manual's order."""
    omitted = frozenset() if defaults else op.default_slots
    return ".".join([op.opcode, *(q for slot, qualifiers in op.slots.items() if slot not in omitted for q in qualifiers if q)])


def spellings(op: Instruction) -> tuple[str, ...]:
    """Return the spellings in the manual's order: with defaults omitted, then with defaults written if there are any."""
    return tuple(dict.fromkeys((spell(op), spell(op, defaults=True)))) if op.default_slots else (spell(op),)
