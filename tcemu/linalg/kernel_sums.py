"""A product by a kernel recipe: the engine. Codes in, codes out, integers all the way.

The order of the recipe is data, arrays of places along K, so that recipes of one shape share a compiled program, whatever their slices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.arithmetic.fma import add, fma
from tcemu.arithmetic.model import Model, Signature
from tcemu.arithmetic.program import multiply_add
from tcemu.arithmetic.quotient import multiply
from tcemu.compilation import wide_vectors
from tcemu.formats import F32, TF32, Format, array_codes, convert
from tcemu.linalg.kernel_order import NONE, additions, lane_order, places_of_slices, step_order
from tcemu.linalg.kernel_recipes import KernelRecipe, Lanes, Merge, Steps
from tcemu.linalg.kernel_totals import Extras, Finish, Flag, chosen, finish_of, finished, rounded_to
from tcemu.meshes import alike
from tcemu.operations.operands import signature_of

Floats = Array | np.ndarray
EXPONENT, SIGN = np.uint32(0x7F800000), np.uint32(0x80000000)  # of f32
KEPT, LAST = np.uint32(0xFFFFE000), np.uint32(0x1000)  # of a tf32 word: its bits, and half of its last one


class Run(NamedTuple):
    """What is static in a product: all but the order."""

    unit: tuple[Model, Signature] | Lanes  # of Lanes only how each sum is rounded and begun; the rest is in the order
    restarted: bool
    merge: Merge  # its order is in the order too
    factors: tuple[Format, Format]
    finish: Finish


class Order(NamedTuple):
    """What is data: see `kernel_order`. pairs: the additions of lanes, and those of slices, [P, 2] each."""

    places: np.ndarray
    closes: np.ndarray
    slices: np.ndarray  # of Steps: [T]; of Lanes: none
    numbers: np.ndarray  # [S]: nothing but how many sums the program keeps, as many as there are slices or more
    of_lanes: np.ndarray
    of_slices: np.ndarray
    total: np.ndarray  # where the last addition of slices has the total


class Merging(NamedTuple):
    """How the sums of slices become one."""

    pairs: Array | np.ndarray  # [P, 2]: the additions
    total: Array | np.ndarray  # where the last one has the total
    narrow: Flag  # sums wait in a format narrower than f32
    serial: Flag
    flush: Flag


class Chains(NamedTuple):
    """How a lane's chain is rounded and begun: fields of `Lanes`."""

    fused: Flag
    flush: Flag
    first: Flag


def run_of(recipe: KernelRecipe) -> tuple[Run, Order]:
    """A recipe as what is compiled, and what that program is given."""
    unit, merge = recipe.unit, recipe.merge
    if isinstance(unit, Steps):
        order = step_order(unit, recipe.slices)
        count, lanes = int(order.slices[-1]) + 1, 1
        fixed, slices = (unit.arithmetic, signature_of(unit.op)), order.slices
        restarted = order.restarted
    else:
        order = lane_order(unit, recipe.slices)
        (_, count, lanes), slices = order.places.shape, np.zeros(0, np.int32)
        fixed, restarted = Lanes(fused=unit.fused, flush=unit.flush, product=unit.product, start=unit.start), order.chunked
    of_lanes = additions(unit.join, lanes) if isinstance(unit, Lanes) else []
    run = Run(
        unit=fixed,
        restarted=restarted,
        merge=Merge(partial=merge.partial, serial=merge.serial) if count > 1 or merge.start == "zero" else Merge(),
        factors=(recipe.a, recipe.b),
        finish=finish_of(recipe.epilogue, recipe.out),
    )
    kept = 1 << (count - 1).bit_length() if isinstance(unit, Steps) else count
    of_slices = _of_slices(merge, count, kept)
    total = np.array(of_slices[-1][0] if of_slices else 0, np.int32)
    of_slices += [(kept + 1, kept + 1)] * (kept - count)
    data = Order(order.places, order.closes, slices, np.zeros(kept, bool), _pairs(of_lanes), _pairs(of_slices), total)
    return run, _filled(data)


def merging_of(recipe: KernelRecipe, kept: int) -> Merging:
    """How a recipe's slices are merged, as data: the first of so many sums, in as many additions, so that programs are shared."""
    merge = recipe.merge
    pairs = _of_slices(merge, len(places_of_slices(recipe.slices)), kept)
    total = np.array(pairs[-1][0] if pairs else 0, np.int32)
    waits = bool(pairs) and merge.partial != F32  # one slice alone does not
    flags = waits, merge.serial, isinstance(recipe.unit, Lanes) and recipe.unit.flush
    pairs += [(kept + 1, kept + 1)] * (kept - len(pairs))
    return Merging(_pairs(pairs), total, *map(np.array, flags))


