"""What the tile kernel asks of an arithmetic, and what the arithmetics share."""

from collections.abc import Callable
from typing import Any, Protocol

import jax.numpy as jnp
from jax import Array, lax

from tcemu.arithmetic.dot_add import ProductSum, add_accumulator, decode_accumulator
from tcemu.arithmetic.model import Model
from tcemu.arithmetic.multiplicands import Scale
from tcemu.bits import Limbs
from tcemu.formats import F32

ABSENT = -(1 << 13)  # the exponent, in 16 bits, of what takes no part in the alignment
SIGN = -(1 << 31)
Loads = Callable[[int, Any], Array]  # (number of an operand's array, line of the step) -> [rows, 1] or [1, columns]


class Steps(Protocol):
    """The steps of one arithmetic, for the kernel in `tile`. Hashable: a compiled kernel belongs to each."""

    @property
    def assembly(self) -> bool:
        """The inner operations are PTX; else plain integers, for Pallas' interpret mode on any device."""
        ...

    @property
    def fraction_bits(self) -> int: ...
    @property
    def floor(self) -> int: ...
    @property
    def lost(self) -> int:
        """Fraction bits of f32 that a step's result gives up."""
        ...

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of D that a block of threads computes, powers of two; less where D is smaller."""
        ...

    @property
    def warps(self) -> int:
        """Of a block of threads, for a whole tile."""
        ...

    def prepare(self, side: int, codes: Array, scales: Scale | None, width: int) -> tuple[tuple[Array, ...], Array]:
        """A multiplicand as the kernel reads it, and which steps are special, int32 [batch or 1, steps].

        side: 0, A, or 1, B. codes: [batch, K, rows or columns]. width: of a tile; the arrays are cut by `tiles`.
        """
        ...

    def step(self, row: Loads, column: Loads, c: Array, special: Array) -> Array:
        """One step from the accumulator c, f32 bits in int32, to the next."""
        ...


def is_special(c: Array) -> Array:
    """Inf or NaN, by the bits of an f32."""
    return ((c >> 23) & 0xFF) == 0xFF


def own_exponent(c: Array) -> Array:
    """The exponent that an accumulator, f32 bits, brings to the alignment."""
    return jnp.where((c & ~SIGN) == 0, ABSENT, jnp.maximum((c >> 23) & 0xFF, 1) - F32.bias)


def end_in_integers(steps: Steps, negative: Array, magnitude: Limbs, exponent: Array, c: Array) -> Array:
    """What the PTX does at the end of a step: the products' sum, in units, and the accumulator c to f32 bits; c, if Inf or NaN, stays."""
    model = Model(F32, fraction_bits=steps.fraction_bits, floor=steps.floor, result_bits=F32.mantissa_bits - steps.lost)
    accumulator = decode_accumulator(F32, (lax.bitcast_convert_type(c, jnp.uint32),))
    products = ProductSum(negative, magnitude, exponent)
    (code,) = add_accumulator(model, products, accumulator)
    return jnp.where(is_special(c), c, lax.bitcast_convert_type(code, jnp.int32))


def tiles(v: Array, lines: int, width: int) -> Array:
    """[batch, steps * lines, tiles * width] -> [batch, tiles, steps, lines, width]: what a block of threads reads lies together."""
    return v.reshape(v.shape[0], -1, lines, v.shape[-1] // width, width).transpose(0, 3, 1, 2, 4)
