"""Recipes: how a library multiplies matrices with one instruction. Quantisation, accumulation, output and gradients as one value.

`ROWS` is the table of the recipes in use, one row each with its source; `get_recipe` makes a `Recipe` of a row for a target.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from functools import cache, lru_cache
from math import gcd
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from jax import Array
from jax.core import Tracer

from tcemu.base.errors import NotModelled, Unsupported
from tcemu.base.records import Record, is_count
from tcemu.base.results import Table
from tcemu.base.saved_files import parse_json
from tcemu.engine.architectures.bibliography import make_bibtex
from tcemu.engine.architectures.evidence import Evidence
from tcemu.engine.architectures.lookup import find_row, require_evidence, require_product, resolve_arithmetic
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.product_spec import product_spec
from tcemu.engine.formats.number_formats import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, F16, F32, S4, S8, TF32, UE4M3, UE8M0, Format
from tcemu.engine.isa.families import MatrixMultiply
from tcemu.engine.isa.grammar import shorten_text
from tcemu.engine.isa.legality import check, manual_section, resolve_op, targets
from tcemu.engine.isa.other_makers import OTHER_TARGETS
from tcemu.engine.isa.short_names import ALIASES, find_short_name
from tcemu.engine.isa.targets import DEFAULT_SCALED_TARGET, DEFAULT_TARGET, TARGETS, library_unit, resolve_target
from tcemu.engine.isa.tcgen05 import usual_products
from tcemu.operations.products.accumulation import REDUCTIONS
from tcemu.operations.products.recipe_json import recipe_from_dict, recipe_to_dict
from tcemu.operations.products.recipe_names import normal_name, split_target, unknown_recipe
from tcemu.operations.products.unit_choice import describe_unit
from tcemu.operations.quantize.hadamard import SIGNS_16, HadamardTransform
from tcemu.operations.quantize.quantizer import Quantizer, Scheme

BACKWARD_MODES = ("exact", "straight_through")
RESULT_FORMATS = {str(fmt): fmt for fmt in (F32, F16, BF16)}
HADAMARD_OP = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"

# ---- the recipes in use

UNSCALED = Quantizer()  # a cast


class ScaledKind(NamedTuple):
    """A kind of instruction with .block_scale, by its qualifiers."""

    kind: str
    scale_vec: int
    stype: Format
    k: int


class RecipeRow(NamedTuple):
    """The formats, quantisers and sums of one recipe, for any target."""

    a: Format
    b: Format
    quantizer_a: Quantizer
    quantizer_b: Quantizer
    backward: tuple[str, str] | None  # names of the rows of dA = g·Bᵀ and dB = Aᵀ·g; None: the row is a gradient of another row
    source: str
    promote: int | None = None  # instructions between two promotions
    block_scale: ScaledKind | None = None  # kind of an instruction with .block_scale
    sparse: bool = False  # A is pruned for a sparse instruction
    split_accumulator: bool = False  # sums are promoted as cuBLASLt does with fast accumulation off: `split_accumulator_interval`


TENSOR, ROW, COLUMN = (Quantizer(shared, saturate=True) for shared in ("tensor", "row", "column"))
ONE_BY_128, SQUARE_128 = (Quantizer("block", block, saturate=True) for block in ((1, 128), (128, 128)))
UNIT_BLOCKS, UNIT_BLOCKS_RCEIL = (Quantizer("block", rule=rule, saturate=True) for rule in (None, "rceil"))
MXF8F6F4, MXF4 = ScaledKind("mxf8f6f4", 1, UE8M0, k=32), ScaledKind("mxf4", 2, UE8M0, k=64)
NVF4 = ScaledKind("mxf4nvf4", 4, UE4M3, k=64)
SQUARE_16 = Quantizer("block", rows=16, saturate=True)
GRADIENT = Quantizer("block", rounding="SR", saturate=True)
ROTATED, ROTATED_GRADIENT = (Quantizer("block", rounding=rounding, hadamard=SIGNS_16, saturate=True) for rounding in ("RN", "SR"))
INT8_WEIGHT = Quantizer("column", scale="f16", saturate=True, element=S8)
INT4_WEIGHT = Quantizer("block", (1, 128), scale="f16", saturate=True, element=S4)
_HYBRID = "arXiv 2209.05433, 4; TransformerEngine, Format.HYBRID with the scales of the tensors at hand"
_DEEPSEEK = "arXiv 2412.19437, 3.3: tiles of activations, blocks of weights, sums promoted every 128 elements; DeepGEMM's fma"
_SPLIT = "forward CUBLASLT_MATMUL_DESC_FAST_ACCUM on, gradients off: TransformerEngine, Float8CurrentScaling, fp8_gemm_fprop, _dgrad and \
_wgrad; torchao, Float8LinearConfig, gemm_config_output, _grad_input and _grad_weight. Scales amax / largest, as in fp8"
_MXFP8 = "arXiv 2506.08027: e4m3 for gradients too, scales rounded up; TransformerEngine MXFP8BlockScaling"
_NVFP4 = "arXiv 2509.25149, without its Hadamard transforms, its stochastic rounding of gradients and its 16 x 16 blocks of weights"
_NVFP4_TRAINING = "arXiv 2509.25149; TransformerEngine, NVFP4BlockScaling with its defaults and its fixed signs"
_SPARSE = "arXiv 2104.08378, 2:4 sparsity; gradients by dense products, straight through the pruning: arXiv 2102.04010"
_WEIGHT_ONLY = (
    "weight-only quantisation, symmetric, to the nearest, f16 scales: W8 per column, W4 in groups of 128: arXiv 2408.11743 (MARLIN)"
)
_OCP = "OCP MX 1.0, 5.2 and 6.3"

# 4 instructions of 32 elements: FP8 sums restart after 128 elements on Hopper, in the order of mmaemu 0.1.0 and of bitequiv, which found
# no promotion on sm_100 and sm_103. The other targets are assumed to be like those two
SPLIT_ACCUMULATOR_INTERVAL = {"sm_90a": 4}
UNPUBLISHED_SPLIT_ACCUMULATOR = ("sm_89",)  # targets where cuBLASLt's order is unpublished

ROWS = {
    "f16": RecipeRow(F16, F16, UNSCALED, UNSCALED, ("f16", "f16"), "arXiv 1710.03740; scaling the loss is the caller's"),
    "bf16": RecipeRow(BF16, BF16, UNSCALED, UNSCALED, ("bf16", "bf16"), "arXiv 1905.12322"),
    "tf32": RecipeRow(TF32, TF32, UNSCALED, UNSCALED, ("tf32", "tf32"), "NVIDIA A100 whitepaper, 2020: f32 rounded to tf32, sums f32"),
    "f16_sparse": RecipeRow(F16, F16, UNSCALED, UNSCALED, ("f16", "f16"), _SPARSE, sparse=True),
    "bf16_sparse": RecipeRow(BF16, BF16, UNSCALED, UNSCALED, ("bf16", "bf16"), _SPARSE, sparse=True),
    "fp8_sparse": RecipeRow(E4M3, E4M3, TENSOR, TENSOR, ("fp8_da", "fp8_db"), _SPARSE, sparse=True),
    "w8a16": RecipeRow(F16, F16, UNSCALED, INT8_WEIGHT, ("f16", "f16"), _WEIGHT_ONLY),
    "w4a16": RecipeRow(F16, F16, UNSCALED, INT4_WEIGHT, ("f16", "f16"), _WEIGHT_ONLY),
    "fp8": RecipeRow(E4M3, E4M3, TENSOR, TENSOR, ("fp8_da", "fp8_db"), _HYBRID),
    "fp8_da": RecipeRow(E5M2, E4M3, TENSOR, TENSOR, None, _HYBRID),
    "fp8_db": RecipeRow(E4M3, E5M2, TENSOR, TENSOR, None, _HYBRID),
    "fp8_split": RecipeRow(E4M3, E4M3, TENSOR, TENSOR, ("fp8_split_da", "fp8_split_db"), _SPLIT),
    "fp8_split_da": RecipeRow(E5M2, E4M3, TENSOR, TENSOR, None, _SPLIT, split_accumulator=True),
    "fp8_split_db": RecipeRow(E4M3, E5M2, TENSOR, TENSOR, None, _SPLIT, split_accumulator=True),
    "fp8_e4m3": RecipeRow(E4M3, E4M3, TENSOR, TENSOR, ("fp8_e4m3", "fp8_e4m3"), "TransformerEngine, Format.E4M3"),
    "fp8_e5m2": RecipeRow(E5M2, E5M2, TENSOR, TENSOR, ("fp8_e5m2", "fp8_e5m2"), "arXiv 2209.05433, 3: the other format"),
    "fp8_rows": RecipeRow(
        E4M3, E4M3, ROW, COLUMN, ("fp8_rows", "fp8_rows"), "torchao, Float8LinearRecipeName.ROWWISE, fast accumulation all through"
    ),
    "deepseek": RecipeRow(E4M3, E4M3, ONE_BY_128, SQUARE_128, ("deepseek", "deepseek_db"), _DEEPSEEK, 4),
    "deepseek_db": RecipeRow(E4M3, E4M3, ONE_BY_128, ONE_BY_128, None, _DEEPSEEK, 4),
    "mxfp8": RecipeRow(E4M3, E4M3, UNIT_BLOCKS_RCEIL, UNIT_BLOCKS_RCEIL, ("mxfp8", "mxfp8"), _MXFP8, block_scale=MXF8F6F4),
    "mxfp8_e5m2": RecipeRow(E5M2, E5M2, UNIT_BLOCKS, UNIT_BLOCKS, ("mxfp8_e5m2", "mxfp8_e5m2"), _OCP, block_scale=MXF8F6F4),
    "mxfp6_e3m2": RecipeRow(E3M2, E3M2, UNIT_BLOCKS, UNIT_BLOCKS, ("mxfp6_e3m2", "mxfp6_e3m2"), _OCP, block_scale=MXF8F6F4),
    "mxfp6_e2m3": RecipeRow(E2M3, E2M3, UNIT_BLOCKS, UNIT_BLOCKS, ("mxfp6_e2m3", "mxfp6_e2m3"), _OCP, block_scale=MXF8F6F4),
    "mxfp4": RecipeRow(E2M1, E2M1, UNIT_BLOCKS, UNIT_BLOCKS, ("mxfp4", "mxfp4"), _OCP, block_scale=MXF4),
    "nvfp4": RecipeRow(E2M1, E2M1, UNIT_BLOCKS, UNIT_BLOCKS, ("nvfp4", "nvfp4"), _NVFP4, block_scale=NVF4),
    "nvfp4_training": RecipeRow(
        E2M1, E2M1, UNIT_BLOCKS, SQUARE_16, ("nvfp4_training_da", "nvfp4_training_db"), _NVFP4_TRAINING, block_scale=NVF4
    ),
    "nvfp4_training_da": RecipeRow(E2M1, E2M1, GRADIENT, SQUARE_16, None, _NVFP4_TRAINING, block_scale=NVF4),
    "nvfp4_training_db": RecipeRow(E2M1, E2M1, ROTATED, ROTATED_GRADIENT, None, _NVFP4_TRAINING, block_scale=NVF4),
}
RECIPES = tuple(name for name, row in ROWS.items() if row.backward)


def split_accumulator_interval(target: str) -> int | None:
    """Returns how many FP8 instructions cuBLASLt runs between two promotions with fast accumulation off; None: it never promotes.

    TransformerEngine calls this the "split accumulator".

    Raises:
        NotModelled: the interval on this target is unpublished.
        Unsupported: the target is unknown.
    """
    target = resolve_target(target)
    if target in UNPUBLISHED_SPLIT_ACCUMULATOR:
        raise NotModelled(
            f"{target}: cuBLASLt adds differently on this target with fast accumulation off, and the order is unpublished; fp8 has it on "
            f"for all three products, and get_recipe('fp8', '{target}').replace(backward=...) accepts gradients with a promote= of your "
            "own."
        )
    return SPLIT_ACCUMULATOR_INTERVAL.get(target)


# ---- a recipe as a value


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Recipe(Record):
    """A library's matrix product with one instruction: a frozen value that prints itself and hashes.

    Outside the instruction all arithmetic is f32, each operation rounded to nearest even, in this order: D = scale_a·scale_b · sum (NVFP4:
    the product of the two tensor scales), D + bias, then the rounding to `dtype`.

    A recipe is a pytree. The model's fields and `promote` may be arrays: its leaves, which are traced and swept by `jax.vmap`. Such a
    recipe has no hash. A traced promote below 1, or with a promote * op.k that does not divide the depth of the blocks, makes every result
    NaN; in `tcemu.checked` functions it raises UndefinedBehaviour.

    Attributes:
        op: The instruction, with f32 or f16 results: a spelling or an `Instruction`. For a sparse one A is pruned first, as `tcemu.prune`
            does; then K of a promotion counts the kept elements.
        target: The GPU, as "H100" or "sm_90a".
        a: `Quantizer` of A.
        b: `Quantizer` of B.
        model: Another arithmetic, or changes of the target's own in words, as "fraction_bits=13"; None: the target's own.
        promote: Instructions between two promotions, in which the accumulator is added to an f32 sum and restarts; None: no promotion.
            Blocks whose scales multiply outside the instruction need it, and promote * op.k must divide their depth.
        split_k: Number of parts of K that are summed separately.
        reduction: Order in which the f32 sums of these parts are added: "ascending" or "tree".
        dtype: Format of the results, f32, f16 or bf16: a format of `tcemu.formats` or its name.
        backward: How gradients are computed. "exact": from the quantised operands, in plain f32, rounding counted as identity.
            "straight_through": the same from the given operands. A Recipe, its name, or a pair of recipes: dA = g·Bᵀ and dB = Aᵀ·g by
            these; a name such as "bf16" means that recipe on this target.
        name: The recipe's name; ignored by equality.
        source: Where the recipe is described; ignored by equality.

    Raises:
        Unsupported: the target lacks the instruction, the instruction has other results, or it is sparse and operands are scaled by block.
        NotModelled: there is no evidence for this arithmetic.
        TypeError, ValueError: a field has another type or value, or two fields contradict each other.

    Example:
        >>> import tcemu
        >>> tcemu.Recipe("f16", "A100", b=tcemu.quantize.Quantizer("column"))
        recipe: mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 on sm_80
          A f16 unscaled, not saturated; B f16 per column, scales f32, not saturated
          sums chained; result f32
          backward exact
    """

    op: MatrixMultiply
    target: str
    a: Quantizer = UNSCALED
    b: Quantizer = UNSCALED
    model: Model | str | None = None
    promote: int | Array | None = None
    split_k: int = 1
    reduction: str = "ascending"
    dtype: Format = F32
    backward: str | Recipe | tuple[Recipe, Recipe] = "exact"
    name: str = field(default="", compare=False)
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        self._check_types()
        object.__setattr__(self, "target", resolve_target(self.target))
        op = require_product(check(self.op, self.target))
        object.__setattr__(self, "op", op)
        if isinstance(self.model, str):
            object.__setattr__(self, "model", resolve_arithmetic(op, self.target, self.model).model)
        if op.d not in (F32, F16):
            raise Unsupported(f"{op}: a recipe takes an instruction with results f32 or f16. PTX ISA {manual_section(op)}")
        if op.sparse and (op.scaling is not None or "block" in (self.a.scaling, self.b.scaling) or self.a.hadamard is not None):
            raise Unsupported(
                f"{op}: a sparse recipe scales by tensor, row or column, or not at all, and transforms nothing; take a dense instruction "
                f"for blocks. PTX ISA {manual_section(op)}"
            )
        resolve_arithmetic(op, self.target, self.model)
        for name, quantizer, other in (("a", self.a, "column"), ("b", self.b, "row")):
            self._check_operand(name, quantizer, other)
        if self.a.hadamard != self.b.hadamard:
            raise ValueError(
                f"a.hadamard={self.a.hadamard}, b.hadamard={self.b.hadamard}: a transform cancels in the product only where both operands "
                "have the same; give both the same signs, or none"
            )
        if self.a.hadamard is not None:
            resolve_arithmetic(_hadamard_op(self.target), self.target)  # raises where the target has no bf16 instruction
        object.__setattr__(self, "dtype", RESULT_FORMATS.get(self.dtype, self.dtype) if isinstance(self.dtype, str) else self.dtype)
        if self.dtype not in RESULT_FORMATS.values():
            raise ValueError(f"dtype={self.dtype!r}: expected f32, f16 or bf16, of tcemu.formats or by its name")
        several = self.backward if isinstance(self.backward, tuple) else (self.backward,)
        try:
            given = tuple(as_recipe(one, self.target) if isinstance(one, str) and one not in BACKWARD_MODES else one for one in several)
        except ValueError as error:
            raise type(error)(f"backward={self.backward!r}: expected one of {', '.join(BACKWARD_MODES)}, or recipes; {error}") from None
        object.__setattr__(self, "backward", given if isinstance(self.backward, tuple) else given[0])
        pair = isinstance(self.backward, tuple) and len(self.backward) == 2 and all(isinstance(r, Recipe) for r in self.backward)
        if not (pair or isinstance(self.backward, Recipe) or self.backward in BACKWARD_MODES):
            raise ValueError(
                f"backward={self.backward!r}: expected one of {', '.join(BACKWARD_MODES)}, a Recipe, its name, or a pair of them"
            )

    def _check_types(self) -> None:
        """Checks each field by itself. Numbers are ints or arrays of integers, in range; NumPy's integers become ints."""
        for name in ("a", "b"):
            if not isinstance(getattr(self, name), Quantizer):
                raise TypeError(f"{name}={getattr(self, name)!r}: expected a tcemu.quantize.Quantizer")
        if not (self.model is None or isinstance(self.model, Model | str)):
            raise TypeError(f"model={self.model!r}: expected a tcemu.Model, or None for the target's own arithmetic")
        for name in ("name", "source"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name}={getattr(self, name)!r}: expected a string")
        self.check_fields(counts="split_k", reduction=REDUCTIONS)
        if isinstance(self.promote, np.integer):
            object.__setattr__(self, "promote", int(self.promote))
        if isinstance(self.promote, np.ndarray | jax.Array):
            whole = jnp.issubdtype(self.promote.dtype, jnp.integer)
            fits = whole and (isinstance(self.promote, Tracer) or bool((np.asarray(self.promote) >= 1).all()))
        else:
            fits = self.promote is None or is_count(self.promote)
        if not fits:
            raise ValueError(f"promote={self.promote!r}: expected a number of instructions, 1 or more, or None")

    def _check_operand(self, name: str, quantizer: Quantizer, other: str) -> None:
        argument = f"{name}={quantizer!r}"
        if quantizer.scaling == other:
            raise ValueError(
                f"{argument}: a scale for each {other} of {name.upper()} would be inside the sum over K; "
                f'give {name} "{"row" if name == "a" else "column"}", "tensor" or "block"'
            )
        if quantizer.scales_in_unit != (self.op.scaling is not None):
            expected = (
                'scaling="block" with block=None' if self.op.scaling is not None else "another scaling, or an instruction with .block_scale"
            )
            raise ValueError(f"{argument}: {self.op} {'needs' if self.op.scaling is not None else 'has no'} block scales; give {expected}")
        if quantizer.outer_block is not None:
            if self.promote is None:
                raise ValueError(f"{argument}: scales of blocks multiply promoted sums; give promote=, a number of instructions")
            depth = quantizer.outer_block[1]
            for promote in {1} if isinstance(self.promote, Tracer) else set(np.ravel(self.promote).tolist()):
                if depth % (taken := promote * self.op.k):
                    raise ValueError(f"{argument}: promote={promote} takes {taken} elements along K, which does not divide {depth}")

    def __repr__(self) -> str:
        first, *more = self._description_lines()
        unit = describe_unit(self.op, self.target)
        return "\n".join([first, *([f"  {unit}"] if unit else []), *more])

    def _repr_html_(self) -> str:
        """The products of the recipe as a table, for notebooks."""
        products = {"D": self} | dict(zip(("dA", "dB"), self.gradients or (), strict=False))
        rows = tuple((name, *recipe._description_cells()) for name, recipe in products.items())
        backward = {} if self.gradients is not None else {"backward": str(self.backward)}
        return Table(self.name or "recipe", ("product", "instruction", "target", "A", "B", "sums", "result"), rows, backward).html()

    def _description_cells(self) -> tuple[str, ...]:
        """Returns the instruction, the target, both operands, the sums and the result, as `__repr__` words them."""
        sums = "chained" if self.promote is None else f"promoted to f32 every {self.promote} instructions"
        sums += f", K in {self.split_k} parts added {self.reduction}" if self.split_k > 1 else ""
        result = f"{self.dtype}" + ("" if self.model is None else f"; {self.model}")
        return str(self.op), self.target, f"{self.op.a} {self.a}", f"{self.op.b} {self.b}", sums, result

    def _description_lines(self) -> list[str]:
        op, target, a, b, sums, result = self._description_cells()
        lines = [f"{self.name or 'recipe'}: {op} on {target}", f"  A {a}; B {b}", f"  sums {sums}; result {result}"]
        if self.gradients is None:
            lines.append(f"  backward {self.backward}")
        for gradient, recipe in zip(("dA", "dB"), self.gradients or (), strict=False):
            lines.append(f"  backward {gradient} " + "\n  ".join(recipe._description_lines()))
        return lines

    @property
    def gradients(self) -> tuple[Recipe, Recipe] | None:
        """The recipes of dA and dB; None where `backward` is "exact" or "straight_through"."""
        if isinstance(self.backward, str):
            return None
        return self.backward if isinstance(self.backward, tuple) else (self.backward, self.backward)

    def require_gradients(self) -> tuple[Recipe, Recipe]:
        """Return the recipes of dA and dB.

        Raises:
            ValueError: `backward` is "exact" or "straight_through".
        """
        if self.gradients is None:
            raise ValueError(f"backward={self.backward!r} names no recipes of the gradients")
        return self.gradients

    @property
    def arithmetic(self) -> Model:
        """The model in use: `model`, or the target's own."""
        return resolve_arithmetic(self.op, self.target, self.model).model

    @property
    def evidence(self) -> dict[str, Evidence | None]:
        """Evidence for the arithmetic of each product: "D", and "dA" and "dB" where recipes compute them. See `tcemu.evidence`.

        None where the arithmetic is not the target's own: a what-if.
        """
        products = {"D": self} | dict(zip(("dA", "dB"), self.gradients or (), strict=False))
        return {name: recipe._model_evidence() for name, recipe in products.items()}

    def bibtex(self) -> str:
        """Return BibTeX entries of tcemu, of the recipe's sources, and of the evidence for the arithmetics, gradients included."""
        sources = [recipe.source for recipe in (self, *(self.gradients or ()))]
        return make_bibtex(*sources, *(known.source for known in self.evidence.values() if known is not None))

    def _model_evidence(self) -> Evidence | None:
        try:
            row = find_row(self.op, self.target)
        except NotModelled:
            return None
        return row.evidence if self.model is None or self.model == row.model else None

    @property
    def instructions_per_block(self) -> int | None:
        """Instructions along K per block whose scale multiplies outside: the greatest common divisor of A's and B's. None: no blocks."""
        depths = [quantizer.outer_block[1] for quantizer in (self.a, self.b) if quantizer.outer_block is not None]
        return gcd(*depths) // self.op.k if depths else None

    @property
    def unit_block(self) -> int:
        """Elements along K that share a scale inside the instruction; 0 without block scales."""
        return self.op.scale_block

    @property
    def schemes(self) -> tuple[Scheme, Scheme]:
        """The quantisation of A and of B: the quantisers, with the formats and blocks of the instruction."""
        op = self.op
        unit = {
            "scale_format": None if op.scaling is None else op.scaling.format,
            "unit_block": self.unit_block,
            "transform": self._transform(),
        }
        return Scheme(op.a, self.a, **unit), Scheme(op.b, self.b, **unit)

    def _transform(self) -> HadamardTransform | None:
        """Returns the Hadamard transform of the operands, by the bf16 instruction of the target."""
        if self.a.hadamard is None:
            return None
        used = resolve_arithmetic(_hadamard_op(self.target), self.target)
        return HadamardTransform(self.a.hadamard, used.model, product_spec(used.op))

    @property
    def is_stochastic(self) -> bool:
        """True if the recipe or a recipe of its gradients rounds stochastically, and so needs a key."""
        return "SR" in (self.a.rounding, self.b.rounding) or any(r.is_stochastic for r in self.gradients or ())

    def what_if(self, *, backward: bool = True, **changes: Any) -> Recipe:
        """Returns the recipe with another arithmetic.

        `replace` changes the other fields of a recipe, and promote without that of the gradients.

        Args:
            backward: Apply the same changes to the recipes of the gradients, each from its own fields.
            **changes: Fields of `tcemu.Model`, and promote.

        Raises:
            TypeError: another field.
            ValueError: a value that the constructors reject.
        """
        known = {f.name for f in fields(Model)}
        if unknown := [name for name in changes if name not in known and name != "promote"]:
            raise TypeError(
                f"what_if({', '.join(f'{name}=...' for name in unknown)}): expected backward=, promote= or fields of tcemu.Model, "
                f"{', '.join(sorted(known))}; .replace() changes the other fields of a recipe"
            )
        given = {name: value for name, value in changes.items() if name != "promote"}
        own: dict[str, Any] = {name: value for name, value in changes.items() if name == "promote"}
        own |= {"model": self.arithmetic.replace(**given)} if given else {}
        if backward and isinstance(self.backward, Recipe):
            own["backward"] = self.backward._gradients_what_if("gradient", changes)
        elif backward and isinstance(self.backward, tuple):
            own["backward"] = tuple(r._gradients_what_if(name, changes) for r, name in zip(self.backward, ("dA", "dB"), strict=True))
        return self.replace(**own)

    def _gradients_what_if(self, gradient: str, changes: dict[str, Any]) -> Recipe:
        try:
            return self.what_if(**changes)
        except ValueError as error:
            raise ValueError(
                f"backward {gradient}, {self.name or self.op}: {error}. backward=False leaves the gradients' recipes"
            ) from error

    def to_json(self, indent: int | None = None) -> str:
        """Return the recipe as JSON, with the recipes of its gradients. `from_json` reads it.

        Args:
            indent: Spaces per level, or None for one line.

        Raises:
            TypeError: A field is traced by JAX.
        """
        return json.dumps(recipe_to_dict(self), indent=indent, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Read the recipe of `to_json`.

        Args:
            text: JSON text. It is not trusted: unknown names and values are rejected.

        Returns:
            A recipe that equals the saved one, with its name and source.

        Raises:
            ValueError: The text is no recipe of this version of the format, or its values are impossible.
        """
        return recipe_from_dict(cls, parse_json(text))

    def tree_flatten(self) -> tuple[tuple, tuple]:
        promote = None if isinstance(self.promote, int) else self.promote
        backward = None if isinstance(self.backward, str) else self.backward
        static = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("model", "name", "source")}
        static |= {"promote": self.promote if promote is None else None, "backward": self.backward if backward is None else None}
        return (self.model, promote, backward), tuple(static.items())

    @classmethod
    def tree_unflatten(cls, aux: tuple, children: tuple) -> Recipe:
        recipe, (model, promote, backward) = object.__new__(cls), children
        values = dict(aux) | {"model": model, "name": "", "source": ""}
        values["promote"] = values["promote"] if promote is None else promote
        values["backward"] = values["backward"] if backward is None else backward
        for name, value in values.items():
            object.__setattr__(recipe, name, value)
        return recipe


# ---- recipes by name


def get_recipe(name: str, /, target: str | None = None, *, evidence: str | None = None, **changes: Any) -> Recipe:
    """Returns one of the recipes in use, `tcemu.recipes.RECIPES`: "bf16", "fp8", "deepseek", "mxfp8", "nvfp4", ...

    Every function that takes a recipe takes its name too. Gradients are computed by recipes that belong to the name, unless `backward` is
    among the changes.

    Args:
        name: The name, also with its target, as "deepseek on H100". Case, hyphens and underscores make no difference.
        target: The GPU, as "H100" or "sm_90a"; None: sm_90a, or sm_100a for block scales. The arithmetic is that of the target's main
            instruction: wgmma on sm_90a, tcgen05 on the targets from sm_100 to sm_110 that end in f or a, mma elsewhere. PTX gives tcgen05
            to no other target (9.7.16, Target ISA Notes), and ptxas 13.0 rejects it on sm_100.
        evidence: The least level of evidence that is accepted for the recipe and the recipes of its gradients, as "published": less is an
            error. None: any, "assumed" included. A changed arithmetic, `model`, is not asked for evidence.
        **changes: Other fields of the `Recipe`.

    Raises:
        ValueError: an unknown name or level, or two targets.
        NotModelled: there is less evidence than `evidence` asks for, or nobody has published the target's arithmetic.
        Unsupported: the target has no such instruction. The message lists the targets that work.

    Example:
        >>> import tcemu
        >>> recipe = tcemu.get_recipe("fp8", "H100")
        >>> str(recipe.op), recipe.dtype
        ('wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3', f32)
    """
    name, target = _split_recipe_name(name, target)
    row = ROWS[name]
    assert row.backward is not None
    target = (DEFAULT_SCALED_TARGET if row.block_scale else DEFAULT_TARGET) if target is None else resolve_target(target)
    try:
        _, *backward = (_recipe_from_row(one, target, {}) for one in (name, *row.backward))
    except (Unsupported, NotModelled) as error:
        refusal = NotModelled if target in TARGETS and TARGETS[target].public and isinstance(error, NotModelled) else Unsupported
        working = ", ".join(_supported_targets(name))
        raise refusal(f"recipe({name!r}, {target!r}): {error} The recipe works on {working}.") from None
    changes.setdefault("backward", tuple(backward))
    recipe = _recipe_from_row(name, target, changes)
    if evidence is not None:
        for one in (recipe, *(recipe.gradients or ())):
            if one.model is None:
                require_evidence(one.op, one.target, evidence)
    return recipe


def as_recipe(what: Recipe | str, target: str | None = None) -> Recipe:
    """Returns a recipe that is given as a value or by its name. `target` completes a name without a target."""
    if isinstance(what, str):
        return _cached_recipe(what, None if " on " in what else target)
    if not isinstance(what, Recipe):
        raise TypeError(f"recipe: got {type(what).__name__}; expected a tcemu.Recipe, or a name of tcemu.recipes.RECIPES, as 'bf16'")
    return what


def resolve_recipe(recipe: Recipe | str, key: PRNGKey | None) -> Recipe:
    """Returns the recipe of one product, given as a value or by its name.

    Raises:
        TypeError: it is neither a Recipe nor a name.
        ValueError: the name is unknown, `promote` is an array of several numbers, or stochastic rounding has no key.
    """
    recipe = as_recipe(recipe)
    if isinstance(recipe.promote, jax.Array | np.ndarray) and recipe.promote.ndim:
        raise ValueError(
            f"recipe: promote is an array {list(recipe.promote.shape)}; a product takes one number: sweep recipes with jax.vmap"
        )
    if recipe.is_stochastic and key is None:
        raise ValueError('recipe: rounding="SR" needs random bits: give key= (a jax.random key)')
    return recipe


@lru_cache(maxsize=256)
def _cached_recipe(name: str, target: str | None) -> Recipe:
    return get_recipe(name, target)


def _split_recipe_name(name: str, target: str | None) -> tuple[str, str | None]:
    """Splits "fp8 on H100" into the name of a row and the target."""
    named, target = split_target(name, target)
    row = _row_name(named)
    if row not in RECIPES and find_short_name(named) is not None:
        raise ValueError(
            f"recipe {shorten_text(name)!r}: {named.strip()!r} is an instruction: op={named.strip()!r}, as tcemu.gemm takes, or "
            f"tcemu.Recipe({named.strip()!r}, target); recipes are {', '.join(RECIPES)}"
        )
    if row not in RECIPES:
        raise unknown_recipe("recipe", name, row, RECIPES, "fp8 on H100")
    return row, target


def _row_name(name: str) -> str:
    """Return the name of a row as the table has it; other names of its format, such as "float16", become the format's."""
    row = normal_name(name)
    return row if row in ROWS else ALIASES.get(row, row)


def names_recipe_alone(name: str) -> bool:
    """Return True if a text names a recipe, with or without its target, and no instruction as "bf16" does."""
    return find_short_name(name) is None and _row_name(name.partition(" on ")[0]) in RECIPES


@cache
def _supported_targets(name: str) -> tuple[str, ...]:
    """Lists the targets on which a recipe and its gradients work."""

    def works(row: str, target: str) -> bool:
        if target not in targets(_row_spelling(row, target)):
            return False  # much faster than the error, whose text lists the target's alternatives
        try:
            return bool(_recipe_from_row(row, target, {}))
        except (Unsupported, NotModelled):
            return False

    every = (*TARGETS, *OTHER_TARGETS)
    return tuple(target for target in every if all(works(row, target) for row in (name, *(ROWS[name].backward or ()))))


def _row_spelling(name: str, target: str) -> str:
    """Spells the instruction of one row on a target. The target need not have it."""
    row = ROWS[name]
    if library_unit(target) == "tcgen05":
        scaling = None if row.block_scale is None else (row.block_scale.kind, row.block_scale.scale_vec, str(row.block_scale.stype))
        described = lambda op: None if op.scaling is None else (op.kind, op.scaling.count, op.scaling.format.name)
        return next(
            str(op) for op in usual_products() if (op.a, op.b, op.d, op.sparse, described(op)) == (row.a, row.b, F32, row.sparse, scaling)
        )
    if row.block_scale:
        kind, vectors, stype, k = row.block_scale.kind, row.block_scale.scale_vec, row.block_scale.stype, row.block_scale.k
        return f"mma.sync.aligned.m16n8k{k}.row.col.kind::{kind}.block_scale.scale_vec::{vectors}X.f32.{row.a}.{row.b}.f32.{stype}"
    k = 256 // max(row.a.bits, 8) * (2 if row.sparse else 1)
    if library_unit(target) == "wgmma":
        return f"wgmma.mma_async{'.sp' if row.sparse else ''}.sync.aligned.m64n64k{k}.f32.{row.a}.{row.b}"
    if row.a == row.b:
        return str(resolve_op(row.a.name + (" sparse" if row.sparse else ""), target))  # targets before sm_80 have smaller shapes
    return f"mma.sync.aligned.m16n8k{k}.row.col.f32.{row.a}.{row.b}.f32"


def _hadamard_op(target: str) -> str:
    """Spells the instruction that applies a Hadamard transform on a target."""
    return _row_spelling("bf16", target) if library_unit(target) == "tcgen05" else HADAMARD_OP


def _recipe_from_row(name: str, target: str, changes: dict[str, Any]) -> Recipe:
    """Makes the recipe of one row on a target. Its gradients are "exact" unless they are among the changes."""
    row = ROWS[name]
    values: dict[str, Any] = {
        "op": _row_spelling(name, target), "target": target,
        "a": row.quantizer_a, "b": row.quantizer_b, "promote": split_accumulator_interval(target) if row.split_accumulator else row.promote,
        "name": name, "source": row.source,
    }  # fmt: skip
    return Recipe(**values | changes)
