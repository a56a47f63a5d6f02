"""Products by a kernel recipe, on codes and in integers: the sums of slices, their merge, and the epilogue.

The order of the recipe is data, arrays of indices along K, so that recipes of one shape share a compiled program, whatever their slices.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.base.compilation import jit_wide_vectors
from tcemu.base.meshes import match_varying_axes
from tcemu.engine.arithmetic.fma import add, fma
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.product_spec import ProductSpec, product_spec
from tcemu.engine.arithmetic.sum_tree import (
    EMPTY,
    Addition,
    Algebra,
    Chain,
    Flag,
    Join,
    Node,
    Turn,
    add_in_stages,
    evaluate,
    join_as_data,
    pad_turns,
    select,
    stages,
)
from tcemu.engine.backends.dispatch import multiply_matrices
from tcemu.engine.backends.quotients import multiply
from tcemu.engine.formats.coding import convert
from tcemu.engine.formats.float_arrays import array_codes
from tcemu.engine.formats.number_formats import F32, TF32, Format
from tcemu.operations.products.library.kernel_order import merge_node, slice_indices, unit_tree
from tcemu.operations.products.library.kernel_recipe import Epilogue, KernelRecipe, Lanes, Slices, Steps

Floats = Array | np.ndarray
MAX_STAGES = 8  # stages of a join that are unrolled in a program
EXPONENT, SIGN = np.uint32(0x7F800000), np.uint32(0x80000000)  # fields of f32
TF32_BITS, TF32_HALF = np.uint32(0xFFFFE000), np.uint32(0x1000)  # the bits of a tf32 word, and half of its last bit

# ---- the epilogue


class EpilogueFlags(NamedTuple):
    """The roundings of an epilogue with scales and a bias."""

    single_rounding: Flag  # the last product and the bias are rounded once
    plus_zero: Flag
    rounds_between: Flag  # the scaled total is rounded to `between` before the bias


class EpiloguePlan(NamedTuple):
    """The static part of an epilogue: the result's format, and all but the numbers."""

    dtype: Format
    roundings: int = 2
    saturate: bool = False
    plus_zero: bool = True
    between: Format | None = None

    @property
    def flags(self) -> EpilogueFlags:
        return EpilogueFlags(self.roundings == 1, self.plus_zero, self.between is not None)


class EpilogueOperands(NamedTuple):
    """The operands of an epilogue besides the total, f32 codes."""

    factors: tuple[Array, ...] = ()  # multiply the total in this order
    bias: Array | None = None
    beta: Array | None = None


def plan_epilogue(epilogue: Epilogue, dtype: Format) -> EpiloguePlan:
    """Returns the static part of an epilogue."""
    return EpiloguePlan(dtype, epilogue.roundings, epilogue.saturate, epilogue.plus_zero, epilogue.between)


def round_through(fmt: Format | None, total: Array) -> Array:
    """Rounds f32 codes to a format and back."""
    return total if fmt in (None, F32) else convert(fmt, F32, convert(F32, fmt, total))


def apply_epilogue(plan: EpiloguePlan, total: Array, operands: EpilogueOperands, flags: EpilogueFlags | None = None) -> Array:
    """Computes the codes of the result.

    Args:
        plan: The static part of the epilogue.
        total: f32 codes [..., M, N].
        operands: f32 codes that broadcast against the total.
        flags: Roundings as data; None: those of `plan`, static.
    """
    once, plus_zero, narrow = plan.flags if flags is None else flags
    for factor in operands.factors[:-1]:
        total = multiply(total, factor, F32)
    last, bias, beta = operands.factors[-1:], operands.bias, operands.beta

    def scaled() -> Array:
        if not last:
            return total
        return select(plus_zero, lambda: fma(last[0], total, jnp.uint32(0), F32), lambda: multiply(last[0], total, F32))

    def with_bias() -> Array:
        exact = scaled()
        waiting = select(narrow, lambda: round_through(plan.between, exact), lambda: exact)
        return fma(jnp.asarray(beta), jnp.asarray(bias), waiting, F32)

    if bias is None:
        total = scaled()
    elif last:
        total = select(once, lambda: fma(last[0], total, multiply(jnp.asarray(beta), bias, F32), F32), with_bias)
    else:
        total = with_bias()
    return total if plan.dtype == F32 else convert(F32, plan.dtype, total, "RN", plan.saturate)


def epilogue_operands(epilogue: Epilogue, scales: tuple[Floats | None, Floats | None], bias: Floats | None) -> EpilogueOperands:
    """Converts the epilogue's operands. scales: those of A and B, which broadcast against the total, or single numbers of any shape."""

    def f32(x: Floats | float) -> Array:
        source, codes = array_codes(jnp.asarray(x, jnp.float32) if isinstance(x, float) else x)
        return convert(source, F32, codes)

    factors: list[Array] = []
    if epilogue.scaled:
        ordered = scales[::-1] if epilogue.scaling == "b first" else scales
        factors = [f32(scale.reshape(()) if scale.size == 1 else scale) for scale in ordered if scale is not None]
        factors += [f32(epilogue.alpha)] if epilogue.alpha != 1.0 or not factors else []
        while epilogue.scaling == "folded" and len(factors) > 1:
            factors[:2] = [multiply(factors[0], factors[1], F32)]
    return EpilogueOperands(tuple(factors), None if bias is None else f32(bias), None if bias is None else f32(epilogue.beta))


