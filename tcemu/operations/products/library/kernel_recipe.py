"""Kernel recipes: the order and the arithmetic with which one kernel of a library adds a matrix product, as values for one K."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tcemu.base.errors import Unsupported
from tcemu.base.records import Record, check_positive_integers
from tcemu.engine.architectures.lookup import resolve_arithmetic
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.sum_tree import CHAINED, ORDERS
from tcemu.engine.formats.number_formats import BF16, E4M3, E5M2, F16, F32, TF32, Format
from tcemu.engine.isa.families import MatrixMultiply
from tcemu.engine.isa.legality import manual_section

# ---- the epilogue, and the conditions of an observation

SCALINGS = ("folded", "a first", "b first")
SCALES = ("tensor", "rows")
BIASES = tuple(f"{fmt} {of}" for fmt in ("f32", "f16", "bf16") for of in ("columns", "outputs"))


@dataclass(frozen=True)
class Epilogue(Record):
    """The computation on the f32 total: y = alpha · scale_a · scale_b · total + beta · bias in f32, then one rounding to the result.

    All roundings are to nearest even.

    Attributes:
        scaled: The total is multiplied by alpha, and by scale_a and scale_b of `tcemu.matmul`. Otherwise it stays unchanged.
        alpha: Factor of the total.
        beta: Factor of the bias.
        roundings: 2: the scaled total is rounded before fma(beta, bias, total). 1: the last product is fma(factor, total, beta · bias),
            with beta · bias rounded; this needs `scaled`.
        saturate: Values beyond the result's range become its largest finite value, not Inf.
        scaling: "folded": alpha and the scales become one f32 factor first, (scale_a · scale_b) · alpha, each product rounded. "a first":
            the total is multiplied by scale_a and rounded, then by scale_b; "b first": in the other order. These two need alpha = 1.
        plus_zero: The last of these products is an fma with +0, so that -0 becomes +0; False: a multiplication.
        between: f16 or bf16: the scaled total is also rounded to this format before the bias is added, which needs roundings=2; None: not.
    """

    scaled: bool = False
    alpha: float = 1.0
    beta: float = 1.0
    roundings: int = 2
    saturate: bool = False
    scaling: str = "folded"
    plus_zero: bool = True
    between: Format | None = None

    def __post_init__(self) -> None:
        self.check_fields(flags="scaled saturate plus_zero", roundings=(1, 2), scaling=SCALINGS, between=(None, F16, BF16))
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value != value or abs(value) == float("inf"):
                raise ValueError(f"{name}={value!r}: expected a finite number")
            object.__setattr__(self, name, float(value))
        if not self.scaled and (self.alpha != 1.0 or self.scaling != "folded" or not self.plus_zero or self.roundings == 1):
            raise ValueError(
                f"alpha={self.alpha}, scaling={self.scaling!r}, plus_zero={self.plus_zero}, roundings={self.roundings}: "
                "expected scaled=True"
            )
        if self.scaling != "folded" and self.alpha != 1.0:
            raise ValueError(f"scaling={self.scaling!r}: expected alpha=1; alpha is a factor of what is folded")
        if self.between is not None and self.roundings == 1:
            raise ValueError(f"between={self.between}: expected roundings=2; with one rounding there is nothing between")

    def __str__(self) -> str:
        factor = "" if self.alpha == 1.0 else f"{self.alpha:g} · "
        how = {"folded": "scale_a · scale_b", "a first": "scale_a, then scale_b", "b first": "scale_b, then scale_a"}[self.scaling]
        said = "as it is" if not self.scaled else f"times {factor}{how}, by {'fma' if self.plus_zero else 'multiplication'}"
        said += "" if self.between is None else f", rounded to {self.between} before a bias"
        said += "" if self.beta == 1.0 else f", plus {self.beta:g} · bias"
        said += ", with a bias in one rounding" if self.roundings == 1 else ""
        return said + ("; saturating" if self.saturate else "")


@dataclass(frozen=True)
class Conditions(Record):
    """The conditions under which a kernel recipe was observed to hold. None: unspecified; for m and n: any.

    Attributes:
        m: M of the product.
        n: N of the product.
        library: Name of the library.
        version: Version of the library.
        gpu: Name of the GPU.
        sm_count: Number of the GPU's multiprocessors.
        layout: Memory orders of A and B, "row" or "column", as "rr" or "rc".
        alignment: Alignment of the operands in bytes.
        workspace: Size of the workspace in bytes.
        evidence: The evidence in words: shapes, seeds, compared outputs.
        scales: "tensor", one per operand, or "rows", one per row of A and column of B. `tcemu.matmul` rejects scales of another shape.
        bias: Format and shape of the bias: "bf16 columns" for [N], "bf16 outputs" for [M, N]. `tcemu.matmul` rejects another shape.
        probability: Probability that the order is the library's, where a rule predicts it and nobody measured it; None: it was measured.
    """

    m: int | None = None
    n: int | None = None
    library: str | None = None
    version: str | None = None
    gpu: str | None = None
    sm_count: int | None = None
    layout: str | None = None
    alignment: int | None = None
    workspace: int | None = None
    evidence: str = ""
    scales: str | None = None
    bias: str | None = None
    probability: float | None = None

    def __post_init__(self) -> None:
        self.check_fields(optional_counts="m n sm_count alignment", scales=(None, *SCALES), bias=(None, *BIASES))
        if self.workspace is not None and (isinstance(self.workspace, bool) or not isinstance(self.workspace, int) or self.workspace < 0):
            raise ValueError(f"workspace={self.workspace!r}: expected a number of bytes")
        for name in ("library", "version", "gpu", "layout", "evidence"):
            value = getattr(self, name)
            if not (isinstance(value, str) or (value is None and name != "evidence")):
                raise ValueError(f"{name}={value!r}: expected text")
        if self.probability is not None and not (isinstance(self.probability, float) and 0 < self.probability <= 1):
            raise ValueError(f"probability={self.probability!r}: expected a number above 0, at most 1.0, or None")

    def __str__(self) -> str:
        shape = f"M = {self.m or 'any'}, N = {self.n or 'any'}"
        names = ("library", "version", "gpu", "sm_count", "scales", "bias")
        known = [f"{name} {value}" for name in names if (value := getattr(self, name)) is not None]
        return ", ".join([shape, *known])


# ---- slices, the units that add them, their merge, and the recipe

STARTS = ("first", "zero")
CASTS = ("RN", "RZ", "RNA")
PARTIALS = (F32, F16, BF16)
RESULTS = (F32, F16, BF16, E4M3, E5M2)
FACTORS = (F32, TF32, BF16, F16, E4M3, E5M2)


def even_edges(k: int, count: int, grain: int) -> tuple[int, ...]:
    """Returns the edges of `count` contiguous slices of ceil(ceil(k / grain) / count) * grain elements.

    The last slice is shorter, and empty ones are omitted.

    Source: cuBLASLt's split-K, and CUTLASS params_universal_base.h.
    """
    grains = -(-k // grain)
    chunk = -(-grains // count) * grain
    return (*range(0, k, chunk), k)


@dataclass(frozen=True)
class Slices(Record):
    """The slices of K, each summed separately. Made by `single`, `even`, `from_edges` or `interleaved`.

    Attributes:
        k: K of the product.
        edges: Edges of contiguous slices [edges[i], edges[i + 1]).
        rule: (count, grain) where `even_edges` gives these edges.
        dealt: (count, tile) instead of edges: `count` slices take tiles of `tile` elements in turn.
        dropped: Number of products at the end that the kernel omits, a fault of some versions of cuBLAS: see `tcemu.replay`.
    """

    k: int
    edges: tuple[int, ...] = ()
    rule: tuple[int, int] | None = None
    dealt: tuple[int, int] | None = None
    dropped: int = 0

    def __post_init__(self) -> None:
        self.check_fields(counts="k")
        if isinstance(self.dropped, bool) or not isinstance(self.dropped, int) or not 0 <= self.dropped < self.k:
            raise ValueError(f"dropped={self.dropped!r}: expected an integer from 0, below k={self.k}")
        if not isinstance(self.edges, tuple) or (self.dealt is None) == (not self.edges):
            raise ValueError("Slices: expected either edges or dealt")
        for name in ("rule", "dealt"):
            if (pair := getattr(self, name)) is not None:
                if not isinstance(pair, tuple) or len(pair) != 2:
                    raise ValueError(f"{name}={pair!r}: expected two integers")
                check_positive_integers(**{f"{name}[{i}]": value for i, value in enumerate(pair)})
        if self.edges:
            ascending = all(isinstance(e, int) for e in self.edges) and all(x < y for x, y in zip(self.edges, self.edges[1:], strict=False))
            if not ascending or len(self.edges) < 2 or self.edges[0] != 0 or self.edges[-1] != self.used:
                raise ValueError(f"edges={self.edges!r}: expected integers that ascend from 0 to {self.used}, the products that are added")
        if self.rule is not None and self.edges != even_edges(self.used, *self.rule):
            raise ValueError(f"rule={self.rule!r} gives the edges {even_edges(self.used, *self.rule)}, but edges={self.edges!r}")

    @property
    def used(self) -> int:
        """Number of products that are added."""
        return self.k - self.dropped

    @classmethod
    def single(cls, k: int) -> Slices:
        """Return one slice of the whole K."""
        return cls(k, (0, k), (1, 1))

    @classmethod
    def even(cls, k: int, count: int, grain: int, *, dropped: int = 0) -> Slices:
        """Return contiguous slices by `even_edges`."""
        check_positive_integers(k=k, count=count, grain=grain)
        return cls(k, even_edges(k - dropped, count, grain), (count, grain), None, dropped)

    @classmethod
    def from_edges(cls, edges: tuple[int, ...], *, dropped: int = 0) -> Slices:
        """Return contiguous slices from their edges, which begin with 0."""
        return cls(edges[-1] + dropped if edges else 0, tuple(edges), None, None, dropped)

    @classmethod
    def interleaved(cls, k: int, count: int, tile: int) -> Slices:
        """Return slices that take tiles of `tile` elements in turn."""
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
class Steps(Record):
    """A slice summed by a tensor core: instruction after instruction along K, from +0.

    Attributes:
        op: The instruction, with f32 results.
        target: The GPU.
        model: Another arithmetic than the target's own.
        residue: The tile of K whose remainder comes first: the slice's length modulo it is reduced before whole tiles, and the instruction
            that exceeds it is padded with zeros. None: no remainder first. Source: CUTLASS 2.x iterators.
        restart: Elements after which the accumulator is added to an f32 sum, begun at +0, and restarts; None: never.
    """

    op: MatrixMultiply
    target: str
    model: Model | None = None
    residue: int | None = None
    restart: int | None = None

    def __post_init__(self) -> None:
        used = resolve_arithmetic(self.op, self.target, self.model)
        object.__setattr__(self, "op", used.op)
        object.__setattr__(self, "target", used.target)
        if used.op.sparse or used.op.scaling is not None or used.op.d != F32:
            raise Unsupported(f"{used.op}: a kernel recipe takes a dense instruction with results f32. PTX ISA {manual_section(used.op)}")
        self.check_fields(optional_counts="residue restart")
        if self.restart is not None and (self.restart % used.op.k or self.residue is not None):
            raise ValueError(f"restart={self.restart}: expected a multiple of the instruction's K, {used.op.k}, and no residue")

    @property
    def arithmetic(self) -> Model:
        """The model in use: `model`, or the target's own."""
        return resolve_arithmetic(self.op, self.target, self.model).model

    def __str__(self) -> str:
        said = f"{self.op} on {self.target}" + ("" if self.model is None else f", {self.model}")
        if self.residue is not None:
            said += f"; K modulo {self.residue} comes first"
        return said + ("" if self.restart is None else f"; the accumulator is added to an f32 sum every {self.restart}")