def _of_slices(merge: Merge, count: int, zero: int) -> list[tuple[int, int]]:
    """The additions of the slices. zero: where +0 is."""
    pairs = additions(merge.order, count)
    if merge.start == "zero":
        first = pairs[0][0] if pairs else 0
        pairs = [(zero, first), *((zero, i) for _, i in pairs)]
    return pairs


def _pairs(pairs: list[tuple[int, int]]) -> np.ndarray:
    return np.array(pairs, np.int32).reshape(-1, 2)


def _filled(order: Order) -> Order:
    """The order with turns that add nothing, so that their number is one of few and programs are shared."""
    turns = len(order.places)
    scale = 1 << max(turns.bit_length() - 2, 0)
    missing = -turns % scale

    def longer(x: np.ndarray, value: int) -> np.ndarray:
        return np.concatenate([x, np.full((missing, *x.shape[1:]), value, x.dtype)]) if len(x) else x

    last = order.slices[-1] if len(order.slices) else 0
    return order._replace(places=longer(order.places, NONE), closes=longer(order.closes, 0), slices=longer(order.slices, last))


@wide_vectors(0)
def product(run: Run, order: Order, a: Array, b: Array, extras: Extras) -> Array:
    """Codes of the result, [..., M, N]. a: codes [..., M, K]; b: codes [..., K, N]."""
    flush = isinstance(run.unit, Lanes) and run.unit.flush
    merging = Merging(order.of_slices, order.total, run.merge.partial != F32, run.merge.serial, flush)
    return finished(run.finish, merged(run.merge.partial, merging, sums_of_slices(run, order, a, b)), extras)


def chains_of(unit: Lanes) -> Chains:
    return Chains(unit.fused, unit.flush, unit.start == "first")


def sums_of_slices(run: Run, order: Order, a: Array, b: Array, chains: Chains | None = None) -> Array:
    """f32 codes [S, ..., M, N], before they are merged; beyond the recipe's slices there may be zeros.

    chains: of lanes; None: those of the unit, static.
    """
    rank = max(a.ndim, b.ndim)
    a, b = (x.reshape((1,) * (rank - x.ndim) + x.shape) for x in (a, b))
    fill = 1 << (run.factors[0].bits - 1)  # -0: see `tcemu.linalg.shapes.fill`
    a = jnp.pad(a, [(0, 0)] * (rank - 1) + [(0, 1)], constant_values=np.array(fill, a.dtype))
    b = jnp.pad(b, [(0, 0)] * (rank - 2) + [(0, 1), (0, 0)])
    places = jnp.where(order.places == NONE, a.shape[-1] - 1, order.places)
    rank, axes = places.ndim, tuple(range(places.ndim))
    a = jnp.moveaxis(jnp.take(a, places, axis=-1), tuple(i - rank for i in axes), axes)
    b = jnp.moveaxis(jnp.take(b, places, axis=-2), tuple(i - rank - 1 for i in axes), axes)
    if isinstance(run.unit, Lanes):
        return _by_lanes(run, order, a, b, chains_of(run.unit) if chains is None else chains)
    return _by_steps(run, order, a, b)


def _by_steps(run: Run, order: Order, a: Array, b: Array) -> Array:
    """f32 codes [S, ..., M, N]: the sums of the slices. a: [T, k, ..., M]; b: [T, k, ..., N]."""
    assert not isinstance(run.unit, Lanes)
    model, signature = run.unit
    a, b = jnp.moveaxis(a, 1, -1), jnp.moveaxis(b, 1, -2)  # [T, ..., M, k] and [T, ..., k, N]
    shape = (*jnp.broadcast_shapes(a.shape[1:-2], b.shape[1:-2]), a.shape[-2], b.shape[-1])

    def step(state: tuple[Array, Array], turn: tuple) -> tuple[tuple[Array, Array], None]:
        (parts, running), (x, y, closes, number) = state, turn
        running = multiply_add(model, signature, x, y, running)
        total = add(parts[number], running, F32) if run.restarted else running
        parts = parts.at[number].set(jnp.where(closes, total, parts[number]))
        return (parts, jnp.where(closes, 0, running)), None

    zeros = jnp.zeros((len(order.numbers), *shape), jnp.uint32)
    parts, running, *_ = alike(zeros, jnp.zeros(shape, jnp.uint32), a, b)
    return lax.scan(step, (parts, running), (a, b, order.closes, order.slices))[0][0]


