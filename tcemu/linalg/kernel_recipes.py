"""Kernel recipes: in which order, and with which arithmetic, one kernel of a library adds up a matrix product. A value, for one K."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from tcemu.architectures.lookup import applied
from tcemu.arithmetic.model import Model
from tcemu.errors import Unsupported
from tcemu.formats import BF16, E4M3, E5M2, F16, F32, TF32, Format
from tcemu.isa.catalog import section
from tcemu.isa.instructions import Instruction
from tcemu.linalg.kernel_epilogue import Conditions, Epilogue, check_one_of, check_whole

ORDERS = ("ascending", "descending", "tree", "folded", "paired")
STARTS = ("first", "zero")
CASTS = ("RN", "RZ", "RNA")
PARTIALS = (F32, F16, BF16)
RESULTS = (F32, F16, BF16, E4M3, E5M2)
FACTORS = (F32, TF32, BF16, F16, E4M3, E5M2)


def even_edges(k: int, count: int, grain: int) -> tuple[int, ...]:
    """The edges of `count` contiguous slices of ceil(ceil(k / grain) / count) * grain elements.

    The last is shorter, and empty ones are left out.

    Source: cuBLASLt's split-K, and CUTLASS params_universal_base.h.
    """
    grains = -(-k // grain)
    chunk = -(-grains // count) * grain
    return (*range(0, k, chunk), k)


@dataclass(frozen=True)
class Slices:
    """K cut into slices, each summed by itself. Made by `whole`, `even`, `listed` or `dealt_out`.

    k: of the product. edges: contiguous slices [edges[i], edges[i + 1]). rule: (count, grain) where `even_edges` gives these edges.
    dealt: (count, tile) in place of edges: tiles of so many elements are dealt out to so many slices in turn.
    dropped: the last products, which the kernel leaves out. That is a fault of some versions of cuBLAS, see `tcemu.replay`.
    """

    k: int
    edges: tuple[int, ...] = ()
    rule: tuple[int, int] | None = None
    dealt: tuple[int, int] | None = None
    dropped: int = 0

    def __post_init__(self) -> None:
        check_whole(k=self.k)
        if isinstance(self.dropped, bool) or not isinstance(self.dropped, int) or not 0 <= self.dropped < self.k:
            raise ValueError(f"dropped={self.dropped!r}: wanted a whole number from 0, below k={self.k}")
        if (self.dealt is None) == (not self.edges):
            raise ValueError("Slices: wanted edges or dealt, one of the two")
        for name in ("rule", "dealt"):
            if (pair := getattr(self, name)) is not None:
                if not isinstance(pair, tuple) or len(pair) != 2:
                    raise ValueError(f"{name}={pair!r}: wanted two whole numbers")
                check_whole(**{f"{name}[{i}]": value for i, value in enumerate(pair)})
        if self.edges:
            ascending = all(isinstance(e, int) for e in self.edges) and all(x < y for x, y in zip(self.edges, self.edges[1:], strict=False))
            if not ascending or len(self.edges) < 2 or self.edges[0] != 0 or self.edges[-1] != self.used:
                raise ValueError(
                    f"edges={self.edges!r}: wanted whole numbers that ascend from 0 to {self.used}, the products that are added"
                )
        if self.rule is not None and self.edges != even_edges(self.used, *self.rule):
            raise ValueError(f"rule={self.rule!r} gives the edges {even_edges(self.used, *self.rule)}, but edges={self.edges!r}")

    @property
    def used(self) -> int:
        """Products that are added."""
        return self.k - self.dropped

    @classmethod
    def whole(cls, k: int) -> Slices:
        """One slice."""
        return cls(k, (0, k), (1, 1))

    @classmethod
    def even(cls, k: int, count: int, grain: int, *, dropped: int = 0) -> Slices:
        """Contiguous slices by `even_edges`."""
        check_whole(k=k, count=count, grain=grain)
        return cls(k, even_edges(k - dropped, count, grain), (count, grain), None, dropped)

    @classmethod
    def listed(cls, edges: tuple[int, ...], *, dropped: int = 0) -> Slices:
        """Contiguous slices by their edges, from 0 to the last."""
        return cls(edges[-1] + dropped if edges else 0, tuple(edges), None, None, dropped)

    @classmethod
    def dealt_out(cls, k: int, count: int, tile: int) -> Slices:
        """Tiles of so many elements, dealt out to so many slices in turn."""
        return cls(k, (), None, (count, tile))

    def __str__(self) -> str:
        if self.dealt:
            said = f"K = {self.k} in tiles of {self.dealt[1]}, dealt out to {self.dealt[0]} slices in turn"
        elif len(self.edges) == 2:
            said = f"K = {self.k} in one slice"
        else:
            sizes = [y - x for x, y in zip(self.edges, self.edges[1:], strict=False)]
            how = f" (ceil(ceil(K/{self.rule[1]})/{self.rule[0]})*{self.rule[1]} each)" if self.rule else ""
            shown = f"{sizes[0]}, the last {sizes[-1]}" if len(sizes) > 8 and self.rule else ", ".join(map(str, sizes))
            said = f"K = {self.k} in {len(sizes)} slices of {shown}{how}"
        return said + (f", the last {self.dropped} products LEFT OUT (a fault of the library)" if self.dropped else "")


@dataclass(frozen=True)
class Steps:
    """A slice added up by a tensor core: instruction after instruction along K, from +0.

    op, target: the instruction, with results f32, and the GPU; model: another arithmetic in place of the target's own.
    residue: None, or the tile of K whose remainder comes first: the slice's length modulo it is walked before whole tiles, and the
        instruction that reaches beyond it is filled up with zeros. Source: CUTLASS 2.x iterators.
    restart: None, or after so many elements the accumulator is added to an f32 sum, which began at +0, and begins anew.
    """

    op: Instruction
    target: str
    model: Model | None = None
    residue: int | None = None
    restart: int | None = None

    def __post_init__(self) -> None:
        used = applied(self.op, self.target, self.model)
        object.__setattr__(self, "op", used.op)
        object.__setattr__(self, "target", used.target)
        if used.op.sparse or used.op.block_scale or used.op.d != F32:
            raise Unsupported(f"{used.op}: a kernel recipe takes a dense instruction with results f32. PTX ISA {section(used.op)}")
        check_whole(residue=self.residue, restart=self.restart)
        if self.restart is not None and (self.restart % used.op.k or self.residue is not None):
            raise ValueError(f"restart={self.restart}: wanted a multiple of the instruction's K, {used.op.k}, and no residue")

    @property
    def arithmetic(self) -> Model:
        """The model in use."""
        return applied(self.op, self.target, self.model).model

    def __str__(self) -> str:
        said = f"{self.op} on {self.target}" + ("" if self.model is None else f", {self.model}")
        if self.residue is not None:
            said += f"; K modulo {self.residue} comes first"
        return said + ("" if self.restart is None else f"; the accumulator is added to an f32 sum every {self.restart}")


@dataclass(frozen=True)
class Lanes:
    """A slice added up without a tensor core: each lane has a chain of f32 multiply-adds, and the lanes' sums are joined.

    lanes, vector: element k of a slice is of lane (k // vector) % lanes, so that a lane takes `vector` consecutive elements at once.
    chunk: None, or after so many elements of its own a lane closes its chain; its chunks are added in ascending order.
    join: the order in which the lanes' sums are added, one of ORDERS.
    fused: a product and its addition are rounded once (fma), or each is rounded.
    product: None, or f16 or bf16: products, rounded to f32, are rounded to this format before they are added. It wants fused=False.
    start: chains begin at +0 ("zero"), or at their first product ("first"), so that a sum of negative zeros is one.
    flush: f32 operands and sums below the least normal number, 2^-126, count as zeros of their sign, in the merge of slices too. A sum that
        rounds up to 2^-126 stays.
    """

    lanes: int = 1
    vector: int = 1
    chunk: int | None = None
    join: str = "folded"
    fused: bool = True
    flush: bool = False
    product: Format | None = None
    start: str = "zero"

    def __post_init__(self) -> None:
        check_whole(lanes=self.lanes, vector=self.vector, chunk=self.chunk)
        check_one_of("join", self.join, ORDERS)
        check_one_of("product", self.product, (None, F16, BF16))
        check_one_of("start", self.start, STARTS)
        if self.product is not None and self.fused:
            raise ValueError(f"product={self.product}: wanted fused=False with it: a product that is rounded is not part of an fma")
        for name in ("fused", "flush"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: wanted True or False")

    def __str__(self) -> str:
        said = "f32 fma" if self.fused else f"{self.product or F32} products and f32 sums, each rounded"
        said += ", begun at the first product" if self.start == "first" else ""
        if self.lanes > 1:
            said += f"; {self.lanes} lanes, {self.vector} elements each in turn, joined {self.join}"
        said += "" if self.chunk is None else f"; a lane's chain closes every {self.chunk} of its elements"
        return said + ("; subnormal numbers count as zeros" if self.flush else "")


@dataclass(frozen=True)
class Merge:
    """How the slices' f32 sums become one, each addition in f32 and rounded to nearest even.

    order: "ascending"; "descending"; "tree": neighbours in pairs; "folded": the upper half (from the greatest power of two below their
        number) on the lower, and so on; "paired": p[i] + p[i + h], h half of them rounded up, where i + h is not the last, and then the
        last with each of these in turn.
    partial: the format in which sums wait. serial: the running sum is what waits, rounded to `partial` after each addition; else each
        slice's sum is rounded to it once. start: the first addition is of two slices, or +0 is added to first. One slice alone waits only
        where start is "zero": it is rounded to `partial`, and +0 is added to it.
    """

    order: str = "ascending"
    partial: Format = F32
    serial: bool = False
    start: str = "first"

    def __post_init__(self) -> None:
        check_one_of("order", self.order, ORDERS)
        check_one_of("partial", self.partial, PARTIALS)
        check_one_of("start", self.start, STARTS)
        if not isinstance(self.serial, bool) or (self.serial and self.partial == F32):
            raise ValueError(f"serial={self.serial!r}: wanted True or False, and False where partial is f32")
        if (self.serial or self.start == "zero") and self.order not in ("ascending", "descending"):
            raise ValueError(f"order={self.order!r}: wanted ascending or descending with serial=True, and with start='zero'")

    def __str__(self) -> str:
        waits = "the running sum waits" if self.serial else "partial sums wait"
        return f"added {self.order}, {waits} in {self.partial}, begun at {'+0' if self.start == 'zero' else 'the first'}"


@dataclass(frozen=True)
class KernelRecipe:
    """How one kernel of a library computes A·B for one K: a frozen value that `tcemu.matmul` takes as `recipe`.

    a, b: the formats that are multiplied; cast: how f32 operands come to a narrower one ("RNA": to nearest, ties away from zero).
    out: the format of the result. unit: what adds a slice's products, `Steps` or `Lanes`.
    All outputs are added in the same order. Every NaN is the canonical one: its word is no claim about the library.
    Raises ValueError, TypeError or Unsupported for what cannot be.
    """

    a: Format
    b: Format
    out: Format
    unit: Steps | Lanes
    slices: Slices
    merge: Merge = Merge()
    epilogue: Epilogue = field(default=Epilogue())
    conditions: Conditions = field(default=Conditions(), compare=False)
    cast: str = "RN"

    def __post_init__(self) -> None:
        kinds = {"unit": (Steps, Lanes), "slices": Slices, "merge": Merge, "epilogue": Epilogue, "conditions": Conditions}
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{name}={getattr(self, name)!r}: wanted {kind}")
        for name in ("a", "b"):
            check_one_of(name, getattr(self, name), FACTORS)
        check_one_of("out", self.out, RESULTS)
        check_one_of("cast", self.cast, CASTS)
        if self.cast == "RNA" and (self.a, self.b) != (TF32, TF32):
            raise ValueError('cast="RNA": wanted operands in tf32')
        if isinstance(self.unit, Steps) and (self.unit.op.a, self.unit.op.b) != (self.a, self.b):
            raise ValueError(f"{self.unit.op} multiplies {self.unit.op.a} and {self.unit.op.b}, not {self.a} and {self.b}")
        if self.merge.partial not in (F32, self.out):
            raise ValueError(f"partial={self.merge.partial}: wanted f32 or the result's format, {self.out}")

    @property
    def k(self) -> int:
        """K of the product."""
        return self.slices.k

    def replace(self, **changes: Any) -> KernelRecipe:
        """The recipe with some fields changed. Raises as the constructor."""
        return replace(self, **changes)

    def of_any_shape(self) -> KernelRecipe:
        """The same without the conditions on M and N: for some rows and columns of a product, whose outputs have the same bits there."""
        return self.replace(conditions=replace(self.conditions, m=None, n=None))

    def __str__(self) -> str:
        lines = [f"kernel recipe: {self.a} x {self.b} -> {self.out}, {self.conditions}", f"  {self.slices}", f"  slices by {self.unit}"]
        if len(self.slices.edges) != 2 or self.merge.start == "zero":
            lines.append(f"  slices {self.merge}")
        lines.append(f"  the total {self.epilogue}, rounded to {self.out}")
        return "\n".join([*lines, *([f"  seen: {self.conditions.evidence}"] if self.conditions.evidence else [])])