@dataclass(frozen=True)
class Lanes(Record):
    """A slice summed without a tensor core: each lane has a chain of f32 multiply-adds, and the lanes' sums are joined.

    Attributes:
        lanes: Number of lanes.
        vector: Consecutive elements that a lane takes at once: element k of a slice belongs to lane (k // vector) % lanes.
        chunk: Elements of a lane after which it ends its chain; its chunks are added in ascending order. None: one chain.
        join: Order in which the lanes' sums are added, one of ORDERS.
        fused: A product and its addition are rounded once (fma); False: each is rounded.
        product: f16 or bf16: products, rounded to f32, are rounded to this format before they are added, which needs fused=False.
        start: Chains begin at +0 ("zero") or at their first product ("first"), so that a sum of negative zeros is one.
        flush: f32 operands and sums below the least normal number, 2^-126, count as zeros of their sign, in the merge of slices too. A sum
            that rounds up to 2^-126 is kept.
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
        choices = {"join": ORDERS, "product": (None, F16, BF16), "start": STARTS}
        self.check_fields(flags="fused flush", counts="lanes vector", optional_counts="chunk", **choices)
        if self.product is not None and self.fused:
            raise ValueError(f"product={self.product}: expected fused=False with it: a product that is rounded cannot be part of an fma")

    def __str__(self) -> str:
        said = "f32 fma" if self.fused else f"{self.product or F32} products and f32 sums, each rounded"
        said += ", begun at the first product" if self.start == "first" else ""
        if self.lanes > 1:
            said += f"; {self.lanes} lanes, {self.vector} elements each in turn, joined {self.join}"
        said += "" if self.chunk is None else f"; a lane's chain closes every {self.chunk} of its elements"
        return said + ("; subnormal numbers count as zeros" if self.flush else "")


@dataclass(frozen=True)
class Merge(Record):
    """The merge of the slices' f32 sums, each addition in f32 and rounded to nearest even.

    The sums that are rounded to `partial`, while they wait, are those of the slices, the running sum (`serial`), or both (`atomic`).

    Attributes:
        order: "ascending"; "descending"; "tree": neighbours in pairs; "folded": the upper half (from the largest power of two below their
            number) onto the lower, and so on; "paired": p[i] + p[i + h], h half of their number rounded up, where i + h is not the last,
            and then the last with each of these in turn.
        partial: Format in which sums wait.
        serial: The running sum waits, rounded to `partial` after each addition; False: each slice's sum is rounded to it once.
        atomic: Every sum is rounded to `partial`: each slice's sum once, and each sum of two after its addition, as atomic additions in
            that format do. Needs serial=False.
        start: "first": the first addition is of two slices. "zero": the first slice is added to +0. A single slice waits only with "zero":
            it is rounded to `partial`, and +0 is added to it.
    """

    order: str = "ascending"
    partial: Format = F32
    serial: bool = False
    start: str = "first"
    atomic: bool = False

    def __post_init__(self) -> None:
        self.check_fields(flags="serial atomic", order=ORDERS, partial=PARTIALS, start=STARTS)
        if self.serial and self.partial == F32:
            raise ValueError("serial=True: expected False where partial is f32")
        if self.atomic and (self.serial or self.partial == F32):
            raise ValueError("atomic=True: expected False with serial=True and where partial is f32")
        if (self.serial or self.start == "zero") and self.order not in CHAINED:
            raise ValueError(f"order={self.order!r}: expected {' or '.join(CHAINED)} with serial=True, and with start='zero'")

    @property
    def rounds_slices(self) -> bool:
        """True if each slice's sum is rounded to `partial`."""
        return not self.serial

    @property
    def rounds_running(self) -> bool:
        """True if each sum of two is rounded to `partial` after its addition."""
        return self.serial or self.atomic

    def __str__(self) -> str:
        waits = "partial sums and the running sum wait" if self.atomic else "the running sum waits" if self.serial else "partial sums wait"
        return f"added {self.order}, {waits} in {self.partial}, begun at {'+0' if self.start == 'zero' else 'the first'}"