def _by_lanes(run: Run, order: Order, a: Array, b: Array, chains: Chains) -> Array:
    """f32 codes [S, ..., M, N]. a: [T, S, L, ..., M]; b: [T, S, L, ..., N]."""
    assert isinstance(run.unit, Lanes)
    narrow, (of_a, of_b) = run.unit.product, run.factors

    def kept(x: Array) -> Array:
        return chosen(chains.flush, lambda: flushed(x), lambda: x)

    a, b = kept(convert(of_a, F32, a))[..., None], kept(convert(of_b, F32, b))[..., None, :]
    shape = jnp.broadcast_shapes(a.shape[1:], b.shape[1:])
    ones = (1,) * (len(shape) - 2)
    begin = chosen(chains.first, lambda: jnp.asarray(SIGN), lambda: jnp.uint32(0))  # -0 + x is x, whatever its sign

    def product(x: Array, y: Array) -> Array:
        exact = kept(multiply(x, y, F32))
        return exact if narrow is None else convert(narrow, F32, convert(F32, narrow, exact))

    def turn(state: tuple[Array, Array, Array], given: tuple) -> tuple[tuple[Array, Array, Array], None]:
        (total, begun, running), (x, y, closes) = state, given
        running = kept(chosen(chains.fused, lambda: fma(x, y, running, F32), lambda: add(product(x, y), running, F32)))
        closes = closes.reshape(*closes.shape, *ones)
        closed = jnp.where(begun, kept(add(total, running, F32)), running) if run.restarted else running
        return (jnp.where(closes, closed, total), begun | closes, jnp.where(closes, begin, running)), None

    zeros = jnp.broadcast_to(begin, shape)
    total, begun, running, *_ = alike(zeros, jnp.zeros(shape, bool), zeros, a, b)
    totals = lax.scan(turn, (total, begun, running), (a, b, order.closes))[0][0]
    last = order.of_lanes[-1][0] if len(order.of_lanes) else 0
    return _added(jnp.moveaxis(totals, 1, 0), order.of_lanes, lambda x, y: kept(add(x, y, F32)))[last]


def _added(sums: Array, pairs: Array | np.ndarray, adding: Callable[[Array, Array], Array]) -> Array:
    """Sums along the first axis after the additions (to, from) of `kernel_order.additions`."""
    if len(pairs) == 0:
        return sums

    def one(sums: Array, pair: Array) -> tuple[Array, None]:
        return sums.at[pair[0]].set(adding(sums[pair[0]], sums[pair[1]])), None

    return lax.scan(one, sums, jnp.asarray(pairs))[0]


def flushed(x: Array) -> Array:
    """f32 codes with zeros in place of subnormal numbers, of the same sign."""
    return jnp.where((x & EXPONENT) == 0, x & SIGN, x)


def merged(partial: Format, how: Merging, sums: Array) -> Array:
    """The total of the slices, f32 codes. partial: the format in which sums wait where they are narrow; sums: [S, ...]."""
    if len(how.pairs) == 0:
        return sums[0]

    def waiting(x: Array) -> Array:
        return chosen(how.narrow, lambda: rounded_to(partial, x), lambda: x)

    def adding(x: Array, y: Array) -> Array:
        exact = add(x, y, F32)
        total = chosen(how.flush, lambda: flushed(exact), lambda: exact)
        return chosen(how.serial, lambda: waiting(total), lambda: total)

    first = how.pairs[0][0]
    sums = chosen(how.serial, lambda: sums.at[first].set(waiting(sums[first])), lambda: waiting(sums))
    zeros = jnp.zeros((2, *sums.shape[1:]), sums.dtype)  # +0 to start from, and what additions that fill the program up change
    return _added(jnp.concatenate([sums, zeros]), how.pairs, adding)[how.total]


def operand_codes(fmt: Format, cast: str, x: Floats) -> Array:
    """An operand's codes in the format that is multiplied. NumPy's float64 is rounded once, but to f32 first where cast is "RNA"."""
    source, codes = array_codes(x)
    if cast != "RNA" or fmt != TF32:
        return convert(source, fmt, codes, "RN" if cast == "RNA" else cast)
    codes = codes if source == F32 else convert(source, F32, codes)
    special = (codes & EXPONENT) == EXPONENT
    return jnp.where(special, convert(F32, TF32, codes), (codes + LAST) & KEPT)


def outputs(recipe: KernelRecipe, a: Array, b: Array, extras: Extras) -> Array:
    """Codes of the result, [..., M, N], of operands as codes in the recipe's formats. Neither M nor N is 0."""
    run, order = run_of(recipe)
    return product(run, jax.tree.map(jnp.asarray, order), a, b, extras)
