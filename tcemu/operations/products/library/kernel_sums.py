"""Products by a kernel recipe, on codes and in integers: the sums of slices, their merge, and the epilogue.

The order of the recipe is data, arrays of indices along K, so that recipes of one shape share a compiled program, whatever their slices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.base.compilation import jit_wide_vectors
from tcemu.base.meshes import match_varying_axes
from tcemu.engine.arithmetic.fma import add, fma
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.product_spec import ProductSpec, product_spec
from tcemu.engine.backends.dispatch import multiply_matrices
from tcemu.engine.backends.quotients import multiply
from tcemu.engine.formats.coding import convert
from tcemu.engine.formats.float_arrays import array_codes
from tcemu.engine.formats.number_formats import F32, TF32, Format
from tcemu.operations.products.library.kernel_order import EMPTY, additions, lane_order, slice_indices, step_order
from tcemu.operations.products.library.kernel_recipe import Epilogue, KernelRecipe, Lanes, Merge, Steps

Floats = Array | np.ndarray
Flag = bool | Array | np.ndarray  # static, or data, so that recipes that differ in it share a program
EXPONENT, SIGN = np.uint32(0x7F800000), np.uint32(0x80000000)  # fields of f32
TF32_BITS, TF32_HALF = np.uint32(0xFFFFE000), np.uint32(0x1000)  # the bits of a tf32 word, and half of its last bit

# ---- the epilogue


def select(flag: Flag, one: Callable[[], Array], other: Callable[[], Array]) -> Array:
    """Returns one of the two. Where the flag is static, the other one is not traced."""
    if isinstance(flag, bool):
        return one() if flag else other()
    return jnp.where(flag, one(), other())


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


# ---- sums of slices and their merge


class KernelProgram(NamedTuple):
    """The static part of a product: all but the order."""

    unit: tuple[Model, ProductSpec] | Lanes  # Lanes: only the rounding and the start of each sum; the rest is in the order
    restarted: bool
    merge: Merge  # without its order, which is in `KernelOrder`
    factors: tuple[Format, Format]
    epilogue: EpiloguePlan


class KernelOrder(NamedTuple):
    """The order of a product, as data: see `kernel_order`."""

    indices: np.ndarray
    closes: np.ndarray
    slices: np.ndarray  # Steps: [T]; Lanes: empty
    sum_slots: np.ndarray  # [S]: its length is the number of sums that the program keeps, at least the number of slices
    lane_additions: np.ndarray  # [P, 2]
    slice_additions: np.ndarray  # [P, 2]
    total: np.ndarray  # index of the total after the last addition of slices


class MergePlan(NamedTuple):
    """The merge of the slices' sums."""

    pairs: Array | np.ndarray  # [P, 2]: additions (to, from)
    total: Array | np.ndarray  # index of the total after the last addition
    narrow: Flag  # sums wait in a format narrower than f32
    rounds_slices: Flag  # the slices' sums wait in it; otherwise only the first, as the running sum
    rounds_running: Flag  # each sum of two does
    flush: Flag


class ChainFlags(NamedTuple):
    """The rounding and the start of a lane's chain: fields of `Lanes`."""

    fused: Flag
    flush: Flag
    first: Flag


def plan_kernel(recipe: KernelRecipe) -> tuple[KernelProgram, KernelOrder]:
    """Returns the static part of a recipe, and its order as data."""
    unit, merge = recipe.unit, recipe.merge
    if isinstance(unit, Steps):
        order = step_order(unit, recipe.slices)
        count, lanes = int(order.slices[-1]) + 1, 1
        fixed, slices = (unit.arithmetic, product_spec(unit.op)), order.slices
        restarted = order.restarted
    else:
        order = lane_order(unit, recipe.slices)
        (_, count, lanes), slices = order.indices.shape, np.zeros(0, np.int32)
        fixed, restarted = Lanes(fused=unit.fused, flush=unit.flush, product=unit.product, start=unit.start), order.chunked
    lane_pairs = additions(unit.join, lanes) if isinstance(unit, Lanes) else []
    program = KernelProgram(
        unit=fixed,
        restarted=restarted,
        merge=Merge(partial=merge.partial, serial=merge.serial, atomic=merge.atomic) if count > 1 or merge.start == "zero" else Merge(),
        factors=(recipe.a, recipe.b),
        epilogue=plan_epilogue(recipe.epilogue, recipe.dtype),
    )
    slots = 1 << (count - 1).bit_length() if isinstance(unit, Steps) else count
    slice_pairs = _slice_additions(merge, count, slots)
    total = np.array(slice_pairs[-1][0] if slice_pairs else 0, np.int32)
    slice_pairs += [(slots + 1, slots + 1)] * (slots - count)
    data = KernelOrder(order.indices, order.closes, slices, np.zeros(slots, bool), _pair_array(lane_pairs), _pair_array(slice_pairs), total)
    return program, _pad_order(data)


