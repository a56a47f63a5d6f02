"""Wide recipes: products of float32 matrices that are made of several products of narrower parts, as 3xTF32 and BF16x9.

Each operand is a sum of parts. The first part is the operand rounded to the format of an instruction, the second is the rest rounded to it,
and so on; a part may be multiplied by a power of two, so that it is no subnormal number of its format. Products of parts are added along
K in one accumulator, the small ones first. After every tile of K the accumulator is added to an f32 sum and restarts. `ROWS` has the
recipes in use, each with its source.

CUTLASS's BF16x9 for sm_100 multiplies the accumulator by 2^-8 inside `tcgen05.mma` (scale-input-d), whose rounding nobody has published:
here it is an f32 product, exact unless it is subnormal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from tcemu.base.compilation import jit_wide_vectors
from tcemu.base.gradients import straight_through
from tcemu.base.meshes import match_varying_axes, shard_like
from tcemu.base.records import Record
from tcemu.engine.arithmetic.fma import add
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.product_spec import ProductSpec, product_spec
from tcemu.engine.backends.dispatch import multiply_matrices
from tcemu.engine.backends.quotients import multiply
from tcemu.engine.formats.coding import convert, recode
from tcemu.engine.formats.float_arrays import array_codes
from tcemu.engine.formats.number_formats import ARRAY_FORMATS, BF16, F16, F32, TF32, Format
from tcemu.operations.products.library.kernel_sums import operand_codes
from tcemu.operations.products.product_arguments import as_jax_array, check_float_dtype, pad_k, product_shape
from tcemu.operations.products.recipe_facts import plain_facts
from tcemu.operations.products.recipe_json import recipe_from_dict, recipe_to_dict, value_from_dict, value_to_dict
from tcemu.operations.products.recipe_kinds import Evidence, ProductCall, ProductOperands, RecipeFacts, RecipeKind, register_kind
from tcemu.operations.products.recipe_names import normal_name, split_target, unknown_recipe
from tcemu.operations.products.recipes import Recipe, get_recipe

PART_ROUNDINGS = ("RN", "RZ", "RNA")  # nearest even; toward zero; to nearest with ties away from zero
CLEARED_VALUES = ("NaN", "NaN and Inf")
SIGN, EXPONENT = np.uint32(0x80000000), np.uint32(0x7F800000)  # fields of f32


class WideRow(NamedTuple):
    """One wide recipe, for any target."""

    narrow: str  # name of the recipe of one product of parts
    roundings: tuple[str, ...]  # of the parts, the greatest part first
    products: tuple[tuple[int, int], ...]  # parts of A and of B, in the order of addition
    by_instruction: bool  # all products of an instruction's K come before the next instruction's; else each product spans the tile
    cleared: str | None  # values of the accumulator that become +0 before the last product
    short_first_tile: bool  # the first tile has the K of one instruction
    source: str
    exponents: tuple[int, ...] = ()  # powers of two by which the parts are multiplied; (): none is
    apart: bool = False  # the products of lower parts have an accumulator of their own over all of K
    k_tile: int | None = None  # elements; None: K_TILE
    target: str | None = None  # None: any; the first is sm_90a


X3 = ((1, 0), (0, 1), (0, 0))
X6 = ((1, 1), (2, 0), (0, 2), (1, 0), (0, 1), (0, 0))
X9 = ((2, 2), (1, 2), (2, 1), *X6)
_XLA = "openxla/xla, xla/service/gpu/fusions/triton/dot_algorithms.cc: parts truncated by a mask, the last one rounded; arXiv 1904.06376"
_TRITON = "triton-lang/triton, lib/Dialect/TritonGPU/Transforms/F32DotTC.cpp, input_precision of tl.dot"
_CUTLASS = "NVIDIA/cutlass, mma_tensor_op_fast_f32.h: OpMultiplyAddFastF32; mma_multistage.h: staged accumulation"
_CUTLASS_X9 = "NVIDIA/cutlass, sm100_mma_warpspecialized_emulated.hpp: bands, 2^8 between parts, promotion after each instruction's K; \
that cuBLAS's BF16x9 is the same, and how scale-input-d rounds, is assumed"
_OOTOMO = (
    "arXiv 2203.03341: f16 with 2^11 times the rest; the main sums leave the tensor core after each instruction, the corrections do not"
)
BANDS = ((2, 2), (1, 2), (2, 1), (0, 2), (1, 1), (2, 0), (0, 1), (1, 0), (0, 0))
ROWS = {
    "tf32x3": WideRow("tf32", ("RNA", "RZ"), X3, False, "NaN", False, _TRITON),
    "bf16x3": WideRow("bf16", ("RN", "RN"), X3, False, "NaN", False, _TRITON),
    "bf16x6": WideRow("bf16", ("RN", "RN", "RN"), X6, False, "NaN", False, _TRITON),
    "xla_bf16x3": WideRow("bf16", ("RZ", "RN"), X3, False, "NaN and Inf", False, _XLA),
    "xla_bf16x6": WideRow("bf16", ("RZ", "RZ", "RN"), X6, False, "NaN and Inf", False, _XLA),
    "xla_bf16x9": WideRow("bf16", ("RZ", "RZ", "RN"), X9, False, "NaN and Inf", False, _XLA),
    "cutlass_3xtf32": WideRow("tf32", ("RZ", "RNA"), X3, True, None, True, _CUTLASS),
    "cutlass_bf16x9": WideRow("bf16", ("RN", "RN", "RN"), BANDS, False, None, False, _CUTLASS_X9, (0, 8, 16), False, 16, "sm_100a"),
    "cutlass_bf16x6": WideRow("bf16", ("RN", "RN", "RN"), BANDS[3:], False, None, False, _CUTLASS_X9, (0, 8, 16), False, 16, "sm_100a"),
    "ootomo_fp16x2": WideRow("f16", ("RN", "RN"), X3, True, None, False, _OOTOMO, (0, 11), True, 16, "sm_80"),
}
K_TILE = 32  # elements: the usual BLOCK_K of these kernels for f32 operands. A library may choose another for a shape


class Band(NamedTuple):
    """Products that were multiplied by one power of two."""

    exponent: int
    products: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class WideRecipe(Record):
    """A product of float32 matrices that is made of several products of narrower parts: a frozen value that hashes.

    Outside the instruction all arithmetic is f32, rounded to nearest even. `tcemu.matmul` and `tcemu.dot_general` compute by a wide recipe.

    Attributes:
        narrow: `Recipe` of one product of parts: its instruction, target and model. It scales nothing and promotes nothing.
        roundings: Rounding of each part, the greatest part first: "RN", "RZ", or "RNA", to nearest with ties away from zero.
        products: The products of parts in the order of addition, each a pair (part of A, part of B).
        k_tile: Elements of K after which the accumulator is added to the f32 sum; a multiple of the instruction's K.
        by_instruction: True: all products of an instruction's K are added before those of the next one. False: each product spans the tile.
        cleared: Values of the accumulator that become +0 before the last product of a tile: "NaN", "NaN and Inf", or None.
        short_first_tile: True: the first tile has the K of one instruction.
        exponents: Powers of two by which the parts are multiplied, as (0, 8, 16), or () for none. Consecutive products whose parts have
            equal exponents in sum are a band; the accumulator is multiplied by a power of two before the next band.
        apart: True: the products of lower parts, which are one band, have an accumulator of their own over all of K, added at the end.
        name: The recipe's name; ignored by equality.
        source: Where the recipe is described; ignored by equality.

    Raises:
        TypeError, ValueError: a field has another type or value, or two fields contradict each other.
    """

    narrow: Recipe
    roundings: tuple[str, ...]
    products: tuple[tuple[int, int], ...]
    k_tile: int = K_TILE
    by_instruction: bool = False
    cleared: str | None = None
    short_first_tile: bool = False
    exponents: tuple[int, ...] = ()
    apart: bool = False
    name: str = field(default="", compare=False)
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.narrow, Recipe):
            raise TypeError(f"narrow={self.narrow!r}: expected a tcemu.Recipe, as tcemu.get_recipe('bf16', 'A100') returns")
        self.check_fields(flags="by_instruction short_first_tile apart", counts="k_tile", cleared=(None, *CLEARED_VALUES))
        object.__setattr__(self, "narrow", self.narrow.replace(backward="exact"))
        plain = Recipe(self.narrow.op, self.narrow.target, model=self.narrow.model)
        if self.narrow != plain or self.narrow.op.d != F32 or self.narrow.op.a != self.narrow.op.b:
            raise ValueError(f"narrow={self.narrow!r}: expected a recipe that neither scales nor promotes, with equal formats and f32 sums")
        if self.format not in (BF16, TF32, F16):
            raise ValueError(f"narrow={self.narrow.op}: expected bf16, tf32 or f16 operands")
        parts = len(self.roundings)
        if self.format == F16 and "RNA" in self.roundings:
            raise ValueError("roundings: f16 parts are rounded RN or RZ")
        if not parts or any(rounding not in PART_ROUNDINGS for rounding in self.roundings):
            raise ValueError(f"roundings={self.roundings!r}: expected one of {', '.join(PART_ROUNDINGS)} for each part")
        known = all(isinstance(pair, tuple) and len(pair) == 2 and all(part in range(parts) for part in pair) for pair in self.products)
        if not self.products or not known:
            raise ValueError(f"products={self.products!r}: expected pairs of the numbers of parts, 0 to {parts - 1}")
        if self.k_tile % self.narrow.op.k:
            raise ValueError(f"k_tile={self.k_tile!r}: expected a multiple of {self.narrow.op.k}, the K of {self.narrow.op}")
        if self.cleared is not None and self.by_instruction:
            raise ValueError("cleared: the last product of a tile has no place of its own with by_instruction; leave one of them out")
        exponents = self.exponents
        if exponents and (
            len(exponents) != parts or exponents[0] != 0 or any(not isinstance(e, int) or not 0 <= e <= 60 for e in exponents)
        ):
            raise ValueError(f"exponents={exponents!r}: expected a number from 0 to 60 for each part, 0 first, or ()")
        if self.cleared is not None and exponents:
            raise ValueError("cleared: libraries that scale their parts clear nothing; leave one of them out")
        if self.apart and (len(self.bands) != 2 or self.bands[-1].exponent):
            raise ValueError("apart: expected two bands, the corrections and then the products of the first parts")

    @property
    def bands(self) -> tuple[Band, ...]:
        """Consecutive products whose parts were multiplied by equal powers of two in sum."""
        powers = self.exponents or (0,) * len(self.roundings)
        keyed = groupby(self.products, lambda pair: powers[pair[0]] + powers[pair[1]])
        return tuple(Band(exponent, tuple(products)) for exponent, products in keyed)

    @property
    def target(self) -> str:
        """The GPU."""
        return self.narrow.target

    @property
    def format(self) -> Format:
        """Format of the parts."""
        return self.narrow.op.a

    def __repr__(self) -> str:
        order = ", ".join(f"A{i}·B{j}" for i, j in self.products)
        lines = [
            f"{self.name or 'wide recipe'}: {len(self.products)} products by {self.narrow.op} on {self.narrow.target}",
            f"  {len(self.roundings)} parts of {self.format}, rounded {', '.join(self.roundings)}; {order}",
            f"  sums promoted to f32 every {self.k_tile} elements" + (", all products by instruction" if self.by_instruction else ""),
            *([f"  parts multiplied by 2^{', 2^'.join(map(str, self.exponents))}"] if self.exponents else []),
            *(["  corrections added at the end"] if self.apart else []),
        ]
        return "\n".join(lines)


def get_wide_recipe(name: str, /, target: str | None = None, **changes: Any) -> WideRecipe:
    """Return one of the wide recipes in use: "tf32x3", "bf16x6" (Triton's), "xla_bf16x9", "cutlass_bf16x9", "ootomo_fp16x2" and others.

    Args:
        name: The name, also with its target, as "bf16x6 on A100". Case, hyphens and underscores make no difference.
        target: The GPU, as "H100" or "sm_80"; None: sm_90a, or the target of the row's source.
        **changes: Other fields of the `WideRecipe`. `k_tile` is 32 or the row's unless it is given; a library chooses it for each shape.

    Returns:
        The recipe.

    Raises:
        ValueError: The name is unknown, or there are two targets.
        Unsupported: The target has no such instruction.
        NotModelled: There is no evidence for the instruction's arithmetic.

    Source: the recipe's `source`.
    """
    named, target = split_target(name, target)
    key = normal_name(named)
    if key not in ROWS:
        raise unknown_recipe("wide recipe", name, key, ROWS, "bf16x6 on H100")
    row = ROWS[key]
    values = row._asdict() | {"narrow": get_recipe(row.narrow, row.target if target is None else target, backward="exact"), "name": key}
    del values["target"]
    values["k_tile"] = row.k_tile or K_TILE
    return WideRecipe(**values | changes)


@lru_cache(maxsize=64)
def _find(name: str) -> WideRecipe | None:
    """Return the wide recipe that a text names, with or without its target; None for any other text."""
    return get_wide_recipe(name) if normal_name(name.partition(" on ")[0]) in ROWS else None


# ---- JSON


def wide_recipe_to_dict(recipe: WideRecipe) -> dict[str, Any]:
    """Convert a wide recipe to plain values."""
    return value_to_dict(recipe) | {"narrow": recipe_to_dict(recipe.narrow)}


def wide_recipe_from_dict(data: Any) -> WideRecipe:
    """Convert the plain values of `wide_recipe_to_dict` to their recipe. Raises ValueError."""
    return value_from_dict("a wide recipe", WideRecipe, data, narrow=partial(recipe_from_dict, Recipe))


# ---- the product


class _WideProgram(NamedTuple):
    """The static part of a product."""

    recipe: WideRecipe
    spec: ProductSpec
    dtype: Format  # of the result


def matmul_with_wide_recipe(recipe: WideRecipe, given: ProductOperands, dtype: DTypeLike) -> Array:
    """Compute A·B (+ bias) by a wide recipe: see `tcemu.matmul`. Raises TypeError or ValueError for unfit operands.

    Gradients are those of the plain f32 product: what the parts leave out counts as zero.
    """
    fmt = ARRAY_FORMATS[check_float_dtype(dtype)]
    shape = product_shape(given.a.shape, given.b.shape, None if given.bias is None else given.bias.shape, names=("a", "b", "bias"))
    if 0 in shape:
        return jnp.zeros(shape, dtype)
    operands = jax.tree.map(as_jax_array, given)
    program = _WideProgram(recipe, product_spec(recipe.narrow.op), fmt)

    def bits(given: ProductOperands) -> Array:
        return lax.bitcast_convert_type(_wide_codes(program, recipe.narrow.arithmetic, given), np.dtype(dtype))

    return straight_through(bits, _smooth_product, operands)


def _smooth_product(given: ProductOperands) -> Array:
    a, b = (jnp.asarray(x).astype(jnp.float32) for x in (given.a, given.b))
    total = jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
    return total if given.bias is None else total + given.bias.astype(jnp.float32)


@jit_wide_vectors(0)
def _wide_codes(program: _WideProgram, model: Model, given: ProductOperands) -> Array:
    """Computes the codes of the result."""
    recipe = program.recipe
    total = jnp.zeros(product_shape(given.a.shape, given.b.shape), jnp.uint32)
    if given.a.shape[-1]:
        a, b = (split_in_parts(recipe, jnp.asarray(x)) for x in (given.a, given.b))
        total = _sum_tiles(program, model, a, b)
    if given.bias is not None:
        source, codes = array_codes(given.bias)
        total = add(total, convert(source, F32, codes), F32)
    return recode(F32, program.dtype, total)


def split_in_parts(recipe: WideRecipe, x: Array) -> list[Array]:
    """Return the codes of an operand's parts, in the format of the instruction. x: floats of any shape; wider ones are rounded to f32."""
    source, codes = array_codes(x)
    rest, parts = convert(source, F32, codes), []
    powers = recipe.exponents or (0,) * len(recipe.roundings)
    for number, rounding in enumerate(recipe.roundings):
        part = _round_part(recipe.format, rounding, rest)
        parts.append(part)
        if number + 1 < len(recipe.roundings):
            rest = add(rest, recode(recipe.format, F32, part) ^ SIGN, F32)
            rest = _scale(rest, powers[number + 1] - powers[number])
    return parts


def _scale(codes: Array, exponent: int) -> Array:
    """Multiplies f32 codes by a power of two."""
    return codes if exponent == 0 else multiply(codes, np.float32(2.0**exponent).view(np.uint32), F32)


def _round_part(fmt: Format, rounding: str, codes: Array) -> Array:
    """Rounds f32 codes to the format of the parts. "RZ" clears bits of the word, as kernels do: of a NaN it may leave Inf."""
    if fmt == F16:
        return convert(F32, F16, codes, rounding)
    if rounding != "RZ":
        return operand_codes(fmt, rounding, lax.bitcast_convert_type(codes, jnp.float32))
    return ((codes >> (F32.mantissa_bits - fmt.mantissa_bits)) << fmt.unused_bits).astype(fmt.dtype)


def _sum_tiles(program: _WideProgram, model: Model, a: list[Array], b: list[Array]) -> Array:
    """Adds the tiles' sums: f32 codes [..., M, N]. a, b: the parts' codes, [..., M, K] and [..., K, N]."""
    recipe, spec = program.recipe, program.spec
    k, tile = a[0].shape[-1], recipe.k_tile
    before = tile - spec.k if recipe.short_first_tile else 0  # instructions of zeros change nothing: see `pad_k`
    pairs = [pad_k(spec, part_a, part_b, tile, before) for part_a, part_b in zip(a, b, strict=True)]
    count = -(-(before + k) // tile)
    parts_a = [jnp.moveaxis(x.reshape(*x.shape[:-1], count, tile), -2, 0) for x, _ in pairs]
    parts_b = [jnp.moveaxis(x.reshape(*x.shape[:-2], count, tile, x.shape[-1]), -3, 0) for _, x in pairs]
    batch = jnp.broadcast_shapes(a[0].shape[:-2], b[0].shape[:-2])
    start = jnp.zeros((*batch, a[0].shape[-2], b[0].shape[-1]), jnp.uint32)

    def add_tile(total: Array, tiles: tuple[list[Array], list[Array]]) -> tuple[Array, None]:
        return add(total, _tile_sum(program, model, *tiles, start), F32), None

    first = match_varying_axes(start, *parts_a, *parts_b)[0]
    total = lax.scan(add_tile, first, (parts_a, parts_b))[0]
    if not recipe.apart:
        return total
    correction = recipe.bands[0]
    whole_a, whole_b = zip(*pairs, strict=True)
    small = _chain(program, model, list(whole_a), list(whole_b), correction.products, start)
    return add(total, _scale(small, -correction.exponent), F32)


def _tile_sum(program: _WideProgram, model: Model, a: list[Array], b: list[Array], start: Array) -> Array:
    """Adds the products of one tile in one accumulator that begins at +0."""
    recipe = program.recipe
    bands = recipe.bands[1:] if recipe.apart else recipe.bands
    if recipe.cleared is None:
        total, below = start, bands[0].exponent
        for band in bands:
            total = _chain(program, model, a, b, band.products, _scale(total, band.exponent - below))
            below = band.exponent
        return total
    total = _chain(program, model, a, b, recipe.products[:-1], start) if recipe.products[1:] else start
    magnitude = total & ~SIGN
    clear = magnitude > EXPONENT if recipe.cleared == "NaN" else magnitude >= EXPONENT
    return _chain(program, model, a, b, recipe.products[-1:], jnp.where(clear, jnp.uint32(0), total))


def _chain(
    program: _WideProgram, model: Model, a: list[Array], b: list[Array], products: tuple[tuple[int, int], ...], total: Array
) -> Array:
    """Adds products of parts to an accumulator: all of an instruction's K before the next, or each over all of K."""
    recipe, spec = program.recipe, program.spec
    depth = spec.k if recipe.by_instruction else a[0].shape[-1]
    along_k_a = [x.reshape(*x.shape[:-1], -1, 1, depth) for x in a]  # [..., M, steps, 1, depth]
    along_k_b = [x.reshape(*x.shape[:-2], -1, 1, depth, x.shape[-1]) for x in b]
    chained_a = jnp.concatenate([along_k_a[i] for i, _ in products], -2)
    chained_b = jnp.concatenate([along_k_b[j] for _, j in products], -3)
    left = chained_a.reshape(*a[0].shape[:-1], -1)
    return multiply_matrices(model, spec, left, chained_b.reshape(*b[0].shape[:-2], -1, b[0].shape[-1]), total)


# ---- the kind of recipe


def _multiply(recipe: WideRecipe, call: ProductCall) -> Array:
    call.forbid("key", "axis_name", "scale_a", "scale_b", why="a wide recipe rounds to nearest, on one device, without scales")
    plain = lambda given: jnp.matmul(given.a, given.b)
    return shard_like(plain, lambda given: matmul_with_wide_recipe(recipe, given, call.dtype), call.operands)


def _facts(recipe: WideRecipe, evidence: Evidence) -> RecipeFacts:
    target, op, changes, level = plain_facts(recipe.narrow, evidence)
    return target, f"{len(recipe.products)} x {op}", changes, level


WIDE_KIND = register_kind(
    RecipeKind(
        saved_as="wide_recipe", types=(WideRecipe,), find=_find,
        to_dict=wide_recipe_to_dict, from_dict=wide_recipe_from_dict,
        multiply=_multiply, facts=_facts, plain=lambda recipe: recipe.narrow,
    )
)  # fmt: skip