# ---- sums of slices and their merge, on codes


class ChainFlags(NamedTuple):
    """The rounding of a lane's chain: fields of `Lanes`."""

    fused: Flag
    flush: Flag


class CodeAddition(Addition):
    """The addition of f32 codes.

    Attributes:
        flush_flag: Sums below the least normal number count as zeros.
    """

    def __init__(self, flush: Flag = False) -> None:
        self.flush_flag = flush

    def flush(self, x: Array) -> Array:
        return select(self.flush_flag, lambda: flush_subnormals(x), lambda: x)

    def add(self, x: Array, y: Array) -> Array:
        return self.flush(add(x, y, F32))

    def round(self, fmt: Format, x: Array) -> Array:
        return round_through(fmt, x)

    def put(self, sums: Array, index: Any, value: Array) -> Array:
        return sums.at[index].set(value)

    def add_pairs(self, sums: Array, pairs: Any, adding: Callable[[Array, Array], Array]) -> Array:
        if isinstance(pairs, tuple) and len(stages(pairs)) <= MAX_STAGES:
            return add_in_stages(sums, pairs, adding, self)

        def add_pair(sums: Array, pair: Array) -> tuple[Array, None]:
            return sums.at[pair[0]].set(adding(sums[pair[0]], sums[pair[1]])), None

        return lax.scan(add_pair, sums, jnp.asarray(pairs))[0]

    def extend(self, sums: Array, count: int) -> Array:
        return jnp.concatenate([sums, jnp.zeros((count, *sums.shape[1:]), sums.dtype)])


class CodeSums(CodeAddition, Algebra):
    """The algebra of sums of f32 codes: values [*grid, *outputs].

    Attributes:
        outputs: Shape of the sums of one order.
    """

    def __init__(self, outputs: tuple[int, ...], flush: Flag = False) -> None:
        super().__init__(flush)
        self.outputs = outputs

    def zeros(self, grid: tuple[int, ...], negative: Any) -> Array:
        signs = jnp.where(jnp.asarray(negative), SIGN, jnp.uint32(0))
        return jnp.broadcast_to(signs.reshape(signs.shape + (1,) * len(self.outputs) * (signs.ndim > 0)), (*grid, *self.outputs))

    @abstractmethod
    def read(self, places: Array) -> Any:
        """Return the elements of all turns."""

    def scan(self, turn: Callable[[Any, Turn], Any], state: Any, chain: Chain) -> Any:
        turns = Turn(self.read(chain.places), chain.closes, chain.slots)
        begun, treedef = jax.tree.flatten(state)
        begun = match_varying_axes(*begun, *jax.tree.leaves(turns.elements))[: len(begun)]
        return lax.scan(lambda state, each: (turn(state, each), None), treedef.unflatten(begun), turns)[0]

    def where(self, mask: Any, x: Array, y: Array) -> Array:
        mask = jnp.asarray(mask)
        return jnp.where(mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), x, y)

    def concatenate(self, parts: list[Array], axis: int) -> Array:
        return jnp.concatenate(parts, axis)

    def move_first(self, sums: Array, axis: int) -> Array:
        return jnp.moveaxis(sums, axis, 0)


class ProductSums(CodeSums):
    """Sums of products of codes a [..., M, K] and b [..., K, N]; values [*grid, ..., M, N]."""

    def __init__(self, program: KernelProgram, a: Array, b: Array, flush: Flag = False) -> None:
        rank = max(a.ndim, b.ndim)
        a, b = (x.reshape((1,) * (rank - x.ndim) + x.shape) for x in (a, b))
        super().__init__((*jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]), flush)
        fill = 1 << (program.factors[0].bits - 1)  # -0: see `tcemu.operations.products.product_arguments.pad_k`
        self.a = jnp.pad(a, [(0, 0)] * (rank - 1) + [(0, 1)], constant_values=np.array(fill, a.dtype))
        self.b = jnp.pad(b, [(0, 0)] * (rank - 2) + [(0, 1), (0, 0)])

    def take(self, places: Array) -> tuple[Array, Array]:
        """Return a [*places, ..., M] and b [*places, ..., N]."""
        places = jnp.where(places == EMPTY, self.a.shape[-1] - 1, places)
        rank, axes = places.ndim, tuple(range(places.ndim))
        a = jnp.moveaxis(jnp.take(self.a, places, axis=-1), tuple(i - rank for i in axes), axes)
        return a, jnp.moveaxis(jnp.take(self.b, places, axis=-2), tuple(i - rank - 1 for i in axes), axes)