def plan_merge(recipe: KernelRecipe, slots: int) -> MergePlan:
    """Returns the merge of a recipe's slices, as data: the first of `slots` sums, in as many additions, so that programs are shared."""
    merge = recipe.merge
    pairs = _slice_additions(merge, len(slice_indices(recipe.slices)), slots)
    total = np.array(pairs[-1][0] if pairs else 0, np.int32)
    waits = bool(pairs) and merge.partial != F32  # a single slice does not wait
    flags = waits, merge.rounds_slices, merge.rounds_running, isinstance(recipe.unit, Lanes) and recipe.unit.flush
    pairs += [(slots + 1, slots + 1)] * (slots - len(pairs))
    return MergePlan(_pair_array(pairs), total, *map(np.array, flags))


def _slice_additions(merge: Merge, count: int, zero: int) -> list[tuple[int, int]]:
    """Lists the additions of the slices. zero: index of a +0."""
    pairs = additions(merge.order, count)
    if merge.start == "zero":
        first = pairs[0][0] if pairs else 0
        pairs = [(zero, first), *((zero, i) for _, i in pairs)]
    return pairs


def _pair_array(pairs: list[tuple[int, int]]) -> np.ndarray:
    return np.array(pairs, np.int32).reshape(-1, 2)


def _pad_order(order: KernelOrder) -> KernelOrder:
    """Adds iterations that change nothing, so that their number is one of few and programs are shared."""
    iterations = len(order.indices)
    scale = 1 << max(iterations.bit_length() - 2, 0)
    missing = -iterations % scale

    def pad(x: np.ndarray, value: int) -> np.ndarray:
        return np.concatenate([x, np.full((missing, *x.shape[1:]), value, x.dtype)]) if len(x) else x

    last = order.slices[-1] if len(order.slices) else 0
    return order._replace(indices=pad(order.indices, EMPTY), closes=pad(order.closes, 0), slices=pad(order.slices, last))


@jit_wide_vectors(0)
def kernel_product_codes(program: KernelProgram, order: KernelOrder, a: Array, b: Array, operands: EpilogueOperands) -> Array:
    """Computes the codes of the result, [..., M, N]. a: codes [..., M, K]; b: codes [..., K, N]."""
    flush = isinstance(program.unit, Lanes) and program.unit.flush
    merge = program.merge
    merging = MergePlan(order.slice_additions, order.total, merge.partial != F32, merge.rounds_slices, merge.rounds_running, flush)
    return apply_epilogue(program.epilogue, merge_slices(merge.partial, merging, slice_sums(program, order, a, b)), operands)


def chain_flags(unit: Lanes) -> ChainFlags:
    return ChainFlags(unit.fused, unit.flush, unit.start == "first")


def slice_sums(program: KernelProgram, order: KernelOrder, a: Array, b: Array, chains: ChainFlags | None = None) -> Array:
    """Computes the sums of the slices before they are merged, f32 codes [S, ..., M, N]. Zeros may follow the recipe's slices.

    chains: Flags of the lanes as data; None: those of the unit, static.
    """
    rank = max(a.ndim, b.ndim)
    a, b = (x.reshape((1,) * (rank - x.ndim) + x.shape) for x in (a, b))
    fill = 1 << (program.factors[0].bits - 1)  # -0: see `tcemu.operations.products.product_arguments.pad_k`
    a = jnp.pad(a, [(0, 0)] * (rank - 1) + [(0, 1)], constant_values=np.array(fill, a.dtype))
    b = jnp.pad(b, [(0, 0)] * (rank - 2) + [(0, 1), (0, 0)])
    places = jnp.where(order.indices == EMPTY, a.shape[-1] - 1, order.indices)
    rank, axes = places.ndim, tuple(range(places.ndim))
    a = jnp.moveaxis(jnp.take(a, places, axis=-1), tuple(i - rank for i in axes), axes)
    b = jnp.moveaxis(jnp.take(b, places, axis=-2), tuple(i - rank - 1 for i in axes), axes)
    if isinstance(program.unit, Lanes):
        return _sum_lanes(program, order, a, b, chain_flags(program.unit) if chains is None else chains)
    return _sum_steps(program, order, a, b)


def _sum_steps(program: KernelProgram, order: KernelOrder, a: Array, b: Array) -> Array:
    """Computes the sums of the slices, f32 codes [S, ..., M, N]. a: [T, k, ..., M]; b: [T, k, ..., N]."""
    assert not isinstance(program.unit, Lanes)
    model, spec = program.unit
    a, b = jnp.moveaxis(a, 1, -1), jnp.moveaxis(b, 1, -2)  # [T, ..., M, k] and [T, ..., k, N]
    shape = (*jnp.broadcast_shapes(a.shape[1:-2], b.shape[1:-2]), a.shape[-2], b.shape[-1])

    def step(state: tuple[Array, Array], instruction: tuple) -> tuple[tuple[Array, Array], None]:
        (parts, running), (x, y, closes, number) = state, instruction
        running = multiply_matrices(model, spec, x, y, running)
        total = add(parts[number], running, F32) if program.restarted else running
        parts = parts.at[number].set(jnp.where(closes, total, parts[number]))
        return (parts, jnp.where(closes, 0, running)), None

    zeros = jnp.zeros((len(order.sum_slots), *shape), jnp.uint32)
    parts, running, *_ = match_varying_axes(zeros, jnp.zeros(shape, jnp.uint32), a, b)
    return lax.scan(step, (parts, running), (a, b, order.closes, order.slices))[0][0]


