"""`RowSum`: the order in which a thread block adds the elements of a row, as a value; and the sums themselves, on f32 codes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.base.meshes import match_varying_axes
from tcemu.base.records import Record
from tcemu.engine.arithmetic.f32_arithmetic import add_f32, fma_f32
from tcemu.engine.arithmetic.special_functions import MAGNITUDE, NAN, multiply_f32
from tcemu.engine.arithmetic.sum_tree import Chain, Join
from tcemu.operations.functional.torch_cuda.reductions import VECTORISED, tree_moments

LANES = 32  # threads of a warp
THREAD_ORDERS = ("tree", "chain")
LANE_ORDERS = ("far", "near")
WARP_ORDERS = ("far", "near", "chain")
JOINS = {"far": "folded", "near": "tree", "chain": "ascending"}  # orders of `sum_tree`
REGISTERS, WARPS, LANES_AXIS = -3, -2, -1  # axes of the elements of a tile
Folds = tuple[tuple[int, str], ...]
# Nonzero operands of at least 2^-100 are multiples of 2^-123. So is every partial sum, which then is no subnormal and is exact but for its
# rounding in the float addition of every device.
LEAST_EXACT = np.uint32((127 - 100) << 23)


@dataclass(frozen=True)
class RowSum(Record):
    """The order in which a thread block adds the elements of a row in f32.

    Element i of a tile belongs to register (i // (vector * lanes * warps)) * vector + i % vector of lane (i // vector) % lanes of warp
    (i // (vector * lanes)) % warps. A row is padded with zeros. Every thread adds its registers, then the lanes of a warp are added, then
    the warps. A row that fills fewer lanes or warps uses only those.

    Attributes:
        warps: Warps of the thread block, a power of two.
        vector: Neighbouring elements that a thread loads together, a power of two.
        tile: Elements that the block holds at once, a power of two. The threads add tile after tile, register by register, beginning with
            +0. None: the whole row is one tile, padded to a power of two, and nothing is added to +0.
        lanes: Lanes of a warp that share a row, a power of two up to 32. In the accumulator of an mma four lanes do, with vector=2 and
            warps=1.
        thread_order: How a thread adds its registers. "tree": neighbours in pairs, as Triton 3.9 does; "chain": in ascending order.
        lane_order: How the lanes of a warp are added. "far": lanes 16 apart first, then 8, 4, 2, 1, as Triton does; "near": 1, 2, 4, 8, 16,
            as CUB does.
        warp_order: How the warps are added. "far" and "near": as lanes; "chain": in ascending order, as CUB does.
        fused: A square is fused into the addition that follows. Of two squares that a thread adds in a tree, the first is fused and the
            second is rounded; where a thread has one square, the upper of two lanes fuses its own. In a chain, every square but a thread's
            first is fused.
        reversed_pairs: Numbers of the pairs of a thread's registers of which the second square is fused instead, as the compiler chose in
            some kernels.

    Raises:
        ValueError: A field has another value.
    """

    warps: int = 4
    vector: int = 1
    tile: int | None = None
    lanes: int = LANES
    thread_order: str = "tree"
    lane_order: str = "far"
    warp_order: str = "far"
    fused: bool = True
    reversed_pairs: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        choices = {"thread_order": THREAD_ORDERS, "lane_order": LANE_ORDERS, "warp_order": WARP_ORDERS}
        self.check_fields(flags="fused", counts="warps vector lanes", optional_counts="tile", **choices)
        for name in ("warps", "vector", "lanes", "tile"):
            value = getattr(self, name) or 1
            if value & (value - 1):
                raise ValueError(f"RowSum({name}={value!r}): expected a power of two")
        if self.lanes > LANES:
            raise ValueError(f"RowSum(lanes={self.lanes}): a warp has {LANES} lanes")
        pairs = self.reversed_pairs
        if not isinstance(pairs, tuple) or any(isinstance(pair, bool) or not isinstance(pair, int) or pair < 0 for pair in pairs):
            raise ValueError(f"RowSum(reversed_pairs={pairs!r}): expected a tuple of numbers of pairs, as (4,)")

    def sum(self, x: Array) -> Array:
        """Add the last axis.

        Args:
            x: f32 codes [..., N].

        Returns:
            f32 codes [..., 1].
        """
        tiles = self._arrange(x)
        start = () if self.tile is None else (jnp.zeros_like(tiles[..., :1, :, :, :]),)
        tiles = jnp.concatenate((*start, tiles), axis=-4)
        return _add_by_device_or_integers(lambda values, adder: self._add_threads(_chain(values, adder, -4)[..., 0, :, :, :], adder), tiles)

    def sum_squares(self, x: Array) -> Array:
        """Add the squares of the last axis; arguments and result as in `sum`."""
        tiles = self._arrange(x)
        if not self.fused:
            return self.sum(_square(x))
        if self.tile is not None:
            registers = _fma_chain(tiles, jnp.zeros_like(tiles[..., 0, :, :, :]))
        elif self.thread_order == "chain":
            terms = tiles[..., 0, :, None, :, :]
            registers = _fma_chain(terms[..., 1:, :, :, :], _square(terms[..., 0, :, :, :]))
        elif tiles.shape[-3] == 1:
            registers = _fuse_pairs(*_lane_pairs(tiles[..., 0, :, :, :], self.lane_order))
        else:
            first, second = tiles[..., 0, 0::2, :, :], tiles[..., 0, 1::2, :, :]
            swap = np.isin(np.arange(first.shape[-3]), self.reversed_pairs)[:, None, None]
            registers = _fuse_pairs(jnp.where(swap, second, first), jnp.where(swap, first, second))
        return _add_by_device_or_integers(self._add_threads, registers)

    def moments(self, x: Array) -> tuple[Array, Array]:
        """Return the mean of the last axis and the sum of the squares of x - mean, by Welford's updates.

        A thread takes its elements one after the other; the moments of lanes and of warps are joined in their orders. With n for the
        elements so far, an update is d = x - mean, mean = fma(1 / n, d, mean), squares = fma(d, x - mean, squares). Moments of n and of m
        elements, the other lane's, are joined to mean = fma(m / (n + m), mean', mean * (n / (n + m))) and squares = fma(d^2 * m,
        n / (n + m), squares' + squares) with d = mean - mean'. The quotients are products with the rounded reciprocal.

        Args:
            x: f32 codes [..., N].

        Returns:
            f32 codes [..., 1] of each.

        Source: the vectorised kernel of PyTorch, aten/src/ATen/native/cuda/layer_norm_kernel.cu, as nvcc fuses it.
        """
        columns = max(x.shape[-1], self.vector * self.lanes * self.warps)  # threads without an element are joined too, which rounds
        numbers = np.arange(1, columns + 1)
        places = self._arrange(np.where(numbers <= x.shape[-1], numbers, 0))[0] - 1  # [T, warps, lanes], EMPTY where 0 was
        tree = Join(Join(Chain(places.astype(np.int32)), JOINS[self.lane_order]), JOINS[self.warp_order])
        mean, squares, _ = tree_moments(VECTORISED, tree, jnp.moveaxis(x, -1, 0))
        return mean.codes[..., None], squares.codes[..., None]

    def _arrange(self, x: Any) -> Any:
        """Return an array of JAX or NumPy as [..., tiles, registers, warps, lanes], padded with zeros."""
        library: Any = np if isinstance(x, np.ndarray) else jnp
        count = x.shape[-1]
        tile = self.tile or 1 << max(count - 1, 0).bit_length()
        vector = min(self.vector, tile)
        lanes = min(self.lanes, tile // vector)
        warps = min(self.warps, tile // (vector * lanes))
        tiles = max(-(-count // tile), 1)
        x = library.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, tiles * tile - count)])
        x = x.reshape(*x.shape[:-1], tiles, -1, warps, lanes, vector)
        return library.moveaxis(x, -1, -3).reshape(*x.shape[:-5], tiles, -1, warps, lanes)

    def _add_threads(self, x: Array, adder: _Adder) -> Array:
        """Add [..., registers, warps, lanes] to [..., 1]."""
        folds = ((REGISTERS, "near"), (LANES_AXIS, self.lane_order), (WARPS, self.warp_order))
        if self.thread_order == "chain":
            x, folds = _chain(x, adder, REGISTERS), folds[1:]
        if self.warp_order == "chain":
            return _chain(adder.fold(x, folds[:-1]), adder, WARPS)[..., 0, 0]
        return adder.fold(x, folds)[..., 0, 0]


def _square(x: Array) -> Array:
    return multiply_f32(x, x)


def _fuse_pairs(first: Array, second: Array) -> Array:
    """Add the squares of two arrays, that of the first fused; those of the second alone where there is no first."""
    return fma_f32(first, first, _square(second)) if first.size else _square(second)


def _lane_pairs(x: Array, order: str) -> tuple[Array, Array]:
    """Return the upper and the lower lanes of [..., lanes] that are added first.

    In a butterfly every lane fuses its own square, so that the two lanes of a pair get different sums. All lanes of a warp store theirs at
    one address, and which store remains is undefined in PTX. Here it is that of the highest lane, as in `tcemu.ptx`.
    """
    half = x.shape[-1] // 2
    if half == 0:
        return x[..., :0], x
    return (x[..., half:], x[..., :half]) if order == "far" else (x[..., 1::2], x[..., 0::2])


def _fma_chain(tiles: Array, start: Array) -> Array:
    """Add the squares of [..., n, registers, warps, lanes] to `start` one after the other."""
    start, terms = match_varying_axes(start, jnp.moveaxis(tiles, -4, 0))
    return lax.scan(lambda total, x: (fma_f32(x, x, total), None), start, terms)[0]


def _chain(x: Array, adder: _Adder, axis: int) -> Array:
    """Add along an axis in ascending order. The axis keeps size 1."""
    terms = jnp.moveaxis(x, axis, 0)
    total = terms[0] if len(terms) == 1 else lax.scan(lambda total, term: (adder.add(total, term), None), terms[0], terms[1:])[0]
    return jnp.expand_dims(total, axis)


class _Adder(NamedTuple):
    """An addition, and sums in pairs along some of the axes registers, warps, lanes.

    Each fold is an axis and an order: neighbours first ("near") or halves first ("far"). An axis has 2^n elements and keeps one.
    """

    add: Callable[[Array, Array], Array]
    fold: Callable[[Array, Folds], Array]


def _fold_floats(x: Array, folds: Folds) -> Array:
    for axis, order in folds:
        x = jnp.moveaxis(x, axis, -1)
        while x.shape[-1] > 1:
            half = x.shape[-1] // 2
            x = x[..., 0::2] + x[..., 1::2] if order == "near" else x[..., :half] + x[..., half:]
        x = jnp.moveaxis(x, -1, axis)
    return x


def _fold_codes(x: Array, folds: Folds) -> Array:
    """Fold as a butterfly, in which all elements get the sum: its additions have one shape, and so are compiled once."""
    sizes: dict[int, int] = dict(zip((REGISTERS, WARPS, LANES_AXIS), x.shape[-3:], strict=True))
    partners = []
    for axis, order in folds:
        stride, count = int(np.prod([sizes[other] for other in range(axis + 1, 0)])), sizes[axis]
        distances = [stride << i for i in range(count.bit_length() - 1)]
        partners += distances if order == "near" else distances[::-1]
    kept = [slice(None)] * 3
    for axis, _ in folds:
        kept[axis] = slice(1)
    if partners:
        flat = x.reshape(*x.shape[:-3], -1)
        flat, indices = match_varying_axes(flat, jnp.asarray(np.arange(flat.shape[-1]) ^ np.array(partners)[:, None]))
        flat = lax.scan(lambda x, partner: (add_f32(x, jnp.take(x, partner, axis=-1)), None), flat, indices)[0]
        x = flat.reshape(x.shape)
    return x[(..., *kept)]


FLOATS, CODES = _Adder(jnp.add, _fold_floats), _Adder(add_f32, _fold_codes)


def _add_by_device_or_integers(reduce: Callable[[Array, _Adder], Array], codes: Array) -> Array:
    """Reduce f32 codes by the device's addition, or by integers where a sum may be subnormal."""

    def by_device(codes: Array) -> Array:
        total = reduce(lax.bitcast_convert_type(codes, jnp.float32), FLOATS)
        return jnp.where(jnp.isnan(total), NAN, lax.bitcast_convert_type(total, jnp.uint32))

    size = codes & MAGNITUDE
    exact = ((size >= LEAST_EXACT) | (size == 0)).all()
    return lax.cond(exact, by_device, lambda codes: reduce(codes, CODES), codes)