class StepSums(ProductSums):
    """Sums of products by an instruction of tensor cores."""

    def __init__(self, program: KernelProgram, a: Array, b: Array) -> None:
        assert not isinstance(program.unit, Lanes)
        super().__init__(program, a, b)
        self.model, self.spec = program.unit

    def read(self, places: Array) -> tuple[Array, Array]:
        a, b = self.take(places)
        return jnp.moveaxis(a, 1, -1), jnp.moveaxis(b, 1, -2)  # [T, ..., M, k] and [T, ..., k, N]

    def accumulate(self, running: Array, elements: tuple[Array, Array]) -> Array:
        return multiply_matrices(self.model, self.spec, *elements, running)


class LaneSums(ProductSums):
    """Sums of products by f32 multiply-adds."""

    def __init__(self, program: KernelProgram, a: Array, b: Array, flags: ChainFlags | None = None) -> None:
        assert isinstance(program.unit, Lanes)
        self.fused, flush = (program.unit.fused, program.unit.flush) if flags is None else flags
        super().__init__(program, a, b, flush)
        self.narrow, self.factors = program.unit.product, program.factors

    def read(self, places: Array) -> tuple[Array, Array]:
        a, b = (self.flush(convert(fmt, F32, x)) for fmt, x in zip(self.factors, self.take(places), strict=True))
        return a[..., None], b[..., None, :]

    def accumulate(self, running: Array, elements: tuple[Array, Array]) -> Array:
        x, y = elements

        def product() -> Array:
            exact = self.flush(multiply(x, y, F32))
            return exact if self.narrow is None else round_through(self.narrow, exact)

        return self.flush(select(self.fused, lambda: fma(x, y, running, F32), lambda: add(product(), running, F32)))


class KernelProgram(NamedTuple):
    """The static part of a product: all but the order, which is a tree of data."""

    unit: tuple[Model, ProductSpec] | Lanes  # Lanes: only the arithmetic; the rest is in the order
    factors: tuple[Format, Format]
    epilogue: EpiloguePlan


def plan_kernel(recipe: KernelRecipe) -> tuple[KernelProgram, Join]:
    """Returns the static part of a recipe, and the tree of its sum as data."""
    unit, count = recipe.unit, len(slice_indices(recipe.slices))
    slots = 1 << (count - 1).bit_length() if isinstance(unit, Steps) else count
    tree = join_as_data(merge_node(recipe.merge, slices_as_data(unit, recipe.slices, slots)), count, slots)
    tree = tree if len(tree.pairs) else replace(tree, waiting=None)
    return KernelProgram(static_unit(unit), (recipe.a, recipe.b), plan_epilogue(recipe.epilogue, recipe.dtype)), tree


def static_unit(unit: Steps | Lanes) -> tuple[Model, ProductSpec] | Lanes:
    """Returns what a program must know of a unit besides the order."""
    if isinstance(unit, Steps):
        return unit.arithmetic, product_spec(unit.op)
    return Lanes(fused=unit.fused, flush=unit.flush, product=unit.product)


def slices_as_data(unit: Steps | Lanes, slices: Slices, slots: int, *, closing: bool = False) -> Node:
    """Returns the tree of the slices' sums as data, of `slots` sums with tensor cores. Zeros may follow the recipe's slices."""
    tree = unit_tree(unit, slices, closing=closing)
    if isinstance(tree, Chain):
        return replace(pad_turns(tree), sums=slots)
    assert isinstance(tree, Join) and isinstance(tree.child, Chain) and isinstance(unit, Lanes)
    return replace(join_as_data(tree, unit.lanes, unit.lanes), child=pad_turns(tree.child))


@jit_wide_vectors(0)
def kernel_product_codes(program: KernelProgram, tree: Join, a: Array, b: Array, operands: EpilogueOperands) -> Array:
    """Computes the codes of the result, [..., M, N]. a: codes [..., M, K]; b: codes [..., K, N]."""
    return apply_epilogue(program.epilogue, evaluate(tree, product_sums(program, a, b)), operands)


def product_sums(program: KernelProgram, a: Array, b: Array, flags: ChainFlags | None = None) -> ProductSums:
    """Returns the algebra of a program's sums. flags: those of lanes as data; None: those of the unit, static."""
    return LaneSums(program, a, b, flags) if isinstance(program.unit, Lanes) else StepSums(program, a, b)


def flush_subnormals(x: Array) -> Array:
    """Replaces the f32 codes of subnormal numbers by zeros of the same sign."""
    return jnp.where((x & EXPONENT) == 0, x & SIGN, x)


def operand_codes(fmt: Format, cast: str, x: Floats) -> Array:
    """Rounds an operand to the multiplied format. NumPy's float64 is rounded once, but to f32 first where cast is "RNA"."""
    source, codes = array_codes(x)
    if cast != "RNA" or fmt != TF32:
        return convert(source, fmt, codes, "RN" if cast == "RNA" else cast)
    codes = codes if source == F32 else convert(source, F32, codes)
    special = (codes & EXPONENT) == EXPONENT
    return jnp.where(special, convert(F32, TF32, codes), (codes + TF32_HALF) & TF32_BITS)