@dataclass(frozen=True, eq=False)
class KernelRecipe(Record):
    """The computation of A·B by one kernel of a library, for one K: a frozen value that `tcemu.matmul` takes as `recipe`.

    All outputs are added in the same order. Every NaN is the canonical one: its bits are no claim about the library. Recipes are equal if
    `tcemu.matmul` does the same with them: of their conditions, M, N, scales and bias are compared, which it checks.

    Attributes:
        a: Format of A as it is multiplied.
        b: Format of B as it is multiplied.
        dtype: Format of the result.
        unit: The unit that adds a slice's products, `Steps` or `Lanes`.
        slices: The slices of K.
        merge: The merge of the slices' sums.
        epilogue: Scales, bias and the last rounding.
        conditions: Conditions of the observation.
        cast: Rounding of f32 operands to a narrower format: "RN", "RZ", or "RNA", to nearest with ties away from zero.

    Raises:
        ValueError, TypeError: a field has another value or type, or two fields contradict each other.
        Unsupported: the instruction is sparse or has other results.
    """

    a: Format
    b: Format
    dtype: Format
    unit: Steps | Lanes
    slices: Slices
    merge: Merge = Merge()
    epilogue: Epilogue = field(default=Epilogue())
    conditions: Conditions = field(default=Conditions())
    cast: str = "RN"

    def __post_init__(self) -> None:
        kinds = {"unit": (Steps, Lanes), "slices": Slices, "merge": Merge, "epilogue": Epilogue, "conditions": Conditions}
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{name}={getattr(self, name)!r}: expected {kind}")
        self.check_fields(a=FACTORS, b=FACTORS, dtype=RESULTS, cast=CASTS)
        if self.cast == "RNA" and (self.a, self.b) != (TF32, TF32):
            raise ValueError('cast="RNA": expected operands in tf32')
        if isinstance(self.unit, Steps) and (self.unit.op.a, self.unit.op.b) != (self.a, self.b):
            raise ValueError(f"{self.unit.op} multiplies {self.unit.op.a} and {self.unit.op.b}, not {self.a} and {self.b}")
        if self.merge.partial not in (F32, self.dtype):
            raise ValueError(f"partial={self.merge.partial}: expected f32 or the result's format, {self.dtype}")

    def __eq__(self, other: object) -> bool:
        return self._compared() == other._compared() if isinstance(other, KernelRecipe) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._compared())

    def _compared(self) -> tuple:
        at = self.conditions
        checked = at.m, at.n, at.scales, at.bias
        return self.a, self.b, self.dtype, self.cast, self.unit, self.slices, self.merge, self.epilogue, checked

    @property
    def k(self) -> int:
        """K of the product."""
        return self.slices.k

    def without_shape(self) -> KernelRecipe:
        """Return the recipe without its conditions on M and N, for some rows and columns of a product: outputs have the same bits there."""
        return self.replace(conditions=replace(self.conditions, m=None, n=None))

    def __str__(self) -> str:
        lines = [f"kernel recipe: {self.a} x {self.b} -> {self.dtype}, {self.conditions}", f"  {self.slices}", f"  slices by {self.unit}"]
        if len(self.slices.edges) != 2 or self.merge.start == "zero":
            lines.append(f"  slices {self.merge}")
        lines.append(f"  the total {self.epilogue}, rounded to {self.dtype}")
        source = "seen" if self.conditions.probability is None else "not measured"
        return "\n".join([*lines, *([f"  {source}: {self.conditions.evidence}"] if self.conditions.evidence else [])])

    def has_order(self, other: KernelRecipe) -> bool:
        """Return True if both recipes add in the same order with the same arithmetic, whatever shape they were observed at.

        Two recipes that differ in this sense may still give the same bits for their K.
        """
        return self._order() == other._order()

    def _order(self) -> tuple:
        split = len(self.slices.edges) != 2 or self.merge.start == "zero"
        slices, unit = (self.slices.k, self.slices.edges, self.slices.dealt, self.slices.dropped), self.unit
        if isinstance(unit, Steps) and unit.restart is not None and not split and unit.restart >= self.k:
            unit = replace(unit, restart=None)  # never reached
        return self.a, self.b, self.dtype, self.cast, unit, slices, self.merge if split else None, self.epilogue