def _sum_lanes(program: KernelProgram, order: KernelOrder, a: Array, b: Array, chains: ChainFlags) -> Array:
    """Computes the sums of the slices, f32 codes [S, ..., M, N]. a: [T, S, L, ..., M]; b: [T, S, L, ..., N]."""
    assert isinstance(program.unit, Lanes)
    narrow, (format_a, format_b) = program.unit.product, program.factors

    def flush(x: Array) -> Array:
        return select(chains.flush, lambda: flush_subnormals(x), lambda: x)

    a, b = flush(convert(format_a, F32, a))[..., None], flush(convert(format_b, F32, b))[..., None, :]
    shape = jnp.broadcast_shapes(a.shape[1:], b.shape[1:])
    ones = (1,) * (len(shape) - 2)
    begin = select(chains.first, lambda: jnp.asarray(SIGN), lambda: jnp.uint32(0))  # -0 + x is x, whatever its sign

    def product(x: Array, y: Array) -> Array:
        exact = flush(multiply(x, y, F32))
        return exact if narrow is None else convert(narrow, F32, convert(F32, narrow, exact))

    def multiply_once(state: tuple[Array, Array, Array], elements: tuple) -> tuple[tuple[Array, Array, Array], None]:
        (total, begun, running), (x, y, closes) = state, elements
        running = flush(select(chains.fused, lambda: fma(x, y, running, F32), lambda: add(product(x, y), running, F32)))
        closes = closes.reshape(*closes.shape, *ones)
        closed = jnp.where(begun, flush(add(total, running, F32)), running) if program.restarted else running
        return (jnp.where(closes, closed, total), begun | closes, jnp.where(closes, begin, running)), None

    zeros = jnp.broadcast_to(begin, shape)
    total, begun, running, *_ = match_varying_axes(zeros, jnp.zeros(shape, bool), zeros, a, b)
    totals = lax.scan(multiply_once, (total, begun, running), (a, b, order.closes))[0][0]
    last = order.lane_additions[-1][0] if len(order.lane_additions) else 0
    return _apply_additions(jnp.moveaxis(totals, 1, 0), order.lane_additions, lambda x, y: flush(add(x, y, F32)))[last]


def _apply_additions(sums: Array, pairs: Array | np.ndarray, adding: Callable[[Array, Array], Array]) -> Array:
    """Applies additions (to, from), as of `kernel_order.additions`, to sums along the first axis."""
    if len(pairs) == 0:
        return sums

    def add_pair(sums: Array, pair: Array) -> tuple[Array, None]:
        return sums.at[pair[0]].set(adding(sums[pair[0]], sums[pair[1]])), None

    return lax.scan(add_pair, sums, jnp.asarray(pairs))[0]


def flush_subnormals(x: Array) -> Array:
    """Replaces the f32 codes of subnormal numbers by zeros of the same sign."""
    return jnp.where((x & EXPONENT) == 0, x & SIGN, x)


def merge_slices(partial: Format, plan: MergePlan, sums: Array) -> Array:
    """Merges the sums of slices [S, ...], f32 codes. partial: format in which narrow sums wait."""
    if len(plan.pairs) == 0:
        return sums[0]

    def round_waiting(x: Array) -> Array:
        return select(plan.narrow, lambda: round_through(partial, x), lambda: x)

    def add_sums(x: Array, y: Array) -> Array:
        exact = add(x, y, F32)
        total = select(plan.flush, lambda: flush_subnormals(exact), lambda: exact)
        return select(plan.rounds_running, lambda: round_waiting(total), lambda: total)

    first = plan.pairs[0][0]
    sums = select(plan.rounds_slices, lambda: round_waiting(sums), lambda: sums.at[first].set(round_waiting(sums[first])))
    zeros = jnp.zeros((2, *sums.shape[1:]), sums.dtype)  # a +0 to start from, and a slot for the additions that pad the program
    return _apply_additions(jnp.concatenate([sums, zeros]), plan.pairs, add_sums)[plan.total]


def operand_codes(fmt: Format, cast: str, x: Floats) -> Array:
    """Rounds an operand to the multiplied format. NumPy's float64 is rounded once, but to f32 first where cast is "RNA"."""
    source, codes = array_codes(x)
    if cast != "RNA" or fmt != TF32:
        return convert(source, fmt, codes, "RN" if cast == "RNA" else cast)
    codes = codes if source == F32 else convert(source, F32, codes)
    special = (codes & EXPONENT) == EXPONENT
    return jnp.where(special, convert(F32, TF32, codes), (codes + TF32_HALF) & TF32_BITS)


def kernel_output_codes(recipe: KernelRecipe, a: Array, b: Array, operands: EpilogueOperands) -> Array:
    """Computes the codes of the result, [..., M, N], from codes in the recipe's formats. Neither M nor N is 0."""
    program, order = plan_kernel(recipe)
    return kernel_product_codes(program, jax.tree.map(jnp.asarray, order), a, b, operands)
